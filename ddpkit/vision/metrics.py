"""Metrics over all ranks, each as one number that knows whether higher is better."""

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor
from torchmetrics import ClasswiseWrapper, Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassConfusionMatrix,
    MultilabelConfusionMatrix,
)
from torchmetrics.functional.classification import (
    binary_calibration_error,
    binary_precision_recall_curve,
)

from ddpkit.errors import UserError
from ddpkit.ranks import distributed, stopping

MATRICES = MulticlassConfusionMatrix, MultilabelConfusionMatrix


class Score(float):
    """A metric's value that knows whether higher ones are better, or None."""

    higher_is_better: bool | None = None


def directions(
    metrics: MetricCollection, names: Iterable[str]
) -> dict[str, bool | None]:
    """Return for each of the `names` that `metrics` give whether higher is better."""
    known = {}
    for key, metric in metrics.items(copy_state=False):
        inner = metric.metric if isinstance(metric, ClasswiseWrapper) else metric
        known[key] = inner.higher_is_better
    # A metric that returns a dict, such as a ClasswiseWrapper, gives other names than
    # its own. Which of them gave a name is known if all of them agree.
    others = {is_higher for key, is_higher in known.items() if key not in names}
    of_others = others.pop() if len(others) == 1 else None
    return {name: known.get(name, of_others) for name in names}


def compute_metrics(
    metrics: MetricCollection,
) -> tuple[dict[str, float], Tensor | None]:
    """Return each metric over the samples of all ranks; every rank has to call it.

    The counts of a MulticlassConfusionMatrix, int64 (classes, classes), labels by predictions, or
    of a MultilabelConfusionMatrix, (classes, 2, 2), are apart from the others; None without one.
    The numbers are rank 0's on all ranks, and know whether higher is better. After a signal all
    ranks stop here.

    Raises a UserError if a metric has more than one value.

        results, confusion = ddpkit.compute_metrics(metrics)  # {"top1": 0.93}, a matrix
    """
    stopping.agree()  # or some would wait in a collective for one that has stopped
    for metric in metrics.modules():  # also those within a wrapper or a collection
        if isinstance(metric, Metric):
            metric.dist_sync_fn = gather_states
    # of a rank that has no validation images
    known = "The ``compute`` method of metric|No positive samples"
    warnings.filterwarnings("ignore", known)
    values = metrics.compute()
    is_better = directions(metrics, values)
    confusion: Tensor | None = None
    for name, metric in metrics.items(copy_state=False):
        # one that is normalised has no counts; of a subclass the values mean other things
        if type(metric) in MATRICES and metric.normalize in (None, "none"):
            confusion = values.pop(name)
    for name, value in values.items():
        count = torch.as_tensor(value).numel()
        if count != 1:
            raise UserError(
                f"metric {name} has {count} values: in build_metrics of model.py, average them or "
                "wrap it in torchmetrics.ClasswiseWrapper, which names each"
            )
    # The ranks' last bits may differ, and what is decided by them with it.
    numbers = distributed.from_rank_zero(
        lambda: [float(value) for value in values.values()]
    )
    results: dict[str, float] = {}
    for name, number in zip(values, numbers, strict=True):
        score = Score(number)
        score.higher_is_better = is_better[name]
        results[name] = score
    return results, confusion


def calibration_error(scores: Tensor, labels: Tensor) -> float:
    """Return the expected calibration error, of 15 bins, of probabilities (N, classes).

    labels: class numbers (N,), or 0 or 1 for each of several labels, (N, classes), taken together.
    """
    if labels.ndim == 1:
        scores, guesses = scores.max(1)
        labels = guesses == labels
    return float(binary_calibration_error(scores.ravel(), labels.ravel().int()))


def best_threshold(scores: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the probability from which a label has the best F1, and that F1.

    scores: (N,), from 0 to 1. labels: int (N,), 0 or 1.
    """
    precision, recall, scores = binary_precision_recall_curve(scores, labels)
    f1 = (2 * precision * recall / (precision + recall)).nan_to_num()
    at = int(f1.argmax())
    # halfway to the next lower one, for another machine rounds otherwise
    below = scores[at - 1] if at else 0
    return (float(scores[at]) + float(below)) / 2, float(f1[at])


def gather_states(value: Tensor, group: object = None) -> list[Tensor]:
    """Return each rank's state of a metric; torchmetrics' own way fails at one without images."""
    states = distributed.gather_objects(value.cpu())
    own = [state.to(value.device) for state in states if state.numel()]
    # if no rank has any, the empty one: torchmetrics cannot join an empty list
    return own or [value]
