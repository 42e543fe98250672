"""How image files become pixels, and pixels what the network gets: DIR/data.json."""

import functools
import itertools
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, tensor

from ddpkit import files
from ddpkit.errors import UserError

NAME = "data.json"
VOID = 255  # the class number of pixels without a label
EXAMPLE = '{"channels": 1, "value_range": [0, 9], "mean": [1], "std": [1], "max_megapixels": 9}'
# ImageNet's channel means and deviations, in RGB order and units of 0..1: what the
# pretrained weights of torchvision and segmentation-models-pytorch expect.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Format:
    """The keys of data.json.

    value_range: which values become 0 and 255 in images of more than 8 bits; None: 0 to 65535 for
    16 bits, 0 to 1 for floats, and images that would be nearly black are refused.
    max_megapixels: larger images are refused, because a small file may claim any size.
    channels: None for RGB of 8 bits; with a number images have their files' full depth, as float32.
    mean, std: of each channel, in units of 0..1; None: ImageNet's.
    """

    value_range: Sequence[float] | None = None
    max_megapixels: int = 179
    channels: int | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None

    @functools.cached_property  # asked for at every step
    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of each channel; a UserError if they are not known."""
        count = self.channels or 3
        if count not in (1, 3) and not (self.mean and self.std):
            raise UserError(
                f'{NAME}: "channels": {count} needs "mean" and "std", {count} numbers '
                "each; python -m ddpkit check DIR --write adds them"
            )
        known = self.or_else(MEAN, STD)
        return tuple(known.mean or ()), tuple(known.std or ())

    def or_else(self, mean: Sequence[float], std: Sequence[float]) -> "Format":
        """Return it with these numbers, MEAN and STD of dataset.py, where it has none of its own.

        A UserError if they cannot be meant. Of RGB with one channel the mean is taken; with other
        channels `statistics` says what is missing.
        """
        count = self.channels or 3
        found: dict[str, Any] = {}
        for name, values in ("mean", mean), ("std", std):
            if getattr(self, name):  # data.json has it
                continue
            if len(values) == 3 and count == 1:
                values = (sum(values) / 3,)
            # of RGB, and not meant, if the images have other channels: left out below
            is_right = len(values) == count or count != 3
            is_right &= all(map(math.isfinite, values))
            if not is_right or (name == "std" and min(values) <= 0):
                raise UserError(
                    f"{name.upper()} in dataset.py: {tuple(values)}: give {count} numbers, for "
                    "values from 0 to 1"
                )
            if len(values) == count:
                found[name] = tuple(values)
        return replace(self, **found)

    @property
    def scale(self) -> tuple:
        """What decides which number the network gets for a value in a file."""
        return self.channels, self.value_range, self.statistics

    def normalize(self, image: Tensor) -> Tensor:
        """Return a float image, 0 to 1, with about zero mean and unit deviation; uint8 as it is."""
        if not self.channels:
            return image
        mean, std = tensor(self.statistics).view(2, -1, 1, 1)
        return (image - mean) / std

    def check_size(self, path: str, size: tuple[int, int]) -> None:
        """Raise a UserError if an image of that width and height is larger than allowed."""
        width, height = size
        if width * height > self.max_megapixels * 1e6:
            raise UserError(
                f"{path}: {width} x {height} pixels exceed max_megapixels, {self.max_megapixels}; "
                f'downscale it, or write "max_megapixels": {math.ceil(width * height / 1e6)} into '
                f"{NAME}"
            )

    def keys(self) -> dict[str, object]:
        """Return what data.json has to say, without defaults."""
        defaults = asdict(DEFAULT_FORMAT).items()
        return {k: v for k, v in asdict(self).items() if (k, v) not in defaults}


DEFAULT_FORMAT = Format()


def parse_keys(found: dict[str, Any]) -> Format:
    """Return the keys as a Format; a ValueError, or what Python raises, if they cannot be meant."""
    for name, value in found.items():
        if isinstance(value, list):
            found[name] = tuple(value)  # as the defaults, with which it is compared
    format = Format(**found)
    # what is not given stands for something right
    low, high = format.value_range or (0, 1)
    count = format.channels or 3
    usual = (0.5,) * min(count, 2**16)  # a file may name any number
    mean = usual if format.mean is None else format.mean
    std = usual if format.std is None else format.std
    is_right = len(mean) == len(std) == count and low < high and min(std) > 0
    numbers = itertools.chain([low, high, format.max_megapixels], mean, std)
    if not is_right or not all(map(math.isfinite, numbers)):
        raise ValueError("a wrong number or order of numbers")
    return format


def read_format(folder: Path) -> Format:
    """Return what `folder`/data.json says, the defaults without it; a UserError names a mistake."""
    path = folder / NAME
    if not os.path.lexists(path):
        return DEFAULT_FORMAT
    what = f"JSON such as {EXAMPLE}"
    return files.parse(path, lambda content: parse_keys(json.loads(content)), what)


def write_format(folder: Path, format: Format) -> None:
    """Write `folder`/data.json; remove it if `format` is the default."""
    path = folder / NAME
    if not format.keys():
        path.unlink(missing_ok=True)
        return
    with files.writing(path) as tmp_path:
        tmp_path.write_text(json.dumps(format.keys()) + "\n", "utf-8")
