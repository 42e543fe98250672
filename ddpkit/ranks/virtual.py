"""Virtual ranks: training as on N ranks, to the bit, on however many there are."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from ddpkit.errors import UserError
from ddpkit.ranks import distributed


class VirtualRanks(nn.Module):
    """A network that is trained as `ranks` ranks would, in place of DistributedDataParallel.

    Each process has a stretch of the virtual ranks, and takes their passes one after the other: a
    share of the global batch, random numbers and buffers of their own, as real ranks have. Their
    gradients are added as a tree of neighbours, within a process and across processes alike:

        virtual ranks    0   1   2   3   4   5   6   7
                         +---+   +---+   +---+   +---+    within a process, as far as it has them
                           +-------+       +-------+
                               +---------------+          across processes: each adds a stretch of
                                                          all weights, and gives the sums back

    so that the sums are the same to the bit on 1, 2, 4 or 8 processes. What a process sends is as
    much as in an all-reduce by a ring, but after backward(), not meanwhile, and it takes one more
    copy of the gradients (and more while a tree of a process is added: log2 of its virtual ranks).

    module: the network. ranks: how many virtual ranks there are; ranks / world_size has to be a
        power of two, or world_size 1. Weights without a gradient in a step are right, as with
        find_unused_parameters.

    Raises a UserError for other numbers, SyncBatchNorm and sparse gradients.

        model = ddpkit.VirtualRanks(network, 8)
    """

    # As of DistributedDataParallel, for the same loop; here the passes say it.
    require_backward_grad_sync = True

    def __init__(self, module: nn.Module, ranks: int) -> None:
        super().__init__()
        self.module = module
        self.ranks = ranks
        self.here = share_of(ranks)
        if next(module.parameters()).device.type == "cpu":
            # With other threads a sum has other last bits.
            torch.set_num_threads(1)
        if any(isinstance(each, nn.SyncBatchNorm) for each in module.modules()):
            raise UserError(
                "virtual ranks: SyncBatchNorm joins the batches of all ranks; use BatchNorm"
            )
        self.weights = [each for each in module.parameters() if each.requires_grad]
        self.states = list(module.buffers())
        # As DistributedDataParallel does.
        for tensor in (*module.parameters(), *self.states):
            dist.broadcast(tensor.detach(), 0)
        # The buffers of each virtual rank; those of the current one are in the network.
        self.kept = [[each.clone() for each in self.states] for _ in self.here]
        self.current = 0  # in `here`
        self.is_last = True  # of the passes of a step
        # Sums of gradients, each of a number of neighbours: a power of two, but for the last.
        self.sums: list[tuple[int, list[Tensor]]] = []
        # Gradients from before the step, which are not divided by the ranks once more.
        self.before: list[Tensor | None] = []

    def forward(self, *args: Any, **options: Any) -> Any:
        outputs = self.module(*args, **options)
        if self.is_last and torch.is_grad_enabled():
            trained = [
                each
                for each in tree_leaves(outputs)
                if isinstance(each, Tensor) and each.requires_grad
            ]
            if trained:
                register_multi_grad_hook(trained, self._queue, mode="any")
        return outputs

    def buffers_of_ranks(self) -> list[dict[str, Tensor]]:
        """Return the buffers of each virtual rank of this process, by name, on the CPU."""
        names = [name for name, _ in self.module.named_buffers()]
        self._switch(0)
        found = [self.states, *self.kept[1:]]
        return [
            dict(zip(names, [one.cpu() for one in each], strict=True)) for each in found
        ]

    def load_buffers(self, of_ranks: Sequence[dict[str, Tensor]]) -> None:
        """Take buffers of all virtual ranks, as `buffers_of_ranks` returns them."""
        self._switch(0)
        for place, rank in enumerate(self.here):
            target = self.kept[place] if place else self.states
            for (name, _), each in zip(
                self.module.named_buffers(), target, strict=True
            ):
                if name in of_ranks[rank]:
                    each.copy_(of_ranks[rank][name])

    def begin_pass(self, number: int, passes: int) -> int:
        """Begin pass `number` of those of a step; return its virtual rank."""
        of_each = passes // len(self.here)
        place = number // of_each
        if number == 0:
            self.sums.clear()
            self.before = [weight.grad for weight in self.weights]
            for weight in self.weights:
                weight.grad = None
        elif number % of_each == 0:
            self._take_gradients()
        self._switch(place)
        self.is_last = number == passes - 1
        return self.here[place]

    def _switch(self, place: int) -> None:
        """Put the buffers of another virtual rank into the network."""
        if place != self.current and self.states:
            torch._foreach_copy_(self.kept[self.current], self.states)
            torch._foreach_copy_(self.states, self.kept[place])
        self.current = place

    def _queue(self, *_: object) -> None:
        # After the last gradient of this backward(), as DistributedDataParallel does it.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._reduce)

    def _take_gradients(self) -> None:
        """Add this virtual rank's gradients to the tree."""
        gradients = []
        for weight in self.weights:
            if weight.grad is None:
                gradients += [torch.zeros_like(weight), weight.new_zeros(1)]
                continue
            if weight.grad.is_sparse:
                raise UserError("virtual ranks: sparse gradients cannot be added")
            gradients += [weight.grad.detach(), weight.new_ones(1)]
            weight.grad = None
        size = 1
        while self.sums and self.sums[-1][0] == size:
            _, before = self.sums.pop()
            gradients = list(torch._foreach_add(before, gradients))
            size *= 2
        self.sums.append((size, gradients))

    @torch.no_grad()
    def _reduce(self) -> None:
        """Have all processes add up the gradients of all virtual ranks, and take their mean."""
        self._take_gradients()
        _, gradients = self.sums.pop()
        while self.sums:  # of a number of virtual ranks that is no power of two
            gradients = list(torch._foreach_add(self.sums.pop()[1], gradients))
        for kind in sorted({each.dtype for each in gradients}, key=str):
            some = [each for each in gradients if each.dtype == kind]
            total = add_ranks(torch.cat([each.flatten() for each in some]))
            parts = total.split([each.numel() for each in some])
            for each, part in zip(some, parts, strict=True):
                each.copy_(part.view_as(each))
        means = gradients[::2]
        torch._foreach_div_(means, self.ranks)
        # On how many virtual ranks a weight had a gradient: without any it has none.
        counts = torch.cat(gradients[1::2]).tolist()
        rows = zip(self.weights, means, counts, self.before, strict=True)
        for weight, mean, count, before in rows:
            weight.grad = mean if count else None
            if before is not None:
                weight.grad = before + mean
        self._switch(0)


