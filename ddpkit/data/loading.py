"""From samples to batches on the device: dealing them to ranks, loader workers, normalising."""

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler, default_collate
from torch.utils.data.distributed import DistributedSampler

from ddpkit.data import samples
from ddpkit.data.format import DEFAULT_FORMAT, Format
from ddpkit.data.samples import Key, MapDataset, Seeded, fingerprint
from ddpkit.errors import UserError
from ddpkit.ranks import distributed, process, stopping
from ddpkit.ranks.workers import find_fault, running
from ddpkit.run import machine


class TrainSampler(Sampler[Key]):
    """This rank's share of each global batch, in another order each epoch.

    What is in an optimizer step's global batch depends on the seed, the epoch and the size of the
    global batch, not on the number of ranks, passes and loader workers. Samples that do not fill a
    global batch are left out, so that all ranks take the same number of steps. A run continues in
    mid-epoch, to the bit.

    dataset: of the samples. batch_size: images per rank and forward pass. accumulate: forward
        passes per optimizer step. seed: of the order.

    Raises a UserError if there are fewer samples than a global batch has.

        sampler = ddpkit.TrainSampler(train_set, 32, accumulate=1, seed=0)
        loader = DataLoader(ddpkit.Seeded(train_set, classes, seed=0), 32, sampler=sampler)
    """

    def __init__(self, dataset: MapDataset, batch_size: int, accumulate: int, seed: int) -> None:
        ranks, self.total = distributed.world_size(), len(dataset)
        self.global_batch = batch_size * ranks * accumulate
        self.steps = self.total // self.global_batch  # of the optimizer, in a whole epoch
        if not self.steps:
            line = f"--batch-size {batch_size} x {ranks} ranks x --accumulate {accumulate} is more"
            line += f" than the {self.total} training images: lower one of them, or add images"
            raise UserError(line)
        self.seed = seed
        # What the order depends on in addition to the epoch; checkpoints have it.
        data = {"images": self.total, "training_set": fingerprint(dataset)}
        self.order: dict[str, Any] = {**data, "seed": seed, "sampler": "shuffle"}
        self.set_epoch(0)

    def set_epoch(self, epoch: int, seen: int = 0) -> None:
        """Switch to `epoch`, without the first `seen` of its samples."""
        self.epoch, self.seen = epoch, seen

    def __len__(self) -> int:
        left = (self.total - self.seen) // self.global_batch * self.global_batch
        return left // distributed.world_size()

    def __iter__(self) -> Iterator[Key]:
        generator = torch.Generator().manual_seed(samples.hash_key(self.seed, self.epoch))
        order = torch.randperm(self.total, generator=generator)
        mine = order[self.seen + distributed.rank() :: distributed.world_size()]
        return (Key(self.epoch, draw) for draw in mine[: len(self)].tolist())

    def batches(self, loader: Any, epoch: int, seen: int) -> Iterator:
        """Return this rank's batches of `epoch`, without the first `seen` of its samples."""
        self.set_epoch(epoch, seen)
        return started(loader)


class ValSampler(Sampler[list[Key]]):
    """A `batch_sampler` for evaluation: each sample once, whatever the number of ranks.

    Whole batches are dealt to the ranks in turn, so that a batch holds the same samples on any
    number of ranks; a rank may get none.

        loader = DataLoader(
            ddpkit.Seeded(val_set, classes, seed=0), batch_sampler=ddpkit.ValSampler(val_set, 32)
        )
    """

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

        DataLoader(train_set, batch_size=32, **ddpkit.workers(4, device))
    """
    count = machine.default_workers() if count is None else count
    # Shorter than the ranks' own time-out: if a worker hangs, this rank can name its sample.
    seconds = 0.9 * distributed.timeout() if count and not distributed.is_debugged() else 0
    return {
        "num_workers": count,
        "persistent_workers": count > 0,
        "multiprocessing_context": process.worker_context(count),
        "worker_init_fn": process.start_worker,
        "prefetch_factor": 2 if count else None,  # batches that each reads ahead
        "pin_memory": device.type != "cpu",
        "timeout": seconds,
    }


def explain(error: Exception) -> str | UserError | None:
    """Return a line that names the samples at which loader workers died or hung, if they did."""
    text = " ".join(str(error).split())
    found = re.search(r"DataLoader (worker \(pid(\(s\))? (?P<pids>[\d, ]+)\)|timed out)", text)
    if not found:
        return None
    pids = found["pids"].split(", ") if found["pids"] else None
    at = {
        pid: f"loader worker {pid} at {samples.name(seeded.dataset, sample - 1)}"
        for seeded in Seeded.in_use
        for pid, sample in zip(seeded.reading[::2], seeded.reading[1::2], strict=True)
        if sample and (not pids or str(pid) in pids)
    }
    if isinstance(fault := find_fault(), UserError):
        return fault
    dead = {each.pid: each.end() for each in running if each.has_died()}
    if dead:
        return "; ".join(f"{at.get(pid, f'loader worker {pid}')} {dead[pid]}" for pid in dead)
    return f"{'; '.join(at.values())}: {text}" if at else text


class Groups(list):
    """The batches of a DataLoader's batch, one for each size of image."""


