"""From samples to batches on the device: dealing them to ranks, loader workers, normalising."""

import functools
import multiprocessing
import os
import re
import sys
import zlib
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from engine.data import seeding
from engine.data.batches import Lent, Memory, collate, collate_by_size
from engine.errors import UserError
from engine.ranks import distributed, process

# ImageNet's channel means and deviations, in RGB order and units of 0..1: what the pretrained
# weights of torchvision and segmentation-models-pytorch expect.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def build_train_loader(dataset: Dataset, classes: Sequence[str], args: Namespace) -> DataLoader:
    """Return this rank's loader of (images, targets) batches for training.

    What is in an optimizer step's global batch, pixel by pixel, depends on --seed, the epoch and
    the size of the global batch, not on the number of ranks, passes and loader workers.
    """
    ranks, total = distributed.world_size(), len(dataset)  # type: ignore[arg-type]
    global_batch = args.batch_size * ranks * args.accumulate
    if total < global_batch:
        raise UserError(
            f"--batch-size {args.batch_size} x {ranks} ranks x --accumulate {args.accumulate} is "
            f"more than the {total} training pictures: lower one of them"
        )
    keyed = KeyedDataset(dataset, args, len(classes))
    sampler = TrainSampler(total, global_batch, args.seed)
    options, into = worker_options(args), collate
    if options["multiprocessing_context"] == "fork":
        size = args.batch_size * 3 * args.image_size**2
        into = Memory(args.workers, args.prefetch + 1, size).collate
    return Loader(keyed, args.batch_size, sampler=sampler, collate_fn=into, **options)


class Loader(DataLoader):
    """A DataLoader whose workers outlive the signals that ask their rank to stop."""

    def __iter__(self) -> Any:
        with process.holding_signals():
            batches = super().__iter__()
        return (batch.copy() if isinstance(batch, Lent) else batch for batch in batches)


class TrainSampler(Sampler[tuple[int, int]]):
    """This rank's share of each global batch, as (epoch, index), in an order of each epoch's own.

    What does not fill a global batch is left out, so all ranks take the same number of steps.
    """

    def __init__(self, total: int, global_batch: int, seed: int) -> None:
        self.total = total
        self.global_batch = global_batch
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int, seen: int = 0) -> None:
        """Go on to `epoch`, without the first `seen` of its samples."""
        self.epoch = epoch
        left = self.total - seen
        self.span = slice(seen, self.total - left % self.global_batch)

    def __len__(self) -> int:
        return (self.span.stop - self.span.start) // distributed.world_size()

    def __iter__(self) -> Iterator[tuple[int, int]]:
        generator = torch.Generator().manual_seed(seeding.number(self.seed, self.epoch))
        order = torch.randperm(self.total, generator=generator)[self.span]
        mine = order[distributed.rank() :: distributed.world_size()]
        return ((self.epoch, index) for index in mine.tolist())


class KeyedDataset(Dataset):
    """`dataset`, whose random numbers for a sample depend on seed, epoch and index alone.

    If one raises, or its loader worker dies or hangs, its name is told; so it is if its label, an
    integer, is not below `classes`.
    """

    in_use: ClassVar[list["KeyedDataset"]] = []

    def __init__(
        self, dataset: Dataset, args: Namespace, classes: int, is_any_size: bool = False
    ) -> None:
        self.dataset = dataset
        self.classes = classes
        self.is_any_size = is_any_size
        self.seed = args.seed
        # Written by the workers: of each its process, and its sample + 1 while it reads one.
        self.reading = multiprocessing.RawArray("q", 2 * max(args.workers, 1))
        self.in_use.append(self)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, key: tuple[int, int]) -> Any:
        # The epoch comes with the index: persistent workers would keep an attribute as it was.
        epoch, index = key
        self.note(index + 1)
        seeding.seed(self.seed, epoch, index)
        try:
            sample = self.dataset[index]
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

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[Any]:
        """Return the samples of a batch; DataLoader calls it."""
        samples = [self[key] for key in keys]
        if self.is_any_size:
            return samples
        shapes = [[part.shape for part in s if isinstance(part, Tensor)] for s in samples]
        odd = next((i for i, each in enumerate(shapes) if each != shapes[0]), None)
        if odd is not None:
            first, other = (" and ".join(str(tuple(x)) for x in shapes[i]) for i in (0, odd))
            raise UserError(
                f"{self.name(keys[odd][1])}: {other} after {first} of {self.name(keys[0][1])}; "
                "train_transform in dataset.py has to give all pictures of a batch one size"
            )
        return samples

    def check_label(self, index: int, label: Any) -> None:
        is_class = isinstance(label, int | np.integer) or (
            isinstance(label, Tensor) and not label.ndim and not label.is_floating_point()
        )
        if is_class and not 0 <= label < self.classes:
            raise UserError(
                f"{self.name(index)}: label {label}, but the classes are 0 to "
                f"{self.classes - 1}; correct it, or return a float if it is no class"
            )

    def note(self, sample: int) -> None:
        if worker := get_worker_info():
            self.reading[2 * worker.id : 2 * worker.id + 2] = os.getpid(), sample

    def name(self, index: int) -> str:
        """Name a sample, with its file where `dataset` has a list `samples` that begins with it."""
        samples = getattr(self.dataset, "samples", None)
        sample = samples[index] if samples else None
        return f"sample {index}" + (f", {sample[0]}" if isinstance(sample, tuple | list) else "")


