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
from dataset import AUGMENTATIONS, MIXES

# The first of these that exists selects best.pt. It may also be "val_loss"; for a
# metric that you compute yourself, also give the direction: "cost", "min".
BEST = "top1", "map"
# of images' sides, if the network takes any multiples of it; None: --image-size
STRIDE = None


def check_flags(args: Namespace, pretrained: str | None) -> None:
    """Refuse names that nothing has, before data are read; leave out those of your own."""
    ddpkit.load_pretrained(None, pretrained, args.arch)
    ddpkit.parse_augment(AUGMENTATIONS, args.augment, None, MIXES)


def build_model(
    args: Namespace,
    classes: Sequence[str],
    channels: int = 3,
    pretrained: str | None = None,
) -> nn.Module:
    """Return a network: float32 (N, channels, H, W), normalised -> logits (N, classes).

    pretrained: --weights, to start from; None: those of a checkpoint follow.
    """
    img_size = None
    if args.arch.startswith("timm/"):
        name = args.arch.removeprefix("timm/")
        config = timm.get_pretrained_cfg(name)
        if config and config.fixed_input_size:
            # as a ViT has a weight for each position in the image
            img_size = args.image_size
        model = timm.create_model(  # leaves out what is None
            name,
            num_classes=len(classes),
            in_chans=channels,
            img_size=img_size,
            drop_path_rate=args.drop_path or None,
        )
        model.set_grad_checkpointing(args.grad_checkpointing)  # type: ignore[operator]
        if hasattr(model, "conv_head"):  # EfficientNet, MobileNetV3
            # timm draws their last layer for 1,000 classes: with two its weights are 25
            # times as large as torch's, and its gradients ruin pretrained layers
            model.classifier.reset_parameters()  # type: ignore[operator, union-attr]
    elif args.drop_path or args.grad_checkpointing:
        raise ddpkit.UserError(
            "--drop-path and --grad-checkpointing need --arch timm/NAME"
        )
    else:
        options = {}
        if args.arch in ("googlenet", "inception_v3"):
            # Auxiliary heads would need a loss of their own.
            options = {"aux_logits": False, "init_weights": True}
        model = torchvision.models.get_model(
            args.arch, num_classes=len(classes), **options
        )

    ddpkit.adapt_input(model, args.image_size, channels)
    ddpkit.load_pretrained(model, pretrained, args.arch, img_size=img_size)
    return model


def layers(model: nn.Module) -> list[list[nn.Parameter]]:
    """Return the parameters of each layer, as timm says; else of all but the last, and of that."""
    matcher = getattr(model, "group_matcher", None)
    if matcher:
        groups = timm.models.group_parameters(model, matcher())
        return [
            [model.get_parameter(name) for name in groups[number]]
            for number in sorted(groups)
        ]
    modules = [
        each for each in model.modules() if isinstance(each, nn.Linear | nn.Conv2d)
    ]
    if not modules:
        raise ddpkit.UserError(
            "--freeze-backbone and --layer-decay: this model's layers are unknown; return them "
            "from `layers` in model.py"
        )
    head = list(modules[-1].parameters())
    of_head = set(head)
    others = [param for param in model.parameters() if param not in of_head]
    return [others, head]


def infer(model: nn.Module, images: Tensor, args: Namespace) -> Tensor:
    """Apply `model` in evaluation: float32 (N, 3, H, W), normalised -> logits (N, classes)."""
    # __call__ of a compiled one would compile again for each size
    logits = ddpkit.to_logits(model.forward(images))
    if args.hflip and args.tta:
        mirrored = model.forward(images.flip(-1))
        logits = (logits + ddpkit.to_logits(mirrored)) / 2
    return logits


def build_criterion(
    args: Namespace, train_set: Dataset, classes: Sequence[str]
) -> nn.Module:
    """Return the loss: (logits (N, classes), targets) -> the sum over the samples; or their mean.

    targets: int64 (N,), or float32 (N, classes), shares of the classes, as mixup makes them.
    Class weights are known as the `weight` of a module of torch; in a function each label counts 1.
    """
    class_weights = ddpkit.class_weights(
        args.class_weights, train_set, classes, args.several_labels
    )
    if args.several_labels:
        return ddpkit.BinaryCrossEntropy(class_weights, args.label_smoothing)
    return nn.CrossEntropyLoss(
        class_weights, reduction="sum", label_smoothing=args.label_smoothing
    )


def build_metrics(args: Namespace, classes: Sequence[str]) -> MetricCollection:
    """Return the metrics; they take (logits (N, classes), int64 (N,)) and add up over ranks."""
    count = len(classes)
    if args.several_labels:
        return ddpkit.label_metrics(count)
    metrics: dict[str, Metric | MetricCollection] = {
        "top1": MulticlassAccuracy(count, average="micro"),
        # for per_class.csv and confusion.png
        "matrix": MulticlassConfusionMatrix(count),
    }
    if count > 5:
        metrics["top5"] = MulticlassAccuracy(count, average="micro", top_k=5)
    # Without groups: torchmetrics takes two metrics for one if their first batch has the
    # same counts.
    return MetricCollection(metrics, compute_groups=False)
