"""What a run reports: lines, progress bar, metrics.csv, TensorBoard, a tracker, images.

Only rank 0 prints and writes; on the other ranks every method returns at once.
"""

import contextlib
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from engine import files
from engine.data import images, samples
from engine.data.loading import Foreign, Own
from engine.errors import LineError
from engine.ranks import devices, distributed, failures
from engine.run import checkpoint, machine, pictures
from engine.run.checkpoint import State
from engine.run.metrics import Mistakes, Totals
from engine.run.pictures import Row

Batch = TypeVar("Batch")
Moment = Any  # an event of torch's, or a HostEvent
# Takes the id of the run to continue, or None; returns its id, and what takes a row of numbers.
Start = Callable[[str | None], tuple[str, Callable[[dict[str, float]], object]]]

IMAGES = ("examples.png", "per_class.csv", "confusion.png", "worst.png")  # of best.pt
SECONDS_BETWEEN_READINGS = 0.5  # reading the loss waits for the device: not at every step
INPUT_BOUND = 0.1  # from this share of time spent waiting for images, a message says so


class Reporter:
    silent = False  # set by engine.replay
    has_images = True  # to draw, of each best epoch

    def __init__(
        self, folder: Path, device: torch.device, epochs: int, finished: int, is_complete: bool
    ) -> None:
        """Report to `folder`, after the `finished` epochs. is_complete: nothing is left to do."""
        self.folder, self.device, self.epochs, self.finished = folder, device, epochs, finished
        self.active = distributed.is_rank_zero() and not self.silent and not is_complete
        self.bar = tqdm(disable=True)
        self.workers, self.batch_size = 0, 1
        self.board: Any = None
        self.tracker: Tracker | None = None

    def close(self) -> None:
        """Clear the progress bar and close the files, before any error is printed."""
        self.bar.close()
        if self.board:
            with contextlib.suppress(OSError):  # the disk may be full
                self.board.close()

    def start(
        self,
        source: Own | Foreign,
        accumulate: int,
        classes: Sequence[str],
        train_loader: Any,
        val_loader: Any,
        flags: Mapping[str, object],
    ) -> None:
        """Print the start lines and write args.json: flags, versions, commit, device."""
        self.batch_size = train_loader.batch_size or 1
        if not self.active:
            return
        self.workers, self.classes = train_loader.num_workers, classes
        ranks, val_set = distributed.world_size(), samples.of(val_loader)
        name_of = getattr(torch.get_device_module(self.device), "get_device_name", None)
        name = name_of(self.device) if name_of else self.device.type.upper()
        val = f"{len(val_set)} validation images | " if hasattr(val_set, "__len__") else ""
        distributed.say(
            f"{ranks} rank(s) on {name} | batch {train_loader.batch_size} per rank x "
            f"{ranks} rank(s) x {accumulate} accumulated = {source.global_batch} | "
            f"{source.total} training + {val}{source.steps} steps per epoch"
        )
        distributed.say(
            f"per rank {self.workers} loader worker(s) and {torch.get_num_threads()} thread(s) | "
            f"JPEG: {images.decoder()}" + (f" | amp {flags['amp']}" if "amp" in flags else "")
        )
        left_out = source.total - source.steps * source.global_batch
        if left_out > source.total / 20:
            distributed.say(
                f"each epoch leaves out {left_out} of {source.total} training images, others each "
                f"time, as they do not fill a batch of {source.global_batch}; lower --batch-size"
            )
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        record = {"flags": dict(flags), "ranks": ranks, "device": name, "jpeg": images.decoder()}
        record |= {"git": machine.git_commit(), "versions": versions}
        write_json(self.folder / "args.json", record)

    def progress(self, batches: Iterable[Any], passes: int, epoch: int) -> Iterator[Any]:
        """Yield the batches of `passes` under a progress bar; it counts the images of all ranks."""
        self.began = self.read_at = time.monotonic()
        per_pass = self.batch_size * distributed.world_size()
        self.bar = tqdm(
            total=passes * per_pass,
            desc=f"epoch {epoch + 1}/{self.epochs}",
            unit="img",
            leave=False,
            disable=not (self.active and sys.stderr.isatty()),  # so that logs stay readable
        )
        self.waiting, self.count = Waiting(self.device), 0
        failures.note_batch_size(self.batch_size)
        for batch in self.waiting.timed(batches):
            self.count += per_pass
            yield batch
            self.bar.update(per_pass)

    def speed(self) -> dict[str, float]:
        """Close the progress bar; return images per second, share of time spent waiting, and GiB.

        The latter: the most GPU memory that a rank has used since the last call. Nothing if all
        steps of the epoch were done before the run was stopped.
        """
        self.bar.close()
        numbers = self.waiting.total(), failures.peak(self.device)
        own = torch.tensor(numbers, dtype=devices.double(self.device), device=self.device)
        waited, peak = distributed.gather(own).max(0).values.tolist()  # waits for the device, too
        seconds = time.monotonic() - self.began  # of a resumed epoch: since it was resumed
        failures.reset_peak(self.device)
        if not self.count:
            return {}
        found = {"img_per_s": self.count / seconds, "train_seconds": seconds}
        found["data_wait"] = waited / seconds
        return found if math.isnan(peak) else {**found, "peak_memory": peak / failures.GIB}

    def loss(self, totals: Totals, lr: float) -> None:
        """Show the mean loss so far (rank 0's own), and the learning rate."""
        if self.bar.disable or (now := time.monotonic()) - self.read_at < SECONDS_BETWEEN_READINGS:
            return
        self.read_at = now
        loss_sum, count = totals.compute().tolist()
        wait = f"{self.waiting.so_far() / (now - self.began):.0%}"
        loss = f"{loss_sum / count if count else 0:.3f}"
        self.bar.set_postfix(loss=loss, lr=f"{lr:.2g}", data_wait=wait)

    def end_epoch(self, rows: Sequence[Row], is_best: bool) -> None:
        """Record the last of `rows`: a line, metrics.csv, TensorBoard scalars, curves.png."""
        if not self.active:
            return
        numbers = self.record(rows)
        left = (self.epochs - int(numbers["epoch"])) * (time.monotonic() - self.began)
        shown = "  ".join(f"{k} {v:.4g}" for k, v in numbers.items() if k not in ("epoch", "step"))
        star = "  best" if is_best else ""
        distributed.say(
            f"epoch {rows[-1]['epoch']}/{self.epochs}  {shown}  left {left:.0f} s{star}"
        )
        waits = numbers.get("data_wait", 0), numbers.get("train_seconds", 0)
        if line := explain(*waits, self.workers):
            distributed.say(line)
        if self.tracker:
            self.tracker.update(rows)
        pictures.draw_curves(self.folder / "curves.png", rows, self.classes)

    def record(self, rows: Sequence[Row]) -> dict[str, float]:
        """Write metrics.csv, and the numbers of the last row to TensorBoard; return those."""
        write_table(self.folder, rows)
        if not self.board:
            from torch.utils.tensorboard import SummaryWriter  # takes seconds

            # Entries of later epochs, before going back to an earlier checkpoint, are dropped.
            self.board = SummaryWriter(str(self.folder), purge_step=self.finished + 1)
        numbers = {n: value for n, value in rows[-1].items() if isinstance(value, int | float)}
        for name, value in numbers.items():
            self.board.add_scalar(name, value, numbers["epoch"])
        self.board.flush()
        return numbers

    def catch_up(self, rows: Sequence[Row], tracker: Start | None = None) -> None:
        """Record the rows that a run had saved when it was killed; start the tracker, if any."""
        if not self.active:
            return
        recorded = count(self.folder)
        for epoch in range(recorded + 1, len(rows) + 1):
            self.record(rows[:epoch])
        if recorded > len(rows) > 0:  # of epochs after the checkpoint that was gone back to
            write_table(self.folder, rows)
        if rows and (recorded != len(rows) or not are_drawn(self.folder, self.has_images)):
            pictures.draw_curves(self.folder / "curves.png", rows, self.classes)
        if tracker:
            self.tracker = Tracker(self.folder, tracker, len(rows))
            self.tracker.update(rows)

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

    def undrawn(self) -> State | None:
        """Return best.pt if the run was killed before its images were drawn; on rank 0."""
        best = self.folder / "best.pt"
        if not self.active or are_drawn(self.folder, self.has_images) or not best.exists():
            return None
        state = checkpoint.read(best)
        return {"model": state["model"], "path": state["path"]}

    def finish(self, name: str, best: float) -> None:
        """Print the best score and the paths of the results."""
        if self.active and not math.isfinite(best):
            distributed.say(f"done: {name} was NaN after every epoch, so there is no best.pt")
        elif self.active:
            drawn = [file for file in ("curves.png", *IMAGES) if (self.folder / file).exists()]
            path = os.path.join(os.path.relpath(self.folder), "best.pt")
            distributed.say(f"done: best {name} {best:.4f}; {', '.join([path, *drawn])}")


