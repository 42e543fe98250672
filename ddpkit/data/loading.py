"""ddpkit's loaders: samples are dealt to ranks, and read by workers that end with their rank."""

import functools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, default_collate
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ddpkit.data import normalizing, samples
from ddpkit.data.samples import Key, MapDataset, Seeded, fingerprint
from ddpkit.errors import UserError
from ddpkit.ranks import children, devices, distributed, failures, process, virtual
from ddpkit.ranks.cpus import cpu_share
from ddpkit.ranks.workers import find_fault, running, worker_context


class TrainSampler(Sampler[Key]):
    """This rank's share of each global batch, in another order each epoch.

    What is in an optimizer step's global batch depends on the seed, the epoch and the size of the
    global batch, not on the number of ranks, passes and loader workers. Samples that do not fill a
    global batch are left out, so that all ranks take the same number of steps. A run continues in
    mid-epoch, to the bit.

    The arguments are those of `train_loader`.
    """

    in_use: ClassVar[WeakSet["TrainSampler"]] = WeakSet()

    def __init__(
        self,
        dataset: MapDataset,
        batch_size: int,
        accumulate: int,
        seed: int,
        sample_weights: Sequence[float] | Tensor | None = None,
        virtual_ranks: int = 0,
    ) -> None:
        ranks = virtual_ranks or distributed.world_size()
        self.virtual_ranks = virtual_ranks
        self.ranks = ranks
        self.here = virtual.share_of(ranks)
        self.total = samples.count_samples(dataset)
        self.accumulate = accumulate
        self.passes = len(self.here) * accumulate  # of a step, in this process
        self.global_batch = batch_size * ranks * accumulate
        # of the optimizer, in a whole epoch
        self.steps = self.total // self.global_batch
        if not self.steps:
            raise UserError(
                f"--batch-size {batch_size} x {ranks} ranks x --accumulate {accumulate} exceeds "
                f"the {self.total} training images: reduce one of them, or add images"
            )
        self.seed = seed
        self.cumulated: Tensor | None = None
        kind = "shuffle"
        if sample_weights is not None:
            self.cumulated = self._cumulate(sample_weights)
            kind = f"weighted {samples.checksum(self.cumulated)}"
        # What the order depends on in addition to the epoch; checkpoints have it.
        self.order: dict = {
            "images": self.total,
            "training_set": fingerprint(dataset),
            "seed": seed,
            "sampler": kind,
        }
        if virtual_ranks:
            self.order["virtual_ranks"] = virtual_ranks
        self.set_epoch(0)
        self.in_use.add(self)

    def _cumulate(self, weights: Sequence[float] | Tensor) -> Tensor:
        """Return the sums of the weights so far, as shares of the sum of all."""
        values = torch.as_tensor(weights, dtype=torch.float64)
        is_right = values.shape == (self.total,) and bool((values >= 0).all())
        if not is_right or not 0 < values.sum() < math.inf:
            raise UserError(
                f"train_loader(sample_weights=...): expected {self.total} numbers, one per sample, "
                "non-negative and not all 0"
            )
        sums = values.cumsum(0)
        # A number below 1 is then below the last sum of a weight that is not 0.
        return sums / sums[-1]

    @classmethod
    def set_all(cls, epoch: int) -> None:
        """Switch all of this process, by whatever the script reads them: zip, or its own loop."""
        for each in cls.in_use:
            each.set_epoch(epoch)

    def set_epoch(self, epoch: int, seen: int = 0) -> None:
        """Switch to `epoch`, without the first `seen` of its samples."""
        self.epoch = epoch
        self.seen = seen

    def __len__(self) -> int:
        """Return this rank's samples in a whole epoch, also of one that is resumed."""
        return self.steps * self.global_batch // distributed.world_size()

    def __iter__(self) -> Iterator[Key]:
        seed = samples.hash_key(self.seed, self.epoch)
        generator = torch.Generator().manual_seed(seed)
        if self.cumulated is None:
            order = torch.randperm(self.total, generator=generator)
        else:
            drawn = torch.rand(self.total, dtype=torch.float64, generator=generator)
            order = torch.searchsorted(self.cumulated, drawn, right=True)
        # Dealt in turn, so that a global batch is one stretch of the order.
        # What does not fill a global batch is left out.
        end = self.total - (self.total - self.seen) % self.global_batch
        of_each = self.global_batch // self.ranks
        dealt = order[self.seen : end].view(-1, of_each, self.ranks)
        # In each step those of one virtual rank after the other.
        mine = dealt[..., self.here.start : self.here.stop].transpose(1, 2).flatten()
        return (Key(self.epoch, number) for number in mine.tolist())


