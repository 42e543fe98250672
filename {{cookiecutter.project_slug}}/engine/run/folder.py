"""The output folder of a run: which checkpoint to resume from, and which ones to keep.

`last.pt` is the newest checkpoint, `last-1.pt` the one before it, and so on, up to KEEP of them;
`best.pt` is the one with the best score. Rank 0 writes them, and all ranks read them.
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
from engine.ranks import answering, distributed, process, protocol, requeue
from engine.run import checkpoint, mistakes, records, transfer
from engine.run.checkpoint import OTHER_RUN, Damaged, State
from engine.run.mistakes import Found, Mistakes

# What a run writes in addition to last.pt and last-N.pt; `--resume never` removes all of them.
OWN_FILES = (
    "*.pt.corrupt*",
    "best.pt",
    "best-*.pt",
    "metrics.csv",
    "tracker.json",
    "args.json",
    "curves.png",
    *records.IMAGES,
    *(f"eval/{name}" for name in records.IMAGES),
    "events.out.tfevents.*",
)
KEEP = 2  # of the newest checkpoints: the last one may be damaged by a crash of the machine
Position = tuple[int, int]  # an epoch and an optimizer step in it, both from 1
OF_PARTS = ("model", "optimizer", "scheduler")
KEYS = (  # what a checkpoint has to contain
    *(*OF_PARTS, "layout", "epoch", "step", "seen", "totals", "images", "seed", "global_batch"),
    *("best", "best_of", "history", "classes", "resumed_from", "args", "format"),
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

    replay: Position | None = None  # before which step to stop

    def __init__(self, path: Path | str, resume: str = "auto") -> None:
        """Take the flags; nothing is read or written yet."""
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

        Locks the folder. Raises a UserError if it cannot be written, or if the checkpoint cannot be
        read. All ranks have to call it.
        """
        self.state = self._find()
        return self.state

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

        Raises a UserError if the ranks have evaluated other images.

        found: the confusion matrix of `compute`, and what Worst.compute() returns. loader: of the
        validation images. classes, predict, draw: as Run takes them.
        """
        samples.check_alike(classes, validation=samples.of(loader))
        shown = Mistakes.of(found, model, loader, classes, predict, draw)
        mistakes.report(shown, self.path / "eval")

    def _find(self) -> State | None:
        """Lock the folder; return the checkpoint to resume from, or None to start from scratch.

        The first rank of each node searches its disk. If the nodes do not share one, all ranks get
        the checkpoint with the most steps. Raises a UserError if the folder cannot be written, or
        if the checkpoint cannot be read.
        """
        with distributed.rank_zero_first():
            if distributed.is_rank_zero():
                self._lock()
            answering.listen(self.path)
            is_first = distributed.local_rank() == 0  # of its node
            state = self._search() if is_first else None
        step, path = (state["step"], state["path"]) if state else (-1, "")
        reached = distributed.gather_objects((step, path, is_first))
        furthest = max(reached)[0]
        if not any(path and self.contains(path) for _, path, _ in reached):
            requeue.check_new(self.path)
        elif distributed.is_rank_zero():
            requeue.note_checkpoint(self.path)
        if furthest == -1:
            return None
        if any(step != furthest for step, _, is_first in reached if is_first):
            source = [step for step, _, _ in reached].index(furthest)
            return distributed.from_rank(source, lambda: state)
        if state is None:
            path = next(path for _, path, _ in reversed(reached[: distributed.rank()]) if path)
            state = checkpoint.read(path, KEYS)
        return state

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
        if resume == "auto":
            return read_newest(found) if found else None
        if found and not self.contains(resume):
            return read_newest(found)
        for path in found:  # `resume` is in this folder: use it, unless last.pt resumed from it
            with contextlib.suppress(Damaged):
                if checkpoint.read(path, KEYS)["resumed_from"] == resume:
                    return read_newest(found)
                break
        return checkpoint.read(resume, KEYS)

    def contains(self, path: Path | str) -> bool:
        return Path(path).parent.resolve() == self.path.resolve()

    def saves(self) -> list[Path]:
        """Return the paths of last.pt, last-1.pt and so on that exist, newest first."""
        # Not by glob, for which there is nothing if a network disk does not answer.
        is_there = self.path.is_dir()
        names = {*files.retried(self.path, os.listdir, self.path)} if is_there else ()
        ages = [name[5:-3] for name in names if name.startswith("last-") and name.endswith(".pt")]
        numbers = sorted(int(age) for age in ages if age.isdecimal())  # others are the user's
        newest = ["last.pt"] if "last.pt" in names else []
        return [self.path / name for name in (*newest, *(f"last-{n}.pt" for n in numbers))]

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
        old = sorted({*self.saves(), *(p for name in OWN_FILES for p in self.path.glob(name))})
        if folders := [path for path in old if path.is_dir()]:
            raise UserError(f"{folders[0]}: is a folder, not a file; rename or remove it")
        if old:
            names = ", ".join(path.name for path in old)
            distributed.say(f"--resume never: removing {names} from {self.path}")
            with process.holding_signals():  # all or nothing
                for path in old:
                    path.unlink()

    def best_score(self, best_of: str | None, until: float) -> float:
        """Return the score of best.pt, or -inf if there is none to continue from; on rank 0.

        best_of: its metric and validation set; None if a best.pt cannot belong to this run. until:
        the last epoch that it may be from. A best.pt that does not match is renamed to best-1.pt,
        best-2.pt and so on; one of those that matches becomes best.pt again.
        """
        best, reason = self.path / "best.pt", ""
        kept = sorted(self.path.glob("best-*.pt"), key=lambda p: p.stat().st_mtime, reverse=True)
        for path in (best, *kept) if best_of else (best,):
            if not os.path.lexists(path):
                continue
            try:
                state = checkpoint.read(path, KEYS)
            except Damaged as error:
                if path == best:
                    distributed.say(f"{error.reason}; renamed to {rename_damaged(path).name}")
                continue
            except UserError as error:
                reason = reason or str(error)
                continue
            if state["best_of"] == best_of and state["epoch"] <= until:
                if path != best:
                    keep_best(best, reason)
                    path.rename(best)
                    distributed.say(f"{path}: has the best {best_of}; renamed to best.pt")
                return state["best"]
            reason = reason or f"{path}: has the best {state['best_of']} of epoch {state['epoch']}"
        keep_best(best, reason)
        return -math.inf

    def add(self, state: State, is_best: bool, replace: bool, verify: bool) -> None:
        """Save `state` as last.pt, and as best.pt if it is the best so far; on rank 0.

        The old last.pt becomes last-1.pt, and so on; with `replace` it is overwritten instead. With
        `verify` the new file is read back before it gets its name.
        """
        if not distributed.is_rank_zero():
            return
        state = transfer.to_host(state)

        def write(tmp_path: Path) -> None:
            checkpoint.write(tmp_path, state, verify)
            files.sync(tmp_path)  # a disk may say only now that it is full

        # best.pt comes first: when last.pt records a new best score, best.pt has it already.
        if is_best:
            with files.writing(self.path / "best.pt") as tmp_path:
                files.retried(self.path / "best.pt", write, tmp_path)
                records.remove_images(self.path)
        with files.writing(self.path / "last.pt") as tmp_path:
            files.retried(self.path / "last.pt", write, tmp_path)
            for age in range(0 if replace else KEEP - 1, 0, -1):
                newer = self.path / (f"last-{age - 1}.pt" if age > 1 else "last.pt")
                with contextlib.suppress(FileNotFoundError):
                    newer.replace(self.path / f"last-{age}.pt")
        with contextlib.suppress(OSError):  # not every file system supports it
            files.sync(self.path)
        requeue.note_checkpoint(self.path)
        with contextlib.suppress(FileNotFoundError):
            for age in itertools.count(KEEP):
                (self.path / f"last-{age}.pt").unlink()


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
        for bad, reason in zip(paths, reasons, strict=False):
            if distributed.is_rank_zero():
                new = rename_damaged(bad).name
                distributed.say(f"{reason}; renamed to {new}, continuing from {path.name}")
        return state
    raise UserError(f"{'; '.join(reasons)}: {OTHER_RUN}")


def rename_damaged(path: Path) -> Path:
    """Rename `path` to PATH.corrupt, or PATH.corrupt-1 and so on; return the new path."""
    suffixes = itertools.chain([""], (f"-{number}" for number in itertools.count(1)))
    names = (Path(f"{path}.corrupt{suffix}") for suffix in suffixes)
    return path.rename(next(name for name in names if not os.path.lexists(name)))


def keep_best(best: Path, reason: str) -> None:
    """Rename best.pt, if it exists, to best-1.pt or the next free number, and print that."""
    records.remove_images(best.parent)
    if os.path.lexists(best):
        names = (best.with_name(f"best-{number}.pt") for number in itertools.count(1))
        kept = best.rename(next(name for name in names if not os.path.lexists(name)))
        distributed.say(f"{reason}; kept as {kept.name}")
