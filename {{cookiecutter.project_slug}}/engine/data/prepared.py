"""A data set decoded once: all images in one file that is mapped into memory, and its index.

FOLDER/pixels.bin   uint8 (H, W, 3) of images and (H, W) of masks, one after the other
FOLDER/rows.bin     for each of them int64: offset in bytes, height, width, channels (0: a mask)
FOLDER/index.json   an Index; the store is complete once rows.bin has rows for all its samples
FOLDER/data.json    that of the data set, if it has one
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from tqdm import tqdm

from engine import files
from engine.data.format import NAME, Format, read_format, write_format
from engine.data.images import LazyImage
from engine.data.mapped import Images, ends
from engine.errors import UserError
from engine.ranks import distributed, process

ROW = np.dtype(np.int64)
SAMPLES_PER_SYNC = 256  # a row is written once its pixels are on the disk
GIVEN = ("source", "side", "value_range")  # of an Index: what prepare_data.py was told
Parts = list[Sequence[tuple]]  # the samples for training and for validation
AGAIN = "rerun prepare_data.py with the same flags"


class Source(Protocol):
    """A data set such as those of datasets.py: `open` returns a sample's images and masks."""

    format: Format

    @property
    def samples(self) -> Sequence[tuple]: ...

    def open(self, index: int) -> tuple[LazyImage, ...]: ...


