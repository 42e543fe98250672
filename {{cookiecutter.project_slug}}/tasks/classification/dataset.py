"""The dataset: images and their classes, and the augmentation. README.md describes folders."""

import itertools
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import InterpolationMode as Mode

import ddp
import ddpkit

# ImageNet's. Images are uint8 until they are on the device, where main.py's loop gets
# them normalised by these, unless DIR/data.json or the network of --arch timm/NAME has
# its own.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
draw_demo = ddpkit.demo_set  # without --data
AUGMENTATIONS = {  # the names that --augment takes; add yours
    "trivial": v2.TrivialAugmentWide(interpolation=Mode.BILINEAR),  # arXiv:2103.10158
    "rand": v2.RandAugment(interpolation=Mode.BILINEAR),  # arXiv:1909.13719
    "color": v2.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4),
    "grey": v2.RandomGrayscale(p=0.1),
    "rotation": v2.RandomRotation((-30, 30), Mode.BILINEAR),  # degrees
    "vflip": v2.RandomVerticalFlip(),
    "erasing": v2.RandomErasing(p=0.25),  # arXiv:1708.04896; in black
}
# Names, too, of what mixes the images and labels of a batch, by alpha;
# arXiv:1710.09412, 1905.04899
MIXES = {"mixup": (v2.MixUp, 0.2), "cutmix": (v2.CutMix, 1.0)}


def train_transform(
    size: int, augment: Sequence[v2.Transform], scale: float, hflip: float
) -> v2.Compose:
    """For training: an image of any size -> uint8 (3, size, size).

    augment: what --augment names. With "channels" in data.json it gets float32, 0 to 1.
    scale: the least share of the image that a crop has; 1: all of it, squeezed to a square.
    hflip: how likely an image is mirrored.
    """
    return v2.Compose(
        [
            # As v2's, but a JPEG is decoded no larger than the result needs: much
            # faster.
            ddpkit.RandomResizedCrop(size, scale=(scale, 1)),
            v2.RandomHorizontalFlip(hflip),
            *augment,
        ]
    )


def val_transform(size: int, crop: float | None) -> v2.Compose:
    """For validation and predict.py: an image of any size -> uint8 (3, size, size).

    crop: the side of the middle, as a share of the image's shorter one; None: the whole image,
    squeezed to a square.
    """
    return v2.Compose([ddpkit.ResizedCenterCrop(size, crop)])


class ImageDataset(ddpkit.ImageFiles):
    """Images with their class numbers. A sample is (uint8 (3, size, size), int).

    If images have several labels, these are float32 (classes,), 0 or 1. With "channels" in
    data.json the image is float32 (channels, size, size), normalised.
    """

    def __getitem__(self, index: int) -> tuple[Tensor, int | Tensor]:
        (image,) = self.open(index)
        return self.format.normalize(self.transform(image)), self.label(index)


def build_datasets(args: Namespace) -> tuple[ImageDataset, ImageDataset, Sequence[str]]:
    """Return training and validation datasets and class names; set several_labels, crop of args.

    Any map-style dataset of (image, label) will do, such as torchvision's CIFAR10, which has
    `classes`: images uint8, normalised on the device by ImageNet's numbers, or floats, taken as
    they are.
    """
    with ddpkit.rank_zero_first():  # the other ranks find it drawn
        data = args.data or draw_demo()
    train, val, classes = ddpkit.find_classes(
        data, args.fold, args.eval_only or "val", args.arch, MEAN, STD
    )
    # What the data and the network say; model.py and, from the checkpoint, predict.py
    # need it.
    args.several_labels = train.several
    args.crop = args.crop_pct  # None: the whole image, as in training
    if not args.crop and args.crop_scale < 1:
        args.crop = train.crop
    augment = ddpkit.parse_augment(
        AUGMENTATIONS, args.augment, train.format.channels, MIXES
    )
    train_set = ImageDataset(
        train, train_transform(args.image_size, augment, args.crop_scale, args.hflip)
    )
    val_set = ImageDataset(val, val_transform(args.image_size, args.crop))
    return train_set, val_set, classes


def transform_batch(
    images: Tensor, targets: Tensor, args: Namespace, num_classes: int
) -> tuple[Tensor, Tensor]:
    """Augment a training batch on its device, where images are float32 and normalised.

    With MIXES, of which each batch gets one, targets become float32 (N, classes): the share of
    each class.
    """
    mixes = [
        mix(alpha=alpha, num_classes=num_classes)
        for name, (mix, alpha) in MIXES.items()
        if name in args.augment.split(",")
    ]
    if mixes:
        images, targets = v2.RandomChoice(mixes)(images, targets)
        # which MixUp loses on GPUs
        layout = ddp.memory_layout(images.device)
        images = images.contiguous(memory_format=layout)
    return images, targets


def draw_example(
    axes: Any, image: Tensor, target: Tensor, logits: Tensor, classes: Sequence[str]
) -> None:
    """Draw one image with its prediction and its true class on matplotlib `axes`.

    image: uint8 (3, H, W). target: int64 scalar, or float (classes,). logits: float (classes,);
    of a regression one number each.
    """
    if logits.numel() == 1:  # a regression
        title = guess = f"{logits.item():.4g}"
        truth = f"{target.item():.4g}"
    elif target.ndim:  # several labels
        title = guess = "; ".join(itertools.compress(classes, logits > 0)) or "none"
        truth = "; ".join(itertools.compress(classes, target > 0.5)) or "none"
    else:
        guess = classes[int(logits.argmax())]
        truth = classes[int(target)]
        title = f"{guess} {torch.softmax(logits, 0).max():.0%}"
    color = "green"
    if guess != truth:
        color = "red"
        title = f"predicted {title}\nlabel {truth}"
    axes.imshow(image.permute(1, 2, 0).numpy())
    axes.set_title(title, color=color, fontsize=9)
