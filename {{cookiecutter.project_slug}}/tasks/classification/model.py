"""The network, its loss and its metrics."""

import functools
from argparse import Namespace, _ArgumentGroup
from collections.abc import Callable, Sequence
from typing import Any

import torchvision
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from engine.errors import UserError
from engine.run import machine, pretrained, sizes
from engine.run.flags import below_one, class_weights

BEST = "top1"  # the metric, higher is better, that decides which weights are kept as best.pt
NETWORK_FLAGS = ("arch", "channels")  # flags that have to equal those of a checkpoint


def add_arguments(group: _ArgumentGroup) -> None:
    add = group.add_argument
    add("--arch", default="resnet18", metavar="NAME", help="any classifier of torchvision")
    add(
        "--weights",
        metavar="auto|none|NAME|FILE",
        default="auto",
        help="start from torchvision's weights of that name (DEFAULT: the best) or from a .pt "
        "file; auto: DEFAULT if it can be downloaded, but none for the demo set; layers of another "
        "shape, such as the last, are not loaded",
    )
    add(
        "--label-smoothing",
        metavar="SHARE",
        type=below_one,
        default=0.0,
        help="share of each label that is divided among all classes",
    )
    add(
        "--class-weights",
        metavar="auto|FILE|A,B,...",
        type=class_weights,
        help="weights of the classes in the loss; auto: from their shares of the training labels",
    )


def build_model(args: Namespace, classes: Sequence[str], weights: str | None = None) -> nn.Module:
    """Return a network: float32 (N, 3, H, W), normalised -> logits (N, classes).

    With --channels it takes as many instead of 3.
    """
    channels = args.channels or 3
    names = torchvision.models.list_models(module=torchvision.models)
    if args.arch not in names:
        raise UserError(f"--arch {args.arch}: torchvision has {', '.join(names)}")

    def create(size: int) -> nn.Module:
        # What some networks need; auxiliary heads are off, as they need a loss of their own.
        no_head = {"aux_logits": False, "init_weights": True, "transform_input": channels == 3}
        special: dict[str, dict[str, Any]] = {
            "googlenet": no_head,
            "inception": no_head,
            "maxvit": {"input_size": (size, size)},
            "vit": {"image_size": size},
        }
        options = special.get(args.arch.split("_")[0], {})
        model = torchvision.models.get_model(args.arch, num_classes=len(classes), **options)
        return pretrained.set_channels(model, channels)

    model = sizes.check(create, args.image_size, args.arch, channels)
    if weights:
        published = pretrained.published_by_torchvision(args.arch)
        read = functools.partial(pretrained.read_weights, arch=args.arch)
        args.weights = pretrained.load(model, weights, published, read)
    return model


def backbone(model: nn.Module) -> list[nn.Parameter]:
    """Return all weights but those of the last layer, for --backbone-lr and --freeze-backbone."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    last = set(layers[-1].parameters())
    return [weight for weight in model.parameters() if weight not in last]


def infer(model: nn.Module, images: Tensor, args: Namespace) -> Tensor:
    """Apply `model` in evaluation: float32 (N, 3, H, W), normalised -> logits (N, classes)."""
    return model.forward(images)  # __call__ of a compiled one would compile again for each size


def build_criterion(args: Namespace) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor | int]]:
    """Return the loss: (logits (N, classes), targets) -> (sum over samples, number of samples).

    targets: int64 (N,), or float32 (N, classes), shares of the classes, as mixup makes them.
    Sum and count, because those can be added up over batches and ranks, unlike means. With
    --class-weights a sample counts as much as its class weighs, or its classes by their shares.
    """

    def cross_entropy(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | int]:
        values, smoothing = args.class_weights, args.label_smoothing
        weights = machine.constant(values, outputs.device) if values else None
        loss = nn.functional.cross_entropy(
            outputs, targets, weights, reduction="sum", label_smoothing=smoothing
        )
        if weights is None:
            return loss, len(targets)
        counts = targets @ weights if targets.is_floating_point() else weights[targets]
        return loss, counts.sum()

    return cross_entropy


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