def add_ranks(mine: Tensor) -> Tensor:
    """Return the sum of all processes' tensors (n,), added as a tree of neighbours."""
    count = distributed.world_size()
    if count == 1:
        return mine
    size = -(-mine.numel() // count)
    padded = mine.new_zeros(size * count)
    padded[: mine.numel()] = mine
    # Row r is what process r has of this one's stretch.
    rows = torch.empty_like(padded)
    dist.all_to_all_single(rows, padded)
    total = add_neighbours(list(rows.view(count, size)))
    dist.all_gather_into_tensor(padded, total)
    return padded[: mine.numel()]


def add_neighbours(rows: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors: of neighbours, then of neighbouring sums, and so on."""
    while len(rows) > 1:
        sums = [rows[i] + rows[i + 1] for i in range(0, len(rows) - 1, 2)]
        rows = sums + list(rows[2 * len(sums) :])
    return rows[0]


def share_of(ranks: int) -> range:
    """Return the virtual ranks of this process; a UserError if they cannot be divided so."""
    world_size = distributed.world_size()
    if not is_possible(ranks, world_size):
        possible = [n for n in range(1, ranks + 1) if is_possible(ranks, n)]
        raise UserError(
            f"{ranks} virtual ranks on {world_size} processes: start "
            f"{', '.join(map(str, possible))} of these"
        )
    share = ranks // world_size
    return range(distributed.rank() * share, (distributed.rank() + 1) * share)


def is_possible(ranks: int, world_size: int) -> bool:
    """Return whether the tree of so many ranks has one branch for each process."""
    share, rest = divmod(ranks, world_size)
    return rest == 0 and (world_size == 1 or share & (share - 1) == 0)
