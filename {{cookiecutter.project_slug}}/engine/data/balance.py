"""Classes of unequal size: weights for the loss, draws for the sampler."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.data import shares
from engine.data.counts import Counts, count_classes
from engine.errors import UserError
from engine.ranks import distributed


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
            raise UserError(
                f"--class-weights: {len(given)} numbers, but the data has {len(classes)} classes"
            )
        return torch.tensor(given, dtype=torch.float32)
    counts = count_classes(dataset, classes)
    totals = counts.of_classes()
    present = totals > 0
    mean = totals.sum() / max(present.sum(), 1)
    weights = np.where(present, mean / np.maximum(totals, 1), 1.0)
    shares.warn(classes, totals, "none of the training samples: weight 1")
    texts = [f"{weight:.3g}" for weight in weights]
    shares.say_line("weights in the loss", classes, weights, texts, counts.origin)
    return torch.tensor(weights, dtype=torch.float32)


def say_balanced(counts: Counts, total: int) -> None:
    """Print how often --sampler balanced draws in an epoch of `total` images."""
    images = np.bincount(counts.labels, minlength=len(counts.classes))
    each = total // max(int(np.count_nonzero(images)), 1)
    rare = int(np.where(images, images, total + 1).argmin())
    distributed.say(
        f"--sampler balanced: each class {each} times in an epoch, so that each image of "
        f"{counts.classes[rare]}, which has the fewest, comes {each / images[rare]:.3g} time(s)"
        f"{counts.origin}"
    )
    shares.warn(counts.classes, images, "none of the training images: none is drawn for it")


def draw(counts: Counts, total: int, generator: torch.Generator) -> Tensor:
    """Return `total` draws in random order, int64: image + repeat x total.

    Each class that occurs comes equally often, to one, and within a class each of its images. An
    image of several classes comes for each of them. `repeat` numbers the draws of an image from 0.
    """
    samples, labels = torch.from_numpy(counts.samples), torch.from_numpy(counts.labels)
    order = torch.randperm(len(labels), generator=generator)
    order = order[labels[order].argsort(stable=True)]  # by class, within a class random
    sizes = torch.bincount(labels, minlength=len(counts.classes))
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
