"""A data set decoded once, by python -m ddpkit prepare: its images in one file, and its index.

FOLDER/pixels.bin   uint8 (H, W, 3) of images and (H, W) of masks, one after the other
FOLDER/rows.bin     for each of them int64: offset in bytes, height, width, channels (0: a mask)
FOLDER/index.json   what it is made of, as `describe` returns it
FOLDER/data.json    that of the data set, if it has one
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddpkit.data.format import NAME, Format, read_format
from ddpkit.data.images import LazyImage
from ddpkit.errors import UserError
from ddpkit.ranks import distributed

Part = tuple[list[tuple], "Images"]  # samples, which begin with so many paths, and their images


class Images(Sequence):
    """The images of each sample, mapped from the file `path`. rows: int64 (samples, each, 4)."""

    def __init__(self, path: Path, rows: np.ndarray) -> None:
        self.path, self.rows = path, rows
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


def describe(
    source: Path, side: int, format: Format, classes: Sequence[str], parts: list, each: int
) -> dict:
    """Return what a store is made of: train and val hold [sample, [size, time] of `each` file]."""

    def stat(path: str) -> tuple[int, int] | None:
        found = os.stat(path) if os.path.exists(path) else None
        return found and (found.st_size, found.st_mtime_ns)

    train, val = ([(s, [*map(stat, s[:each])]) for s in part] for part in parts)
    lines = getattr(classes, "lines", classes)  # of masks.py: with the values they stand for
    found = {"source": str(source), "side": side, "format": format.keys()}
    # With lists for tuples, as it is read.
    return json.loads(json.dumps({**found, "classes": lines, "train": train, "val": val}))


def is_store(folder: Path) -> bool:
    """Return whether the command has made `folder`."""
    return (folder / "index.json").is_file() and (folder / "pixels.bin").is_file()


def read(folder: Path) -> tuple[dict, np.ndarray] | None:
    """Return index.json and the rows, int64 (samples, each, 4); None if they are not complete."""
    try:
        index = json.loads((folder / "index.json").read_text())
        samples = len(index["train"]) + len(index["val"])
        rows = np.fromfile(folder / "rows.bin", np.int64).reshape(samples, -1, 4)
        start, height, width, channels = rows[-1, -1].tolist()
        end = start + height * width * max(channels, 1)
        return (index, rows) if os.path.getsize(folder / "pixels.bin") == end else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def open_store(
    folder: Path, find_samples: Callable[[Path], tuple], each: int, format: Format
) -> tuple[Part, Part, list[str]] | None:
    """Return what the command stored in `folder`, and the classes; None if it has made none.

    find_samples: lists the source's samples for training and for validation, and the classes, if
    the images do not tell them. Raises a UserError if it is incomplete or the source has changed.
    """
    if not is_store(folder):
        return None
    index, rows = read(folder) or ({}, np.empty((0, 0, 4)))
    if rows.shape[1] != each:
        raise UserError(f"{folder}: incomplete, or made for another task; prepare it anew")
    if index.get("format") != json.loads(json.dumps(format.keys())):
        raise UserError(f"{folder / NAME} is not what it was prepared with; prepare it anew")
    source = Path(index["source"])
    if all(distributed.gather_objects(source.is_dir())):
        *parts, classes = find_samples(source)
        given = source, index["side"], read_format(source), classes or index["classes"], parts, each
        if not distributed.from_rank_zero(lambda: describe(*given) == index):
            raise UserError(f"{source} has changed since {folder} was prepared; prepare it anew")
    train, val = ([tuple(sample) for sample, _ in index[part]] for part in ("train", "val"))
    split = np.split(rows, [len(train)])
    train_images, val_images = (Images(folder / "pixels.bin", part) for part in split)
    return (train, train_images), (val, val_images), index["classes"]
