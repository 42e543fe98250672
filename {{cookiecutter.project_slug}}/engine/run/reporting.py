"""What a run tells: start line, progress bar, epoch lines, metrics.csv, TensorBoard, pictures.

Only rank 0 speaks and writes; on the other ranks every method returns at once.
"""

import contextlib
import csv
import itertools
import json
import math
import os
import platform
import subprocess
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from engine.data import images, loading, prepared
from engine.ranks import distributed
from engine.run import files, machine, metrics

SECONDS_BETWEEN_READINGS = 0.5  # reading the loss waits for the device: not at every step
INPUT_BOUND = 0.1  # the share of time spent waiting for pictures from which on it is said


class Reporter:
    def __init__(self, args: Namespace, device: torch.device, finished_epochs: int) -> None:
        """Open the record in `args.output_dir`; TensorBoard drops what is after those epochs."""
        self.args = args
        self.device = device
        self.folder = Path(args.output_dir)
        self.active = distributed.is_rank_zero()
        self.bar = tqdm(disable=True)
        if not self.active:
            return
        # Imported here because it takes a second or two, which the other ranks need not spend.
        from torch.utils.tensorboard import SummaryWriter

        self.board = SummaryWriter(str(self.folder), purge_step=finished_epochs + 1)

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, *_: Any) -> None:
        """Clear the progress bar and close the files, before anything is said of an error."""
        self.bar.close()
        if self.active:
            with contextlib.suppress(OSError):  # of a disk that is full
                self.board.close()

    def start(self, train_loader: DataLoader, val_loader: DataLoader, steps: int) -> None:
        """Print the start line and write args.json: flags, versions, commit, devices."""
        if not self.active:
            return
        args, ranks = self.args, distributed.world_size()
        cuda = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if cuda else "CPU"
        samples = [len(loader.dataset) for loader in (train_loader, val_loader)]  # type: ignore
        distributed.say(
            f"{ranks} rank(s) on {name} | batch {args.batch_size} per rank x {ranks} rank(s) x "
            f"{args.accumulate} accumulated = {args.batch_size * ranks * args.accumulate} | "
            f"{samples[0]} training + {samples[1]} validation pictures | {steps} steps per epoch"
        )
        distributed.say(
            f"per rank {args.workers} loader worker(s), {args.prefetch} batches ahead each, and "
            f"{args.threads} thread(s) | memory {'' if args.pin_memory else 'not '}pinned | "
            f"JPEG: {images.decoder()} | amp {args.amp}{', compiled' if args.compile else ''}"
        )
        record = {
            "flags": vars(args),
            "ranks": ranks,
            "device": name,
            "jpeg": images.decoder(),
            "git": git_commit(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "torchvision": torchvision.__version__,
                "cuda": torch.version.cuda if cuda else None,
            },
        }
        with files.writing(self.folder / "args.json") as beside:
            beside.write_text(json.dumps(record, indent=2, default=str) + "\n")

    def progress(self, loader: DataLoader, epoch: int) -> Iterator:
        """Yield `loader`'s batches under a progress bar that counts the pictures of all ranks."""
        self.began = self.read_at = time.monotonic()
        per_pass = loader.batch_size * distributed.world_size()  # type: ignore[operator]
        self.bar = tqdm(
            total=len(loader) * per_pass,
            desc=f"epoch {epoch + 1}/{self.args.epochs}",
            unit="img",
            leave=False,
            # None: off where the output is no terminal, so that logs stay readable.
            disable=None if self.active else True,
        )
        self.waited, self.count = 0.0, 0
        asked = time.monotonic()
        for batch in loader:
            self.waited += time.monotonic() - asked
            self.count += per_pass
            yield batch
            self.bar.update(per_pass)
            asked = time.monotonic()

    def speed(self) -> dict[str, float]:
        """Close the progress bar; return its pictures per second and the share of waiting."""
        self.bar.close()
        waited = torch.tensor(self.waited, device=self.device)
        longest = distributed.reduce_tensor(waited, "max").item()  # once the device is ready
        seconds = time.monotonic() - self.began  # a resumed epoch's are those since then
        return {
            "img_per_s": self.count / seconds,
            "train_seconds": seconds,
            "data_wait": longest / seconds,
        }

    def loss(self, totals: Tensor, lr: float) -> None:
        """Show the mean loss so far (rank 0's own), from `totals` = (sum, count), and the rate."""
        now = time.monotonic()
        if not self.bar.disable and now - self.read_at >= SECONDS_BETWEEN_READINGS:
            self.read_at = now
            loss_sum, count = totals.tolist()
            wait = f"{self.waited / (now - self.began):.0%}"
            loss = f"{loss_sum / max(count, 1):.3f}"
            self.bar.set_postfix(loss=loss, lr=f"{lr:.2g}", data_wait=wait)

    def epoch(self, rows: Sequence[dict[str, Any]], is_best: bool) -> None:
        """Record the last of `rows`: a line, metrics.csv, TensorBoard scalars, curves.png."""
        if not self.active:
            return
        row = rows[-1]
        columns = dict.fromkeys(name for row in rows for name in row)
        path = self.folder / "metrics.csv"
        with files.writing(path) as beside, open(beside, "w", encoding="utf-8") as file:
            table = csv.DictWriter(file, columns, lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
        for name, value in numbers.items():
            self.board.add_scalar(name, value, row["epoch"])
        self.board.flush()
        self.draw_curves(rows)
        left = (self.args.epochs - row["epoch"]) * (time.monotonic() - self.began)
        shown = "  ".join(f"{k} {v:.4g}" for k, v in numbers.items() if k not in ("epoch", "step"))
        star = "  best" if is_best else ""
        distributed.say(
            f"epoch {row['epoch']}/{self.args.epochs}  {shown}  left {left:.0f} s{star}"
        )
        if row["data_wait"] >= INPUT_BOUND and row["data_wait"] * row["train_seconds"] > 1:
            self.say_input_bound(row)

    def say_input_bound(self, row: dict[str, Any]) -> None:
        """Say that the training waits for its pictures, and what to turn."""
        workers, share = self.args.workers, machine.share()
        remedies = []
        if workers < share:
            remedies.append(f"--workers {share}")
        if prepared.is_store(self.args.data):
            remedies.append("a smaller --short-side of prepare_data.py")
        else:
            remedies.append("prepare_data.py")
        distributed.say(
            f"input-bound: {row['data_wait']:.0%} of {row['train_seconds']:.0f} s were spent "
            f"waiting for pictures, with {workers} worker(s) on {share} CPU(s) per rank; "
            f"what helps: {', '.join(remedies)}, more CPUs"
        )

    def finish(self, name: str, best: float) -> None:
        """Print what came out and where it is."""
        if self.active:
            path = os.path.join(os.path.relpath(self.folder), "best.pt")
            if math.isfinite(best):
                distributed.say(f"done: best {name} {best:.4f}; {path}, examples.png, curves.png")
            else:
                distributed.say(f"done: {name} was no number in any epoch, so there is no best.pt")

    def draw_curves(self, rows: Sequence[dict[str, Any]]) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 4), layout="constrained")
        axes = figure.subplots(1, 2)
        epochs = [row["epoch"] for row in rows]
        skip = {"epoch", "step", "lr", "img_per_s", "train_seconds", "data_wait"}
        for name in [n for n, v in rows[-1].items() if n not in skip and not isinstance(v, str)]:
            side = axes[0] if name.endswith("loss") else axes[1]
            values = [row.get(name, math.nan) for row in rows]
            side.plot(epochs, values, marker=".", label=name)
        for side in axes:
            side.set_xlabel("epoch")
            side.xaxis.get_major_locator().set_params(integer=True)
            side.grid(alpha=0.3)
            side.legend()
        with files.writing(self.folder / "curves.png") as beside:
            figure.savefig(beside, format="png", dpi=100)

    @torch.inference_mode()
    def examples(
        self,
        model: torch.nn.Module,
        dataset: Dataset,
        classes: Sequence[str],
        draw: Callable[..., None],
        count: int = 8,
    ) -> None:
        """Write examples.png: `count` validation pictures, evenly picked, each drawn by `draw`."""
        if not self.active:
            return
        from matplotlib.figure import Figure

        total = len(dataset)  # type: ignore[arg-type]
        picks = sorted({round(i * (total - 1) / max(count - 1, 1)) for i in range(count)})
        columns = min(4, len(picks))
        rows = -(-len(picks) // columns)
        figure = Figure(layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).flat
        model.eval()
        for axes, index in itertools.zip_longest(grid, picks):
            axes.axis("off")
            if index is None:
                continue
            image, target = dataset[0, index]  # of epoch 0
            # forward: for its one picture, --compile would compile once more.
            output = model.forward(loading.normalize(image[None].to(self.device)))
            output = metrics.logits(output)[0].cpu()
            draw(axes, image, torch.as_tensor(target), output, classes)
        height, width = grid.base[0, 0].images[0].get_size()
        figure.set_size_inches(3 * columns, rows * (3 * height / width + 0.4))
        with files.writing(self.folder / "examples.png") as beside:
            figure.savefig(beside, format="png", dpi=100)


def git_commit() -> str | None:
    """Return the commit of the project's folder, marked if it has changes; None without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