class Collate:
    """A `collate_fn`: stacks samples to a batch [images, targets, ...]; in evaluation by size.

    Samples whose images differ in size become several batches, so that none needs padding.

        DataLoader(..., collate_fn=ddpkit.Collate())
    """

    def __call__(self, samples: Sequence[tuple]) -> list:
        groups: dict[torch.Size, list] = {}
        for sample in samples:
            groups.setdefault(sample[0].shape, []).append(sample)
        batches = Groups()
        for group in groups.values():  # images are channels last in memory, as they were read
            images = default_collate([sample[0].movedim(0, -1) for sample in group]).movedim(-1, 1)
            batches.append([images, *default_collate([sample[1:] for sample in group])])
        return batches if len(batches) > 1 else batches[0]


def find_source(loader: Any, accumulate: int, seed: Any) -> "TrainSampler | Foreign":
    """Return what Run has to know of its loader, in all of its epochs."""
    if not is_ours(loader):
        return Foreign(loader, accumulate, seed)
    found = (loader.batch_size or 0) * distributed.world_size() * accumulate
    if (planned := loader.sampler.global_batch) != found:
        line = f"TrainSampler has a global batch of {planned}, but all batches of a step of the"
        raise UserError(f"{line} loader make {found}: give both the same batch size")
    return loader.sampler


