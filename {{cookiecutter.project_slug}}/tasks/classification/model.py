"""The network, its loss and its metrics."""

from argparse import Namespace
from collections.abc import Sequence

import timm
import torchvision
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

import ddpkit

# The first of these that there is chooses best.pt. It may also be "val_loss", or, of numbers that
# you work out yourself, say which are better: "cost", "min".
BEST = "top1", "map"
STRIDE = None  # of images' sides, if the network takes any multiples of it; None: --image-size


def build_model(
    args: Namespace, classes: Sequence[str], channels: int = 3, weights: str | None = None
) -> nn.Module:
    """Return a network: float32 (N, channels, H, W), normalised -> logits (N, classes).

    weights: --weights, to start from; None: none, because those of a checkpoint follow.
    """

    def build(pretrained: bool = False) -> nn.Module:
        if args.arch.startswith("timm/"):
            own = timm.get_pretrained_cfg(name := args.arch.removeprefix("timm/"))
            side = args.image_size if own and own.fixed_input_size else None
            options: dict = {"img_size": side, "drop_path_rate": args.drop_path or None}
            options |= {"num_classes": len(classes), "in_chans": channels}
            net = timm.create_model(name, pretrained, **options)  # leaves out what is None
            net.set_grad_checkpointing(args.grad_checkpointing)  # type: ignore[operator]
            return net
        if args.drop_path or args.grad_checkpointing:
            raise ValueError("--drop-path and --grad-checkpointing are for --arch timm/NAME")
        is_aux = args.arch in ("googlenet", "inception_v3")  # whose heads need a loss of their own
        heads = {"aux_logits": False, "init_weights": True} if is_aux else {}
        return torchvision.models.get_model(args.arch, num_classes=len(classes), **heads)

    return ddpkit.fit_input(build, args.image_size, channels, weights, arch=args.arch)


def layers(model: nn.Module) -> list[list[nn.Parameter]]:
    """Return the weights of each layer, as timm says; else of all but the last, and of that."""
    if matcher := getattr(model, "group_matcher", None):
        names = timm.models.group_parameters(model, matcher())
        return [[model.get_parameter(name) for name in names[n]] for n in sorted(names)]
    found = [each for each in model.modules() if isinstance(each, nn.Linear | nn.Conv2d)]
    if not found:
        line = "--freeze-backbone and --layer-decay: no layer is known"
        raise ddpkit.UserError(f"{line}; return them from `layers` in model.py")
    last = found[-1]
    own = set(last.parameters())
    return [[each for each in model.parameters() if each not in own], [*last.parameters()]]


def infer(model: nn.Module, images: Tensor, args: Namespace) -> Tensor:
    """Apply `model` in evaluation: float32 (N, 3, H, W), normalised -> logits (N, classes)."""
    outputs = model.forward(images)  # __call__ of a compiled one would compile again for each size
    logits = ddpkit.to_logits(outputs)
    if args.tta:
        mirrored = model.forward(images.flip(-1))
        logits = (logits + ddpkit.to_logits(mirrored)) / 2
    return logits


def build_criterion(args: Namespace, train_set: Dataset, classes: Sequence[str]) -> nn.Module:
    """Return the loss: (logits (N, classes), targets) -> the sum over the samples; or their mean.

    targets: int64 (N,), or float32 (N, classes), shares of the classes, as mixup makes them.
    """
    class_weights = ddpkit.class_weights(args.class_weights, train_set, classes)
    if args.several_labels:
        return ddpkit.BinaryCrossEntropy(class_weights, args.label_smoothing)
    return nn.CrossEntropyLoss(class_weights, reduction="sum", label_smoothing=args.label_smoothing)


def build_metrics(args: Namespace, classes: Sequence[str]) -> MetricCollection:
    """Return the metrics; they take (logits (N, classes), int64 (N,)) and add up over ranks."""
    count = len(classes)
    if args.several_labels:
        return ddpkit.label_metrics(count)
    metrics: dict[str, Metric | MetricCollection] = {
        "top1": MulticlassAccuracy(count, average="micro"),
        "matrix": MulticlassConfusionMatrix(count),  # for per_class.csv and confusion.png
    }
    if count > 5:
        metrics["top5"] = MulticlassAccuracy(count, average="micro", top_k=5)
    return MetricCollection(metrics)
