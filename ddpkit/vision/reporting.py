"""What a run reports, on rank 0: lines, progress, metrics.csv, TensorBoard, a tracker, images."""

import contextlib
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

from ddpkit import files, version
from ddpkit.data import loading, samples
from ddpkit.data.loading import TrainSampler
from ddpkit.data.other_loaders import OtherSource
from ddpkit.errors import UserError
from ddpkit.ranks import cpus, devices, distributed, failures, process
from ddpkit.run import checkpoint
from ddpkit.run.file_names import (
    EPOCHS,
    EVALUATED,
    EVENTS,
    SHOWN,
    STEPS,
    remove_images,
)
from ddpkit.run.loop import Run
from ddpkit.vision import images, pictures
from ddpkit.vision.bars import tqdm
from ddpkit.vision.beside import Beside
from ddpkit.vision.boards import Board, Entry
from ddpkit.vision.mistakes import (
    MEASURES,
    Mistakes,
    Predict,
    Worsts,
    per_class_lines,
    say_weak,
)
from ddpkit.vision.pictures import DrawExample
from ddpkit.vision.rows import (
    Row,
    as_digits,
    epoch_lines,
    is_of_class,
    only_numbers,
    recorded_rows,
    what_next,
)

Log = Callable[[dict[str, float]], object]  # takes a row of numbers
# takes the id of the run to continue, or None; returns its id, and what takes the rows
Start = Callable[[str | None], tuple[str, Log]]
MOST_LEFT_OUT = 0.1  # of the images, in an epoch; more has a remedy
FEW_STEPS = 10  # in an epoch
USUAL_STEPS = 1000  # at least, of a training
CLOSING_SECONDS = 2


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
    It starts with the first row, or `Run`; note_facts(flags=...) before gives it the flags, too.

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
        predict: Predict | None = None,
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
        self.bar: tqdm | None = None  # which starts a thread
        self.header = ""  # of the lines of epochs, as it was printed last
        self.began = time.monotonic()
        self.waited = 0.0
        self.images = 0  # in this epoch, of all ranks
        # the time, and `images`, at the last entry of the log
        self.since = self.began, 0
        self.pending: list[Entry] = []
        self.beside = Beside()
        self.log: Log | None = None  # the tracker's
        self.facts: dict[str, Any] = {}  # args.json
        self.network = ""  # the line on its parameters
        self.active = distributed.is_rank_zero()
        # of none before the first: `Run` says its own
        rows = recorded_rows(self.folder, epoch) if epoch else []
        self._go_on(epoch, step, rows, device or devices.kind())

    def _go_on(
        self, epoch: int, step: int, rows: list[Row], device: torch.device
    ) -> None:
        """Go on after these epochs and steps; the files are opened when something is written."""
        # finished, so also the number of the next, from 0
        self.epoch = epoch
        self.rows = rows
        self.device = device
        # run.writer.add_scalar("mine", value, run.step + 1), on all ranks
        self.writer = Board(self.folder / STEPS, step, self.active, self.beside)
        # in a folder of its own, for other people's scalars have other steps
        self.board = Board(self.folder / EPOCHS, epoch, self.active, self.beside)

    def begin_run(self, run: Run) -> bool:
        """Go on where `run` does; return whether all is done and recorded, and nothing left.

        If not, print its start lines, write args.json, record rows that it had saved when it was
        killed, and start the tracker. All ranks have to call this, and wait for rank 0.
        """
        recorded = len(distributed.from_rank_zero(recorded_rows, self.folder))
        is_complete = min(run.epoch, recorded) >= self.epochs
        self.active = self.active and not is_complete
        self._go_on(run.epoch, run.step, run.history, run.device)
        if not is_complete:
            self.writer.drop_later()
            distributed.await_rank_zero(self._begin_run, run, recorded)
        return is_complete

    def _begin_run(self, run: Run, recorded: int) -> None:
        self._print_start(run)
        self.start_tracker()
        # They may be more: of epochs after the one that was gone back to.
        if self.rows and recorded != len(self.rows):
            self.record(self.rows[recorded:])

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
        return pictures.colors_of(self.classes).tolist()

    def close(self) -> None:
        """Clear the progress bar and close the files, before any error is printed.

        What arrives within CLOSING_SECONDS is written. It does not wait for longer: after an error
        the device may never come so far.
        """
        self._close_bar()
        until = time.monotonic() + CLOSING_SECONDS
        with contextlib.suppress(RuntimeError):  # of a device that failed
            while (
                self.writer.is_here()
                and self._write_arrived()
                and time.monotonic() < until
            ):
                time.sleep(0.01)
        self.pending = []
        self.writer.close()
        self.board.close()

    def _close_bar(self) -> None:
        if self.bar is not None:
            self.bar.close()

    def _print_start(self, run: Run) -> None:
        """Print the start lines and write args.json: flags, versions, commit, device."""
        source = run.source
        ranks = distributed.world_size()
        device = self.device.type.upper()
        name_of = getattr(torch.get_device_module(self.device), "get_device_name", None)
        if name_of:  # of a GPU
            device = name_of(self.device)
        kind = "virtual " if source.virtual_ranks else ""
        val = ""
        # another may have a share of them
        if isinstance(run.val_loader, loading.Loader):
            val = f"{len(samples.dataset_of(run.val_loader))} validation images | "
        size = f"{run.batch_size} x {run.ranks} {kind}rank(s)"
        if run.accumulate > 1:
            size += f" x {run.accumulate} accumulated"
        distributed.print0(
            f"{ranks} rank(s) on {device}, one process each | {source.global_batch} images per "
            f"step: {size}"
        )
        distributed.print0(
            f"{source.total} training + {val}{source.steps} steps per epoch"
        )
        skipped = left_out(source, run.batch_size)
        if skipped:
            distributed.print0(skipped)
        total = self.epochs * source.steps
        if source.steps < FEW_STEPS and total < USUAL_STEPS:
            # BatchNorm needs some
            smaller = max(run.batch_size // 4, min(run.batch_size, 4))
            most = USUAL_STEPS * smaller // (source.steps * run.batch_size) + 1
            epochs = max(most, self.epochs)
            distributed.print0(
                f"only {total} optimizer steps in total; {USUAL_STEPS:,} or more are typical: try "
                f"--batch-size {smaller} --epochs {epochs}"
            )
        amp = f" | amp {run.flags['amp']}" if "amp" in run.flags else ""
        jpeg = "simplejpeg" if images.simplejpeg else "Pillow"
        distributed.print0(
            f"per rank {getattr(run.train_loader, 'num_workers', 0)} loader worker(s) and "
            f"{torch.get_num_threads()} thread(s) | JPEG: {jpeg}{amp}"
        )
        own = f"{version.__version__} in {version.FOLDER}"
        distributed.print0(f"ddpkit {own}")
        self.note_facts(
            flags=run.flags,
            best=run.best_by,
            ranks=ranks,
            global_batch=source.global_batch,
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
        weights = [*network.parameters()]
        total = sum(each.numel() for each in weights)
        trained = sum(each.numel() for each in weights if each.requires_grad)
        line = f"{type(network).__name__}: {total:,} parameters"
        if trained < total:
            line += f", {trained:,} of them trained"
        if line != self.network:
            distributed.print0(line)
        self.network = line

    def note_facts(self, **more: object) -> None:
        """Add something to args.json, such as flags=vars(args), for `compare` and a tracker."""
        facts = self.facts | more
        if self.active and facts != self.facts:
            self.facts = facts
            self.write_json("args.json", facts)

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
        self.writer.drop_later()
        self.began = time.monotonic()
        bar = self.bar = tqdm(
            total=passes * of_all,
            desc=f"epoch {epoch + 1}/{self.epochs}",
            unit="img",
            leave=False,
            # so that logs stay readable
            disable=not (self.active and _is_on_terminal()),
        )
        self.waited = 0.0
        self.images = 0
        self.since = self.began, 0
        asked = time.monotonic()
        for batch in batches:
            self.waited += time.monotonic() - asked
            self.images += of_all
            self._write_arrived()
            yield batch
            bar.update(of_all)
            asked = time.monotonic()

    def log_step(
        self,
        step: int,
        loss: Tensor | float,
        lr: float,
        grad_norm: Tensor | float | None = None,
        at: object = None,
    ) -> None:
        """Log an optimizer step, if it is one of every `log_every`, without waiting for the device.

        step: their number so far. loss, grad_norm: numbers, or scalars on the device; rank 0's are
        written.
        at: the step as the line has it, such as "50/391"; by default `step`.
        """
        if not (self.active and self.is_due(step)):
            return
        began, images = self.since
        img_per_s = (self.images - images) / max(time.monotonic() - began, 1e-9)
        words = f"epoch {self.epoch + 1}/{self.epochs}  step {at or step}"
        device = devices.for_sums(self.device)
        scalars = [loss] if grad_norm is None else [loss, grad_norm]
        on_device = [
            torch.as_tensor(each).detach().to(device, torch.float32) for each in scalars
        ]
        values = torch.stack(on_device).to("cpu", non_blocking=True)  # pinned memory
        event = None
        if device.type != "cpu":
            event = torch.get_device_module(device).Event()
            event.record()
        self.pending.append(Entry(step, words, lr, img_per_s, values, event))
        self.writer.get_logdir()  # opening it takes seconds, which are not the next entry's
        self._write_arrived()
        self.since = time.monotonic(), self.images

    def is_due(self, step: int) -> bool:
        """Return whether `step`, the number of an optimizer step from 1, is logged."""
        return self.log_every > 0 and step % self.log_every == 0

    def flush(self) -> None:
        """Write the steps that are pending, and have the disk get them; waits for the device."""
        for entry in self.pending:
            if entry.event:
                entry.event.synchronize()
        self._write_arrived()
        self.writer.flush()

    def _write_arrived(self) -> bool:
        """Write the steps whose numbers have come from the device; return whether some have not."""
        while self.pending:
            entry = self.pending[0]
            if entry.event and not entry.event.query():
                return True
            del self.pending[0]
            loss, *norm = entry.values.tolist()
            scalars = {"loss": loss, "lr": entry.lr, "img_per_s": entry.img_per_s}
            shown = {"loss": f"{loss:.4g}", "lr": f"{entry.lr:.3g}"}
            if norm:
                scalars["grad_norm"] = norm[0]
                shown["grad"] = f"{norm[0]:.3g}"
            if self.bar is not None and _is_on_terminal():
                self.bar.set_postfix(shown)  # it shows the speed itself
            else:
                words = "  ".join(f"{name} {value}" for name, value in shown.items())
                distributed.print0(f"{entry.at}  {words}  {entry.img_per_s:.0f} img/s")
            for name, value in scalars.items():
                self.writer.add_scalar(name, value, entry.step)
        return False

    def speed(self) -> dict[str, float]:
        """Return the epoch's columns of speed, as those of all ranks; to call on all of them.

        After the device was read, as `Run.means` does. Nothing if its steps were done before.
        """
        self._close_bar()
        mine = self.waited, failures.peak(self.device)
        # the most of any rank
        waited, peak = map(max, zip(*distributed.gather_objects(mine), strict=True))
        self.flush()
        seconds = time.monotonic() - self.began  # or since a resumed epoch was resumed
        failures.reset_peak(self.device)
        if not self.images:
            return {}
        columns = {
            "img_per_s": self.images / seconds,
            "train_seconds": seconds,
            "data_wait": waited / seconds,
        }
        if not math.isnan(peak):  # which it is on a CPU
            columns["peak_memory"] = peak / 2**30  # GiB
        return columns

    def log_epoch(self, row: Row, is_best: bool = False) -> None:
        """Record a finished epoch: a line, metrics.csv, TensorBoard's scalars, curves.png.

        row: its numbers, by column; "epoch", from 1, may be among them. All ranks have to call
        this, and wait for rank 0, whose tracker may take as long as it likes.
        """
        self.rows.append(checkpoint.to_plain({"epoch": self.epoch + 1, **row}))
        self.log_last_row(is_best)

    def log_last_row(self, is_best: bool) -> None:
        """Record the epoch of the last of `rows`, as `log_epoch` does."""
        self.epoch = int(self.rows[-1]["epoch"])
        distributed.await_rank_zero(self._log_last_row, is_best)

    def _log_last_row(self, is_best: bool) -> None:
        row = self.rows[-1]
        seconds = time.monotonic() - self.began
        left = tqdm.format_interval((self.epochs - self.epoch) * seconds)
        best, _ = self.facts.get("best", ("", ""))
        header, line = epoch_lines(row, self.epochs, self.classes, left, best, is_best)
        if header != self.header:
            distributed.print0(header)
        self.header = header
        distributed.print0(line)
        numbers = only_numbers(row)
        wait = numbers.get("data_wait", 0)
        seconds = numbers.get("train_seconds", 0)
        if wait > 0.1 and wait * seconds > 1:
            distributed.print0(
                f"input-bound: {wait:.0%} of {seconds:.0f} s were spent waiting for images; what "
                f"helps: --workers up to {cpus.cpu_share()} (CPUs per rank), image files that "
                "are not much larger than --image-size, more CPUs"
            )
        self.record([row])

    def record(self, new: Sequence[Row]) -> None:
        """Draw curves.png, then write metrics.csv; TensorBoard and a tracker get the `new` rows."""
        path = self.folder / "curves.png"
        best = self.facts.get("best", ())
        shown = path, self.rows, self.classes, *best
        self.beside(f"{path} was not drawn", pictures.draw_curves, *shown)
        self.beside(f"{self.folder}/metrics.csv was not written", self.write_rows)
        is_new = not any((self.folder / EPOCHS).glob(EVENTS))
        for row in self.rows if is_new else new:
            for name, value in only_numbers(row).items():
                self.board.add_scalar(name, value, row["epoch"])
        self.board.flush()
        self.start_tracker()
        for row in new:
            if self.log:
                numbers = only_numbers(row)
                self.beside("the tracker did not accept a row", self.log, numbers)

    def write_rows(self) -> None:
        # of all rows, in their order: a later one may have more
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        with files.table(self.folder / "metrics.csv", columns) as write:
            for row in self.rows:
                write([row.get(name, "") for name in columns])

    def start_tracker(self) -> None:
        """Start the tracker, if there is one, and this was not tried before."""
        if self.tracker:
            self.beside("the tracker did not start", self._start_tracker, self.tracker)
        self.tracker = None

    def _start_tracker(self, tracker: str | Start) -> None:
        path = self.folder / "tracker.json"
        known = None
        if path.exists():
            known = files.parse(path, json.loads, "JSON")["run"]
        if isinstance(tracker, str):
            flags = self.facts.get("flags", {})
            run, self.log = start_by_name(tracker, known, self.folder.name, flags)
        else:
            run, self.log = tracker(known)
        self.write_json(path.name, {"run": run})

    def write_json(self, name: str, value: object) -> None:
        path = self.folder / name
        text = json.dumps(value, indent=2, default=str)
        self.beside(f"{path} was not written", files.save_text, path, f"{text}\n")

    def _mistakes(self, model: nn.Module, loader: object) -> Mistakes:
        return Mistakes(model, loader, self.classes, self.predict, self.draw)

    def write_images(
        self, confusion: Tensor | None, worst: Worsts, model: nn.Module, loader: object
    ) -> None:
        """Write examples.png, validation images with predictions, worst.png and tables.

        All ranks have to call this, and wait for rank 0.
        """

        def write() -> None:
            mistakes = self._mistakes(model, loader)
            failed = f"{self.folder} lacks images of best.pt"
            self.beside(failed, mistakes.write_files, self.folder, confusion, worst)
            self.beside(failed, mistakes.draw_examples, self.folder / "examples.png")

        distributed.await_rank_zero(write)

    def try_drawing(self, model: nn.Module, loader: object) -> None:
        """Draw one image to nowhere: if that fails, it fails before the first epoch."""
        if self.active:
            import matplotlib

            with (
                tempfile.TemporaryDirectory() as folder,
                # of a few pixels, in a tenth of the time
                matplotlib.rc_context({"savefig.dpi": 10}),
            ):
                path = Path(folder, "image.png")
                self._mistakes(model, loader).draw_examples(path, {0: ""})

    def write_evaluation(
        self,
        evaluation: tuple[Mapping[str, float], Tensor | None, Worsts],
        model: nn.Module,
        loader: object,
        as_json: bool = False,
    ) -> None:
        """Write what an evaluation has found to eval/ in the folder, and print it, on rank 0.

        evaluation: as main.evaluate returns it: results by name, printed below a table of the
        classes, or, as_json, alone and in one line; the confusion matrix of `compute_metrics`; what
        TopLosses.compute() returns. loader: of the validation images.
        """
        if not distributed.is_rank_zero():
            return
        results, confusion, worst = evaluation
        mistakes = self._mistakes(model, loader)
        folder = self.folder / "eval"
        failed = f"{folder} lacks files of this evaluation"
        self.beside(failed, files.make_folder, folder)
        self.beside(failed, remove_images, folder, EVALUATED)  # of another checkpoint
        self.beside(failed, mistakes.write_files, folder, confusion, worst)
        if worst and len(worst[0]) > 2:
            more = self.beside(failed, mistakes.write_predictions, folder, worst)
            results = {**results, **(more or {})}
        names = [name for name in EVALUATED if (folder / name).exists()]
        if names:
            distributed.print0(f"written to {folder}: {', '.join(names)}")
        if as_json:
            # it has no NaN, which a metric of no samples is
            finite = {
                name: value if math.isfinite(value) else None
                for name, value in results.items()
            }
            return distributed.print0(json.dumps(finite))
        count = samples.size(samples.dataset_of(loader))
        for line in evaluation_lines(results, confusion, self.classes, count):
            distributed.print0(line)
        self.beside("classes were not checked", say_weak, folder, results)

    def print_results(self, name: str, best: float, epoch: int, example: str) -> None:
        """Print the best score, the paths of the results, and the command that uses them.

        epoch: of the best. example: an image to predict.
        """
        if not math.isfinite(best):
            return distributed.print0(
                f"done, without best.pt: {name} was NaN or missing after every epoch"
            )
        checkpoint = os.path.join(os.path.relpath(self.folder), "best.pt")
        shown = [file for file in SHOWN if (self.folder / file).exists()]
        names = ", ".join([checkpoint, *shown])
        distributed.print0(f"done: best {name} {best:.4f} in epoch {epoch}; {names}")
        hint = what_next(self.rows, *self.facts.get("best", ("", "")))
        if hint:
            distributed.print0(hint)
        self.beside("classes are not looked at", say_weak, self.folder, {name: best})
        script = process.project() / "predict.py"
        if script.is_file():
            paths = [os.path.relpath(script), os.path.relpath(example)]
            command = shlex.join(["python", *paths, "--checkpoint", checkpoint])
            distributed.print0(f"next: {command}")


def left_out(source: TrainSampler | OtherSource, batch_size: int) -> str:
    """Return why an epoch has fewer images than there are, for the start line, if it has."""
    count = source.total % source.global_batch
    # by weights some images are drawn again, and others are not
    if not count or getattr(source, "cumulated", None) is not None:
        return ""
    line = f"drop_last: {count} images skipped per epoch (different ones each time)"
    size = batch_size
    while size > 1 and count > MOST_LEFT_OUT * source.total:
        size //= 2
        count = source.total % (source.global_batch // batch_size * size)
    if size < batch_size:
        line += f"; try --batch-size {size}"
    return line


def git_commit() -> str:
    """Return the commit of the project's folder, marked if it has changes; "" without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError):
        done = subprocess.run(
            command, cwd=process.project(), capture_output=True, text=True
        )
        return done.stdout.strip()
    return ""


def start_by_name(
    tracker: str, known: str | None, name: str, flags: Mapping[str, object]
) -> tuple[str, Log]:
    """Begin a run of a tracker, by its name and that of the project, or continue the `known` one.

    Returns its id, and what takes its rows.
    """
    tool = importlib.import_module(tracker)  # which may fail as its server may
    project = process.project().name
    if tracker == "mlflow":
        tool.set_experiment(project)
        run = tool.start_run(known, run_name=name)
        tool.log_params({} if known else flags)
        return run.info.run_id, lambda row: tool.log_metrics(
            row, step=int(row["epoch"])
        )
    # wandb finds a run by its id, trackio by its name
    key = {"id": known} if tracker == "wandb" else {"name": known or name}
    run = tool.init(project=project, config=flags, resume="allow", **key)

    def log_row(row: dict[str, float]) -> None:
        row.pop("step", None)  # a name of theirs
        run.log(row, step=int(row["epoch"]))

    return run.id if tracker == "wandb" else run.name, log_row


def _is_on_terminal() -> bool:
    with contextlib.suppress(Exception):  # of a stream that is closed
        return sys.stderr.isatty()
    return False


def evaluation_lines(
    results: Mapping[str, float],
    confusion: Tensor | None,
    classes: Sequence[str],
    count: int | None,
) -> list[str]:
    """Return a table of the classes, and below it the results that are not in it.

    count: of the images that were evaluated, if that is known.
    """
    lines = []
    if confusion is not None:
        lines = per_class_lines(confusion, classes, count)
        others = {
            name: value
            for name, value in results.items()
            if not (name.startswith(MEASURES) and is_of_class(name, classes))
        }
        results = others or results
    width = max(map(len, results))
    for name, value in results.items():
        lines.append(f"{name:{width}}  {as_digits(value)}")
    return lines
