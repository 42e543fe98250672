"""A data set decoded once: all images in one file that is mapped into memory, and its index.

FOLDER/pixels.bin   uint8 (H, W, 3) of images and (H, W) of masks, one after the other
FOLDER/rows.bin     for each of them int64: offset in bytes, height, width, channels (0: a mask)
FOLDER/index.json   what it is made of, as `describe` returns it
FOLDER/data.json    that of the data set, if it has one
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from engine import files
from engine.data.format import NAME, Format, read_format, write_format
from engine.data.images import LazyImage
from engine.errors import UserError
from engine.ranks import distributed, process

AGAIN = "rerun prepare_data.py with the same flags"
Part = tuple[list[tuple], "Images"]  # samples, as dataset.py finds them, and what they hold


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
        with contextlib.suppress(OSError):  # of a broken link
            found = os.stat(path)
            return found.st_size, found.st_mtime_ns
        return None

    train, val = ([(s, [*map(stat, s[:each])]) for s in part] for part in parts)
    lines = getattr(classes, "lines", classes)  # of masks.py: with the values they stand for
    found = {"source": str(source), "side": side, "value_range": format.value_range}
    # With lists for tuples, as it is read.
    return json.loads(json.dumps({**found, "classes": lines, "train": train, "val": val}))


def find_change(made: dict, now: dict) -> str | None:
    """Return a path at which the source has changed; None if it has not."""
    then, here = ({*map(json.dumps, each["train"] + each["val"])} for each in (made, now))
    if then != here:
        return json.loads(min(then ^ here))[0][0]
    is_same = made["train"] == now["train"] and now["classes"] in ([], made["classes"])
    return None if is_same else f"{now['source']}, its classes"


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
    except (OSError, ValueError, KeyError, IndexError):
        return None


def open_store(
    folder: Path,
    find_samples: Callable[[Path], tuple[list, list, list[str]]],
    each: int,
    format: Format,
) -> tuple[Part, Part, list[str]] | None:
    """Return what `write` stored in `folder`, and the classes; None if it has made none.

    find_samples: lists the samples of the source for training and for validation, and the classes,
    or none if only the images tell them. A sample begins with `each` paths.
    format: what data.json in `folder` says.
    Raises a UserError if the store is incomplete, or of another format, or if all ranks have the
    source and one of its files, or what `find_samples` returns, has changed.
    """
    if not is_store(folder):
        return None
    if format.channels:
        line = f'{folder / NAME}: prepared data is RGB of 8 bits; remove "channels", or train on'
        raise UserError(f"{line} the original folder")
    if not (found := read(folder)):
        raise UserError(f"{folder}: incomplete; {AGAIN}, or copy it again")
    index, rows = found
    if rows.shape[1] != each:
        raise UserError(f"{folder}: made for another task; use this project's prepare_data.py")
    if (before := Format(index["value_range"]).range_text) != format.range_text:
        line = f"{folder / NAME}: {format.range_text}, but prepared with {before}"
        raise UserError(f"{line}; {AGAIN}")
    if all(distributed.gather_objects((source := Path(index["source"])).is_dir())):
        if read_format(source) != format:
            raise UserError(f"{source / NAME} differs from {folder / NAME}; {AGAIN}")
        *parts, classes = find_samples(source)
        given = source, index["side"], format, classes, parts, each
        if where := distributed.from_rank_zero(lambda: find_change(index, describe(*given))):
            raise UserError(f"{where}: file or label changed since {folder} was prepared; {AGAIN}")
    train, val = ([tuple(sample) for sample, _ in index[part]] for part in ("train", "val"))
    split = np.split(rows, [len(train)])
    train_images, val_images = (Images(folder / "pixels.bin", part) for part in split)
    return (train, train_images), (val, val_images), index["classes"]


def write(
    folder: Path, source: Path, parts: list, classes: Sequence[str], side: int, workers: int
) -> None:
    """Write the images of `parts`, the data sets for training and validation, to `folder`.

    source: the absolute path of the folder that the paths in `parts` begin with.
    side: the shorter side of the images in pixels; smaller ones keep their size, and with 0 all do.
    """
    format, each, samples = parts[0].format, len(parts[0].open(0)), [p.samples for p in parts]
    plan, shrunk = describe(source, side, format, classes, samples, each), Shrunk(parts, side)
    try:
        if folder.is_dir() and any(folder.iterdir()) and not is_store(folder):
            raise UserError(f"{folder}: not empty and no prepared data; name another folder")
        if found := read(folder):
            made = found[0]
            if any(made[key] != plan[key] for key in ("source", "side", "value_range")):
                how = f"--short-side {made['side']} and {Format(made['value_range']).range_text}"
                line = f"{folder}: made from {made['source']} with {how}"
                raise UserError(f"{line}; name another folder, or remove it")
            if made == plan:
                write_format(folder, format)
                return distributed.say(f"{folder}: prepared already, and {source} has not changed")
        _say_size(shrunk, folder)
        with files.filling(folder) as partial:
            write_format(partial, format)
            _fill(partial, shrunk, workers)
            (partial / "index.json").write_text(json.dumps(plan))
            for path in partial.iterdir():
                files.sync(path)
            shutil.rmtree(folder, ignore_errors=True)  # of the source as it was
        distributed.say(f"{folder}: {len(shrunk)} samples ready; train with --data {folder}")
    except OSError as error:
        raise files.failure(folder, error) from None


class Shrunk(Dataset):
    """All images and masks of each sample of `parts`, the shorter side shrunk to `side` pixels."""

    def __init__(self, parts: list, side: int) -> None:
        self.keys = [(part, index) for part in parts for index in range(len(part.samples))]
        self.side = side

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, key: int) -> list[Tensor]:
        part, index = self.keys[key]
        return [image.read(size=self.size(image)) for image in part.open(index)]

    def size(self, image: LazyImage) -> tuple[int, int]:
        scale = min(self.side / min(image.height, image.width), 1) if self.side else 1
        return round(image.height * scale), round(image.width * scale)


def _fill(folder: Path, shrunk: Shrunk, workers: int) -> None:
    loader = DataLoader(
        shrunk,
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=process.worker_context(workers),
        worker_init_fn=process.start_worker,
    )
    end, rows = 0, []
    with open(folder / "pixels.bin", "wb") as file:
        for sample in tqdm(loader, total=len(shrunk), unit="sample", disable=None):
            for tensor in sample:
                is_mask = tensor.ndim == 2
                file.write((tensor if is_mask else tensor.movedim(0, -1)).numpy().tobytes())
                rows.append((end, *tensor.shape[-2:], 0 if is_mask else 3))
                end += tensor.numel()
    np.array(rows, np.int64).tofile(folder / "rows.bin")


def _say_size(shrunk: Shrunk, folder: Path) -> None:
    """Say how much disk space is needed, by some samples; a UserError if there is not enough."""
    picks = range(0, len(shrunk), max(1, len(shrunk) // 100))
    size = len(shrunk) * sum(tensor.numel() for n in picks for tensor in shrunk[n]) / len(picks)
    disk = next(parent for parent in folder.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(disk).free
    need = f"{len(shrunk)} samples need about {size / 1e9:.3g} GB, {free / 1e9:.3g} GB are free"
    if size > free:
        raise UserError(f"{folder}: {need}; make room, or use a smaller --short-side")
    distributed.say(f"{folder}: {need}")
