"""From samples to batches on the device: dealing them to ranks, loader workers, normalising."""

import functools
import itertools
import math
import os
import re
import weakref
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler, default_collate, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from engine.data import class_counts, samples
from engine.data.format import DEFAULT_FORMAT, Format
from engine.data.samples import Key, MapDataset, Seeded, fingerprint
from engine.errors import UserError
from engine.ranks import devices, distributed, failures, process, stopping
from engine.run import machine

BATCH_SIZE, MIN_STEPS = 32, 20  # the defaults, see TrainSampler.fitting
FEW = 2  # samples with which evaluation is tried
ALIGNMENT = 64  # bytes: tensors in a block begin at multiples of it
SMALL = 2**16  # bytes: what a pipe holds
PREFETCH = 2  # batches that each worker reads ahead
BLOCKS_PER_WORKER = PREFETCH + 2  # the rank may have taken two: this batch and the next
LOADERS = itertools.count()
BLOCKS: dict[tuple[int, ...], Tensor] = {}  # held by a rank: by loader, worker, block's number


class TrainSampler(Sampler[Key]):
    """This rank's share of each global batch, in another order each epoch.

    What is in an optimizer step's global batch depends on the seed, the epoch and the size of the
    global batch, not on the number of ranks, passes and loader workers. Samples that do not fill a
    global batch are left out, so that all ranks take the same number of steps. A run continues in
    mid-epoch, to the bit.

    dataset: of the samples. batch_size: images per rank and forward pass. accumulate: forward
        passes per optimizer step. seed: of the order.
    balanced: draw each of the `classes` equally often, by the data set's `count_labels`.

    Raises a UserError if there are fewer samples than a global batch has.

        sampler = engine.TrainSampler(train_set, 32, accumulate=1, seed=0)
        loader = DataLoader(engine.Seeded(train_set, classes, seed=0), 32, sampler=sampler)
    """

    is_ours = True

    def __init__(
        self,
        dataset: MapDataset,
        batch_size: int,
        accumulate: int,
        seed: int,
        *,
        balanced: bool = False,
        classes: Sequence[str] = (),
    ) -> None:
        ranks, self.total = distributed.world_size(), len(dataset)
        self.global_batch = batch_size * ranks * accumulate
        if self.total < self.global_batch:
            line = f"--batch-size {batch_size} x {ranks} ranks x --accumulate {accumulate} is more"
            line += f" than the {self.total} training images: lower one of them, or add images"
            raise UserError(line)
        self.batch_size, self.seed = batch_size, seed
        self.training_set = fingerprint(dataset)
        self.counts = class_counts.count_classes(dataset, classes) if balanced else None
        if self.counts is not None:
            class_counts.say_balanced(self.counts, self.total, classes)
        self.set_epoch(0)

    @staticmethod
    def fitting(dataset: MapDataset, accumulate: int) -> int:
        """Return images per rank and pass: 32, or a power of two that makes 20 steps an epoch."""
        total = len(dataset)
        images = total / (MIN_STEPS * distributed.world_size() * accumulate)  # per pass of a rank
        if images >= BATCH_SIZE:
            return BATCH_SIZE
        size = 2 ** int(math.log2(max(images, 2)))
        least = ", the least" if size == 2 else ""
        distributed.say(
            f"--batch-size {size}{least}: with {BATCH_SIZE}, the default for larger sets, {total} "
            f"training images would make fewer than {MIN_STEPS} steps per epoch"
        )
        return size

    def set_epoch(self, epoch: int, seen: int = 0) -> None:
        """Switch to `epoch`, without the first `seen` of its samples."""
        self.epoch = epoch
        left = self.total - seen
        self.span = slice(seen, self.total - left % self.global_batch)

    @property
    def order(self) -> dict[str, Any]:
        """What the order depends on in addition to the epoch; checkpoints have it."""
        sampler = "shuffle"
        if self.counts is not None:
            sampler = f"balanced {zlib.crc32(self.counts[:, :2].tobytes()):08x}"
        data = {"images": self.total, "training_set": self.training_set}
        return {**data, "seed": self.seed, "sampler": sampler}

    @property
    def steps(self) -> int:
        """Optimizer steps of a whole epoch."""
        return self.total // self.global_batch

    def __len__(self) -> int:
        return (self.span.stop - self.span.start) // distributed.world_size()

    def __iter__(self) -> Iterator[Key]:
        generator = torch.Generator().manual_seed(samples.hash_key(self.seed, self.epoch))
        if self.counts is not None:
            order = class_counts.draw(self.counts, self.total, generator)
        else:
            order = torch.randperm(self.total, generator=generator)
        mine = order[self.span][distributed.rank() :: distributed.world_size()]
        return (Key(self.epoch, draw) for draw in mine.tolist())


