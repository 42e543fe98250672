"""What a dataset hands to the loader: its samples, each with random numbers of its own."""

import bisect
import contextlib
import itertools
import multiprocessing
import operator
import os
import pickle
import random
import sys
import time
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from ddpkit.errors import LineError, UserError, print_error, shorten
from ddpkit.ranks import distributed
from ddpkit.ranks.values import checksum

BITS = 2**64 - 1
IMAGES = ("image", "images", "img", "pixel_values")  # keys of a sample's image
TARGETS = ("target", "targets", "label", "labels", "mask", "annotation", "fine_label")
WORKERS = 256  # loader workers of a rank, at most, whose samples are known if they die
TWICE = 16  # samples of a run, at most, that are read twice: one may be left as it is
READS = 8  # of one sample: flips by chance are not taken for none
WANTED = (
    'return (image, target) or a dict with "image" and "label": a PIL image, an array (H, W, C) or '
    "a tensor (C, H, W), uint8 or float, and a class number or a mask"
)
UNLABELLED = (255, -100)  # pixels: in masks, and what torch's losses leave out
DIFFERS = (
    "reading it twice gives different results, so this run is not reproducible and cannot resume "
    "exactly: it depends on earlier reads (a cache, a counter), or on its own generator; use "
    "random, numpy.random or torch, or seed the generator in __getitem__ with torch.initial_seed()"
)
MapDataset = Any  # with len and samples by number
# Of lists `samples`, which it keeps: of a million a checksum takes seconds, and a start asks for it
# several times.
_checksums: dict[tuple, tuple[Sequence, int]] = {}


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
    # torch.manual_seed takes a hundred times as long
    torch.default_generator.manual_seed(value)
    device = torch.get_device_module()
    if device is torch.cpu:
        return
    # Apple's does not say whether it is in use; a loader worker has to leave it alone.
    is_in_use = getattr(device, "is_initialized", lambda: get_worker_info() is None)
    if is_in_use():
        device.manual_seed(value)


def random_state() -> tuple:
    """Return the state of the generators of Python, NumPy and torch, on the CPU."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_random_state(state: tuple) -> None:
    of_python, of_numpy, of_torch = state
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)


@contextlib.contextmanager
def keeping_random_state() -> Iterator[None]:
    """Leave the generators of Python, NumPy and torch, on the CPU, as they were before."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


