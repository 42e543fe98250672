"""Crops that read only what they need of an image file, and which augmentation --augment names."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from ddpkit.data.samples import as_tensor
from ddpkit.errors import UserError, suggest
from ddpkit.vision.images import Box, LazyImage

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
        image = _lazy(image)
        box = self.place(image.height, image.width)
        size = (self.size, self.size)
        results = [image.read(box, size)]
        for mask in masks:
            part = _lazy(mask, is_mask=True).read(box, size, self.mask_fill)
            results.append(tv_tensors.Mask(part))
        return tuple(results) if masks else results[0]


class RandomResizedCrop(Crop):
    """torchvision's v2.RandomResizedCrop, which reads only that part of an image file, in its size.

    size: the side of the result. scale: the range of the part's share of the image; (1, 1): all of
    it, squeezed to a square. ratio: that of its width / height.

        v2.Compose([ddpkit.RandomResizedCrop(224, scale=(0.25, 1)), v2.RandomHorizontalFlip()])
    """

    def __init__(
        self,
        size: int,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
    ) -> None:
        super().__init__(size)
        self.scale = scale
        self.ratio = ratio

    def place(self, height: int, width: int) -> Box:
        low, high = self.scale
        if low == 1:
            return 0, 0, height, width
        narrow, wide = self.ratio
        for _ in range(TRIES):
            share, shape, down, right = torch.rand(4).tolist()
            area = height * width * (low + share * (high - low))
            aspect = narrow * (wide / narrow) ** shape  # its logarithm is uniform
            rows = round(math.sqrt(area / aspect))
            columns = round(math.sqrt(area * aspect))
            if 0 < rows <= height and 0 < columns <= width:
                top = int(down * (height - rows + 1))
                left = int(right * (width - columns + 1))
                return top, left, rows, columns
        # the largest part in the middle that `ratio` allows
        rows = min(height, round(width / narrow))
        columns = min(width, round(height * wide))
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
        self.scale = scale
        self.mask_fill = mask_fill

    def place(self, height: int, width: int) -> Box:
        low, high = self.scale
        power, down, right = torch.rand(3).tolist()
        side = round(self.size / (low * (high / low) ** power))
        top = self._draw_start(height - side, down)
        left = self._draw_start(width - side, right)
        return top, left, side, side

    def _draw_start(self, room: int, share: float) -> int:
        """Return a place anywhere within a larger image; around a smaller one."""
        return min(0, room) + int(share * (abs(room) + 1))


class ResizedCenterCrop(Crop):
    """The middle of an image: `crop`, as a share of the shorter side, resized to `size`.

    None: the whole image, squeezed to a square.

    As v2.Resize(size / crop) and v2.CenterCrop(size), but reads only that part.

    Raises a UserError for a share of 0 or less, or above 1.

        v2.Compose([ddpkit.ResizedCenterCrop(224, crop=0.875)])
    """

    def __init__(self, size: int, crop: float | None = 0.875) -> None:
        super().__init__(size)
        if crop is not None and not 0 < crop <= 1:
            raise UserError(f"crop {crop}: use a fraction above 0, and at most 1")
        self.crop = crop

    def place(self, height: int, width: int) -> Box:
        if not self.crop:
            return 0, 0, height, width
        side = round(self.crop * min(height, width))
        return (height - side) // 2, (width - side) // 2, side, side


def _lazy(part: Any, is_mask: bool = False) -> LazyImage:
    if isinstance(part, LazyImage):
        return part
    if is_mask:
        numbers = np.asarray(part).squeeze()
        if numbers.dtype != np.uint8 and (numbers.min() < 0 or numbers.max() > 255):
            raise UserError(
                f"a mask of {numbers.dtype} has values from {numbers.min()} to {numbers.max()}: "
                "use class numbers from 0, and 255 for void"
            )
        return LazyImage.of(numbers.astype(np.uint8, copy=False))
    pixels = as_tensor(part, is_image=True)  # (C, H, W)
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
    transforms = []
    for name in text.split(","):
        if not name or name in others:
            continue
        if name not in table:
            known = list(table) + list(others)
            near = suggest(name, known)
            names = ", ".join(known)
            raise UserError(f"--augment {name}: unknown; choose from {names}{near}")
        if isinstance(table[name], OF_COLORS) and channels not in (None, 1, 3):
            raise UserError(f"--augment {name}: takes 1 or 3 channels, not {channels}")
        transforms.append(table[name])
    return transforms
