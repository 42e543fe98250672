"""The report of check_data.py: what is in a data set, and what training would make of it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.data.checking import PARTS
from engine.data.loading import MEAN, STD, TrainSampler, batch_size_for
from engine.data.samples import MapDataset
from engine.data.survey import Survey
from engine.run import machine

MOST_CLASSES = 100  # in the table of classes; beyond it the rarest and the most frequent ones


@dataclass(frozen=True)
class Plan:
    """How training would read the set. dataset: some samples of the training set.

    stored: bytes that prepare_data.py writes for each pixel of an image whose shorter side is
    shrunk to `short_side`.
    """

    dataset: MapDataset
    batch_size: int | None
    ranks: int
    short_side: int
    stored: int
    value_range: tuple[float, float] | None


def describe(survey: Survey, classes: Sequence[str], plan: Plan) -> list[str]:
    """Return the lines of the report without the findings."""
    sections = [
        ("images", _images(survey)),
        ("formats", [", ".join(f"{n} {kind}" for kind, n in survey.kinds.most_common())]),
        ("values", _values(survey, plan.value_range)),
        ("channels", _channels(survey)),
        ("classes", _classes(survey, classes)),
        ("training", _training(survey, plan)),
    ]
    return [
        f"{name if first else '':10}{line}"
        for name, lines in sections
        for first, line in zip([True] + [False] * len(lines), lines, strict=False)
    ]


def _images(survey: Survey) -> list[str]:
    lines = []
    for part, name in enumerate(("training", "validation")):
        sizes = survey.sizes[survey.usable(part)]
        total = int((survey.parts == part).sum())
        bad = f", {total - len(sizes)} of them not usable" if total > len(sizes) else ""
        lines.append(f"{total} for {name}{bad}")
        if len(sizes):
            order = np.argsort(sizes.astype(np.int64).prod(1), kind="stable")
            low, mid, high = (sizes[order[at]] for at in (0, len(order) // 2, -1))
            lines[-1] += (
                f"; width x height: smallest {_size(low)}, median {_size(mid)}, largest "
                f"{_size(high)}; {len(np.unique(sizes, axis=0))} different"
            )
    return lines


def _size(size: np.ndarray) -> str:
    return f"{size[1]} x {size[0]}"


def _values(survey: Survey, given: tuple[float, float] | None) -> list[str]:
    lines = []
    for kind, (count, low, high) in survey.spans.items():
        advice = f"--value-range {low:.9g},{max(high, low + 1):.9g} uses all of 0..255 for them"
        if given:
            within = given[0] <= low and high <= given[1]
            advice = (
                f"--value-range {given[0]:g},{given[1]:g} {'covers' if within else 'clips'} them"
            )
        lines.append(f"{count} images of {kind} hold {low:.9g} to {high:.9g}: {advice}")
    return lines or ["8 bits"]


def _channels(survey: Survey) -> list[str]:
    mean, deviation = survey.channels()
    if not survey.histogram.any():
        return []
    pairs = (("mean", mean, MEAN), ("deviation", deviation, STD))
    lines = [
        f"{name:9} {_row(found)} in 0..1, RGB, training images; ImageNet's, with which training "
        f"normalises: {_row(used)}"
        for name, found, used in pairs
    ]
    shift, scale = (mean - MEAN) / STD, deviation / STD
    is_close = abs(shift).max() < 0.5 and 0.5 < scale.min() <= scale.max() < 2
    verdict = "close to" if is_close else "far from"
    return [
        *lines,
        f"normalised: mean {_row(shift)}, deviation {_row(scale)}: {verdict} 0 and 1"
        + ("" if is_close else " (MEAN and STD in engine/data/loading.py)"),
    ]


def _row(values: Sequence[float] | np.ndarray) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def _classes(survey: Survey, classes: Sequence[str]) -> list[str]:
    order = list(range(len(classes)))
    if len(order) > MOST_CLASSES:
        by_count = sorted(order, key=lambda label: -survey.images[0, label])
        order = by_count[:20] + by_count[-20:]
    totals = np.maximum(survey.pixels.sum(1) + survey.void, 1)
    width = max(len(classes[label]) for label in order) if order else 0
    parts = np.unique(survey.parts)
    what = "images and share of the pixels" if survey.has_masks else "images and their share"
    lines = [f"{len(classes)}; {what} in {' and '.join(PARTS[part] for part in parts)}"]
    for label in order:
        cells = [
            f"{survey.images[part, label]:9} {survey.pixels[part, label] / totals[part]:9.3%}"
            for part in parts
        ]
        lines.append("  ".join([f"{classes[label]:{width}}", *cells]))
    if len(order) < len(classes):
        lines.insert(21, f"... and {len(classes) - len(order)} classes between these")
    if survey.has_masks:
        shares = [f"{survey.void[part] / totals[part]:19.3%}" for part in parts]
        lines.append("  ".join([f"{'void':{width}}", *shares]))
    return lines


def _training(survey: Survey, plan: Plan) -> list[str]:
    total = len(survey.usable(0))
    # This process is alone, so ranks and accumulated passes come to the same here.
    batch_size = plan.batch_size or batch_size_for(total, accumulate=plan.ranks)
    each = batch_size * plan.ranks
    steps = TrainSampler(total, each, 0).steps
    pixels = prepared_pixels(survey.sizes[survey.sizes[:, 0] > 0], plan.short_side)
    lines = [
        f"{steps} steps per epoch of {batch_size} x {plan.ranks} ranks = {each} images; each "
        f"epoch leaves out {total - steps * each}" + ("" if steps else "; lower --batch-size")
    ]
    if total:
        rate, sample = read_some(plan.dataset)
        workers = min(machine.cpus(), 16 * plan.ranks)
        read, device = (_bytes(batch_size * size) for size in sample_bytes(sample))
        lines += [
            f"reading {rate:.0f} images/s with one process, so an epoch takes at least "
            f"{total / rate / workers:.2g} s with {workers}",
            f"a batch of a rank has {read} as read and {device} on the device, without the network",
        ]
    return [*lines, f"prepare_data.py would write {_bytes(pixels * plan.stored)}"]


def read_some(dataset: MapDataset, seconds: float = 3) -> tuple[float, tuple]:
    """Return how many samples of `dataset` this process reads in a second, and one of them."""
    start = time.perf_counter()
    for done in range(1, len(dataset) + 1):
        sample = dataset[done - 1]
        passed = time.perf_counter() - start
        if passed > seconds:
            break
    return done / passed, sample


def prepared_pixels(sizes: np.ndarray, side: int) -> int:
    """Return how many pixels prepare_data.py stores of images of `sizes` (N, 2)."""
    scale = np.minimum(side / sizes.min(axis=1), 1) if side else np.ones(len(sizes))
    return int(np.round(sizes * scale[:, None]).astype(np.int64).prod(axis=1).sum())


def sample_bytes(sample: Sequence) -> tuple[int, int]:
    """Return the bytes of image and target as read, and on the device: float32 and int64."""
    image, target = sample[:2]
    labels = target if isinstance(target, Tensor) else torch.zeros(())
    return image.nbytes + labels.nbytes, 4 * image.numel() + 8 * labels.numel()


def _bytes(size: int) -> str:
    for unit, factor in ("GB", 1e9), ("MB", 1e6):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"
