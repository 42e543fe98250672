"""The gradients of an optimizer step: of the mean over all samples of all ranks and passes."""

import itertools

import torch
from torch import Tensor, nn

from engine.errors import UserError
from engine.ranks import devices, distributed


class Mean:
    """Turns summed gradients into those of the mean, where samples have unequal counts.

    Ranks and passes hold different numbers of labelled pixels, so the mean of their means would
    weigh a pixel more where there are few. Each pass divides its sum of losses by `size`, the same
    on all, and the step divides by the count of all: one number, reduced during backward().

    A count that is an int instead of a tensor has to be the size. Then it is the same on all ranks,
    and nothing has to be reduced.
    """

    def __init__(self, device: torch.device) -> None:
        self.found_in: nn.Module | None = None
        self.weights: dict[torch.device, list[nn.Parameter]] = {}
        self.zero = torch.zeros((), dtype=devices.double(device), device=device)
        self.count, self.passes = self.zero, 0  # of counts that are tensors, and that are ints
        self.sizes: dict[int, Tensor] = {}  # on the device
        self.pending: distributed.Pending | None = None

    def add(self, count: Tensor | int, targets: Tensor, is_last: bool) -> int:
        """Add the count of a pass, a scalar; return the size. Call it before backward().

        The size is the number of targets, of which those with a share for each class,
        floating-point (N, classes, ...), are one each.
        """
        has_shares = targets.is_floating_point() and targets.ndim > 1
        size = targets.numel() // (targets.shape[1] if has_shares else 1)
        if not isinstance(count, Tensor):
            if count != size:
                raise UserError(
                    f"the loss returns {count} as its count for {size} targets: return a tensor, "
                    "as other ranks may have other counts"
                )
            self.passes += 1
            return size
        if size not in self.sizes:
            self.sizes[size] = torch.full_like(self.zero, size)
        self.count = torch.addcdiv(self.count, count, self.sizes[size])
        if is_last:
            self.pending = distributed.start_sum(self.count)
        return size

    def finish(self, ddp_model: nn.Module) -> None:
        """Divide the gradients, which DDP has averaged over the ranks; start anew."""
        if self.found_in is not ddp_model:  # to search it at each step would take 0.1 ms
            self.found_in, self.weights = ddp_model, {}
            for weight in ddp_model.parameters():
                self.weights.setdefault(weight.device, []).append(weight)
        weights = itertools.chain(*self.weights.values())
        if all(weight.grad is None for weight in weights):
            raise UserError(
                "no weight has a gradient at the end of a step: call backward() on the loss"
            )
        if self.passes and self.count is not self.zero:
            raise UserError("the loss returns its count as an int in some passes, not in others")
        assert self.pending or self.passes, "call add first"
        if self.pending:
            self.pending.wait()
            inverse = self.count.reciprocal_().mul_(distributed.world_size())
            self._multiply(inverse.nan_to_num_(posinf=0).float())
        elif self.passes > 1:
            self._multiply(1 / self.passes)
        self.count, self.passes, self.pending = self.zero, 0, None

    def _multiply(self, factor: Tensor | float) -> None:
        for device, weights in self.weights.items():
            if own := [each for weight in weights if (each := weight.grad) is not None]:
                there = factor.to(device) if isinstance(factor, Tensor) else factor
                torch._foreach_mul_(own, there)