class ValSampler(Sampler[list[Key]]):
    """A `batch_sampler` for evaluation: each sample once, whatever the number of ranks.

    Whole batches are dealt to the ranks in turn, so that a batch holds the same samples on any
    number of ranks; a rank may get none.
    """

    def __init__(self, dataset: MapDataset, batch_size: int) -> None:
        self.total = samples.count_samples(dataset)
        self.batch_size = batch_size

    def _starts(self) -> range:
        """Return where this rank's batches begin."""
        starts = range(0, self.total, self.batch_size)
        return starts[distributed.rank() :: distributed.world_size()]

    def __len__(self) -> int:
        return len(self._starts())

    def __iter__(self) -> Iterator[list[Key]]:
        indices = range(self.total)
        for start in self._starts():
            batch = indices[start : start + self.batch_size]  # the last may be smaller
            yield [Key(0, index, is_val=True) for index in batch]


class Loader(DataLoader):
    """What `train_loader` and `val_loader` return; it yields what a network takes, on the CPU.

    Workers start anew in each epoch, as torch's own do by default: they have the dataset as it
    is in this process then.

    dataset: the dataset as it was given.
    """

    sampler: TrainSampler  # of one for training

    def __init__(
        self,
        dataset: MapDataset,
        classes: int | Sequence[str] | None,
        seed: int,
        count: int | None,
        how: dict,
        options: dict,
    ) -> None:
        taken = sorted(options.keys() & {"sampler", "batch_sampler", "shuffle"})
        if taken:
            raise UserError(
                f"{taken[0]}=: ddpkit.train_loader and val_loader have their own samplers; use "
                "sample_weights=, or pass the dataset and your sampler to DataLoader(...)"
            )
        count = options.pop("num_workers", count)  # as DataLoader calls it
        self.seeded = Seeded(dataset, classes, seed)
        how |= workers(count, devices.kind())
        if not how["num_workers"]:
            # of workers that there are not, as under a debugger
            options |= {"persistent_workers": False, "prefetch_factor": None}
        if classes is not None:
            how["collate_fn"] = Collate()
        super().__init__(dataset, **(how | options))

    def __iter__(self) -> Any:
        """Yield the batches of the epoch that the script is in, uint8 images normalised."""
        return self.normalized(self.raw(getattr(self.sampler, "epoch", 0)))

    @property
    def is_train(self) -> bool:
        return isinstance(self.sampler, TrainSampler)

    def normalized(self, batches: Iterator) -> Iterator:
        """Return what a network takes of the batches that `raw` returns."""
        if self.seeded.is_any:
            return batches
        format = normalizing.format_of(self)
        return (
            normalizing.move(batch, devices.CPU, format)
            for batch in batches_by_size(batches)
        )

    def raw(self, epoch: int = 0, seen: int = 0) -> Iterator:
        """Return this rank's batches as samples have them, without the first `seen` samples."""
        if self.is_train:
            self.sampler.set_epoch(epoch, seen)
            samples.tell_epoch(self.dataset, epoch)
        # This loader, but of samples by their keys.
        reader = DataLoader.__new__(DataLoader)
        vars(reader).update(vars(self), dataset=self.seeded)
        return self.seeded.say_unequal(started(reader))

    @functools.cached_property
    def channels(self) -> int:
        """How many channels the images have: of the first one, which is read for that."""
        image = self.seeded[Key(0, 0, is_val=True)][0]
        # as `configure` does: to read it has drawn numbers
        samples.seed(self.seeded.seed)
        return image.shape[0]


def train_loader(
    dataset: MapDataset,
    batch_size: int,
    *,
    classes: int | Sequence[str] | None = None,
    accumulate: int = 1,
    seed: int = 0,
    workers: int | None = None,
    sample_weights: Sequence[float] | Tensor | None = None,
    virtual_ranks: int = 0,
    **options: Any,
) -> Loader:
    """Return a DataLoader of this rank's share of `dataset`, in another order in each epoch.

    What is in an optimizer step depends on the seed, the epoch and the size of the global batch,
    not on the number of ranks, passes and workers; so do the random numbers of each sample. Samples
    that do not fill a step of all ranks are left out. `Run.steps` and `Checkpoints.steps` go on
    within an epoch, to the bit.

    dataset: map-style. With `classes`, their names or number, its samples are images and targets,
        as `ddpkit.data.samples.Seeded` describes them, and are checked; without, of any kind.
    batch_size: samples per rank and forward pass. accumulate: forward passes per optimizer step.
    workers: processes per rank that read; 0: the rank itself; None: its share of the CPUs, at most
        16, and 0 under a debugger.
    sample_weights: one of each, not negative. Each epoch draws as many samples as there are, with
        replacement, in these proportions, such as 1 / the number of samples of their class.
    virtual_ranks: of ddpkit.VirtualRanks, whose shares it reads; 0: the ranks that there are.
    options: others of DataLoader, such as collate_fn.

    Raises a UserError if there are fewer samples than a step takes, or other sample weights.

        train_loader = ddpkit.train_loader(train_set, 32, classes=classes)
    """
    sampler = TrainSampler(
        dataset, batch_size, accumulate, seed, sample_weights, virtual_ranks
    )
    how = {"batch_size": batch_size, "sampler": sampler}
    return Loader(dataset, classes, seed, workers, how, options)


