"""How often each class occurs: said before training; the weights of classes in the loss."""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ddpkit.data import samples
from ddpkit.data.samples import MapDataset
from ddpkit.errors import UserError, shorten
from ddpkit.ranks import distributed

MOST_NAMED = 12  # of the classes, in a line
CHUNK = 16  # samples that are counted at once, by THREADS threads
MOST_PIXELS = 2**27  # of the masks; reading PNGs of so many takes 1 to 3 s on 2 CPUs
THREADS = 8  # each with a few copies of a mask in memory


def histogram(mask: np.ndarray) -> np.ndarray:
    return np.array(Image.fromarray(mask).histogram())  # a fifth of np.bincount's time


def count_pixels(
    read: Callable[[int], np.ndarray], total: int, has_to_read_all: bool
) -> tuple[np.ndarray, int]:
    """Count each class number's pixels, int64 (256,), in some of `total` masks; how many masks."""
    sums = np.zeros(256, np.int64)
    order = np.random.default_rng(0).permutation(total)
    with ThreadPoolExecutor(THREADS) as pool:
        for start in range(0, total, CHUNK):
            chunk = order[start : start + CHUNK].tolist()
            for counts in pool.map(lambda index: histogram(read(index)), chunk):
                sums += counts
            # enough to know the shares
            if sums.sum() > MOST_PIXELS and not has_to_read_all:
                return sums, start + len(chunk)
    return sums, total


def say_images(
    classes: Sequence[str], train: Sequence[int], val: Sequence[int], part: str
) -> None:
    """Print how many images each class has, by the samples' labels; warn of classes without any.

    part: "val" or "test", of which `val` is.
    """
    name = "validation" if part == "val" else part
    counts = np.bincount(train, minlength=len(classes))
    others = np.bincount(val, minlength=len(classes))
    texts = [f"{n} ({other})" for n, other in zip(counts, others, strict=True)]
    say_line(f"images for training ({name})", classes, texts)
    warn(classes, counts, "training images", ": they cannot be learned")
    warn(classes, others, f"{name} images", ": their accuracy is not measured")


def say_line(title: str, classes: Sequence[str], texts: Sequence[str]) -> None:
    listed = []
    for name, text in zip(classes[:MOST_NAMED], texts, strict=False):
        mark = ":" if name.isdecimal() else ""  # or "3 20" would be two numbers
        listed.append(f"{name}{mark} {text}")
    if len(classes) > MOST_NAMED:
        listed.append("...")
    distributed.print0(f"classes, {title}: {', '.join(listed)}")


def warn(
    classes: Sequence[str], counts: np.ndarray, samples: str, effect: str = ""
) -> None:
    lacking = [name for name, count in zip(classes, counts, strict=True) if not count]
    if lacking:
        distributed.print0(f"warning: no {samples} of {shorten(lacking)}{effect}")


def labels_of_sample(dataset: MapDataset, index: int) -> dict[int, int]:
    """Return how often each class occurs in a sample, as the dataset or what it wraps says."""
    for each, at in samples.places(dataset, index):  # a Subset has its dataset's
        if hasattr(each, "count_labels"):
            return each.count_labels(at)
    # the innermost one, which the person has written
    raise UserError(
        f"{type(each).__name__} has no count_labels, which --class-weights auto "
        "needs: index -> how often, by class number"
    )


def count_classes(dataset: MapDataset, classes: Sequence[str]) -> np.ndarray:
    """Return (sample, class, count) of all samples, sorted, int64 (pairs, 3); each rank reads some.

    dataset: has a method count_labels(index) -> {class number: how often}, without void, or wraps
        datasets that have it.
    """

    def count_chunk(chunk: Sequence[int]) -> list[tuple[int, int, int]]:
        rows = []
        for index in chunk:
            for label, count in labels_of_sample(dataset, index).items():
                rows.append((index, label, count))
        return rows

    mine = range(distributed.rank(), len(dataset), distributed.world_size())
    # By chunks, because to hand a task to a thread may take longer than the task.
    chunks = [mine[start : start + CHUNK] for start in range(0, len(mine), CHUNK)]
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(itertools.chain.from_iterable(pool.map(count_chunk, chunks)))
    own = np.array(found, np.int64).reshape(-1, 3)
    rows = np.concatenate(distributed.gather_objects(own))
    # the same order on any number of ranks
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    labels = rows[:, 1]
    for sample, label, _ in rows[(labels < 0) | (labels >= len(classes))]:
        raise UserError(
            f"{samples.name(dataset, sample)}: label {label}, not 0 to "
            f"{len(classes) - 1}"
        )
    if not len(rows):
        raise UserError("no training sample has a label")
    return rows


def class_weights(
    given: str | Sequence[float] | None,
    dataset: object,
    classes: Sequence[str],
    several_labels: bool = False,
) -> Tensor | None:
    """Return the weight of each class, float32 (classes,), on the CPU; None if none are `given`.

    given: --class-weights, "auto" or a number for each class. "auto" is total / (classes x count),
    scikit-learn's "balanced", of the classes that the training set `dataset` has; 1 for others.
    several_labels: what images with the class weigh instead, (images - count) / count, for its own
    answer.
    Every rank has to call it: with "auto" each counts a share of the samples.

    Raises a UserError if there are not as many numbers as classes.

        weights = ddpkit.class_weights("auto", train_set, classes)
    """
    if given is None:
        return None
    if not isinstance(given, str):
        if len(given) != len(classes):
            raise UserError(
                f"--class-weights: {len(given)} numbers, but the data has {len(classes)} "
                "classes"
            )
        return torch.tensor(given, dtype=torch.float32)
    rows = count_classes(dataset, classes)
    totals = np.bincount(rows[:, 1], weights=rows[:, 2], minlength=len(classes))
    usual = np.full(len(classes), totals.sum() / np.count_nonzero(totals))
    if several_labels:
        usual = np.maximum((samples.size(dataset) or 0) - totals, 1)
    weights = usual / np.maximum(totals, 1)
    weights[totals == 0] = 1  # which no sample uses
    warn(classes, totals, "training samples", ": their weight is 1")
    say_line("weights in the loss", classes, [f"{weight:.3g}" for weight in weights])
    return torch.tensor(weights, dtype=torch.float32)
