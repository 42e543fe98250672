"""Metrics over all ranks, as numbers for a row of metrics.csv."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassConfusionMatrix

from engine.errors import UserError
from engine.ranks import devices, distributed
from engine.run import machine

Criterion = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | int]]


def checked(criterion: Criterion) -> Criterion:
    """Return `criterion`, which then raises a UserError unless sum and count are scalars."""

    def call(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | int]:
        found = criterion(outputs, targets)
        parts = found if isinstance(found, (tuple, list)) else (found,)
        is_pair = len(parts) == 2 and isinstance(parts[0], Tensor)
        if is_pair and not (parts[0].ndim or getattr(parts[1], "ndim", 0)):
            return found
        kinds = [
            f"Tensor {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in parts
        ]
        raise UserError(
            f"the loss of model.py returns {', '.join(kinds)}: return a pair, the sum as a tensor "
            "(), such as loss.sum(), and its count, a tensor () or an int"
        )

    return call


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


def check_logits(outputs: object) -> Tensor:
    """Return what a network returns in evaluation as float32; a UserError if it is no tensor."""
    if not isinstance(outputs, Tensor):
        what = f"a {type(outputs).__name__}"
        raise UserError(
            f"the network of model.py returns {what} in evaluation, where metrics and predict.py "
            "need the logits: return them alone unless self.training"
        )
    return outputs.float()
