"""Plots of numbers: curves.png, the metrics over the epochs, and confusion.png."""

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

from engine import files

Row = Mapping[str, float | str]

NOT_DRAWN = {"epoch", "step", "lr", "img_per_s", "train_seconds", "data_wait", "peak_memory"}
NAMED = 12  # lines with their class's name at the end; of more, the best and the worst half of it
NUMBERED = 20  # up to so many classes the cells of confusion.png have numbers
LABELLED = 120  # up to so many classes each row and column has its class's name
LETTERS = 24  # of a class's name; longer ones are shortened
LETTER = 6.5  # pixels; width of a letter
DPI = 100


@contextlib.contextmanager
def plain_text() -> Iterator[None]:
    """Draw names as they are: a $ is no mathematics, and signs that the font lacks are boxes."""
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        yield


def draw_curves(path: Path, rows: Sequence[Row], classes: Sequence[str]) -> None:
    """Draw the losses, the other metrics, and those of each of `classes`, over the epochs."""
    last = {n: v for n, v in rows[-1].items() if n not in NOT_DRAWN and not isinstance(v, str)}
    epochs = [row["epoch"] for row in rows]
    values = {name: np.array([row.get(name) for row in rows], dtype=float) for name in last}
    losses, means, by_class = panels(list(last), classes)
    with plain_text():
        figure = Figure(figsize=(5 * (2 + len(by_class)), 4), layout="constrained")
        first, second, *others = figure.subplots(1, 2 + len(by_class))
        for axes, names in (first, losses), (second, means):
            for name in names:
                axes.plot(epochs, values[name], marker=".", label=name)
            if names:
                axes.legend()
        for axes, (kind, columns) in zip(others, by_class.items(), strict=True):
            lines = {label: values[name] for label, name in columns.items()}
            draw_by_class(axes, epochs, kind, lines)
        for axes in first, second, *others:
            axes.set_xlabel("epoch")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(alpha=0.3)
        with files.writing(path) as tmp_path:
            figure.savefig(tmp_path, format="png", dpi=DPI)


def panels(
    names: Sequence[str], classes: Sequence[str]
) -> tuple[list[str], list[str], dict[str, dict[str, str]]]:
    """Return the names of the losses, of the other metrics, and by kind those of each class.

    iou_road and iou_car are of the kind iou, if road and car are all classes; so are iou_0, iou_1.
    """
    by_class = {}
    for labels in [str(number) for number in range(len(classes))], classes:
        for name in names if len(labels) > 1 else ():
            kind = name.removesuffix(f"_{labels[0]}")
            columns = {label: f"{kind}_{label}" for label in labels}
            if {*columns.values()} <= {*names}:
                by_class[kind] = columns
    apart = {name for columns in by_class.values() for name in columns.values()}
    others = [name for name in names if name not in apart]
    losses = [name for name in others if name.endswith("loss")]
    return losses, [name for name in others if name not in losses], by_class


def draw_by_class(
    axes: Axes, epochs: Sequence, kind: str, values: Mapping[str, np.ndarray]
) -> None:
    """Draw a line for each class with its name at its end; of many classes the best and worst.

    kind: of metric. values: class -> float (epochs,), NaN where it has no value.
    """
    with_values = {name: line for name, line in values.items() if not np.isnan(line).all()}
    ends = {name: line[~np.isnan(line)][-1] for name, line in with_values.items()}
    ranked = sorted(ends, key=lambda name: -ends[name])
    named, half = ranked, NAMED // 2
    if len(ranked) > NAMED:
        named = [*ranked[:half], *ranked[-half:]]
        for name in ranked[half:-half]:
            axes.plot(epochs, values[name], color="0.8", linewidth=0.8)
    for number, name in enumerate(named):
        style = "-" if number < half else "--"
        axes.plot(epochs, values[name], style, color=f"C{number % half}", marker=".", linewidth=1.2)
    axes.set_title(
        f"{kind} of {f'{half} best and {half} worst of ' * (named != ranked)}{len(values)} classes"
    )
    bottom, top = axes.get_ylim()
    heights = spread([(ends[name] - bottom) / (top - bottom) for name in named], gap=0.06)
    for number, (name, height) in enumerate(zip(named, heights, strict=True)):
        color = f"C{number % half}"
        axes.annotate(
            f"{shorten(name)} {ends[name]:.3f}",
            (epochs[int(np.flatnonzero(~np.isnan(values[name]))[-1])], ends[name]),
            xytext=(1.06, height),
            textcoords="axes fraction",
            color=color,
            fontsize=8,
            verticalalignment="center",
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.5, "relpos": (0, 0.5)},
        )


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Return `heights`, which descend from at most 1 to at least 0, moved to be `gap` apart."""
    found: list[float] = []
    for height in heights:
        found.append(min(height, found[-1] - gap) if found else height)
    for i in reversed(range(len(found))):
        found[i] = max(found[i], found[i + 1] + gap if i + 1 < len(found) else 0)
    return found


def draw_confusion(path: Path, confusion: Tensor, classes: Sequence[str]) -> None:
    """Draw the confusion matrix, int64 (classes, classes), rows labels and columns predictions.

    The colour is the share of the row, and rows without labels are grey.
    """
    counts = confusion.cpu().double().numpy()
    with np.errstate(invalid="ignore"):
        percent = 100 * counts / counts.sum(1, keepdims=True)
    count = len(classes)
    has_numbers = count <= NUMBERED
    cell = 36 if has_numbers else max(1800 // count, 14 if count <= LABELLED else 1)  # pixels
    names = [shorten(name) for name in classes]
    margin = 40 + LETTER * max(map(len, names))
    side = max(cell * count, 200)
    width, height = margin + side + 100, margin + side + 50
    with plain_text():
        figure = Figure(figsize=(width / DPI, height / DPI))
        axes = figure.add_axes((margin / width, margin / height, side / width, side / height))
        bar = figure.add_axes(
            ((margin + side + 20) / width, margin / height, 15 / width, side / height)
        )
        # The root makes a few percent visible.
        norm = PowerNorm(0.5, 0, 100)
        drawn = axes.imshow(percent, norm=norm, cmap="Blues", interpolation="nearest")
        axes.set_facecolor("0.85")  # shows where a row is 0 / 0
        figure.colorbar(drawn, cax=bar, ticks=[0, 1, 5, 10, 25, 50, 100]).ax.tick_params(
            labelsize=8
        )
        step = math.ceil(count / LABELLED)
        axes.set_xticks(range(0, count, step), names[::step], rotation=90, fontsize=8)
        axes.set_yticks(range(0, count, step), names[::step], fontsize=8)
        axes.set_xlabel("prediction")
        axes.set_ylabel("truth")
        axes.set_title("% of each row", fontsize=10)
        if has_numbers:
            for (row, column), value in np.ndenumerate(percent):
                text = "" if not value > 0 else f"{value:.0f}" if value >= 0.5 else "<1"
                color = "white" if value > 35 else "black"
                axes.text(column, row, text, ha="center", va="center", color=color, fontsize=8)
        with files.writing(path) as tmp_path:
            figure.savefig(tmp_path, format="png", dpi=DPI)


def shorten(name: str, letters: int = LETTERS) -> str:
    """Return at most so many letters of `name`, without what is not UTF-8."""
    name = name.encode("utf-8", "replace").decode()
    return name if len(name) <= letters else f"{name[: letters - 1]}\N{HORIZONTAL ELLIPSIS}"
