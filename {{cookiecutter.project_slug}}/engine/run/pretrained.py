"""Initial weights, published ones or those of a file, as far as they match the network."""

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping

import torch
import torchvision
from torch import Tensor, nn

from engine.errors import DiskError, UserError, shorten
from engine.ranks import distributed
from engine.run import checkpoint

KEYS = ("model", "state_dict", "model_state_dict")  # under which programs save weights
SECONDS = 10.0  # without an answer, after which a download fails
WRAPPERS = {"module", "_orig_mod"}  # what DDP, averages and torch.compile add to names


def load(
    model: nn.Module,
    weights: str,
    published: str | None,
    read: Callable[[str], Mapping[str, Tensor]],
) -> str:
    """Copy --weights into `model`, alike on all ranks; return their name, or "none".

    weights: a name or file for `read`; "none"; or "auto", which stands for `published`, or for
        "none" if those cannot be had.
    published: the name of this network's published weights; None if there are none.
    read: returns tensors by name. Only rank 0 calls it, so that only rank 0 downloads.
    """
    is_auto = weights == "auto"
    name = (published or "none") if is_auto else weights
    if name == "none":
        if is_auto:
            distributed.say("--weights auto: none are published for this network; from scratch")
        return name
    if is_auto:
        distributed.say(f"--weights auto: {name}, downloaded unless cached ...")
    found = distributed.await_rank_zero(attempt, read, name)
    if not isinstance(found, str):
        copy_matching(model, found)
        return name
    if not is_auto:
        raise UserError(found)
    distributed.say(f"{found}; starts from scratch; use --weights FILE, or --weights none")
    return "none"


def attempt(read: Callable[[str], Mapping[str, Tensor]], name: str) -> Mapping[str, Tensor] | str:
    """Return what `read` does, or a line that says why it fails."""
    try:
        with time_limit():
            return read(name)
    except DiskError:
        raise
    except UserError as error:
        return str(error)
    except Exception as error:  # urllib, httpx and huggingface_hub have no common one
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        return f"--weights {name}: download failed ({reason})"


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """End a connection without an answer after SECONDS; torch.hub would wait for ever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def published_by_torchvision(arch: str) -> str | None:
    """Return the name of torchvision's best weights for `arch`, or None."""
    if arch not in torchvision.models.list_models():
        return None
    choices = torchvision.models.get_model_weights(arch)
    return choices["DEFAULT"].name if "DEFAULT" in choices.__members__ else None


def read_weights(weights: str, arch: str) -> dict[str, Tensor]:
    """Return a state dict: of a file (a checkpoint or a state dict) or of torchvision.

    weights: the path of a .pt or .pth file, or a name that torchvision has for `arch`.
    """
    if is_file(weights):
        return find_tensors(checkpoint.read_file(weights))
    choices = torchvision.models.get_model_weights(arch)
    if weights not in choices.__members__:
        names = ", ".join(choices.__members__)
        raise UserError(f"--weights {weights}: {arch} has {names}; or name a .pt file")
    return choices[weights].get_state_dict(progress=False, check_hash=True)


def is_file(weights: str) -> bool:
    return weights.endswith((".pt", ".pth"))


def find_tensors(state: checkpoint.State) -> dict[str, Tensor]:
    """Return the tensors of a file: at its top, under one of KEYS, or under two of them."""
    for _ in range(2):
        inner = [state[key] for key in KEYS if isinstance(state.get(key), dict)]
        state = inner[0] if inner else state
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def bare(name: str) -> str:
    """Return the name of a tensor without what wrappers of its network have added."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while parts[0] in ("net", "model") and len(parts) > 1:
        del parts[0]
    return ".".join(parts)


def set_channels(model: nn.Module, channels: int) -> nn.Module:
    """Have the first convolution of `model`, for RGB, take so many channels; return the model."""
    first = next(m for m in model.modules() if isinstance(m, nn.Conv2d) and m.in_channels == 3)
    if channels != 3:
        first.in_channels = channels
        shape = first.out_channels, channels, *first.kernel_size
        first.weight = nn.Parameter(first.weight.new_empty(shape))
        first.reset_parameters()
    return model


def adapt(weight: Tensor, shape: torch.Size) -> Tensor:
    """Return the `weight` of a convolution of RGB for one of that shape; others as they are.

    As timm does (adapt_input_conv in timm/models/_manipulate.py): grey sums the three channels,
    more repeat them, scaled so that the result is about as large as before.
    """
    channels = shape[1] if len(shape) == 4 else 3
    if weight.ndim != 4 or weight.shape[1] != 3 or channels == 3:
        return weight
    if channels == 1:
        return weight.sum(1, keepdim=True)
    return weight.repeat(1, -(-channels // 3), 1, 1)[:, :channels] * (3 / channels)


def copy_matching(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy the tensors whose names and shapes match, and print which of `model` do not.

    The first layer's for RGB are adapted if `model` takes another number of channels.
    Names match without their wrappers, too: a file may have `module.fc.weight` for `fc.weight`.
    """
    own = model.state_dict()
    name_of = {bare(name): name for name in own}
    named = {name_of.get(bare(name), name): value for name, value in weights.items()}
    named.update({name: value for name, value in weights.items() if name in own})
    named.update({k: adapt(v, own[k].shape) for k, v in named.items() if k in own})
    fitting = {k: v for k, v in named.items() if k in own and own[k].shape == v.shape}
    if not fitting:
        first, mine = next(iter(weights), "nothing"), next(iter(own))
        raise UserError(
            "--weights: no tensor has the same name and shape as one of this network, which begins "
            f"with {mine}; the file begins with {first}"
        )
    model.load_state_dict(fitting, strict=False)
    new = [name for name in own if name not in fitting]
    line = f"--weights: {len(fitting)} of {len(own)} tensors loaded"
    distributed.say(f"{line}; new: {shorten(new)}" if new else line)
