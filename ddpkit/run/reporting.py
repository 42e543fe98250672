"""What a run reports, on rank 0: lines, progress, metrics.csv, TensorBoard, a tracker, images."""

import contextlib
import importlib.util
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ddpkit import files
from ddpkit.data import images, loading, samples
from ddpkit.data.loading import OtherSource, TrainSampler
from ddpkit.errors import LineError, UserError
from ddpkit.ranks import distributed, failures, process
from ddpkit.run import machine, pictures
from ddpkit.run.layout import EPOCHS, EVENTS, IMAGES, remove_images
from ddpkit.run.mistakes import Mistakes
from ddpkit.run.pictures import Row
from ddpkit.run.steplog import StepLog

Log = Callable[[dict[str, float]], object]  # takes a row of numbers
# takes the id of the run to continue, or None; returns its id, and what takes the rows
Start = Callable[[str | None], tuple[str, Log]]


class Reporter:
    def __init__(
        self,
        folder: Path,
        device: torch.device,
        epochs: int,
        finished: int,
        is_complete: bool,
        log_every: int = 0,
        step: int = 0,
    ) -> None:
        """Report to `folder`, after the `finished` epochs and `step` optimizer steps.

        is_complete: nothing is left to do. log_every: steps between entries of `steps`; 0: none.
        """
        self.folder = folder
        self.device = device
        self.epochs = epochs
        self.finished = finished
        self.active = distributed.is_rank_zero() and not is_complete
        self.bar = tqdm(disable=True)
        self.steps = StepLog(folder, device, log_every, step, self.active)
        self.batch_size = 1
        self.board: Any = None
        self.process = os.getpid()
        self.log: Log | None = None  # a tracker's
        self.about: dict[str, object] = {}  # args.json

    def close(self) -> None:
        """Clear the progress bar and close the files, before any error is printed."""
        # TensorBoard's thread is not in a child that was forked
        if os.getpid() != self.process:
            return
        self.bar.close()
        self.steps.close()
        if self.board:
            with contextlib.suppress(OSError):  # the disk may be full
                self.board.close()

    def start(
        self,
        source: TrainSampler | OtherSource,
        accumulate: int,
        classes: Sequence[str],
        train_loader: Any,
        val_loader: Any,
        flags: Mapping[str, object],
    ) -> None:
        """Print the start lines and write args.json: flags, versions, commit, device."""
        ranks = distributed.world_size()
        self.batch_size = source.global_batch // accumulate // ranks
        if not self.active:
            return
        self.classes = classes
        device = self.device.type.upper()
        name_of = getattr(torch.get_device_module(self.device), "get_device_name", None)
        if name_of:  # of a GPU
            device = name_of(self.device)
        val = ""
        if loading.is_ours(val_loader):  # another may have a share of them
            val = f"{len(samples.of(val_loader))} validation images | "
        distributed.print0(
            f"{ranks} rank(s) on {device} | batch {self.batch_size} per rank x "
            f"{ranks} rank(s) x {accumulate} accumulated = {source.global_batch} | "
            f"{source.total} training + {val}{source.steps} steps per epoch"
        )
        amp = f" | amp {flags['amp']}" if "amp" in flags else ""
        distributed.print0(
            f"per rank {getattr(train_loader, 'num_workers', 0)} loader worker(s) and "
            f"{torch.get_num_threads()} thread(s) | JPEG: {images.decoder()}{amp}"
        )
        own = machine.library()
        distributed.print0(f"ddpkit {own}")
        self.note(
            flags=dict(flags),
            ranks=ranks,
            device=device,
            jpeg=images.decoder(),
            git=machine.git_commit(),
            versions={
                "python": platform.python_version(),
                "torch": torch.__version__,
                "ddpkit": own,
            },
        )

    def note(self, **more: object) -> None:
        """Add something to args.json."""
        about = self.about | more
        if self.active and about != self.about:
            self.about = about
            self.write("args.json", about)

    def progress(
        self, batches: Iterable[Any], passes: int, epoch: int
    ) -> Iterator[Any]:
        """Yield the batches of `passes` under a progress bar; it counts the images of all ranks."""
        self.began = time.monotonic()
        per_pass = self.batch_size * distributed.world_size()
        self.bar = tqdm(
            total=passes * per_pass,
            desc=f"epoch {epoch + 1}/{self.epochs}",
            unit="img",
            leave=False,
            # so that logs stay readable
            disable=not (self.active and _is_on_terminal()),
        )
        self.steps.begin(self.bar)
        self.waited = 0.0
        self.count = 0
        failures.note_batch_size(self.batch_size)
        asked = time.monotonic()
        for batch in batches:
            self.waited += time.monotonic() - asked
            self.count += per_pass
            self.steps.count(per_pass)
            yield batch
            self.bar.update(per_pass)
            asked = time.monotonic()

    def speed(self) -> dict[str, float]:
        """Return what metrics.csv has of it; nothing if the epoch's steps were done before."""
        self.bar.close()
        mine = torch.tensor(
            [self.waited, failures.peak(self.device)],
            dtype=torch.float64,
            device=self.device,
        )
        # the most of any rank; waits for the device, so that the seconds are its, too
        waited, peak = distributed.gather(mine).max(0).values.tolist()
        self.steps.flush()
        seconds = time.monotonic() - self.began  # or since a resumed epoch was resumed
        failures.reset_peak(self.device)
        if not self.count:
            return {}
        found = {
            "img_per_s": self.count / seconds,
            "train_seconds": seconds,
            "data_wait": waited / seconds,
        }
        if not math.isnan(peak):  # which it is on a CPU
            found["peak_memory"] = peak / failures.GIB
        return found

    def end_epoch(self, rows: Sequence[Row], is_best: bool) -> None:
        """Record the last of `rows`: a line, metrics.csv, TensorBoard scalars, curves.png."""
        if not self.active:
            return
        row = numbers(rows[-1])
        left = (self.epochs - int(row["epoch"])) * (time.monotonic() - self.began)
        words = [f"epoch {row['epoch']}/{self.epochs}"]
        for name, value in row.items():
            if name not in ("epoch", "step"):
                words.append(f"{name} {value:.4g}")
        words.append(f"left {left:.0f} s")
        if is_best:
            words.append("best")
        distributed.print0("  ".join(words))
        wait = row.get("data_wait", 0)
        seconds = row.get("train_seconds", 0)
        if wait > 0.1 and wait * seconds > 1:
            distributed.print0(
                f"input-bound: {wait:.0%} of {seconds:.0f} s were spent waiting for images; what "
                f"helps: --workers up to {machine.cpu_share()} (CPUs per rank), image files that "
                "are not much larger than --image-size, more CPUs"
            )
        self.record(rows, rows[-1:])

    def record(self, rows: Sequence[Row], new: Sequence[Row]) -> None:
        """Draw curves.png, then write metrics.csv; give the `new` rows to TensorBoard."""
        pictures.draw_curves(self.folder / "curves.png", rows, self.classes)
        # of all rows, in their order: a later one may have more
        columns = list(dict.fromkeys(name for row in rows for name in row))
        with files.table(self.folder / "metrics.csv", columns) as write:
            for row in rows:
                write([row.get(name, "") for name in columns])
        shown = new
        if not self.board:
            from torch.utils.tensorboard import SummaryWriter  # takes seconds

            # Entries of later epochs, before going back to an earlier checkpoint, are
            # dropped: in a folder of its own, for other people's scalars have other
            # steps.
            place = self.folder / EPOCHS
            if not any(place.glob(EVENTS)):
                shown = rows
            self.board = SummaryWriter(str(place), purge_step=self.finished + 1)
        for row in shown:
            for name, value in numbers(row).items():
                self.board.add_scalar(name, value, row["epoch"])
        for row in new:
            self.track(row)
        self.board.flush()

    def catch_up(self, rows: Sequence[Row], tracker: Start | None = None) -> None:
        """Record the rows that a run had saved when it was killed; start the tracker, if any."""
        if not self.active:
            return
        if tracker:
            self.start_tracker(tracker)
        recorded = count(self.folder)
        # They may be more: of epochs after the one that was gone back to.
        if rows and recorded != len(rows):
            self.record(rows, rows[recorded:])

    def start_tracker(self, tracker: Start) -> None:
        path = self.folder / "tracker.json"
        try:
            known = json.loads(path.read_text())["run"] if path.exists() else None
            run, self.log = tracker(known)
        except (Exception, SystemExit) as error:  # which costs no run
            line = f"the tracker did not start ({reason_of(error)}): the run goes on without it"
            return distributed.print0(line)
        self.write("tracker.json", {"run": run})

    def track(self, row: Row) -> None:
        try:
            if self.log:
                self.log(numbers(row))
        except (Exception, SystemExit) as error:  # which costs no epoch
            line = f"the tracker did not take epoch {row['epoch']} ({reason_of(error)})"
            distributed.print0(line)

    def write(self, name: str, value: object) -> None:
        with files.writing(self.folder / name, parents=True) as tmp_path:
            tmp_path.write_text(json.dumps(value, indent=2, default=str) + "\n")

    def images(self, mistakes: Mistakes) -> None:
        """Write examples.png, validation images with predictions, and the files of `mistakes`."""
        if self.active:
            mistakes.write(self.folder)
            mistakes.draw_images(self.folder / "examples.png")

    def try_drawing(self, mistakes: Mistakes) -> None:
        """Draw one image to nowhere: if that fails, it fails before the first epoch."""
        if self.active:
            with tempfile.TemporaryDirectory() as folder:
                mistakes.draw_images(Path(folder, "image.png"), {0: ""})

    def finish(self, name: str, best: float) -> None:
        """Print the best score and the paths of the results."""
        if not self.active:
            return
        if not math.isfinite(best):
            return distributed.print0(
                f"done: {name} was NaN after every epoch: there is no best.pt"
            )
        found = [os.path.join(os.path.relpath(self.folder), "best.pt")]
        for file in ("curves.png", *IMAGES):
            if (self.folder / file).exists():
                found.append(file)
        return distributed.print0(f"done: best {name} {best:.4f}; {', '.join(found)}")


