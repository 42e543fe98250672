"""How often each class occurs in each training sample: counted once, by all ranks together."""

import contextlib
import hashlib
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from engine import files
from engine.data import shares
from engine.data.samples import MapDataset
from engine.errors import LineError, UserError
from engine.ranks import distributed

CACHE = "class_counts.npz"  # in --output-dir
CHUNK = 256  # samples that are counted at once


@runtime_checkable
class Counted(MapDataset, Protocol):
    """A data set that knows what its labels are."""

    def count_labels(self, index: int, /) -> Mapping[int, int]:
        """Return how often each class number occurs in a sample; void does not count."""
        ...

    def label_sources(self) -> Sequence[str]:
        """Return what `count_labels` reads, files and other texts; nothing if it reads no file."""
        ...


@dataclass
class Counts:
    """How often each class occurs in each of the samples that have it, sorted by sample."""

    samples: np.ndarray  # int64 (pairs,)
    labels: np.ndarray  # int64 (pairs,): class numbers
    counts: np.ndarray  # int64 (pairs,)
    classes: Sequence[str]
    origin: str = ""  # what to say of where they come from

    def of_classes(self) -> np.ndarray:
        """Return how often each class occurs in all samples together, int64 (classes,)."""
        totals = np.zeros(len(self.classes), np.int64)
        np.add.at(totals, self.labels, self.counts)
        return totals

    def fingerprint(self) -> str:
        return f"{zlib.crc32(self.labels.tobytes(), zlib.crc32(self.samples.tobytes())):08x}"


def count_classes(dataset: MapDataset, classes: Sequence[str], folder: Path) -> Counts:
    """Count the classes of all samples. Every rank has to call it; each reads its share.

    If that takes reading files, the result is kept in `folder`, until one of them changes.
    """
    dataset, began = as_counted(dataset), time.monotonic()
    sources, path = dataset.label_sources(), folder / CACHE
    key, rows = "", None
    if sources:
        lines = getattr(classes, "lines", classes)  # of masks.py: with the values they stand for
        key, rows = distributed.from_rank_zero(_look_up, path, [*sources, *lines])
    origin = f"; from {path}" if sources else ""
    if rows is None:
        rows = read(dataset, range(len(dataset)), bool(sources))
        if sources:
            origin = f"; {len(dataset)} samples read in {time.monotonic() - began:.1f} s"
            _keep(path, key, rows)
    odd = rows[(rows[:, 1] < 0) | (rows[:, 1] >= len(classes))]
    for sample, label in odd[:1, :2]:
        last = len(classes) - 1
        raise UserError(f"sample {sample}: label {label}, but the classes are 0 to {last}")
    if not len(rows):
        raise UserError("no training sample has a label")
    samples, labels, counts = rows.T.copy()
    return Counts(samples, labels, counts, classes, origin)


def kept(path: Path, sources: Sequence[str], make: Callable[[], np.ndarray]) -> np.ndarray:
    """Return what `make` does, which `path` keeps until one of `sources` changes; on rank 0."""
    key, found = _look_up(path, sources)
    if found is None:
        _keep(path, key, found := make())
    return found


def as_counted(dataset: MapDataset) -> Counted:
    """Return `dataset`, or raise a UserError if it lacks a method of Counted."""
    if not isinstance(dataset, Counted):
        raise UserError(
            f"{type(dataset).__name__} has no count_labels and label_sources: --class-weights "
            "auto, --sampler balanced and --overfit need both; dataset.py shows them"
        )
    return dataset


def read(dataset: Counted, indices: Sequence[int], from_files: bool) -> np.ndarray:
    """Return (sample, class, count) of the samples `indices`, sorted, int64 (pairs, 3).

    Every rank has to call it; each reads its share.
    """
    mine = indices[distributed.rank() :: distributed.world_size()]
    rows = np.concatenate(distributed.gather_objects(_read(dataset, mine, from_files)))
    return rows[np.lexsort((rows[:, 1], rows[:, 0]))]


def _read(dataset: Counted, indices: Sequence[int], from_files: bool) -> np.ndarray:
    parts = [np.empty((0, 3), np.int64)]
    with ThreadPoolExecutor(shares.THREADS) as pool:
        for start in range(0, len(indices), CHUNK):
            chunk = indices[start : start + CHUNK]
            found = (pool.map if from_files else map)(dataset.count_labels, chunk)
            pairs = zip(chunk, found, strict=True)
            rows = [(index, *pair) for index, counts in pairs for pair in counts.items()]
            parts.append(np.array(rows, np.int64).reshape(-1, 3))
    return np.concatenate(parts)


def _look_up(path: Path, sources: Sequence[str]) -> tuple[str, np.ndarray | None]:
    """Return a key that changes when a source does, and what `path` holds under it, or None."""
    with ThreadPoolExecutor(shares.THREADS) as pool:  # a network disk takes its time for each
        states = [*pool.map(_state_of, sources)]
    key = hashlib.sha256(repr([*zip(sources, states, strict=True)]).encode()).hexdigest()
    try:
        with np.load(path) as saved:  # which checks its checksums
            return key, saved["rows"] if str(saved["key"]) == key else None
    except Exception:  # none, or damaged
        return key, None


def _state_of(source: str) -> tuple[int, int] | None:
    try:
        stat = os.stat(source)
    except (OSError, ValueError):
        return None  # a text
    return stat.st_size, stat.st_mtime_ns


def _keep(path: Path, key: str, rows: np.ndarray) -> None:
    if not distributed.is_rank_zero():
        return
    with (
        contextlib.suppress(LineError),  # it cannot be written
        files.writing(path, parents=True) as tmp_path,
        open(tmp_path, "wb") as file,
    ):
        np.savez(file, key=np.array(key), rows=rows)
