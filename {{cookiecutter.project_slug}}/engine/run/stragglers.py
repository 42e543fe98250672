"""A rank that computes slower than the others, named at the end of an epoch.

A step takes equally long on all ranks, as backward() waits for the slowest. A forward pass waits
for nobody, so its time shows a throttled GPU, a busy CPU or too few threads.
"""

import math

import torch
from torch import Tensor

from engine.ranks import distributed, positions
from engine.run import waiting
from engine.run.waiting import Moment

SAMPLES = 100  # passes of an epoch that are timed, at most
FEWEST = 10  # passes that have to be
RATIO = 1.25  # from which on a rank is slow
SECONDS, SHARE = 1.0, 0.02  # that it has to cost in the forward passes, of an epoch
QUARTERS = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)


class Stopwatch:
    """Takes the times of an epoch's forward passes, without reading the device."""

    def __init__(self, device: torch.device, passes: int) -> None:
        self.device = device
        self.every = math.ceil(passes / SAMPLES) or 1
        self.passes = 0
        self.times: list[tuple[Moment, Moment]] = []  # (start, end)
        self.started: tuple[Moment, int] | None = None  # and how many collectives by then

    def start(self) -> None:
        self.passes += 1
        if self.passes % self.every == 0:
            self.started = waiting.now(self.device), distributed.collectives()

    def end(self) -> None:
        if self.started is None:
            return
        (start, reached), self.started = self.started, None
        # In a collective, such as SyncBatchNorm's, it would have waited for the others.
        if reached == distributed.collectives():
            self.times.append((start, waiting.now(self.device)))

    def quartiles(self) -> Tensor:
        """Return the quartiles of the times, in seconds, float64 (3,); NaN if these are too few.

        Waits for the device.
        """
        if len(self.times) < FEWEST:
            return QUARTERS * math.nan
        waiting.await_moment(self.times[-1][1])
        times = [waiting.seconds(start, end) for start, end in self.times]
        return torch.tensor(times, dtype=torch.float64).quantile(QUARTERS)

    def explain(self, quartiles: Tensor, seconds: float) -> str | None:
        """Return a line about the slowest rank, if it is much slower than the others usually are.

        quartiles: of all ranks, (ranks, 3). seconds: how long the epoch took.

        On a machine that others use, too, medians differ. So it has to be slower in three of four
        passes than the others in three of four.
        """
        if len(quartiles) == 1:
            return None
        rank = int(quartiles[:, 1].argmax())
        least, own, _ = quartiles[rank].tolist()
        others = torch.cat((quartiles[:rank], quartiles[rank + 1 :]))
        _, usual, most = others.quantile(0.5, dim=0).tolist()
        cost = self.passes * (own - usual)
        if not (least > most and own > RATIO * usual and cost > max(SECONDS, SHARE * seconds)):
            return None
        node, _ = positions.process_of(rank)
        part = "CPU" if self.device.type == "cpu" else "GPU"
        return (
            f"rank {rank} on {node} needs {own / usual:.1f} x the others' time for a forward pass "
            f"({1000 * own:.3g} ms, median {1000 * usual:.3g} ms): a slower {part} there, or a "
            "busy CPU?"
        )
