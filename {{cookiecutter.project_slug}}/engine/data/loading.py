"""From samples to batches on the device: dealing them to ranks, loader workers, normalising."""

import functools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from engine.data import balance, seeding
from engine.data.counts import Counts
from engine.data.handover import Blocks, collate_by_size
from engine.data.images import DEFAULT_FORMAT, Format
from engine.data.samples import KeyedDataset, MapDataset, fingerprint
from engine.errors import UserError
from engine.ranks import devices, distributed, process

BATCH_SIZE, MIN_STEPS = 32, 20  # the defaults, see batch_size_for
IN_USE = 2  # batches in shared memory that a worker's rank may have taken: this one and the next


@dataclass(frozen=True)
class Options:
    """How samples are read; the same for training and validation."""

    workers: int  # processes per rank; with 0 the rank itself reads
    prefetch: int  # batches that each worker reads ahead
    pin_memory: bool
    seed: int  # of the order and of augmentation


class TrainSampler(Sampler[tuple[int, int]]):
    """This rank's share of each global batch, as (epoch, draw), reshuffled every epoch.

    A draw is the index of a sample; the sample's n-th repeat within an epoch adds n x total to it.
    Draws that do not fill a global batch are left out, so all ranks take the same number of steps.

    counts: of the samples' classes, each of which is drawn equally often; None: each sample once.
    training_set: its fingerprint.
    """

    def __init__(
        self,
        total: int,
        global_batch: int,
        seed: int,
        counts: Counts | None = None,
        training_set: str = "",
    ) -> None:
        self.total = total
        self.global_batch = global_batch
        self.seed = seed
        self.counts = counts
        self.training_set = training_set
        self.set_epoch(0)

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

    def __iter__(self) -> Iterator[tuple[int, int]]:
        generator = torch.Generator().manual_seed(seeding.number(self.seed, self.epoch))
        if self.counts:
            order = balance.draw(self.counts, self.total, generator)
        else:
            order = torch.randperm(self.total, generator=generator)
        mine = order[self.span][distributed.rank() :: distributed.world_size()]
        return ((self.epoch, draw) for draw in mine.tolist())


class Loader(DataLoader):
    """A DataLoader whose workers outlive the signals that ask their rank to stop."""

    dataset: KeyedDataset
    sampler: TrainSampler  # of a loader for training

    @property
    def images_per_pass(self) -> int:
        """Images of a training batch on all ranks together."""
        return (self.batch_size or 1) * distributed.world_size()

    def __iter__(self) -> _BaseDataLoaderIter:
        with process.holding_signals():
            return super().__iter__()


def batch_size_for(total: int, accumulate: int) -> int:
    """Return images per rank and pass: BATCH_SIZE, or less for a set of `total` images.

    A small set gets the largest power of two, at least 2, with which an epoch has MIN_STEPS steps.
    """
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


def build_train_loader(
    dataset: MapDataset,
    num_classes: int,
    batch_size: int,
    accumulate: int,
    options: Options,
    *,
    counts: Counts | None = None,
) -> Loader:
    """Return this rank's loader of (images, targets) batches for training.

    counts: as of TrainSampler.

    What is in an optimizer step's global batch, pixel by pixel, depends on the seed, the epoch and
    the size of the global batch, not on the number of ranks, passes and loader workers.
    """
    ranks, total = distributed.world_size(), len(dataset)
    global_batch = batch_size * ranks * accumulate
    if total < global_batch:
        raise UserError(
            f"--batch-size {batch_size} x {ranks} ranks x --accumulate {accumulate} is "
            f"more than the {total} training images: lower one of them, or add images"
        )
    keyed = KeyedDataset(dataset, num_classes, options.seed, options.workers, is_any_size=False)
    sampler = TrainSampler(total, global_batch, options.seed, counts, fingerprint(dataset))
    if counts:
        balance.say_balanced(counts, total)
    worker_options = _worker_options(options)
    into = Blocks(options.prefetch + IN_USE)
    return Loader(keyed, batch_size, sampler=sampler, collate_fn=into, **worker_options)


def build_val_loader(
    dataset: MapDataset, num_classes: int, batch_size: int, options: Options
) -> Loader:
    """Return this rank's loader of lists of (images, targets, indices) batches for validation.

    Whole batches are dealt to the ranks in turn, so each sample comes once and a batch holds the
    same samples whatever the number of ranks; a rank may get none.
    """
    keys = [(0, index) for index in range(len(dataset))]
    batches = [keys[start : start + batch_size] for start in range(0, len(keys), batch_size)]
    mine = batches[distributed.rank() :: distributed.world_size()]
    keyed = KeyedDataset(dataset, num_classes, options.seed, options.workers, is_any_size=True)
    worker_options = _worker_options(options)
    return Loader(keyed, batch_sampler=mine, collate_fn=collate_by_size, **worker_options)


def _worker_options(options: Options) -> dict:
    has_workers = options.workers > 0
    # Shorter than the ranks' own time-out: if a worker hangs, this rank can name its sample.
    seconds = 0.9 * distributed.timeout() if has_workers and not distributed.is_debugged() else 0
    return {
        "num_workers": options.workers,
        "persistent_workers": has_workers,
        "multiprocessing_context": process.worker_context(options.workers),
        "worker_init_fn": process.start_worker,
        "prefetch_factor": options.prefetch if has_workers else None,
        "pin_memory": options.pin_memory,
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
        for keyed in KeyedDataset.in_use
        for pid, sample in zip(keyed.reading[::2], keyed.reading[1::2], strict=True)
        if (str(pid) in re.split(", ", pids) if pids else sample)
    ]
    text = " ".join(str(error).split())
    return f"{'; '.join(at)}: {text}" if at else text


def to_device(
    batches: Iterable, device: torch.device, format: Format = DEFAULT_FORMAT
) -> Iterator[tuple[Tensor, ...]]:
    """Yield (images, targets, ...) on `device`: images (N, 3, H, W) float32, normalised.

    Targets become float32 if they are floating-point, else int64; what follows them, such as the
    indices int64 (N,) of a validation batch, stays as it is. Images and masks travel as uint8 until
    here, a quarter of the bytes.
    """
    ahead = devices.copies_ahead(device)
    for batch in batches:
        images, targets, *others = (part.to(device, non_blocking=ahead) for part in batch)
        targets = targets.float() if targets.is_floating_point() else targets.long()
        yield normalize(images, format), targets, *others


def normalize(images: Tensor, format: Format = DEFAULT_FORMAT) -> Tensor:
    """Return uint8 `images` (N, 3, H, W) as float32 of about zero mean and unit deviation.

    With --channels `images` are float32 (N, channels, H, W), 0 to 1.
    """
    if images.dtype != torch.uint8 and not format.channels:
        raise UserError(
            f"dataset.py returns images of {images.dtype}: leave them uint8, 0 to 255; they are "
            "normalised on the device (normalize in engine/data/loading.py)"
        )
    most = 255 if images.dtype == torch.uint8 else 1
    mean, std = channel_statistics(format.statistics, most, images.device)
    # Converted first, then in place: a third of the time on a CPU.
    return images.to(torch.float32, copy=True).sub_(mean).div_(std)


@functools.cache  # a copy to the device at every step would wait for it
def channel_statistics(
    statistics: tuple[tuple[float, ...], ...], most: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of values from 0 to `most`, float32 (channels, 1, 1) each."""
    mean, std = (torch.tensor(values).mul(most).view(-1, 1, 1).to(device) for values in statistics)
    return mean, std
