"""From samples to batches on the device: dealing them to ranks, loader workers, normalising."""

import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from engine.data import balance, samples, seeding
from engine.data.counts import count_classes
from engine.data.handover import PREFETCH, Groups
from engine.data.images import DEFAULT_FORMAT, Format
from engine.data.samples import Key, Seeded, fingerprint
from engine.errors import UserError
from engine.ranks import devices, distributed, memory, process, stopping
from engine.run import machine

BATCH_SIZE, MIN_STEPS = 32, 20  # the defaults, see TrainSampler.fitting
FEW = 2  # samples with which evaluation is tried


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
        dataset: Any,
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
            raise UserError(
                f"--batch-size {batch_size} x {ranks} ranks x --accumulate {accumulate} is "
                f"more than the {self.total} training images: lower one of them, or add images"
            )
        self.batch_size = batch_size
        self.seed = seed
        self.training_set = fingerprint(dataset)
        self.counts = count_classes(dataset, classes) if balanced else None
        if self.counts:
            balance.say_balanced(self.counts, self.total)
        self.set_epoch(0)

    @staticmethod
    def fitting(dataset: Any, accumulate: int) -> int:
        """Return images per rank and pass: 32, or less for a small data set.

        That gets the largest power of two, at least 2, with which an epoch has 20 steps.
        """
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
    def order(self) -> dict[str, int | str]:
        """What the order depends on in addition to the epoch; checkpoints have it."""
        sampler = f"balanced {self.counts.fingerprint()}" if self.counts else "shuffle"
        samples: dict[str, int | str] = {"images": self.total, "training_set": self.training_set}
        return {**samples, "seed": self.seed, "sampler": sampler}

    @property
    def steps(self) -> int:
        """Optimizer steps of a whole epoch."""
        return self.total // self.global_batch

    def __len__(self) -> int:
        return (self.span.stop - self.span.start) // distributed.world_size()

    def __iter__(self) -> Iterator[Key]:
        generator = torch.Generator().manual_seed(seeding.number(self.seed, self.epoch))
        if self.counts:
            order = balance.draw(self.counts, self.total, generator)
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

    def __init__(self, dataset: Any, batch_size: int) -> None:
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
    found = re.search(
        r"DataLoader (worker \(pid(\(s\))? (?P<pids>[\d, ]+)\)|timed out)", str(error)
    )
    if not found:
        return None
    pids = found["pids"]
    at = [
        f"worker {pid} at {keyed.name(sample - 1)}" if sample else f"worker {pid} between samples"
        for keyed in Seeded.in_use
        for pid, sample in zip(keyed.reading[::2], keyed.reading[1::2], strict=True)
        if (str(pid) in re.split(", ", pids) if pids else sample)
    ]
    text = " ".join(str(error).split())
    return f"{'; '.join(at)}: {text}" if at else text


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
        memory.note_samples(lambda index: samples.name(dataset, index), batch[-1])
        yield parts
        memory.note_samples()  # not after an error in the loop, which is explained later
        if stopping.stop_requested():
            break
    stopping.agree(device)


class First:
    """The first samples of a validation loader, a small batch, the same on all ranks."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.dataset = loader, loader.dataset

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.dataset, IterableDataset):
            return itertools.islice(started(self.loader), 1)
        count = min(FEW, len(self.dataset))
        if is_ours(self.loader):
            found = self.dataset.__getitems__([Key(0, n, is_val=True) for n in range(count)])
            batch = self.loader.collate_fn(found)
            return iter(batch if isinstance(batch, Groups) else [batch])
        batch = self.loader.collate_fn([self.dataset[number] for number in range(count)])
        return iter([[*unpack(batch), torch.arange(count)]])


def _dealt(loader: Any) -> Iterator[list]:
    """Yield the batches of a loader for evaluation that are this rank's, with indices."""
    if isinstance(loader, First):
        yield from loader
        return
    if is_ours(loader):
        for batch in started(loader):
            yield from batch if isinstance(batch, Groups) else [batch]
        return
    if isinstance(getattr(loader, "sampler", None), DistributedSampler):
        raise UserError(
            "the validation loader has a DistributedSampler, which repeats samples to give each "
            "rank as many: leave it out; the ranks take its batches in turn"
        )
    first = 0
    for number, batch in enumerate(started(loader)):
        parts = unpack(batch)
        count = len(parts[0])
        if number % distributed.world_size() == distributed.rank():
            yield [*parts, torch.arange(first, first + count)]
        first += count


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
        kind = type(batch).__name__
        found = f"{kind} of {', '.join(type(part).__name__ for part in parts)}" if parts else kind
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
    """Return a batch on `device`: images float32, uint8 ones normalised, targets as in `batches`.

    Images and masks travel as uint8 until here, a quarter of the bytes.
    """
    images, targets, *others = (
        part.to(device, non_blocking=ahead) if isinstance(part, Tensor) else part
        for part in unpack(batch)
    )
    if isinstance(targets, Tensor):
        targets = targets.float() if targets.is_floating_point() else targets.long()
    return normalize(images, format), targets, *others


def normalize(images: Tensor, format: Format = DEFAULT_FORMAT) -> Tensor:
    """Return uint8 `images` (N, C, H, W) as float32 of about zero mean and unit deviation.

    Floating-point images are returned in float32, as they are.
    """
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
