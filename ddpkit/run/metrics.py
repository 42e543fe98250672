"""Losses and metrics over all ranks, as exact sums, and what the model gets wrong."""

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils._pytree import tree_map_only
from torch.utils.data import IterableDataset
from torchmetrics import ClasswiseWrapper, Metric, MetricCollection
from torchmetrics.classification import MulticlassConfusionMatrix, MultilabelConfusionMatrix

from ddpkit import files
from ddpkit.data import images, loading, samples
from ddpkit.data.samples import Key, Seeded
from ddpkit.errors import UserError
from ddpkit.ranks import distributed, stopping
from ddpkit.run import pictures
from ddpkit.run.pictures import DrawExample

Outputs = Any  # of a network
Loss = Callable[..., Any]
Criterion = Callable[..., tuple[Tensor, Tensor | int]]
Found = tuple[Tensor | None, Sequence[tuple[float, int]]]  # a confusion matrix; what Worst finds

COUNT = 12  # images in worst.png
EXAMPLES = 8  # in examples.png
IGNORED = -100  # cross_entropy leaves this label out


def criterion(loss: Loss, device: torch.device | None = None) -> Criterion:
    """Return `loss` such that it gives a sum of losses and their count, which can be added up.

    loss: a function or module of (outputs, targets, ...): what the network returns, in float32, the
        targets of a batch, and what else the training loop gives it. It returns (sum, count), two
        scalars, or a mean, one scalar, which then counts as much as the batch has labels: class
        numbers from 0 to classes - 1, without the loss's `ignore_index`. A batch without labels has
        no loss, though its mean is 0 / 0.
    device: where a module goes.

    Raises a UserError for anything else.

        criterion = ddpkit.criterion(nn.CrossEntropyLoss(ignore_index=255), device)
        loss_sum, count = criterion(outputs, targets)
    """
    if device and isinstance(loss, nn.Module):
        loss = loss.to(device)
    ignored = getattr(loss, "ignore_index", None)
    returns_pairs = False

    def call(outputs: Outputs, targets: Tensor, *more: Any) -> tuple[Tensor, Tensor | int]:
        nonlocal returns_pairs
        counts: list[Tensor] = []  # of a mean
        outputs = to_float32(outputs)
        taken = outputs if returns_pairs else guarded(outputs, counts)
        try:
            found = loss(taken, targets, *more)
        except (AttributeError, TypeError) as error:
            kind = type(outputs).__name__
            if isinstance(outputs, Tensor) or kind not in str(error):
                raise
            raise UserError(
                f"the loss does not take what the network returns, a {kind} ({error}): give it "
                "ddpkit.first(outputs), in train_one_epoch and in evaluate"
            ) from error
        if isinstance(found, Tensor) and not found.ndim:
            count = count_labels(first(outputs), targets, ignored)
            counts.append(count)
            return torch.where(count > 0, found * count, 0.0), count
        pair = found if isinstance(found, (tuple, list)) and len(found) == 2 else (None, 0)
        if isinstance(pair[0], Tensor) and not (pair[0].ndim or getattr(pair[1], "ndim", 0)):
            returns_pairs = True
            return pair[0], pair[1]
        what = f"a tensor {(*found.shape,)}" if isinstance(found, Tensor) else type(found).__name__
        raise UserError(
            f"the loss of model.py returns {what}: return a mean, a tensor (), or a pair, the sum "
            "as a tensor (), such as loss.sum(), and its count, a tensor () or an int"
        )

    return call


def guarded(outputs: Outputs, counts: Sequence[Tensor]) -> Outputs:
    """Return `outputs` such that a loss has no gradient there once its count, in `counts`, is 0.

    The gradient of 0 / 0 is NaN.
    """

    def guard(output: Tensor) -> Tensor:
        if not output.requires_grad:
            return output
        alias = output.view_as(output)  # for other losses of the same outputs are not concerned
        alias.register_hook(lambda slope: slope.where(counts[0] > 0, 0.0) if counts else slope)
        return alias

    return map_tensors(guard, outputs)


def count_labels(outputs: Tensor, targets: Tensor, ignored: int | None) -> Tensor:
    """Return the number of labels, or of targets that are no class numbers, as a tensor ()."""
    classes = outputs.shape[1] if outputs.ndim > 1 else 1
    is_dense = targets.ndim > 1
    if classes == 1 and is_dense:
        classes = 2  # of one output, which says whether it is there
    has_labels = not targets.is_floating_point() and outputs.ndim == targets.ndim + 1
    if not has_labels or classes == 1:
        return torch.full((), size(targets), device=targets.device)
    is_label = (targets >= 0) & (targets < classes)
    if ignored is not None:
        is_label &= targets != ignored
    return is_label.sum()


def size(targets: Tensor) -> int:
    """Return the number of targets; the shares of classes, floats (N, classes, ...), are one."""
    has_shares = targets.is_floating_point() and targets.ndim > 1
    return targets.numel() // (targets.shape[1] if has_shares else 1)


def first(outputs: Outputs) -> Tensor:
    """Return the logits of what a network returns, float32.

    outputs: a tensor, or a tuple, dict or dataclass: there "logits", "out", or else the first.

    Raises a UserError if there is none.

        logits = ddpkit.first(model(images))
    """
    parts = outputs
    while not isinstance(parts, Tensor):
        if is_record(parts):
            parts = {field.name: getattr(parts, field.name) for field in dataclasses.fields(parts)}
        if isinstance(parts, Mapping):
            named = [parts[name] for name in ("logits", "out") if name in parts]
            parts = [part for part in (*named, *parts.values()) if part is not None]
        if not isinstance(parts, (tuple, list)) or not parts:
            raise UserError(
                f"the network of model.py returns a {type(outputs).__name__} without logits: "
                "return a tensor, or a tuple, dict or dataclass whose first is the logits"
            )
        parts = parts[0]
    return parts.float()