class HostEvent:
    """As torch.Event, of a CPU: what is asked of it is done at once."""

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "HostEvent") -> float:
        return 1000 * (end.seconds - self.seconds)


class Waiting:
    """The time for which a device has had nothing to do because it waited for a batch.

    On its own clock: the host queues work for a GPU and runs ahead of it. While the host waits for
    a batch, the GPU mostly has work left.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.over = 0.0  # seconds, in the waits that have been added up
        self.others: deque[tuple[Moment, Moment]] = deque()  # as many as steps are queued

    def timed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches. To be asked for the next one when all work on the last is queued."""
        asked = self.now()
        for batch in batches:
            # If the device is still at work when the batch comes, both moments are the same.
            self.others.append((asked, self.now()))
            self.so_far()
            yield batch
            asked = self.now()

    def now(self) -> Moment:
        """Return the moment at which the device has done what is queued by now, as an event."""
        is_host = self.device.type == "cpu"
        event: Moment = HostEvent() if is_host else torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def so_far(self) -> float:
        """Return the seconds until now, without waits that the device has not come to yet."""
        while self.others and self.others[0][1].query():
            start, end = self.others.popleft()
            self.over += start.elapsed_time(end) / 1000
        return self.over

    def total(self) -> float:
        """Return the seconds; waits for the device."""
        if self.others:
            self.others[-1][1].synchronize()
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


