"""The gradients of an optimizer step: of the mean over all samples of all ranks and passes."""

import itertools

import torch
from torch import Tensor, nn

from engine.errors import UserError
from engine.ranks import devices, distributed


class Mean:
    """Turns summed gradients into those of the mean, where samples have unequal counts.

    Ranks and passes hold different numbers of labelled pixels, so the mean of their means would
    weigh a pixel more where there are few. Each pass divides its sum of losses by a size, the same
    on all, and the step divides by the count of all: one number, reduced during backward().

    A count that is an int instead of a tensor has to be the number of targets. Then it is the same
    on all ranks, and nothing has to be reduced.
    """

    def __init__(self, device: torch.device) -> None:
        self.found_in: nn.Module | None = None
        self.weights: dict[torch.device, list[nn.Parameter]] = {}
        self.zero = torch.zeros((), dtype=devices.double(device), device=device)
        self.size = 0  # with the next two, on the device: size and 1 / size
        self.whole = self.share = self.zero
        self.count, self.known = self.zero, 0.0  # of a step, in sizes: if tensors, and if ints
        self.pending: distributed.Pending | None = None

    def add(self, count: Tensor | int, targets: Tensor, is_last: bool) -> Tensor:
        """Add the count of a pass, a scalar; return 1 / size, with which to call backward().

        The size is the number of targets in the first pass, of which those with a share for each
        class, floating-point (N, classes, ...), are one each. backward(1 / size), with a tensor,
        takes a step's host less time than a division does, which autograd would follow back.
        """
        has_shares = targets.is_floating_point() and targets.ndim > 1
        size = targets.numel() // (targets.shape[1] if has_shares else 1)
        if not self.size:
            self.size, self.whole = size, torch.full_like(self.zero, size)
            self.share = self.whole.reciprocal().float()
        if not isinstance(count, Tensor):
            if count != size:
                raise UserError(
                    f"the loss returns {count} as its count for {size} targets: return a tensor, "
                    "as other ranks may have other counts"
                )
            self.known += size / self.size
            return self.share
        self.count = torch.addcdiv(self.count, count, self.whole)
        if is_last:
            self.pending = distributed.start_sum(self.count)
        return self.share

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
        if self.known and self.count is not self.zero:
            raise UserError("the loss returns its count as an int in some passes, not in others")
        if not self.known and self.count is self.zero:
            raise UserError("mean.add was not called before backward(): call it in each pass")
        if self.pending:
            self.pending.wait()
        if not self.known:
            inverse = distributed.world_size() / self.count
            self._multiply(inverse.nan_to_num_(posinf=0).float())
        elif self.known != 1:
            self._multiply(1 / self.known)
        self.count, self.known, self.pending = self.zero, 0.0, None

    def _multiply(self, factor: Tensor | float) -> None:
        for device, weights in self.weights.items():
            if own := [each for weight in weights if (each := weight.grad) is not None]:
                there = factor.to(device) if isinstance(factor, Tensor) else factor
                torch._foreach_mul_(own, there)
