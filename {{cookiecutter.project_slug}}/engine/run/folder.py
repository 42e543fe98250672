"""The output folder of a run: which checkpoint to resume from, and which ones to keep.

`last.pt` is the newest checkpoint, `last-1.pt` the one before it, in case a crash of the machine
damages the last one; `best.pt` has the best score. Rank 0 writes them, and all ranks read them.
"""

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from engine import files
from engine.data import samples
from engine.errors import UserError
from engine.ranks import distributed, environment, process, protocol
from engine.run import checkpoint, reporting
from engine.run.checkpoint import OTHER_RUN, Damaged, State
from engine.run.metrics import Found, Mistakes

SAVES = ("last.pt", "last-1.pt")  # newest first
OWN_FILES = (  # what a run writes; `--resume never` removes all of them
    *(*SAVES, "*.pt.corrupt*", "best.pt", "best-*.pt", "metrics.csv", "tracker.json", "args.json"),
    *("curves.png", *reporting.IMAGES, *(f"eval/{name}" for name in reporting.IMAGES)),
    "events.out.tfevents.*",
)
KEYS = (  # what a checkpoint has to contain, besides what a training loader adds
    *("model", "optimizer", "scheduler", "kinds", "epoch", "step", "seen", "totals", "images"),
    *("seed", "global_batch", "best", "best_of", "history", "classes", "resumed_from", "args"),
    "format",
)


