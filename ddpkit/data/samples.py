"""What a data set hands to the loader: its samples, each with random numbers of its own."""

import contextlib
import functools
import multiprocessing
import os
import pickle
import random
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ddpkit.errors import LineError, UserError, print_error
from ddpkit.ranks import distributed

BITS = 2**64 - 1
IMAGES = ("image", "images", "img", "pixel_values")  # keys of a sample's image
TARGETS = ("target", "targets", "label", "labels", "mask", "annotation", "fine_label")
WORKERS = 256  # loader workers of a rank, at most, whose samples are known if they die
WANTED = (
    'return (image, target) or a dict with "image" and "label": a PIL image, an array (H, W, C) or '
    "a tensor (C, H, W), uint8 or float, and the number of the class, or a mask"
)
MapDataset = Any  # with len and samples by number


def hash_key(*key: int) -> int:
    """Return 64 bits that look random and depend on `key`, integers, alone: SplitMix64's mixer."""
    value = 0
    for part in key:
        value = (value + int(part) + 0x9E3779B97F4A7C15) & BITS
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & BITS
        value = (value ^ value >> 27) * 0x94D049BB133111EB & BITS
        value ^= value >> 31
    return value


def seed(*key: int) -> None:
    """Seed the generators of Python, NumPy and torch, on CPU and GPU."""
    value = hash_key(*key)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.default_generator.manual_seed(value)  # torch.manual_seed takes a hundred times as long
    device = torch.get_device_module()
    # Apple's does not say whether it is in use; a loader worker has to leave it alone.
    is_in_use = getattr(device, "is_initialized", lambda: get_worker_info() is None)
    if device is not torch.cpu and is_in_use():
        device.manual_seed(value)


def be_deterministic() -> None:
    """Have GPUs compute the same bits each time; a warning names an operation that cannot."""
    from torchmetrics import Metric

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling what torch.empty returns takes time, and nothing here reads it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    wrap = getattr(Metric, "_wrap_update", None)  # torchmetrics has no public place for this
    if wrap is None:
        distributed.say("--deterministic: this torchmetrics takes more memory to count pixels")
    elif wrap.__module__ != __name__:
        Metric._wrap_update = lambda self, update: _in_any_order()(wrap(self, update))  # type: ignore


@contextlib.contextmanager
def _in_any_order() -> Iterator[None]:
    """Let metrics count, exactly in any order; torchmetrics takes pixels x classes^2 otherwise."""
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


class Key(NamedTuple):
    """Which sample, and in which epoch: what our samplers yield."""

    epoch: int
    number: int  # of the sample
    is_val: bool = False


class Packed(Sequence):
    """A list of tuples as bytes, which forked workers share; reading a list makes copies of it."""

    def __init__(self, samples: Sequence[tuple]) -> None:
        pieces = [pickle.dumps(sample) for sample in samples]
        self.ends = np.cumsum([0, *map(len, pieces)])
        self.data = b"".join(pieces)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: Any) -> tuple:
        index = range(len(self))[index]
        return pickle.loads(self.data[self.ends[index] : self.ends[index + 1]])


