"""The network, its loss and its metrics."""

from argparse import Namespace
from collections.abc import Sequence

import segmentation_models_pytorch as smp
import torchvision
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics import ClasswiseWrapper, Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassConfusionMatrix,
    MulticlassJaccardIndex,
)

import ddpkit
from dataset import AUGMENTATIONS, STRIDE, VOID
from losses import Loss

# It selects best.pt. It may also be "val_loss"; for a metric that you compute
# yourself, also give the direction: "cost", "min".
BEST = "miou"


def check_flags(args: Namespace, pretrained: str | None) -> None:
    """Refuse names that nothing has, before data are read; leave out those of your own."""
    ddpkit.load_pretrained(None, pretrained, args.arch, args.encoder)
    ddpkit.parse_augment(AUGMENTATIONS, args.augment, None)
    Loss(args.loss)


def build_model(
    args: Namespace,
    classes: Sequence[str],
    channels: int = 3,
    pretrained: str | None = None,
) -> nn.Module:
    """Return a network: float32 (N, channels, H, W), normalised -> logits (N, classes, H, W).

    Those of torchvision return a dict, in which "out" has the logits.
    H and W have to be multiples of STRIDE.
    pretrained: --weights, to start from; None: those of a checkpoint follow.
    """
    if args.arch in torchvision.models.list_models(
        module=torchvision.models.segmentation
    ):
        model = torchvision.models.get_model(
            args.arch, num_classes=len(classes), weights_backbone=None
        )
    else:
        model = smp.create_model(
            args.arch,
            encoder_name=args.encoder,
            encoder_weights=None,  # load_pretrained has them downloaded by one rank
            in_channels=channels,
            classes=len(classes),
        )

    ddpkit.adapt_input(model, args.image_size, channels, STRIDE)
    ddpkit.load_pretrained(model, pretrained, args.arch, args.encoder)
    return model


def layers(model: nn.Module) -> list[list[nn.Parameter]]:
    """Return the parameters of the encoder and the others, for the flags of layers."""
    # torchvision's word is backbone
    encoder = getattr(model, "encoder", getattr(model, "backbone", None))
    if not isinstance(encoder, nn.Module):
        raise ddpkit.UserError(
            "--freeze-backbone and --layer-decay: the model has no attribute `encoder`; return its "
            "layers from `layers` in model.py"
        )
    params = list(encoder.parameters())
    of_encoder = set(params)
    others = [param for param in model.parameters() if param not in of_encoder]
    return [params, others]


def infer(model: nn.Module, images: Tensor, args: Namespace) -> Tensor:
    """Apply `model` in evaluation: float32 (N, 3, H, W), normalised -> logits (N, classes, H, W).

    Larger images than --tile go through one tile at a time. That changes the class of some 1.5
    pixels in 10,000 of a U-Net (tiles of 512), and of more by networks that look at the whole image
    at once (global pooling, attention, group norm: deeplab, segformer, fpn): they see one tile.
    """
    # Not __call__, which of a compiled network would compile again for each size.
    logits = ddpkit.sliding_window(model.forward, images, args.tile, STRIDE)
    if args.hflip and args.tta:
        mirrored = ddpkit.sliding_window(
            model.forward, images.flip(-1), args.tile, STRIDE
        )
        logits = (logits + mirrored.flip(-1)) / 2
    return logits


def build_criterion(
    args: Namespace, train_set: Dataset, classes: Sequence[str]
) -> nn.Module:
    """Return the loss: (logits, int64 (N, H, W)) -> the sum over the labelled pixels."""
    class_weights = ddpkit.class_weights(args.class_weights, train_set, classes)
    return Loss(args.loss, args.label_smoothing, class_weights)


def build_metrics(args: Namespace, classes: Sequence[str]) -> MetricCollection:
    """Return mean and per-class IoU over the whole set; they take (logits, int64 (N, H, W)).

    A class in neither labels nor predictions is NaN and left out of the mean. The confusion matrix
    is for per_class.csv and confusion.png, not for metrics.csv.
    """
    count = len(classes)
    each = MulticlassJaccardIndex(
        count, ignore_index=VOID, average="none", zero_division=float("nan")
    )
    metrics: dict[str, Metric | MetricCollection] = {
        "miou": MulticlassJaccardIndex(count, ignore_index=VOID),
        "iou": ClasswiseWrapper(each, list(classes), "iou_"),
        "matrix": MulticlassConfusionMatrix(count, ignore_index=VOID),
    }
    # These count once for all three. Left to itself torchmetrics takes any two metrics for
    # one if their first batch has the same counts.
    shared = ["iou", "matrix", "miou"]  # a wrapper has to come first
    others = [[name] for name in metrics if name not in shared]
    return MetricCollection(metrics, compute_groups=[shared, *others])
