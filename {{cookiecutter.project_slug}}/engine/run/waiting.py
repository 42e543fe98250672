"""How long a device has waited for batches, on its own clock.

The host queues work for a GPU and runs ahead of it. While it waits for a batch, the GPU mostly has
work left, so a clock of the host would show waits that cost nothing.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from engine.run import machine

INPUT_BOUND = 0.1  # from this share of time spent waiting for images, a message says so

Batch = TypeVar("Batch")
Moment = torch.Event | float  # of a GPU, or of the CPU in seconds


def now(device: torch.device) -> Moment:
    """Return the moment at which `device` has done what is queued by now; does not wait for it."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device=device, enable_timing=True)
    event.record()
    return event


def has_come(moment: Moment) -> bool:
    """Return whether a moment has passed; does not wait for it."""
    return isinstance(moment, float) or moment.query()


def await_moment(moment: Moment) -> None:
    if not isinstance(moment, float):
        moment.synchronize()


def seconds(start: Moment, end: Moment) -> float:
    """Return the time between two moments of the same device, which have passed."""
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    return start.elapsed_time(end) / 1000


class Waiting:
    """The time for which a device has had nothing to do because it waited for a batch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.over = 0.0  # seconds, in the waits that have been added up
        self.others: deque[tuple[Moment, Moment]] = deque()  # as many as steps are queued

    def timed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches. To be asked for the next one when all work on the last is queued."""
        asked = now(self.device)
        for batch in batches:
            # If the device is still at work when the batch comes, both moments are the same.
            self.others.append((asked, now(self.device)))
            self.so_far()
            yield batch
            asked = now(self.device)

    def so_far(self) -> float:
        """Return the seconds until now, without waits that the device has not come to yet."""
        while self.others and has_come(self.others[0][1]):
            self.over += seconds(*self.others.popleft())
        return self.over

    def total(self) -> float:
        """Return the seconds; waits for the device."""
        if self.others:
            await_moment(self.others[-1][1])
        return self.so_far()


def explain(wait: float, seconds: float, workers: int) -> str | None:
    """Return a line if training spends much time waiting for images, with what helps.

    wait: the share of the `seconds` that it takes. workers: of the loader, per rank.
    """
    if wait < INPUT_BOUND or wait * seconds <= 1:
        return None
    share = machine.cpu_share()
    more = f"--workers {share}, " if workers < share else ""
    return (
        f"input-bound: {wait:.0%} of {seconds:.0f} s were spent waiting for images, with "
        f"{workers} worker(s) on {share} CPU(s) per rank; what helps: {more}"
        "prepare_data.py (or a smaller --short-side, if that is done), more CPUs"
    )
