"""Classes of unequal size: how often each occurs, weights for the loss, draws for the sampler."""

import contextlib
import hashlib
import math
import os
import re
import time
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from engine import files
from engine.data import shares
from engine.data.listing import composed
from engine.data.samples import MapDataset
from engine.errors import UserError, shorten
from engine.ranks import distributed

CACHE = "class_counts.npz"  # in --output-dir
CHUNK = 256  # samples that are counted at once
LINE = re.compile(r"(.*\S)(?:\s*[=,;:]\s*|\s+)(\S+)")  # NAME WEIGHT, NAME = WEIGHT, NAME,WEIGHT


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


def count(dataset: MapDataset, classes: Sequence[str], folder: Path) -> Counts:
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
            origin = f"; {len(dataset)} masks read in {time.monotonic() - began:.1f} s"
            _keep(path, key, rows)
    samples, labels, counts = rows.T.copy()
    return Counts(samples, labels, counts, classes, origin)


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
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
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
        contextlib.suppress(UserError),  # it cannot be written
        files.writing(path, parents=True) as tmp_path,
        open(tmp_path, "wb") as file,
    ):
        np.savez(file, key=np.array(key), rows=rows)


def class_weights(
    given: str | Sequence[float] | None, counts: Counts | None, classes: Sequence[str]
) -> tuple[float, ...] | None:
    """Return a weight for each class: of --class-weights auto (from `counts`) or of a file.

    auto: total / (classes x count), scikit-learn's "balanced" (King and Zeng 2001); 1 for a class
    that does not occur. What is no text, None or the weights of a checkpoint, is returned as it is.
    """
    if not isinstance(given, str):
        return None if given is None else tuple(given)
    if given == "auto":
        assert counts, "of balance.count"
        totals = counts.of_classes()
        present = totals > 0
        mean = totals.sum() / max(present.sum(), 1)
        weights = np.where(present, mean / np.maximum(totals, 1), 1.0)
        shares.warn(classes, totals, "none of the training samples: weight 1")
    else:
        weights = np.array(distributed.from_rank_zero(read_weights, Path(given), classes))
    texts = [f"{weight:.3g}" for weight in weights]
    tail = counts.origin if counts and given == "auto" else f"; from {given}"
    shares.say_line("weights in the loss", classes, weights, texts, tail)
    return tuple(weights.tolist())


def read_weights(path: Path, classes: Sequence[str]) -> list[float]:
    """Return the weight of each class, of a file with lines NAME WEIGHT; = or a comma may separate.

    Raises a UserError unless each class has one, a positive number.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise UserError(f"--class-weights {path}: not UTF-8; save it as UTF-8") from None
    except OSError as error:
        raise UserError(
            f"--class-weights {path}: cannot be read ({error.strerror}); use auto, or a file with "
            "lines NAME WEIGHT"
        ) from None
    number_of = {composed(name): number for number, name in enumerate(classes)}
    found: dict[int, float] = {}
    for row, line in enumerate(lines, 1):
        if not (line := re.sub(r"(^|\s)#.*", "", line).strip()):
            continue
        match = LINE.fullmatch(line)
        name, text = match.groups() if match else (line, "")
        number = number_of.get(composed(name))
        if not match:
            reason = f"{line}: expected NAME WEIGHT"
        elif number is None:
            reason = f"{name} is no class; the classes are {shorten(classes)}"
        elif number in found:
            reason = f"{name} comes twice; name each class once"
        elif not _is_weight(text):
            reason = f"{text} is no positive number"
        else:
            found[number] = float(text)
            continue
        raise UserError(f"{path}, line {row}: {reason}")
    if missing := [name for number, name in enumerate(classes) if number not in found]:
        raise UserError(f"{path}: no weight for {shorten(missing)}; each class needs one")
    return [found[number] for number in range(len(classes))]


def _is_weight(text: str) -> bool:
    try:
        return 0 < float(np.float32(text)) < math.inf  # as the loss takes it
    except ValueError:
        return False


def say_balanced(counts: Counts, total: int) -> None:
    """Print how often --sampler balanced draws in an epoch of `total` images."""
    images = np.bincount(counts.labels, minlength=len(counts.classes))
    each = total // max(int(np.count_nonzero(images)), 1)
    rare = int(np.where(images, images, total + 1).argmin())
    distributed.say(
        f"--sampler balanced: each class {each} times in an epoch, so that each image of "
        f"{counts.classes[rare]}, which has the fewest, comes {each / images[rare]:.3g} times"
        f"{counts.origin}"
    )
    shares.warn(counts.classes, images, "none of the training images: none is drawn for it")


def draw(counts: Counts, total: int, generator: torch.Generator) -> Tensor:
    """Return `total` draws in random order, int64: image + repeat x total.

    Each class that occurs comes equally often, to one, and within a class each of its images. An
    image of several classes comes for each of them. `repeat` numbers the draws of an image from 0.
    """
    samples, labels = torch.from_numpy(counts.samples), torch.from_numpy(counts.labels)
    order = torch.randperm(len(labels), generator=generator)
    order = order[labels[order].argsort(stable=True)]  # by class, within a class random
    sizes = torch.bincount(labels, minlength=len(counts.classes))
    present = sizes.nonzero()[:, 0]
    quota = torch.zeros_like(sizes)
    quota[present] = total // len(present)
    luck = torch.randperm(len(present), generator=generator)[: total % len(present)]
    quota[present[luck]] += 1
    labels = labels[order]
    place = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes)[labels]  # within its class
    size, quota = sizes[labels], quota[labels]
    times = torch.zeros(total, dtype=torch.int64)
    times.index_add_(0, samples[order], quota // size + (place < quota % size))
    images = torch.arange(total).repeat_interleave(times)
    repeat = torch.arange(total) - (times.cumsum(0) - times).repeat_interleave(times)
    return (images + repeat * total)[torch.randperm(total, generator=generator)]
