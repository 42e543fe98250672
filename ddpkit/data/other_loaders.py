"""Loaders that are not of ddpkit: how the ranks share their batches, and read them again."""

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

from ddpkit.data import loading, samples
from ddpkit.data.normalizing import unpack
from ddpkit.data.samples import fingerprint
from ddpkit.errors import UserError
from ddpkit.ranks import distributed

AnyGenerator = (
    torch.Generator | np.random.Generator | np.random.RandomState | random.Random
)
MOST_COMPARED = 32  # samples by which is judged whether the ranks' loaders are alike


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
        start = functools.partial(begun, loader, epoch, seed, epoch)
        # To compare the ranks' batches the first ones are read: `read_epoch` goes on there.
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
        self.global_batch = next(filter(None, sizes), 1) * ranks * accumulate
        self.total = self.steps * self.global_batch
        self.order: dict[str, Any] = {
            "images": self.total,
            "training_set": fingerprint(samples.dataset_of(loader)),
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
        if (seed, epoch) != (self.seed, self.epoch):
            self.begun = None
            self.seed = seed
            self.order["seed"] = seed
            self.epoch = epoch

    def read_epoch(self, loader: Any, epoch: int, seen: int) -> Iterator:
        """As TrainSampler's."""
        batches = self.begun
        self.begun = None  # for one epoch
        if batches is None or epoch != self.epoch:
            batches = begun(loader, epoch, self.seed, epoch)
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
    mine = (whole, samples.checksum(labels)) if ahead else None
    known = list(filter(None, distributed.gather_objects(mine)))
    wholes = {each[0] for each in known}
    has_empty = len(known) < ranks  # a rank's share may be that
    if len(wholes) == 1 and not has_empty:
        return batches, False
    # From here on each rank has to differ from each other one.
    if len(wholes) < len(known):
        raise UserError(
            f"the {use} loader gives some ranks the same batches, and others their own: "
            "give all the same, or each its share, as DistributedSampler does"
        )
    if has_empty or len({each[1] for each in known}) > 1:
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


def _has_share(loader: object) -> bool:
    """Return whether a sampler or data set says which rank it is for; a UserError if not this."""
    here = distributed.world_size(), distributed.rank()
    for part in [*samplers_of(loader), samples.dataset_of(loader)]:
        share = getattr(part, "num_replicas", None), getattr(part, "rank", None)
        if share == here:
            return True
        if None not in share:  # a sampler for several ranks
            raise UserError(
                f"{type(part).__name__} has num_replicas and rank {share}, but this "
                f"process is {here}: leave both arguments out"
            )
    return False


def samplers_of(loader: object) -> list:
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


def begun(loader: Any, epoch: int, *key: int, of_data: bool = False) -> Iterator:
    """Begin `epoch` of any loader, whose samplers and data set are told; return its batches.

    key: decides the random numbers, of their own generators, too, which would go on elsewhere.
    of_data: also of those that the data set keeps.
    """
    samplers = samplers_of(loader)
    for part in (loader, *samplers):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
    if hasattr(loader, "_num_iter_calls"):  # by which Fabric's loader does the same
        loader._num_iter_calls = epoch
    samples.tell_epoch(samples.dataset_of(loader), epoch)
    for generator in generators_of(loader, of_data):
        _seed_generator(generator, samples.hash_key(*key))
    if getattr(loader, "persistent_workers", False):
        # Kept workers would go on with random numbers of the epoch before. Fabric and accelerate
        # wrap the loader that keeps them.
        within = getattr(loader, "base_dataloader", loader)
        getattr(within, "_dataloader", within)._iterator = None
    return drawn(loader, *key)


def generators_of(loader: object, of_data: bool = False) -> list:
    """Return the generators of random numbers that a loader draws from in this process."""
    places = [loader, *samplers_of(loader)]
    if of_data and not getattr(loader, "num_workers", 0):
        places.append(samples.dataset_of(loader))
    found = []
    for place in places:
        for value in getattr(place, "__dict__", {}).values():
            if isinstance(value, AnyGenerator):
                found.append(value)
    return found


def generator_state(generator: AnyGenerator) -> object:
    """Return what `generator` draws next depends on."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def _seed_generator(generator: AnyGenerator, value: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(value)
    elif isinstance(generator, np.random.Generator):
        kind = type(generator.bit_generator)
        generator.bit_generator.state = kind(value).state
    else:
        generator.seed(value % 2**32)


def drawn(loader: Any, *key: int) -> Iterator:
    """Yield the batches of any loader, with random numbers that `key` alone decides.

    So are those that this process draws for it: the same on all ranks, whatever is drawn elsewhere.
    """
    outside = samples.random_state()
    samples.seed(*key)
    batches = loading.started(loader)
    while True:
        batch = next(batches, None)
        inside = samples.random_state()
        samples.set_random_state(outside)
        if batch is None:
            return
        yield batch  # meanwhile whoever takes it draws on
        outside = samples.random_state()
        samples.set_random_state(inside)


def numbered(loader: Any, batches: Iterator) -> Iterator[list]:
    """Yield batches of any loader with the indices of their samples, negative if not known."""
    in_order = (SequentialSampler, BatchSampler)  # not a class derived from them
    is_known = isinstance(samples.dataset_of(loader), IterableDataset) or all(
        type(each) in in_order for each in samplers_of(loader)
    )
    first = 0
    for batch in batches:
        parts = unpack(batch)
        end = first + len(parts[0])
        numbers = torch.arange(first, end)
        yield [*parts, numbers if is_known else -1 - numbers]
        first = end
