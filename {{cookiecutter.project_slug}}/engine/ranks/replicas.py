"""The network on all ranks: what keeps its copies equal, and checks that they are."""

import contextlib
from collections.abc import Iterable, Iterator
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from engine.errors import UserError
from engine.ranks import devices, distributed

Wrapped = nn.Module  # what main.py calls ddp_model
_trained: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()  # by what `wrap` returned


def wrap(
    model: nn.Module,
    device: torch.device,
    strategy: str = "ddp",
    find_unused_parameters: bool = False,
) -> Wrapped:
    """Return `model` in DistributedDataParallel: its gradients become the mean over the ranks.

    Each rank keeps its own buffers until `sync_buffers`, which saves a collective per pass.

    strategy: "ddp"; "fsdp" for a network of sharded.share, which is returned as it is; or "dp", for
        DataParallel on all GPUs of a single process.
    find_unused_parameters: whether some steps may leave some weights out; slower.
    """
    if strategy == "fsdp" or not devices.has_collectives(device):
        return model
    if strategy == "dp":
        if distributed.world_size() > 1:
            raise UserError("--strategy dp: one process uses all GPUs; start python main.py")
        return DataParallel(model)
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
    return ddp_model


@contextlib.contextmanager
def no_sync(ddp_model: Wrapped) -> Iterator[None]:
    """Within the block backward() adds to this rank's gradients without averaging them."""
    if isinstance(ddp_model, FSDPModule):
        ddp_model.set_requires_gradient_sync(False)
        yield
        ddp_model.set_requires_gradient_sync(True)
    elif isinstance(ddp_model, DistributedDataParallel):
        with ddp_model.no_sync():
            yield
    else:
        yield


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


def trained_weights(ddp_model: nn.Module) -> list[str]:
    """Return the names of the weights that DDP numbers, in its order."""
    return _trained.get(ddp_model, [])


def sync_batchnorm(model: nn.Module, device: torch.device) -> nn.Module:
    """Return `model` with BatchNorm over the images of all ranks; its checkpoints stay the same."""
    if device.type == "cpu" or not devices.has_collectives(device):
        raise UserError("--sync-bn: torch has it on GPUs only; omit the flag")
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


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
            "unfreezing weights call replicas.wrap again, as DDP keeps to those it started with; "
            "and change weights in the same way on all ranks"
        )
