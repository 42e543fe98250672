"""A step of a run is done again, up to a breakpoint where it begins: see engine/replay.py.

Everything is as it was in that step, because a run continues from a checkpoint to the bit. Nothing
in the run's folder changes, and the run itself may go on meanwhile.
"""

import bdb
import contextlib
import math
import pdb
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import engine
from engine.errors import UserError
from engine.ranks import distributed, process
from engine.run import checkpoint
from engine.run.checkpoint import State
from engine.run.folder import KEYS, Folder, Position
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


def name(position: Position) -> str:
    return "epoch {}, step {}".format(*position)


def command(position: Position, rank: int, folder: Path) -> str:
    """Return what to type to replay a step on as many ranks as there are now."""
    step = f"-m engine.replay {position[0]}:{position[1]} --output-dir {shlex.quote(str(folder))}"
    if distributed.world_size() == 1:
        return f"python {step}"
    ranks = distributed.local_world_size()
    count = f"NPROC={ranks} " if ranks != (torch.accelerator.device_count() or 2) else ""
    return f"{count}./launch.sh {step} --debug-rank {rank}"


def check(position: Position | None, epochs: int, steps: int) -> None:
    """Raise a UserError if a run of `epochs` with so many `steps` each has no such step."""
    if position and (position[0] > epochs or position[1] > steps):
        raise UserError(f"{name(position)}: the run has {epochs} epoch(s) of {steps} step(s)")


def stop_here() -> None:
    """Stop in the debugger, or pdb, at the next line of the project that called this.

    On ranks that have neither, do nothing.
    """
    frame = sys._getframe()
    while is_other(frame.f_globals.get("__name__", ""), frame.f_code.co_filename):
        assert frame.f_back
        frame = frame.f_back
    if process.is_debugged():
        pydevd = sys.modules["pydevd"]
        pydevd.settrace(trace_only_current_thread=True, stop_at_frame=frame)
    elif distributed.world_size() == 1:
        debugger = pdb.Pdb(skip=["bdb", "engine", "engine.*"])  # "step" goes over those
        debugger.set_trace(frame)
        debugger.set_next(frame)


def is_other(module: str, file: str) -> bool:
    """Return whether a module is one of ours, or of a library."""
    return module.partition(".")[0] == "engine" or "site-packages" in file


def check_debugger() -> None:
    """Raise a UserError if there is no debugger to stop in."""
    if any(distributed.gather_objects(process.is_debugged())):
        return
    if distributed.world_size() > 1 or sys.stdin is None or not sys.stdin.isatty():
        raise UserError(
            "no debugger to stop in: start it with F5, with --debug-rank 0, or as one process in a "
            "terminal: python -m engine.replay"
        )


def next_step(state: State) -> Position:
    """Return the step that follows a checkpoint."""
    return state["epoch"] + 1, state["seen"] // state["global_batch"] + 1


class Replay(Folder):
    """The folder of a run of which a step is done again: it is read, but never changed."""

    replay: Position  # set by `repeat`

    def best(self) -> State:
        raise UserError("a step of an evaluation cannot be replayed: leave out --eval-only")

    def _find(self) -> State | None:
        """Return the newest checkpoint before the step; None to start from scratch.

        Rank 0 reads it for all: the run may be renaming its files.
        """
        check_debugger()
        state = distributed.from_rank_zero(self._search)
        origin = f"from {state['path']}" if state else "from the start of the run"
        distributed.say(f"replaying {name(self.replay)}, {origin}")
        return state

    def _search(self) -> State | None:
        state = max(self._states(), key=next_step, default=None)
        if state is None and self.resume not in ("auto", "never"):
            raise UserError(
                f"no checkpoint in {self.path} is from before {name(self.replay)}, nor is "
                f"{self.resume}, with which the run began"
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


def repeat(main: Callable[[], object], step: Position) -> None:
    """Call `main` of main.py to come to the step and do it, with the folder of the run unchanged.

    If an earlier step is the first whose loss or weights are not finite, call it again for that
    one.
    """
    vars(engine)["Folder"] = Replay  # which main.py makes
    Reporter.silent = True
    while True:
        Replay.replay = step
        try:
            main()
        except (Over, bdb.BdbQuit):
            return distributed.say(f"{name(step)} is over; nothing was saved")
        except NotFinite as error:
            distributed.say(error.reason)
            if error.position >= step:
                return
            step = error.position
        else:
            raise UserError(f"the run ended before {name(step)}")
