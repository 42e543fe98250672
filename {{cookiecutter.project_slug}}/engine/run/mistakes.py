"""What the model gets wrong on the validation set: per_class.csv, confusion.png and worst.png."""

import csv
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset

from engine import files
from engine.data import loading
from engine.data.images import DEFAULT_FORMAT, Format
from engine.data.samples import Seeded
from engine.errors import LineError
from engine.ranks import distributed
from engine.run import records

if TYPE_CHECKING:
    from engine.run.gallery import DrawExample

Found = tuple[Tensor | None, Sequence[tuple[float, int]]]  # a confusion matrix; what Worst finds

COUNT = 12  # images in worst.png
IGNORED = -100  # cross_entropy leaves this label out


class Worst:
    """The images with the greatest losses so far, on this rank; `compute` joins the ranks'.

    The loss of an image is the cross-entropy of its label, or the mean of that over its labelled
    pixels. Targets that are no class numbers are skipped, and then no image is found.

        worst = engine.Worst(device)
        worst.update(logits, targets, indices)  # of each batch
        pairs = worst.compute()
    """

    def __init__(self, device: torch.device) -> None:
        self.losses = torch.empty(0, device=device)  # float32, of up to COUNT images
        self.indices = torch.empty(0, dtype=torch.int64, device=device)  # of these images

    def update(self, outputs: Tensor, targets: Tensor, indices: Tensor) -> None:
        """Take logits (N, classes, ...), targets int64 (N, ...) and the images' indices (N,).

        Nothing is read off the device, which would make it wait.
        """
        shape = (outputs.shape[0], *outputs.shape[2:])
        if outputs.ndim < 2 or targets.shape != shape or targets.is_floating_point():
            return
        is_class = (targets >= 0) & (targets < outputs.shape[1])
        labels = targets.where(is_class, IGNORED)
        losses = cross_entropy(outputs, labels, ignore_index=IGNORED, reduction="none")
        count = is_class.flatten(1).sum(1) if is_class.ndim > 1 else is_class.long()
        total = losses.flatten(1).sum(1) if losses.ndim > 1 else losses
        mean = (total / count).where(count > 0, -math.inf)  # of images without labels
        losses, indices = torch.cat((self.losses, mean)), torch.cat((self.indices, indices))
        # By index, then stably by loss: of equal losses the same are kept on any number of ranks.
        order = indices.argsort()
        order = order[losses[order].argsort(descending=True, stable=True)][:COUNT]
        self.losses, self.indices = losses[order], indices[order]

    def compute(self) -> list[tuple[float, int]]:
        """Return (loss, index) of the worst images of all ranks; every rank has to call it."""
        mine = zip(self.losses.tolist(), self.indices.tolist(), strict=True)
        pairs = [pair for part in distributed.gather_objects(list(mine)) for pair in part]
        pairs = [pair for pair in pairs if pair[0] != -math.inf]
        worst_first = sorted(pairs, key=lambda p: (not math.isnan(p[0]), -p[0], p[1]))
        return worst_first[:COUNT]


@dataclass
class Drawing:
    """How to draw images with what the network, which is in evaluation mode, makes of them."""

    infer: Callable[[Tensor], Any]  # float32 (N, 3, H, W), normalised -> logits
    device: torch.device
    dataset: Seeded
    classes: Sequence[str]
    draw: "DrawExample"
    format: Format = DEFAULT_FORMAT


@dataclass
class Mistakes:
    confusion: Tensor | None  # int64 (classes, classes): images or pixels, by label and prediction
    worst: Sequence[tuple[float, int]]  # the greatest losses, and the images' indices
    classes: Sequence[str]
    drawing: Drawing | None  # None: images cannot be drawn, such as those of a stream

    @classmethod
    def of(
        cls,
        found: Found,
        model: nn.Module,
        loader: Any,
        classes: Sequence[str],
        predict: Callable[[nn.Module, Tensor], Any],
        draw: "DrawExample | None",
    ) -> "Mistakes":
        """Return what `evaluate` has found with `model`, to be drawn with images of `loader`."""
        dataset, drawing = loader.dataset, None
        if draw and not isinstance(dataset, IterableDataset):
            seeded = dataset if isinstance(dataset, Seeded) else Seeded(dataset, classes, 0)
            apply, device = functools.partial(predict, model), next(model.parameters()).device
            drawing = Drawing(apply, device, seeded, classes, draw, loading.format_of(loader))
        return cls(*found, classes, drawing)

    def write(self, folder: Path) -> list[str]:
        """Write the files to `folder` and return their names; on rank 0.

        Without a confusion matrix in build_metrics of model.py there is no per_class.csv and no
        confusion.png; without targets that are class numbers, no worst.png.
        """
        from engine.run import gallery, plots  # imports matplotlib, which takes a second

        names, classes = [], self.classes
        if self.confusion is not None:
            write_per_class(folder / "per_class.csv", self.confusion, classes)
            plots.draw_confusion(folder / "confusion.png", self.confusion, classes)
            names += ["per_class.csv", "confusion.png"]
        if self.worst and self.drawing:
            captions = {index: f"loss {loss:.3g}" for loss, index in self.worst}
            gallery.draw_images(folder / "worst.png", self.drawing, captions)
            names += ["worst.png"]
        return names


def report(mistakes: Mistakes, folder: Path) -> None:
    """Write the files of `mistakes` on rank 0 and say where.

    If `folder` cannot be written to, a line says so: --eval-only may evaluate another's run.
    """
    if not distributed.is_rank_zero():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        records.remove_images(folder)  # of another checkpoint
        names = mistakes.write(folder)
    except OSError as error:
        return distributed.say(f"{folder}: cannot be written ({error.strerror})")
    except LineError as error:
        return distributed.say(str(error))
    if names:
        distributed.say(f"written to {folder}: {', '.join(names)}")


def write_per_class(path: Path, confusion: Tensor, classes: Sequence[str]) -> None:
    """Write precision, recall, F1, IoU and number of labels of each class as a CSV file.

    confusion: int64 (classes, classes), by label and prediction. A quotient of 0 / 0 is nan: the
    precision of what is never predicted, the recall of what never comes.
    """
    counts = confusion.cpu().double()
    right, labels, predictions = counts.diagonal(), counts.sum(1), counts.sum(0)
    columns = {
        "precision": right / predictions,
        "recall": right / labels,
        "f1": 2 * right / (labels + predictions),
        "iou": right / (labels + predictions - right),
    }
    with (
        files.writing(path) as tmp_path,
        open(tmp_path, "w", encoding="utf-8", newline="") as file,
    ):
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["class", *columns, "support"])
        for i, name in enumerate(classes):
            values = [f"{column[i]:.6f}" for column in columns.values()]
            table.writerow([name, *values, int(labels[i])])
