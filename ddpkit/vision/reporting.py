"""What a run reports, on rank 0: lines, progress, metrics.csv, TensorBoard, a tracker, images."""

import contextlib
import functools
import importlib
import importlib.util
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ddpkit import files, version
from ddpkit.data import loading, samples
from ddpkit.data.loading import TrainSampler
from ddpkit.data.other_loaders import OtherSource
from ddpkit.errors import UserError
from ddpkit.ranks import devices, distributed, failures, process
from ddpkit.ranks.cpus import cpu_share
from ddpkit.run import checkpoint
from ddpkit.run.file_names import EPOCHS, EVENTS, IMAGES, SHOWN, remove_images
from ddpkit.run.outputs import Outputs
from ddpkit.vision import images, pictures
from ddpkit.vision.beside import Beside
from ddpkit.vision.mistakes import MEASURES, Mistakes, Worsts, per_class_lines
from ddpkit.vision.pictures import DrawExample
from ddpkit.vision.rows import (
    EpochLines,
    Row,
    as_digits,
    is_of_class,
    only_numbers,
    recorded_epochs,
    recorded_rows,
)
from ddpkit.vision.steplog import Board, StepLog, open_writer

Log = Callable[[dict[str, float]], object]  # takes a row of numbers
# takes the id of the run to continue, or None; returns its id, and what takes the rows
Start = Callable[[str | None], tuple[str, Log]]
MOST_LEFT_OUT = 0.1  # of the images, in an epoch; more has a remedy


