"""From samples to batches on the device: dealing them to ranks, loader workers, normalising."""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ddpkit.data import samples
from ddpkit.data.format import DEFAULT_FORMAT, NAME, Format
from ddpkit.data.samples import Key, MapDataset, Seeded, fingerprint
from ddpkit.errors import UserError
from ddpkit.ranks import distributed, process, stopping
from ddpkit.ranks.cpus import cpu_share
from ddpkit.ranks.workers import find_fault, running, worker_context

MOST_COMPARED = 32  # samples by which is judged whether the ranks' loaders are alike


class TrainSampler(Sampler[Key]):
    """This rank's share of each global batch, in another order each epoch.

    What is in an optimizer step's global batch depends on the seed, the epoch and the size of the
    global batch, not on the number of ranks, passes and loader workers. Samples that do not fill a
    global batch are left out, so that all ranks take the same number of steps. A run continues in
    mid-epoch, to the bit.

    The arguments are those of `train_loader`.
    """

    def __init__(
        self,
        dataset: MapDataset,
        batch_size: int,
        accumulate: int,
        seed: int,
        weights: Sequence[float] | Tensor | None = None,
    ) -> None:
        ranks = distributed.world_size()
        self.total = len(dataset)
        self.global_batch = batch_size * ranks * accumulate
        # of the optimizer, in a whole epoch
        self.steps = self.total // self.global_batch
        if not self.steps:
            raise UserError(
                f"--batch-size {batch_size} x {ranks} ranks x --accumulate {accumulate} is "
                f"more than the {self.total} training images: lower one of them, or add "
                "images"
            )
        self.seed = seed
        # What the order depends on in addition to the epoch; checkpoints have it.
        self.order: dict[str, Any] = {
            "images": self.total,
            "training_set": fingerprint(dataset),
            "seed": seed,
            "sampler": "shuffle",
        }
        self.cumulated: Tensor | None = None  # weights
        if weights is not None:
            self.cumulated = self._cumulate(weights)
            self.order["sampler"] = f"weighted {samples.checksum(self.cumulated)}"
        self.set_epoch(0)

    def _cumulate(self, weights: Sequence[float] | Tensor) -> Tensor:
        """Return the sums of the weights so far, as shares of the sum of all."""
        values = torch.as_tensor(weights, dtype=torch.float64)
        is_right = values.shape == (self.total,) and bool((values >= 0).all())
        if not is_right or not 0 < values.sum() < math.inf:
            raise UserError(
                f"weights of train_loader: {self.total} numbers are needed, one of each sample, "
                "not negative and not all 0"
            )
        sums = values.cumsum(0)
        # A number below 1 is then below the last sum of a weight that is not 0.
        return sums / sums[-1]

    def set_epoch(self, epoch: int, seen: int = 0) -> None:
        """Switch to `epoch`, without the first `seen` of its samples."""
        self.epoch = epoch
        self.seen = seen

    def __len__(self) -> int:
        # whole global batches alone
        left = (self.total - self.seen) // self.global_batch * self.global_batch
        return left // distributed.world_size()

    def __iter__(self) -> Iterator[Key]:
        seed = samples.hash_key(self.seed, self.epoch)
        generator = torch.Generator().manual_seed(seed)
        if self.cumulated is None:
            order = torch.randperm(self.total, generator=generator)
        else:
            drawn = torch.rand(self.total, dtype=torch.float64, generator=generator)
            order = torch.searchsorted(self.cumulated, drawn, right=True)
        # Dealt in turn, so that a global batch is one stretch of the order.
        mine = order[self.seen + distributed.rank() :: distributed.world_size()]
        return (Key(self.epoch, number) for number in mine[: len(self)].tolist())

    def batches(self, loader: Any, epoch: int, seen: int) -> Iterator:
        """Return this rank's batches of `epoch`, without the first `seen` of its samples."""
        self.set_epoch(epoch, seen)
        return loader.dataset.say_unequal(started(loader))


