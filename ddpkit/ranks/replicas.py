"""The network on all ranks: its gradients are exact means, and its copies stay equal."""

import contextlib
import copy
import itertools
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpkit.errors import UserError
from ddpkit.ranks import distributed
from ddpkit.ranks.virtual import VirtualRanks

_prepared: WeakSet[nn.Module] = WeakSet()
_called: WeakSet[nn.Module] = WeakSet()  # of these, since the last optimizer step
# What averages gradients over the ranks
REPLICATED = DistributedDataParallel, VirtualRanks
# By the bytes of each
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Wrappers of Fabric and accelerate, by class, and where each has what it wraps
WRAPPERS = {
    "_FabricModule": "_original_module",
    "_FabricOptimizer": "_optimizer",
    "AcceleratedOptimizer": "optimizer",
    "AcceleratedScheduler": "scheduler",
}


def uncompiled(network: nn.Module) -> nn.Module:
    """Return the network that torch.compile(network) was given, or `network` itself."""
    return getattr(network, "_orig_mod", network)


def bare(part: Any) -> Any:
    """Return what is in DistributedDataParallel, or a wrapper of Fabric or accelerate, if it is."""
    for kind in type(part).__mro__:
        part = getattr(part, WRAPPERS.get(kind.__name__, ""), part)
    network = uncompiled(part)
    return network.module if isinstance(network, REPLICATED) else network


def in_ddp(network: nn.Module) -> nn.Module:
    """Return the DistributedDataParallel in a wrapper of torch.compile or Fabric, if any."""
    return uncompiled(getattr(network, "_forward_module", network))


@contextlib.contextmanager
def in_evaluation(network: nn.Module) -> Iterator[None]:
    """Within the block it is in evaluation mode; afterwards all its modules are as before."""
    trained = [module for module in network.modules() if module.training]
    network.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True


def weights_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def prepare_network(network: nn.Module) -> None:
    """Prepare a network for training on all ranks; a second time it is left alone.

    Raises a UserError if it is not in DistributedDataParallel, and there are several ranks.
    """
    ddp_model = in_ddp(network)
    if ddp_model in _prepared:
        return
    _prepared.add(ddp_model)
    ranks = distributed.world_size()
    if isinstance(ddp_model, DistributedDataParallel):
        _settle_buckets(ddp_model)
    if isinstance(ddp_model, REPLICATED):
        ddp_model.register_forward_pre_hook(lambda module, _: _called.add(module))
    elif ranks > 1:
        raise UserError(
            f"steps() got a {type(network).__name__}: pass DistributedDataParallel(model), which "
            "averages the gradients over the ranks"
        )


