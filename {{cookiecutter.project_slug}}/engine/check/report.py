"""The report of check_data.py: what is in a data set, and what training would make of it."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.check.reading import PARTS, Finding
from engine.check.survey import Survey
from engine.data.images import Format
from engine.data.loading import TrainSampler, batch_size_for
from engine.data.samples import MapDataset
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
    format: Format


def describe(survey: Survey, classes: Sequence[str], plan: Plan) -> list[str]:
    """Return the lines of the report without the findings."""
    sections = [
        ("images", _images(survey)),
        ("formats", [", ".join(f"{n} {kind}" for kind, n in survey.kinds.most_common())]),
        ("values", _values(survey, plan.format)),
        ("channels", _channels(survey, plan.format)),
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
        line = f"{total} for {name}"
        if unusable := total - len(sizes):
            line += f", {unusable} of them with errors"
        if len(sizes):
            order = np.argsort(sizes.astype(np.int64).prod(1), kind="stable")
            low, mid, high = (_size(sizes[order[at]]) for at in (0, len(order) // 2, -1))
            count = len(np.unique(sizes, axis=0))
            several = f"; median {mid}, {count} different" if count > 1 else ""
            to = f" to {high}" if count > 1 else ""
            line += f"; {low}{to} pixels (width x height){several}"
        lines.append(line)
    rate = len(survey.samples) / survey.seconds
    return [*lines, f"read whole in {survey.seconds:.3g} s, {rate:.3g} images/s"]


def _size(size: np.ndarray) -> str:
    return f"{size[1]} x {size[0]}"


def _values(survey: Survey, format: Format) -> list[str]:
    lines, given = [], format.value_range
    for kind, (count, low, high) in survey.spans.items():
        wanted = f"{low:.6g},{high if high > low else low + 1:.6g}"
        advice = (
            ""
            if format.channels
            else f": --value-range{'=' if low < 0 else ' '}{wanted} makes the most of them"
        )
        if given:
            effect = "covers" if given[0] <= low and high <= given[1] else "clips"
            advice = f": --value-range {given[0]:g},{given[1]:g} {effect} them; {wanted} would fit"
        lines.append(f"{count} images of {kind} hold {low:.6g} to {high:.6g}{advice}")
    return lines or ["8 bits"]


def _channels(survey: Survey, format: Format) -> list[str]:
    mean, deviation = survey.channels()
    if survey.moments is not None:
        lists = (",".join(f"{value:.5g}" for value in each) for each in (mean, deviation))
        flags = "--channels {} --mean={} --std={}".format(len(mean), *lists)
        scale = ""
        if format.value_range:
            scale = " --value-range={:g},{:g}".format(*format.value_range)
        return [f"train with {flags}{scale}"]
    if not survey.histogram.any():
        return []
    given, spread = map(np.array, format.statistics)
    shift, scale = (mean - given) / spread, deviation / spread
    whose = "ImageNet's" if format.mean is None is format.std else "given"
    is_close = abs(shift).max() < 1 and 0.5 < scale.min() <= scale.max() < 2
    return [
        f"mean       {_row(mean)} (red, green, blue; 0..1), {whose} {_row(given)}",
        f"deviation  {_row(deviation)} (of the training images), {whose} {_row(spread)}",
        f"training normalises with {whose}, to mean {_row(shift)} and deviation {_row(scale)}: "
        + (
            "close to 0 and 1" if is_close else "far from 0 and 1 (see --mean and --std of main.py)"
        ),
    ]


def _row(values: Sequence[float] | np.ndarray) -> str:
    return " ".join(f"{value:.4f}" for value in values)


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
            f"{survey.images[part, label]:9} {_share(survey.pixels[part, label], totals[part])}"
            for part in parts
        ]
        lines.append("  ".join([f"{classes[label]:{width}}", *cells]))
    if len(order) < len(classes):
        lines.insert(21, f"... and {len(classes) - len(order)} classes between these")
    if survey.has_masks:
        cells = [f"{'':9} {_share(survey.void[part], totals[part])}" for part in parts]
        lines.append("  ".join([f"{'void':{width}}", *cells]))
    return lines


def _share(count: int, total: int) -> str:
    return f"{100 * count / total:8.3g} %"


def _training(survey: Survey, plan: Plan) -> list[str]:
    total = len(survey.usable(0))
    if not total:
        return ["no training image can be used"]
    # This process is alone, so ranks and accumulated passes come to the same here.
    batch_size = plan.batch_size or batch_size_for(total, accumulate=plan.ranks)
    each = batch_size * plan.ranks
    steps = TrainSampler(total, each, 0).steps
    if not steps:
        text = f"{total} for training are fewer than {batch_size} x {plan.ranks} ranks; start fewer"
        survey.findings.append(Finding("few", survey.root, f"{text}, or add images"))
    pixels = prepared_pixels(survey.sizes[survey.sizes[:, 0] > 0], plan.short_side)
    lines = [
        f"{steps} steps per epoch of {batch_size} x {plan.ranks} ranks = {each} images; each "
        f"epoch leaves out {total - steps * each}"
    ]
    rate, sample = read_some(plan.dataset)
    workers = min(machine.cpus(), 16 * plan.ranks)
    read, device = (_bytes(batch_size * size) for size in sample_bytes(sample))
    lines += [
        f"one process reads {rate:.3g} images/s as training does: an epoch takes at least "
        f"{total / rate / workers:.2g} s with {workers}",
        f"a batch of a rank has {read} as read, {device} on the device, without the network's",
    ]
    if survey.has_masks and len(sizes := survey.sizes[survey.usable(1)]):
        size = max(sizes.tolist(), key=math.prod)
        device = _bytes(20 * math.prod(size) * batch_size)  # float32 (3, H, W), int64 (H, W)
        lines.append(f"a batch of the largest validation images has {device} on the device")
    if plan.format.channels:
        return lines
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