@dataclass
class Index:
    """What a store is made of: train and val hold [sample, [size, time] of each of its files]."""

    source: str
    side: int  # that of `write`
    classes: list[str]
    train: list[list]
    val: list[list]
    value_range: list[float] | None = None

    @classmethod
    def of(
        cls, source: Path, side: int, classes: Sequence[str], parts: Parts, each: int
    ) -> "Index":
        """Return the index of the samples `parts`, which begin with `each` paths, as of now."""
        train, val = ([(s, [_stat(path) for path in s[:each]]) for s in part] for part in parts)
        lines = getattr(classes, "lines", classes)  # of masks.py: with the values they stand for
        text = json.dumps((str(source), side, lines, train, val))
        return cls(*json.loads(text))  # with lists for tuples, as `read` returns it

    @classmethod
    def read(cls, path: Path) -> "Index | None":
        """Return the index at `path`; None if it is missing or incomplete."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, TypeError, ValueError):
            return None

    def change(self, classes: Sequence[str], parts: Parts, each: int) -> str | None:
        """Return a path at which the source has changed since; None if it has not."""
        now = Index.of(Path(self.source), self.side, classes, parts, each)
        if (self.train, self.val) != (now.train, now.val):
            then, here = ({*map(json.dumps, each.train + each.val)} for each in (self, now))
            return json.loads(min(then ^ here))[0][0] if then != here else self.source
        return None if now.classes in ([], self.classes) else f"{self.source}, its classes"


def _stat(path: str) -> tuple[int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:  # a broken link
        return None
    return stat.st_size, stat.st_mtime_ns


def _read_rows(folder: Path, each: int) -> np.ndarray:
    """Return int64 (samples, each, 4) of the samples that rows.bin and pixels.bin fully hold."""
    try:
        size, values = os.path.getsize(folder / "pixels.bin"), np.fromfile(folder / "rows.bin", ROW)
    except FileNotFoundError:
        return np.empty((0, each, 4), ROW)
    rows = values[: len(values) - len(values) % (4 * each)].reshape(-1, each, 4)
    return rows[ends(rows[:, -1]) <= size]


def is_store(folder: Path) -> bool:
    """Return whether `write` has begun to fill `folder`."""
    own = "rows.bin", "pixels.bin", ".preparing"  # other folders may have an index.json, too
    return (folder / "index.json").is_file() and any((folder / name).is_file() for name in own)


@dataclass
class Store:
    """What `write` made: samples and classes, as dataset.py finds them, and the decoded images."""

    classes: list[str]
    train: list[tuple]
    val: list[tuple]
    train_images: Images
    val_images: Images


def open_store(
    folder: Path,
    find_samples: Callable[[Path], tuple[list, list, list[str]]],
    each: int,
    format: Format,
) -> Store | None:
    """Return the store in `folder`; None if there is none.

    find_samples: lists the samples of the source for training and for validation, and the classes,
    or none if only the images tell them. A sample begins with `each` paths.
    format: what data.json in `folder` says.
    Raises a UserError if the store is incomplete, or of another format, or if all ranks have the
    source and one of its files, or what `find_samples` returns, has changed.
    """
    if not is_store(folder):
        return None
    if format.channels:
        raise UserError(
            f'{folder / NAME}: prepared data is RGB of 8 bits; remove "channels", or train on the '
            "original folder"
        )
    index, rows = Index.read(folder / "index.json"), _read_rows(folder, each)
    if index and len(index.train[0][1]) != each:
        raise UserError(f"{folder}: made for another task; use this project's prepare_data.py")
    if index is None or len(rows) != len(index.train) + len(index.val):
        raise UserError(f"{folder}: incomplete; {AGAIN} to resume, or copy it again")
    if (before := Format(index.value_range)).range_text != format.range_text:
        line = f"{folder / NAME}: {format.range_text}, but prepared with {before.range_text}"
        raise UserError(f"{line}; {AGAIN}")
    if all(distributed.gather_objects((source := Path(index.source)).is_dir())):
        if read_format(source) != format:
            raise UserError(f"{source / NAME} differs from {folder / NAME}; {AGAIN}")
        *parts, classes = find_samples(source)
        if where := distributed.from_rank_zero(index.change, classes, parts, each):
            raise UserError(f"{where}: file or label changed since {folder} was prepared; {AGAIN}")
    train, val = ([tuple(sample) for sample, _ in part] for part in (index.train, index.val))
    images = (Images(folder / "pixels.bin", part) for part in np.split(rows, [len(train)]))
    return Store(index.classes, train, val, *images)


def write(
    folder: Path,
    source: Path,
    parts: list[Source],
    classes: Sequence[str],
    side: int,
    workers: int,
) -> None:
    """Write the images of `parts`, the data sets for training and validation, to `folder`.

    source: the absolute path of the folder that the paths in `parts` begin with.
    side: the shorter side of the images in pixels; smaller ones keep their size, and with 0 all do.
    After an interruption the next call with the same arguments resumes.
    """
    shrunk, each, format = Shrunk(parts, side), len(parts[0].open(0)), parts[0].format
    plan = Index.of(source, side, classes, [part.samples for part in parts], each)
    plan.value_range = list(format.value_range) if format.value_range else None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not (folder / ".preparing").is_file():
            raise UserError(f"{folder}: not empty and no prepared data; name another folder")
        if not files.lock(folder / ".preparing"):
            raise UserError(f"{folder}: another process is preparing it")
        made = Index.read(folder / "index.json")
        if made and any(vars(made)[name] != vars(plan)[name] for name in GIVEN):
            how = f"--short-side {made.side} and {Format(made.value_range).range_text}"
            line = f"{folder}: made from {made.source} with {how}"
            raise UserError(f"{line}; name another folder, or remove it")
        write_format(folder, format)
        if made != plan:
            for name in ("rows.bin", "pixels.bin"):
                (folder / name).unlink(missing_ok=True)
            with files.writing(folder / "index.json") as tmp_path:
                tmp_path.write_text(json.dumps(vars(plan)))
        done = _read_rows(folder, each)
        if len(done) == len(shrunk):
            return distributed.say(f"{folder}: prepared already, and {source} has not changed")
        _say_size(shrunk, len(done), folder)
        _append(folder, shrunk, done, workers)
        distributed.say(f"{folder}: {len(shrunk)} samples ready; train with --data {folder}")
    except OSError as error:
        raise files.failure(folder, error) from None


class Shrunk(Dataset):
    """All images and masks of each sample of `parts`, the shorter side shrunk to `side` pixels."""

    def __init__(self, parts: list[Source], side: int) -> None:
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


def _append(folder: Path, shrunk: Shrunk, done: np.ndarray, workers: int) -> None:
    """Append to the files in `folder` what they lack, where `done` are the rows that they hold."""
    loader = DataLoader(
        Subset(shrunk, range(len(done), len(shrunk))),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=process.worker_context(workers),
        worker_init_fn=process.start_worker,
    )
    bar = tqdm(loader, initial=len(done), total=len(shrunk), unit="sample", disable=None)
    with open(folder / "pixels.bin", "ab") as pixels, open(folder / "rows.bin", "ab") as rows:
        end = int(ends(done[-1, -1])) if len(done) else 0
        pixels.truncate(end)
        rows.truncate(done.nbytes)
        pending: list[tuple[int, ...]] = []
        for number, sample in enumerate(bar, start=len(done) + 1):
            for tensor in sample:
                is_mask = tensor.ndim == 2
                pixels.write((tensor if is_mask else tensor.movedim(0, -1)).numpy().tobytes())
                pending.append((end, *tensor.shape[-2:], 0 if is_mask else 3))
                end += tensor.numel()
            if number % SAMPLES_PER_SYNC == 0 or number == len(shrunk):
                for file, data in (pixels, b""), (rows, np.array(pending, ROW).tobytes()):
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                pending.clear()


def _say_size(shrunk: Shrunk, done: int, folder: Path) -> None:
    """Say how much disk space is needed, by some samples; a UserError if there is not enough."""
    left, picks = len(shrunk) - done, range(0, len(shrunk), max(1, len(shrunk) // 100))
    size = left * sum(tensor.numel() for pick in picks for tensor in shrunk[pick]) / len(picks)
    free = shutil.disk_usage(folder).free
    need = f"{left} samples need about {size / 1e9:.3g} GB, {free / 1e9:.3g} GB are free"
    if size > free:
        raise UserError(f"{folder}: {need}; make room, or use a smaller --short-side")
    distributed.say(f"{folder}: {need}" + (f"; {done} are there already" if done else ""))
