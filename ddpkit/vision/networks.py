"""Which images a network takes: how many channels, how large; and what it does not use."""

import contextlib
import copy
import traceback
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from ddpkit.errors import UserError, reason_of, shorten, suggest
from ddpkit.ranks import distributed, failures, replicas
from ddpkit.run.outputs import Outputs, map_tensors

# take the name of a network first
FACTORIES = {"create_model", "get_model", "get_pretrained_cfg"}
OF_LIBRARIES = ("segmentation_models_pytorch", "timm.", "torchvision.")


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Leave the hub alone in the block: what it describes is built if its cache has it."""
    import huggingface_hub as hub

    before = hub.constants.HF_HUB_OFFLINE
    hub.constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        hub.constants.HF_HUB_OFFLINE = before


def adapt_input(model: nn.Module, size: int, channels: int = 3, step: int = 0) -> None:
    """Have `model` take images float32 (N, channels, size, size), as its training has them.

    A first convolution for RGB is made anew for other channels.
    step: of the sides of images (N, channels, i * step, j * step), if it takes any such; weights
        that no output depends on, as in some encoders, are frozen, or DDP would wait; a line names
        them.

    Raises a UserError if it cannot take such images.

        model = torchvision.models.resnet18(num_classes=len(classes))
        ddpkit.adapt_input(model, args.image_size, channels)
    """
    convolutions = (each for each in model.modules() if isinstance(each, nn.Conv2d))
    entry = next(convolutions, None)
    # made for RGB, while the images have other channels
    if entry and entry.in_channels == 3 != channels:
        entry.in_channels = channels
        shape = list(entry.weight.shape)
        shape[1] = channels
        entry.weight = nn.Parameter(entry.weight.new_empty(shape))
        entry.reset_parameters()
    if step:
        freeze_unused(model, step, channels)
    with torch.no_grad():
        try_forward(model, size, channels, "use another --image-size, such as 224")


def freeze_unused(model: nn.Module, step: int, channels: int) -> None:
    """Freeze the weights of `model` that no output depends on, in evaluation or in training."""
    remedy = f"validation pads images to multiples of {step}: choose another model"
    size = 5 * step
    names = without_gradient(model, try_forward(model, size, channels, remedy))
    if names:
        # An auxiliary head, for instance, has an output in training alone.
        names = without_gradient_in_training(model, size, channels, names)
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    if names and distributed.is_joined():  # predict.py has no use for it
        line = f"{len(names)} weights are frozen because no output depends on them"
        distributed.print0(f"{line}: {shorten(names)}")


def without_gradient_in_training(
    model: nn.Module, size: int, channels: int, otherwise: list[str]
) -> list[str]:
    """Return the weights that no output depends on in training; `otherwise` if it cannot be tried.

    The network, such as BatchNorm's statistics, and the random numbers to come remain as they are.
    """
    try:
        twin = copy.deepcopy(model).train()
        with torch.random.fork_rng(devices=[]):  # networks are built on the CPU
            images = torch.rand(2, channels, size, size)  # BatchNorm needs two
            outputs = twin(images.to(next(twin.parameters()).device))
        return without_gradient(twin, outputs)
    except (AssertionError, LookupError, RuntimeError, TypeError, ValueError):
        # such as one that takes targets
        return otherwise


def without_gradient(model: nn.Module, outputs: Outputs) -> list[str]:
    """Return the names of weights that are trained, and on which nothing in `outputs` depends."""
    sums: list[Tensor] = []

    def add_sum(output: Tensor) -> Tensor:
        if output.requires_grad:
            sums.append(output.sum().real)
        return output

    map_tensors(add_sum, outputs)
    trained = {
        name: each for name, each in model.named_parameters() if each.requires_grad
    }
    if not sums:
        return list(trained)
    gradients = torch.autograd.grad(sums, list(trained.values()), allow_unused=True)
    return [name for name, each in zip(trained, gradients, strict=True) if each is None]


def try_forward(model: nn.Module, size: int, channels: int, remedy: str) -> Outputs:
    """Return what the network returns for a black image, in evaluation mode."""
    device = next(model.parameters()).device
    try:
        # which leaves BatchNorm's statistics as they are
        with replicas.in_evaluation(model):
            return model(torch.zeros(1, channels, size, size, device=device))
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        line = f"this model does not accept images of {size} x {size} pixels"
        raise UserError(f"{line} ({reason_of(error, 300)}): {remedy}") from None


def check_names(arch: str, encoder: str) -> None:
    """Raise a UserError if no library has the network `arch`, a decoder if it has an encoder."""
    from torchvision import models

    arch = arch.lower()  # as libraries look it up
    if not encoder:
        check_name("--arch", arch, models.list_models(module=models), "timm/")
        return
    import segmentation_models_pytorch as smp

    known = models.list_models(module=models.segmentation)
    known += smp.MODEL_ARCHITECTURES_MAPPING
    check_name("--arch", arch, known)
    # smp reads its older names of timm's encoders by itself
    if not encoder.startswith("timm-"):
        check_name("--encoder", encoder, smp.encoders.encoders, "tu-")


def check_name(flag: str, name: str, known: Iterable[str], of_timm: str = "") -> None:
    """Raise a UserError unless `name` is known; of_timm: how names begin that timm has to know."""
    import timm

    names = list(known)
    if of_timm:
        bare = name.removeprefix(of_timm)
        # hf-hub:... is one that timm asks its hub for
        if bare != name and (timm.is_model(bare) or ":" in bare):
            return
        names += [f"{of_timm}{each}" for each in timm.list_models()]
    if name not in names:
        raise UserError(
            f"{flag} {name}: no model of that name for this task{suggest(name, names)}"
        )


def explain_network(error: Exception) -> UserError | None:
    """Return a line if a library cannot make the network of a name that model.py gives it."""
    # Of the calls on the way to the error: the function of a library that took the name.
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name in FACTORIES and module.startswith(OF_LIBRARIES):
            name = frame.f_locals[frame.f_code.co_varnames[0]]  # its first argument
            arch = f"timm/{name}" if module.startswith("timm.") else name
            said = reason_of(error, 300).rstrip(".")
            if "downsampling pattern" in said:  # of a ViT, whose maps have one size
                said += ": use --arch dpt"
            return UserError(f"--arch {arch}: {said}")
    return None


failures.explainers.append(explain_network)
