"""The report of check_data.py: what is in a data set, and what training would make of it."""

import contextlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.check.reading import PARTS, Finding
from engine.check.survey import Survey
from engine.data.format import NAME, Format, read_format
from engine.data.loading import TrainSampler
from engine.data.samples import MapDataset
from engine.errors import UserError
from engine.run import machine

MOST_CLASSES = 100  # in the table of classes; beyond it the rarest and the most frequent ones


@dataclass(frozen=True)
class Plan:
    """How training would read the set. dataset: the training set, unless that is refused.

    stored: bytes that prepare_data.py writes for each pixel of an image whose shorter side is
    shrunk to `short_side`.
    """

    dataset: MapDataset | None
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
        (NAME, _data_json(survey, plan.format)),
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
        wanted = f"[{low:.6g}, {high if high > low else low + 1:.6g}]"
        advice = "" if format.channels else f": value_range {wanted} makes the most of them"
        if given:
            effect = "covers" if given[0] <= low and high <= given[1] else "clips"
            advice = f": {format.range_text} {effect} them; {wanted} would fit"
        lines.append(f"{count} images of {kind} hold {low:.6g} to {high:.6g}{advice}")
    return lines or ["8 bits"]


def _channels(survey: Survey, format: Format) -> list[str]:
    mean, deviation = survey.channels()
    if survey.moments is not None:
        return [f"mean       {_row(mean)} (0..1)", f"deviation  {_row(deviation)}"]
    if not survey.histogram.any():
        return []
    given, spread = map(np.array, format.statistics)
    shift, scale = (mean - given) / spread, deviation / spread
    whose = "ImageNet's" if format.mean is None is format.std else "given"
    distance = "close to 0 and 1" if _is_close(survey, format) else "far from 0 and 1"
    return [
        f"mean       {_row(mean)} (red, green, blue; 0..1), {whose} {_row(given)}",
        f"deviation  {_row(deviation)} (of the training images), {whose} {_row(spread)}",
        f"training normalises with {whose}, to mean {_row(shift)} and deviation {_row(scale)}: "
        f"{distance}",
    ]


def _is_close(survey: Survey, format: Format) -> bool:
    """Return whether what training normalises with suits the images, of RGB and 8 bits."""
    mean, deviation = survey.channels()
    given, spread = map(np.array, format.statistics)
    scale = deviation / spread
    return bool(abs((mean - given) / spread).max() < 1 and 0.5 < scale.min() <= scale.max() < 2)


def propose(survey: Survey, format: Format) -> Format:
    """Return what data.json should say, if `format` is what the images were read with.

    value_range: if images need it; what follows from it is then left to another look. mean, std: of
    images with "channels", and of others that ImageNet's do not suit.
    """
    if survey.spans and any(finding.kind == "range" for finding in survey.findings):
        lows, highs = zip(*(span[1:] for span in survey.spans.values()), strict=True)
        low, high = min(lows), max(highs)
        span = low, high if high > low else low + 1
        return replace(format, value_range=span, mean=None, std=None)
    is_deep = survey.moments is not None
    if not is_deep and (not survey.histogram.any() or _is_close(survey, format)):
        return format
    mean, std = ([float(f"{value:.5g}") for value in each] for each in survey.channels())
    return replace(format, mean=tuple(mean), std=tuple(value or 1.0 for value in std))


def _data_json(survey: Survey, format: Format) -> list[str]:
    wanted = propose(survey, format)
    if wanted == read_format(Path(survey.root)):
        return ["as it should be" if wanted.keys() else "not needed"]
    return [f"{json.dumps(wanted.keys())} (--write writes it)"]


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
    batch_size = plan.batch_size or TrainSampler.fitting(range(total), accumulate=plan.ranks)
    each = batch_size * plan.ranks
    steps = total // each
    if not steps:
        text = f"{total} for training are fewer than {batch_size} x {plan.ranks} ranks; start fewer"
        survey.findings.append(Finding("few", survey.root, f"{text}, or add images"))
    pixels = prepared_pixels(survey.sizes[survey.sizes[:, 0] > 0], plan.short_side)
    lines = [
        f"{steps} steps per epoch of {batch_size} x {plan.ranks} ranks = {each} images; each "
        f"epoch leaves out {total - steps * each}"
    ]
    rate, sample = read_some(plan.dataset) if plan.dataset else (0.0, ())
    if rate:
        workers = min(machine.cpus(), 16 * plan.ranks)
        lines.append(
            f"one process reads {rate:.3g} images/s as training does: an epoch takes at least "
            f"{total / rate / workers:.2g} s with {workers}"
        )
    if len(sample) > 1 and isinstance(sample[0], Tensor):
        read, device = (_bytes(batch_size * size) for size in sample_bytes(sample))
        lines.append(
            f"a batch of a rank has {read} as read, {device} on the device, without the network's"
        )
    if survey.has_masks and len(sizes := survey.sizes[survey.usable(1)]):
        size = max(sizes.tolist(), key=math.prod)
        device = _bytes(20 * math.prod(size) * batch_size)  # float32 (3, H, W), int64 (H, W)
        lines.append(f"a batch of the largest validation images has {device} on the device")
    if plan.format.channels:
        return lines
    return [*lines, f"prepare_data.py would write {_bytes(pixels * plan.stored)}"]


def read_some(dataset: MapDataset, most: int = 64, seconds: float = 3) -> tuple[float, Sequence]:
    """Return how many samples of `dataset` this process reads in a second, and one of them.

    Of those that are tried, evenly spaced, some may be broken; without any the rate is 0.
    """
    start, done, sample = time.perf_counter(), 0, ()
    for index in np.linspace(0, len(dataset) - 1, min(most, len(dataset))).round().astype(int):
        with contextlib.suppress(UserError):
            sample, done = dataset[int(index)], done + 1
        if time.perf_counter() > start + seconds:
            break
    parts = sample if isinstance(sample, tuple | list) else ()
    return done / (time.perf_counter() - start), parts


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