def be_deterministic() -> None:
    """Have GPUs compute the same bits each time; a warning names an operation that cannot."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    torch.use_deterministic_algorithms(True, warn_only=True)
    metric: Any = getattr(sys.modules.get("torchmetrics"), "Metric", None)
    # it has no public place for this
    wrap = getattr(metric, "_wrap_update", None)
    if wrap and wrap.__module__ != __name__:
        metric._wrap_update = lambda self, update: _in_any_order()(wrap(self, update))


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
        self.ends = np.cumsum([0, *map(len, pieces)])  # where each begins, and the end
        self.data = b"".join(pieces)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: Any) -> tuple:
        index = range(len(self))[index]  # negative ones, and an error beyond the end
        return pickle.loads(self.data[self.ends[index] : self.ends[index + 1]])


class Seeded(Dataset):
    """`dataset` for a DataLoader with one of our samplers: seeds the random numbers of each sample.

    They depend on seed, epoch and sample alone; a line says if two reads of a sample differ. Errors
    name the sample. `set_epoch(epoch)` of a training set, if it has one, is called when an epoch
    begins.

    dataset: map-style; a sample is (image, target), perhaps with more parts, or a dict of them such
        as {"image": ..., "label": ...}. An image is a PIL image, an array (H, W) or (H, W, C), or a
        tensor (C, H, W). uint8 is normalised on the device, with ImageNet's mean and deviation or
        those of `dataset.format`; floats are taken as they are, of a PIL image 0 to 1. A PIL image
        or array as target becomes a tensor (H, W). A Subset and other wrappers have the format,
        the names and the counts of what they wrap.
    classes: their names or number; None: samples are taken as they are, of any kind.

    Raises a UserError for a sample of another kind, and for integers beyond the classes as a label
    or in a mask, (H, W) as the image; pixels without a label are 255, or -100.

        train_loader = ddpkit.train_loader(train_set, 32, classes=classes)
    """

    in_use: ClassVar[weakref.WeakSet["Seeded"]] = weakref.WeakSet()
    reading: Any = ()

    def __init__(
        self, dataset: MapDataset, classes: int | Sequence[str] | None, seed: int
    ) -> None:
        count_samples(dataset)
        self.dataset = dataset
        self.seed = seed
        self.is_any = classes is None
        self.num_classes = classes if isinstance(classes, int) else len(classes or ())
        # Written by each worker: its process id, and its sample's index + 1 while it
        # reads one. Written by the first worker: how many samples it has still to read
        # twice, and the index + 1 of one of which two reads differ.
        self.twice: Any = [TWICE, 0]
        # Without /dev/shm there is neither of the two, nor are there workers.
        with contextlib.suppress(OSError):
            self.reading = multiprocessing.RawArray("q", 2 * WORKERS)
            self.twice = multiprocessing.RawArray("q", self.twice)
        self.in_use.add(self)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Key) -> tuple:
        index = key.number
        self.note_sample(index + 1)
        seed(self.seed, key.epoch, index)
        try:
            sample = self.dataset[index]
            if not self.is_any:
                sample = self.parts(index, sample)
        except LineError:
            raise
        except Exception as error:
            say = getattr(error, "add_note", print_error)  # Python 3.10 has none
            say(f"while reading {name(self.dataset, index)}")
            raise
        self.note_sample(0)  # not if reading it ends its process
        return sample

    def __getitems__(self, keys: Sequence[Key]) -> list[tuple]:
        """Return the samples of a batch, for validation with their indices; DataLoader calls it."""
        samples = [self[key] for key in keys]
        pairs = list(zip(samples, keys, strict=True))
        if not keys[0].is_val:
            self._read_twice(pairs)
        if self.is_any:
            return samples
        if keys[0].is_val:  # of any sizes: `Collate` makes batches of each
            return [(*sample, key.number) for sample, key in pairs]
        # In a batch of both types uint8 would become float, but stay 0 to 255.
        kinds = {(image.shape, image.dtype): key.number for (image, *_), key in pairs}
        if len(kinds) > 1:
            texts = [
                f"{name(self.dataset, index)} has {tuple(shape)}, {dtype}"
                for (shape, dtype), index in kinds.items()
            ]
            raise UserError(
                f"{'; '.join(texts[:2])}: train_transform in dataset.py must return one size, type"
            )
        return samples

    def _read_twice(self, pairs: Sequence[tuple[tuple, Key]]) -> None:
        """Compare the first samples of a run with what a second read of them returns."""
        worker = get_worker_info()
        # In a debugger each would stop at a breakpoint twice.
        left = self.twice[0]
        if not left or (worker and worker.id) or distributed.any_debugged():
            return
        until = time.monotonic() + 1  # where samples take long, a few have to do
        with keeping_random_state():  # from which a collate function goes on to draw
            for sample, key in pairs[:left]:
                left -= 1
                is_other = checksum(sample) != checksum(self[key])
                if is_other:
                    self.twice[1] = key.number + 1
                if is_other or time.monotonic() > until:
                    left = 0
                    break
        self.twice[0] = left

    def say_unequal(self, batches: Iterator) -> Iterator:
        """Yield `batches`; say, once, if a sample was another when it was read again."""
        for batch in batches:
            if self.twice[1]:  # a worker has found one
                sample = name(self.dataset, self.twice[1] - 1)
                self.twice[1] = 0
                distributed.print0(f"warning: {sample}: {DIFFERS}")
            yield batch

    def parts(self, index: int, sample: object) -> tuple:
        """Return a sample as (image (C, H, W), target, ...), as the class describes."""
        given = ordered(sample) or (None, None)  # refused below
        image = as_tensor(given[0], is_image=True)
        is_image = isinstance(image, Tensor) and image.ndim == 3
        is_float = is_image and image.is_floating_point()
        is_right = is_float or (is_image and image.dtype == torch.uint8)
        if is_float and is_pil(given[0]):
            # mode F, which no transform has normalised
            is_right = bool(image.min() >= 0 and image.max() <= 1)
        if not is_right:
            kind = type(sample if image is None else image).__name__
            if hasattr(image, "dtype"):
                kind += f" {tuple(image.shape)}, {image.dtype}"
            line = f"{name(self.dataset, index)}: the dataset returns {kind}; {WANTED}"
            if is_image:
                line += "; divide other values by the value of white, such as 65535.0"
            raise UserError(line)
        mask = given[1]
        # A tv_tensors.Image of integers, by its name as torchvision may not be there.
        is_tv_image = isinstance(mask, Tensor) and type(mask).__name__ == "Image"
        if is_tv_image and not mask.is_floating_point() and len(mask) == 1:
            raise UserError(
                f"{name(self.dataset, index)}: the mask became a tv_tensors.Image, whose class "
                "numbers transforms average: crop first, or use tv_tensors.Mask(mask.read())"
            )
        target = as_tensor(mask, is_image=False)
        self._check_target(index, target, image)
        return (image, target, *given[2:])

    def _check_target(self, index: int, target: Any, image: Tensor) -> None:
        """Raise a UserError for what is no target, and for numbers beyond the classes."""
        if isinstance(target, str | None):
            raise UserError(
                f"{name(self.dataset, index)}: the target is {target!r}; {WANTED}"
            )
        if isinstance(target, Tensor) and target.ndim > 1:
            self._check_mask(index, image, target)
            return
        if isinstance(target, Tensor) and target.ndim == 0:
            target = target.item()  # a float is no class
        if isinstance(target, int | np.integer) and not 0 <= target < self.num_classes:
            raise UserError(
                f"{name(self.dataset, index)}: label {target}, but the classes are 0 to "
                f"{self.num_classes - 1}; correct it, or return a float if it is not a class"
            )

    def _check_mask(self, index: int, image: Tensor, mask: Tensor) -> None:
        """Raise a UserError for numbers beyond the classes: a GPU would end the run elsewhere."""
        is_mask = mask.shape[-2:] == image.shape[-2:] and mask.device.type == "cpu"
        if not is_mask or mask.dtype == torch.bool or mask.is_floating_point():
            return
        values = mask.numpy()  # a fifth of the time that torch takes for this
        if values.dtype == np.uint8:
            # The usual case, in the least time: each number and 1, so that 255 is 0.
            following = values + np.uint8(1)
            if following.max(initial=0) <= self.num_classes:
                return
        # without a sign, so that negative ones are large
        beyond = values.view(f"u{values.itemsize}") >= self.num_classes
        if beyond.any():
            for void in UNLABELLED:
                beyond &= values != void
        if not beyond.any():
            return
        if mask.shape == image.shape:
            raise UserError(
                f"{name(self.dataset, index)}: the second element of a sample must be its target, "
                f"but here is an image {tuple(mask.shape)}: return (image, target, ...)"
            )
        wrong = shorten([str(n) for n in np.unique(values[beyond]).tolist()])
        raise UserError(
            f"{name(self.dataset, index)}: the mask has {wrong}, but the classes are 0 to "
            f"{self.num_classes - 1} (void: 255 or -100); correct it, or return floats if they are "
            "not classes"
        )

    def note_sample(self, sample: int) -> None:
        worker = get_worker_info()
        if worker and worker.id < WORKERS:
            at = 2 * worker.id  # a slice would take ten times as long
            self.reading[at] = os.getpid()
            self.reading[at + 1] = sample


def count_samples(dataset: MapDataset) -> int:
    """Return how many samples there are; raise a UserError if they have no numbers."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise UserError(
            f"{type(dataset).__name__} cannot be indexed: pass it to your own DataLoader instead "
            "of ddpkit.train_loader (EDITS.md)"
        )
    return len(dataset)


