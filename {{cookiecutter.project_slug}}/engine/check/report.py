"""What check_data.py does with what it has read: lines, check.png, check.csv and exit status."""

import contextlib
import itertools
import json
import math
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch

from engine import files
from engine.check.survey import IMBALANCE, KINDS, PARTS, WARNINGS, Survey
from engine.data import bit_depth, prepared
from engine.data.format import NAME, Format, read_format, write_format
from engine.data.images import open_image
from engine.errors import UserError
from engine.ranks import distributed, environment
from engine.run import machine, pictures
from engine.run.flags import Parser, at_least

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMED = 10  # findings of a kind that are printed, but all broken files; check.csv has all
MOST_CLASSES = 100  # that are listed and drawn: the most frequent ones
SAMPLES = 24  # that are drawn, if there are as many, and at least one of each class
PIXELS = 300  # longer side of a sample
CELL, CHARTS, BAR = 2.2, 6.5, 0.17  # inches: a sample, the charts' width, height of a class


def start(argv: Sequence[str] | None, description: str | None) -> Namespace:
    """Return the flags, and make this process ready to read."""
    parser = Parser(description=description)
    add = parser.add_argument
    add("data", metavar="DIR", type=Path, help="as --data of main.py")
    add(
        "--output", metavar="DIR2", type=Path, default="runs/check", help="for check.png, check.csv"
    )
    add("--workers", type=at_least(0), default=machine.cpus(), help="processes that read")
    add("--write", action="store_true", help="write what the report proposes for DIR/data.json")
    given = parser.parse_args(argv)
    os.environ[environment.GPUS] = ""  # leave GPUs to those who need one
    torch.set_num_threads(1)  # as in a loader worker
    distributed.setup(alone=True)
    if prepared.is_store(given.data):
        found = prepared.read(given.data)
        source = found[0]["source"] if found else "the folder that it was made from"
        raise UserError(f"{given.data}: prepared data, which holds no files; check {source}")
    return given


def find_format(data: Path, path: str) -> Format:
    """Return what data.json says; without "channels", with those that `path` may need."""
    format = read_format(data)
    if format.channels:
        return format
    try:
        open_image(path, format)
    except UserError:  # it cannot be read as RGB; perhaps with as many channels as it has
        with contextlib.suppress(Exception):  # of many types for malformed files
            count = bit_depth.count_channels(path)
            if count not in (None, 1, 3) or path.endswith(".npy"):
                return replace(format, channels=count, mean=None, std=None)
    return format


def finish(survey: Survey, output: Path, has_to_write: bool) -> NoReturn:
    """Print the report and write the files; exit with 1 if there are errors."""
    survey.find_rare()
    format, wanted = survey.format, propose(survey)
    for line in (*describe(survey, wanted), *list_findings(survey)):
        distributed.say(line)
    errors = sum(finding.kind not in WARNINGS for finding in survey.findings)
    distributed.say(f"{errors} errors, {len(survey.findings) - errors} warnings")
    (output / "check.csv").unlink(missing_ok=True)
    columns = ("level", "what", "file", "other file", "text")
    with files.table(output / "check.csv", columns) as write:
        for each in survey.findings:
            level = "warning" if each.kind in WARNINGS else "error"
            write((level, each.kind, each.file, each.other, each.text))
    draw_page(output / "check.png", survey)
    written = "check.png, check.csv" if survey.findings else "check.png"
    distributed.say(f"written to {os.path.relpath(output)}: {written}")
    if has_to_write and wanted != read_format(survey.root):
        write_format(survey.root, wanted)
        more = "" if wanted.value_range == format.value_range else "; run this again"
        distributed.say(f"written: {survey.root / NAME}: {json.dumps(wanted.keys())}{more}")
    distributed.teardown()
    sys.exit(1 if errors else 0)