class ValSampler(Sampler[list[Key]]):
    """A `batch_sampler` for evaluation: each sample once, whatever the number of ranks.

    Whole batches are dealt to the ranks in turn, so that a batch holds the same samples on any
    number of ranks; a rank may get none.

        loader = DataLoader(
            engine.Seeded(val_set, classes, seed=0), batch_sampler=engine.ValSampler(val_set, 32)
        )
    """

    is_ours = True

    def __init__(self, dataset: MapDataset, batch_size: int) -> None:
        self.total, self.batch_size = len(dataset), batch_size

    def __len__(self) -> int:
        batches = -(-self.total // self.batch_size)
        return len(range(distributed.rank(), batches, distributed.world_size()))

    def __iter__(self) -> Iterator[list[Key]]:
        step = distributed.world_size() * self.batch_size
        for start in range(distributed.rank() * self.batch_size, self.total, step):
            stop = min(start + self.batch_size, self.total)
            yield [Key(0, index, is_val=True) for index in range(start, stop)]


def workers(count: int | None, device: torch.device) -> dict[str, Any]:
    """Return the arguments of a DataLoader that start `count` workers, which end with their rank.

    count: processes per rank; with 0 the rank itself reads. None: its share of the CPUs, at most
        16; 0 under a debugger. On a GPU batches are copied from pinned memory.

        DataLoader(train_set, batch_size=32, **engine.workers(4, device))
    """
    count = machine.default_workers() if count is None else count
    # Shorter than the ranks' own time-out: if a worker hangs, this rank can name its sample.
    seconds = 0.9 * distributed.timeout() if count and not distributed.is_debugged() else 0
    return {
        "num_workers": count,
        "persistent_workers": count > 0,
        "multiprocessing_context": process.worker_context(count),
        "worker_init_fn": process.start_worker,
        "prefetch_factor": PREFETCH if count else None,
        "pin_memory": device.type != "cpu" and devices.copies_ahead(device),
        "timeout": seconds,
    }


def explain(error: Exception) -> str | None:
    """Return a line that names the samples at which loader workers died or hung, if they did."""
    text = " ".join(str(error).split())
    found = re.search(r"DataLoader (worker \(pid(\(s\))? (?P<pids>[\d, ]+)\)|timed out)", text)
    if not found:
        return None
    pids = re.split(", ", found["pids"] or "")
    at = [
        f"worker {pid} " + (f"at {seeded.name(sample - 1)}" if sample else "between samples")
        for seeded in Seeded.in_use
        for pid, sample in zip(seeded.reading[::2], seeded.reading[1::2], strict=True)
        if (str(pid) in pids if found["pids"] else sample)
    ]
    return f"{'; '.join(at)}: {text}" if at else text


class Groups(list):
    """The batches of a DataLoader's batch, one for each size of image."""


class Place(NamedTuple):
    """Where a tensor is in a block: the byte at which it begins, shape and type."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def of(self, block: Tensor) -> Tensor:
        return block[self.start : self.end()].view(self.dtype).view(self.shape)


def stack(samples: Sequence[tuple]) -> list:
    """Return a batch whose images are channels last in memory, as they were read."""
    images = default_collate([sample[0].movedim(0, -1) for sample in samples]).movedim(-1, 1)
    return [images, *default_collate([sample[1:] for sample in samples])]


class Collate:
    """A `collate_fn`: stacks samples to a batch [images, targets, ...]; in evaluation by size.

    Samples whose images differ in size become several batches, so that none needs padding.

    A loader worker hands images and masks to its rank in one of a few blocks, each shared memory,
    uint8 (bytes,). It is used again once the rank has dropped all tensors in it: its first byte is
    0 then. While the rank keeps all blocks, batches get new memory. torch's own way, new shared
    memory and a socket for each tensor, takes half of the time for prepared images.

        DataLoader(..., collate_fn=engine.Collate())
    """

    def __init__(self, most: int = BLOCKS_PER_WORKER) -> None:
        self.most, self.loader = most, next(LOADERS)
        self.blocks: list[Tensor] = []  # of this worker
        weakref.finalize(self, _drop, self.loader).atexit = False

    def __call__(self, samples: Sequence[tuple]) -> "list | Sent":
        groups: dict[torch.Size, list] = {}
        for sample in samples:
            groups.setdefault(sample[0].shape, []).append(sample)
        if len(groups) > 1:
            return Groups(map(stack, groups.values()))
        columns: list = list(zip(*samples, strict=True))
        types = ({part.dtype for part in c if isinstance(part, Tensor)} for c in columns)
        if (worker := get_worker_info()) is None or any(len(each) > 1 for each in types):
            return stack(samples)
        columns[0] = tuple(image.movedim(0, -1) for image in columns[0])
        parts, end = [], ALIGNMENT
        for column in columns:
            if isinstance(first := column[0], Tensor):
                parts.append(Place(end, (len(column), *first.shape), first.dtype))
                end = -(-parts[-1].end() // ALIGNMENT) * ALIGNMENT
            else:
                part = default_collate(column)
                is_small = isinstance(part, Tensor) and part.nbytes <= SMALL
                parts.append(part.numpy() if is_small else part)  # a tensor would need a socket
        if (number := self._take(end)) is None:
            return stack(samples)
        for column, part in zip(columns, parts, strict=True):
            if isinstance(part, Place):
                torch.stack(column, out=part.of(self.blocks[number]))
        return Sent((self.loader, worker.id, number), self.blocks[number], parts)

    def _take(self, size: int) -> int | None:
        """Return the number of a block of at least `size` bytes that is free, from now on not."""
        free = (n for n, block in enumerate(self.blocks) if not block[0] and len(block) >= size)
        number = next(free, None)
        if number is None and len(self.blocks) < self.most:
            number = len(self.blocks)
            with torch.inference_mode(False):  # in which `evaluate` may have started this worker
                self.blocks.append(torch.zeros(size, dtype=torch.uint8).share_memory_())
        if number is not None:
            self.blocks[number][0] = 1
        return number


@dataclass
class Sent:
    """A batch in a block, on its way: the rank unpickles it as `collate` returns it.

    The block is sent with its first batch only (byte 1 = already sent).
    """

    key: tuple[int, ...]
    block: Tensor
    parts: list

    def __reduce__(self) -> tuple:
        block = None if self.block[1] else self.block
        self.block[1] = 1
        return _receive, (self.key, block, self.parts)


def _receive(key: tuple[int, ...], block: Tensor | None, parts: list) -> list:
    block = BLOCKS[key] = BLOCKS[key] if block is None else block
    flags = block.numpy()
    array = flags[:]  # an object of its own, which all tensors of the batch keep alive
    weakref.finalize(array, _free, flags, os.getpid()).atexit = False
    memory = torch.from_numpy(array)
    found = [part.of(memory) if isinstance(part, Place) else part for part in parts]
    found = [torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in found]
    return [found[0].movedim(-1, 1), *found[1:]]


def _drop(loader: int) -> None:
    """Give back what a rank holds of a loader that is gone."""
    for key in [key for key in BLOCKS if key[0] == loader]:
        del BLOCKS[key]


def _free(flags: np.ndarray, owner: int) -> None:
    if os.getpid() == owner:  # not in a process that has been forked from the rank
        flags[0] = 0


class Own:
    """What Run has to know of a DataLoader with our TrainSampler, in all of its epochs."""

    is_exact = True  # continues in mid-epoch

    def __init__(self, loader: Any, accumulate: int) -> None:
        self.loader, self.sampler = loader, loader.sampler
        ranks = distributed.world_size()
        if self.sampler.global_batch != (loader.batch_size or 0) * ranks * accumulate:
            raise UserError(
                f"TrainSampler({self.sampler.batch_size}, ...) has a global batch of "
                f"{self.sampler.global_batch}, but the loader has batches of {loader.batch_size} "
                f"on {ranks} ranks, and {accumulate} pass(es) make a step"
            )
        self.total, self.global_batch = self.sampler.total, self.sampler.global_batch
        self.order, self.steps = self.sampler.order, self.sampler.steps

    def epoch(self, epoch: int, seen: int) -> Iterator:
        """Yield this rank's batches of `epoch`, without the first `seen` of its samples."""
        self.sampler.set_epoch(epoch, seen)
        for batch in started(self.loader):
            if isinstance(batch, Groups):
                raise UserError("images of a training batch differ in size")
            yield batch

    def state(self) -> list:
        return []


class Foreign:
    """The same of any other loader of batches, which has a length.

    Seeded by `seed` and the epoch, it yields the same batches on all ranks, which they take in
    turn; with a DistributedSampler each rank has its own. An epoch that was stopped starts over,
    unless the loader, or without workers its data set, has a state_dict.
    """

    def __init__(self, loader: Any, accumulate: int, seed: Any) -> None:
        self.loader, self.accumulate, self.ranks = loader, accumulate, distributed.world_size()
        self.is_dealt = not isinstance(getattr(loader, "sampler", None), DistributedSampler)
        try:
            batches = len(loader)
        except TypeError:
            line = "the training loader has no length: give its data set __len__, the number of"
            raise UserError(f"{line} samples of an epoch") from None
        self.steps = batches // (self.ranks if self.is_dealt else 1) // accumulate
        self.global_batch = (getattr(loader, "batch_size", 0) or 1) * self.ranks * accumulate
        self.total = self.steps * self.global_batch
        if not self.steps:
            line = f"the training loader has {batches} batch(es), fewer than an optimizer step"
            raise UserError(f"{line} takes on {self.ranks} rank(s) with {accumulate} pass(es) each")
        parts = [loader] if getattr(loader, "num_workers", 0) else [loader, loader.dataset]
        has_state = (part for part in parts if hasattr(part, "load_state_dict"))
        self.stateful = next(has_state, None)
        self.is_exact = self.stateful is not None
        self.saved: list = []  # the state to continue from
        data = {"images": self.total, "training_set": fingerprint(samples.of(loader))}
        self.order: dict[str, Any] = {**data, "seed": seed, "sampler": type(loader).__name__}
        how = "from its state_dict" if self.is_exact else "from its start, not to the bit"
        line = "the training loader has no engine.TrainSampler: an epoch that is stopped resumes"
        distributed.say(f"{line} {how}")

    def epoch(self, epoch: int, seen: int) -> Iterator:
        if not self.is_dealt:
            self.loader.sampler.set_epoch(epoch)
        getattr(samples.of(self.loader), "set_epoch", int)(epoch)
        samples.seed(self.order["seed"], epoch)  # the same order on all ranks
        if seen and self.stateful and self.saved:
            self.stateful.load_state_dict(self.saved.pop())
        left = (self.total - seen) // self.global_batch * self.accumulate  # passes of a rank
        each = self.ranks if self.is_dealt else 1
        batches = iter(started(self.loader))
        for _ in range(left):
            some = list(itertools.islice(batches, each))
            if len(some) < each:
                line = f"the training loader ended early in epoch {epoch + 1}: its length is"
                raise UserError(f"{line} {len(self.loader)} batches")
            yield some[distributed.rank() if self.is_dealt else 0]

    def state(self) -> list:
        """Return the state of each rank's stream after its last batch, for a checkpoint."""
        return distributed.gather_objects(self.stateful.state_dict()) if self.stateful else []


def batches(loader: Any, device: torch.device) -> Iterator[tuple]:
    """Yield this rank's batches for evaluation, (images, targets, ..., indices), on `device`.

    images: float32 (N, C, H, W), uint8 ones normalised. targets: int64, or float32 if they are
    floating-point. indices: int64 (N,), of the samples in the data set.

    loader: with our ValSampler; or any other DataLoader, the same on all ranks, whose batches they
        take in turn. After a signal the loop ends early, and all ranks stop and save.

        for images, targets, *_, indices in engine.batches(val_loader, device):
    """
    ahead, format = devices.copies_ahead(device), format_of(loader)
    dataset = samples.of(loader)
    for batch in _dealt(loader):
        parts = move(batch, device, ahead, format)
        failures.note_samples(lambda index: samples.name(dataset, index), batch[-1])
        yield parts
        failures.note_samples()  # not after an error in the loop, which is explained later
        if stopping.stop_requested():
            break
    stopping.agree(device)


class First:
    """The first samples of a validation loader, a small batch, the same on all ranks."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.dataset = loader, loader.dataset

    def __iter__(self) -> Iterator:
        if isinstance(self.dataset, IterableDataset):
            return itertools.islice(started(self.loader), 1)
        numbers = range(min(FEW, len(self.dataset)))
        if not is_ours(self.loader):
            batch = self.loader.collate_fn([self.dataset[number] for number in numbers])
            return iter([[*unpack(batch), torch.tensor(numbers)]])
        keys = [Key(0, number, is_val=True) for number in numbers]
        batch = self.loader.collate_fn(self.dataset.__getitems__(keys))
        return iter(batch if isinstance(batch, Groups) else [batch])


def _dealt(loader: Any) -> Iterator[list]:
    """Yield the batches of a loader for evaluation that are this rank's, with indices."""
    if isinstance(loader, First):
        yield from loader
    elif is_ours(loader):
        for batch in started(loader):
            yield from batch if isinstance(batch, Groups) else [batch]
    elif isinstance(getattr(loader, "sampler", None), DistributedSampler):
        raise UserError(
            "the validation loader has a DistributedSampler, which repeats samples to give each "
            "rank as many: leave it out; the ranks take its batches in turn"
        )
    else:
        first = 0
        for number, batch in enumerate(started(loader)):
            parts = unpack(batch)
            end = first + len(parts[0])
            if number % distributed.world_size() == distributed.rank():
                yield [*parts, torch.arange(first, end)]
            first = end


def is_ours(loader: Any) -> bool:
    """Return whether a DataLoader has our sampler and seeds its samples."""
    samplers = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    has_sampler = any(getattr(each, "is_ours", False) for each in samplers)
    if has_sampler and not isinstance(loader.dataset, Seeded):
        raise UserError("a loader with a sampler of engine needs engine.Seeded(dataset, ...)")
    return has_sampler


def started(loader: Any) -> Iterator:
    """Return an iterator over `loader`, whose workers outlive the signals that ask for a stop."""
    with process.holding_signals():
        return iter(loader)


def unpack(batch: Any) -> list:
    """Return a batch as [images, targets, ...], floating-point or uint8 images (N, C, H, W)."""
    parts = samples.ordered(batch)
    if parts is None or len(parts) < 2 or not isinstance(parts[0], Tensor):
        found = type(batch).__name__
        found += f" of {', '.join(type(part).__name__ for part in parts)}" if parts else ""
        raise UserError(
            f"the loader returns a {found}: a batch is (images, targets, ...) or a dict with "
            '"image" and "label", images a tensor (N, C, H, W); see collate_fn'
        )
    return list(parts)


def format_of(loader: Any) -> Format:
    """Return how the images of a loader's data set are normalised."""
    format = getattr(samples.of(loader), "format", None)
    return format if isinstance(format, Format) else DEFAULT_FORMAT


def move(batch: Any, device: torch.device, ahead: bool, format: Format) -> tuple:
    """Return a batch, which has travelled as uint8, on `device`, as `batches` describes it."""
    images, targets, *others = (
        part.to(device, non_blocking=ahead) if isinstance(part, Tensor) else part
        for part in unpack(batch)
    )
    if isinstance(targets, Tensor):
        targets = targets.float() if targets.is_floating_point() else targets.long()
    return normalize(images, format), targets, *others


def normalize(images: Tensor, format: Format = DEFAULT_FORMAT) -> Tensor:
    """Return uint8 `images` (N, C, H, W) normalised, as float32; floats as they are."""
    if images.dtype != torch.uint8:
        return images.float()
    mean, std = channel_statistics(format.statistics, images.device)
    # Converted first, then in place: a third of the time on a CPU.
    return images.to(torch.float32, copy=True).sub_(mean).div_(std)


@functools.cache  # a copy to the device at every step would wait for it
def channel_statistics(
    statistics: tuple[tuple[float, ...], ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of values from 0 to 255, float32 (channels, 1, 1) each."""
    mean, std = (torch.tensor(values).mul(255).view(-1, 1, 1).to(device) for values in statistics)
    return mean, std