def size(dataset: MapDataset) -> Any:
    """Return how many samples there are, an int; None for a stream that does not say so."""
    with contextlib.suppress(TypeError, NotImplementedError):
        return len(dataset)
    return None  # of a stream


def wrapped(dataset: object) -> list:
    """Return the datasets of a wrapper, such as Subset or ConcatDataset; of others none."""
    inner = getattr(dataset, "datasets", None)
    if isinstance(inner, Mapping):  # of a StackDataset
        inner = list(inner.values())
    if not isinstance(inner, list | tuple):
        inner = [getattr(dataset, "dataset", None)]
    return [
        each
        for each in inner
        if hasattr(each, "__getitem__") or hasattr(each, "__iter__")
    ]


def places(dataset: MapDataset, index: int) -> Iterator[tuple]:
    """Yield where a sample is: `dataset` and its index, then those of the sets within it.

    From the outside to the inside, so that what somebody has put around a dataset counts.
    """
    yield dataset, index
    for inner, at in _inner(dataset, index):
        yield from places(inner, at)


def _inner(dataset: MapDataset, index: int) -> list[tuple]:
    """Return in which of the datasets that `dataset` wraps a sample is, and its index there.

    None of a wrapper with neither `indices` nor as many samples as it wraps: its order may be any.
    """
    sets = wrapped(dataset)
    sizes = [size(each) for each in sets]
    total = size(dataset)
    if not total or None in sizes:
        return []
    index %= total
    indices: Any = getattr(dataset, "indices", None)
    with contextlib.suppress(TypeError, LookupError):  # of indices that are no numbers
        if len(sets) == 1 and len(indices) == total:
            return [(sets[0], operator.index(indices[index]))]  # as Subset
    if sum(sizes) != total:  # as StackDataset, whose sample has something of all
        return [(each, index) for each in sets if size(each) == total]
    # as ConcatDataset, or a transform of one
    ends = list(itertools.accumulate(sizes))
    number = bisect.bisect_right(ends, index)
    return [(sets[number], index - ends[number] + sizes[number])]


def listed(dataset: object) -> Sequence:
    """Return the list `samples` of a dataset, empty if it has none."""
    samples = getattr(dataset, "samples", None)
    return samples if isinstance(samples, Sequence) else ()


