"""The dataset: images and their masks, and the augmentation. README.md describes folders."""

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
# ImageNet's. Images are uint8 until they are on the device, where main.py's loop gets
# them normalised by these, unless DIR/data.json has its own.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
draw_demo = functools.partial(ddpkit.demo_set, masks=True)  # without --data
AUGMENTATIONS = {  # the names that --augment takes; add yours, if it takes masks, too
    "color": v2.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4),
    "grey": v2.RandomGrayscale(p=0.1),
    "rotation": v2.RandomRotation(  # degrees
        (-30, 30), Mode.BILINEAR, fill={tv_tensors.Mask: VOID, "others": 0}
    ),
    "vflip": v2.RandomVerticalFlip(),
}


def train_transform(
    size: int, augment: Sequence[v2.Transform], hflip: float
) -> v2.Compose:
    """For training: image and mask -> uint8 (3, size, size), tv_tensors.Mask (size, size).

    augment: what --augment names. With "channels" in data.json it gets float32, 0 to 1.
    hflip: how likely they are mirrored.
    """
    return v2.Compose(  # of image and mask: each transform does the same to both
        [
            # Resizes by a random factor and crops, but a JPEG is decoded no larger than
            # that needs. First, for it makes the mask a tv_tensors.Mask, whose class
            # numbers the others do not average.
            ddpkit.RandomScaleCrop(size, scale=(0.7, 1.4), mask_fill=VOID),
            v2.RandomHorizontalFlip(hflip),
            *augment,
        ]
    )


def val_transform(
    image: ddpkit.LazyImage, mask: ddpkit.LazyImage
) -> tuple[Tensor, Tensor]:
    """Return image and mask at their own size, padded to multiples of STRIDE."""
    pixels = pad(image.read(), 0)
    labels = pad(mask.read(), VOID)
    return pixels, labels


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
    """Return the datasets for training and for validation, and the names of the classes.

    Any map-style dataset of (image, mask) will do, such as one of torchvision's: images uint8,
    normalised on the device by ImageNet's numbers, or floats, taken as they are; for validation
    padded as `pad` does.
    """
    with ddpkit.rank_zero_first():  # the other ranks find it drawn
        data = args.data or draw_demo()
    train, val, classes = ddpkit.find_masks(
        data, args.fold, args.eval_only or "val", MEAN, STD
    )
    augment = ddpkit.parse_augment(AUGMENTATIONS, args.augment, train.format.channels)
    train_set = SegmentationDataset(
        train, train_transform(args.image_size, augment, args.hflip)
    )
    val_set = SegmentationDataset(val, val_transform)
    return train_set, val_set, classes


def transform_batch(
    images: Tensor, targets: Tensor, args: Namespace, num_classes: int
) -> tuple[Tensor, Tensor]:
    """Augment a training batch on its device, where images are float32 and normalised."""
    if args.cutmix:
        cutmix = v2.CutMix(alpha=args.cutmix)
        x1, y1, x2, y2 = cutmix.make_params([images])["box"]
        for part in images, targets:
            box = part[..., y1:y2, x1:x2]
            box.copy_(box.roll(1, 0))  # that of the image before it in the batch
    return images, targets


def draw_example(
    axes: Any, image: Tensor, target: Tensor, logits: Tensor, classes: Sequence[str]
) -> None:
    """Draw one image, its prediction and its true mask side by side on matplotlib `axes`.

    image: uint8 (3, H, W). target: uint8 (H, W). logits: float (classes, H, W).
    """
    predicted = logits.argmax(0).byte()
    ddpkit.draw_masks(axes, image, predicted, target, classes)
