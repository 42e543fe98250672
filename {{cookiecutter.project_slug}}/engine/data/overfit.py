"""--overfit N: train on N images, always in the same crops, and validate on those very crops.

If labels, network, loss and rate are right, it learns them by heart.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from engine.data import balance, loading, seeding
from engine.data.balance import Counted
from engine.data.samples import MapDataset
from engine.errors import UserError
from engine.ranks import distributed

MOST_READ = 256  # samples among which the N are chosen, if their labels have to be read
MIN_STEPS = 50  # of an epoch
LEARNT = 0.95  # the least score, of a metric whose best is 1


class Few:
    """The samples `indices` of `dataset`, each with the same random numbers every time."""

    def __init__(self, dataset: Counted, indices: Sequence[int], seed: int) -> None:
        self.dataset = dataset
        self.indices = indices
        self.seed = seed
        if samples := getattr(dataset, "samples", None):
            self.samples = [samples[index] for index in indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int, /) -> tuple:
        seeding.seed(self.seed, 0, self.indices[index])
        return self.dataset[self.indices[index]]

    def count_labels(self, index: int, /) -> Mapping[int, int]:
        return self.dataset.count_labels(self.indices[index])

    def label_sources(self) -> Sequence[str]:
        sources = self.dataset.label_sources()
        return [*sources, str(self.indices)] if sources else []


def batch_size(given: int | None, count: int, accumulate: int) -> int:
    """Return images per rank and pass: `given`, but no more than it takes for `count` in a step."""
    enough = math.ceil(count / (distributed.world_size() * accumulate))
    return min(given or loading.BATCH_SIZE, max(enough, 2))


def choose(dataset: MapDataset, count: int, seed: int, batch: int) -> tuple[Few, Few]:
    """Return `count` samples for training, repeated to MIN_STEPS steps, and for validation.

    They are chosen by `seed`, from all classes in turn. batch: images of a rank in a step.
    """
    dataset, total = balance.as_counted(dataset), len(dataset)
    if count > total:
        raise UserError(f"--overfit {count}: there are {total} training images; use fewer")
    order = np.random.default_rng(seed).permutation(total)
    from_files = bool(dataset.label_sources())
    if from_files:
        order = order[: max(count, MOST_READ)]
    indices = _of_all_classes(order, balance.read(dataset, order.tolist(), from_files), count)
    distributed.say(
        f"--overfit {count}: training and validation on the same crops of {count} of {total} "
        "training images"
    )
    times = math.ceil(MIN_STEPS * batch * distributed.world_size() / count)
    return Few(dataset, indices * times, seed), Few(dataset, indices, seed)


def _of_all_classes(order: np.ndarray, rows: np.ndarray, count: int) -> list[int]:
    """Return `count` samples of `order`, the first of each class in turn, the rarest class first.

    rows: int64 (pairs, 3), (sample, class, count).
    """
    place = np.argsort(order)[np.searchsorted(np.sort(order), rows[:, 0])]
    rows = rows[np.lexsort((place, rows[:, 1]))]
    starts = np.unique(rows[:, 1], return_index=True)[1]
    queues = sorted(np.split(rows[:, 0], starts[1:]), key=len)
    chosen: dict[int, None] = {}
    for turn in itertools.zip_longest(*(queue[:count].tolist() for queue in queues)):
        chosen |= dict.fromkeys(index for index in turn if index is not None)
    chosen |= dict.fromkeys(order.tolist())  # those that have no class at all come last
    return list(chosen)[:count]


def say_learnt(count: int, name: str, history: Sequence[Mapping[str, float | str]]) -> None:
    """Print whether the images are learnt by heart, by the metric `name` after the last epoch."""
    score = float(history[-1][name])
    then, now = (float(history[n]["train_loss"]) for n in (0, -1))
    figures = (
        f"{name} {score:.4f}, training loss {then:.3g} in the first epoch, {now:.3g} in the last"
    )
    if score >= LEARNT:
        distributed.say(f"--overfit {count}: learnt by heart ({figures})")
    else:
        distributed.say(
            f"--overfit {count}: not learnt ({figures}); try more --epochs and another --lr, "
            "without augmentation of batches; then look for a mistake in labels, network or loss"
        )