def list_findings(survey: Survey) -> Iterator[str]:
    """Yield lines with the first findings of each kind, with paths below the data set's folder."""
    for kind, title in sorted(KINDS.items(), key=lambda item: item[0] not in WARNINGS):
        some = sorted((f for f in survey.findings if f.kind == kind), key=lambda f: f.file)
        if some:
            yield f"{'warning' if kind in WARNINGS else 'error'}: {title}: {len(some)}"
        most = len(some) if kind == "broken" else NAMED
        for finding in some[:most]:
            paths = filter(None, (finding.file, finding.other))
            names = ", ".join(os.path.relpath(path, survey.root) for path in paths)
            yield f"  {names}{': ' if finding.text else ''}{finding.text}"
        if len(some) > most:
            yield f"  and {len(some) - most} more in check.csv"


def describe(survey: Survey, wanted: Format) -> Iterator[str]:
    """Yield the lines of the report without the findings."""
    for part, name in enumerate(("training", "validation")):
        sizes, total = survey.sizes[survey.usable(part)], int((survey.parts == part).sum())
        line = f"images    {total} for {name}"
        if unusable := total - len(sizes):
            line += f", {unusable} of them with errors"
        if len(sizes):
            order = np.argsort(sizes.prod(1, np.int64))
            ends = (f"{sizes[at][1]} x {sizes[at][0]}" for at in (order[0], order[-1]))
            line += f"; {' to '.join(dict.fromkeys(ends))} pixels (width x height)"
        yield line
    yield "formats   " + ", ".join(f"{n} {kind}" for kind, n in survey.kinds.most_common())
    for kind, (count, low, high) in survey.spans.items():
        effect = f" ({survey.format.range_text})" if survey.format.value_range else ""
        yield f"values    {count} images of {kind} hold {low:.6g} to {high:.6g}{effect}"
    if survey.moments is not None:
        for name, values in zip(("mean", "deviation"), survey.channels(), strict=True):
            numbers = " ".join(f"{value:.4f}" for value in values)
            yield f"{name:11}{numbers} (of the training images' channels, 0..1)"
    is_right = wanted == read_format(survey.root)
    keys = "as it should be" if wanted.keys() else "not needed"
    yield f"{NAME} {keys if is_right else f'{json.dumps(wanted.keys())} (--write writes it)'}"
    yield from list_classes(survey)


def propose(survey: Survey) -> Format:
    """Return what data.json should say, of what the images were read with.

    value_range: if images need it; what follows from it is then left to another look. mean, std: of
    images with "channels", and of others that ImageNet's do not suit.
    """
    format = survey.format
    if survey.spans and any(finding.kind == "range" for finding in survey.findings):
        lows, highs = zip(*(span[1:] for span in survey.spans.values()), strict=True)
        low, high = min(lows), max(highs)
        span = low, high if high > low else low + 1
        return replace(format, value_range=span, mean=None, std=None)
    if survey.moments is None:
        return format
    mean, deviation = survey.channels()
    if not format.channels:
        given, spread = map(np.array, format.statistics)
        scale = deviation / spread
        if abs((mean - given) / spread).max() < 1 and 0.5 < scale.min() <= scale.max() < 2:
            return format
    means, deviations = ([float(f"{x:.5g}") for x in each] for each in (mean, deviation))
    return replace(format, mean=tuple(means), std=tuple(value or 1.0 for value in deviations))


def frequent(survey: Survey) -> list[int]:
    """Return the numbers of the most frequent classes, in order."""
    counts = survey.images[:, : len(survey.classes)].sum(0)
    return sorted(np.argsort(-counts, kind="stable")[:MOST_CLASSES].tolist())


def list_classes(survey: Survey) -> Iterator[str]:
    """Yield a line for each class with its images and its share in each part."""
    totals = np.maximum(survey.pixels.sum(1) + survey.void, 1)
    shown, parts = frequent(survey), np.unique(survey.parts)
    width = max((len(survey.classes[label]) for label in shown), default=4)
    what = "images and share of the pixels" if survey.has_masks else "images and their share"
    count = len(survey.classes)
    most = f"; the {MOST_CLASSES} most frequent" if count > MOST_CLASSES else ""
    yield f"classes   {count}; {what} in {' and '.join(PARTS[part] for part in parts)}{most}"
    rows = [(survey.classes[i], survey.images[:, i], survey.pixels[:, i]) for i in shown]
    rows += [("void", np.array(["", ""]), survey.void)] * survey.has_masks
    for name, images, pixels in rows:
        cells = [f"{images[n]:9} {100 * pixels[n] / totals[n]:8.3g} %" for n in parts]
        yield "          " + "  ".join([f"{name:{width}}", *cells])


