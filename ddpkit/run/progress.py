"""How far a run is, as a line; and the sums of an epoch's losses."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddpkit.ranks import devices, distributed
from ddpkit.run.states import State

LOSS = "train_loss"


class Sums:
    """This rank's sums over the steps of an epoch, by name, without reading the device.

    device: of what is added. Each has two columns, float64: the sum, and that by which it is
    divided, which is 0 if it is no mean. The first is the loss.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.place = devices.for_sums(device)
        self.clear()

    def clear(self) -> None:
        self.rows = collections.defaultdict(self._row)
        self.logged = self.rows[LOSS].clone()  # what the log has of the loss
        # what is to be added, in the order of the steps, still on the device
        self.pending: list[tuple[str, Sequence[Tensor | float], float]] = []

    def _row(self) -> Tensor:
        return torch.zeros(2, dtype=torch.float64, device=self.place)

    def add_step(
        self, loss: Tensor | float, count: Tensor | float, named: Mapping[str, Any]
    ) -> None:
        """Add those of a step: of losses a mean, whose mean over the ranks is that of the step.

        count: of the labels of all ranks. named: of this rank, a number, or a sum and its count.
        """
        share = 1 / distributed.world_size()
        self.pending.append((LOSS, (loss * count, count), share))
        for name, value in named.items():
            pair = value if isinstance(value, Sequence) else (value,)
            self.pending.append((name, pair, 1))
        # To sums on the CPU they go when these are read: a copy in each step would wait.
        if self.place == self.device:
            self._add_pending()

    def _add_pending(self) -> None:
        for name, pair, share in self.pending:
            for column, value in enumerate(pair):
                if isinstance(value, Tensor):
                    value = value.detach().to(self.place)
                self.rows[name][column].add_(value, alpha=share)
        self.pending.clear()

    @property
    def losses(self) -> Tensor:
        """The sum of this rank's losses, and their count, float64 (2,)."""
        self._add_pending()
        return self.rows[LOSS]

    def loss_since_log(self) -> Tensor:
        """Return the mean loss over all ranks since the call before; all have to call it."""
        loss, count = distributed.reduce_tensor(self.losses - self.logged)
        self.logged = self.losses.clone()
        return loss / count

    def reduced(self) -> Tensor:
        """Return the sums of all ranks, float64 (names, 2); all have to call it."""
        self._add_pending()
        return distributed.reduce_tensor(torch.stack(list(self.rows.values())))

    def of_all_ranks(self, totals: Tensor) -> dict[str, float]:
        """Return by name the means, and the sums of what has no count; totals: `reduced`."""
        found = {}
        for name, (total, count) in zip(self.rows, totals.tolist(), strict=True):
            # class weights may make the count small
            found[name] = total / count if count else total
        return found

    def taken(self, losses: Tensor) -> State:
        """Return what a checkpoint keeps; losses: of all ranks, (ranks, 2)."""
        self._add_pending()
        sums = {}
        for name, row in self.rows.items():
            if name != LOSS:
                sums[name] = {"ranks": distributed.gather(row).tolist()}
        return {"totals": losses.tolist(), "sums": sums}

    def resume(self, state: State) -> None:
        """Go on with the sums of a checkpoint; rank 0 with all, if the ranks were others."""
        saved = {LOSS: state["totals"]}
        for name, each in state.get("sums", {}).items():
            saved[name] = each["ranks"]
        for name, rows in saved.items():
            ranks = self.rows[name].new_tensor(rows)
            if len(ranks) == distributed.world_size():
                self.rows[name] += ranks[distributed.rank()]
            elif distributed.is_rank_zero():
                self.rows[name] += ranks.sum(0)
        self.logged = self.rows[LOSS].clone()


def progress_line(state: State, steps: int, of_epochs: str = "epochs") -> str:
    """Return what a checkpoint has: epochs, and `steps` of the next one."""
    line = f"{state['path']}: {state['epoch']} {of_epochs} done"
    if state.get("best") is not None and state["epoch"]:
        line += f", best {state['best']:.4f}"
    if steps:
        line += f" and {steps} step{'s' * (steps != 1)} of the next"
    return line
