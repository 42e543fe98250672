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
    on all, and the step divides by the count of all: one number, reduced during the last backward
    pass.

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
        self.is_ended = False  # all passes of the step are done, `finish` is not

    def backward(
        self, loss_sum: Tensor, count: Tensor | int, targets: Tensor, is_last: bool
    ) -> None:
        """Add the gradients of a pass: those of its loss, a sum over `count`, both scalars.

        The loss is divided by the number of targets in the first pass, of which those with a share
        for each class, floating-point (N, classes, ...), are one each. Tensor.backward(1 / size)
        takes a step's host less time than a division does, which autograd would follow back.
        """
        if self.is_ended:
            raise UserError(
                "a step ended without mean.finish: call it after the last backward pass, before "
                "the optimizer's step"
            )
        self._add(count, targets, is_last)
        loss_sum.backward(self.share)
        self.is_ended = is_last

    def _add(self, count: Tensor | int, targets: Tensor, is_last: bool) -> None:
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
            return
        self.count = torch.addcdiv(self.count, count, self.whole)
        if is_last:
            self.pending = distributed.start_sum(self.count)

    def finish(self, ddp_model: nn.Module) -> None:
        """Divide the gradients, which DDP has averaged over the ranks; start anew."""
        if not self.known and self.count is self.zero:
            raise UserError(
                "mean.backward was not called in a step: call it in each pass, on the sum of the "
                "losses, in place of loss.backward()"
            )
        if self.known and self.count is not self.zero:
            raise UserError("the loss returns its count as an int in some passes, not in others")
        if self.found_in is not ddp_model:  # to search it at each step would take 0.1 ms
            self.found_in, self.weights = ddp_model, {}
            for weight in ddp_model.parameters():
                self.weights.setdefault(weight.device, []).append(weight)
        if all(weight.grad is None for weight in itertools.chain(*self.weights.values())):
            raise UserError(
                "no weight has a gradient at the end of a step: call zero_grad() after the "
                "optimizer's step, not before"
            )
        if self.pending:
            self.pending.wait()
        if not self.known:
            inverse = distributed.world_size() / self.count
            self._multiply(inverse.nan_to_num_(posinf=0).float())
        elif self.known != 1:
            self._multiply(1 / self.known)
        self.count, self.known, self.pending, self.is_ended = self.zero, 0.0, None, False

    def _multiply(self, factor: Tensor | float) -> None:
        for device, weights in self.weights.items():
            if own := [each for weight in weights if (each := weight.grad) is not None]:
                there = factor.to(device) if isinstance(factor, Tensor) else factor
                torch._foreach_mul_(own, there)
