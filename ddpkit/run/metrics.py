"""Losses and metrics over all ranks, as exact sums, and what the model gets wrong."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import IterableDataset
from torchmetrics import ClasswiseWrapper, Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassConfusionMatrix,
    MultilabelConfusionMatrix,
)

from ddpkit import files
from ddpkit.data import images, loading, samples
from ddpkit.data.samples import Key, Seeded
from ddpkit.errors import UserError
from ddpkit.ranks import distributed, stopping
from ddpkit.run import pictures
from ddpkit.run.outputs import Outputs, to_logits
from ddpkit.run.pictures import DrawExample

Worsts = Sequence[tuple[float, int]]  # (loss, index) of images, what Worst finds

COUNT = 12  # images in worst.png
EXAMPLES = 8  # in examples.png
IGNORED = -100  # cross_entropy leaves this label out


class Score(float):
    """A metric's value that knows whether higher ones are better, or None."""

    higher_is_better: bool | None = None


def parse_best(best: str | Sequence[str]) -> dict[str, bool | None]:
    """Return the metrics that BEST names, and whether higher is better, if that is said.

    It is one name, or several; after a name there may be "max" or "min".
    """
    words = [best] if isinstance(best, str) else [*best]
    found: dict[str, bool | None] = {}
    for word in words:
        if found and word in ("max", "min"):
            found[[*found][-1]] = word == "max"
        else:
            found[word] = None
    return found


def higher_is_better(name: str, value: object = None) -> bool | None:
    """Return whether a higher `value` of the column `name` is better; None: nobody says so."""
    known = getattr(value, "higher_is_better", None)
    if known is None and name.endswith("loss"):
        return False
    return known


def directions(
    metrics: MetricCollection, names: Iterable[str]
) -> dict[str, bool | None]:
    """Return for each of the `names` that `metrics` give whether higher is better."""
    known = {}
    for key, metric in metrics.items(copy_state=False):
        inner = metric.metric if isinstance(metric, ClasswiseWrapper) else metric
        known[key] = inner.higher_is_better
    # What has another name comes from one that returns a dict, such as a
    # ClasswiseWrapper.
    others = {is_higher for key, is_higher in known.items() if key not in names}
    of_others = others.pop() if len(others) == 1 else None
    return {name: known.get(name, of_others) for name in names}


def compute(metrics: MetricCollection) -> tuple[dict[str, float], Tensor | None]:
    """Return each metric over the samples of all ranks; every rank has to call it.

    The counts of a MulticlassConfusionMatrix, int64 (classes, classes), labels by predictions, or
    of a MultilabelConfusionMatrix, (classes, 2, 2), are apart from the others; None without one.
    The numbers are rank 0's on all ranks, and know whether higher is better. After a signal all
    ranks stop here.

    Raises a UserError if a metric has more than one value.

        results, confusion = ddpkit.compute(metrics)  # {"top1": 0.93}, a matrix
    """
    stopping.agree()
    for metric in metrics.modules():
        if isinstance(metric, Metric):
            metric.dist_sync_fn = gather
    # Of a rank that has no validation images.
    warnings.filterwarnings(
        "ignore", "The ``compute`` method of metric|No positive samples"
    )
    found = metrics.compute()
    is_better = directions(metrics, found)
    confusion: Tensor | None = None
    for name, metric in metrics.items(copy_state=False):
        is_matrix = type(metric) in (
            MulticlassConfusionMatrix,
            MultilabelConfusionMatrix,
        )
        if is_matrix and metric.normalize in (None, "none"):
            confusion = found.pop(name)
    for name, value in found.items():
        if (count := torch.as_tensor(value).numel()) != 1:
            raise UserError(
                f"metric {name} has {count} values: in build_metrics of model.py, average them or "
                "put a torchmetrics.ClasswiseWrapper around it, which names each"
            )
    # The ranks' last bits may differ, and what is decided by them with it.
    numbers = distributed.from_rank_zero(
        lambda: [float(value) for value in found.values()]
    )
    results: dict[str, float] = {}
    for name, number in zip(found, numbers, strict=True):
        results[name] = score = Score(number)
        score.higher_is_better = is_better[name]
    return results, confusion


def gather(value: Tensor, group: object = None) -> list[Tensor]:
    """Return each rank's state of a metric; torchmetrics' own way fails at one without images."""
    parts = [part for part in distributed.gather_objects(value.cpu()) if part.numel()]
    return [part.to(value.device) for part in parts] or [value]