class Folder:
    """The output folder of a run.

    path: of the folder. resume: "auto" (from last.pt, if it exists), "never", or the path of a
        checkpoint to start from.

    Raises a UserError if the folder cannot be written, or if no checkpoint can be read.

        folder = engine.Folder(args.output_dir, args.resume)
        state = folder.find_checkpoint()  # a dict; None: from scratch
        folder.load(model, classes, vars(args))
    """

    def __init__(self, path: Path | str, resume: str = "auto") -> None:
        self.path = Path(path)
        self.resume = resume if resume in ("auto", "never") else os.path.abspath(resume)
        self.state: State | None = None  # found by `find_checkpoint`

    def best(self) -> State:
        """Return best.pt, or the checkpoint that `resume` names, to evaluate it.

        Raises a UserError if it cannot be read.
        """
        is_path = self.resume not in ("auto", "never")
        self.state = checkpoint.read(self.resume if is_path else self.path / "best.pt")
        return self.state

    def find_checkpoint(self) -> State | None:
        """Return the checkpoint to resume from, a dict, or None to start from scratch.

        Locks the folder. The first rank of each node searches its disk; if the nodes do not share
        one, all ranks get the checkpoint with the most steps. All ranks have to call it.

        Raises a UserError if the folder cannot be written, or if the checkpoint cannot be read.
        """
        with distributed.rank_zero_first():
            if distributed.is_rank_zero():
                self._lock()
            process.watch.folder = self.path
            is_first = distributed.local_rank() == 0  # of its node
            state = self._search() if is_first else None
        step, path = (state["step"], state["path"]) if state else (-1, "")
        reached = distributed.gather_objects((step, path, is_first))
        furthest = max(reached)[0]
        if not any(path and self.contains(path) for _, path, _ in reached):
            environment.check_new(self.path)
        elif distributed.is_rank_zero():
            environment.note_checkpoint(self.path)
        if any(step != furthest for step, _, is_first in reached if is_first):
            source = [step for step, _, _ in reached].index(furthest)
            state = distributed.from_rank(source, lambda: state)
        elif state is None and furthest != -1:
            path = next(path for _, path, _ in reversed(reached[: distributed.rank()]) if path)
            state = checkpoint.read(path, KEYS)
        self.state = state
        return state

    def load(self, model: nn.Module, classes: Sequence[str], flags: Mapping[str, object]) -> None:
        """Give `model` the weights of the checkpoint that was found, if there is one.

        classes: of the data. flags: vars(args), to name those that have changed.

        Raises a UserError if the checkpoint is of other classes or of another network.
        """
        if not self.state:
            return
        checkpoint.check_classes(self.state["path"], self.state["classes"], classes)
        try:
            checkpoint.load_weights(model, self.state)
        except UserError as error:
            changed = checkpoint.changes(self.state["args"], flags)
            raise UserError(f"{error}; changed: {changed or 'no flag'}; {OTHER_RUN}") from None

    def write(
        self,
        found: Found,
        model: nn.Module,
        loader: Any,
        classes: Sequence[str],
        predict: Callable[[nn.Module, Tensor], Any],
        draw: Callable[..., None],
    ) -> None:
        """Write what an evaluation has found to eval/ in the folder, on rank 0, and say so.

        found: the confusion matrix of `compute`, and what Worst.compute() returns. loader: of the
        validation images. classes, predict, draw: as Run takes them.

        Raises a UserError if the ranks have evaluated other images.
        """
        samples.check_alike(classes, validation=samples.of(loader))
        shown = Mistakes(found, model, loader, classes, predict, draw)
        reporting.report(shown, self.path / "eval")

    def _lock(self) -> None:
        if self.resume not in ("auto", "never") and not Path(self.resume).is_file():
            raise UserError(f"--resume {self.resume}: no such file; use auto, never or a file")
        probe = self.path / ".writable"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
            is_free = files.lock(self.path / ".lock")
        except OSError as error:
            raise files.failure(f"--output-dir {self.path}", error) from None
        if not is_free:
            raise UserError(
                f"--output-dir {self.path}: another run is using it; choose another folder, "
                "or remove .lock in it if the machine of that run has crashed"
            )

    def _search(self) -> State | None:
        """Return the checkpoint on this disk that `resume` selects; None if there is none.

        A path is for the first start only: once the run has saved, its own last.pt is used.
        """
        resume, begun = self.resume, self.path / protocol.BEGUN
        launch = os.environ.get(protocol.LAUNCH_ID)
        if launch and begun.is_file() and begun.read_bytes() == launch.encode():
            resume = "auto" if resume == "never" else resume  # a restart (MAX_RESTARTS)
        if resume == "never":
            return None
        found = self.saves()
        is_own = resume != "auto" and self.contains(resume)
        for path in found if is_own else ():  # use it, unless last.pt resumed from it
            with contextlib.suppress(Damaged):
                is_own = checkpoint.read(path, KEYS)["resumed_from"] != resume
                break
        if found and not is_own:
            return read_newest(found)
        return None if resume == "auto" else checkpoint.read(resume, KEYS)

    def contains(self, path: Path | str) -> bool:
        return Path(path).parent.resolve() == self.path.resolve()

    def saves(self) -> list[Path]:
        """Return the paths of last.pt and last-1.pt that exist, newest first."""
        # Not by exists(), which is False if a network disk does not answer.
        is_there = self.path.is_dir()
        names = files.retried(self.path, os.listdir, self.path) if is_there else ()
        return [self.path / name for name in SAVES if name in names]

    def open_for_training(self, is_new: bool) -> None:
        """On rank 0, clear the folder for a new run with --resume never, and record this launch.

        Because of that record, a restart of this launch resumes despite --resume never.
        """
        if not distributed.is_rank_zero():
            return
        if is_new and self.resume == "never":
            self._clear()
        if launch := os.environ.get(protocol.LAUNCH_ID):
            with files.writing(self.path / protocol.BEGUN) as tmp_path:
                tmp_path.write_bytes(launch.encode())

    def _clear(self) -> None:
        """Remove the files of the previous run, and nothing else."""
        old = sorted({path for name in OWN_FILES for path in self.path.glob(name)})
        if folders := [path for path in old if path.is_dir()]:
            raise UserError(f"{folders[0]}: is a folder, not a file; rename or remove it")
        if old:
            names = ", ".join(path.name for path in old)
            distributed.say(f"--resume never: removing {names} from {self.path}")
            with process.holding_signals():  # all or nothing
                for path in old:
                    path.unlink()

    def best_score(self, best_of: str | None, until: float) -> tuple[float, int]:
        """Return the score of best.pt and its epoch; -inf and 0 if it is of something else.

        It is then renamed. On rank 0. best_of: its metric and validation set; None if a best.pt
        cannot belong to this run. until: the last epoch that it may be from.
        """
        path = self.path / "best.pt"
        if os.path.lexists(path):
            try:
                state, name = checkpoint.read(path, KEYS), "best{}.pt"
                if state["best_of"] == best_of and state["epoch"] <= until:
                    return state["best"], state["epoch"]
                reason = f"{path}: has the best {state['best_of']} of epoch {state['epoch']}"
            except UserError as error:
                reason = getattr(error, "reason", str(error))
                name = "best.pt.corrupt{}" if isinstance(error, Damaged) else "best{}.pt"
            set_aside(reason, path, name)
        reporting.remove_images(self.path)
        return -math.inf, 0

    def add(self, state: State, is_best: bool, replace: bool) -> None:
        """Save `state` as last.pt, and as best.pt if it is the best so far; on rank 0.

        The old last.pt becomes last-1.pt; with `replace` it is overwritten instead.
        """
        if not distributed.is_rank_zero():
            return
        last, older = (self.path / name for name in SAVES)
        # best.pt comes first: when last.pt records a new best score, best.pt has it already.
        for path in (self.path / "best.pt", last) if is_best else (last,):
            with files.writing(path) as tmp_path:
                files.retried(path, checkpoint.write, tmp_path, state)
                if path != last:
                    reporting.remove_images(self.path)
                elif not replace:
                    with contextlib.suppress(FileNotFoundError):
                        last.replace(older)
        with contextlib.suppress(OSError):  # not every file system supports it
            files.sync(self.path)
        environment.note_checkpoint(self.path)


def read_newest(paths: Sequence[Path]) -> State:
    """Return the first of `paths` that can be read; rank 0 renames the damaged ones before it.

    If none can be read, raise a UserError and rename nothing: the user decides what to do.
    """
    reasons = []
    for path in paths:
        try:
            state = checkpoint.read(path, KEYS)
        except Damaged as error:
            reasons.append(error.reason)
            continue
        if distributed.is_rank_zero():
            for bad, reason in zip(paths, reasons, strict=False):
                set_aside(reason, bad, f"{bad.name}.corrupt{{}}", f", continuing from {path.name}")
        return state
    raise UserError(f"{'; '.join(reasons)}: {OTHER_RUN}")


def set_aside(reason: str, path: Path, name: str, more: str = "") -> None:
    """Rename a file to `name` with the first free number for "{}", if it needs one; say so."""
    ends = itertools.chain([""], (f"-{number}" for number in itertools.count(1)))
    names = (path.with_name(name.format(end)) for end in ends)
    new = path.rename(next(each for each in names if not os.path.lexists(each)))
    distributed.say(f"{reason}; renamed to {new.name}{more}")
