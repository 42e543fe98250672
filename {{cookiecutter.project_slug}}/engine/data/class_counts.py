"""How often each class occurs: said before training; weights in the loss, balanced draws."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from engine.data.samples import MapDataset
from engine.errors import UserError, shorten
from engine.ranks import distributed

ALL_NAMED = 12  # with more classes, only the largest and the smallest are named
CHUNK = 16  # samples that are counted at once, by THREADS threads
MOST_PIXELS = 2**27  # of the masks; reading PNGs of so many takes 1 to 3 s on 2 CPUs
THREADS = 8  # each with a few copies of a mask in memory


def histogram(mask: np.ndarray) -> np.ndarray:
    return np.array(Image.fromarray(mask).histogram())  # np.bincount takes five times as long


def count_pixels(
    read: Callable[[int], np.ndarray], total: int, void: int, most: int
) -> tuple[np.ndarray, int]:
    """Count the pixels of each class number, int64 (256,), in some of `total` masks; how many.

    read: index -> mask, uint8 (H, W). most: masks, in random order; more until two classes are
    found, fewer if they are large; 0: all.
    """
    found, order = np.zeros(256, np.int64), np.random.default_rng(0).permutation(total)
    with ThreadPoolExecutor(THREADS) as pool:
        for start in range(0, total, CHUNK):
            chunk = order[start : start + CHUNK].tolist()
            found += sum(pool.map(lambda index: histogram(read(index)), chunk))
            is_enough = most and (start + CHUNK >= most or found.sum() > MOST_PIXELS)
            if is_enough and np.count_nonzero(np.delete(found, void)) > 1:
                return found, start + len(chunk)
    return found, total


def say_images(classes: Sequence[str], train: Sequence[int], val: Sequence[int]) -> None:
    """Print how many images each class has, by the samples' labels; warn of classes without any."""
    counted = Counter(train), Counter(val)
    counts = [np.array([each[number] for number in range(len(classes))]) for each in counted]
    texts = [f"{n} ({other})" for n, other in zip(*counts, strict=True)]
    say_line("images for training (validation)", classes, counts[0], texts)
    warn(classes, counts[0], "none of the training images")
    warn(classes, counts[1], "none of the validation images")


def say_line(head: str, classes: Sequence[str], sizes: np.ndarray, texts: Sequence[str]) -> None:
    """Print all classes in their order, or the three largest and smallest of many."""

    def listed(numbers: Iterable[int]) -> str:
        names = ((classes[n] + ":" * classes[n].isdecimal(), texts[n]) for n in numbers)
        return ", ".join(map(" ".join, names))

    if len(classes) <= ALL_NAMED:
        return distributed.say(f"classes, {head}: {listed(range(len(classes)))}")
    order = np.argsort(-sizes, kind="stable").tolist()
    ends = f"largest {listed(order[:3])}; smallest {listed(order[-3:])}"
    distributed.say(f"{len(classes)} classes, {head}: {ends}")


def warn(classes: Sequence[str], counts: np.ndarray, where: str) -> None:
    if lacking := [name for name, count in zip(classes, counts, strict=True) if not count]:
        some = f"{len(lacking)} classes, " if len(lacking) > 4 else ""
        verb = "is" if len(lacking) == 1 else "are"
        distributed.say(f"warning: {some}{shorten(lacking)} {verb} in {where}")


_last: list[tuple[object, np.ndarray]] = []  # what count_classes has returned


def count_classes(dataset: MapDataset, classes: Sequence[str]) -> np.ndarray:
    """Return (sample, class, count) of all samples, sorted, int64 (pairs, 3), counted once.

    dataset: has a method count_labels(index) -> {class number: how often}, without void. Every rank
    has to call this; each reads its share. Raises a UserError for labels that are no class.
    """
    if not _last or _last[0][0] is not dataset:
        if not hasattr(dataset, "count_labels"):
            raise UserError(
                f"{type(dataset).__name__} has no count_labels, which --class-weights auto and "
                "--sampler balanced need: add a method that returns {class number: how often} of "
                "a sample's index"
            )
        rows = read(dataset, range(len(dataset)))
        for sample, label in rows[(rows[:, 1] < 0) | (rows[:, 1] >= len(classes))][:1, :2]:
            last = len(classes) - 1
            raise UserError(f"sample {sample}: label {label}, but the classes are 0 to {last}")
        if not len(rows):
            raise UserError("no training sample has a label")
        _last[:] = [(dataset, rows)]
    return _last[0][1]