def val_loader(
    dataset: MapDataset,
    batch_size: int,
    *,
    classes: int | Sequence[str] | None = None,
    seed: int = 0,
    workers: int | None = None,
    **options: Any,
) -> Loader:
    """Return a DataLoader for evaluation: each sample once, on one rank; a rank may get none.

    A batch holds the same samples on any number of ranks; with `classes` only images of one size,
    and their indices come last. Sums over it, such as of right answers and of samples, are to be
    reduced over the ranks before they are divided. Ranks may have unequal numbers of batches:
    evaluate the network itself, not DistributedDataParallel's.

    The arguments are those of `train_loader`.

        val_loader = ddpkit.val_loader(val_set, 32, classes=classes)
    """
    how = {"batch_sampler": ValSampler(dataset, batch_size)}
    return Loader(dataset, classes, seed, workers, how, options)


def workers(count: int | None, device: torch.device) -> dict:
    """Return the arguments of a DataLoader that start `count` workers, which end with their rank.

    On a GPU, but Apple's, batches are copied from pinned memory.
    """
    if count is None:  # under a debugger each would be a session
        count = 0 if process.is_debugged() else min(cpu_share(), 16)
    seconds = 0.0
    if count and not distributed.any_debugged():
        # Shorter than the ranks' own time-out: if a worker hangs, this rank can name
        # its sample.
        seconds = 0.9 * distributed.timeout()
    return {
        "num_workers": count,
        "multiprocessing_context": worker_context(count),
        "worker_init_fn": children.start_worker,
        "pin_memory": devices.copies_async(device),
        "timeout": seconds,
    }


def explain_loading(error: Exception) -> str | UserError | None:
    """Return a line that names the samples at which loader workers died or hung, if they did."""
    text = " ".join(str(error).split())
    # torch's words
    death = r"DataLoader (?:worker \(pid(?:\(s\))? ([\d, ]+)\)|timed out)"
    words = re.search(death, text)
    if not words:
        return None
    fault = find_fault()
    if isinstance(fault, UserError):
        return fault
    # none if a worker hangs: then all that are reading
    pids = re.findall(r"\d+", words[1] or "")
    at: dict[int, str] = {}
    for seeded in Seeded.in_use:
        for pid, sample in zip(seeded.reading[::2], seeded.reading[1::2], strict=True):
            if sample and (not pids or str(pid) in pids):
                at[pid] = f" at {samples.name(seeded.dataset, sample - 1)}"
    # what torch has noticed first need not be all
    ends = {worker.pid: f" {worker.end()}" for worker in running if worker.has_died()}
    lines = [
        f"loader worker {pid}{at.get(pid, '')}{ends.get(pid, '')}" for pid in ends or at
    ]
    if ends:
        return "; ".join(lines)
    return f"{'; '.join(lines)}: {text}" if at else text


failures.explainers.append(explain_loading)


class Groups(list):
    """The batches of a DataLoader's batch, one for each size of image."""


class Collate:
    """A `collate_fn`: stacks samples to a batch [images, targets, ...]; in evaluation by size.

    Samples whose images differ in size become several batches, so that none needs padding.
    """

    def __call__(self, samples: Sequence[tuple]) -> list:
        groups: dict[tuple, list] = {}
        for sample in samples:
            # by type, too: uint8 is normalised later, float has been
            kind = sample[0].shape, sample[0].dtype
            groups.setdefault(kind, []).append(sample)
        batches = Groups()
        for group in groups.values():
            # images are channels last in memory, as they were read
            rows = default_collate([sample[0].movedim(0, -1) for sample in group])
            others = default_collate([sample[1:] for sample in group])
            batches.append([rows.movedim(-1, 1), *others])
        return batches if len(batches) > 1 else batches[0]


def batches_by_size(batches: Iterable[list]) -> Iterator[list]:
    """Yield the batches that a loader with `Collate` returns, each of one size of image."""
    for batch in batches:
        yield from batch if isinstance(batch, Groups) else [batch]


def started(loader: Any) -> Iterator:
    """Return an iterator over `loader`, whose workers outlive the signals that ask for a stop."""
    with process.holding_signals():
        batches = iter(loader)
    if isinstance(batches, _MultiProcessingDataLoaderIter):
        children.note_iterator(batches)
    return batches
