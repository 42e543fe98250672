"""A data set decoded once: all images in one file that is mapped into memory, and its index.

FOLDER/pixels.bin   the uint8 (H, W, 3) of images and (H, W) of masks, one after the other
FOLDER/rows.bin     for each of them int64: offset in bytes, height, width, channels (0: a mask)
FOLDER/index.json   samples, classes, and what the source was like; written last
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from tqdm import tqdm

from engine.data.images import LazyImage
from engine.errors import UserError
from engine.ranks import distributed, process
from engine.run import files

Samples = Sequence[tuple]

SECONDS_BETWEEN_SYNCS = 2  # at most this much work is lost when it is interrupted
ROW = np.dtype(np.int64)


class Store:
    """What `write` has made: samples and classes, as a data set's module lists them, and pixels."""

    def __init__(self, folder: Path, index: dict[str, Any], each: int) -> None:
        self.classes: list[str] = index["classes"]
        self.train, self.val = ([tuple(s) for s in index["samples"][p]] for p in ("train", "val"))
        rows = _read_rows(folder, len(self.train) + len(self.val))
        if rows is None:
            raise UserError(f"{folder}: rows.bin or pixels.bin is not whole; copy or make it again")
        if rows.shape[1] != each:
            raise UserError(
                f"{folder}: {rows.shape[1]} image(s) and mask(s) a sample where dataset.py takes "
                f"{each}: made for another task; make it with this project's prepare_data.py"
            )
        first = len(self.train)
        self.train_images = Images(folder / "pixels.bin", rows[:first])
        self.val_images = Images(folder / "pixels.bin", rows[first:])


