"""What a data set hands to the loader: its list of samples, and each sample with its own seed."""

import functools
import itertools
import multiprocessing
import os
import pickle
import sys
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from engine.data import seeding
from engine.errors import LineError, UserError
from engine.ranks import distributed, names

IMAGES = ("image", "images", "img", "pixel_values", "input", "inputs")  # keys of a sample's image
TARGETS = (  # and of its target
    *("target", "targets", "label", "labels", "mask", "segmentation_mask", "annotation"),
    *("fine_label", "class", "y"),
)
WORKERS = 256  # loader workers of a rank, at most, whose samples are known if they die


class Key(NamedTuple):
    """Which sample, and in which epoch: what our samplers yield.

    draw: the sample's index, plus a multiple of len(dataset) if it comes again in an epoch.
    """

    epoch: int
    draw: int
    is_val: bool = False


class MapDataset(Protocol):
    """A map-style data set, such as those of dataset.py: a sample is a tuple (image, target, ...).

    If it has a list `samples` of tuples or dicts that begin with a path, messages name the file.

    If a training set has a method `set_epoch(epoch)`, from 0, each process that reads calls it
    before its first sample of an epoch: loader workers, which see no attribute that is set in
    main.py, or the rank if there are none.
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


class Seeded(Dataset):
    """`dataset` for a DataLoader with one of our samplers: seeds the random numbers of each sample.

    They depend on seed, epoch and sample alone, so that neither the number of ranks and workers nor
    an interruption changes an image. Errors name the sample.

    dataset: map-style; a sample is (image, target), perhaps with more parts, or a dict of them such
        as {"image": ..., "label": ...}. An image is a PIL image, an array (H, W) or (H, W, C), or a
        tensor (C, H, W). uint8 is normalised on the device, with ImageNet's mean and deviation or
        those of `dataset.format`; floats are taken as they are. A PIL image or array as target
        becomes a tensor (H, W).
    classes: their names or number.

    Raises a UserError for a sample of another kind, and for an integer label beyond the classes.

        train_loader = DataLoader(engine.Seeded(train_set, classes, seed=0), sampler=sampler, ...)
    """

    in_use: ClassVar[weakref.WeakSet["Seeded"]] = weakref.WeakSet()
    epoch: int | None = None  # that `dataset` knows of, in this process

    def __init__(self, dataset: Any, classes: int | Sequence[str], seed: int) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise UserError(
                f"{type(dataset).__name__} has no samples by number: give it to a DataLoader "
                "without engine.Seeded and sampler (EDITS.md)"
            )
        self.dataset = dataset
        self.num_classes = classes if isinstance(classes, int) else len(classes)
        self.seed = seed
        # Written by each worker: its process id, and its sample's index + 1 while it reads one.
        self.reading = multiprocessing.RawArray("q", 2 * WORKERS)
        self.in_use.add(self)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Key) -> tuple:
        # The epoch comes with the draw: persistent workers keep attributes as they were.
        epoch, draw, is_val = key
        index = draw % len(self.dataset)
        self.note(index + 1)
        seeding.seed(self.seed, epoch, draw)
        try:
            if epoch != self.epoch and not is_val:
                self.epoch = epoch
                getattr(self.dataset, "set_epoch", int)(epoch)
            parts = self.parts(index, self.dataset[index])
            self.check_label(index, parts[1])
            return parts
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

    def __getitems__(self, keys: Sequence[Key]) -> list[tuple]:
        """Return the samples of a batch, for validation with their indices; DataLoader calls it."""
        samples = [self[key] for key in keys]
        if keys[0].is_val:
            return [(*sample, key.draw) for sample, key in zip(samples, keys, strict=True)]
        shapes = [[part.shape for part in s if isinstance(part, Tensor)] for s in samples]
        other = next((i for i, each in enumerate(shapes) if each != shapes[0]), None)
        if other is not None:
            texts = (" and ".join(str(tuple(x)) for x in shapes[i]) for i in (other, 0))
            raise UserError(
                f"{self.name(keys[other].draw)}: {next(texts)}, but {self.name(keys[0].draw)} has "
                f"{next(texts)}; train_transform in dataset.py must return images of one size"
            )
        return samples

    def parts(self, index: int, sample: object) -> tuple:
        """Return a sample as (image (C, H, W), target, ...), as the class describes."""
        parts = ordered(sample)
        if parts is None or len(parts) < 2:
            found = type(sample).__name__
            if isinstance(sample, Mapping):
                found += f" of {', '.join(map(str, sample))}"
            raise UserError(
                f"{self.name(index)}: the data set returns {found}; return (image, target), or a "
                'dict with "image" and "label"'
            )
        image, target, *_ = parts
        if type(image) is not Tensor:
            image = as_image(image)
        if type(target) is not int and type(target) is not Tensor:
            target = as_target(target)
        is_image = isinstance(image, Tensor) and image.ndim == 3
        if not is_image or not (image.dtype == torch.uint8 or image.is_floating_point()):
            kind = type(image).__name__
            if isinstance(image, Tensor):
                kind = f"a tensor {tuple(image.shape)} of {image.dtype}"
            raise UserError(
                f"{self.name(index)}: the data set returns {kind} as image; return a PIL image, an "
                "array (H, W, C) or a tensor (C, H, W), uint8 or float"
            )
        if isinstance(target, str | None):
            raise UserError(
                f"{self.name(index)}: the data set returns {target!r} as target; return the number "
                "of the class, or a mask"
            )
        return image, target, *parts[2:]

    def check_label(self, index: int, label: object) -> None:
        if isinstance(label, Tensor) and not label.ndim and not label.is_floating_point():
            label = label.item()
        if isinstance(label, int | np.integer) and not 0 <= label < self.num_classes:
            raise UserError(
                f"{self.name(index)}: label {label}, but the classes are 0 to "
                f"{self.num_classes - 1}; correct it, or return a float if it is no class"
            )

    @functools.cached_property
    def channels(self) -> int:
        """How many channels the images have: of the first one, which is read for that."""
        with seeding.kept():
            return self[Key(0, 0, is_val=True)][0].shape[0]

    def note(self, sample: int) -> None:
        if (worker := get_worker_info()) and worker.id < WORKERS:
            at = 2 * worker.id  # a slice would take ten times as long
            self.reading[at], self.reading[at + 1] = os.getpid(), sample

    def name(self, index: int) -> str:
        """Name a sample, by its index or a draw, with its file if that is known."""
        return name(self.dataset, index)


def name(dataset: Any, index: int) -> str:
    """Name a sample of `dataset`, with its file if its list `samples` begins with that."""
    index %= len(dataset)
    samples = getattr(dataset, "samples", None)
    sample = samples[index] if samples else None
    path = sample[0] if isinstance(sample, tuple | list) else None
    return f"sample {index}" + (f", {path}" if isinstance(path, str | Path) else "")


def ordered(sample: Any) -> tuple | None:
    """Return the parts of a sample or a batch, image and target first; None if it has no such."""
    if isinstance(sample, tuple | list):
        return tuple(sample)
    if not isinstance(sample, Mapping):
        return None
    image = next((key for key in IMAGES if key in sample), None)
    target = next((key for key in TARGETS if key in sample), None)
    if image is None or target is None:
        return None
    return (
        sample[image],
        sample[target],
        *(value for key, value in sample.items() if key not in (image, target)),
    )


def as_image(image: Any) -> Any:
    """Return a PIL image or array as a tensor (C, H, W), RGB or of float32; others as they are."""
    if isinstance(image, Image.Image):
        is_deep = image.mode in ("F", "I") or image.mode.startswith("I;")
        image = np.asarray(image, np.float32) if is_deep else np.asarray(image.convert("RGB"))
    if isinstance(image, np.ndarray):
        pixels = image if image.ndim == 3 else image[..., None]
        # A copy, because the array may be read-only; channels stay last in memory.
        return torch.from_numpy(np.array(pixels)).permute(2, 0, 1) if pixels.ndim == 3 else image
    return image.as_subclass(Tensor) if isinstance(image, Tensor) else image


def as_target(target: Any) -> Any:
    """Return a PIL image or array, a mask, as a tensor (H, W); others as they are."""
    if isinstance(target, Image.Image):
        target = np.asarray(target)
    if isinstance(target, np.ndarray):
        return torch.from_numpy(np.array(target))
    return target.as_subclass(Tensor) if isinstance(target, Tensor) else target


def of(loader: Any) -> Any:
    """Return the data set of a DataLoader, as the person has written it."""
    dataset = loader.dataset
    return dataset.dataset if isinstance(dataset, Seeded) else dataset


def fingerprint(dataset: MapDataset) -> str:
    """Return a text that changes once a sample is added, removed, renamed or relabelled.

    It is made of the data set's list `samples`, if it has one, with file names instead of paths.
    """
    total = 0
    count = len(dataset) if hasattr(dataset, "__len__") else "?"
    for sample in getattr(dataset, "samples", None) or ():
        parts = sample.values() if isinstance(sample, dict) else sample
        parts = parts if isinstance(parts, Iterable) and not isinstance(parts, str) else (parts,)
        values = [os.path.basename(part) if isinstance(part, str) else part for part in parts]
        total = zlib.crc32(repr(values).encode(), total)
    return f"{count} images ({total:08x})"


def check_alike(classes: Sequence[str], **datasets: Any) -> None:
    """Raise a UserError, on all ranks, unless all have the same classes and samples.

    datasets: by what they are for, training or validation.
    """
    sets = [f"{fingerprint(dataset)} for {use}" for use, dataset in datasets.items()]
    mine = [*(f"class {number} {name}" for number, name in enumerate(classes)), *sets]
    found = distributed.gather_objects((names.own_rank(), mine))
    first, other = found[0], next((each for each in found if each[1] != found[0][1]), None)
    if other:
        pairs = itertools.zip_longest(other[1], first[1])
        there, here = next((a, b) for a, b in pairs if a != b)
        raise UserError(
            f"--data: {other[0]} has {there}, {first[0]} has {here}; all ranks need the "
            "same files (./launch.sh --check names one that differs)"
        )