def read(dataset: MapDataset, indices: Sequence[int]) -> np.ndarray:
    """Return the rows of the samples `indices`, of which each rank reads a share."""
    mine = indices[distributed.rank() :: distributed.world_size()]
    rows = np.concatenate(distributed.gather_objects(_read(dataset, mine)))
    return rows[np.lexsort((rows[:, 1], rows[:, 0]))]


def _read(dataset: MapDataset, indices: Sequence[int]) -> np.ndarray:
    def count(start: int) -> list[tuple]:
        some = indices[start : start + CHUNK]
        return [(n, *pair) for n in some for pair in dataset.count_labels(n).items()]

    with ThreadPoolExecutor(THREADS) as pool:
        found = [row for rows in pool.map(count, range(0, len(indices), CHUNK)) for row in rows]
    return np.array(found, np.int64).reshape(-1, 3)


def class_weights(
    given: str | Sequence[float] | None, dataset: object, classes: Sequence[str]
) -> Tensor | None:
    """Return the weight of each class, float32 (classes,), on the CPU; None if none are `given`.

    given: --class-weights, "auto" or a number for each class. "auto" is total / (classes x count),
    scikit-learn's "balanced", of the classes that the training set `dataset` has; 1 for others.
    Every rank has to call it: with "auto" each counts a share of the samples.

    Raises a UserError if there are not as many numbers as classes.

        weights = engine.class_weights("auto", train_set, classes)
    """
    if given is None:
        return None
    if not isinstance(given, str):
        if len(given) != len(classes):
            found = f"{len(given)} numbers, but the data has {len(classes)} classes"
            raise UserError(f"--class-weights: {found}")
        return torch.tensor(given, dtype=torch.float32)
    rows = count_classes(dataset, classes)
    totals = np.bincount(rows[:, 1], rows[:, 2], len(classes))
    weights = totals.sum() / np.count_nonzero(totals) / np.maximum(totals, 1)
    weights[totals == 0] = 1
    warn(classes, totals, "none of the training samples: weight 1")
    say_line("weights in the loss", classes, weights, [f"{weight:.3g}" for weight in weights])
    return torch.tensor(weights, dtype=torch.float32)


def say_balanced(rows: np.ndarray, total: int, classes: Sequence[str]) -> None:
    """Print how often --sampler balanced draws in an epoch of `total` images."""
    images = np.bincount(rows[:, 1], minlength=len(classes))
    each = total // np.count_nonzero(images)
    rare = int(np.where(images, images, total + 1).argmin())
    distributed.say(
        f"--sampler balanced: each class {each} times in an epoch, so that each image of "
        f"{classes[rare]}, which has the fewest, comes {each / images[rare]:.3g} time(s)"
    )
    warn(classes, images, "none of the training images: none is drawn for it")


def draw(rows: np.ndarray, total: int, generator: torch.Generator) -> Tensor:
    """Return `total` draws in random order, int64: image + repeat x total.

    Each class that occurs comes equally often, to one, and within a class each of its images. An
    image of several classes comes for each of them. `repeat` numbers the draws of an image from 0.
    """
    samples, labels, _ = torch.from_numpy(rows.T.copy())
    order = torch.randperm(len(labels), generator=generator)
    order = order[labels[order].argsort(stable=True)]  # by class, within a class random
    sizes = torch.bincount(labels)
    present = sizes.nonzero()[:, 0]
    quota = torch.zeros_like(sizes)
    quota[present] = total // len(present)
    luck = torch.randperm(len(present), generator=generator)[: total % len(present)]
    quota[present[luck]] += 1
    labels = labels[order]
    place = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes)[labels]  # within its class
    size, quota = sizes[labels], quota[labels]
    times = torch.zeros(total, dtype=torch.int64)
    times.index_add_(0, samples[order], quota // size + (place < quota % size))
    images = torch.arange(total).repeat_interleave(times)
    repeat = torch.arange(total) - (times.cumsum(0) - times).repeat_interleave(times)
    return (images + repeat * total)[torch.randperm(total, generator=generator)]