class Images(Sequence):
    """The images of each sample, mapped into memory.

    path: of pixels.bin. rows: int64 (samples, images of each, 4).
    """

    def __init__(self, path: Path, rows: np.ndarray) -> None:
        self.path = path
        self.rows = rows
        self.pixels = np.memmap(path, np.uint8, "r")

    def __reduce__(self) -> tuple:  # else a worker that is spawned gets all the pixels
        return Images, (self.path, self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> tuple[LazyImage, ...]:
        return tuple(map(self._image, self.rows[index]))

    def _image(self, row: np.ndarray) -> LazyImage:
        pixels = self.pixels[row[0] : _end(row)]
        return LazyImage.of(pixels.reshape(row[1:] if row[3] else row[1:3]))


def _end(rows: np.ndarray) -> int:
    """Return where the last of the images that `rows` tell of ends in pixels.bin."""
    offset, height, width, channels = rows.flat[-4:].tolist() if rows.size else (0, 0, 0, 0)
    return offset + height * width * max(channels, 1)


def _read_rows(folder: Path, count: int) -> np.ndarray | None:
    """Return int64 (count, images of each sample, 4); None unless rows and pixels are whole."""
    rows, pixels = folder / "rows.bin", folder / "pixels.bin"
    if not rows.is_file() or not pixels.is_file():
        return None
    values = np.fromfile(rows, ROW)
    is_whole = len(values) % (4 * count) == 0 and 0 < _end(values) == pixels.stat().st_size
    return values.reshape(count, -1, 4) if is_whole else None


def is_store(folder: Path) -> bool:
    """Whether `write` has worked on `folder`."""
    return any((folder / name).is_file() for name in ("rows.bin", "pixels.bin"))


def open_store(
    folder: Path, find_samples: Callable[[Path], tuple[Samples, Samples, list[str]]], each: int
) -> Store | None:
    """Return what `write` made of a data set in `folder`; None if it did not.

    find_samples: lists the samples of the source, for training and for validation, and its classes,
    or none where only the images tell them. A sample begins with the paths of its files.
    each: how many these are, the images and masks that the data set's `open` returns.

    Raises a UserError if it is not complete, or if all ranks have the source and one of its files,
    or what `find_samples` returns, has changed.
    """
    if not is_store(folder):
        return None
    again = "rerun prepare_data.py with the same flags"
    if not (folder / "index.json").is_file():
        raise UserError(f"{folder}: preparing it was interrupted; {again} to go on with it")
    try:
        index = json.loads((folder / "index.json").read_text())
    except ValueError:
        raise UserError(f"{folder / 'index.json'}: not whole; copy or make it again") from None
    store, source = Store(folder, index, each), Path(index["source"])
    if all(distributed.gather_objects(source.is_dir())):
        *samples, classes = find_samples(source)
        if changed := distributed.from_rank_zero(_changed, index, samples, classes, each):
            raise UserError(f"{changed}: changed since {folder} was prepared; {again}")
    return store


def write(
    folder: Path, source: Path, parts: dict[str, Any], classes: list[str], side: int, workers: int
) -> None:
    """Write the images of `parts`, the data sets train and val from `source`, to `folder`.

    source: an absolute path, from which the paths in `parts` were made.
    side: their shorter one, in pixels; smaller images stay as they are, and all if it is 0.
    An interrupted call leaves what the next one goes on with.
    """
    samples = {name: list(part.samples) for name, part in parts.items()}
    each = len(parts["train"].open(0))
    plan = {
        "source": str(source),
        "side": side,
        "classes": classes,
        "samples": samples,
        "files": [stat for _, stat in _files(samples.values(), each)],
    }
    text = json.dumps(plan, sort_keys=True)
    index, begun = folder / "index.json", folder / "plan.json"
    rows, pixels = folder / "rows.bin", folder / "pixels.bin"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not (folder / ".preparing").is_file():
            raise UserError(f"{folder}: not empty, and not made by this; name another folder")
        if not files.lock(folder / ".preparing"):
            raise UserError(f"{folder}: another process is preparing it")
        is_whole = _read_rows(folder, sum(map(len, parts.values()))) is not None
        if is_whole and _says(index, text):
            return distributed.say(f"{folder}: prepared already, and {source} has not changed")
        if index.is_file() and (made := _of_another(index, plan)):
            raise UserError(f"{folder}: made {made}; name another folder, or remove it")
        if not _says(begun, text):
            for path in (index, begun, rows, pixels):
                path.unlink(missing_ok=True)
            with files.writing(begun) as tmp_path:
                tmp_path.write_text(text)
        with open(rows, "ab") as rows_file, open(pixels, "ab") as pixels_file:
            _append(Shrunk(list(parts.values()), side), workers, rows_file, pixels_file)
        os.replace(begun, index)
        files.sync(folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from None


class Shrunk(Dataset):
    """The images of all samples of data sets, whole, the shorter side shrunk to `side`."""

    def __init__(self, parts: Sequence[Any], side: int) -> None:
        self.samples = [(part, index) for part in parts for index in range(len(part))]
        self.side = side

    def __len__(self) -> int:
        return len(self.samples)

    def open(self, index: int) -> tuple[LazyImage, ...]:
        part, index = self.samples[index]
        return part.open(index)

    def size(self, image: LazyImage) -> tuple[int, int]:
        scale = min(self.side / min(image.height, image.width), 1) if self.side else 1
        return round(image.height * scale), round(image.width * scale)

    def __getitem__(self, index: int) -> list[Tensor]:
        return [image.read(size=self.size(image)) for image in self.open(index)]


def _append(whole: Shrunk, workers: int, rows: BinaryIO, pixels: BinaryIO) -> None:
    """Append to the files what they lack; a row only once its pixels are on the disk."""
    bytes_each = 4 * ROW.itemsize * len(whole.open(0))
    done = rows.tell() // bytes_each
    rows.truncate(done * bytes_each)
    end = _end(np.fromfile(rows.name, ROW))
    pixels.truncate(end)
    _say_size(whole, done, Path(rows.name).parent)
    loader = DataLoader(
        Subset(whole, range(done, len(whole))),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=process.worker_context(workers),
        worker_init_fn=process.start_worker,
    )
    pending: list[tuple[int, ...]] = []

    def sync() -> None:
        for file, data in (pixels, b""), (rows, np.array(pending, ROW).tobytes()):
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        pending.clear()

    synced = time.monotonic()
    for sample in tqdm(loader, initial=done, total=len(whole), unit="sample", disable=None):
        for tensor in sample:
            is_mask = tensor.ndim == 2
            pixels.write((tensor if is_mask else tensor.movedim(0, -1)).numpy().tobytes())
            pending.append((end, *tensor.shape[-2:], 0 if is_mask else 3))
            end += tensor.numel()
        if time.monotonic() - synced > SECONDS_BETWEEN_SYNCS:
            sync()
            synced = time.monotonic()
    sync()


def _say_size(whole: Shrunk, done: int, folder: Path) -> None:
    """Say how much room the samples take, by some of them; a UserError if there is not enough."""
    left = len(whole) - done
    picks = range(0, len(whole), max(1, len(whole) // 200))
    sizes = [
        math.prod(whole.size(image)) * (1 if image.is_mask else 3)
        for pick in picks
        for image in whole.open(pick)
    ]
    size, free = left * sum(sizes) / len(picks), shutil.disk_usage(folder).free
    need = f"{left} samples need about {size / 1e9:.3g} GB, {free / 1e9:.3g} GB are free"
    if size > free:
        raise UserError(f"{folder}: {need}; make room, or a smaller --short-side")
    distributed.say(f"{folder}: {need}" + (f"; {done} are there already" if done else ""))


def _files(parts: Iterable[Samples], each: int) -> Iterator[tuple[str, list[int] | None]]:
    """Yield (path, [bytes, time of the last change in ns]) of the files that samples begin with."""
    for path in (path for part in parts for sample in part for path in sample[:each]):
        try:
            about = os.stat(path)
        except OSError:  # a link to nothing
            yield path, None
        else:
            yield path, [about.st_size, about.st_mtime_ns]


def _changed(
    index: dict[str, Any], samples: Sequence[Samples], classes: Sequence[str], each: int
) -> str | None:
    """Return what of the source is not as `index` says; None without a difference."""
    now = json.loads(json.dumps(samples))  # tuples become lists
    then = list(index["samples"].values())
    for part, before in zip(now, then, strict=True):
        if part != before:
            odd = set(map(json.dumps, part)) ^ set(map(json.dumps, before))
            path = json.loads(min(odd))[0] if odd else index["source"]
            return f"{path}, its path or label in find_samples of dataset.py"
    if classes and list(classes) != index["classes"]:
        return f"{index['source']}, its classes"
    for (path, stat), before in zip(_files(now, each), index["files"], strict=True):
        if stat != before:
            return path
    return None


def _says(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text() == text


def _of_another(index: Path, plan: dict[str, Any]) -> str | None:
    """Return of what the store at `index` is made, unless `plan` is of the same."""
    try:
        made = json.loads(index.read_text())
    except ValueError:  # not whole
        return None
    is_same = all(made[key] == plan[key] for key in ("source", "side"))
    return None if is_same else f"of {made['source']} with --short-side {made['side']}"
