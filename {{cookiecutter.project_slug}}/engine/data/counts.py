"""How often each class occurs in each training sample: counted once, by all ranks together."""

import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from engine.data import shares
from engine.errors import UserError
from engine.ranks import distributed

CHUNK = 16  # samples that a thread counts before it takes the next ones
SAID = 1  # seconds; how long counting took is said beyond


@runtime_checkable
class Counted(Protocol):
    """A data set that knows what its labels are."""

    def __len__(self) -> int: ...

    def count_labels(self, index: int, /) -> Mapping[int, int]:
        """Return how often each class number occurs in a sample; void does not count."""
        ...


@dataclass
class Counts:
    """How often each class occurs in each of the samples that have it, sorted by sample."""

    samples: np.ndarray  # int64 (pairs,)
    labels: np.ndarray  # int64 (pairs,): class numbers
    counts: np.ndarray  # int64 (pairs,)
    classes: Sequence[str]
    origin: str = ""  # what to say of how long it took

    def of_classes(self) -> np.ndarray:
        """Return how often each class occurs in all samples together, int64 (classes,)."""
        totals = np.zeros(len(self.classes), np.int64)
        np.add.at(totals, self.labels, self.counts)
        return totals

    def fingerprint(self) -> str:
        return f"{zlib.crc32(self.labels.tobytes(), zlib.crc32(self.samples.tobytes())):08x}"


_last: list[tuple[object, Counts]] = []  # what count_classes has returned


def count_classes(dataset: object, classes: Sequence[str]) -> Counts:
    """Count the classes of all samples, once. Every rank has to call it; each reads its share.

    Raises a UserError if `dataset` has no `count_labels`, or finds what is no class, or nothing.
    """
    if _last and _last[0][0] is dataset:
        return _last[0][1]
    counted, began = as_counted(dataset), time.monotonic()
    rows = read(counted, range(len(counted)))
    seconds = time.monotonic() - began
    for sample, label in rows[(rows[:, 1] < 0) | (rows[:, 1] >= len(classes))][:1, :2]:
        last = len(classes) - 1
        raise UserError(f"sample {sample}: label {label}, but the classes are 0 to {last}")
    if not len(rows):
        raise UserError("no training sample has a label")
    samples, labels, counts = rows.T.copy()
    origin = f"; {len(counted)} samples read in {seconds:.1f} s" if seconds > SAID else ""
    _last[:] = [(dataset, Counts(samples, labels, counts, classes, origin))]
    return _last[0][1]


def as_counted(dataset: object) -> Counted:
    """Return `dataset`, or raise a UserError if it cannot count."""
    if not isinstance(dataset, Counted):
        raise UserError(
            f"{type(dataset).__name__} has no count_labels, which --class-weights auto and "
            "--sampler balanced need: add a method that returns {class number: how often} of a "
            "sample's index"
        )
    return dataset


def read(dataset: Counted, indices: Sequence[int]) -> np.ndarray:
    """Return (sample, class, count) of the samples `indices`, sorted, int64 (pairs, 3).

    Every rank has to call it; each reads its share.
    """
    mine = indices[distributed.rank() :: distributed.world_size()]
    rows = np.concatenate(distributed.gather_objects(_read(dataset, mine)))
    return rows[np.lexsort((rows[:, 1], rows[:, 0]))]


def _read(dataset: Counted, indices: Sequence[int]) -> np.ndarray:
    def count(start: int) -> np.ndarray:
        chunk = indices[start : start + CHUNK]
        found = [(index, *pair) for index in chunk for pair in dataset.count_labels(index).items()]
        return np.array(found, np.int64).reshape(-1, 3)

    with ThreadPoolExecutor(shares.THREADS) as pool:
        parts = pool.map(count, range(0, len(indices), CHUNK))
        return np.concatenate([np.empty((0, 3), np.int64), *parts])
