"""Losses and metrics over all ranks, as exact sums, and what the model gets wrong."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map_only
from torch.utils.data import IterableDataset
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassConfusionMatrix

from engine import files
from engine.data import bit_depth, loading
from engine.data.samples import Key, Seeded
from engine.errors import UserError
from engine.ranks import distributed
from engine.run import machine, pictures
from engine.run.pictures import DrawExample

Loss = Callable[..., Any]
Criterion = Callable[..., tuple[Tensor, Tensor | int]]
Found = tuple[Tensor | None, Sequence[tuple[float, int]]]  # a confusion matrix; what Worst finds

COUNT = 12  # images in worst.png
EXAMPLES = 8  # in examples.png
IGNORED = -100  # cross_entropy leaves this label out


def criterion(loss: Loss) -> Criterion:
    """Return `loss` such that it gives a sum of losses and their count, which can be added up.

    loss: a function or module of (outputs, targets, ...): what the network returns, in float32, the
        targets of a batch, and what else the training loop gives it. It returns (sum, count), two
        scalars, or a mean, one scalar, which then counts as much as the batch has labels: class
        numbers from 0 to classes - 1.

    Raises a UserError for anything else.

        criterion = engine.criterion(nn.CrossEntropyLoss(ignore_index=255))
        loss_sum, count = criterion(outputs, targets)
    """

    def call(outputs: Any, targets: Tensor, *more: Any) -> tuple[Tensor, Tensor | int]:
        if not (isinstance(outputs, (Tensor, tuple)) or torch.is_grad_enabled()):
            raise UserError(
                f"the network of model.py returns a {type(outputs).__name__} in evaluation: return "
                "the logits, or a tuple that begins with them"
            )
        try:
            found = loss(to_float32(outputs), targets, *more)
        except (AttributeError, TypeError) as error:
            if isinstance(outputs, Tensor):
                raise
            raise UserError(
                f"the network returns a {type(outputs).__name__}, which the loss of model.py does "
                f"not take ({error}): take its parts there, or return a tensor"
            ) from None
        if isinstance(found, Tensor) and not found.ndim:
            count = labels(outputs, targets)
            return found * count, count
        parts = found if isinstance(found, (tuple, list)) else (found,)
        is_pair = len(parts) == 2 and isinstance(parts[0], Tensor)
        if is_pair and not (parts[0].ndim or getattr(parts[1], "ndim", 0)):
            return parts[0], parts[1]
        kinds = [
            f"Tensor {(*x.shape,)}" if isinstance(x, Tensor) else type(x).__name__ for x in parts
        ]
        raise UserError(
            f"the loss of model.py returns {', '.join(kinds)}: return a mean, a tensor (), or a "
            "pair, the sum as a tensor (), such as loss.sum(), and its count, a tensor () or an int"
        )

    return call


def labels(outputs: Any, targets: Tensor) -> Tensor | int:
    """Return how many labels a batch has; those that are no class number do not count."""
    if targets.is_floating_point() or targets.ndim < 2:
        return size(targets)
    return ((targets >= 0) & (targets < first(outputs).shape[1])).sum()


def size(targets: Tensor) -> int:
    """Return the number of targets; floats (N, classes, ...), shares of classes, are one each."""
    has_shares = targets.is_floating_point() and targets.ndim > 1
    return targets.numel() // (targets.shape[1] if has_shares else 1)


def first(outputs: Any) -> Tensor:
    """Return the logits of what a network returns: a tensor, or the first of a tuple or dict.

    Raises a UserError if that is no tensor.
    """
    parts = [*outputs.values()] if isinstance(outputs, Mapping) else outputs
    logits = next(iter(parts), None) if isinstance(parts, (tuple, list)) else parts
    if not isinstance(logits, Tensor):
        raise UserError(
            f"the network of model.py returns a {type(outputs).__name__} without logits: metrics "
            "and predict.py take a tensor, or the first of a tuple"
        )
    return logits.float()


def to_float32(outputs: Any) -> Any:
    """Return a network's `outputs`, a tensor or tuples and dicts of them, in float32."""
    if isinstance(outputs, Tensor):  # to search a tree takes longer
        return outputs.float() if outputs.is_floating_point() else outputs
    return tree_map_only(Tensor, to_float32, outputs)


class Totals:
    """A sum of losses and one of their counts, to which `add` adds without reading the device."""

    def __init__(self, device: torch.device) -> None:
        self.loss, self.count = machine.zeros(2, device).unbind()
        self.counted = 0  # on the host, of counts that are ints

    def add(self, loss_sum: Tensor, count: Tensor | int) -> None:
        self.loss += loss_sum.detach()
        if isinstance(count, Tensor):
            self.count += count.detach()
        else:
            self.counted += count

    def compute(self, *others: float) -> Tensor:
        """Return float64 (2,), or more with `others`, which come last."""
        known = self.loss, self.count + self.counted, *map(self.loss.new_tensor, others)
        return torch.stack(known)