def find_tracker(name: str, folder: Path, flags: Mapping[str, object]) -> Start:
    """Return what begins or continues a run of that tracker, named as `folder` and its project."""
    if not _is_installed(name):
        raise UserError(
            f"--tracker {name}: not installed; python -m pip install {name}"
        )
    project = process.project().name

    def start(known: str | None) -> tuple[str, Log]:
        tool: Any = importlib.import_module(name)  # which may fail as its server may
        if name == "mlflow":
            tool.set_experiment(project)
            run = tool.start_run(known, run_name=folder.name)
            tool.log_params({} if known else flags)
            found = run.info.run_id
        else:
            # wandb finds a run by its id, trackio by its name
            key = {"id": known} if name == "wandb" else {"name": known or folder.name}
            run = tool.init(project=project, config=dict(flags), resume="allow", **key)
            found = run.id if name == "wandb" else run.name

        def log(row: dict[str, float]) -> None:
            epoch = int(row["epoch"])
            if name == "mlflow":
                tool.log_metrics(row, step=epoch)
            else:
                shown = {each: row[each] for each in row if each != "step"}
                run.log(shown, step=epoch)

        return found, log

    return start


def _is_on_terminal() -> bool:
    with contextlib.suppress(Exception):  # of a stream that is closed
        return sys.stderr.isatty()
    return False


def _is_installed(name: str) -> bool:
    with contextlib.suppress(ValueError):  # of a module that a program has made
        return importlib.util.find_spec(name) is not None
    return sys.modules[name] is not None


def reason_of(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def numbers(row: Row) -> dict[str, float]:
    return {name: x for name, x in row.items() if isinstance(x, int | float)}


def count(folder: Path) -> int:
    path = folder / "metrics.csv"
    return max(0, len(path.read_bytes().splitlines()) - 1) if path.exists() else 0


def report(mistakes: Mistakes, folder: Path) -> None:
    """Write the files of `mistakes` on rank 0 and say where, or why not."""
    if not distributed.is_rank_zero():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_images(folder)  # of another checkpoint
        mistakes.write(folder)
    except (OSError, LineError) as error:
        return distributed.print0(
            f"{folder}: cannot be written ({getattr(error, 'line', error)})"
        )
    names = [name for name in IMAGES if (folder / name).exists()]
    if names:
        distributed.print0(f"written to {folder}: {', '.join(names)}")