def write_json(path: Path, value: object) -> None:
    with files.writing(path) as tmp_path:
        tmp_path.write_text(json.dumps(value, indent=2, default=str) + "\n")


def write_table(folder: Path, rows: Sequence[Row]) -> None:
    columns = [*dict.fromkeys(name for row in rows for name in row)]
    (folder / "curves.png").unlink(missing_ok=True)
    with files.table(folder / "metrics.csv", columns) as write:
        for row in rows:
            write([row.get(name, "") for name in columns])


def count(folder: Path) -> int:
    """Return how many rows metrics.csv has."""
    path = folder / "metrics.csv"
    return max(0, len(path.read_bytes().splitlines()) - 1) if path.exists() else 0


def remove_images(folder: Path) -> None:
    """Remove the images of best.pt, before another file gets that name."""
    for name in IMAGES:
        (folder / name).unlink(missing_ok=True)


def are_drawn(folder: Path, has_images: bool) -> bool:
    """Return whether metrics.csv has its curves, which go before it changes, and best.pt its images
    (if the run draws any), of which examples.png comes last: a kill may have come in between.
    """
    pairs = [("metrics.csv", "curves.png"), ("best.pt", "examples.png")][: 1 + has_images]
    return all((folder / image).exists() for of, image in pairs if (folder / of).exists())


def are_complete(folder: Path, epochs: int, has_images: bool) -> bool:
    """Return, on all ranks, whether the run in `folder` has recorded and drawn all `epochs`."""

    def check() -> bool:
        recorded = min(count(folder), read_tracker(folder).get("epochs", epochs))
        is_recorded = recorded >= epochs and are_drawn(folder, has_images)
        return is_recorded or not (folder / "last.pt").exists()

    return distributed.from_rank_zero(check)


def report(mistakes: Mistakes, folder: Path) -> None:
    """Write the files of `mistakes` on rank 0 and say where.

    If `folder` cannot be written to, a line says so: --eval-only may evaluate another's run.
    """
    if not distributed.is_rank_zero():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_images(folder)  # of another checkpoint
        names = mistakes.write(folder)
    except OSError as error:
        return distributed.say(f"{folder}: cannot be written ({error.strerror})")
    except LineError as error:
        return distributed.say(str(error))
    if names:
        distributed.say(f"written to {folder}: {', '.join(names)}")


class Tracker:
    """Gives rows to a tracker such as MLflow: all, in order, also those missed before a kill.

    A kill just after a row was given repeats it, with the same `epoch`. tracker.json has the id of
    the tracker's run, and how many epochs it has got; later ones than `finished`, before going back
    to an earlier checkpoint, are given again.
    """

    def __init__(self, folder: Path, start: Start, finished: int) -> None:
        known = read_tracker(folder)
        self.folder = folder
        self.run, self.log = start(known.get("run"))
        self.save(min(known.get("epochs", 0), finished))

    def save(self, epochs: int) -> None:
        self.epochs = epochs
        write_json(self.folder / "tracker.json", {"run": self.run, "epochs": epochs})

    def update(self, rows: Sequence[Row]) -> None:
        """Give the tracker the rows that it lacks; if it fails, try again after the next epoch."""
        for row in rows[self.epochs :]:
            try:
                self.log({n: value for n, value in row.items() if not isinstance(value, str)})
            except Exception as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                line = f"the tracker did not take epoch {row['epoch']} ({reason[:200]})"
                return distributed.say(f"{line}; trying again after the next one, and on resume")
            self.save(self.epochs + 1)


def read_tracker(folder: Path) -> dict:
    path = folder / "tracker.json"
    return json.loads(path.read_text()) if path.exists() else {}
