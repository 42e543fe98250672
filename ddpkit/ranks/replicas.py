"""The network on all ranks: its gradients are exact means, and its copies stay equal."""

import itertools
import zlib
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ddpkit.errors import UserError
from ddpkit.ranks import distributed

trained: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()  # names, in DDP's order
_called: WeakSet[nn.Module] = WeakSet()  # of these, since the last optimizer step


def wrap(
    model: nn.Module, device: torch.device, find_unused_parameters: bool = False
) -> DistributedDataParallel:
    """Return `model` in DistributedDataParallel: its gradients become the mean over the ranks.

    Wrap again after changing which weights are trained. Buffers, such as BatchNorm's statistics,
    are each rank's own until the end of the epoch, which saves a collective per pass.

    find_unused_parameters: whether some steps may leave some weights out; slower.

        ddp_model = ddpkit.wrap(model, device)
    """
    ddp_model = DistributedDataParallel(
        model, gradient_as_bucket_view=True, find_unused_parameters=find_unused_parameters
    )
    ddp_model.broadcast_buffers = False  # set here: torch has renamed the argument, not this
    trained[ddp_model] = [name for name, each in model.named_parameters() if each.requires_grad]
    # A sum of two is the same in any order; the other flag keeps to the order of the weights.
    if distributed.world_size() > 2 and not find_unused_parameters:
        _settle_buckets(ddp_model, device)
    ddp_model.register_forward_pre_hook(lambda module, _: _called.add(module))
    return ddp_model


class _EachWeight(nn.Module):
    """A function of all weights; their gradients arrive in the order in which DDP expects them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]

    def forward(self, total: Tensor) -> Tensor:
        for weight in self.weights:
            total = total.to(weight.device) + (weight * weight.detach()).sum().real
        return total


def _settle_buckets(ddp_model: DistributedDataParallel, device: torch.device) -> None:
    """Run a pass, not of the network, after which DDP sums the gradients in its final order.

    Without it the first step of a resumed run would differ in the last bits.
    """
    model, ddp_model.module = ddp_model.module, _EachWeight(ddp_model.module)
    ddp_model(torch.zeros((), device=device)).backward()
    ddp_model.module = model
    ddp_model.zero_grad()


def check_called(ddp_model: nn.Module) -> None:
    """Raise a UserError unless `ddp_model`, if `wrap` returned it, was called since last time."""
    if ddp_model in trained and ddp_model not in _called:
        raise UserError(
            "a step without a call of ddp_model, which averages the gradients over the ranks: "
            "compute the outputs with ddp_model(images), not with model or ddp_model.module"
        )
    _called.discard(ddp_model)


def sync_networks(parts: Iterable[object]) -> None:
    """Give all ranks rank 0's buffers (BatchNorm's statistics); check that weights are equal."""
    for part in parts:
        if isinstance(part, nn.Module):
            weights = _plain(part.named_parameters())
            buffers = _plain(part.named_buffers())
            names = part.state_dict().keys()
            saved = {name: each for name, each in buffers.items() if name in names}
            _check_same(weights, saved)
            # One that is not saved may be a cache, as large as the last images of a rank.
            if len(saved) < len(buffers) and not _find_unlike(buffers):
                saved = buffers
            _give([*saved.values()])


def _plain(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return those that are numbers in memory, not sparse, quantized or without values."""
    found = {}
    for name, each in named:
        is_there = not nn.parameter.is_lazy(each) and not each.is_meta
        if is_there and each.layout == torch.strided and not each.is_quantized:
            found[name] = each.detach()
    return found


@torch.inference_mode()  # an evaluation in this mode may have made them
def _give(buffers: list[Tensor]) -> None:
    """Write what rank 0's `buffers` hold into those of all ranks.

    Between the CPUs, as objects: whatever their devices, dtypes and strides, in one collective.
    """
    values = distributed.from_rank_zero(lambda: [each.cpu().clone() for each in buffers])
    for buffer, value in zip(buffers, values, strict=True):
        for dim, stride in enumerate(buffer.stride()):
            if not stride and value.size(dim):  # after expand() all elements are the first one
                buffer = buffer.narrow(dim, 0, 1)
                value = value.narrow(dim, 0, 1)
        buffer.copy_(value)


