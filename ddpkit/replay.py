"""Do a step of a run again, and stop in the debugger where it begins, in the loop of main.py.

    ./launch.sh -m ddpkit.replay EPOCH:STEP --debug-rank R[,R...] [--output-dir DIR]

EPOCH and STEP are as messages print them, both from 1. Flags of main.py may follow; those that are
not given are those of the run. Nothing in its folder changes, and it may go on meanwhile.
"""

import bdb
import importlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import ddpkit

if __name__ == "__main__":  # before torch, whose import takes seconds
    ddpkit.prepare()

from ddpkit import files
from ddpkit.errors import UserError
from ddpkit.ranks import distributed, environment, process
from ddpkit.run import checkpoint
from ddpkit.run.checkpoint import State
from ddpkit.run.flags import Parser, overrides
from ddpkit.run.folder import KEYS, Folder
from ddpkit.run.loop import Run
from ddpkit.run.reporting import Reporter


def read_flags() -> tuple[tuple[int, int], list[str]]:
    """Return the step, and the flags for main.py; those of the run become the defaults."""
    parser = Parser(prog="python -m ddpkit.replay", description=__doc__)
    parser.add_argument("step", metavar="EPOCH:STEP", help="where to stop; both begin at 1")
    parser.add_argument("--output-dir", metavar="DIR", type=Path, default=Path("runs/default"))
    own, words = parser.parse_known_args()
    found = re.fullmatch(r"0*([1-9]\d*):0*([1-9]\d*)", own.step)
    if not found or "--eval-only" in words:
        parser.error("expected EPOCH:STEP of training, such as 3:120, and no --eval-only")
    environment.adopt()
    path, ranks = own.output_dir / "args.json", int(os.environ.get("WORLD_SIZE", 1))
    try:
        run, then = (json.loads(files.read(path))[name] for name in ("flags", "ranks"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({error}): is --output-dir a run?") from None
    run["accumulate"], left = divmod(then * run.get("accumulate", 1), ranks)  # the same images
    if left:
        raise UserError(f"{ranks} ranks cannot share a step of {then}: use {then} or one")
    for name in run.keys() - {"eval_only", "output_dir", "workers"}:
        overrides[name] = run[name]
    return (int(found[1]), int(found[2])), [*words, "--output-dir", str(own.output_dir)]


def following(state: State) -> tuple[int, int]:
    """Return the step that follows a checkpoint."""
    return state["epoch"] + 1, state["seen"] // state["global_batch"] + 1


class ReplayFolder(Folder):
    """The folder of a run of which `step` is done again: it is read, but never changed."""

    step: tuple[int, int]

    def find_checkpoint(self) -> State | None:
        if not any(distributed.gather_objects(process.is_debugged())):
            raise UserError("no debugger to stop in: start it with F5 or --debug-rank 0")
        self.state = distributed.from_rank_zero(self._search)  # the run may be renaming its files
        origin = self.state["path"] if self.state else "the start of the run"
        distributed.say("replaying epoch {}, step {}, from {}".format(*self.step, origin))
        return self.state

    def _search(self) -> State | None:
        """Return the newest checkpoint before the step; None to start from scratch."""
        found: State | None = None
        for path in (*self.saves(), self.path / "best.pt", Path(self.resume)):
            with suppress(UserError):
                state = checkpoint.read(path, KEYS)
                if following(state) <= self.step:
                    found = max(found or state, state, key=following)
        if found is None and self.resume not in ("auto", "never"):
            raise UserError(f"{self.path}: no checkpoint is from before the step")
        return found

    def open_for_training(self, is_new: bool) -> None:
        pass

    def best_score(self, best_of: str | None, until: float) -> tuple[float, int]:
        return -math.inf, 0

    def add(self, state: State, is_best: bool, replace: bool) -> None:
        if following(state) > self.step:
            raise bdb.BdbQuit  # as debuggers do when they are left


class ReplayRun(Run):
    """The run up to the end of that step, with a breakpoint where it begins."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "save_every": 1})
        epoch, step = ReplayFolder.step
        if epoch > self.epochs or step > self.source.steps:
            raise UserError(f"the run has {self.epochs} epoch(s) of {self.source.steps} step(s)")

    def batches(self) -> Iterator[tuple[int, tuple]]:
        for i, parts in super().batches():
            if (self.epoch + 1, i / self.passes_per_step + 1) == ReplayFolder.step:
                stop_here()
            yield i, parts


def stop_here() -> None:
    """Stop in the debugger, at the next line of the project that called this."""
    frame = sys._getframe()
    while frame.f_back and re.match(r"(ddpkit|tqdm)\b", frame.f_globals["__name__"]):
        frame = frame.f_back
    process.stop_in_debugger(frame)


def main() -> None:
    ReplayFolder.step, words = read_flags()
    sys.argv = ["main.py", *words]
    vars(ddpkit).update(Folder=ReplayFolder, Run=ReplayRun)  # which main.py makes
    Reporter.silent = True
    with suppress(bdb.BdbQuit):
        importlib.import_module("main").main()
        raise UserError("the run ended before this step")
    distributed.say("epoch {}, step {} is over; nothing was saved".format(*ReplayFolder.step))


if __name__ == "__main__":
    ddpkit.start(importlib.import_module("ddpkit.replay").main)
