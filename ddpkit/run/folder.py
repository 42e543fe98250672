"""The output folder of a run: which checkpoint to resume from, and which ones to keep.

`last.pt` is the newest checkpoint, `last-1.pt` the one before it, in case a crash of the machine
damages the last one; `best.pt` has the best score. Rank 0 writes them, and all ranks read them.
"""

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from torch import nn

from ddpkit import files
from ddpkit.data import normalizing
from ddpkit.errors import UserError
from ddpkit.ranks import distributed, environment, explaining, process, protocol
from ddpkit.run import agreement, checkpoint
from ddpkit.run.checkpoint import KEYS, OTHER_RUN, Damaged, Foreign
from ddpkit.run.file_names import OWN_FILES, SAVES, remove_images
from ddpkit.run.states import State

Read = Callable[[Path | str], State]
BEST = "best.pt"
OLDER_BEST = "best-1.pt"


class RunFolder:
    """The output folder of a run.

    path: of the folder. resume: "auto" (from last.pt, if it exists), "never", or the path of a
        checkpoint to start from. read: what reads one; default: of a Run.

    Raises a UserError if the folder cannot be written, or if no checkpoint can be read.

        folder = ddpkit.RunFolder(args.output_dir, args.resume)
        state = folder.find_checkpoint()  # a dict; None: from scratch
        folder.load(model, loader, classes, vars(args))
    """

    def __init__(
        self, path: Path | str, resume: str = "auto", read: Read | None = None
    ) -> None:
        self.path = Path(path)
        self.read = read or functools.partial(checkpoint.read, keys=KEYS)
        self.is_path = resume not in ("auto", "never")
        # absolute: checkpoints keep it, and a restart may be in another folder
        self.resume = os.path.abspath(str(resume)) if self.is_path else resume
        self.state: State | None = None  # found by `find_checkpoint`
        self.saved_step = -1  # of the last checkpoint that this process has written
        # What the next checkpoint does with a best.pt of another run: why, and its new name
        self.outdated: tuple[str, str] | None = None

    def best(self) -> State:
        """Return best.pt, or the checkpoint that `resume` names, to evaluate it.

        Raises a UserError if it cannot be read.
        """
        self._check_file()
        path = self.resume if self.is_path else self.path / BEST
        if not self.is_path and BEST not in self.names():
            raise UserError(
                f"{path}: no such file: train first, or give the --output-dir of a run"
            )
        self.state = checkpoint.read(path)
        # beside which a flag that is refused below may be nobody's who reads the error
        distributed.print0(f"flags that are not given here are those of {path}")
        return self.state

    def find_checkpoint(self) -> State | None:
        """Return the checkpoint to resume from, a dict, or None to start from scratch.

        Locks the folder. If the nodes do not share a disk, all ranks get the checkpoint with the
        most steps. All ranks have to call it.

        Raises a UserError if the folder cannot be written, or if the checkpoint cannot be read.
        """
        with distributed.rank_zero_first():
            if distributed.is_rank_zero():
                self._lock()
                question = self.path / protocol.QUESTION
                question.unlink(missing_ok=True)  # asked of an earlier run
                explaining.Asking.question = question
            state = self._search()
        # Nodes that do not share a disk may have found different ones, or none.
        mine = (state["step"], self.contains(state["path"])) if state else (-1, False)
        ranks = distributed.gather_objects(mine)
        steps = [step for step, _ in ranks]
        if not any(is_own for _, is_own in ranks):
            environment.check_new(self.path)
        elif distributed.is_rank_zero():
            environment.note_checkpoint(self.path)
        newest = max(steps)
        if min(steps) < newest:
            state = distributed.from_rank(steps.index(newest), lambda: state)
        self.state = state
        return state

    def load(
        self,
        model: nn.Module,
        loader: object,
        classes: Sequence[str],
        flags: Mapping[str, object],
    ) -> None:
        """Give `model` the weights of the checkpoint that was found, to evaluate it.

        loader: of the images. classes: theirs. flags: vars(args), to name those that have changed.

        Raises a UserError if the checkpoint is of other classes or images, or of another network.
        """
        agreement.check_alike(classes, validation=loader)
        if self.state:
            checkpoint.check_format(self.state, normalizing.format_of(loader))
            remedy = checkpoint.to_undo(self.state, classes, flags)
            checkpoint.load_weights(model, self.state, remedy)

    def _check_file(self) -> None:
        if not self.is_path or Path(self.resume).is_file():
            return
        if Path(self.resume).is_dir():
            raise UserError(
                f"--resume {self.resume}: is a folder; give a file in it, such as last.pt"
            )
        raise UserError(
            f"--resume {self.resume}: no such file; use auto, never or a file"
        )

    def _lock(self) -> None:
        self._check_file()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            is_free = files.lock(self.path / ".lock")
        except OSError as error:
            raise files.failure(f"--output-dir {self.path}", error) from None
        if not is_free:
            raise UserError(
                f"--output-dir {self.path}: another run is using it; choose another folder, "
                "or remove .lock in it if the machine of that run has crashed"
            )

    def _search(self) -> State | None:
        """Return the checkpoint on this disk to resume; a path only if nothing has come of it."""
        if self.resume == "never" and not self._is_restart():
            return None
        saves = self.saves()
        if saves:
            newest = read_newest(saves, self.read)
            # With --resume FILE, one of this folder, that file is what counts until a
            # run that began from it has saved.
            goes_back = self.is_path and self.contains(self.resume)
            if not goes_back or newest["resumed_from"] == self.resume:
                return newest
        return self.read(self.resume) if self.is_path else None

    def _is_restart(self) -> bool:
        """Return whether this launch has begun in the folder before, and failed."""
        launch = os.environ.get(protocol.LAUNCH_ID, "").encode()
        begun = self.path / protocol.BEGUN
        return launch != b"" and begun.is_file() and files.read_file(begun) == launch

    def contains(self, path: Path | str) -> bool:
        return Path(path).parent.resolve() == self.path.resolve()

    def saves(self) -> list[Path]:
        """Return the paths of last.pt and last-1.pt that exist, newest first."""
        return [self.path / name for name in SAVES if name in self.names()]

    def names(self) -> list[str]:
        """Return what is in the folder; raise if a disk does not answer, unlike exists()."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return files.retried(self.path, os.listdir, self.path)
        return []

    def open_for_training(self, loaded: Iterable[str]) -> None:
        """On rank 0, clear the folder with --resume never, once a launch: restarts resume.

        loaded: what `state` has no use for any more, and would take as much memory again.
        """
        state = self.state or {}
        for name in loaded:
            state.pop(name, None)
        if not distributed.is_rank_zero():
            return
        mine = f".{os.getpid()}."  # of events: what main.py has opened before
        old = sorted(
            path
            for name in OWN_FILES
            for path in self.path.glob(name)
            if not path.is_dir() and mine not in path.name
        )
        if old and not state and self.resume == "never":
            names = ", ".join(path.name for path in old)
            distributed.print0(f"--resume never: removing {names} from {self.path}")
            with process.holding_signals():  # all or nothing
                for path in old:
                    path.unlink()
        best = self.path / BEST
        if best.name in self.names() and self._own_epochs() < 0:
            set_aside(f"{best} belongs to another run", best, OLDER_BEST)
        launch = os.environ.get(protocol.LAUNCH_ID)
        if launch:
            with files.writing(self.path / protocol.BEGUN) as tmp_path:
                tmp_path.write_bytes(launch.encode())

    def _own_epochs(self) -> float:
        """Return the last epoch of which best.pt may be this run's; -1: none."""
        if not self.state or not self.contains(self.state["path"]):
            return -1
        # After going back to an earlier checkpoint one of later epochs does not count.
        is_back = self.state["path"] == self.resume
        return self.state["epoch"] if is_back else math.inf

    def best_score(self, best_of: str) -> tuple[float, int] | None:
        """On rank 0, return the score of best.pt and its epoch; None if it is of another run.

        Such a file is renamed with the next checkpoint: a run without a step left changes nothing.

        best_of: its metric and validation set.
        """
        self.outdated = ("", "")
        path = self.path / BEST
        if path.name not in self.names():
            return None
        try:
            state = checkpoint.read(path, KEYS)
            is_own = state["epoch"] <= self._own_epochs()
            if is_own and state["best_of"] == best_of:
                self.outdated = None
                return state["best"], state["epoch"]
            own = f"the best {state['best_of']} of epoch {state['epoch']}"
            self.outdated = (f"{path}: has {own}", OLDER_BEST)
        except Damaged as error:
            self.outdated = (error.line, "best.pt.corrupt")
        except Foreign as error:
            self.outdated = (error.line, OLDER_BEST)
        return None

    def _clear_best(self) -> None:
        """Rename a best.pt of another run, and remove its images."""
        if self.outdated is None:
            return
        reason, name = self.outdated
        if name:
            with contextlib.suppress(FileNotFoundError):  # somebody was first
                set_aside(reason, self.path / BEST, name)
        remove_images(self.path)
        self.outdated = None

    def add(
        self,
        state: State,
        is_best: bool = False,
        is_last: bool = True,
        keeps_images: bool = False,
    ) -> None:
        """Save last.pt, or best.pt, or both; the old last.pt becomes last-1.pt.

        But for one of the same step, which the new one replaces: it has the same weights. All ranks
        have to call it, and wait for rank 0 however long its disk needs.

        keeps_images: those of best.pt, which has the same weights as before.
        """

        def write() -> None:
            self._clear_best()
            # best.pt comes first: when last.pt records a new best score, best.pt has it
            # already.
            if is_best:
                with checkpoint.writing(self.path / BEST, state):
                    if not keeps_images:
                        remove_images(self.path)
            if is_last:
                self._write_last(state)

        distributed.await_rank_zero(write)
        if is_last:
            self.saved_step = state["step"]

    def _write_last(self, state: State) -> None:
        last, older = (self.path / name for name in SAVES)
        with checkpoint.writing(last, state):
            if state["step"] != self.saved_step:
                with contextlib.suppress(FileNotFoundError):  # it is the first
                    files.move(last, older)
        with contextlib.suppress(OSError):  # not every file system supports it
            files.sync(self.path)
        environment.note_checkpoint(self.path)


def read_newest(paths: Sequence[Path], read: Read) -> State:
    """Return the first of `paths` that can be read; rank 0 renames the damaged ones before it."""
    reasons = []
    for path in paths:
        try:
            state = read(path)
        except Damaged as error:
            reasons.append(error.line)
            continue
        if distributed.is_rank_zero():
            then = f", continuing from {path.name}"
            for bad, reason in zip(paths, reasons, strict=False):
                set_aside(reason, bad, f"{bad.name}.corrupt", then)
        return state
    raise UserError(f"{'; '.join(reasons)}: {OTHER_RUN}")


def set_aside(reason: str, path: Path, name: str, more: str = "") -> None:
    """Rename a file, and report why; an earlier one of that name is replaced."""
    files.move(path, path.with_name(name))
    distributed.print0(f"{reason}; renamed to {name}{more}")
