"""Classes of unequal size: weights for the loss, draws for the sampler."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.data import shares
from engine.data.counts import Counts
from engine.data.listing import composed
from engine.errors import UserError, shorten
from engine.ranks import distributed

LINE = re.compile(r"(.*[^\s=,;:])(?:\s*[=,;:]\s*|\s+)(\S+)")  # NAME WEIGHT; also = or a comma


def class_weights(
    given: str | Sequence[float] | None, counts: Counts | None, classes: Sequence[str]
) -> tuple[float, ...] | None:
    """Return the weight of each class that --class-weights says: auto, a file, or numbers.

    auto: total / (classes x count), scikit-learn's "balanced", of the classes that `counts` has; 1
    for others. Numbers, such as those of a checkpoint, and None are returned as they are.
    """
    if given is None:
        return None
    if not isinstance(given, str):
        if len(given) != len(classes):
            raise UserError(
                f"--class-weights: {len(given)} numbers, of the flag or of the checkpoint, but the "
                f"data has {len(classes)} classes"
            )
        return tuple(given)
    if given == "auto":
        assert counts, "of count_classes"
        totals = counts.of_classes()
        present = totals > 0
        mean = totals.sum() / max(present.sum(), 1)
        weights = np.where(present, mean / np.maximum(totals, 1), 1.0)
        shares.warn(classes, totals, "none of the training samples: weight 1")
    else:
        weights = np.array(distributed.from_rank_zero(read_weights, Path(given), classes))
    texts = [f"{weight:.3g}" for weight in weights]
    tail = counts.origin if counts and given == "auto" else f"; from {given}"
    shares.say_line("weights in the loss", classes, weights, texts, tail)
    return tuple(weights.tolist())


def read_weights(path: Path, classes: Sequence[str]) -> list[float]:
    """Return the weight of each class, of a file with lines NAME WEIGHT; = or a comma may separate.

    Raises a UserError unless each class has one, a positive number.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise UserError(f"--class-weights {path}: not UTF-8; save it as UTF-8") from None
    except OSError as error:
        raise UserError(
            f"--class-weights {path}: neither numbers nor a file ({error.strerror}); use auto, "
            "numbers A,B,..., or a file with lines NAME WEIGHT"
        ) from None
    number_of = {composed(name): number for number, name in enumerate(classes)}
    found: dict[int, float] = {}
    for row, line in enumerate(lines, 1):
        if not (line := re.sub(r"(^|\s)#.*", "", line).strip()):
            continue
        match = LINE.fullmatch(line)
        name, text = match.groups() if match else (line, "")
        number = number_of.get(composed(name))
        if not match:
            reason = f"{line}: expected NAME WEIGHT"
        elif number is None:
            reason = f"{name} is no class; the classes are {shorten(classes)}"
        elif number in found:
            reason = f"{name} comes twice; name each class once"
        elif not _is_weight(text):
            reason = f"{text} is no positive number"
        else:
            found[number] = float(text)
            continue
        raise UserError(f"{path}, line {row}: {reason}")
    if missing := [name for number, name in enumerate(classes) if number not in found]:
        raise UserError(f"{path}: no weight for {shorten(missing)}; each class needs one")
    return [found[number] for number in range(len(classes))]


def _is_weight(text: str) -> bool:
    try:
        return 0 < float(np.float32(text)) < math.inf  # as the loss takes it
    except ValueError:
        return False


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
