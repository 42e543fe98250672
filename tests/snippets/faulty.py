"""main.py on ranks that are made to fail: what the functions of faults.py begin with."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from forked import Patch, start, wait

from ddpkit.run.loop import Run


def after_step(
    step: int, act: Callable[[], object], rank: int | None = None, before: bool = False
) -> Patch:
    """Have the ranks (or one) call `act` when they have taken `step` steps, once."""

    def patch() -> None:
        end_step = Run.end_step

        def patched(self: Run) -> None:
            is_here = rank in (None, int(os.environ["RANK"]))
            if before and is_here and self.step + 1 == step:
                act()
            end_step(self)
            if not before and is_here and self.step == step:
                act()

        Run.end_step = patched

    return patch


class Runs:
    """Runs of two ranks on the same data with the same flags, in folders of their own."""

    def __init__(self, data: str, folder: str, words: tuple) -> None:
        self.data, self.folder, self.words = data, folder, words

    def flags(self, name: str, *more: object) -> list:
        return ["--data", self.data, *self.words, "--output-dir", f"{self.folder}/{name}", *more]

    def train(self, name: str, *more: object, **options: object) -> list:
        """Return the ranks' statuses, and what they say on stdout and on stderr."""
        return [wait(self.start(name, *more, **options)), *self.said(name)]

    def start(self, name: str, *more: object, **options: object) -> list[int]:
        output = f"{self.folder}/{name}.said"
        return start(2, *self.flags(name, *more), output=output, draws=False, **options)

    def said(self, name: str) -> list[str]:
        return [Path(f"{self.folder}/{name}.said.{end}").read_text() for end in ("out", "err")]


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
