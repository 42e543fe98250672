"""The steps of virtual ranks: each has its passes with a state of its own; their gradients' sum."""

import itertools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpkit.errors import UserError
from ddpkit.ranks import distributed, replicas
from ddpkit.ranks.module_state import ModuleState, copied
from ddpkit.ranks.virtual import VirtualRanks, share_of

MOST_AT_ONCE = 2**25  # bytes of gradients that are exchanged


class VirtualSteps:
    """The passes of this process's virtual ranks, step after step.

    networks: those that are trained. others: modules with a state of their own, such as a loss.
    optimizers: whose weights may be others than the networks' ones.

    All virtual ranks begin a step with the same state: buffers, and attributes, of the modules.
    After it that is virtual rank 0's.
    """

    def __init__(
        self,
        networks: Sequence[VirtualRanks],
        others: Iterable[nn.Module],
        optimizers: Iterable[Optimizer],
    ) -> None:
        self.networks = networks
        self.modules = [*(each.module for each in networks), *others]
        self.optimizers = list(optimizers)
        self.ranks = networks[0].ranks
        self.here = share_of(self.ranks)
        ModuleState(self.modules).give_all()

    def begin(self) -> None:
        """Begin the passes of a step, or of a part of one."""
        VirtualRanks.in_step = self.networks
        of_networks = itertools.chain(*(each.parameters() for each in self.networks))
        of_optimizers = itertools.chain(*map(replicas.weights_of, self.optimizers))
        every = [*of_networks, *of_optimizers]
        self.weights = [each for each in dict.fromkeys(every) if each.requires_grad]
        # Gradients from before, which are not divided by the ranks once more.
        self.before = [weight.grad for weight in self.weights]
        for weight in self.weights:
            weight.grad = None
        # On how many virtual ranks each weight had a gradient.
        self.counts = [0] * len(self.weights)
        # Sums of gradients, each of a number of neighbours: a power of two, but for the last.
        self.sums: list[list[Tensor]] = []
        self.state = ModuleState(self.modules)
        self.place = 0  # in `here`
        if len(self.here) > 1:
            self.at_begin = copied(self.state.taken())

    def begin_pass(self, number: int, passes: int) -> int:
        """Begin pass `number` of those of the step; return its virtual rank."""
        place = number // (passes // len(self.here))
        if place != self.place:
            self._take_gradients()
            if not self.place:
                self.of_first = self.state.taken()
            self.state.put(copied(self.at_begin))
            self.place = place
        return self.here[place]

    @torch.no_grad()
    def _take_gradients(self) -> None:
        """Add this virtual rank's gradients to the tree."""
        gradients = []
        for number, weight in enumerate(self.weights):
            if weight.grad is None:
                gradients.append(torch.zeros_like(weight))
                continue
            gradients.append(weight.grad.detach().to_dense())
            self.counts[number] += 1
            weight.grad = None
        # As with carries when one counts in binary: after three, of 2 and of 1, comes that of 4.
        taken = self.place
        while taken % 2:
            gradients = self._with_last(gradients)
            taken //= 2
        self.sums.append(gradients)

    def _with_last(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return the last of the sums with these added."""
        before = self.sums.pop()
        torch._foreach_add_(before, gradients)
        return before

    @torch.no_grad()
    def end(self) -> None:
        """Give the weights the mean of the gradients of all virtual ranks; all have to call it."""
        self._take_gradients()
        gradients = self.sums.pop()
        while self.sums:  # of a number of virtual ranks that is no power of two
            gradients = self._with_last(gradients)
        if self.place:
            self.state.put(self.of_first)
        counts = self.state.give_all(self.counts)
        for weight, before in zip(self.weights, self.before, strict=True):
            weight.grad = before
        # A weight without a gradient on any virtual rank has none.
        trained = [number for number, count in enumerate(counts) if count]
        means = [gradients[number] for number in trained]
        add_ranks(means)
        torch._foreach_div_(means, self.ranks)
        for number, mean in zip(trained, means, strict=True):
            weight = self.weights[number]
            weight.grad = mean if weight.grad is None else weight.grad + mean
        VirtualRanks.in_step = ()


def check_ended() -> None:
    """Raise a UserError within the loop over the batches of a step, or if it was left early."""
    if VirtualRanks.in_step:
        raise UserError(
            "virtual ranks: inside the loop over the batches of a step, or after a break, "
            "gradients are incomplete: step the optimizer after the whole loop"
        )


def add_ranks(tensors: Sequence[Tensor]) -> None:
    """Have each hold the sum over all processes, added as a tree of neighbours."""
    count = distributed.world_size()
    if count == 1:
        return
    # Each of one dtype and device
    buckets, _ = dist._compute_bucket_assignment_by_size(list(tensors), [MOST_AT_ONCE])
    for numbers in buckets:
        bucket = [tensors[number] for number in numbers]
        flat = torch.cat([each.flatten() for each in bucket])
        size = -(-flat.numel() // count)
        padded = flat.new_zeros(size * count)
        padded[: flat.numel()] = flat
        # Row r is what process r has of this one's stretch.
        rows = torch.empty_like(padded)
        dist.all_to_all_single(rows, padded)
        total = add_neighbours(list(rows.view(count, size)))
        dist.all_gather_into_tensor(padded, total)
        parts = padded[: flat.numel()].split([each.numel() for each in bucket])
        for each, part in zip(bucket, parts, strict=True):
            each.copy_(part.view_as(each))


def add_neighbours(rows: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors: of neighbours, then of neighbouring sums, and so on."""
    while len(rows) > 1:
        sums = [rows[i] + rows[i + 1] for i in range(0, len(rows) - 1, 2)]
        rows = sums + list(rows[2 * len(sums) :])
    return rows[0]
