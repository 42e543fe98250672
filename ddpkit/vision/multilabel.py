"""Several labels per image: their loss and their metrics."""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    MultilabelAveragePrecision,
    MultilabelConfusionMatrix,
    MultilabelF1Score,
)
from torchmetrics.utilities.data import dim_zero_cat


class BinaryCrossEntropy(nn.Module):
    """The loss: logits and targets, float (N, classes) -> the sum of the images' means.

    targets: 0 or 1, or between if images are mixed. weights: of each class, where an image has it,
    float32 (classes,), as torch's pos_weight, or None. smoothing: the share of each target that is
    divided between 0 and 1.

        criterion = ddpkit.BinaryCrossEntropy(None, smoothing=0.0)
        loss = criterion(logits, targets) / criterion.count(targets)
    """

    weights: Tensor | None

    def __init__(self, weights: Tensor | None, smoothing: float) -> None:
        super().__init__()
        self.register_buffer("weights", weights)  # goes to the device with the module
        self.smoothing = smoothing

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        count = targets.shape[1]
        weights = None
        if self.weights is not None:
            # Of a mixed image, what its parts weigh; smoothed is what is so weighed, or each
            # absent label would count as a share of a rare one.
            there = self.weights * targets
            weights = there + 1 - targets
            targets = there / weights.clamp(min=1e-6)
        targets = targets * (1 - self.smoothing) + self.smoothing / 2
        loss = binary_cross_entropy_with_logits(
            outputs, targets, weights, reduction="sum"
        )
        return loss / count

    def count(self, targets: Tensor) -> int:
        return len(targets)


class MeanPrecision(MultilabelAveragePrecision):
    """The mean over the labels that some image has: of others there is no precision to average."""

    def compute(self) -> Any:
        each = super().compute()
        is_there = dim_zero_cat(self.target).eq(1).any(0)
        return each[is_there].mean()


class MeanF1(MultilabelF1Score):
    """The mean without labels that no image has and none is given: as of classes in miou."""

    def compute(self) -> Tensor:
        each = super().compute()
        is_defined = sum(getattr(self, name) for name in ("tp", "fp", "fn")) > 0
        return each[is_defined].mean()


class LabelMetrics(MetricCollection):
    # Probabilities: torchmetrics would take a batch of logits that are all from 0 to 1
    # for such.
    def update(self, logits: Tensor, targets: Tensor) -> None:  # type: ignore[override]
        super().update(logits.float().sigmoid(), targets.int())


def label_metrics(count: int) -> MetricCollection:
    """Return "map", the mean average precision of `count` classes, and "f1", the mean F1 at 0.5.

    They take logits and targets of 0 or 1, both float (N, classes), and add up over ranks. A class
    that no image has is left out of the mean, but for the f1 of one that is predicted, which is 0.

        metrics = ddpkit.label_metrics(len(classes))
    """
    return LabelMetrics(
        {
            "map": MeanPrecision(count, average="none"),
            "f1": MeanF1(count, average="none"),
            "matrix": MultilabelConfusionMatrix(count),  # for per_class.csv
        },
        compute_groups=False,
    )