class Worst:
    """The images with the greatest losses so far, on this rank; `compute` joins the ranks'.

    The loss of an image is the cross-entropy of its label, or the mean of that over its labelled
    pixels, or over its labels, float (classes,) from 0 to 1. With other targets none is found.

        worst = ddpkit.Worst(device)
        worst.update(logits, targets, indices)  # of each batch
        pairs = worst.compute()
    """

    def __init__(self, device: torch.device) -> None:
        self.losses = torch.empty(0, device=device)  # float32, of up to COUNT images
        # of these images
        self.indices = torch.empty(0, dtype=torch.int64, device=device)
        self.are_labels = torch.ones((), dtype=torch.bool, device=device)

    def update(self, outputs: Tensor, targets: Tensor, indices: Tensor) -> None:
        """Take logits (N, classes, ...), targets int64 (N, ...) and the images' indices (N,)."""
        shape = (outputs.shape[0], *outputs.shape[2:])
        if targets.is_floating_point() and targets.shape == outputs.shape:
            # Regression has such targets, too.
            fits = (targets >= 0) & (targets <= 1)
            if targets.shape[1:] == (1,):
                fits = (targets == 0) | (targets == 1)
            self.are_labels &= fits.all()
            losses = binary_cross_entropy_with_logits(
                outputs, targets, reduction="none"
            )
            is_class = torch.ones_like(targets)
        elif outputs.ndim < 2 or targets.shape != shape or targets.is_floating_point():
            return
        else:
            is_class = (targets >= 0) & (targets < outputs.shape[1])
            labels = targets.where(is_class, IGNORED)
            losses = cross_entropy(
                outputs, labels, ignore_index=IGNORED, reduction="none"
            )
        total, count = (x.reshape(len(x), -1).sum(1) for x in (losses, is_class))
        mean = (total / count).where(count > 0, -math.inf)  # of images without labels
        losses, indices = (
            torch.cat((self.losses, mean)),
            torch.cat((self.indices, indices)),
        )
        # By index, then stably by loss: of equal losses the same are kept on any number
        # of ranks.
        order = indices.argsort()
        order = order[losses[order].argsort(descending=True, stable=True)][:COUNT]
        self.losses, self.indices = losses[order], indices[order]

    def compute(self) -> list[tuple[float, int]]:
        """Return (loss, index) of the worst images of all ranks; every rank has to call it."""
        stopping.agree()
        mine = [*zip(self.losses.tolist(), self.indices.tolist(), strict=True)]
        parts, are_labels = zip(
            *distributed.gather_objects((mine, bool(self.are_labels))), strict=True
        )
        if not all(are_labels):
            return []
        pairs = [pair for part in parts for pair in part if pair[0] != -math.inf]
        return sorted(pairs, key=lambda p: (not math.isnan(p[0]), -p[0], p[1]))[:COUNT]


@dataclass
class Mistakes:
    """What `evaluate` has found, to be drawn: images only with `draw`, none of a stream."""

    confusion: Tensor | None
    worst: Worsts
    model: nn.Module
    loader: Any
    classes: Sequence[str]
    predict: Callable[[nn.Module, Tensor], Outputs]
    draw: DrawExample | None

    @torch.inference_mode()
    def draw_images(
        self, path: Path, captions: Mapping[int, str] | None = None
    ) -> None:
        """Draw images by index, with their file and caption; by default some, without any."""
        data, format = (
            getattr(self.loader, "dataset", None),
            loading.format_of(self.loader),
        )
        if not self.draw or data is None or isinstance(data, IterableDataset):
            return
        data = data if isinstance(data, Seeded) else Seeded(data, self.classes, 0)
        spread = [round(i * (len(data) - 1) / (EXAMPLES - 1)) for i in range(EXAMPLES)]
        device, examples = next(self.model.parameters()).device, []
        for index, caption in (captions or dict.fromkeys(spread, "")).items():
            image, target, *_ = data[Key(0, index, is_val=True)]
            batch = loading.normalize(image[None].to(device), format)
            logits = to_logits(self.predict(self.model, batch))[0].cpu()
            file = Path(samples.name(data.dataset, index).split(", ", 1)[-1])
            above = [str(Path(*file.parts[-2:])), caption] if caption else []
            examples.append(
                (images.visible(image), torch.as_tensor(target), logits, above)
            )
        pictures.draw_images(path, examples, self.draw, self.classes)

    def write(self, folder: Path) -> None:
        """Write the files for which there is something to `folder`."""
        if self.confusion is not None:
            write_per_class(folder / "per_class.csv", self.confusion, self.classes)
            if self.confusion.ndim == 2:
                pictures.draw_confusion(
                    folder / "confusion.png", self.confusion, self.classes
                )
        # Another loader may not say which images they were.
        captions = {
            index: f"loss {loss:.3g}" for loss, index in self.worst if index >= 0
        }
        if captions:
            self.draw_images(folder / "worst.png", captions)


def write_per_class(path: Path, confusion: Tensor, classes: Sequence[str]) -> None:
    """Write precision, recall, F1, IoU and number of labels of each class; 0 / 0 is nan."""
    counts = confusion.cpu().double()
    # of several labels: (classes, not there or there, not said or said)
    if counts.ndim == 3:
        right, labels, predictions = (
            counts[:, 1, 1],
            counts[:, 1].sum(1),
            counts[:, :, 1].sum(1),
        )
    else:
        right, labels, predictions = counts.diagonal(), counts.sum(1), counts.sum(0)
    both = labels + predictions
    shares = (
        right / predictions,
        right / labels,
        2 * right / both,
        right / (both - right),
    )
    with files.table(
        path, ["class", "precision", "recall", "f1", "iou", "support"]
    ) as write:
        for name, support, *values in zip(classes, labels, *shares, strict=True):
            write([name, *(f"{value:.6f}" for value in values), int(support)])