class Seeded(Dataset):
    """`dataset` for a DataLoader with one of our samplers: seeds the random numbers of each sample.

    They depend on seed, epoch and sample alone. Errors name the sample. `set_epoch(epoch)` of a
    training set is called in each process that reads, before its first sample of an epoch.

    dataset: map-style; a sample is (image, target), perhaps with more parts, or a dict of them such
        as {"image": ..., "label": ...}. An image is a PIL image, an array (H, W) or (H, W, C), or a
        tensor (C, H, W). uint8 is normalised on the device, with ImageNet's mean and deviation or
        those of `dataset.format`; floats are taken as they are. A PIL image or array as target
        becomes a tensor (H, W).
    classes: their names or number.

    Raises a UserError for a sample of another kind, and for an integer label beyond the classes.

        train_loader = DataLoader(ddpkit.Seeded(train_set, classes, seed=0), sampler=sampler, ...)
    """

    in_use: ClassVar[weakref.WeakSet["Seeded"]] = weakref.WeakSet()
    epoch: int | None = None  # that `dataset` knows of, in this process

    def __init__(self, dataset: MapDataset, classes: int | Sequence[str], seed: int) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            line = f"{type(dataset).__name__} has no samples by number: give it to a DataLoader"
            raise UserError(f"{line} without ddpkit.Seeded and sampler (EDITS.md)")
        self.dataset, self.seed = dataset, seed
        self.num_classes = classes if isinstance(classes, int) else len(classes)
        # Written by each worker: its process id, and its sample's index + 1 while it reads one.
        self.reading = multiprocessing.RawArray("q", 2 * WORKERS)
        self.in_use.add(self)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Key) -> tuple:
        # The epoch comes with the key: persistent workers keep attributes as they were.
        epoch, index, is_val = key
        self.note(index + 1)
        seed(self.seed, epoch, index)
        try:
            if epoch != self.epoch and not is_val:
                self.epoch = epoch
                getattr(self.dataset, "set_epoch", int)(epoch)
            return self.parts(index, self.dataset[index])
        except LineError:
            raise
        except Exception as error:
            say = getattr(error, "add_note", print_error)  # Python 3.10 has none
            say(f"while reading {name(self.dataset, index)}")
            raise
        finally:
            self.note(0)

    def __getitems__(self, keys: Sequence[Key]) -> list[tuple]:
        """Return the samples of a batch, for validation with their indices; DataLoader calls it."""
        samples = [self[key] for key in keys]
        if keys[0].is_val:
            return [(*sample, key.number) for sample, key in zip(samples, keys, strict=True)]
        for key, (image, *_) in zip(keys, samples, strict=True):
            if image.shape != samples[0][0].shape:
                here, there = (name(self.dataset, each.number) for each in (key, keys[0]))
                line = f"{here} has {tuple(image.shape)}, {there} {tuple(samples[0][0].shape)}"
                raise UserError(f"{line}; let train_transform in dataset.py return one size")
        return samples

    def parts(self, index: int, sample: object) -> tuple:
        """Return a sample as (image (C, H, W), target, ...), as the class describes."""
        image, target, *others = ordered(sample) or (None, None)
        image, target = as_tensor(image, True), as_tensor(target, False)
        is_image = isinstance(image, Tensor) and image.ndim == 3
        if not is_image or not (image.dtype == torch.uint8 or image.is_floating_point()):
            kind = type(sample if image is None else image).__name__
            is_tensor = isinstance(image, Tensor)
            found = f"{kind} {tuple(image.shape)}, {image.dtype}" if is_tensor else kind
            raise UserError(f"{name(self.dataset, index)}: the data set returns {found}; {WANTED}")
        if isinstance(target, str | None):
            raise UserError(f"{name(self.dataset, index)}: the target is {target!r}; {WANTED}")
        is_one = isinstance(target, Tensor) and not target.ndim and not target.is_floating_point()
        label = target.item() if is_one else target
        if isinstance(label, int | np.integer) and not 0 <= label < self.num_classes:
            line = f"{name(self.dataset, index)}: label {label}, but the classes are 0 to"
            line += f" {self.num_classes - 1}; correct it, or return a float if it is no class"
            raise UserError(line)
        return image, target, *others

    @functools.cached_property
    def channels(self) -> int:
        """How many channels the images have: of the first one, which is read for that."""
        found = self[Key(0, 0, is_val=True)][0].shape[0]
        seed(self.seed)  # as `setup` does
        return found

    def note(self, sample: int) -> None:
        if (worker := get_worker_info()) and worker.id < WORKERS:
            at = 2 * worker.id  # a slice would take ten times as long
            self.reading[at], self.reading[at + 1] = os.getpid(), sample


def name(dataset: MapDataset, index: int) -> str:
    """Name a sample, by its index or a draw, with its file if the list `samples` begins with it."""
    index %= len(dataset)
    samples = getattr(dataset, "samples", None)
    sample = samples[index] if isinstance(samples, Sequence) else None
    path = sample[0] if isinstance(sample, tuple | list) else None
    return f"sample {index}" + (f", {path}" if isinstance(path, str | Path) else "")


def ordered(sample: Any) -> tuple | None:
    """Return the parts of a sample or a batch, image and target first; None if it has no such."""
    if isinstance(sample, tuple | list):
        return tuple(sample) if len(sample) > 1 else None
    if not isinstance(sample, Mapping):
        return None
    first = [next((key for key in keys if key in sample), None) for keys in (IMAGES, TARGETS)]
    if None in first:
        return None
    return tuple(sample[key] for key in (*first, *(key for key in sample if key not in first)))


def as_tensor(part: Any, is_image: bool) -> Any:
    """Return a PIL image or array as a tensor (C, H, W), or of a target (H, W)."""
    if type(part) is Tensor or type(part) is int:
        return part
    if is_image and isinstance(part, Image.Image):
        is_deep = part.mode in ("F", "I") or part.mode.startswith("I;")
        part = np.asarray(part, np.float32) if is_deep else part.convert("RGB")
    if isinstance(part, Image.Image | np.ndarray):
        values = torch.from_numpy(np.array(part))  # a copy, because an array may be read-only
        values = values[..., None] if is_image and values.ndim == 2 else values
        # Channels stay last in memory.
        return values.permute(2, 0, 1) if is_image and values.ndim == 3 else values
    return part.as_subclass(Tensor) if isinstance(part, Tensor) else part


def of(loader: Any) -> Any:
    """Return the data set of a DataLoader, as the person has written it."""
    dataset = loader.dataset
    return dataset.dataset if isinstance(dataset, Seeded) else dataset


def fingerprint(dataset: MapDataset) -> str:
    """Return a checksum of the list `samples`, if there is one, with file names for paths."""
    total, count = 0, len(dataset) if hasattr(dataset, "__len__") else "?"
    samples = getattr(dataset, "samples", None)
    for sample in samples if isinstance(samples, Sequence) else ():
        parts = sample if isinstance(sample, tuple | list) else [sample]
        values = [os.path.basename(part) if isinstance(part, str) else part for part in parts]
        total = zlib.crc32(repr(values).encode(), total)
    return f"{count} images ({total:08x})"