class ValSampler(Sampler[list[Key]]):
    """A `batch_sampler` for evaluation: each sample once, whatever the number of ranks.

    Whole batches are dealt to the ranks in turn, so that a batch holds the same samples on any
    number of ranks; a rank may get none.
    """

    def __init__(self, dataset: MapDataset, batch_size: int) -> None:
        self.total = len(dataset)
        self.batch_size = batch_size

    def __len__(self) -> int:
        batches = -(-self.total // self.batch_size)  # the last may be smaller
        return len(range(distributed.rank(), batches, distributed.world_size()))

    def __iter__(self) -> Iterator[list[Key]]:
        step = distributed.world_size() * self.batch_size  # from one batch to the next
        for start in range(distributed.rank() * self.batch_size, self.total, step):
            stop = min(start + self.batch_size, self.total)
            yield [Key(0, index, is_val=True) for index in range(start, stop)]


class Loader(DataLoader):
    """What `train_loader` and `val_loader` return."""

    dataset: Seeded


def train_loader(
    dataset: MapDataset,
    batch_size: int,
    *,
    classes: int | Sequence[str] | None = None,
    accumulate: int = 1,
    seed: int = 0,
    workers: int | None = None,
    weights: Sequence[float] | Tensor | None = None,
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
    weights: of the samples, not negative: each epoch draws as many as there are, with replacement,
        in these proportions, such as 1 / the number of samples of its class.
    options: others of DataLoader, such as collate_fn.

    Raises a UserError if there are fewer samples than a step takes, or other weights.

        train_loader = ddpkit.train_loader(train_set, 32, classes=classes)
    """
    sampler = TrainSampler(dataset, batch_size, accumulate, seed, weights)
    how = {"batch_size": batch_size, "sampler": sampler}
    return _loader(dataset, classes, seed, workers, how, options)


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
    return _loader(dataset, classes, seed, workers, how, options)


def _loader(
    dataset: MapDataset,
    classes: int | Sequence[str] | None,
    seed: int,
    count: int | None,
    how: dict[str, Any],
    options: dict[str, Any],
) -> Loader:
    if taken := sorted(options.keys() & {"sampler", "batch_sampler", "shuffle"}):
        raise UserError(
            f"{taken[0]}=: ddpkit.train_loader and val_loader have samplers of their own; see "
            "weights=, or give DataLoader(...) the data set and your sampler"
        )
    device = torch.accelerator.current_accelerator(check_available=True)
    how |= workers(count, device or torch.device("cpu"))
    if classes is not None:
        how["collate_fn"] = Collate()
    return Loader(Seeded(dataset, classes, seed), **{**how, **options})


def workers(count: int | None, device: torch.device) -> dict[str, Any]:
    """Return the arguments of a DataLoader that start `count` workers, which end with their rank.

    On a GPU batches are copied from pinned memory.
    """
    if count is None:
        count = default_workers()
    seconds = 0.0
    if count and not distributed.any_debugged():
        # Shorter than the ranks' own time-out: if a worker hangs, this rank can name
        # its sample.
        seconds = 0.9 * distributed.timeout()
    return {
        "num_workers": count,
        "persistent_workers": count > 0,
        "multiprocessing_context": worker_context(count),
        "worker_init_fn": process.start_worker,
        "prefetch_factor": 2 if count else None,  # batches that each reads ahead
        "pin_memory": device.type != "cpu",
        "timeout": seconds,
    }


def default_workers() -> int:
    """Return the loader workers of a rank; 0 under a debugger, for which each is a session."""
    return 0 if process.is_debugged() else min(cpu_share(), 16)


def explain(error: Exception) -> str | UserError | None:
    """Return a line that names the samples at which loader workers died or hung, if they did."""
    text = " ".join(str(error).split())
    # torch's words
    death = r"DataLoader (worker \(pid(\(s\))? (?P<pids>[\d, ]+)\)|timed out)"
    found = re.search(death, text)
    if not found:
        return None
    fault = find_fault()
    if isinstance(fault, UserError):
        return fault
    pids = found["pids"].split(", ") if found["pids"] else None  # all that read
    at: dict[int, str] = {}
    for seeded in Seeded.in_use:
        pairs = zip(seeded.reading[::2], seeded.reading[1::2], strict=True)
        for pid, sample in pairs:
            if sample and (not pids or str(pid) in pids):
                place = samples.name(seeded.dataset, sample - 1)
                at[pid] = f"loader worker {pid} at {place}"
    # what torch has noticed first need not be all
    dead = [each for each in running if each.has_died()]
    if dead:
        lines = []
        for worker in dead:
            who = at.get(worker.pid, f"loader worker {worker.pid}")
            lines.append(f"{who} {worker.end()}")
        return "; ".join(lines)
    return f"{'; '.join(at.values())}: {text}" if at else text


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


# By their loaders: what `steps_per_epoch` has begun to read, Run goes on with.
_others: WeakKeyDictionary[Any, "OtherSource"] = WeakKeyDictionary()


def steps_per_epoch(loader: Any, accumulate: int) -> int:
    """Return how many optimizer steps, of `accumulate` batches on each rank, an epoch has.

    Every rank has to call it: of a loader of your own it reads the first batches.
    """
    if is_ours(loader):
        return loader.sampler.steps
    found = OtherSource(loader, accumulate, seed=0)
    _others[loader] = found
    return found.steps


def find_source(
    loader: Any, val_loader: Any, accumulate: int, seed: Any, epoch: int
) -> "TrainSampler | OtherSource":
    """Return what Run has to know of its loader, in all of its epochs; `epoch` is the first.

    Every rank has to call it.
    """
    for each, kind in (loader, TrainSampler), (val_loader, ValSampler):
        has_kind = any(isinstance(one, kind) for one in samplers_of(each))
        if is_ours(each) and not has_kind:
            raise UserError(
                "Run(...) takes ddpkit.train_loader(...) and then ddpkit.val_loader(...): these "
                "are exchanged"
            )
        if is_ours(each) and each.dataset.is_any:
            raise UserError(
                "Run(...) takes loaders of images: give ddpkit.train_loader and val_loader "
                "classes=classes"
            )
    check_formats(loader, val_loader)
    if not is_ours(loader):
        known = _others.get(loader)  # begun by `steps_per_epoch`
        if known is None or known.accumulate != accumulate:
            return OtherSource(loader, accumulate, seed, epoch)
        known.begin_at(seed, epoch)
        return known
    planned = loader.sampler.global_batch
    found = (loader.batch_size or 0) * distributed.world_size() * accumulate
    if planned != found:
        raise UserError(
            f"the training loader was made for steps of {planned} images, Run(...) takes "
            f"{found}: give both the same accumulate"
        )
    return loader.sampler


class OtherSource:
    """What Run has to know of any other loader, whose batches the ranks share as `deal` says.

    To go on in a stopped epoch its batches of before are read again, and left out.
    """

    def __init__(self, loader: Any, accumulate: int, seed: Any, epoch: int = 0) -> None:
        self.accumulate = accumulate
        self.seed = seed
        self.epoch = epoch
        ranks = distributed.world_size()
        try:
            # Of shares of unequal length: all ranks take as many steps as the shortest
            # has.
            count = min(distributed.gather_objects(len(loader)))
        except TypeError:
            raise UserError(
                "the training loader has no length: give its data set one"
            ) from None
        start = functools.partial(self._start, loader, epoch)
        # To compare the ranks' batches the first ones are read: `batches` goes on there.
        self.begun: Iterator | None
        self.begun, has_own = deal(loader, start, "training")
        self.turn = 1 if has_own else ranks  # batches, of which this rank takes one
        self.steps = count // self.turn // accumulate
        if not self.steps:
            raise UserError(
                f"the training loader has {count} batches, too few for a step"
            )
        # A DataLoader with a batch_sampler has none itself.
        places = [loader, *samplers_of(loader)]
        sizes = [getattr(each, "batch_size", None) for each in places]
        size = next(filter(None, sizes), 1)
        self.global_batch = size * ranks * accumulate
        self.total = self.steps * self.global_batch
        self.order: dict[str, Any] = {
            "images": self.total,
            "training_set": fingerprint(samples.of(loader)),
            "seed": seed,
            "sampler": type(loader).__name__,
        }
        how = ""
        if ranks > 1 and has_own:
            batches = self.steps * accumulate * ranks
            how = f"; each rank has batches of its own and takes them all, {batches} in all"
        elif ranks > 1:
            how = (
                f"; the ranks take its batches in turn, so that each reads {ranks} times "
                "what it uses, which a DistributedSampler or a stream split by rank avoids"
            )
        distributed.print0(
            "the training loader is not ddpkit.train_loader(...): to resume within an epoch its "
            f"batches of before are read again{how}"
        )

    def begin_at(self, seed: Any, epoch: int) -> None:
        """Read the batches from `epoch` on with this seed; anew, if others were begun."""
        if (seed, epoch) == (self.seed, self.epoch):
            return
        self.begun = None
        self.seed = seed
        self.order["seed"] = seed
        self.epoch = epoch

    def _start(self, loader: Any, epoch: int) -> Iterator:
        return begun(loader, epoch, self.seed, epoch)

    def batches(self, loader: Any, epoch: int, seen: int) -> Iterator:
        batches = self.begun
        self.begun = None  # for one epoch
        if batches is None or epoch != self.epoch:
            batches = self._start(loader, epoch)
        before = seen // self.global_batch * self.accumulate * self.turn
        for _ in itertools.islice(batches, before):
            pass
        for _ in range((self.total - seen) // self.global_batch * self.accumulate):
            some = list(itertools.islice(batches, self.turn))
            if len(some) < self.turn:
                raise UserError(
                    f"the training loader has less than {len(loader)} batches on rank "
                    f"{distributed.rank()}: its length has to be that of what this rank "
                    "reads"
                )
            # with a turn of 1 the only one
            yield some[distributed.rank() % self.turn]


def deal(loader: Any, start: Callable[[], Iterator], use: str) -> tuple[Iterator, bool]:
    """Return the batches that `start` begins, and whether each rank has its own, to take all.

    Otherwise all ranks have the same, to take in turn. A sampler or data set that has num_replicas
    and rank says so itself: with timm's RepeatAugSampler equal batches are meant. Of others the
    first batches are compared. Images may differ only because augmentation does: then labels, names
    and the like decide, unless they are all alike, as in shards that are sorted by class. Then it
    is the images after all, if they can be read twice.

    Every rank has to call it.
    """
    ranks = distributed.world_size()
    begun = start()
    if _has_share(loader) or ranks == 1:
        return begun, True
    size = getattr(loader, "batch_size", None) or MOST_COMPARED
    count = -(-MOST_COMPARED // size)  # batches, rounded up
    ahead = list(itertools.islice(begun, count))
    batches = itertools.chain(ahead, begun)
    whole = samples.checksum(ahead)
    labels = [part for part in tree_leaves(ahead) if getattr(part, "ndim", 0) < 3]
    found = distributed.gather_objects((whole, samples.checksum(labels), bool(ahead)))
    known = [each for each in found if each[2]]  # a rank's share may be empty
    different = {each[0] for each in known}
    if len(different) == 1 and len(known) == ranks:
        return batches, False
    # From here on each rank has to differ from each other one.
    if len(different) < len(known):
        raise UserError(
            f"the {use} loader gives some ranks the same batches, and others their own: "
            "give all the same, or each its share, as DistributedSampler does"
        )
    if len(known) < ranks or len({each[1] for each in known}) > 1:
        return batches, True
    # The images differ, the labels do not: which tells something if labels vary.
    for part in labels:
        if getattr(part, "ndim", 0) and len(set(map(str, part.tolist()))) > 1:
            return batches, False
    # Nothing else tells: do the images differ by chance, or are they others?
    again = samples.checksum(list(itertools.islice(start(), count)))
    if not all(distributed.gather_objects(again == whole)):
        raise UserError(
            f"the {use} loader: its first batches differ between ranks, and each time that "
            "they are read, so that it is not known whether each rank has its share of the "
            "samples: use ddpkit's samplers, or one that has num_replicas and rank"
        )
    return start(), True


def _has_share(loader: Any) -> bool:
    """Return whether a sampler or data set says which rank it is for; a UserError if not this."""
    here = distributed.world_size(), distributed.rank()
    for part in [*samplers_of(loader), samples.of(loader)]:
        share = getattr(part, "num_replicas", None), getattr(part, "rank", None)
        if None in share:  # not a sampler for several ranks
            continue
        if share != here:
            raise UserError(
                f"{type(part).__name__} has num_replicas and rank {share}, but this "
                f"process is {here}: leave both arguments out"
            )
        return True
    return False


def samplers_of(loader: Any) -> list:
    """Return the samplers of a loader, and those within them."""
    places = [loader]
    known = {id(loader), id(None)}  # `==` of an array of indices would be an array
    for place in places:  # which grows
        for name in ("batch_sampler", "sampler"):
            part = getattr(place, name, None)
            if id(part) not in known:
                known.add(id(part))
                places.append(part)
    return places[1:]


def begun(loader: Iterable, epoch: int, *key: int) -> Iterator:
    """Begin `epoch` of any loader, whose samplers and data set are told; return its batches.

    key: decides the random numbers, of their own generators, too, which would go on elsewhere.
    """
    samplers = samplers_of(loader)
    for part in samplers:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
    samples.set_epoch(samples.of(loader), epoch)
    for part in [loader, *samplers]:
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(samples.hash_key(*key))
    return drawn(loader, *key)


def drawn(loader: Any, *key: int) -> Iterator:
    """Yield the batches of any loader, with random numbers that `key` alone decides.

    So are those that this process draws for it: the same on all ranks, whatever is drawn elsewhere.
    """
    outside = samples.random_state()
    samples.seed(*key)
    batches = started(loader)
    while True:
        batch = next(batches, None)
        inside = samples.random_state()
        samples.set_random_state(outside)
        if batch is None:
            return
        yield batch  # meanwhile whoever takes it draws on
        outside = samples.random_state()
        samples.set_random_state(inside)


def eval_batches(loader: Any, device: torch.device) -> Iterator[tuple]:
    """Yield this rank's batches for evaluation, (images, targets, ..., indices), on `device`.

    images: float32 (N, C, H, W), uint8 ones normalised. targets: int64, or float32 if they are
    floating-point. indices: int64 (N,), of the samples in the data set.

    loader: with our ValSampler; or any other DataLoader, whose batches all ranks take in turn if
        they have the same, and each takes all if each has its own. indices are negative where the
        order of the data set is not kept. After a signal the loop ends early, and all ranks stop
        and save in `compute`.

        for images, targets, *_, indices in ddpkit.eval_batches(val_loader, device):
    """
    format = format_of(loader)
    for batch in _dealt(loader):
        yield move(batch, device, format)
        # `compute` and `end_epoch`, where all ranks pass, stop
        if stopping.stop_requested():
            break


class First:
    """The first samples of a validation loader, a small batch, the same on all ranks."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.dataset = getattr(loader, "dataset", loader)

    def __iter__(self) -> Iterator[list]:
        if not is_ours(self.loader):
            return itertools.islice(_numbered(self.loader, drawn(self.loader, 0)), 1)
        count = min(2, len(self.dataset))
        keys = [Key(0, number, is_val=True) for number in range(count)]
        return _by_size([self.loader.collate_fn(self.dataset.__getitems__(keys))])


def _dealt(loader: Any) -> Iterator[list]:
    """Return the batches of a loader for evaluation that are this rank's, with indices."""
    if isinstance(loader, First):
        return iter(loader)
    if is_ours(loader):
        return _by_size(started(loader))
    for each in samplers_of(loader):
        if hasattr(each, "num_replicas"):
            raise UserError(
                f"the validation loader has a {type(each).__name__}, which repeats "
                "samples: leave it out; the ranks take its batches in turn"
            )
    ranks = distributed.world_size()
    rank = distributed.rank()
    found, has_own = deal(loader, functools.partial(drawn, loader, 0), "validation")
    numbered = _numbered(loader, found)
    if ranks == 1 or not has_own:
        return itertools.islice(numbered, rank, None, ranks)
    # Numbers that no other rank has, and that are no indices of the data set.
    return ([*parts, -1 - rank - ranks * indices.abs()] for *parts, indices in numbered)


def _by_size(found: Iterable[list]) -> Iterator[list]:
    for batch in found:
        if isinstance(batch, Groups):
            yield from batch
        else:
            yield batch


def _numbered(loader: Any, batches: Iterator) -> Iterator[list]:
    """Yield batches of any loader with the indices of their samples, negative if not known."""
    in_order = (SequentialSampler, BatchSampler)  # not a class derived from them
    is_known = isinstance(samples.of(loader), IterableDataset) or all(
        type(each) in in_order for each in samplers_of(loader)
    )
    first = 0
    for batch in batches:
        parts = unpack(batch)
        end = first + len(parts[0])
        numbers = torch.arange(first, end)
        yield [*parts, numbers if is_known else -1 - numbers]
        first = end


def is_ours(loader: Any) -> bool:
    """Return whether a DataLoader has our sampler and seeds its samples."""
    dataset: Any = getattr(loader, "dataset", None)
    is_seeded = isinstance(dataset, Seeded)
    for name in ("sampler", "batch_sampler"):
        own = getattr(loader, name, None)
        if not isinstance(own, TrainSampler | ValSampler):
            continue
        if not is_seeded or own.total != len(dataset):
            raise UserError(
                f"{type(own).__name__} and the loader's data set do not belong together: make the "
                "loader by ddpkit.train_loader(...) or val_loader(...)"
            )
        return True
    if is_seeded:
        raise UserError(
            "the data set of a loader of ddpkit has come into another loader: give that your data "
            "set itself"
        )
    return False


def started(loader: Any) -> Iterator:
    """Return an iterator over `loader`, whose workers outlive the signals that ask for a stop."""
    with process.holding_signals():
        found = iter(loader)
    if isinstance(found, _MultiProcessingDataLoaderIter):
        process.note_iterator(found)
    return found


def unpack(batch: Any) -> tuple:
    """Return a batch as (images, targets, ...), floating-point or uint8 images (N, C, H, W)."""
    parts = samples.ordered(batch)
    if parts is None or not isinstance(parts[0], Tensor):
        raise UserError(
            f"the loader returns a {type(batch).__name__}: a batch is (images, targets, "
            '...) or a dict with "image" and "label", images a tensor (N, C, H, W)'
        )
    images = parts[0]
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise UserError(
            f"the loader returns images of {images.dtype}: return uint8, or float, divided "
            "by the value that is white, such as 65535.0"
        )
    return parts


def format_of(loader: Any) -> Format:
    return find_format(samples.of(loader)) or DEFAULT_FORMAT


def find_format(dataset: Any) -> Format | None:
    """Return the format of a data set, or of those that it wraps, which has to be one."""
    own = getattr(dataset, "format", None)
    if isinstance(own, Format):
        return own
    found = [each for each in map(find_format, samples.wrapped(dataset)) if each]
    # a batch is normalised as a whole
    for other in found[1:]:
        if other.scale != found[0].scale:
            raise UserError(
                f"{type(dataset).__name__} joins images of {found[0].keys()} and "
                f"{other.keys()}: give their folders the same {NAME}"
            )
    return found[0] if found else None


def check_formats(train_loader: Any, val_loader: Any) -> None:
    """Raise a UserError unless images for training and validation are normalised alike."""
    train = format_of(train_loader)
    val = format_of(val_loader)
    if train == val or train.scale == val.scale:
        return
    for loader in (train_loader, val_loader):
        if find_format(samples.of(loader)):
            continue  # its uint8 images are normalised by the format
        # A set of one's own without a format: floats are taken as they are.
        images = unpack(next(_by_size(drawn(loader, 0))))[0]
        if images.is_floating_point():
            return
    raise UserError(
        f"training images are normalised by {train.keys()}, validation images by "
        f"{val.keys()} of {NAME} ({{}}: ImageNet's mean and std): give both data sets the "
        "same `format`"
    )


def say_floats(batch: Any, val_loader: Any) -> None:
    """Say a line if images of training are floats, and those of validation uint8.

    batch: of training, as its loader gives it.
    """
    images = unpack(batch)[0]
    if images.dtype == torch.uint8:
        return
    others = next(iter(First(val_loader)), None)
    if others is not None and others[0].dtype == torch.uint8:
        mean, std = format_of(val_loader).statistics
        distributed.print0(
            "training images are floats, taken as they are, validation images uint8, normalised "
            f"by mean {mean} and std {std}: right if the former are normalised so, too"
        )


def move(batch: Any, device: torch.device, format: Format) -> tuple:
    """Return a batch, which has travelled as uint8, on `device`, as `batches` describes it."""
    moved = [
        part.to(device, non_blocking=True) if isinstance(part, Tensor) else part
        for part in unpack(batch)
    ]
    moved[0] = normalize(moved[0], format)
    targets = moved[1]
    if isinstance(targets, Tensor):
        moved[1] = targets.float() if targets.is_floating_point() else targets.long()
    return tuple(moved)


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
    return torch.tensor(statistics).mul(255).view(2, -1, 1, 1).to(device).unbind()
