"""Metrics over all ranks, as numbers for a row of metrics.csv."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassConfusionMatrix

from engine.errors import UserError
from engine.ranks import devices, distributed
from engine.run import machine

Loss = Callable[..., Any]
Criterion = Callable[..., tuple[Tensor, Tensor | int]]


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
        if not (torch.is_grad_enabled() or isinstance(outputs, Tensor | tuple)):
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
        parts = found if isinstance(found, tuple | list) else (found,)
        is_pair = len(parts) == 2 and isinstance(parts[0], Tensor)
        if is_pair and not (parts[0].ndim or getattr(parts[1], "ndim", 0)):
            return parts[0], parts[1]
        kinds = [
            f"Tensor {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in parts
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
    logits = first(outputs)
    return ((targets >= 0) & (targets < logits.shape[1])).sum()


def size(targets: Tensor) -> int:
    """Return the number of targets; floats (N, classes, ...), shares of classes, are one each."""
    has_shares = targets.is_floating_point() and targets.ndim > 1
    return targets.numel() // (targets.shape[1] if has_shares else 1)


def first(outputs: Any) -> Tensor:
    """Return the logits of what a network returns: a tensor, or the first of a tuple or dict.

    Raises a UserError if that is no tensor.
    """
    logits = outputs
    if isinstance(outputs, Mapping):
        logits = next(iter(outputs.values()), None)
    elif isinstance(outputs, tuple | list):
        logits = outputs[0] if outputs else None
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
    fill_empty_lists(metrics)
    found: dict[str, float] = {}
    confusion: Tensor | None = None
    matrices = {name for name, metric in metrics.items(copy_state=False) if is_confusion(metric)}
    for metric in metrics.modules():
        if isinstance(metric, Metric) and not devices.has_collectives(metric.device):
            metric.distributed_available_fn = lambda: False
    # Of a rank that has no validation images.
    warnings.filterwarnings("ignore", "The ``compute`` method of metric")
    for name, value in metrics.compute().items():
        if name in matrices:
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


def is_confusion(metric: object) -> bool:
    """Return whether `metric` counts a confusion matrix; torchmetrics derives others from it."""
    return type(metric) is MulticlassConfusionMatrix and metric.normalize in (None, "none")


def fill_empty_lists(metrics: MetricCollection) -> None:
    """Give lists of values that are empty on this rank an empty tensor of the others' shape.

    torchmetrics would gather tensors of other shapes from these ranks, and fail.
    """
    metrics.items(copy_state=False)  # hands shared states to each metric of a group
    lists = {
        (name, key): (metric, value)
        for name, metric in metrics.named_modules()
        if isinstance(metric, Metric)
        for key, value in metric.metric_state.items()
        if isinstance(value, list)
    }
    if not lists:  # the same on all ranks
        return
    mine = {at: (v[0].shape[1:], v[0].dtype) for at, (_, v) in lists.items() if v}
    known: dict[tuple[str, str], tuple[torch.Size, torch.dtype]] = {}
    for each in distributed.gather_objects(mine):
        known.update(each)
    for at, (metric, value) in lists.items():
        if not value and at in known:
            shape, dtype = known[at]
            setattr(metric, at[1], [torch.empty(0, *shape, dtype=dtype, device=metric.device)])
