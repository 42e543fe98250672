"""Virtual ranks: training as on N ranks, to the bit, on however many there are."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from ddpkit.errors import UserError
from ddpkit.ranks import distributed


class VirtualRanks(nn.Module):
    """A network that is trained as `ranks` ranks would, in place of DistributedDataParallel.

    Each process has a stretch of the virtual ranks, and takes their passes one after the other: a
    share of the global batch, random numbers and a state of their own, as real ranks have. Their
    gradients are added as a tree of neighbours, within a process and across processes alike:

        virtual ranks    0   1   2   3   4   5   6   7
                         +---+   +---+   +---+   +---+    within a process, as far as it has them
                           +-------+       +-------+
                               +---------------+          across processes: each adds a stretch of
                                                          all weights, and gives the sums back

    so that the sums are the same to the bit on 1, 2, 4 or 8 processes. That is done at the end of
    the loop over the batches of a step, whatever backward() was called in it. What a process sends
    is as much as in an all-reduce by a ring.

    module: the network. ranks: how many virtual ranks there are; ranks / world_size has to be a
        power of two, or world_size 1. Weights without a gradient in a step are right, as with
        find_unused_parameters.

    Give it to Run.steps, or Checkpoints.steps, whose batches are those of the virtual ranks.

    Raises a UserError for other numbers, and SyncBatchNorm.

        model = ddpkit.VirtualRanks(network, 8)
    """

    # As of DistributedDataParallel, for the same loop; here its end says it.
    require_backward_grad_sync = True
    # Those whose loop over the batches of a step has begun, and not ended.
    in_step: ClassVar[Sequence["VirtualRanks"]] = ()

    def __init__(self, module: nn.Module, ranks: int) -> None:
        super().__init__()
        self.module = module
        self.ranks = ranks
        share_of(ranks)
        if next(module.parameters()).device.type == "cpu":
            # With other threads a sum has other last bits.
            torch.set_num_threads(1)
        if any(isinstance(each, nn.SyncBatchNorm) for each in module.modules()):
            raise UserError(
                "virtual ranks: SyncBatchNorm spans the batches of all ranks; use BatchNorm"
            )
        # As DistributedDataParallel does.
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), 0)

    def forward(self, *args: Any, **options: Any) -> Any:
        is_trained = self.training and torch.is_grad_enabled()
        if is_trained and self not in VirtualRanks.in_step:
            raise UserError(
                "virtual ranks: a pass outside the loop over the batches of a step: pass steps() "
                "all models in VirtualRanks, train them in that loop, and loop over the batches "
                "again for a second pass, such as SAM's"
            )
        return self.module(*args, **options)


def share_of(ranks: int) -> range:
    """Return the virtual ranks of this process; a UserError if they cannot be divided so."""
    world_size = distributed.world_size()
    if not is_possible(ranks, world_size):
        possible = [n for n in range(1, ranks + 1) if is_possible(ranks, n)]
        raise UserError(
            f"{ranks} virtual ranks cannot be divided among {world_size} processes; possible "
            f"numbers of processes: {', '.join(map(str, possible))}"
        )
    share = ranks // world_size
    return range(distributed.rank() * share, (distributed.rank() + 1) * share)


def is_possible(ranks: int, world_size: int) -> bool:
    """Return whether the tree of so many ranks has one branch for each process."""
    share, rest = divmod(ranks, world_size)
    return rest == 0 and (world_size == 1 or share & (share - 1) == 0)
