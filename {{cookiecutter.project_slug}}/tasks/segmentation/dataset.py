"""The data set: images and their masks, and the augmentation. README.md describes folders."""

import functools
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import InterpolationMode as Mode

import ddpkit

STRIDE = 32  # the networks halve an image five times
VOID = 255  # the class number that loss and metrics ignore
draw_demo = ddpkit.demo_masks  # without --data
AUGMENTATIONS = {  # the names that --augment takes; add yours, if it takes masks, too
    "color": v2.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4),
    "grey": v2.RandomGrayscale(p=0.1),
    "rotation": v2.RandomRotation(  # degrees; None: black
        (-30, 30), Mode.BILINEAR, fill={tv_tensors.Image: None, tv_tensors.Mask: VOID}
    ),
    "vflip": v2.RandomVerticalFlip(),
}


def train_transform(
    image: ddpkit.LazyImage, mask: ddpkit.LazyImage, size: int, augment: v2.Transform | None = None
) -> tuple[Tensor, Tensor]:
    """Augment: image and mask of any size -> both of `size` x `size` pixels. Edit it here.

    The image is decoded no larger than the result needs. `augment` is what --augment names, on
    uint8 (with "channels" in data.json: float32, 0 to 1).
    """
    zoom = 2 ** float(torch.empty(1).uniform_(-0.5, 0.5))
    side = round(size / zoom)
    box = image.snap(image.random_square(side), (size, size))
    pixels, labels = image.read(box, (size, size)), mask.read(box, (size, size), fill=VOID)
    if torch.rand(()) < 0.5:
        pixels, labels = pixels.flip(-1), labels.flip(-1)
    if augment:
        pixels, labels = augment(tv_tensors.Image(pixels), tv_tensors.Mask(labels))
    return pixels, labels


def val_transform(image: ddpkit.LazyImage, mask: ddpkit.LazyImage) -> tuple[Tensor, Tensor]:
    """Return image and mask at their own size, padded to multiples of STRIDE."""
    return pad(image.read(), 0), pad(mask.read(), VOID)


def pad(pixels: Tensor, fill: int) -> Tensor:
    """Return `pixels` (..., H, W), padded at the right and below to multiples of STRIDE."""
    height, width = pixels.shape[-2:]
    edges = (0, -width % STRIDE, 0, -height % STRIDE)
    return torch.nn.functional.pad(pixels, edges, value=fill)


class SegmentationDataset(ddpkit.MaskFiles):
    """Images with their masks. A sample is (uint8 (3, H, W), uint8 (H, W)).

    With "channels" in data.json the image is float32 (channels, H, W), normalised.
    """

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        pixels, labels = self.transform(*self.open(index))
        return self.format.normalize(pixels), labels


def build_datasets(
    args: Namespace,
) -> tuple[SegmentationDataset, SegmentationDataset, Sequence[str]]:
    """Return the data sets for training and for validation, and the names of the classes.

    Any map-style data set of (image, mask) will do, such as one of torchvision's: images uint8,
    normalised on the device, or floats, taken as they are; for validation padded as `pad` does.
    """
    with ddpkit.rank_zero_first():  # the other ranks find it drawn
        data = args.data or draw_demo()
    train, val, classes = ddpkit.find_masks(data, args.fold, args.eval_only or "val")
    augment = ddpkit.choose(AUGMENTATIONS, args.augment, train.format.channels)
    crop = functools.partial(train_transform, size=args.image_size, augment=augment)
    return SegmentationDataset(train, crop), SegmentationDataset(val, val_transform), classes


def transform_batch(
    images: Tensor, targets: Tensor, args: Namespace, num_classes: int
) -> tuple[Tensor, Tensor]:
    """Augment a training batch on its device, where images are float32 and normalised."""
    if args.cutmix:
        x1, y1, x2, y2 = v2.CutMix(alpha=args.cutmix).make_params([images])["box"]
        for part in images, targets:
            part[..., y1:y2, x1:x2] = part[..., y1:y2, x1:x2].roll(1, 0)
    return images, targets


def draw_example(
    axes: Any, image: Tensor, target: Tensor, logits: Tensor, classes: Sequence[str]
) -> None:
    """Draw one image, its prediction and its true mask side by side on matplotlib `axes`.

    image: uint8 (3, H, W). target: uint8 (H, W). logits: float (classes, H, W).
    """
    ddpkit.draw_masks(axes, image, logits.argmax(0).byte(), target, classes)
