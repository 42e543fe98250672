"""The gradients of an optimizer step: of the mean over all samples of all ranks and passes."""

from collections.abc import Iterable

import torch
from torch import Tensor

from engine.errors import UserError
from engine.ranks import devices, distributed


class Mean:
    """Turns summed gradients into those of the mean, where samples have unequal counts.

    Ranks and passes hold different numbers of labelled pixels, so the mean of their means would
    weigh a pixel more where there are few. Each pass divides its sum of losses by `size`, the same
    on all, and the step divides by the count of all: one number, reduced during backward().
    """

    def __init__(self, device: torch.device) -> None:
        self.count = torch.zeros((), dtype=devices.double(device), device=device)
        self.pending: distributed.Pending | None = None

    def add(self, count: Tensor, targets: Tensor, is_last: bool) -> int:
        """Add the count of a pass, a scalar; return the size. Call it before backward().

        The size is the number of targets, of which those with a share for each class,
        floating-point (N, classes, ...), are one each.
        """
        has_shares = targets.is_floating_point() and targets.ndim > 1
        size = targets.numel() // (targets.shape[1] if has_shares else 1)
        self.count += count.to(self.count.dtype) / size
        if is_last:
            self.pending = distributed.start_sum(self.count)
        return size

    def finish(self, weights: Iterable[Tensor]) -> None:
        """Divide the gradients of `weights`, which DDP has averaged over the ranks; start anew."""
        assert self.pending, "call add first"
        self.pending.wait()
        factor = (distributed.world_size() / self.count).where(self.count > 0, 0)
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        if not gradients:
            raise UserError(
                "no weight has a gradient at the end of a step: call backward() on the loss"
            )
        for device in {gradient.device for gradient in gradients}:
            own = [gradient for gradient in gradients if gradient.device == device]
            torch._foreach_mul_(own, factor.float().to(device))
        self.count.zero_()