class Foreign:
    """What Run has to know of any other loader: ranks take its batches, the same on all, in turn.

    A stopped epoch starts over.
    """

    def __init__(self, loader: Any, accumulate: int, seed: Any) -> None:
        self.accumulate, ranks = accumulate, distributed.world_size()
        has_own = isinstance(getattr(loader, "sampler", None), DistributedSampler)
        self.turn = 1 if has_own else ranks  # batches, of which this rank takes one
        try:
            self.steps = len(loader) // self.turn // accumulate
        except TypeError:
            raise UserError("the training loader has no length: give its data set one") from None
        if not self.steps:
            raise UserError(f"the training loader has {len(loader)} batches, too few for a step")
        self.global_batch = (getattr(loader, "batch_size", 0) or 1) * ranks * accumulate
        self.total = self.steps * self.global_batch
        data = {"images": self.total, "training_set": fingerprint(samples.of(loader))}
        self.order: dict[str, Any] = {**data, "seed": seed, "sampler": type(loader).__name__}
        line = "the training loader has no ddpkit.TrainSampler: an epoch that is stopped resumes"
        distributed.say(f"{line} from its start, not to the bit")

    def batches(self, loader: Any, epoch: int, seen: int) -> Iterator:
        for part in getattr(loader, "sampler", None), samples.of(loader):
            getattr(part, "set_epoch", int)(epoch)
        samples.seed(self.order["seed"], epoch)  # the same order on all ranks
        batches = started(loader)
        for _ in range((self.total - seen) // self.global_batch * self.accumulate):
            some = list(itertools.islice(batches, self.turn))
            if len(some) < self.turn:
                raise UserError(f"the training loader has less than {len(loader)} batches")
            yield some[distributed.rank() % self.turn]


def batches(loader: Any, device: torch.device) -> Iterator[tuple]:
    """Yield this rank's batches for evaluation, (images, targets, ..., indices), on `device`.

    images: float32 (N, C, H, W), uint8 ones normalised. targets: int64, or float32 if they are
    floating-point. indices: int64 (N,), of the samples in the data set.

    loader: with our ValSampler; or any other DataLoader, the same on all ranks, whose batches they
        take in turn. After a signal the loop ends early, and all ranks stop and save in `compute`.

        for images, targets, *_, indices in ddpkit.batches(val_loader, device):
    """
    format = format_of(loader)
    for batch in _dealt(loader):
        yield move(batch, device, format)
        if stopping.stop_requested():  # `compute` and `end_epoch`, where all ranks pass, stop
            break


class First:
    """The first samples of a validation loader, a small batch, the same on all ranks."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.dataset = loader, loader.dataset

    def __iter__(self) -> Iterator[list]:
        if not is_ours(self.loader):
            return itertools.islice(_numbered(self.loader), 1)
        keys = [Key(0, number, is_val=True) for number in range(min(2, len(self.dataset)))]
        return _by_size([self.loader.collate_fn(self.dataset.__getitems__(keys))])


def _dealt(loader: Any) -> Iterator[list]:
    """Return the batches of a loader for evaluation that are this rank's, with indices."""
    if isinstance(loader, First):
        return iter(loader)
    if is_ours(loader):
        return _by_size(started(loader))
    return itertools.islice(_numbered(loader), distributed.rank(), None, distributed.world_size())


def _by_size(found: Iterable[list]) -> Iterator[list]:
    for batch in found:
        yield from batch if isinstance(batch, Groups) else [batch]


def _numbered(loader: Any) -> Iterator[list]:
    """Yield all batches of any loader, with the indices of their samples."""
    if isinstance(getattr(loader, "sampler", None), DistributedSampler):
        line = "the validation loader has a DistributedSampler, which repeats samples"
        raise UserError(f"{line}: leave it out; the ranks take its batches in turn")
    first = 0
    for batch in started(loader):
        parts = unpack(batch)
        end = first + len(parts[0])
        yield [*parts, torch.arange(first, end)]
        first = end


def is_ours(loader: Any) -> bool:
    """Return whether a DataLoader has our sampler and seeds its samples."""
    samplers = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    has_sampler = any(isinstance(each, TrainSampler | ValSampler) for each in samplers)
    if has_sampler and not isinstance(loader.dataset, Seeded):
        raise UserError("a loader with a sampler of ddpkit needs ddpkit.Seeded(dataset, ...)")
    if isinstance(loader.dataset, Seeded) and not has_sampler:
        line = "ddpkit.Seeded needs ddpkit.TrainSampler or ValSampler as the loader's sampler; with"
        raise UserError(f"{line} another give the loader the data set itself, no Seeded")
    return has_sampler


def started(loader: Any) -> Iterator:
    """Return an iterator over `loader`, whose workers outlive the signals that ask for a stop."""
    with process.holding_signals():
        return iter(loader)


def unpack(batch: Any) -> tuple:
    """Return a batch as (images, targets, ...), floating-point or uint8 images (N, C, H, W)."""
    parts = samples.ordered(batch)
    if parts is None or not isinstance(parts[0], Tensor):
        line = f"the loader returns a {type(batch).__name__}: a batch is (images, targets, ...) or"
        raise UserError(f'{line} a dict with "image" and "label", images a tensor (N, C, H, W)')
    return parts


def format_of(loader: Any) -> Format:
    format = getattr(samples.of(loader), "format", None)
    return format if isinstance(format, Format) else DEFAULT_FORMAT


def move(batch: Any, device: torch.device, format: Format) -> tuple:
    """Return a batch, which has travelled as uint8, on `device`, as `batches` describes it."""
    images, targets, *others = (
        part.to(device, non_blocking=True) if isinstance(part, Tensor) else part
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
def channel_statistics(statistics: tuple, device: torch.device) -> tuple[Tensor, ...]:
    """Return mean and deviation of values from 0 to 255, float32 (channels, 1, 1) each."""
    return tuple(torch.tensor(each).mul(255).view(-1, 1, 1).to(device) for each in statistics)
