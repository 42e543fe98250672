"""Decoded images in one file that is mapped into memory."""

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
        self.pixels = np.memmap(path, np.uint8, "r")

    def __reduce__(self) -> tuple:  # pickled without the pixels, for workers that are not forked
        return Images, (self.path, self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> tuple[LazyImage, ...]:
        return tuple(map(self._image, self.rows[index]))

    def _image(self, row: np.ndarray) -> LazyImage:
        pixels = self.pixels[row[0] : ends(row)]
        return LazyImage.of(pixels.reshape(row[1:] if row[3] else row[1:3]))


def ends(rows: np.ndarray) -> np.ndarray:
    """Return where the images of `rows` (..., 4) end in pixels.bin: (...)."""
    return rows[..., 0] + rows[..., 1] * rows[..., 2] * np.maximum(rows[..., 3], 1)