def draw_page(path: Path, survey: Survey) -> None:
    """Draw samples of every class with their files, and charts of classes and image sizes."""
    shown = frequent(survey)
    turns = itertools.zip_longest(*(survey.kept.get(label, []) for label in shown))
    unique = dict.fromkeys(index for turn in turns for index in turn if index is not None)
    picks = list(unique)[: max(SAMPLES, len(shown))]
    columns = max(4, math.ceil(math.sqrt(len(picks))))
    rows = max(1, math.ceil(len(picks) / columns))
    width, height = columns * CELL, max(rows * CELL * 1.2, len(shown) * BAR + 5)
    with pictures.drawing(path) as figure:
        figure.set_size_inches(width + CHARTS, height)
        figure.set_layout_engine("constrained")
        places = figure.add_gridspec(1, 2, width_ratios=(width, CHARTS))
        grid, charts = (figure.add_subfigure(places[n]) for n in range(2))
        cells = grid.subplots(rows, columns, squeeze=False).ravel()
        for axes in cells:
            axes.axis("off")
        for axes, index in zip(cells, picks, strict=False):
            draw_sample(axes, survey, survey.samples[index])
        above, below = charts.subplots(2, 1, height_ratios=(height - 4, 4))
        draw_classes(above, survey, shown)
        sizes, counts = np.unique(survey.sizes[survey.sizes[:, 0] > 0], axis=0, return_counts=True)
        area = 20 + 280 * counts / counts.max(initial=1)  # the larger the more images have it
        below.scatter(sizes[:, 1], sizes[:, 0], s=area, alpha=0.5)
        below.set(title="image sizes", xlabel="width in pixels", ylabel="height")
        below.grid(alpha=0.3)


def draw_sample(axes: "Axes", survey: Survey, sample: tuple) -> None:
    """Draw an image, tinted by its mask if it has one, below its class and its file."""
    path, label, part = sample
    image, mask = survey.open(sample)
    scale = min(1.0, PIXELS / max(image.height, image.width))
    size = max(1, round(image.height * scale)), max(1, round(image.width * scale))
    pixels = bit_depth.visible(image.read(size=size)).permute(1, 2, 0).numpy()
    name = "" if mask else f"{pictures.shorten(survey.classes[label])}\n"
    if mask:
        pixels = pictures.overlay(pixels, mask.read(size=size).numpy(), survey.classes)
    axes.imshow(pixels)
    axes.set_title(f"{name}{PARTS[part]}: {pictures.shorten(Path(path).name)}", fontsize=8)


def draw_classes(axes: "Axes", survey: Survey, shown: Sequence[int]) -> None:
    """Draw the share of each class, of the pixels or the images, in its colour if it has one."""
    counts, places = survey.pixels[:, shown], np.arange(len(shown))
    shares = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
    colors = pictures.colors_of(survey.classes)[list(shown)] / 255
    for part in np.unique(survey.parts):
        axes.barh(
            places + 0.4 * part - 0.2,
            shares[part],
            height=0.38,
            color=colors if survey.has_masks else f"C{part}",
            edgecolor="black",
            alpha=1 - 0.5 * part,
            label=PARTS[part],
        )
    used = shares[shares > 0]
    if len(used) and used.max() > IMBALANCE * used.min():
        axes.set_xscale("log")
    axes.set_yticks(places, [pictures.shorten(survey.classes[label]) for label in shown])
    axes.tick_params(axis="y", labelsize=7 if len(shown) > 40 else 9)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    what = "pixels" if survey.has_masks else "images"
    axes.set(title="classes (val is paler)", xlabel=f"% of the {what} of a part")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