def compute(metrics: MetricCollection) -> tuple[dict[str, float], Tensor | None]:
    """Return each metric over the samples of all ranks; every rank has to call it.

    The counts of a MulticlassConfusionMatrix, int64 (classes, classes), labels by predictions, are
    returned apart from the others; None if `metrics` has none.

    Raises a UserError if a metric has more than one value.

        results, confusion = engine.compute(metrics)  # {"top1": 0.93}, a matrix
    """
    for metric in metrics.modules():
        if isinstance(metric, Metric):
            metric.dist_sync_fn = gather
    # Of a rank that has no validation images.
    warnings.filterwarnings("ignore", "The ``compute`` method of metric")
    found: dict[str, float] = {}
    confusion: Tensor | None = None
    known = dict(metrics.items(copy_state=False))
    for name, value in metrics.compute().items():
        own = known.get(name)
        if type(own) is MulticlassConfusionMatrix and own.normalize in (None, "none"):
            confusion = value
            continue
        value = torch.as_tensor(value)
        if value.numel() != 1:
            raise UserError(
                f"metric {name} has {value.numel()} values: in build_metrics of model.py, average "
                "them or put a torchmetrics.ClasswiseWrapper around it, which names each"
            )
        found[name] = value.item()
    return found, confusion


def gather(value: Tensor, group: object = None) -> list[Tensor]:
    """Return the state of a metric from each rank, without those that have none.

    torchmetrics' own way fails if a rank without images has an empty list of another shape.
    """
    parts = [part for part in distributed.gather_objects(value.cpu()) if part.numel()]
    return [part.to(value.device) for part in parts] or [value]


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
        total, count = (x.reshape(len(x), -1).sum(1) for x in (losses, is_class))
        mean = (total / count).where(count > 0, -math.inf)  # of images without labels
        losses, indices = torch.cat((self.losses, mean)), torch.cat((self.indices, indices))
        # By index, then stably by loss: of equal losses the same are kept on any number of ranks.
        order = indices.argsort()
        order = order[losses[order].argsort(descending=True, stable=True)][:COUNT]
        self.losses, self.indices = losses[order], indices[order]

    def compute(self) -> list[tuple[float, int]]:
        """Return (loss, index) of the worst images of all ranks; every rank has to call it."""
        mine = [*zip(self.losses.tolist(), self.indices.tolist(), strict=True)]
        pairs = [pair for part in distributed.gather_objects(mine) for pair in part]
        pairs = [pair for pair in pairs if pair[0] != -math.inf]
        return sorted(pairs, key=lambda p: (not math.isnan(p[0]), -p[0], p[1]))[:COUNT]


class Mistakes:
    """What `evaluate` has found with `model`, to be drawn with images of `loader`.

    Images cannot be drawn without `draw`, nor those of a stream.
    """

    def __init__(
        self,
        found: Found,
        model: nn.Module,
        loader: Any,
        classes: Sequence[str],
        predict: Callable[[nn.Module, Tensor], Any],
        draw: DrawExample | None,
    ) -> None:
        self.confusion, self.worst = found
        self.model, self.classes, self.predict, self.draw = model, classes, predict, draw
        self.device = next(model.parameters()).device
        self.format, dataset = loading.format_of(loader), loader.dataset
        self.dataset: Seeded | None = None
        if draw and not isinstance(dataset, IterableDataset):
            self.dataset = dataset if isinstance(dataset, Seeded) else Seeded(dataset, classes, 0)

    @torch.inference_mode()
    def draw_images(self, path: Path, captions: Mapping[int, str] | None = None) -> None:
        """Draw images with what the network makes of them, if images can be drawn.

        captions: by index, what to write above, after the file; by default some without any.
        """
        if not (self.dataset and self.draw):
            return
        spread = [round(i * (len(self.dataset) - 1) / (EXAMPLES - 1)) for i in range(EXAMPLES)]
        examples = []
        for index, caption in (captions or dict.fromkeys(spread, "")).items():
            image, target, *_ = self.dataset[Key(0, index, is_val=True)]
            batch = loading.normalize(image[None].to(self.device), self.format)
            logits = first(self.predict(self.model, batch))[0].cpu()
            name = Path(*Path(self.dataset.name(index).split(", ", 1)[-1]).parts[-2:])
            above = [str(name), caption] if caption else []
            examples.append((bit_depth.visible(image), torch.as_tensor(target), logits, above))
        pictures.draw_images(path, examples, self.draw, self.classes)

    def write(self, folder: Path) -> list[str]:
        """Write the files to `folder` and return their names; on rank 0.

        Without a confusion matrix in build_metrics of model.py there is no per_class.csv and no
        confusion.png; without targets that are class numbers, no worst.png.
        """
        if self.confusion is not None:
            write_per_class(folder / "per_class.csv", self.confusion, self.classes)
            pictures.draw_confusion(folder / "confusion.png", self.confusion, self.classes)
        if self.worst:
            captions = {index: f"loss {loss:.3g}" for loss, index in self.worst}
            self.draw_images(folder / "worst.png", captions)
        names = "per_class.csv", "confusion.png", "worst.png"
        return [name for name in names if (folder / name).exists()]


def write_per_class(path: Path, confusion: Tensor, classes: Sequence[str]) -> None:
    """Write precision, recall, F1, IoU and number of labels of each class as a CSV file.

    confusion: int64 (classes, classes), by label and prediction. A quotient of 0 / 0 is nan: the
    precision of what is never predicted, the recall of what never comes.
    """
    counts = confusion.cpu().double()
    right, labels, predictions = counts.diagonal(), counts.sum(1), counts.sum(0)
    both = labels + predictions
    shares = right / predictions, right / labels, 2 * right / both, right / (both - right)
    with files.table(path, ["class", "precision", "recall", "f1", "iou", "support"]) as write:
        for name, support, *values in zip(classes, labels, *shares, strict=True):
            write([name, *(f"{value:.6f}" for value in values), int(support)])
