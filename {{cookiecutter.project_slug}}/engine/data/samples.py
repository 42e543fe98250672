"""What a data set hands to the loader: its list of samples, and each sample with its own seed."""

import itertools
import multiprocessing
import os
import pickle
import sys
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from engine.data import seeding
from engine.errors import LineError, UserError
from engine.ranks import distributed, names

PARTS = (Tensor, np.ndarray, np.number, np.bool_, int, float)  # of a sample, which batches can hold
LEAST = -0.5  # in an image of floats, 0 to 1, with a margin for noise that is added


class MapDataset(Protocol):
    """A map-style data set, such as those of dataset.py: a sample is a tuple (image, target, ...).

    If it has a list `samples` of tuples or dicts that begin with a path, messages name the file.

    If a training set has a method `set_epoch(epoch)`, from 0, each process that reads calls it
    before its first sample of an epoch: loader workers, which see no attribute that is set in
    main.py, or the rank if there are none. It is not called with --overfit.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple: ...


class Packed(Sequence):
    """The tuples `samples` as one array of bytes, unpickled one at a time.

    Forked workers share the rank's memory until one of them writes to it. Reading a Python object
    changes its refcount, so each worker would end up with a copy of a list.
    """

    def __init__(self, samples: Sequence[tuple]) -> None:
        pieces = [pickle.dumps(sample) for sample in samples]
        self.ends = np.cumsum([0, *map(len, pieces)])
        self.data = b"".join(pieces)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: Any) -> tuple:
        if isinstance(index, slice):
            return tuple(self[each] for each in range(len(self))[index])
        index = range(len(self))[index]
        return pickle.loads(self.data[self.ends[index] : self.ends[index + 1]])


class KeyedDataset(Dataset):
    """`dataset`, whose random numbers for a sample depend on seed, epoch and draw alone.

    A draw is the sample's index, plus a multiple of len(dataset) if it comes again in an epoch.

    An error names the sample: one that `dataset` raises, one of a loader worker that dies or
    hangs, and that of an integer label which is not in 0..num_classes - 1.
    """

    in_use: ClassVar[weakref.WeakSet["KeyedDataset"]] = weakref.WeakSet()
    epoch: int | None = None  # that `dataset` knows of, in this process

    def __init__(
        self, dataset: MapDataset, num_classes: int, seed: int, workers: int, is_any_size: bool
    ) -> None:
        self.dataset = dataset
        self.num_classes = num_classes
        self.seed = seed
        self.is_any_size = is_any_size
        # Written by each worker: its process id, and its sample's index + 1 while it reads one.
        self.reading = multiprocessing.RawArray("q", 2 * max(workers, 1))
        self.in_use.add(self)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int]) -> tuple:
        # The epoch comes with the draw: persistent workers keep attributes as they were.
        epoch, draw = key
        index = draw % len(self.dataset)
        self.note(index + 1)
        seeding.seed(self.seed, epoch, draw)
        try:
            if epoch != self.epoch and not self.is_any_size:
                self.epoch = epoch
                getattr(self.dataset, "set_epoch", int)(epoch)
            sample = self.dataset[index]
            self.check_parts(index, sample)
            self.check_label(index, sample[1])
            return sample
        except LineError:
            raise
        except Exception as error:
            line = f"while reading {self.name(index)}"
            if sys.version_info >= (3, 11):
                error.add_note(line)
            else:
                print(line, file=sys.stderr, flush=True)
            raise
        finally:
            self.note(0)

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[tuple]:
        """Return the samples of a batch, for validation with their indices; DataLoader calls it."""
        samples = [self[key] for key in keys]
        if self.is_any_size:
            return [(*sample, index) for sample, (_, index) in zip(samples, keys, strict=True)]
        shapes = [[part.shape for part in s if isinstance(part, Tensor)] for s in samples]
        other = next((i for i, each in enumerate(shapes) if each != shapes[0]), None)
        if other is not None:
            texts = (" and ".join(str(tuple(x)) for x in shapes[i]) for i in (other, 0))
            raise UserError(
                f"{self.name(keys[other][1])}: {next(texts)}, but {self.name(keys[0][1])} has "
                f"{next(texts)}; train_transform in dataset.py must return images of one size"
            )
        return samples

    def check_parts(self, index: int, sample: object) -> None:
        parts = sample if isinstance(sample, tuple | list) else (sample,)
        is_image = len(parts) > 1 and isinstance(parts[0], Tensor)
        if not is_image or not all(isinstance(part, PARTS) for part in parts):
            found = ", ".join(type(part).__name__ for part in parts)
            raise UserError(
                f"{self.name(index)}: dataset.py returns {found}; return a tuple, the image as a "
                "tensor and its target as a tensor or a number"
            )
        image = parts[0]
        if image.is_floating_point() and image.numel() and (least := image.min()) < LEAST:
            raise UserError(
                f"{self.name(index)}: the image has values down to {least:.3g}; return uint8, or "
                "with --channels floats from 0 to 1: it is normalised later, on the device"
            )

    def check_label(self, index: int, label: object) -> None:
        if isinstance(label, Tensor) and not label.ndim and not label.is_floating_point():
            label = label.item()
        if isinstance(label, int | np.integer) and not 0 <= label < self.num_classes:
            raise UserError(
                f"{self.name(index)}: label {label}, but the classes are 0 to "
                f"{self.num_classes - 1}; correct it, or return a float if it is no class"
            )

    def note(self, sample: int) -> None:
        if worker := get_worker_info():
            at = 2 * worker.id  # a slice would take ten times as long
            self.reading[at], self.reading[at + 1] = os.getpid(), sample

    def name(self, index: int) -> str:
        """Name a sample, by its index or a draw, with its file if that is known."""
        index %= len(self.dataset)
        path = self.path(index)
        return f"sample {index}" + (f", {path}" if path else "")

    def path(self, index: int) -> str:
        """Return the file of a sample, if `dataset` has a list `samples` that begins with it."""
        samples = getattr(self.dataset, "samples", None)
        sample = samples[index] if samples else None
        return str(sample[0]) if isinstance(sample, tuple | list) else ""


def fingerprint(dataset: MapDataset) -> str:
    """Return a text that changes once a sample is added, removed, renamed or relabelled.

    It is made of the data set's list `samples`, if it has one, with file names instead of paths.
    """
    total = 0
    for sample in getattr(dataset, "samples", ()):
        parts = sample.values() if isinstance(sample, dict) else sample
        values = [os.path.basename(part) if isinstance(part, str) else part for part in parts]
        total = zlib.crc32(repr(values).encode(), total)
    return f"{len(dataset)} images ({total:08x})"


def check_alike(data: Path, train: MapDataset, val: MapDataset, classes: Sequence[str]) -> None:
    """Raise a UserError, on all ranks, unless all have the same samples and classes."""
    sets = f"{fingerprint(train)} for training", f"{fingerprint(val)} for validation"
    mine = [*(f"class {number} {name}" for number, name in enumerate(classes)), *sets]
    found = distributed.gather_objects((names.own_rank(), mine))
    first, other = found[0], next((each for each in found if each[1] != found[0][1]), None)
    if other:
        pairs = itertools.zip_longest(other[1], first[1])
        there, here = next((a, b) for a, b in pairs if a != b)
        raise UserError(
            f"--data {data}: {other[0]} has {there}, {first[0]} has {here}; all ranks need the "
            "same files (./launch.sh --check names one that differs)"
        )
