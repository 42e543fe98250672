"""The network, its loss and its metrics."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torchvision
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

import ddpkit

BEST = "top1"  # the metric, higher is better, that decides which weights are kept as best.pt
STRIDE = None  # of images' sides, if the network takes any multiples of it; None: --image-size


def build_model(
    args: Namespace, classes: Sequence[str], channels: int = 3, weights: str | None = None
) -> nn.Module:
    """Return a network: float32 (N, channels, H, W), normalised -> logits (N, classes).

    weights: --weights, to start from; None: none, because those of a checkpoint follow.
    """
    if args.arch not in (names := torchvision.models.list_models(module=torchvision.models)):
        raise ddpkit.UserError(f"--arch {args.arch}: torchvision has {', '.join(names)}")
    # What some networks need; auxiliary heads are off, as they need a loss of their own.
    no_head = {"aux_logits": False, "init_weights": True, "transform_input": channels == 3}
    special: dict[str, dict[str, Any]] = {
        "googlenet": no_head,
        "inception": no_head,
        "maxvit": {"input_size": (args.image_size, args.image_size)},
        "vit": {"image_size": args.image_size},
    }
    options = special.get(args.arch.split("_")[0], {})

    def build() -> nn.Module:
        return torchvision.models.get_model(args.arch, num_classes=len(classes), **options)

    model = ddpkit.fit_input(build, args.image_size, channels)
    if weights:
        ddpkit.load_weights(model, weights, args.arch)
    return model


def backbone(model: nn.Module) -> list[nn.Parameter]:
    """Return all weights but those of the last layer, for --backbone-lr and --freeze-backbone."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    last = set(layers[-1].parameters())
    return [weight for weight in model.parameters() if weight not in last]


def infer(model: nn.Module, images: Tensor, args: Namespace) -> Tensor:
    """Apply `model` in evaluation: float32 (N, 3, H, W), normalised -> logits (N, classes)."""
    return model.forward(images)  # __call__ of a compiled one would compile again for each size


class CrossEntropy(nn.Module):
    """The loss: (logits (N, classes), targets) -> (sum over samples, number of samples).

    targets: int64 (N,), or float32 (N, classes), shares of the classes, as mixup makes them.
    With weights of the classes a sample counts as much as its class weighs, or by its shares.
    """

    weights: Tensor | None

    def __init__(self, weights: Tensor | None, smoothing: float) -> None:
        super().__init__()
        self.register_buffer("weights", weights)
        self.smoothing = smoothing

    def forward(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | int]:
        loss = nn.functional.cross_entropy(
            outputs, targets, self.weights, reduction="sum", label_smoothing=self.smoothing
        )
        if self.weights is None:
            return loss, len(targets)
        counts = targets @ self.weights if targets.is_floating_point() else self.weights[targets]
        return loss, counts.sum()


def build_criterion(args: Namespace, train_set: Dataset, classes: Sequence[str]) -> nn.Module:
    weights = ddpkit.class_weights(args.class_weights, train_set, classes)
    return CrossEntropy(weights, args.label_smoothing)


def build_metrics(classes: Sequence[str]) -> MetricCollection:
    """Return the metrics; they take (logits (N, classes), int64 (N,)) and add up over ranks.

    The confusion matrix is for per_class.csv and confusion.png, not for metrics.csv.
    """
    count = len(classes)
    metrics: dict[str, Metric | MetricCollection] = {
        "top1": MulticlassAccuracy(count, average="micro"),
        "matrix": MulticlassConfusionMatrix(count),
    }
    if count > 5:
        metrics["top5"] = MulticlassAccuracy(count, average="micro", top_k=5)
    return MetricCollection(metrics)