class Reporter:
    """Reports a training: log lines, TensorBoard, metrics.csv, curves.png. Rank 0 writes.

    In a loop of your own, with a group of torch.distributed or without one, on all ranks:

        report = ddpkit.Reporter("runs/a", epochs, log_every=50)
        for epoch in range(epochs):
            for step, batch in enumerate(report.progress(loader, epoch), 1):
                report.log_step(epoch * len(loader) + step, train(batch), lr)
            report.log_epoch({"top1": evaluate(), **report.speed()})

    classes: their names; columns that end with one are not in curves.png. log_every: optimizer
    steps between lines; 0: none. epoch, step: those that are done, of a run that goes on: later
    rows and curves are dropped. `Run` says them itself, and the device. device: that of the
    training, by default this machine's kind.
    predict, draw: for images with predictions, (model, images) -> outputs and draw_example(axes,
    image, target, logits, classes).
    tracker: gets the rows of metrics.csv, on rank 0: "mlflow", "trackio", "wandb", or a function
    that takes the id of the run to continue, or None, and returns its id and a function of a row.

    Raises a UserError if there is no such tracker.
    """

    def __init__(
        self,
        folder: Path | str,
        epochs: int,
        classes: Sequence[str] = (),
        *,
        log_every: int = 0,
        epoch: int = 0,
        step: int = 0,
        device: torch.device | None = None,
        predict: Callable[[nn.Module, Tensor], Outputs] | None = None,
        draw: DrawExample | None = None,
        tracker: str | Start | None = None,
    ) -> None:
        if isinstance(tracker, str):
            self.check_tracker(tracker)
        self.folder = Path(folder)
        self.epochs = epochs
        self.classes = classes
        self.log_every = log_every
        self.predict = predict or (lambda model, images: model(images))
        self.draw = draw
        self.tracker = tracker
        if distributed.any_debugged():
            tqdm.monitor_interval = 0  # its thread would be one more row in each rank
        self.bar = tqdm(disable=True)
        self.lines = EpochLines(epochs, classes)
        self.began = time.monotonic()
        self.waited = 0.0
        self.images = 0  # in this epoch, of all ranks
        self.beside = Beside()
        self.process = os.getpid()
        self.log: Log | None = None  # the tracker's
        self.facts: dict[str, object] = {}  # args.json
        self.network = ""  # the line on its parameters
        rows = recorded_rows(self.folder, epoch)
        self._begin(epoch, step, rows, device or devices.kind(), active=True)

    def _begin(
        self, epoch: int, step: int, rows: list[Row], device: torch.device, active: bool
    ) -> None:
        """Go on after these epochs and steps; the files are opened when something is written."""
        # finished, so also the number of the next, from 0
        self.epoch = epoch
        self.rows = rows
        self.device = device
        self.active = active and distributed.is_rank_zero()
        self.steps = StepLog(self.folder, device, self.log_every, step, self.active)
        # Entries of later epochs, before going back to an earlier checkpoint, are dropped:
        # in a folder of its own, for other people's scalars have other steps.
        open_board = functools.partial(open_writer, purge_step=epoch + 1)
        self.board = Board(self.folder / EPOCHS, open_board, self.active)

    def go_on(
        self, epoch: int, step: int, rows: list[Row], device: torch.device
    ) -> bool:
        """Begin where a run goes on; return whether all is done and recorded, and nothing left.

        rows: of the run, which adds to them. Every rank has to call it.
        """
        recorded = distributed.from_rank_zero(recorded_epochs, self.folder)
        is_complete = min(epoch, recorded) >= self.epochs
        self._begin(epoch, step, rows, device, active=not is_complete)
        self.steps.begin_epoch()
        return is_complete

    @staticmethod
    def check_tracker(name: str | None) -> None:
        """Raise a UserError if there is no such tracker; to call before data are read."""
        if not name or sys.modules.get(name):  # or a module that a program has made
            return
        spec = importlib.util.find_spec(name)
        if not spec or not spec.origin:  # a folder of that name, as of its runs
            raise UserError(
                f"--tracker {name}: not installed; python -m pip install {name}"
            )

    def colors(self) -> list[list[int]]:
        """Return those of the classes, from 0 to 255, for checkpoints."""
        colors: list[list[int]] = pictures.colors_of(self.classes).tolist()
        return colors

    def close(self) -> None:
        """Clear the progress bar and close the files, before any error is printed."""
        # TensorBoard's thread is not in a child that was forked
        if os.getpid() != self.process:
            return
        self.bar.close()
        self.steps.close()
        self.board.close()

    def print_start(
        self,
        source: TrainSampler | OtherSource,
        batch_size: int,
        accumulate: int,
        train_loader: object,
        val_loader: object,
        flags: Mapping[str, object],
    ) -> None:
        """Print the start lines and write args.json: flags, versions, commit, device."""
        if not self.active:
            return
        ranks = distributed.world_size()
        device = self.device.type.upper()
        name_of = getattr(torch.get_device_module(self.device), "get_device_name", None)
        if name_of:  # of a GPU
            device = name_of(self.device)
        val = ""
        if isinstance(val_loader, loading.Loader):  # another may have a share of them
            val = f"{len(samples.dataset_of(val_loader))} validation images | "
        distributed.print0(
            f"{ranks} rank(s) on {device} | batch {batch_size} per rank x "
            f"{ranks} rank(s) x {accumulate} accumulated = {source.global_batch}"
        )
        distributed.print0(
            f"{source.total} training + {val}{source.steps} steps per epoch"
            f"{left_out(source)}"
        )
        amp = f" | amp {flags['amp']}" if "amp" in flags else ""
        jpeg = images.decoder()
        distributed.print0(
            f"per rank {getattr(train_loader, 'num_workers', 0)} loader worker(s) and "
            f"{torch.get_num_threads()} thread(s) | JPEG: {jpeg}{amp}"
        )
        own = library()
        distributed.print0(f"ddpkit {own}")
        self.note_facts(
            flags=dict(flags),
            ranks=ranks,
            device=device,
            jpeg=jpeg,
            git=git_commit(),
            versions={
                "python": platform.python_version(),
                "torch": torch.__version__,
                "ddpkit": own,
            },
        )

    def print_parameters(self, network: nn.Module) -> None:
        """Print how many parameters the network has, and how many are trained, if that is new."""
        total = 0
        trained = 0
        for weight in network.parameters():
            total += weight.numel()
            trained += weight.numel() * weight.requires_grad
        line = f"{type(network).__name__}: {total:,} parameters"
        if trained < total:
            line += f", {trained:,} of them trained"
        if self.active and line != self.network:
            distributed.print0(line)
        self.network = line

    def note_facts(self, **more: object) -> None:
        """Add something to args.json."""
        facts = self.facts | more
        if self.active and facts != self.facts:
            self.facts = facts
            self.write_json("args.json", facts)

    def chosen_by(self) -> list[str]:
        """Return the column by which best.pt is chosen, and "max" or "min"; "" while not known."""
        found = self.facts.get("best")
        return found if isinstance(found, list) else ["", ""]

    def progress(
        self,
        batches: Iterable[Any],
        epoch: int,
        passes: int | None = None,
        batch_size: int | None = None,
    ) -> Iterator[Any]:
        """Yield `batches` under a progress bar, which counts the images of all ranks.

        passes: their number. batch_size: images in each. By default the loader's, if it has them.
        """
        loader: Any = batches
        if passes is None:
            passes = len(loader)
        if batch_size is None:
            batch_size = loader.batch_size
        of_all = batch_size * distributed.world_size()
        self.epoch = epoch
        self.began = time.monotonic()
        self.bar = tqdm(
            total=passes * of_all,
            desc=f"epoch {epoch + 1}/{self.epochs}",
            unit="img",
            leave=False,
            # so that logs stay readable
            disable=not (self.active and _is_on_terminal()),
        )
        self.steps.begin_epoch(self.bar)
        self.waited = 0.0
        self.images = 0
        failures.note_batch_size(batch_size)
        asked = time.monotonic()
        for batch in batches:
            self.waited += time.monotonic() - asked
            self.images += of_all
            self.steps.count_images(of_all)
            yield batch
            self.bar.update(of_all)
            asked = time.monotonic()

    def log_step(
        self,
        step: int,
        loss: Tensor,
        lr: float,
        grad_norm: Tensor | None = None,
        at: object = None,
    ) -> None:
        """Log an optimizer step, if it is one of every `log_every`, without waiting for the device.

        step: their number so far. loss, grad_norm: scalars, on the device; rank 0's are written.
        at: the step as the line has it, such as "50/391"; by default `step`.
        """
        if self.steps.is_due(step):
            place = f"epoch {self.epoch + 1}/{self.epochs}  step {at or step}"
            self.steps.add_step(step, place, loss, lr, grad_norm)

    def speed(self) -> dict[str, float]:
        """Return the epoch's columns of speed, as those of all ranks; to call on all of them.

        Nothing if its steps were done before.
        """
        self.bar.close()
        mine = torch.tensor(
            [self.waited, failures.peak(self.device)],
            dtype=torch.float64,
            device=devices.for_sums(self.device),
        )
        # the most of any rank; waits for the device, so that the seconds are its, too
        waited, peak = distributed.gather(mine).max(0).values.tolist()
        self.steps.flush()
        seconds = time.monotonic() - self.began  # or since a resumed epoch was resumed
        failures.reset_peak(self.device)
        if not self.images:
            return {}
        found = {
            "img_per_s": self.images / seconds,
            "train_seconds": seconds,
            "data_wait": waited / seconds,
        }
        if not math.isnan(peak):  # which it is on a CPU
            found["peak_memory"] = peak / failures.GIB
        return found

    def log_epoch(self, row: Row, is_best: bool = False) -> None:
        """Record a finished epoch: a line, metrics.csv, TensorBoard's scalars, curves.png.

        row: its numbers, by column; "epoch", from 1, may be among them.
        """
        self.rows.append(checkpoint.to_plain({"epoch": self.epoch + 1, **row}))
        self._log_last_row(is_best)

    def log_last_row(self, is_best: bool) -> None:
        """Record the epoch of the last of `rows`, as `log_epoch` does; all ranks have to call this.

        They wait for rank 0, whose tracker may take as long as it likes.
        """
        distributed.await_rank_zero(self._log_last_row, is_best)

    def _log_last_row(self, is_best: bool) -> None:
        row = self.rows[-1]
        self.epoch = int(row["epoch"])
        if not self.active:
            return
        found = only_numbers(row)
        seconds = time.monotonic() - self.began
        left = tqdm.format_interval((self.epochs - found["epoch"]) * seconds)
        name, _ = self.chosen_by()
        for line in self.lines.of_row(row, left, name, is_best):
            distributed.print0(line)
        wait = found.get("data_wait", 0)
        seconds = found.get("train_seconds", 0)
        if wait > 0.1 and wait * seconds > 1:
            distributed.print0(
                f"input-bound: {wait:.0%} of {seconds:.0f} s were spent waiting for images; what "
                f"helps: --workers up to {cpu_share()} (CPUs per rank), image files that "
                "are not much larger than --image-size, more CPUs"
            )
        self.record([row])

    def record(self, new: Sequence[Row]) -> None:
        """Draw curves.png, then write metrics.csv; give the `new` rows to TensorBoard."""
        path = self.folder / "curves.png"
        words = path, self.rows, self.classes, *self.chosen_by()
        self.beside(f"{path} is not drawn", pictures.draw_curves, *words)
        self.beside(f"{self.folder}/metrics.csv is not written", self.write_rows)
        shown = new if any((self.folder / EPOCHS).glob(EVENTS)) else self.rows
        for row in shown:
            for name, value in only_numbers(row).items():
                self.board.add_scalar(name, value, row["epoch"])
        self.board.flush()
        for row in new:
            if self.log:
                numbers = only_numbers(row)
                self.beside("the tracker did not take a row", self.log, numbers)

    def write_rows(self) -> None:
        # of all rows, in their order: a later one may have more
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        with files.table(self.folder / "metrics.csv", columns) as write:
            for row in self.rows:
                write([row.get(name, "") for name in columns])

    def catch_up(self, flags: Mapping[str, object] | None = None) -> None:
        """Record the rows that a run had saved when it was killed; start the tracker, if any.

        flags: for the tracker. All ranks have to call this, and wait for rank 0.
        """
        tracker = self.tracker
        if isinstance(tracker, str):
            tracker = find_tracker(tracker, self.folder, flags or {})

        def catch_up() -> None:
            if tracker:
                self.beside("the tracker did not start", self._start_tracker, tracker)
            recorded = recorded_epochs(self.folder)
            # They may be more: of epochs after the one that was gone back to.
            if self.rows and recorded != len(self.rows):
                self.record(self.rows[recorded:])

        distributed.await_rank_zero(catch_up if self.active else int)

    def _start_tracker(self, tracker: Start) -> None:
        path = self.folder / "tracker.json"
        known = json.loads(path.read_text("utf-8"))["run"] if path.exists() else None
        run, self.log = tracker(known)
        self.write_json("tracker.json", {"run": run})

    def write_json(self, name: str, value: object) -> None:
        path = self.folder / name
        text = json.dumps(value, indent=2, default=str)
        self.beside(f"{path} is not written", files.save_text, path, f"{text}\n")

    def _mistakes(
        self, confusion: Tensor | None, worst: Worsts, model: nn.Module, loader: object
    ) -> Mistakes:
        shown = loader, self.classes, self.predict, self.draw
        return Mistakes(confusion, worst, model, *shown)

    def write_images(
        self, confusion: Tensor | None, worst: Worsts, model: nn.Module, loader: object
    ) -> None:
        """Write examples.png, validation images with predictions, worst.png and tables.

        All ranks have to call this, and wait for rank 0.
        """
        mistakes = self._mistakes(confusion, worst, model, loader)

        def write() -> None:
            failed = f"{self.folder} lacks images of best.pt"
            self.beside(failed, mistakes.write_files, self.folder)
            self.beside(failed, mistakes.draw_examples, self.folder / "examples.png")

        distributed.await_rank_zero(write if self.active else int)

    def try_drawing(self, model: nn.Module, loader: object) -> None:
        """Draw one image to nowhere: if that fails, it fails before the first epoch."""
        if self.active:
            mistakes = self._mistakes(None, [], model, loader)
            with tempfile.TemporaryDirectory() as folder:
                mistakes.draw_examples(Path(folder, "image.png"), {0: ""})

    def write_evaluation(
        self,
        found: tuple[Mapping[str, float], Tensor | None, Worsts],
        model: nn.Module,
        loader: object,
        as_json: bool = False,
    ) -> None:
        """Write what an evaluation has found to eval/ in the folder, and print it, on rank 0.

        found: as main.evaluate returns it: results by name, printed below a table of the classes,
        or, as_json, alone and in one line; the confusion matrix of `compute_metrics`; what
        TopLosses.compute() returns. loader: of the validation images.
        """
        if not distributed.is_rank_zero():
            return
        results, confusion, worst = found
        mistakes = self._mistakes(confusion, worst, model, loader)
        folder = self.folder / "eval"
        failed = f"{folder} lacks files of this evaluation"
        self.beside(failed, files.make_folder, folder)
        self.beside(failed, remove_images, folder)  # of another checkpoint
        self.beside(failed, mistakes.write_files, folder)
        names = [name for name in IMAGES if (folder / name).exists()]
        if names:
            distributed.print0(f"written to {folder}: {', '.join(names)}")
        print_evaluation(mistakes, results, as_json)

    def print_results(self, name: str, best: float, epoch: int, example: str) -> None:
        """Print the best score, the paths of the results, and the command that uses them.

        epoch: of the best. example: an image to predict.
        """
        if not self.active:
            return
        if not math.isfinite(best):
            return distributed.print0(
                f"done: {name} was NaN after every epoch: there is no best.pt"
            )
        checkpoint = os.path.join(os.path.relpath(self.folder), "best.pt")
        found = [file for file in SHOWN if (self.folder / file).exists()]
        names = ", ".join([checkpoint, *found])
        distributed.print0(f"done: best {name} {best:.4f}, of epoch {epoch}; {names}")
        script = process.project() / "predict.py"
        if script.is_file():
            paths = [nearest(script), nearest(example)]
            command = shlex.join(["python", *paths, "--checkpoint", checkpoint])
            distributed.print0(f"next: {command}")


