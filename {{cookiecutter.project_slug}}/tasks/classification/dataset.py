"""The data set: images and their classes, and the augmentation. README.md describes folders."""

import functools
import itertools
import random
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import InterpolationMode as Mode

import ddpkit

draw_demo = ddpkit.demo_classes  # without --data
AUGMENTATIONS = {  # the names that --augment takes; add yours
    "trivial": v2.TrivialAugmentWide(interpolation=Mode.BILINEAR),  # arXiv:2103.10158
    "rand": v2.RandAugment(interpolation=Mode.BILINEAR),  # arXiv:1909.13719
    "color": v2.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4),
    "grey": v2.RandomGrayscale(p=0.1),
    "rotation": v2.RandomRotation((-30, 30), Mode.BILINEAR),  # degrees
    "vflip": v2.RandomVerticalFlip(),
    "erasing": v2.RandomErasing(p=0.25),  # arXiv:1708.04896; in black
}
# Names, too, of what mixes the images and labels of a batch, by alpha; arXiv:1710.09412, 1905.04899
MIXES = {"mixup": (v2.MixUp, 0.2), "cutmix": (v2.CutMix, 1.0)}


def train_transform(
    image: ddpkit.LazyImage, size: int, augment: v2.Transform | None = None
) -> Tensor:
    """Augment: an image of any size -> uint8 (3, size, size). Edit it here.

    The image is decoded no larger than the result needs. `augment` is what --augment names, on
    uint8 (with "channels" in data.json: float32, 0 to 1).
    """
    box = image.random_box(area=(0.25, 1), ratio=(3 / 4, 4 / 3))
    pixels = image.read(box, (size, size))
    pixels = pixels.flip(-1) if random.random() < 0.5 else pixels
    return augment(pixels) if augment else pixels


def val_transform(image: ddpkit.LazyImage, size: int, crop: float = 0.875) -> Tensor:
    """Return the middle of the image, uint8 (3, size, size), for validation and predict.py.

    crop: the side of the middle, as a share of the image's shorter one.
    """
    side = round(crop * min(image.height, image.width))
    box = ((image.height - side) // 2, (image.width - side) // 2, side, side)
    return image.read(box, (size, size))


class ImageDataset(ddpkit.ImageFiles):
    """Images with their class numbers. A sample is (uint8 (3, size, size), int).

    If images have several labels, these are float32 (classes,), 0 or 1. With "channels" in
    data.json the image is float32 (channels, size, size), normalised.
    """

    def __getitem__(self, index: int) -> tuple[Tensor, int | Tensor]:
        (image,) = self.open(index)
        return self.format.normalize(self.transform(image)), self.label(index)


def build_datasets(args: Namespace) -> tuple[ImageDataset, ImageDataset, Sequence[str]]:
    """Return the data sets for training and for validation, and the names of the classes.

    Any map-style data set of (image, label) will do, such as torchvision's CIFAR10, which has
    `classes`: images uint8, normalised on the device, or floats, taken as they are.
    """
    with ddpkit.rank_zero_first():  # the other ranks find it drawn
        data = args.data or draw_demo()
    held = args.eval_only or "val"
    train, val, classes = ddpkit.find_classes(data, args.fold, held, args.arch)
    args.several_labels, args.crop = train.several, train.crop  # predict.py finds them, too
    augment = ddpkit.choose(AUGMENTATIONS, args.augment, train.format.channels, MIXES)
    box = functools.partial(train_transform, size=args.image_size, augment=augment)
    middle = functools.partial(val_transform, size=args.image_size, crop=args.crop)
    return ImageDataset(train, box), ImageDataset(val, middle), classes


def transform_batch(
    images: Tensor, targets: Tensor, args: Namespace, num_classes: int
) -> tuple[Tensor, Tensor]:
    """Augment a training batch on its device, where images are float32 and normalised.

    With MIXES, of which each batch gets one, targets become float32 (N, classes): the share of
    each class.
    """
    found = [mix for name, mix in MIXES.items() if name in args.augment.split(",")]
    if mixes := [mix(alpha=alpha, num_classes=num_classes) for mix, alpha in found]:
        images, targets = v2.RandomChoice(mixes)(images, targets)
        images = images.contiguous(memory_format=torch.channels_last)  # which MixUp loses on GPUs
    return images, targets


def draw_example(
    axes: Any, image: Tensor, target: Tensor, logits: Tensor, classes: Sequence[str]
) -> None:
    """Draw one image with its prediction and its true class on matplotlib `axes`.

    image: uint8 (3, H, W). target: int64 scalar, or float (classes,). logits: float (classes,).
    """
    more = ""
    if target.ndim:  # several labels
        both = (itertools.compress(classes, each) for each in (logits > 0, target > 0.5))
        guess, truth = ("; ".join(names) or "none" for names in both)
    else:
        guess, truth = classes[int(logits.argmax())], classes[int(target)]
        more = f" {torch.softmax(logits, 0).max():.0%}"
    axes.imshow(image.permute(1, 2, 0).numpy())
    axes.set_title(
        guess + more + ("" if guess == truth else f"\nis {truth}"),
        color="green" if guess == truth else "red",
        fontsize=9,
    )
