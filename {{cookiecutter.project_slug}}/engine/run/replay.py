"""--replay EPOCH:STEP: a step of a run is done again, up to a breakpoint before its forward pass.

Everything is as it was in that step, because a run continues from a checkpoint to the bit. Nothing
in the run's folder changes, and the run itself may go on meanwhile.
"""

import bdb
import contextlib
import json
import math
import os
import shlex
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from engine.data import seeding
from engine.errors import UserError
from engine.ranks import distributed, process
from engine.run import checkpoint
from engine.run.checkpoint import State
from engine.run.folder import KEYS, Position, RunFolder
from engine.run.reporting import Reporter


class Over(Exception):
    """Raised on all ranks once the step has been done again."""


class NotFinite(UserError):
    """The loss or a weight became NaN or inf by the step `position`."""

    def __init__(self, what: str, position: Position, rank: int, folder: Path) -> None:
        """Take the rank to look at, and the folder of the run."""
        self.position = position
        self.reason = f"{what} became NaN or inf at {name(position)}"
        super().__init__(
            f"{self.reason}: try a lower --lr or more --warmup-epochs, and check the input images; "
            f"the checkpoints in {folder} were saved before that; to step through it: "
            f"{command(position, rank, folder)}"
        )


def position(text: str) -> Position:
    """Parse EPOCH:STEP, for argparse."""
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ArgumentTypeError(f"{text} is not EPOCH:STEP, such as 3:120; both begin at 1")
    return int(parts[0]), int(parts[1])


def name(position: Position) -> str:
    return "epoch {}, step {}".format(*position)


def command(position: Position, rank: int, folder: Path) -> str:
    """Return what to type to replay a step on as many ranks as there are now."""
    step = f"--output-dir {shlex.quote(str(folder))} --replay {position[0]}:{position[1]}"
    if distributed.world_size() == 1:
        return f"python main.py {step}"
    ranks = distributed.local_world_size()
    count = f"NPROC={ranks} " if ranks != (torch.accelerator.device_count() or 2) else ""
    return f"{count}./launch.sh {step} --debug-rank {rank}"


def check(position: Position | None, epochs: int, steps: int) -> None:
    """Raise a UserError if a run of `epochs` with so many `steps` each has no such step."""
    if position and (position[0] > epochs or position[1] > steps):
        flag = "--replay {}:{}".format(*position)
        raise UserError(f"{flag}: the run has {epochs} epoch(s) of {steps} step(s)")


def read_flags(folder: Path, left_out: Collection[str]) -> dict[str, object]:
    """Return the flags of the run in `folder` when it was last started, from its args.json.

    With another number of ranks --batch-size and --accumulate are such that the global batch is the
    same. left_out: flags that are of no use here.

    Raises a UserError if there is no debugger to stop in.
    """
    _need_debugger()
    then, ranks = distributed.from_rank_zero(_read_record, folder)
    batch, accumulate, size = then["batch_size"], then["accumulate"], distributed.world_size()
    if ranks != size:
        images, left = divmod(ranks * batch * accumulate, size)
        if left:
            raise UserError(
                f"--replay: the global batch of {ranks * batch * accumulate} images cannot be "
                f"divided by {size} ranks; use the {ranks} rank(s) of the run, or one"
            )
        batch = max(number for number in range(1, batch + 1) if images % number == 0)
        accumulate = images // batch
        distributed.say(
            f"--replay: {ranks} rank(s) then, {size} now: --batch-size {batch} "
            f"--accumulate {accumulate} make the same global batch"
        )
    then |= {"batch_size": batch, "accumulate": accumulate}
    return {
        key: ",".join(map(str, value)) if isinstance(value, list) else value  # for argparse
        for key, value in then.items()
        if key == "resume" or key not in left_out
    }


def _read_record(folder: Path) -> tuple[dict[str, Any], int]:
    """Return the flags, with what the machine chose, and the number of ranks."""
    path = folder / "args.json"
    try:
        record = json.loads(path.read_text())
        return {**record["flags"], **record["settings"]}, record["ranks"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "strerror", None) or repr(error)
        raise UserError(
            f"{path}: cannot be read ({reason}); --replay needs the --output-dir of a run"
        ) from None


def _need_debugger() -> None:
    """Have breakpoint() stop in the ranks with a debugger; raise a UserError if none has one."""
    if any(distributed.gather_objects(process.is_debugged())):
        sys.breakpointhook = process.stop_in_debugger  # also in ranks that have none
        return
    has_terminal = distributed.world_size() == 1 and sys.stdin is not None and sys.stdin.isatty()
    if not has_terminal and "PYTHONBREAKPOINT" not in os.environ:
        raise UserError(
            "--replay: no debugger to stop in; start it with F5, with --debug-rank 0, or as one "
            "process in a terminal: python main.py"
        )


def next_step(state: State) -> Position:
    """Return the step that follows a checkpoint."""
    return state["epoch"] + 1, state["seen"] // state["global_batch"] + 1


class Replay(RunFolder):
    """The folder of a run of which a step is done again: it is read, but never changed."""

    def __init__(self, path: Path, resume: str, position: Position) -> None:
        """resume: from which checkpoint the run began, if that is a path."""
        super().__init__(path, resume, keep=1)
        self.replay: Position = position

    def run(self, train: Callable[[RunFolder], object], seed: int) -> None:
        """Call `train` with this folder, to come to the step and do it.

        If an earlier step is the first whose loss or weights are not finite, call it again for
        that one.
        """
        Reporter.silent = True
        while True:
            seeding.seed(seed)
            try:
                train(self)
            except (Over, bdb.BdbQuit):
                return distributed.say(f"{name(self.replay)} is over; nothing was saved")
            except NotFinite as error:
                distributed.say(error.reason)
                if error.position >= self.replay:
                    return
                self.replay = error.position
            else:
                raise UserError(f"--replay: the run ended before {name(self.replay)}")

    def find_checkpoint(self) -> State | None:
        """Return the newest checkpoint before the step; None to start from scratch.

        Rank 0 reads it for all: the run may be renaming its files.
        """
        state = distributed.from_rank_zero(self._search)
        origin = f"from {state['path']}" if state else "from the start of the run"
        distributed.say(f"replaying {name(self.replay)}, {origin}")
        return state

    def _search(self) -> State | None:
        state = max(self._states(), key=next_step, default=None)
        if state is None and self.resume not in ("auto", "never"):
            raise UserError(
                f"--replay: no checkpoint in {self.path} is from before {name(self.replay)}, nor "
                f"is {self.resume}, with which the run began"
            )
        return state

    def _states(self) -> Iterator[State]:
        for path in (*self.saves(), self.path / "best.pt", Path(self.resume)):
            with contextlib.suppress(UserError):
                state = checkpoint.read(path, KEYS)
                if next_step(state) <= self.replay:
                    yield state

    def open_for_training(self, is_new: bool) -> None:
        pass

    def best_score(self, best_of: str | None, until: float) -> float:
        return -math.inf

    def add(self, state: State, is_best: bool, replace: bool, verify: bool) -> None:
        """Save nothing; raise Over once the step has been done."""
        if next_step(state) > self.replay:
            raise Over
