"""Do a step of a run again, and stop in the debugger where it begins, in the loop of main.py.

One process, in a terminal, with pdb:  python -m engine.replay EPOCH:STEP [--output-dir DIR]
One rank per GPU, or two on CPUs:      ./launch.sh -m engine.replay EPOCH:STEP --debug-rank R[,R...]

EPOCH and STEP are as messages print them, both from 1. Flags of main.py may follow; those that are
not given are those of the run. Nothing in its folder changes, and it may go on meanwhile.
"""

import bdb
import importlib
import json
import math
import os
import pdb
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import engine

if __name__ == "__main__":  # before torch, whose import takes seconds
    engine.prepare()

from engine.errors import UserError
from engine.ranks import distributed, environment, process
from engine.run import checkpoint
from engine.run.checkpoint import State
from engine.run.flags import Parser, overrides
from engine.run.folder import KEYS, Folder
from engine.run.loop import Run
from engine.run.reporting import Reporter

Position = tuple[int, int]  # an epoch and an optimizer step in it, both from 1
OWN = {"eval_only", "output_dir", "workers"}  # flags that are not those of the run


def parse(text: str) -> Position:
    epoch, _, step = text.partition(":")
    if not (epoch.isdecimal() and step.isdecimal() and int(epoch) and int(step)):
        raise ArgumentTypeError(f"{text} is not EPOCH:STEP, such as 3:120; both begin at 1")
    return int(epoch), int(step)


def read_flags() -> tuple[Position, list[str], str]:
    """Return the step, the flags for main.py, and a line about what differs from the run, or ""."""
    usage = "python -m engine.replay EPOCH:STEP [flags of main.py]"
    parser = Parser(prog=usage.partition(" EPOCH")[0], usage=usage, description=__doc__)
    parser.add_argument("step", metavar="EPOCH:STEP", type=parse, help="where to stop")
    parser.add_argument("--output-dir", metavar="DIR", type=Path, default=Path("runs/default"))
    own, words = parser.parse_known_args()
    environment.adopt()
    path, now = own.output_dir / "args.json", int(os.environ.get("WORLD_SIZE", 1))
    try:
        record = json.loads(path.read_text())
        run, then = dict(record["flags"]), int(record["ranks"])
        run["accumulate"], left = divmod(then * run["accumulate"], now)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "strerror", None) or repr(error)
        remedy = "--output-dir names a run, which each node has to see"
        raise UserError(f"{path}: cannot be read ({reason}): {remedy}") from None
    if left:
        passes = f"the {now * run['accumulate'] + left} passes of a step"
        raise UserError(f"{passes} cannot be shared by {now} ranks; use the run's {then} or one")
    overrides.update((name, value) for name, value in run.items() if name not in OWN)
    line = f"{then} rank(s) then, {now} now: --accumulate {run['accumulate']} makes the same step"
    return own.step, [*words, "--output-dir", str(own.output_dir)], line if then != now else ""


class Over(Exception):
    """Raised on all ranks after the step, or after the earlier one that is the argument."""


def following(state: State) -> Position:
    """Return the step that follows a checkpoint."""
    return state["epoch"] + 1, state["seen"] // state["global_batch"] + 1


def name(step: Position) -> str:
    return "epoch {}, step {}".format(*step)


class ReplayFolder(Folder):
    """The folder of a run of which `step` is done again: it is read, but never changed."""

    step: Position

    def best(self) -> State:
        raise UserError("a step of an evaluation cannot be replayed: leave out --eval-only")

    def find_checkpoint(self) -> State | None:
        """Return the newest checkpoint before the step; None to start from scratch."""
        check_debugger()
        state = distributed.from_rank_zero(self._search)  # the run may be renaming its files
        origin = f"from {state['path']}" if state else "from the start of the run"
        distributed.say(f"replaying {name(self.step)}, {origin}")
        self.state = state
        return state

    def _search(self) -> State | None:
        found: State | None = None
        for path in (*self.saves(), self.path / "best.pt", Path(self.resume)):
            with suppress(UserError):
                state = checkpoint.read(path, KEYS)
                if following(state) <= self.step:
                    found = max(found or state, state, key=following)
        if found is None and self.resume not in ("auto", "never"):
            none = f"no checkpoint in {self.path} is from before {name(self.step)}"
            raise UserError(f"{none}, nor is {self.resume}, with which the run began")
        return found

    def open_for_training(self, is_new: bool) -> None:
        pass

    def best_score(self, best_of: str | None, until: float) -> tuple[float, int]:
        return -math.inf, 0

    def add(self, state: State, is_best: bool, replace: bool) -> None:
        """Save nothing; raise Over once the step has been done."""
        if following(state) > self.step:
            raise Over


class ReplayRun(Run):
    """The run up to the end of that step, with a breakpoint where it begins."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "save_every": 1})
        epoch, step = ReplayFolder.step
        if epoch > self.epochs or step > self.source.steps:
            length = f"{self.epochs} epoch(s) of {self.source.steps} step(s)"
            raise UserError(f"{name((epoch, step))}: the run has {length}")

    def batches(self) -> Iterator[tuple[int, tuple]]:
        for i, parts in super().batches():
            if (self.epoch + 1, i / self.passes_per_step + 1) == ReplayFolder.step:
                stop_here()
            yield i, parts

    def _not_finite(self, what: str, rank: int) -> Exception:
        distributed.say(f"{what} became NaN or inf at {name(self.position)}")
        return Over(self.position)


def check_debugger() -> None:
    is_alone = distributed.world_size() == 1 and sys.stdin is not None and sys.stdin.isatty()
    if not any(distributed.gather_objects(is_alone or process.is_debugged())):
        start = "start it with F5, with --debug-rank 0, or as one process in a terminal"
        raise UserError(f"no debugger to stop in: {start}: python -m engine.replay")


def stop_here() -> None:
    """Stop in the debugger, or pdb, at the next line of the project that called this."""
    frame = sys._getframe()
    while is_other(frame.f_globals["__name__"], frame.f_code.co_filename):
        assert frame.f_back
        frame = frame.f_back
    if process.is_debugged():
        sys.modules["pydevd"].settrace(trace_only_current_thread=True, stop_at_frame=frame)
    elif distributed.world_size() == 1:
        debugger = pdb.Pdb(skip=["bdb", "engine", "engine.*"])  # "step" goes over those
        debugger.set_trace(frame)
        debugger.set_next(frame)


def is_other(module: str, file: str) -> bool:
    return module.partition(".")[0] == "engine" or "site-packages" in file


def main() -> None:
    """Come to the step and do it; if an earlier one is the first that is not finite, do that."""
    step, words, line = read_flags()
    sys.argv = ["main.py", *words]
    if line:
        distributed.say(line)
    vars(engine).update(Folder=ReplayFolder, Run=ReplayRun)  # which main.py makes
    Reporter.silent = True
    while True:
        ReplayFolder.step = step
        try:
            importlib.import_module("main").main()
            raise UserError(f"the run ended before {name(step)}")
        except (Over, bdb.BdbQuit) as end:
            bad = end.args[0] if end.args else None
            if not bad:
                return distributed.say(f"{name(step)} is over; nothing was saved")
            if bad >= step:
                return
            step = bad


if __name__ == "__main__":  # as a module of engine, which pdb steps over
    engine.start(importlib.import_module("engine.replay").main)
