"""check.png: samples of every class with their files, and charts of classes and image sizes."""

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from engine import files
from engine.check.reading import PARTS
from engine.check.survey import IMBALANCE, Survey
from engine.data import stacks
from engine.data.images import LazyImage
from engine.run.palette import colors_of

SAMPLES = 24  # at least, if there are as many
MOST_CLASSES = 100  # that are drawn; the most frequent ones
CELL, TITLE, CHARTS = 2.2, 0.36, 6.5  # inches: side of a sample, lines above it, width of charts
BAR = 0.17  # inches; height of a class in the chart

PIXELS = 300  # longer side of a sample

DrawSample = Callable[[Axes, tuple], None]
Overlay = Callable[[np.ndarray, np.ndarray], np.ndarray]


def draw_page(path: Path, survey: Survey, classes: Sequence[str], draw: DrawSample) -> None:
    """Draw the page. draw: draws one sample of dataset.py on matplotlib axes."""
    frequent = np.argsort(-survey.images[:, : len(classes)].sum(0), kind="stable")[:MOST_CLASSES]
    shown = sorted(frequent.tolist())
    picks = pick(survey, shown)
    columns = max(4, math.ceil(math.sqrt(len(picks))))
    rows = max(1, math.ceil(len(picks) / columns))
    width = columns * CELL + CHARTS
    height = max(rows * (CELL + TITLE), len(shown) * BAR + 5) + 0.5
    figure = Figure(figsize=(width, height))
    # From the top down, with rows of the same height however long the chart of classes is.
    spans = {"top": 1 - 0.5 / height, "bottom": 1 - (0.5 + rows * (CELL + TITLE)) / height}
    gaps = {"wspace": 0.06, "hspace": TITLE / CELL}
    edge = columns * CELL / width
    grid = figure.add_gridspec(rows, columns, left=0.01, right=edge, **spans, **gaps)
    for place, index in enumerate(picks):
        axes = figure.add_subplot(grid[place // columns, place % columns])
        axes.axis("off")
        draw(axes, survey.samples[index])
        if index in survey.turned:
            axes.title.set_color("red")
    charts = figure.add_gridspec(
        2,
        1,
        left=edge + 1.8 / width,
        right=0.98,
        bottom=0.6 / height,
        top=1 - 0.4 / height,
        height_ratios=(height - 5, 3.5),
        hspace=2 / height,
    )
    draw_classes(figure.add_subplot(charts[0]), survey, classes, shown)
    draw_sizes(figure.add_subplot(charts[1]), survey)
    with files.writing(path, parents=True) as tmp_path, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # signs that the font lacks
        figure.savefig(tmp_path, format="png", dpi=100)


def pick(survey: Survey, labels: Sequence[int]) -> list[int]:
    """Return samples to draw: those with a doubtful rotation, then in turn one of each class."""
    picks = dict.fromkeys(survey.turned[:8])
    most = max(SAMPLES, len(labels)) + len(picks)
    for _ in range(max(map(len, survey.kept.values()), default=0)):
        for label in labels:
            fresh = [index for index in survey.kept.get(label, []) if index not in picks]
            if fresh and len(picks) < most:
                picks[fresh[0]] = None
    return list(picks)


def draw_classes(axes: Axes, survey: Survey, classes: Sequence[str], shown: Sequence[int]) -> None:
    """Draw the share of each class, of the pixels or the images, in its colour if it has one."""
    has_masks = survey.has_masks
    counts = (survey.pixels if has_masks else survey.images)[:, shown]
    shares = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
    colors = colors_of(classes)[list(shown)] / 255 if has_masks else None
    places = np.arange(len(shown))
    for part in np.unique(survey.parts):
        axes.barh(
            places + 0.4 * part - 0.2,
            shares[part],
            height=0.38,
            color=colors if has_masks else f"C{part}",
            edgecolor="black" if has_masks else "none",
            linewidth=0.5,
            alpha=0.5 if has_masks and part else 1,
            label=PARTS[part],
        )
    used = shares[shares > 0]
    if len(used) and used.max() > IMBALANCE * used.min():
        axes.set_xscale("log")
    axes.set_yticks(places, [plain(classes[label], 20) for label in shown], parse_math=False)
    axes.tick_params(axis="y", labelsize=7 if len(shown) > 40 else 9)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlabel(f"% of the {'pixels' if has_masks else 'images'} of a part")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    axes.set_title("classes" + (" (val is paler)" if has_masks else ""), fontsize=10)


def draw_sizes(axes: Axes, survey: Survey) -> None:
    """Draw a circle for each size of image, the larger the more images have it."""
    sizes, counts = np.unique(survey.sizes[survey.sizes[:, 0] > 0], axis=0, return_counts=True)
    if not len(sizes):
        axes.text(0.5, 0.5, "no image can be used", ha="center", transform=axes.transAxes)
        axes.set(xticks=(), yticks=())
    else:
        axes.scatter(sizes[:, 1], sizes[:, 0], s=20 + 280 * counts / counts.max(), alpha=0.5)
        if sizes.max() > 10 * sizes.min():
            axes.set(xscale="log", yscale="log")
            for axis in axes.xaxis, axes.yaxis:
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.set_major_formatter(ScalarFormatter())
                axis.set_minor_formatter(NullFormatter())
    if len(sizes) == 1:
        axes.set(xlim=(0, 2 * sizes[0, 1]), ylim=(0, 2 * sizes[0, 0]))
    axes.set_xlabel("width in pixels")
    axes.set_ylabel("height")
    axes.grid(alpha=0.3)
    axes.set_title("image sizes", fontsize=10)


def show(
    axes: Axes, image: LazyImage, mask: LazyImage | None = None, overlay: Overlay | None = None
) -> None:
    """Show an image on `axes`, with the mask that `overlay` of dataset.py draws on it."""
    scale = min(1.0, PIXELS / max(image.height, image.width))
    size = max(1, round(image.height * scale)), max(1, round(image.width * scale))
    pixels = stacks.visible(image.read(size=size)).permute(1, 2, 0).numpy()
    if mask and overlay:
        pixels = overlay(pixels, mask.read(size=size).numpy())
    axes.imshow(pixels)


def plain(text: str, length: int = 26) -> str:
    """Return `text` without its middle if it is longer than `length`, as matplotlib can draw it."""
    text = text.encode("utf-8", "backslashreplace").decode()
    half = length // 2
    return text if len(text) <= length else f"{text[:half]}…{text[1 - half :]}"
