"""What a run reports: start line, progress bar, epoch lines, metrics.csv, TensorBoard, plots.

Only rank 0 prints and writes; on the other ranks every method returns at once.
"""

import contextlib
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torchvision
from tqdm import tqdm

from engine import files
from engine.data import images, samples
from engine.data.sources import Foreign, Own
from engine.ranks import devices, distributed, logs, memory
from engine.run import checkpoint, machine, records, waiting
from engine.run.checkpoint import State
from engine.run.metrics import Totals
from engine.run.mistakes import Mistakes
from engine.run.stragglers import Stopwatch
from engine.run.waiting import Waiting

SECONDS_BETWEEN_READINGS = 0.5  # reading the loss waits for the device: not at every step

if TYPE_CHECKING:
    from engine.run.plots import Row


class Reporter:
    silent = False  # set by engine.replay

    def __init__(
        self, folder: Path, device: torch.device, epochs: int, finished: int, is_complete: bool
    ) -> None:
        """Open TensorBoard's log in `folder`; entries after the `finished` epochs are dropped.

        is_complete: whether nothing is left to report.
        """
        self.folder, self.device, self.epochs = folder, device, epochs
        self.active = distributed.is_rank_zero() and not self.silent and not is_complete
        self.bar = tqdm(disable=True)
        self.workers, self.batch_size = 0, 1
        self.forward = Stopwatch(device, 0)
        self.tracker: records.Tracker | None = None
        if not self.active:
            return
        # Imported here, like matplotlib below: it takes seconds, and other ranks do not need it.
        from torch.utils.tensorboard import SummaryWriter

        self.board = SummaryWriter(str(folder), purge_step=finished + 1)

    def close(self) -> None:
        """Clear the progress bar and close the files, before any error is printed."""
        self.bar.close()
        if self.active:
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
        module = torch.get_device_module(self.device)
        name = getattr(module, "get_device_name", lambda device: device.type.upper())(self.device)
        val = f"{len(val_set)} validation images | " if hasattr(val_set, "__len__") else ""
        distributed.say(
            f"{ranks} rank(s) on {name} | batch {train_loader.batch_size} per rank x "
            f"{ranks} rank(s) x {accumulate} accumulated = {source.global_batch} | "
            f"{source.total} training + {val}{source.steps} steps per epoch"
        )
        distributed.say(
            f"per rank {self.workers} loader worker(s), {train_loader.prefetch_factor or 0} "
            f"batches ahead each, and {torch.get_num_threads()} thread(s) | memory "
            f"{'' if train_loader.pin_memory else 'not '}pinned | JPEG: {images.decoder()}"
            + (f" | amp {flags['amp']}" if "amp" in flags else "")
        )
        left_out = source.total - source.steps * source.global_batch
        if left_out > source.total / 20:
            distributed.say(
                f"each epoch leaves out {left_out} of {source.total} training images, others each "
                f"time, as they do not fill a batch of {source.global_batch}; lower --batch-size"
            )
        record = {
            "flags": dict(flags),
            "ranks": ranks,
            "device": name,
            "jpeg": images.decoder(),
            "git": machine.git_commit(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "torchvision": torchvision.__version__,
                "cuda": torch.version.cuda if self.device.type == "cuda" else None,
            },
        }
        with files.writing(self.folder / "args.json") as tmp_path:
            tmp_path.write_text(json.dumps(record, indent=2, default=str) + "\n")

    def progress(self, batches: Iterable[Any], passes: int, epoch: int) -> Iterator[Any]:
        """Yield the batches of `passes` under a progress bar; it counts the images of all ranks."""
        self.began = self.read_at = time.monotonic()
        per_pass = self.batch_size * distributed.world_size()
        self.bar = tqdm(
            total=passes * per_pass,
            desc=f"epoch {epoch + 1}/{self.epochs}",
            unit="img",
            leave=False,
            disable=not (self.active and logs.has_terminal()),  # so that logs stay readable
        )
        self.waiting, self.count = Waiting(self.device), 0
        memory.note_batch_size(self.batch_size)
        self.forward = Stopwatch(self.device, passes)
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
        numbers = self.waiting.total(), memory.peak(self.device), *self.forward.quartiles()
        own = torch.tensor(numbers, dtype=devices.double(self.device), device=self.device)
        ranks = distributed.gather(own).cpu().double()  # waits for the device, too
        seconds = time.monotonic() - self.began  # of a resumed epoch: since it was resumed
        memory.reset_peak(self.device)
        if self.active and (line := self.forward.explain(ranks[:, 2:], seconds)):
            distributed.say(line)
        if not self.count:
            return {}
        waited, peak = ranks[:, :2].max(0).values.tolist()
        return {
            "img_per_s": self.count / seconds,
            "train_seconds": seconds,
            "data_wait": waited / seconds,
            **({"peak_memory": peak / memory.GIB} if not math.isnan(peak) else {}),
        }

    def loss(self, totals: Totals, lr: float) -> None:
        """Show the mean loss so far (rank 0's own), and the learning rate."""
        now = time.monotonic()
        if not self.bar.disable and now - self.read_at >= SECONDS_BETWEEN_READINGS:
            self.read_at = now
            loss_sum, count = totals.compute().tolist()
            wait = f"{self.waiting.so_far() / (now - self.began):.0%}"
            loss = f"{loss_sum / count if count else 0:.3f}"
            self.bar.set_postfix(loss=loss, lr=f"{lr:.2g}", data_wait=wait)

    def end_epoch(self, rows: Sequence["Row"], is_best: bool) -> None:
        """Record the last of `rows`: a line, metrics.csv, TensorBoard scalars, curves.png."""
        if not self.active:
            return
        from engine.run import plots

        row = rows[-1]
        numbers = self.record(rows)
        epoch = int(numbers["epoch"])
        left = (self.epochs - epoch) * (time.monotonic() - self.began)
        shown = "  ".join(f"{k} {v:.4g}" for k, v in numbers.items() if k not in ("epoch", "step"))
        star = "  best" if is_best else ""
        distributed.say(f"epoch {row['epoch']}/{self.epochs}  {shown}  left {left:.0f} s{star}")
        waits = numbers.get("data_wait", 0), numbers.get("train_seconds", 0)
        if line := waiting.explain(*waits, self.workers):
            distributed.say(line)
        if self.tracker:
            self.tracker.update(rows)
        plots.draw_curves(self.folder / "curves.png", rows, self.classes)

    def record(self, rows: Sequence["Row"]) -> dict[str, float]:
        """Write metrics.csv, and the numbers of the last row to TensorBoard; return those."""
        records.write_table(self.folder, rows)
        numbers = {k: value for k, value in rows[-1].items() if isinstance(value, int | float)}
        for name, value in numbers.items():
            self.board.add_scalar(name, value, numbers["epoch"])
        self.board.flush()
        return numbers

    def catch_up(self, rows: Sequence["Row"], tracker: records.Start | None = None) -> None:
        """Record the rows that a run had saved when it was killed; start the tracker, if any."""
        if not self.active:
            return
        from engine.run import plots

        recorded = records.count(self.folder)
        for epoch in range(recorded + 1, len(rows) + 1):
            self.record(rows[:epoch])
        if recorded > len(rows) > 0:  # of epochs after the checkpoint that was gone back to
            records.write_table(self.folder, rows)
        if rows and (recorded != len(rows) or not records.are_drawn(self.folder)):
            plots.draw_curves(self.folder / "curves.png", rows, self.classes)
        if tracker:
            self.tracker = records.Tracker(self.folder, tracker, len(rows))
            self.tracker.update(rows)

    def images(self, mistakes: Mistakes) -> None:
        """Write examples.png, validation images with predictions, and the files of `mistakes`."""
        if self.active:
            from engine.run import gallery

            mistakes.write(self.folder)
            if mistakes.drawing:
                captions = gallery.evenly_spaced(mistakes.drawing.dataset)
                gallery.draw_images(self.folder / "examples.png", mistakes.drawing, captions)

    def try_drawing(self, mistakes: Mistakes) -> None:
        """Draw one image to nowhere: if that fails, it fails before the first epoch."""
        if self.active and mistakes.drawing:
            from engine.run import gallery

            with tempfile.TemporaryDirectory() as folder:
                gallery.draw_images(Path(folder, "image.png"), mistakes.drawing, {0: ""})

    def undrawn(self) -> State | None:
        """Return best.pt if the run was killed before its images were drawn; on rank 0."""
        best = self.folder / "best.pt"
        if not self.active or records.are_drawn(self.folder) or not best.exists():
            return None
        state = checkpoint.read(best)
        return {"model": state["model"], "path": state["path"]}

    def finish(self, name: str, best: float) -> None:
        """Print the best score and the paths of the results."""
        if self.active:
            path = os.path.join(os.path.relpath(self.folder), "best.pt")
            if math.isfinite(best):
                drawn = "curves.png", *records.IMAGES
                found = [path, *(file for file in drawn if (self.folder / file).exists())]
                distributed.say(f"done: best {name} {best:.4f}; {', '.join(found)}")
            else:
                distributed.say(f"done: {name} was NaN after every epoch, so there is no best.pt")
