"""The network, its loss and its metrics."""

import functools
from argparse import ArgumentTypeError, Namespace, _ArgumentGroup
from collections.abc import Callable, Mapping, Sequence

import huggingface_hub
import segmentation_models_pytorch as smp
import timm
import torch
import torchvision
from torch import Tensor, nn
from torchmetrics import ClasswiseWrapper, Metric, MetricCollection
from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassJaccardIndex

from dataset import STRIDE
from engine.errors import UserError
from engine.run import pretrained, sizes, tiles
from masks import VOID

BEST = "miou"  # the metric, higher is better, that decides which weights are kept as best.pt
NETWORK_FLAGS = ("arch", "encoder", "channels")  # flags that have to equal those of a checkpoint


def add_arguments(group: _ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--arch",
        default="unet",
        metavar="NAME",
        help="a decoder of segmentation-models-pytorch, or a segmentation network of torchvision "
        "such as deeplabv3_resnet50",
    )
    add("--encoder", default="resnet34", metavar="NAME", help="backbone that feeds the decoder")
    add(
        "--weights",
        metavar="auto|none|NAME|FILE",
        default="auto",
        help="start from the encoder's weights of that name (imagenet), from torchvision's "
        "(DEFAULT), or from a .pt file; auto: imagenet or DEFAULT if it can be downloaded, but "
        "none for the demo set; layers of another shape, such as the last, are not loaded",
    )
    add(
        "--tile",
        metavar="PIXELS",
        type=tile_size,
        default=2048,
        help="predict larger validation images in overlapping tiles of that side; 0: always whole",
    )


def tile_size(text: str) -> int:
    """Convert PIXELS: 0, or a multiple of STRIDE of at least four times that."""
    value = int(text) if text.isdecimal() else -1
    if value % STRIDE or 0 < value < 4 * STRIDE:
        raise ArgumentTypeError(f"{text} is not 0 or a multiple of {STRIDE} from {4 * STRIDE} up")
    return value


class Logits(nn.Module):
    """A segmentation network of torchvision that returns its main output alone."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)["out"]


def build_model(args: Namespace, classes: Sequence[str], weights: str | None = None) -> nn.Module:
    """Return a network: float32 (N, 3, H, W), normalised -> logits (N, classes, H, W).

    H and W have to be multiples of STRIDE. With --channels it takes as many instead of 3.
    """
    channels = args.channels or 3
    if is_torchvisions(args.arch):
        model = build_torchvision(args.arch, channels, len(classes))
    else:
        model = build_smp(args.arch, args.encoder, channels, len(classes))
    sizes.check(lambda _: model, args.image_size, f"{args.arch} with {args.encoder}", channels)
    if weights:
        published = find_published(args.arch, args.encoder)
        args.weights = pretrained.load(
            model, weights, published, functools.partial(read_weights, args=args)
        )
    return model


def is_torchvisions(arch: str) -> bool:
    return arch in torchvision.models.list_models(module=torchvision.models.segmentation)


def build_torchvision(arch: str, channels: int, num_classes: int) -> nn.Module:
    net = torchvision.models.get_model(
        arch, num_classes=num_classes, weights=None, weights_backbone=None
    )
    return Logits(pretrained.set_channels(net, channels))


def build_smp(arch: str, encoder: str, channels: int, num_classes: int) -> nn.Module:
    try:
        model = smp.create_model(arch, encoder, None, channels, num_classes)
        return freeze_unused(model, channels)
    except (KeyError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--arch {arch} --encoder {encoder}: {reason}") from None


def find_published(arch: str, encoder: str) -> str | None:
    """Return the name of the weights that --weights auto stands for, or None."""
    if is_torchvisions(arch):
        return pretrained.published_by_torchvision(arch)
    if encoder.startswith("tu-"):  # one of timm's; its tag, if any, says which weights
        return "imagenet" if timm.is_model_pretrained(encoder[3:]) else None
    names = list(smp.encoders.encoders.get(encoder, {}).get("pretrained_settings") or ())
    return "imagenet" if "imagenet" in names else next(iter(names), None)


def read_weights(name: str, args: Namespace) -> Mapping[str, Tensor]:
    """Return the tensors of --weights `name`, an encoder's with its prefix."""
    if pretrained.is_file(name) or is_torchvisions(args.arch):
        return pretrained.read_weights(name, args.arch)
    is_timms = args.encoder.startswith("tu-")
    if is_timms:
        config = timm.get_pretrained_cfg(args.encoder[3:])
        repository = config and config.hf_hub_id
    else:
        settings = smp.encoders.encoders[args.encoder]["pretrained_settings"]
        if name not in settings:
            names = ", ".join(settings)
            raise UserError(f"--weights {name}: {args.encoder} has {names}; or name a .pt file")
        repository = settings[name].get("repo_id")
    lost = reach(repository) if repository else None
    weights = True if is_timms else name
    try:
        with torch.random.fork_rng([]):
            model = smp.create_model(args.arch, args.encoder, weights, args.channels or 3)
    except Exception as error:
        raise lost or error from None
    return {f"encoder.{key}": value for key, value in model.encoder.state_dict().items()}


