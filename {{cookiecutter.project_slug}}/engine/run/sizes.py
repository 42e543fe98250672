"""Which images a network takes, on the device meta: shapes and gradients without numbers."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from engine.errors import UserError

ERRORS = (AssertionError, RuntimeError, ValueError)  # of networks, about sizes


def fit_input(build: Callable[[], nn.Module], size: int, channels: int = 3) -> nn.Module:
    """Return the network that `build` makes, whose first convolution takes so many channels.

    size: side of the training images in pixels. The network has to take float32 (N, channels, size,
    size); if its first convolution is for RGB and `channels` are not 3, that one is replaced.

    Raises a UserError if it cannot take such images; to find out takes no time.

        model = engine.fit_input(lambda: Net(len(classes)), args.image_size, channels)
    """
    try:
        model = set_channels(build(), channels)
        forward(model, size, channels)
    except ERRORS as error:
        raise UserError(
            f"--image-size {size}: this network cannot take such images ({reason(error)}); use "
            "another size, such as 224"
        ) from None
    return model


def set_channels(model: nn.Module, channels: int) -> nn.Module:
    """Have the first convolution of `model`, if it is for RGB, take so many channels instead."""
    first = next((each for each in model.modules() if isinstance(each, nn.Conv2d)), None)
    if first is not None and first.in_channels == 3 != channels:
        first.in_channels = channels
        shape = first.out_channels, channels, *first.kernel_size
        first.weight = nn.Parameter(first.weight.new_empty(shape))
        first.reset_parameters()
    return model


def freeze_unused(model: nn.Module, step: int, channels: int = 3) -> nn.Module:
    """Freeze the weights of `model` that its output does not depend on; return it.

    Some encoders have layers that no decoder reads; DDP would wait for their gradients.
    step: of the sides of images, float32 (N, channels, i * step, j * step), which `model` takes.

    Raises a UserError if it does not.

        model = engine.freeze_unused(smp.create_model("unet", "mobilenet_v2"), 32)
    """
    try:
        output, weights = forward(model, 5 * step, channels)
    except ERRORS as error:
        raise UserError(
            f"this network cannot take images of {5 * step} x {5 * step} pixels ({reason(error)}), "
            f"but validation pads images to multiples of {step}: choose another"
        ) from None
    gradients = torch.autograd.grad(output.sum(), list(weights.values()), allow_unused=True)
    for weight, gradient in zip(model.parameters(), gradients, strict=True):
        weight.requires_grad_(gradient is not None)
    return model


def forward(model: nn.Module, size: int, channels: int = 3) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output for an image of `size` x `size` pixels, and the weights that it is made of.

    In evaluation mode. All tensors are on the device meta; `model` stays where it is.
    """
    was_training = model.training
    try:
        return _forward(model.eval(), (channels, size, size), "meta")
    except RuntimeError as error:
        if isinstance(error, NotImplementedError) or "meta tensors" in str(error):
            # A layer needs numbers, or the network decides by some.
            return _forward(model, (channels, size, size), "cpu")
        raise
    finally:
        model.train(was_training)


def _forward(
    model: nn.Module, shape: tuple[int, ...], device: str
) -> tuple[Tensor, dict[str, Tensor]]:
    weights = {name: w.detach().to(device).requires_grad_() for name, w in model.named_parameters()}
    buffers = {name: buffer.to(device) for name, buffer in model.named_buffers()}
    image = torch.zeros(1, *shape, device=device)
    return functional_call(model, {**weights, **buffers}, image), weights


def reason(error: Exception) -> str:
    return " ".join(str(error).split())


def explain(error: Exception) -> UserError | None:
    """Return a line for an `error` of BatchNorm, which needs two values per channel to train."""
    if "Expected more than 1 value per channel when training" not in str(error):
        return None
    return UserError(
        "BatchNorm has a single value per channel to train on: use --batch-size 2 or more, or a "
        "larger --image-size"
    )
