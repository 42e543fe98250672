"""The network on all ranks: its gradients are exact means, and its copies stay equal."""

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from engine.errors import UserError
from engine.ranks import devices, distributed

_trained: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()  # by what `wrap` returned
_called: WeakSet[nn.Module] = WeakSet()  # of these, since the last optimizer step


def wrap(
    model: nn.Module, device: torch.device, find_unused_parameters: bool = False
) -> DistributedDataParallel:
    """Return `model` in DistributedDataParallel: its gradients become the mean over the ranks.

    A network of `shard` is returned as it is, with a `no_sync` as DistributedDataParallel has.
    Wrap again after changing which weights are trained. Each rank keeps its own buffers, such as
    BatchNorm's statistics, until the end of the epoch, which saves a collective per pass.

    find_unused_parameters: whether some steps may leave some weights out; slower.

    Raises a UserError if ranks have built different networks.

        ddp_model = engine.wrap(model, device)
    """
    if is_sharded(model) or not devices.has_collectives(device):
        vars(model)["no_sync"] = functools.partial(_no_sync, model)
        return cast(DistributedDataParallel, model)
    is_split = len({weight.device for weight in model.parameters()}) > 1  # over several GPUs
    ddp_model = DistributedDataParallel(
        model,
        [device] if device.type != "cpu" and not is_split else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=find_unused_parameters,
    )
    ddp_model.broadcast_buffers = False  # set here: torch has renamed the argument, not this
    weights = model.named_parameters()
    _trained[ddp_model] = [name for name, weight in weights if weight.requires_grad]
    # A sum of two is the same in any order; the other flag keeps to the order of the weights.
    if distributed.world_size() > 2 and not find_unused_parameters:
        _settle_buckets(ddp_model)
    ddp_model.register_forward_pre_hook(lambda module, _: _called.add(module))
    return ddp_model


def is_sharded(model: nn.Module) -> bool:
    """Return whether `model` is one of fully_shard; its module, which takes 1 s, stays away."""
    return hasattr(model, "set_requires_gradient_sync")


@contextlib.contextmanager
def _no_sync(model: nn.Module) -> Iterator[None]:
    switch = getattr(model, "set_requires_gradient_sync", lambda _: None)
    switch(False)
    yield
    switch(True)


class _EachWeight(nn.Module):
    """A function of all weights; their gradients arrive in the order in which DDP expects them."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.weights = [weight for weight in weights if weight.requires_grad]

    def forward(self, total: Tensor) -> Tensor:
        for weight in self.weights:
            total = total.to(weight.device) + (weight * weight.detach()).sum().real
        return total


def _settle_buckets(ddp_model: DistributedDataParallel) -> None:
    """Run a pass, not of the network, whose gradients are thrown away.

    After its first backward pass DDP reassigns the gradients to buckets, in the order in which
    they arrived, and from then on sums them in another order. Without this, the first step of a
    resumed run would differ in the last bits from that of an uninterrupted one.
    """
    model, ddp_model.module = ddp_model.module, _EachWeight(ddp_model.module.parameters())
    ddp_model(torch.zeros(())).backward()
    ddp_model.module = model
    ddp_model.zero_grad()


def check_called(ddp_model: nn.Module) -> None:
    """Raise a UserError unless `ddp_model`, if `wrap` returned it, was called since the last check.

    Only a forward pass through it has DDP average the gradients.
    """
    if ddp_model in _trained and ddp_model not in _called:
        raise UserError(
            "a step without a call of ddp_model, which averages the gradients over the ranks: "
            "compute the outputs with ddp_model(images), not with model or ddp_model.module"
        )
    _called.discard(ddp_model)


def trained_weights(ddp_model: nn.Module) -> list[str]:
    """Return the names of the weights that DDP numbers, in its order."""
    return _trained.get(ddp_model, [])


def sync_networks(parts: Iterable[object]) -> None:
    """Give all ranks rank 0's buffers (BatchNorm's statistics); check that weights are equal."""
    for part in parts:
        if isinstance(part, nn.Module):
            for buffer in part.buffers():
                distributed.broadcast(buffer)
            _check_same(part)


def _check_same(model: nn.Module) -> None:
    """Raise a UserError on all ranks unless each weight has the same checksum on all.

    They drift apart silently if a forward pass bypasses the DDP wrapper. Sharded weights cannot.
    """
    state = {
        name: value
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor) and not hasattr(value, "full_tensor")
    }
    if not state:
        return
    device = next(iter(state.values())).device
    # Sums of bytes are exact in any order, so they cannot differ by rounding.
    sums = torch.stack(
        [t.flatten().view(torch.uint8).sum(dtype=torch.int64).to(device) for t in state.values()]
    )
    different = distributed.reduce_tensor(sums, "min") != distributed.reduce_tensor(sums, "max")
    if different.any():
        name = list(state)[int(different.int().argmax())]
        raise UserError(
            f"{name} differs between ranks: train through ddp_model, not through model; after "
            "unfreezing weights call engine.wrap again, as DDP keeps to those it started with; "
            "and change weights in the same way on all ranks"
        )


def check_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Raise a UserError if no weight of an `optimizer` that is about to step has a gradient."""
    weights = itertools.chain(*(group["params"] for group in optimizer.param_groups))
    if all(weight.grad is None for weight in weights):
        raise UserError(
            "no weight has a gradient in the optimizer's step: call backward() on what run.loss "
            "returns, and zero_grad() after the step, not before"
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
        self.size = 0
        self.whole = self.zero  # the size, on the device
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