def reach(repository: str) -> Exception | None:
    """Return why Hugging Face's `repository` cannot be reached; from then on only read its cache.

    huggingface_hub itself would try for minutes.
    """
    url = huggingface_hub.hf_hub_url(repository, "config.json")
    try:
        huggingface_hub.get_hf_file_metadata(url, timeout=pretrained.SECONDS)
    except Exception as error:
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        return error
    return None


def freeze_unused(model: nn.Module, channels: int) -> nn.Module:
    """Freeze the weights of `model` that its output does not depend on; return it.

    Some encoders have layers that no decoder reads; DDP would wait for their gradients.
    """
    side = 5 * STRIDE
    try:
        output, weights = sizes.forward(model, side, channels)
    except sizes.ERRORS as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"cannot take images of {side} x {side} pixels ({reason}), but validation pads images "
            f"to multiples of {STRIDE}: choose another network, or edit STRIDE in dataset.py"
        ) from None
    gradients = torch.autograd.grad(output.sum(), list(weights.values()), allow_unused=True)
    for weight, gradient in zip(model.parameters(), gradients, strict=True):
        weight.requires_grad_(gradient is not None)
    return model


def backbone(model: nn.Module) -> list[nn.Parameter]:
    """Return the encoder's weights, for --backbone-lr and --freeze-backbone."""
    encoder = model.net.backbone if isinstance(model, Logits) else model.encoder
    assert isinstance(encoder, nn.Module)
    return list(encoder.parameters())


def infer(model: nn.Module, images: Tensor, args: Namespace) -> Tensor:
    """Apply `model` in evaluation: float32 (N, 3, H, W), normalised -> logits (N, classes, H, W).

    Larger images than --tile go through one tile at a time. On the demo that changes the class of
    at most 1 pixel in 10,000 of a U-Net (tiles of 512 or more). Networks that look at the whole
    image at once (global pooling, attention, group norm: deeplab, segformer, fpn) see one tile, and
    change up to 2 in 100.
    """
    if args.tile and max(images.shape[-2:]) > args.tile:
        return tiles.whole(model.forward, images, args.tile, STRIDE)
    return model.forward(images)  # __call__ of a compiled one would compile again for each size


def build_criterion(args: Namespace) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the loss: (logits, int64 (N, H, W)) -> (sum over pixels, number of pixels).

    Sum and count, because those can be added up over batches and ranks, unlike means.
    Void pixels are in neither.
    """

    def cross_entropy(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        # reduction="sum" is not deterministic on GPUs.
        losses = nn.functional.cross_entropy(outputs, targets, ignore_index=VOID, reduction="none")
        return losses.sum(), (targets != VOID).sum()

    return cross_entropy


def build_metrics(classes: Sequence[str]) -> MetricCollection:
    """Return mean and per-class IoU over the whole set; they take (logits, int64 (N, H, W)).

    A class in neither labels nor predictions is NaN and left out of the mean. The confusion matrix
    is for per_class.csv and confusion.png, not for metrics.csv.
    """
    count = len(classes)
    mean = MulticlassJaccardIndex(count, ignore_index=VOID)
    each = MulticlassJaccardIndex(
        count, ignore_index=VOID, average="none", zero_division=float("nan")
    )
    metrics: dict[str, Metric | MetricCollection] = {
        "miou": mean,
        "iou": ClasswiseWrapper(each, list(classes), "iou_"),
        # All three share their counts. Sorted by name a wrapper has to come first of those that do.
        "matrix": MulticlassConfusionMatrix(count, ignore_index=VOID),
    }
    return MetricCollection(metrics)
