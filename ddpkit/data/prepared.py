"""A data set decoded once: all images in one file that is mapped into memory, and its index.

FOLDER/pixels.bin   uint8 (H, W, 3) of images and (H, W) of masks, one after the other
FOLDER/rows.bin     for each of them int64: offset in bytes, height, width, channels (0: a mask)
FOLDER/index.json   what it is made of, as `describe` returns it
FOLDER/data.json    that of the data set, if it has one
"""

import functools
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from ddpkit import files
from ddpkit.data.format import NAME, Format, read_format, write_format
from ddpkit.data.images import LazyImage
from ddpkit.errors import UserError
from ddpkit.ranks import distributed, process

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
    """Return whether `write` has made `folder`."""
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
    """Return what `write` stored in `folder`, and the classes; None if it has made none.

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


def write(
    folder: Path, source: Path, parts: list, classes: Sequence[str], side: int, workers: int
) -> None:
    """Write the images of `parts`, the data sets for training and validation, to `folder`.

    side: the shorter side of the images in pixels; smaller ones keep their size, and with 0 all do.
    """
    format, each, samples = parts[0].format, len(parts[0].open(0)), [p.samples for p in parts]
    plan = describe(source, side, format, classes, samples, each)
    if (found := read(folder)) and found[0] == plan:
        return distributed.say(f"{folder}: prepared already, and {source} has not changed")
    if folder.exists():
        raise UserError(
            f"{folder}: there already, and not made of {source} as it is, with these flags; "
            "remove it, or name another folder"
        )
    with files.filling(folder) as partial:
        write_format(partial, format)
        (partial / "index.json").write_text(json.dumps(plan))
        _fill(partial, parts, side, workers)
        for path in partial.iterdir():
            files.sync(path)
    distributed.say(f"{folder}: {sum(map(len, samples))} samples; train with --data {folder}")


def _read_small(side: int, key: tuple[Any, int]) -> list[Tensor]:
    """Return all images and masks of a sample, the shorter side shrunk to `side` pixels."""
    found = []
    for image in key[0].open(key[1]):
        scale = min(side / min(image.height, image.width), 1) if side else 1
        found.append(image.read(size=(round(image.height * scale), round(image.width * scale))))
    return found


def _fill(folder: Path, parts: list, side: int, workers: int) -> None:
    keys = [(part, index) for part in parts for index in range(len(part.samples))]
    loader: DataLoader = DataLoader(
        keys,  # type: ignore[arg-type]
        batch_size=None,
        num_workers=workers,
        collate_fn=functools.partial(_read_small, side),
        multiprocessing_context=process.worker_context(workers),
        worker_init_fn=process.start_worker,
    )
    end, rows = 0, []
    with open(folder / "pixels.bin", "wb") as file:
        for sample in tqdm(loader, total=len(keys), unit="sample", disable=None):
            for tensor in sample:
                is_mask = tensor.ndim == 2
                file.write((tensor if is_mask else tensor.movedim(0, -1)).numpy().tobytes())
                rows.append((end, *tensor.shape[-2:], 0 if is_mask else 3))
                end += tensor.numel()
    np.array(rows, np.int64).tofile(folder / "rows.bin")