def is_record(outputs: Outputs) -> bool:
    return dataclasses.is_dataclass(outputs) and not isinstance(outputs, type | Mapping)


def map_tensors(change: Callable[[Tensor], Tensor], outputs: Outputs) -> Outputs:
    """Return what a network returns with each tensor changed."""
    if isinstance(outputs, Tensor):  # to search a tree takes longer
        return change(outputs)
    if is_record(outputs):
        names = [field.name for field in dataclasses.fields(outputs) if field.init]
        parts = {name: map_tensors(change, getattr(outputs, name)) for name in names}
        return dataclasses.replace(outputs, **parts)
    if isinstance(outputs, MutableMapping):  # of any class, which a tree may not know
        changed = copy.copy(outputs)
        for name, part in outputs.items():
            changed[name] = map_tensors(change, part)
        return changed
    return tree_map_only(Tensor, change, outputs)


def to_float32(outputs: Outputs) -> Outputs:
    return map_tensors(lambda x: x.float() if x.is_floating_point() else x, outputs)


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


def directions(metrics: MetricCollection, names: Iterable[str]) -> dict[str, bool | None]:
    """Return for each of the `names` that `metrics` give whether higher is better."""
    known = {}
    for key, metric in metrics.items(copy_state=False):
        inner = metric.metric if isinstance(metric, ClasswiseWrapper) else metric
        known[key] = inner.higher_is_better
    # What has another name comes from one that returns a dict, such as a ClasswiseWrapper.
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
    warnings.filterwarnings("ignore", "The ``compute`` method of metric|No positive samples")
    found = metrics.compute()
    is_better = directions(metrics, found)
    confusion: Tensor | None = None
    for name, metric in metrics.items(copy_state=False):
        is_matrix = type(metric) in (MulticlassConfusionMatrix, MultilabelConfusionMatrix)
        if is_matrix and metric.normalize in (None, "none"):
            confusion = found.pop(name)
    for name, value in found.items():
        if (count := torch.as_tensor(value).numel()) != 1:
            raise UserError(
                f"metric {name} has {count} values: in build_metrics of model.py, average them or "
                "put a torchmetrics.ClasswiseWrapper around it, which names each"
            )
    # The ranks' last bits may differ, and what is decided by them with it.
    numbers = distributed.from_rank_zero(lambda: [float(value) for value in found.values()])
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
        self.indices = torch.empty(0, dtype=torch.int64, device=device)  # of these images
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
            losses = binary_cross_entropy_with_logits(outputs, targets, reduction="none")
            is_class = torch.ones_like(targets)
        elif outputs.ndim < 2 or targets.shape != shape or targets.is_floating_point():
            return
        else:
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

    found: Found
    model: nn.Module
    loader: Any
    classes: Sequence[str]
    predict: Callable[[nn.Module, Tensor], Outputs]
    draw: DrawExample | None

    @torch.inference_mode()
    def draw_images(self, path: Path, captions: Mapping[int, str] | None = None) -> None:
        """Draw images by index, with their file and caption; by default some, without any."""
        data, format = getattr(self.loader, "dataset", None), loading.format_of(self.loader)
        if not self.draw or data is None or isinstance(data, IterableDataset):
            return
        data = data if isinstance(data, Seeded) else Seeded(data, self.classes, 0)
        spread = [round(i * (len(data) - 1) / (EXAMPLES - 1)) for i in range(EXAMPLES)]
        device, examples = next(self.model.parameters()).device, []
        for index, caption in (captions or dict.fromkeys(spread, "")).items():
            image, target, *_ = data[Key(0, index, is_val=True)]
            batch = loading.normalize(image[None].to(device), format)
            logits = first(self.predict(self.model, batch))[0].cpu()
            file = Path(samples.name(data.dataset, index).split(", ", 1)[-1])
            above = [str(Path(*file.parts[-2:])), caption] if caption else []
            examples.append((images.visible(image), torch.as_tensor(target), logits, above))
        pictures.draw_images(path, examples, self.draw, self.classes)

    def write(self, folder: Path) -> None:
        """Write the files for which there is something to `folder`."""
        confusion, worst = self.found
        if confusion is not None:
            write_per_class(folder / "per_class.csv", confusion, self.classes)
            if confusion.ndim == 2:
                pictures.draw_confusion(folder / "confusion.png", confusion, self.classes)
        # Another loader may not say which images they were.
        captions = {index: f"loss {loss:.3g}" for loss, index in worst if index >= 0}
        if captions:
            self.draw_images(folder / "worst.png", captions)


def write_per_class(path: Path, confusion: Tensor, classes: Sequence[str]) -> None:
    """Write precision, recall, F1, IoU and number of labels of each class; 0 / 0 is nan."""
    counts = confusion.cpu().double()
    if counts.ndim == 3:  # of several labels: (classes, not there or there, not said or said)
        right, labels, predictions = counts[:, 1, 1], counts[:, 1].sum(1), counts[:, :, 1].sum(1)
    else:
        right, labels, predictions = counts.diagonal(), counts.sum(1), counts.sum(0)
    both = labels + predictions
    shares = right / predictions, right / labels, 2 * right / both, right / (both - right)
    with files.table(path, ["class", "precision", "recall", "f1", "iou", "support"]) as write:
        for name, support, *values in zip(classes, labels, *shares, strict=True):
            write([name, *(f"{value:.6f}" for value in values), int(support)])
