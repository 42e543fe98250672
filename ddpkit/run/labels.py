"""Several labels per image: their loss and their metrics."""

from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    MultilabelAveragePrecision,
    MultilabelConfusionMatrix,
    MultilabelF1Score,
)


class BinaryCrossEntropy(nn.Module):
    """The loss: logits and targets, float (N, classes) -> the sum of the images' means, and N.

    targets: 0 or 1, or between if images are mixed. weights: of the classes in a mean, float32
    (classes,), or None. smoothing: the share of each target that is divided between 0 and 1.

        criterion = ddpkit.BinaryCrossEntropy(None, smoothing=0.0)
        loss_sum, count = criterion(logits, targets)
    """

    weights: Tensor | None

    def __init__(self, weights: Tensor | None, smoothing: float) -> None:
        super().__init__()
        self.register_buffer("weights", weights)
        self.smoothing = smoothing

    def forward(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        targets = targets * (1 - self.smoothing) + self.smoothing / 2
        loss = binary_cross_entropy_with_logits(outputs, targets, self.weights, reduction="sum")
        total = targets.shape[1] if self.weights is None else self.weights.sum()
        return loss / total, len(targets)


class LabelMetrics(MetricCollection):
    # Probabilities: of logits torchmetrics would take those from 0 to 1 for such, batch by batch.
    def update(self, logits: Tensor, targets: Tensor) -> None:  # type: ignore[override]
        super().update(logits.sigmoid(), targets.int())


def label_metrics(count: int) -> MetricCollection:
    """Return "map", the mean average precision of `count` classes, and "f1", the mean F1 at 0.5.

    They take logits and targets of 0 or 1, both float (N, classes), and add up over ranks.

        metrics = ddpkit.label_metrics(len(classes))
    """
    return LabelMetrics(
        {
            "map": MultilabelAveragePrecision(count),
            "f1": MultilabelF1Score(count),
            "matrix": MultilabelConfusionMatrix(count),
        }
    )
