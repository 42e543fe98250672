"""What a data set hands to the loader: its list of samples, and each sample with its own seed."""

import multiprocessing
import os
import pickle
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from engine.data import seeding
from engine.errors import UserError

PARTS = (Tensor, np.ndarray, np.number, np.bool_, int, float)  # of a sample, which batches can hold


class MapDataset(Protocol):
    """A map-style data set, such as those of dataset.py: a sample is a tuple (image, target, ...).

    If it has a list `samples` of tuples or dicts that begin with a path, messages name the file.
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
        index = range(len(self))[index]
        return pickle.loads(self.data[self.ends[index] : self.ends[index + 1]])


class KeyedDataset(Dataset):
    """`dataset`, whose random numbers for a sample depend on seed, epoch and draw alone.

    A draw is the sample's index, plus a multiple of len(dataset) if it comes again in an epoch.

    An error names the sample: one that `dataset` raises, one of a loader worker that dies or
    hangs, and that of an integer label which is not in 0..num_classes - 1.
    """

    in_use: ClassVar[list["KeyedDataset"]] = []

    def __init__(
        self, dataset: MapDataset, num_classes: int, seed: int, workers: int, is_any_size: bool
    ) -> None:
        self.dataset = dataset
        self.num_classes = num_classes
        self.seed = seed
        self.is_any_size = is_any_size
        # Written by each worker: its process id, and its sample's index + 1 while it reads one.
        self.reading = multiprocessing.RawArray("q", 2 * max(workers, 1))
        self.in_use.append(self)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int]) -> tuple:
        # The epoch comes with the draw: persistent workers would keep an attribute as it was.
        epoch, draw = key
        index = draw % len(self.dataset)
        self.note(index + 1)
        seeding.seed(self.seed, epoch, draw)
        try:
            sample = self.dataset[index]
            self.check_parts(index, sample)
            self.check_label(index, sample[1])
            return sample
        except UserError:
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
