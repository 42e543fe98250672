"""The gradients of an optimizer step: of the mean over all samples of all ranks and passes."""

import itertools

import torch
from torch import Tensor, nn

from engine.errors import UserError
from engine.ranks import devices, distributed


def check_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Raise a UserError if no weight of an `optimizer` that is about to step has a gradient."""
    weights = itertools.chain(*(group["params"] for group in optimizer.param_groups))
    if all(weight.grad is None for weight in weights):
        raise UserError(
            "the optimizer's step found no gradient: call zero_grad() after it, not before"
        )


class Mean:
    """Turns the gradients of summed losses into those of their mean over all samples.

    Ranks and passes hold different numbers of labelled pixels, so the mean of their means would
    weigh a pixel more where there are few. Each pass divides its sum of losses by a size, the same
    on all, and the step divides by the count of all: one number, reduced while backward() runs.

    Counts that are ints are equal to the size on all ranks. Then nothing has to be reduced.
    """

    def __init__(self, device: torch.device) -> None:
        self.found_in: nn.Module | None = None
        self.weights: dict[torch.device, list[nn.Parameter]] = {}
        self.zero = torch.zeros((), dtype=devices.double(device), device=device)
        self.size = 0  # with the next two, on the device: size and 1 / size
        self.whole = self.zero
        self.count, self.known = self.zero, 0.0  # of a step, in sizes: if tensors, and if ints
        self.pending: distributed.Pending | None = None
        self.passes = 0  # of a step, whose losses are known

    def start(self, size: int) -> None:
        """Set the number by which each pass divides its sum; the same on all ranks."""
        if size != self.size:
            self.size, self.whole = size, torch.full_like(self.zero, size)

    def loss(self, loss_sum: Tensor, count: Tensor | int, is_last: bool) -> Tensor:
        """Return the loss of a pass to call backward() on, a scalar.

        loss_sum: scalar, the sum of the losses of `count` samples (labelled pixels).
        is_last: whether it is the last pass of the step.
        """
        self.passes += 1
        if isinstance(count, Tensor):
            self.count = torch.addcdiv(self.count, count.detach(), self.whole)
        elif count != self.size:
            raise UserError(
                f"the loss returns {count} as its count for {self.size} targets: return a tensor, "
                "as other ranks may have other counts"
            )
        else:
            self.known += count / self.size
        if is_last and self.count is not self.zero:
            self.pending = distributed.start_sum(self.count)
        return loss_sum * (1 / self.size)

    def finish(self, ddp_model: nn.Module, passes: int) -> None:
        """Divide the gradients, which DDP has averaged over the ranks; start anew.

        passes: that a step has.
        """
        if self.passes != passes:
            raise UserError(
                f"run.loss was called {self.passes} time(s) in a step of {passes} pass(es): call "
                "it once in each pass, and backward() on what it returns"
            )
        if self.known and self.count is not self.zero:
            raise UserError("the loss returns its count as an int in some passes, not in others")
        if self.found_in is not ddp_model:  # to search it at each step would take 0.1 ms
            self.found_in, self.weights = ddp_model, {}
            for weight in ddp_model.parameters():
                self.weights.setdefault(weight.device, []).append(weight)
        if all(weight.grad is None for weight in itertools.chain(*self.weights.values())):
            raise UserError(
                "no weight has a gradient at the end of a step: call backward() on what run.loss "
                "returns, and zero_grad() after the optimizer's step, not before"
            )
        if self.pending:
            self.pending.wait()
        if not self.known:
            inverse = distributed.world_size() / self.count
            self._multiply(inverse.nan_to_num_(posinf=0).float())
        elif self.known != 1:
            self._multiply(1 / self.known)
        self.count, self.known, self.pending, self.passes = self.zero, 0.0, None, 0

    def _multiply(self, factor: Tensor | float) -> None:
        for device, weights in self.weights.items():
            if own := [each for weight in weights if (each := weight.grad) is not None]:
                there = factor.to(device) if isinstance(factor, Tensor) else factor
                torch._foreach_mul_(own, there)
