"""The network on all ranks: what keeps its copies equal, and checks that they are."""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
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
    if isinstance(model, FSDPModule) or not devices.has_collectives(device):
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


@contextlib.contextmanager
def _no_sync(model: nn.Module) -> Iterator[None]:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
    yield
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(True)


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
    """Give all ranks rank 0's buffers of each network in `parts`; check that weights are equal."""
    for part in parts:
        if isinstance(part, nn.Module):
            sync_buffers(part)
            check_same(part)


def sync_buffers(model: nn.Module) -> None:
    """Give every rank rank 0's buffers (BatchNorm's running statistics).

    Each rank's are of what it has seen itself; evaluation and checkpoints use those of rank 0.
    """
    for buffer in model.buffers():
        distributed.broadcast(buffer)


def check_same(model: nn.Module) -> None:
    """Raise a UserError on all ranks unless each weight has the same checksum on all.

    They drift apart silently if a forward pass bypasses the DDP wrapper. Shared weights cannot.
    """
    state = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    state = {name: t for name, t in state.items() if not isinstance(t, DTensor)}
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