def nearest(path: Path | str) -> str:
    """Return the path as it is written from here, unless that has to go up."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith(os.pardir) else relative


def left_out(source: TrainSampler | OtherSource) -> str:
    """Return why an epoch has fewer images than there are, for the start line, if it has."""
    count = source.total % source.global_batch
    # by weights some images are drawn again, and others are not
    if not count or getattr(source, "cumulated", None) is not None:
        return ""
    line = f"; each epoch leaves out {count} image(s), others each time: too few for a step"
    if count > MOST_LEFT_OUT * source.total:
        line += ", so try a smaller --batch-size"
    return line


def find_tracker(name: str, folder: Path, flags: Mapping[str, object]) -> Start:
    """Return what begins or continues a run of that tracker, named as `folder` and its project."""
    project = process.project().name

    def start_run(known: str | None) -> tuple[str, Log]:
        tool = importlib.import_module(name)  # which may fail as its server may
        if name == "mlflow":
            tool.set_experiment(project)
            run = tool.start_run(known, run_name=folder.name)
            tool.log_params({} if known else flags)
            return run.info.run_id, lambda row: tool.log_metrics(
                row, step=int(row["epoch"])
            )
        # wandb finds a run by its id, trackio by its name
        key = {"id": known} if name == "wandb" else {"name": known or folder.name}
        run = tool.init(project=project, config=dict(flags), resume="allow", **key)

        def log(row: dict[str, float]) -> None:
            shown = {each: row[each] for each in row if each != "step"}
            run.log(shown, step=int(row["epoch"]))

        return run.id if name == "wandb" else run.name, log

    return start_run


def library() -> str:
    """Return which ddpkit runs, and from where."""
    return f"{version.__version__} in {version.FOLDER}"


def git_commit() -> str:
    """Return the commit of the project's folder, marked if it has changes; "" without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError):
        done = subprocess.run(
            command, cwd=process.project(), capture_output=True, text=True
        )
        return done.stdout.strip()
    return ""


def _is_on_terminal() -> bool:
    with contextlib.suppress(Exception):  # of a stream that is closed
        return sys.stderr.isatty()
    return False


def print_evaluation(
    mistakes: Mistakes, results: Mapping[str, float], as_json: bool
) -> None:
    """Print the numbers of an evaluation, on rank 0: tables, or a line of JSON."""
    if as_json:
        # it has no NaN, which a metric of no samples is
        finite = {name: x if math.isfinite(x) else None for name, x in results.items()}
        return distributed.print0(json.dumps(finite))
    if mistakes.confusion is not None:
        images = samples.size(samples.dataset_of(mistakes.loader))
        for line in per_class_lines(mistakes.confusion, mistakes.classes, images):
            distributed.print0(line)
        # which are in that table
        found = {
            name: value
            for name, value in results.items()
            if not (name.startswith(MEASURES) and is_of_class(name, mistakes.classes))
        }
        results = found or results
    width = max(map(len, results))
    for name, value in results.items():
        distributed.print0(f"{name:{width}}  {as_digits(value)}")