def fingerprint(loader: DataLoader) -> str:
    """Describe a data set: another text once a sample is added, removed, renamed or relabelled.

    By its list `samples`, if it has one, of which paths count by the file's name alone.
    """
    dataset, total = loader.dataset.dataset, 0  # type: ignore[attr-defined]
    for sample in getattr(dataset, "samples", ()):
        parts = sample.values() if isinstance(sample, dict) else sample
        names = [os.path.basename(part) if isinstance(part, str) else part for part in parts]
        total = zlib.crc32(repr(names).encode(), total)
    return f"{len(dataset)} pictures ({total:08x})"


def explain(error: Exception) -> str | None:
    """Return a line that names the samples at which loader workers died or hung, if they did."""
    found = re.search(
        r"DataLoader (worker \(pid(\(s\))? (?P<pids>[\d, ]+)\)|timed out)", str(error)
    )
    if not found:
        return None
    pids = found["pids"]
    at = [
        f"worker {pid} at {keyed.name(sample - 1)}" if sample else f"worker {pid} between samples"
        for keyed in KeyedDataset.in_use
        for pid, sample in zip(keyed.reading[::2], keyed.reading[1::2], strict=True)
        if (str(pid) in re.split(", ", pids) if pids else sample)
    ]
    text = " ".join(str(error).split())
    return f"{'; '.join(at)}: {text}" if at else text


def build_val_loader(dataset: Dataset, classes: Sequence[str], args: Namespace) -> DataLoader:
    """Return this rank's loader of lists of (images, targets) batches for validation.

    Whole batches are dealt to the ranks in turn, so each sample comes once and a batch holds the
    same samples whatever the number of ranks; a rank may get none.
    """
    total = len(dataset)  # type: ignore[arg-type]
    batches = [
        [(0, index) for index in range(start, min(start + args.batch_size, total))]
        for start in range(0, total, args.batch_size)
    ]
    mine = batches[distributed.rank() :: distributed.world_size()]
    keyed = KeyedDataset(dataset, args, len(classes), is_any_size=True)
    options = worker_options(args)
    return Loader(keyed, batch_sampler=mine, collate_fn=collate_by_size, **options)


def worker_options(args: Namespace) -> dict[str, Any]:
    return {
        "num_workers": args.workers,
        "persistent_workers": args.workers > 0,
        # Python 3.14 has another default, whose helper process does not outlive a SIGTERM to all.
        "multiprocessing_context": "fork" if args.workers and sys.platform == "linux" else None,
        "worker_init_fn": process.start_worker,
        "prefetch_factor": args.prefetch if args.workers else None,
        "pin_memory": args.pin_memory,
        # A worker that hangs holds up all ranks; this one, who can name the sample, is to tell.
        "timeout": 0 if distributed.is_debugged() or not args.workers else 0.9 * args.dist_timeout,
    }


def to_device(batches: Iterable, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (images, targets) on `device`: images (N, 3, H, W) float32, normalised.

    Targets are int64, or float32 where they are no integers. Pictures and masks travel as uint8
    until here, a quarter of the bytes.
    """
    for images, targets in batches:
        images = images.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        yield normalize(images), targets.float() if targets.is_floating_point() else targets.long()


def normalize(images: Tensor) -> Tensor:
    """Return uint8 `images` (N, 3, H, W) as float32 of about zero mean and unit deviation."""
    if images.dtype != torch.uint8:
        raise UserError(
            f"dataset.py returns pictures of {images.dtype}: leave them uint8, 0 to 255; they are "
            "normalised on the device (normalize in engine/data/loading.py)"
        )
    mean, std = channel_statistics(images.device)
    return images.float().div_(255).sub_(mean).div_(std)  # in place: half the time on a CPU


@functools.cache  # a copy to the device at every step would wait for it
def channel_statistics(device: torch.device) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (MEAN, STD))
    return mean, std