def name(dataset: MapDataset, index: int) -> str:
    """Name a sample, by its index or a draw, with its file if a list `samples` begins with it."""
    index %= len(dataset)
    path = file_of(dataset, index)
    return f"sample {index}, {path}" if path else f"sample {index}"


def file_of(dataset: MapDataset, index: int) -> str:
    """Return the path with which a list `samples` begins at `index`; "" if there is none."""
    for each, at in places(dataset, index):
        samples = listed(each)
        sample = samples[at] if len(samples) == size(each) else None
        path = sample[0] if isinstance(sample, tuple | list) else None
        if isinstance(path, str | Path):
            return str(path)
    return ""


def tell_epoch(dataset: object, epoch: int) -> None:
    """Call the `set_epoch` of a dataset, or those of the datasets that it wraps."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)  # which is to tell what it wraps
        return
    for inner in wrapped(dataset):
        tell_epoch(inner, epoch)


def ordered(sample: object) -> tuple | None:
    """Return the parts of a sample or a batch, image and target first; None if it has no such."""
    if isinstance(sample, tuple | list):
        return tuple(sample) if len(sample) > 1 else None
    if not isinstance(sample, Mapping):
        return None
    image = next((key for key in IMAGES if key in sample), None)
    target = next((key for key in TARGETS if key in sample), None)
    if image is None or target is None:
        return None
    others = [part for key, part in sample.items() if key not in (image, target)]
    return (sample[image], sample[target], *others)


def is_pil(part: object) -> bool:
    """Return whether it is a PIL image; without Pillow nothing is."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(part, module.Image)


def as_tensor(part: Any, is_image: bool) -> Any:
    """Return a PIL image or array as a tensor (C, H, W), or of a target (H, W)."""
    if isinstance(part, Tensor):
        return part.as_subclass(Tensor)  # torchvision's are slower
    if is_pil(part):
        if is_image and part.mode[0] not in "IF":
            part = part.convert("RGB")  # of 8 bits or less
    elif not isinstance(part, np.ndarray):
        return part
    array = np.array(part)  # a copy, because an array may be read-only
    # torch takes this machine's order of bytes alone
    values = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    if is_image and values.ndim == 2:
        values = values[..., None]
    # Channels stay last in memory.
    return values.permute(2, 0, 1) if is_image and values.ndim == 3 else values


def dataset_of(loader: object) -> Any:
    """Return the dataset of a DataLoader; what has none is taken for one."""
    return getattr(loader, "dataset", loader)


def fingerprint(dataset: MapDataset) -> str:
    """Return a checksum of the list `samples`, if there is one, with file names for paths.

    Of a wrapper it is that of the lists within it, and of its `indices`.
    """
    count = size(dataset)
    return f"{'?' if count is None else count} images ({_list_checksum(dataset):08x})"


def _list_checksum(dataset: object) -> int:
    samples = listed(dataset)
    if not samples:
        return _checksum_within(dataset)
    # whether it is the same list, as it was
    key = id(samples), len(samples), repr([samples[0], samples[-1]])
    if key not in _checksums:
        _checksums[key] = samples, _rows_checksum(samples)
    return _checksums[key][1]


def _rows_checksum(samples: Sequence) -> int:
    total = 0
    for sample in samples:
        values = sample if isinstance(sample, tuple | list) else [sample]
        # the folder may be another one on another machine
        values = [
            os.path.basename(value) if isinstance(value, str) else value
            for value in values
        ]
        total = zlib.crc32(repr(values).encode(), total)
    return total


def _checksum_within(dataset: object) -> int:
    """Return that of the datasets that one without a list of its own wraps."""
    inner: list = [(size(each), _list_checksum(each)) for each in wrapped(dataset)]
    if not inner:
        return 0
    indices: Any = getattr(dataset, "indices", None)
    with contextlib.suppress(TypeError):
        inner.append(zlib.crc32(repr([*map(operator.index, indices)]).encode()))
    return zlib.crc32(repr(inner).encode())


def first_checksums(loader: Any) -> dict[str, int]:
    """Return checksums of those parts of our loader's first sample in which no read differs.

    A worker reads it if the loader has some: files that are opened for it are not inherited.
    """
    reads = DataLoader(
        loader.seeded,
        batch_size=None,
        sampler=[Key(0, 0, is_val=True)] * READS,
        num_workers=min(loader.num_workers, 1),
        multiprocessing_context=loader.multiprocessing_context,
        worker_init_fn=loader.worker_init_fn,
        timeout=loader.timeout,
    )
    with keeping_random_state():
        parts = zip(*map(tree_leaves, reads), strict=False)
        found = [{checksum(part) for part in read} for read in parts]
    return {f"sample[{n}]": sums.pop() for n, sums in enumerate(found) if len(sums) < 2}
