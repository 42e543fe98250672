"""Decoded images in one file that is mapped into memory."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.data.images import LazyImage


class Images(Sequence):
    """The images of each sample, mapped from the file `path`. rows: int64 (samples, each, 4)."""

    def __init__(self, path: Path, rows: np.ndarray) -> None:
        self.path = path
        self.rows = rows
        self.pixels = np.asarray(np.memmap(path, np.uint8, "r"))  # slices are made faster so

    def __reduce__(self) -> tuple:  # pickled without the pixels, for workers that are not forked
        return Images, (self.path, self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> tuple[LazyImage, ...]:
        return tuple(map(self._image, self.rows[index].tolist()))

    def _image(self, row: Sequence[int]) -> LazyImage:
        start, *shape = row if row[3] else row[:3]
        return LazyImage.of(self.pixels[start : start + math.prod(shape)].reshape(shape))


def ends(rows: np.ndarray) -> np.ndarray:
    """Return where the images of `rows` (..., 4) end in pixels.bin: (...)."""
    return rows[..., 0] + rows[..., 1] * rows[..., 2] * np.maximum(rows[..., 3], 1)
