"""How far a run is, as a line; and the sums of an epoch's losses."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddpkit.ranks import distributed
from ddpkit.run.states import State

LOSS = "train_loss"
MOST_PENDING = 500  # numbers that are one tensor each; then they are joined
UNIT = 2**1074  # a float is a whole number of such parts of 1
Number = Tensor | float


class Exact:
    """A sum of numbers that is rounded once, at its end: the same in any order.

    Numbers on a device stay there until the sum is read.
    """

    def __init__(self) -> None:
        self.total = 0  # in parts of 1 / UNIT
        self.lost = 0.0  # NaN or infinite, if a number was
        self.pending: list[Tensor] = []
        self.joined: list[Tensor] = []

    def include(self, number: Number) -> None:
        if isinstance(number, Tensor):
            self.pending.append(number.detach())
            if len(self.pending) == MOST_PENDING:
                self._join()
        else:
            self._add_float(float(number))

    def _join(self) -> None:
        kinds = {(each.dtype, each.device) for each in self.pending}
        if len(kinds) > 1:  # torch would take them to one, in which some may be rounded
            self.pending = [each.cpu().double() for each in self.pending]
        if self.pending:
            self.joined.append(torch.stack(self.pending))
            self.pending = []

    def _add_float(self, number: float) -> None:
        try:
            numerator, denominator = number.as_integer_ratio()
        except (OverflowError, ValueError):
            self.lost += number
        else:
            self.total += numerator * (UNIT // denominator)

    def units(self) -> int:
        """Return the sum of the finite numbers in parts of 1 / UNIT; waits for the device."""
        self._join()
        for numbers in self.joined:
            for number in numbers.tolist():
                self._add_float(number)
        self.joined = []
        return self.total

    def __float__(self) -> float:
        return self.units() / UNIT + self.lost


class Sums:
    """This rank's sums over the steps of an epoch, by name, without reading the device.

    device: of what is added. ranks: how many there are, virtual ones, too. Each has two columns:
    the sum, and that by which it is divided, 0 if it is no mean. The first is the loss.
    """

    def __init__(self, device: torch.device, ranks: int) -> None:
        self.device = device
        self.ranks = ranks
        self.clear()

    def clear(self) -> None:
        self.rows = {LOSS: (Exact(), Exact())}
        # On the device, since the log's last line: losses with their count.
        self.recent: list[Tensor] = []

    def add_step(
        self,
        losses: Sequence[Number],
        count: Number,
        named: Mapping[str, Any],
    ) -> None:
        """Add those of a step: of losses a mean, whose mean over the ranks is that of the step.

        count: of the labels of all ranks. named: of this rank, a number, or a sum and its count.
        """
        share = count / self.ranks
        for loss in losses:
            weighted = loss * share
            self.rows[LOSS][0].include(weighted)
            self._note(weighted, 0)
        self._note(count, 1)
        if distributed.is_rank_zero():  # it is the same on all
            self.rows[LOSS][1].include(count)
        for name, value in named.items():
            row = self.rows.setdefault(name, (Exact(), Exact()))
            pair = value if isinstance(value, Sequence) else (value,)
            for column, number in zip(row, pair, strict=False):
                column.include(number)

    def _note(self, number: Number, column: int) -> None:
        """Add to what `loss_since_log` returns, rounded, without reading the device."""
        if not self.recent:
            self.recent = [torch.zeros(2, device=self.device)]
        self.recent[0][column].add_(number)

    def loss_since_log(self) -> Tensor:
        """Return the mean loss over all ranks since the call before; all have to call it."""
        loss, count = self.recent.pop()
        return distributed.reduce_tensor(loss) / count

    @property
    def losses(self) -> Tensor:
        """The sum of this rank's losses, and rank 0's of their count, float64 (2,)."""
        loss, count = self.rows[LOSS]
        return torch.tensor([float(loss), float(count)], dtype=torch.float64)

    def means_of_all(self) -> dict[str, float]:
        """Return by name the means, and the sums of what has no count; all have to call it."""
        return {
            name: total / (count or UNIT)
            for name, (total, count) in self._of_all().items()
        }

    def _of_all(self) -> dict[str, tuple[int, int]]:
        """Return the sums of all ranks, by name, in parts of 1 / UNIT."""
        mine = {name: [each.units() for each in row] for name, row in self.rows.items()}
        of_ranks = distributed.gather_objects(mine)
        found = {}
        for name in mine:
            total, count = zip(*[each[name] for each in of_ranks], strict=True)
            found[name] = sum(total), sum(count)
        return found

    def kept(self) -> State:
        """Return what a checkpoint keeps: the sums of all ranks; all have to call it."""
        sums = {
            name: {"total": [hex(column) for column in row]}
            for name, row in self._of_all().items()
        }
        return {"sums": sums}

    def resume(self, state: State) -> None:
        """Go on with the sums of a checkpoint, which rank 0 has from there on."""
        saved = {LOSS: {"ranks": state["totals"]}, **state.get("sums", {})}
        for name, each in saved.items():
            row = self.rows[name] = (Exact(), Exact())
            if not distributed.is_rank_zero():
                continue
            for column, total in zip(row, each.get("total", ()), strict=False):
                column.total = int(total, 16)
            for rank in each.get("ranks", ()):  # as earlier versions have it
                for column, number in zip(row, rank, strict=True):
                    column.include(number)


def progress_line(state: State, steps: int, of_epochs: str = "epochs") -> str:
    """Return what a checkpoint has: epochs, and `steps` of the next one."""
    line = f"{state['path']}: {state['epoch']} {of_epochs} done"
    if state.get("best") is not None and state["epoch"]:
        line += f", best {state['best']:.4f}"
    if steps:
        line += f" and {steps} step{'s' * (steps != 1)} of the next"
    return line
