"""How far a run is, as a line; and the sums of an epoch's losses."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from ddpkit.ranks import distributed
from ddpkit.run.states import State

LOSS = "train_loss"
MOST_PENDING = 500  # tensors; then they are joined
Number = Tensor | float


class Exact:
    """A sum of numbers that is rounded once, at its end: the same in any order.

    Numbers on a device stay there until the sum is read. Each is divided by `parts` before.
    """

    def __init__(self, parts: int = 1) -> None:
        self.parts = parts
        self.total = Fraction()
        self.lost = 0.0  # NaN or infinite, if a number was
        self.pending: list[Tensor] = []

    def include(self, number: Number) -> None:
        if not isinstance(number, Tensor):
            self._add(float(number))
            return
        self.pending.append(number.detach())
        if len(self.pending) == MOST_PENDING:
            self._join()

    def _join(self) -> None:
        kinds = {(each.dtype, each.device) for each in self.pending}
        if len(kinds) > 1:  # torch would take them to one, in which some may be rounded
            self.pending = [each.cpu().double() for each in self.pending]
        if self.pending:
            self.pending = [torch.hstack(self.pending)]

    def _add(self, number: float) -> None:
        number /= self.parts
        try:
            self.total += Fraction(number)
        except (OverflowError, ValueError):
            self.lost += number

    def finite_sum(self) -> Fraction:
        """Return the sum of the finite numbers; waits for the device."""
        self._join()
        for numbers in self.pending:
            for number in numbers.tolist():
                self._add(number)
        self.pending = []
        return self.total


# By name: the sum, that by which it is divided, 0 if it is no mean, and what is not finite.
Rows = dict[str, tuple[Fraction, Fraction, float]]


class Sums:
    """This rank's sums over the steps of an epoch, by name, without reading the device.

    ranks: how many there are, virtual ones, too. is_logged: whether `loss_since_log` is called now
    and then. Each has two columns: the sum, and that by which it is divided, 0 if it is no mean.
    The first is the loss.
    """

    def __init__(self, ranks: int, is_logged: bool = False) -> None:
        self.ranks = ranks
        self.is_logged = is_logged
        self.is_first = distributed.is_rank_zero()
        self.clear()

    def clear(self) -> None:
        self.rows = {LOSS: (Exact(self.ranks), Exact())}
        # since the log's last line
        self.recent_losses: list[Number] = []
        self.recent_counts: list[Number] = []

    def add_step(
        self,
        losses: Sequence[Number],
        count: Number,
        named: Mapping[str, Any],
    ) -> None:
        """Add those of a step: of losses a mean, whose mean over the ranks is that of the step.

        count: of the labels of all ranks. named: of this rank, a number, or a sum and its count.
        """
        total, divisor = self.rows[LOSS]
        weighted = [loss * count for loss in losses]
        for each in weighted:
            total.include(each)
        if self.is_first:  # it is the same on all
            divisor.include(count)
        if self.is_logged:
            self.recent_losses += weighted
            self.recent_counts.append(count)
        for name, value in named.items():
            row = self.rows.setdefault(name, (Exact(), Exact()))
            pair = value if isinstance(value, Sequence) else (value,)
            for column, number in zip(row, pair, strict=False):
                column.include(number)

    def loss_since_log(self) -> Tensor:
        """Return the mean loss over all ranks since the call before; all have to call it."""
        total = distributed.reduce_tensor(added(self.recent_losses))
        mean = total / (added(self.recent_counts) * self.ranks)
        self.recent_losses = []
        self.recent_counts = []
        return mean

    def collect(self) -> Rows:
        """Return them, read from the device."""
        rows = {}
        for name, (first, second) in self.rows.items():
            total = first.finite_sum()
            count = second.finite_sum()
            rows[name] = total, count, first.lost + second.lost
        return rows

    def resume(self, state: State) -> None:
        """Go on with the sums of a checkpoint, which rank 0 has from there on."""
        saved = state.get("sums")
        if saved is None:  # version 2 has those of each rank
            of_ranks = zip(*state["totals"], strict=True)
            totals = [sum(map(Fraction, each), Fraction()) for each in of_ranks]
            saved = {LOSS: [*totals, 0.0]}
        for name, (total, count, lost) in saved.items():
            row = self.rows.setdefault(name, (Exact(), Exact()))
            if self.is_first:
                row[0].total = Fraction(total)
                row[0].lost = lost
                row[1].total = Fraction(count)


def added_up(ranks: Sequence[Rows]) -> Rows:
    """Return the sums over all ranks."""
    sums = {}
    for name in ranks[0]:
        total, count, lost = zip(*[rows[name] for rows in ranks], strict=True)
        sums[name] = sum(total, Fraction()), sum(count, Fraction()), sum(lost)
    return sums


def means_of(sums: Rows) -> dict[str, float]:
    """Return by name the means, and the sums of what has no count."""
    return {
        name: float(total / (count or 1)) + lost
        for name, (total, count, lost) in sums.items()
    }


def added(numbers: Sequence[Number]) -> Tensor:
    """Return the sum of numbers, rounded, without reading the device."""
    return torch.stack([torch.as_tensor(each).detach() for each in numbers]).sum()


def progress_line(state: State, steps: int, of_epochs: str) -> str:
    """Return what a checkpoint has: epochs, and `steps` of the next one."""
    line = f"{state['path']}: {state['epoch']} {of_epochs} done"
    if state.get("best") is not None and state["epoch"]:
        line += f", best {state['best']:.4f}"
    if steps:
        line += f" and {steps} step{'s' * (steps != 1)} of the next"
    return line


def say_batches(then: int, now: int, sizes: str, rate: str) -> None:
    """Print a line if a run continues with another global batch; 0 then: there was none.

    sizes, rate: what the caller calls its factors, and the learning rate.
    """
    if then not in (0, now):
        distributed.print0(
            f"the global batch was {then}, now {now}: results will differ; keep {sizes} = {then}, "
            f"or scale {rate} by about {now / then:.3g}"
        )