def _check_same(weights: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
    """Raise a UserError unless `weights` are equal, and `buffers` can be made so."""
    sums = []
    for each in weights.values():
        # Sums of bytes are exact in any order, so they cannot differ by rounding.
        values = each.resolve_conj().resolve_neg().contiguous().flatten()
        sums.append(values.view(torch.uint8).sum(dtype=torch.int64))
    numbers = torch.stack([each.to(sums[0].device) for each in sums]).tolist() if sums else []
    if name := _find_unlike({**weights, **buffers}, numbers):
        raise UserError(
            f"{name} differs between ranks: train through ddp_model, not through model; after "
            "unfreezing weights call ddpkit.wrap again, as DDP keeps to those it started with; "
            "and change weights in the same way on all ranks"
        )


def _find_unlike(tensors: dict[str, Tensor], sums: Iterable[int] = ()) -> str:
    """Return the name of one that has not the same shape, dtype and sum on all ranks, or ""."""
    kinds = [f"{[*each.shape]} {each.dtype}" for each in tensors.values()]
    own = [*itertools.zip_longest(tensors, kinds, sums)]
    if len({*distributed.gather_objects(zlib.crc32(repr(own).encode()))}) > 1:
        for each in itertools.zip_longest(*distributed.gather_objects(own)):
            if any(other != each[0] for other in each):
                return next(there[0] for there in each if there)
    return ""


def check_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Raise a UserError if no weight has a gradient, before an `optimizer`'s step."""
    weights = itertools.chain(*(group["params"] for group in optimizer.param_groups))
    if all(weight.grad is None for weight in weights):
        raise UserError(
            "no weight has a gradient in the optimizer's step: call backward() on what run.loss "
            "returns, and zero_grad() after the step, not before"
        )


def check_cleared(optimizer: torch.optim.Optimizer) -> None:
    """Raise a UserError if weights still have the gradients of the step before, at a backward()."""
    weights = itertools.chain(*(group["params"] for group in optimizer.param_groups))
    if any(weight.grad is not None and weight.grad.any() for weight in weights):
        raise UserError(
            "the gradients of the step before are still there at backward(): call "
            "optimizer.zero_grad() after each optimizer step"
        )


class Part(Tensor):
    """The loss of one of several passes, whose gradient is divided by the count of all at the end.

    What would be divided with it, because it is added to the loss, is refused.
    """

    @classmethod
    def __torch_function__(cls, *call: Any) -> Any:  # function, types, args, kwargs
        found = [x for x in tree_leaves(call[2:]) if isinstance(x, Tensor)]
        with torch._C.DisableTorchFunctionSubclass():
            terms = [x for x in found if x.requires_grad]
        if len(terms) > 1:
            raise UserError(
                "a term is added to what run.loss returns, and with --accumulate it would be "
                "divided by the labelled pixels of all passes, too: add it before, "
                "run.loss(loss_sum + term * count, count)"
            )
        return super().__torch_function__(*call)


class Mean:
    """Turns the gradients of summed losses into those of their mean over all samples.

    Ranks and passes hold different numbers of labelled pixels. In a step of one pass their count is
    reduced first, and the loss is divided by it. Of several passes each divides by a size, the same
    on all, and the step by the count of all, which is reduced while the last backward() runs.
    Counts that are ints equal the size on all ranks, and need no reduction.
    """

    def __init__(self, device: torch.device) -> None:
        self.found_in: nn.Module | None = None
        self.weights: dict[torch.device, list[nn.Parameter]] = {}
        self.zero = torch.zeros((), dtype=torch.float64, device=device)
        self.size = 0
        self.whole = self.zero  # the size, on the device
        self.count, self.known = self.zero, 0.0  # of a step, in sizes: if tensors, and if ints
        self.pending: dist.Work | None = None
        self.passes = 0  # of a step, whose losses are known
        self.is_whole = False  # the loss is divided by the count of all

    def start(self, size: int) -> None:  # the same on all ranks
        self.size, self.whole = size, torch.full_like(self.zero, size)

    def loss(self, loss_sum: Tensor, count: Tensor | int, is_last: bool) -> Tensor:
        """Return the loss of a pass, a scalar, of `count` samples; is_last: of the step."""
        self.passes += 1
        if isinstance(count, Tensor) and is_last and self.passes == 1:
            total = distributed.reduce_tensor(count.to(torch.float64))
            share = (distributed.world_size() / total).nan_to_num_(posinf=0)
            self.is_whole = True
            return loss_sum * share.to(loss_sum.dtype)
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
        loss = loss_sum * (1 / self.size)
        return loss.as_subclass(Part) if isinstance(count, Tensor) else loss

    def finish(self, ddp_model: nn.Module, passes: int) -> None:
        """Divide the gradients of a step's passes, which DDP has averaged; start anew."""
        if self.passes != passes:
            raise UserError(
                f"run.loss was called {self.passes} time(s) in a step of {passes} pass(es): call "
                "it once in each pass, and backward() on what it returns; for more passes per "
                "optimizer step use --accumulate, not a loop of your own"
            )
        if self.known and self.count is not self.zero:
            raise UserError("the loss returns its count as an int in some passes, not in others")
        if self.found_in is not ddp_model:  # to search it at each step would take 0.1 ms
            self.found_in, self.weights = ddp_model, {}
            for weight in ddp_model.parameters():
                self.weights.setdefault(weight.device, []).append(weight)
        if self.pending:
            self.pending.wait()
        if self.is_whole:
            self.is_whole = False
        elif not self.known:
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
