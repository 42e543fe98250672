"""Which image sizes a network takes, on the device meta: shapes and gradients without numbers."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from engine.errors import UserError

ERRORS = (AssertionError, RuntimeError, ValueError)  # of networks, about sizes
STEPS = 14, 16  # of sizes that may be suggested: most networks take multiples of one of these
FARTHEST = 256  # pixels, from the size that was asked for


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


def check(build: Callable[[int], nn.Module], size: int, name: str, channels: int = 3) -> nn.Module:
    """Return `build(size)`, a network called `name`; a UserError if it does not take that size."""
    try:
        model = build(size)
        forward(model, size, channels)
        return model
    except ERRORS as error:
        reason = " ".join(str(error).split())
    others = sorted({n for step in STEPS for n in range(step, size + FARTHEST, step)})
    below = [n for n in reversed(others) if size - FARTHEST < n < size]
    above = [n for n in others if n > size]
    with torch.device("meta"):  # where building takes no time
        near = [
            next((str(n) for n in way if takes(build, n, channels)), "") for way in (below, above)
        ]
    remedy = f"; use {' or '.join(filter(None, near))}" if any(near) else f" ({reason})"
    raise UserError(f"--image-size {size}: {name} cannot take such images{remedy}")


def explain(error: Exception) -> UserError | None:
    """Return a line for an `error` of BatchNorm, which needs two values per channel to train."""
    if "Expected more than 1 value per channel when training" not in str(error):
        return None
    return UserError(
        "BatchNorm has a single value per channel to train on: use --batch-size 2 or more, or a "
        "larger --image-size"
    )


def takes(build: Callable[[int], nn.Module], size: int, channels: int) -> bool:
    """Return whether `build(size)` takes images of that size."""
    try:
        forward(build(size), size, channels)
    except ERRORS:
        return False
    return True
