"""Loaders that are not of ddpkit: how the ranks share their batches, and read them again."""

import itertools
import pickle
import zlib
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ddpkit.data import loading, samples
from ddpkit.data.normalizing import unpack
from ddpkit.data.samples import fingerprint
from ddpkit.errors import UserError
from ddpkit.ranks import distributed
from ddpkit.ranks.module_state import AnyGenerator

END = object()  # after the last batch, which may be None
# of the loaders that are read, by number: what each epoch seeds
_seeded: dict[int, list[AnyGenerator]] = {}
# Of loaders: a checksum of their generators as they were given: the first epoch seeds them.
_checksums: WeakKeyDictionary[object, int] = WeakKeyDictionary()


class Reading:
    """The one rule of how any loader begins an epoch on each rank, and goes on within it.

    Make it on all ranks before random numbers are drawn.

    seed: of the random numbers with which a loader begins, that is not of ddpkit.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        seeds = distributed.gather_objects(torch.initial_seed())
        self.is_seeded_by_rank = len(set(seeds)) > 1

    def rest(
        self,
        batches: Any,
        epoch: int,
        done: int,
        number: int = 0,
        is_resumed: bool = False,
    ) -> Iterator:
        """Return this rank's batches of `epoch`, without the `done` ones of before.

        batches: those of `train_loader` go on at once, a range or a list is cut, any other loader
            reads those of before again.
        number: of the loader, if there are several, such that each draws numbers of its own.
        is_resumed: it may have been given back a state of its own: it goes on by itself.
        """
        if isinstance(batches, loading.Loader) and batches.is_train:
            steps, passes = divmod(done, batches.sampler.accumulate)
            raw = batches.raw(epoch, steps * batches.sampler.global_batch)
            return itertools.islice(batches.normalized(raw), passes, None)
        if isinstance(batches, Sequence):
            return itertools.islice(batches, done, None)
        if is_resumed:
            rest = begun(batches, epoch)
            if done:
                return rest
            # What it was given was the end of the epoch before, which it is through with now.
        key = [self.seed, epoch, self._share(batches)]
        if number:
            key.append(number)
        whole = begun(batches, epoch, *key)
        if done:
            distributed.print0(f"reading {done} batches again to skip them")
        return itertools.islice(whole, done, None)

    def _share(self, batches: object) -> int:
        """Return this rank's number, or 0 on all ranks if they have to draw the same.

        What is drawn may be the order, of which each rank then takes its part. It is not with
        torch's DistributedSampler, which draws by its own seed, nor if the ranks have seeded
        torch's generator, or one of the loader's own, with numbers of their own.
        """
        samplers = samplers_of(batches)
        has_own = torch.utils.data.DistributedSampler in map(type, samplers)
        generators = generators_in(batches, *samplers)
        if generators:
            states = [
                each.initial_seed() if isinstance(each, torch.Generator) else each
                for each in generators
            ]
            checksum = zlib.crc32(pickle.dumps(states))
            mine = _checksums.setdefault(batches, checksum)
            has_own = has_own or len(set(distributed.gather_objects(mine))) > 1
        return distributed.rank() if has_own or self.is_seeded_by_rank else 0


class OtherSource:
    """What Run has to know of any other loader, of which each rank takes all batches."""

    def __init__(self, loader: Any, accumulate: int, seed: int = 0) -> None:
        try:
            # Of shares of unequal length: all ranks take as many steps as the shortest
            # has.
            count = min(distributed.gather_objects(len(loader)))
        except TypeError:
            raise UserError(
                f"the training loader, a {type(loader).__name__}, has no length: give its dataset "
                "one, on several ranks also num_replicas and rank; the loop is for step, batches "
                "in run.steps(train_loader, ddp_model)"
            ) from None
        check_share(loader, "train")
        note_seeded(loader)
        self.passes = accumulate  # of a step, on this rank
        self.virtual_ranks = 0
        self.ranks = distributed.world_size()
        self.steps = count // accumulate
        if not self.steps:
            raise UserError(
                f"the training loader has {count} batches, too few for one step"
            )
        # A DataLoader with a batch_sampler has none itself.
        sizes = [
            getattr(each, "batch_size", None) for each in (loader, *samplers_of(loader))
        ]
        self.global_batch = next(filter(None, sizes), 1) * self.ranks * accumulate
        self.total = self.steps * self.global_batch
        self.order: dict = {
            "images": self.total,
            "training_set": fingerprint(samples.dataset_of(loader)),
            "seed": seed,
            "sampler": f"{type(loader).__name__} by rank",
        }

    def read_epoch(
        self, reading: Reading, loader: Any, epoch: int, seen: int
    ) -> Iterator:
        """Return this rank's batches of `epoch`, without the first `seen` of its samples."""
        done = seen // self.global_batch * self.passes
        batches = reading.rest(loader, epoch, done)
        for _ in range(self.steps * self.passes - done):
            batch = next(batches, END)
            if batch is END:
                raise UserError(
                    f"the training loader has fewer than {len(loader)} batches on rank "
                    f"{distributed.rank()}: its length must be the number of batches that this "
                    "rank reads"
                )
            yield batch