class _EachWeight(nn.Module):
    """A function of all weights; their gradients arrive in the order in which DDP expects them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]

    def forward(self, total: Tensor) -> Tensor:
        for weight in self.weights:
            total = total.to(weight.device) + (weight * 0).sum().real
        return total


def hooks_of(model: nn.Module) -> list:
    """Return those of gradients."""
    return [
        hook
        for weight in model.parameters()
        for each in (weight._backward_hooks, weight._post_accumulate_grad_hooks)
        for hook in (each or {}).values()
    ]


def _settle_buckets(ddp_model: DistributedDataParallel) -> None:
    """Run a pass, not of the network, after which DDP has the gradients in their final places.

    Without it the first step of a resumed run would differ in the last bits: sums of more than two
    ranks have another order, and those of BLAS, as Prodigy's, follow a tensor's address.
    """
    model = ddp_model.module
    is_sparse = any(getattr(each, "sparse", False) for each in model.modules())
    # a person's hooks, which may take a step, are not called for this pass
    is_left = ddp_model.static_graph or is_sparse or hooks_of(model)
    if is_left and distributed.world_size() > 2:
        distributed.print0(
            "warning: with static_graph=True, sparse gradients or hooks on more than two ranks a "
            "resumed run differs in the last bits: DDP sums in another order in its first step"
        )
    if is_left or ddp_model.find_unused_parameters:
        return  # it keeps to the order of the weights
    # Of communication hooks, such as PowerSGD's: this pass is none of theirs.
    states: list = [
        each for _, each in ddp_model._comm_hooks if hasattr(each, "state_dict")
    ]
    before = copy.deepcopy([each.state_dict() for each in states])
    gives_buffers = ddp_model.broadcast_buffers
    ddp_model.module = _EachWeight(model)
    ddp_model.broadcast_buffers = False
    device = next(model.parameters()).device
    ddp_model(torch.zeros((), device=device)).backward()
    ddp_model.module = model
    ddp_model.broadcast_buffers = gives_buffers
    ddp_model.zero_grad()
    for state, saved in zip(states, before, strict=True):
        state.load_state_dict(saved)


def check_called(ddp_model: nn.Module) -> None:
    """Raise a UserError unless `ddp_model`, if it is one, was called since last time."""
    if isinstance(ddp_model, REPLICATED) and ddp_model not in _called:
        raise UserError(
            "a step without a call to ddp_model, which averages the gradients over the ranks: "
            "compute the outputs with ddp_model(images), not model or ddp_model.module, and end "
            "the step once"
        )
    _called.discard(ddp_model)
    if isinstance(ddp_model, DistributedDataParallel):
        # of weights that had no part in a backward pass; else the next collective would hang
        ddp_model._check_reducer_finalized()


def sync_networks(parts: Iterable[object]) -> None:
    """Give all ranks rank 0's buffers (BatchNorm's statistics); check that weights are equal."""
    for part in parts:
        if isinstance(part, nn.Module):
            # One that is not saved may be a cache, as large as the last images of a
            # rank.
            saved = part.state_dict().keys()
            buffers = plain(each for each in part.named_buffers() if each[0] in saved)
            check_same(plain(part.named_parameters()), buffers)
            _give(list(buffers.values()))


def is_plain(each: Tensor) -> bool:
    """Return whether it is numbers in memory, not sparse, quantized or without values."""
    is_there = not nn.parameter.is_lazy(each) and not each.is_meta
    return is_there and each.layout == torch.strided and not each.is_quantized


def plain(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: each.detach() for name, each in named if is_plain(each)}


@torch.inference_mode()  # an evaluation in this mode may have made them
def _give(buffers: list[Tensor]) -> None:
    """Write what rank 0's `buffers` hold into those of all ranks.

    Between the CPUs, as objects: whatever their devices, dtypes and strides, in one collective.
    """
    values = distributed.from_rank_zero(
        lambda: [each.cpu().clone() for each in buffers]
    )
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)


def check_same(
    weights: dict[str, Tensor], buffers: dict[str, Tensor] | None = None
) -> None:
    """Raise a UserError unless `weights` are equal, and `buffers` can be made so."""
    name = _find_unlike(weights | (buffers or {}), bit_sums(weights.values()))
    if name:
        raise UserError(
            f"{name} differs between ranks: train through ddp_model, not model, in as many steps "
            "on each rank; after unfreezing weights wrap the model in DDP again; wrap a second "
            "module with weights, too; change weights alike on all ranks, by equal random numbers"
        )


def bit_sums(tensors: Iterable[Tensor]) -> list[int]:
    """Return the sum of the bits of each that is plain, as integers; reads the device once."""
    sums: list[Tensor] = []
    for each in filter(is_plain, tensors):
        # Of the size of its numbers, so that they are few. Exact in any order, so they
        # cannot differ by rounding.
        kind = INTEGERS.get(each.element_size())
        values = each.detach().resolve_conj().resolve_neg()
        values = values.view(kind) if kind else values.flatten().view(torch.uint8)
        if values.device.type == "cpu":  # where torch takes ten times as long
            total = torch.tensor(values.numpy().sum(dtype=np.int64))
        else:
            total = values.sum(dtype=torch.int64)
        sums.append(total)
    if not sums:
        return []
    return torch.stack([each.to(sums[0].device) for each in sums]).tolist()


def _find_unlike(tensors: dict[str, Tensor], sums: Iterable[int] = ()) -> str:
    """Return the name of one that has not the same shape, dtype and sum on all ranks, or ""."""
    kinds = [f"{list(each.shape)} {each.dtype}" for each in tensors.values()]
    own = list(itertools.zip_longest(tensors, kinds, sums))
    checksum = zlib.crc32(repr(own).encode())
    if len(set(distributed.gather_objects(checksum))) == 1:
        return ""
    for each in itertools.zip_longest(*distributed.gather_objects(own)):
        if any(other != each[0] for other in each):
            return next(there[0] for there in each if there)
    return ""


def check_slopes(
    slopes: Sequence[tuple[Tensor, Tensor]],
    count: Tensor | float,
    passes: int,
    ranks: int,
    scale: float,
) -> None:
    """Raise a UserError if the gradients of a step are of no mean over the labels of all ranks.

    What may be a part of it, by a weight of the owner's, is a warning.

    slopes: the gradients that arrived at the criterion's sums, each with its batch's number of
    labels. count: of labels, of all `passes` and `ranks`. scale: a GradScaler's.
    """
    formula = "loss = criterion(outputs, targets) * world_size / count"
    right = scale * ranks / float(count)

    def is_any(slope: float) -> bool:
        return any(math.isclose(float(each), slope, rel_tol=1e-3) for each, _ in slopes)

    if is_any(right):  # others may be auxiliary
        return
    of_batches = [scale / float(own) for _, own in slopes if own]
    if is_any(scale) or any(map(is_any, of_batches)):
        raise UserError(
            f"the loss is not the mean over the labels of all ranks: {formula}"
        )
    for number, what in (passes, "passes of a step"), (ranks, "ranks"):
        if number > 1 and is_any(right / number):
            distributed.print0(
                f"warning: the loss is 1/{number} of the mean over labels: fine if you weight it "
                f"so; wrong if it is meant for the {number} {what}, which `count` already "
                f"includes: {formula}"
            )
            return
