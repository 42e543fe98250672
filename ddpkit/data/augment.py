"""Crops that read only what they need of an image file, and which augmentation --augment names."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from ddpkit.data.images import Box, LazyImage
from ddpkit.data.samples import as_tensor
from ddpkit.errors import UserError

OF_COLORS = (v2.TrivialAugmentWide, v2.RandAugment, v2.ColorJitter, v2.RandomGrayscale)
TRIES = 10  # at a part that fits into the image, as torchvision


class Crop:
    """What the crops share: a part of an image, and the same one of its masks.

    They take a LazyImage, of which a JPEG is decoded no larger than the result needs, or a PIL
    image, an array or a tensor; and masks after it. Return uint8 (3, size, size), and masks as
    tv_tensors.Mask (size, size).
    """

    mask_fill = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def place(self, height: int, width: int) -> Box:
        """Return the part of an image of that size: top, left, height, width."""
        raise NotImplementedError

    def __call__(self, image: Any, *masks: Any) -> Tensor | tuple[Tensor, ...]:
        image, *others = _lazy(image), *(_lazy(mask, is_mask=True) for mask in masks)
        box, size = self.place(image.height, image.width), (self.size, self.size)
        pixels = image.read(box, size)
        if not others:
            return pixels
        return pixels, *(
            tv_tensors.Mask(mask.read(box, size, self.mask_fill)) for mask in others
        )


class RandomResizedCrop(Crop):
    """torchvision's v2.RandomResizedCrop, which reads only that part of an image file, in its size.

    size: the side of the result. scale: the range of the part's share of the image. ratio: that of
    its width / height.

        v2.Compose([ddpkit.RandomResizedCrop(224, scale=(0.25, 1)), v2.RandomHorizontalFlip()])
    """

    def __init__(
        self,
        size: int,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
    ) -> None:
        super().__init__(size)
        self.scale, self.ratio = scale, ratio

    def place(self, height: int, width: int) -> Box:
        low, high = self.scale
        narrow, wide = self.ratio
        for _ in range(TRIES):
            share, shape, down, right = torch.rand(4).tolist()
            area = height * width * (low + share * (high - low))
            aspect = narrow * (wide / narrow) ** shape
            rows, columns = (
                round(math.sqrt(area / aspect)),
                round(math.sqrt(area * aspect)),
            )
            if 0 < rows <= height and 0 < columns <= width:
                top = int(down * (height - rows + 1))
                left = int(right * (width - columns + 1))
                return top, left, rows, columns
        rows, columns = (
            min(height, round(width / narrow)),
            min(width, round(height * wide)),
        )
        return (height - rows) // 2, (width - columns) // 2, rows, columns


class RandomScaleCrop(Crop):
    """A part of a random place, of an image and its mask that are resized by a random factor.

    As v2.RandomResize and v2.RandomCrop(size, pad_if_needed=True), but reads only that part.
    size: the side of the result. scale: the range of the factor, whose logarithm is uniform.
    mask_fill: of masks, where a smaller image ends; the image is black there.

        v2.Compose([ddpkit.RandomScaleCrop(512, scale=(0.5, 2), mask_fill=255), ...])
    """

    def __init__(
        self, size: int, scale: tuple[float, float] = (0.5, 2.0), mask_fill: int = 0
    ) -> None:
        super().__init__(size)
        self.scale, self.mask_fill = scale, mask_fill

    def place(self, height: int, width: int) -> Box:
        low, high = self.scale
        power, down, right = torch.rand(3).tolist()
        side = round(self.size / (low * (high / low) ** power))

        def begin(length: int, share: float) -> int:
            return min(0, length - side) + int(share * (abs(length - side) + 1))

        return begin(height, down), begin(width, right), side, side


class ResizedCenterCrop(Crop):
    """The middle of an image: `crop`, as a share of the shorter side, resized to `size`.

    As v2.Resize(size / crop) and v2.CenterCrop(size), but reads only that part.

        v2.Compose([ddpkit.ResizedCenterCrop(224, crop=0.875)])
    """

    def __init__(self, size: int, crop: float = 0.875) -> None:
        super().__init__(size)
        self.crop = crop

    def place(self, height: int, width: int) -> Box:
        side = round(self.crop * min(height, width))
        return (height - side) // 2, (width - side) // 2, side, side


def _lazy(part: Any, is_mask: bool = False) -> LazyImage:
    if isinstance(part, LazyImage):
        return part
    if is_mask:
        numbers = np.asarray(part).squeeze()
        if numbers.dtype != np.uint8 and (numbers.min() < 0 or numbers.max() > 255):
            line = f"a mask of {numbers.dtype} has numbers from {numbers.min()} to {numbers.max()}"
            raise UserError(
                f"{line}: use class numbers from 0, and 255 where there is no label"
            )
        return LazyImage.of(numbers.astype(np.uint8, copy=False))
    pixels = as_tensor(part, is_image=True)
    return LazyImage.of(pixels.movedim(0, -1).numpy())


def parse_augment(
    table: Mapping[str, v2.Transform],
    text: str,
    channels: int | None,
    others: Collection[str] = (),
) -> list[v2.Transform]:
    """Return those of `table` that `text` names, A,B,..., in that order.

    channels: of the images, if they are not RGB. others: names in `text` that are for other code.

    Raises a UserError for an unknown name, or one that does not take so many channels.

        augment = ddpkit.parse_augment({"vflip": v2.RandomVerticalFlip()}, args.augment, None)
    """
    names = [name for name in text.split(",") if name and name not in others]
    for name in names:
        if name not in table:
            raise UserError(
                f"--augment {name}: is none of {', '.join([*table, *others])}"
            )
        if isinstance(table[name], OF_COLORS) and channels not in (None, 1, 3):
            raise UserError(f"--augment {name}: takes 1 or 3 channels, not {channels}")
    return [table[name] for name in names]