def check_share(loader: object, use: str) -> None:
    """Raise a UserError unless it is known that a loader has this rank's share of the samples.

    A dataset says so, or in training a sampler, by num_replicas and rank. Those of torch for
    evaluation repeat samples. use: "train" or "val".
    """
    here = distributed.world_size(), distributed.rank()
    dataset = samples.dataset_of(loader)
    is_known = distributed.world_size() == 1
    for each in [*samplers_of(loader), dataset]:
        share = getattr(each, "num_replicas", None), getattr(each, "rank", None)
        if None in share:
            continue
        if share != here:
            raise UserError(
                f"{type(each).__name__} has num_replicas and rank {share}, but this process is "
                f"{here}: omit both arguments"
            )
        is_known = is_known or use == "train" or each is dataset
    if not is_known:
        remedy = ""
        if use == "train":
            remedy = (
                " or a DistributedSampler (weights: train_loader(sample_weights=...))"
            )
        raise UserError(
            f"unknown which samples of the {use} loader belong to this rank: use "
            f"ddpkit.{use}_loader(...){remedy}; if each rank has its own samples, give the dataset "
            "or sampler num_replicas and rank, as a DistributedSampler has"
        )


def samplers_of(loader: object) -> list:
    """Return the samplers of a loader, and those within them, also of one within tqdm.

    One may be there twice.
    """
    samplers = []
    for name in "iterable", "batch_sampler", "sampler":
        sampler = getattr(loader, name, None)
        if sampler is not None:
            samplers += [sampler, *samplers_of(sampler)]
    return samplers


def begun(loader: Any, epoch: int, *key: int) -> Iterator:
    """Begin `epoch` of any loader, whose samplers and dataset are told; return its batches.

    key: decides the random numbers, of their own generators, too, which would go on elsewhere;
        without one nothing is seeded.
    """
    for each in (loader, *samplers_of(loader)):
        if hasattr(each, "set_epoch"):
            each.set_epoch(epoch)
    if hasattr(loader, "_num_iter_calls"):  # by which Fabric's loader does the same
        loader._num_iter_calls = epoch
    samples.tell_epoch(samples.dataset_of(loader), epoch)
    if not key:
        return loading.started(loader)
    for generator in drawing_for(loader):
        _seed_generator(generator, samples.hash_key(*key))
    if getattr(loader, "persistent_workers", False):
        # Kept workers would go on with random numbers of the epoch before. Fabric and accelerate
        # wrap the loader that keeps them.
        within = getattr(loader, "base_dataloader", loader)
        getattr(within, "_dataloader", within)._iterator = None
    return drawn(loader, *key)


def drawing_for(loader: object) -> list[AnyGenerator]:
    """Return the generators of a loader, its samplers and, if it is read here, its dataset."""
    drawing = [loader, *samplers_of(loader)]
    if not getattr(loader, "num_workers", 0):
        drawing.append(samples.dataset_of(loader))
    return generators_in(*drawing)


def note_seeded(loader: object, number: int = 0) -> None:
    """Note the generators that each epoch of a loader will seed; of that number, if of several."""
    _seeded[number] = drawing_for(loader)


def seeded_anew() -> list[AnyGenerator]:
    """Return the generators that each epoch of the loaders that are read seeds."""
    return list(itertools.chain(*_seeded.values()))


def generators_in(*owners: object) -> list[AnyGenerator]:
    """Return the generators of random numbers that are attributes of these."""
    return [
        value
        for each in owners
        for value in getattr(each, "__dict__", {}).values()
        if isinstance(value, AnyGenerator)
    ]


def _seed_generator(generator: AnyGenerator, value: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(value)
    elif isinstance(generator, np.random.Generator):
        own = generator.bit_generator
        own.state = type(own)(value).state
    else:
        generator.seed(value % 2**32)


def drawn(loader: object, *key: int) -> Iterator:
    """Yield the batches of any loader, with random numbers that `key` alone decides.

    So are those that this process draws for it: the same on all ranks, whatever is drawn elsewhere.
    """
    outside = samples.random_state()
    samples.seed(*key)
    batches = loading.started(loader)
    while True:
        batch = next(batches, END)
        inside = samples.random_state()
        samples.set_random_state(outside)
        if batch is END:
            return
        yield batch  # meanwhile whoever takes it draws on
        outside = samples.random_state()
        samples.set_random_state(inside)


def numbered(batches: Iterator) -> Iterator[list]:
    """Yield batches of any loader with numbers of their samples, which no other rank has.

    They are negative: no indices of the dataset, which only a loader of ddpkit knows.
    """
    ranks = distributed.world_size()
    first = 0
    for batch in batches:
        parts = unpack(batch)
        end = first + len(parts[0])
        numbers = torch.arange(first, end) * ranks + distributed.rank()
        yield [*parts, -1 - numbers]
        first = end
