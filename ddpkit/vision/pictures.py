"""All that is drawn, by matplotlib, whose import takes a second: so only when it is needed."""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from torch import Tensor

from ddpkit import files
from ddpkit.data.format import VOID
from ddpkit.ranks import distributed
from ddpkit.vision.rows import (
    OF_TUNING,
    Row,
    best_row,
    clip,
    is_of_class,
    number_in,
    only_numbers,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DrawExample = Callable[["Axes", Tensor, Tensor, Tensor, Sequence[str]], None]
# image uint8 (C, H, W), target, logits, lines above it
Example = tuple[Tensor, Tensor, Tensor, Sequence[str]]

WIDTH = 16  # inches of a grid of images
TITLE = 0.15  # of a line above an image
LARGEST = 640  # pixels; of larger masks each second, third ... is drawn
DPI = 150
TINT = 0.4  # the share of a class's colour
# classes of a confusion matrix with numbers in it, and with names beside it
MOST_NUMBERS = 30
MOST_NAMES = 120
WRONG = np.array([213, 94, 0], np.uint8)  # on a pale image

# For people with any kind of colour blindness, too (Machado et al. 2009, at severity
# 1), the least distance in CIELAB is 40 between two of the first 8, 18 of all 24, and
# 25 to the white of void.
COLORS = """
    000000 e63c28 ffdc00 1e00d2 6effa0 f064ff 6e0078 8caaaa 325a3c b4ff78 e6a01e 50be5a
    32323c 9646ff 963cbe be5a6e a00000 b40a78 147896 f050c8 5a00aa ffb4ff 6e0a14 beb496
"""
PALETTE = np.frombuffer(bytes.fromhex(COLORS), np.uint8).reshape(-1, 3)


def colors_of(classes: Sequence[str], count: int = 0) -> np.ndarray:
    """Return uint8 (classes, 3): the user's, or PALETTE, again but for black; white up to count."""
    colors = getattr(classes, "colors", None)
    if colors is None:
        # black for class 0 alone: `overlay` does not tint it
        again = [1 + i % (len(PALETTE) - 1) for i in range(len(classes) - 1)]
        colors = PALETTE[[0, *again]]
    missing = max(0, count - len(colors))
    return np.pad(colors, ((0, missing), (0, 0)), constant_values=255)


def paint(mask: np.ndarray, classes: Sequence[str]) -> Image.Image:
    """Return `mask`, uint8 (H, W), as an image of the same numbers that viewers show in colours."""
    image = Image.fromarray(mask).convert("L")
    image.putpalette(colors_of(classes, 256).tobytes())
    return image


def overlay(image: np.ndarray, mask: np.ndarray, classes: Sequence[str]) -> np.ndarray:
    """Return uint8 (H, W, 3): `image` tinted by `mask` (H, W), but for black."""
    colors = colors_of(classes, 256)[mask]
    tinted = Image.blend(Image.fromarray(image), Image.fromarray(colors), TINT)
    return np.where(colors.any(-1, keepdims=True), np.asarray(tinted), image)


def draw_masks(
    axes: "Axes",
    image: Tensor,
    predicted: Tensor,
    target: Tensor,
    classes: Sequence[str],
) -> None:
    """Draw an image, the same tinted by its predicted and its true mask, and where they differ.

    Side by side on `axes`, with the image's mean IoU. image: uint8 (3, H, W). predicted, target:
    uint8 (H, W). Black edges without a label, at the right and below, with which validation images
    are padded, are left out.

        ddpkit.draw_masks(axes, image, logits.argmax(0).byte(), target, classes)
    """
    # its import takes seconds, too
    from torchmetrics.functional.classification import multiclass_jaccard_index

    iou = multiclass_jaccard_index(
        predicted, target, len(classes), ignore_index=VOID, validate_args=False
    )
    axes.set_title(f"mean IoU {iou:.2f}", fontsize=9)
    every = image.permute(1, 2, 0).numpy(), predicted.numpy(), target.numpy()
    is_own = every[0].any(-1) | (every[2] != VOID)
    # up to the last row and column that are not padded; of large images fewer pixels
    bottom, right = np.argwhere(is_own).max(0, initial=0) + 1
    step = 1 + max(bottom, right) // LARGEST
    pixels, guess, truth = [each[:bottom:step, :right:step] for each in every]
    is_wrong = (guess != truth) & (truth < len(classes))
    panels = [
        pixels,
        overlay(pixels, guess, classes),
        overlay(pixels, truth, classes),
        np.where(is_wrong[..., None], WRONG, pixels // 3 + 160),
    ]
    axes.imshow(in_a_row(panels))
    axes.set_xlabel("image | prediction | truth | errors")


def in_a_row(panels: Sequence[np.ndarray]) -> np.ndarray:
    """Return images of one height, uint8 (H, W, 3), beside each other, with white between them."""
    edges = ((0, 0), (0, 4), (0, 0))
    padded = [np.pad(each, edges, constant_values=255) for each in panels]
    return np.concatenate(padded, axis=1)[:, :-4]


@contextlib.contextmanager
def drawing(path: Path) -> "Iterator[Figure]":
    """Give the block a figure to draw on, which is then saved as `path`; a $ in names is a $."""
    import matplotlib
    from matplotlib.figure import Figure

    with (
        matplotlib.rc_context({"text.parse_math": False}),
        warnings.catch_warnings(record=True) as noted,
    ):
        warnings.simplefilter("always")
        figure = Figure(dpi=DPI, layout="constrained")
        yield figure
        with files.writing(path, parents=True) as tmp_path:
            # more takes long, and photographs get hardly smaller
            how = {"compress_level": 2}
            figure.savefig(tmp_path, format="png", bbox_inches="tight", pil_kwargs=how)
    if any("missing from" in str(each.message) for each in noted):
        distributed.print0(
            f"{path}: letters missing from matplotlib's font are drawn as boxes; install a font "
            "that has them, and set font.family in a matplotlibrc"
        )


def draw_curves(
    path: Path,
    rows: Sequence[Row],
    classes: Sequence[str],
    best: str = "",
    direction: str = "",
) -> None:
    """Draw the losses, and the other metrics, over the epochs; those of single classes are not.

    best, direction: the metric by which best.pt is chosen, and max or min: that epoch is marked.
    """
    shown = [
        name
        for name in only_numbers(rows[-1])
        if name == best or not (name in OF_TUNING or is_of_class(name, classes))
    ]
    losses = [name for name in shown if name.endswith("loss")]
    others = [name for name in shown if name not in losses]
    epochs = [number_in(row, "epoch") for row in rows]
    marked = best_row(rows, best, direction)
    with drawing(path) as figure:
        figure.set_size_inches(10, 4)
        left, right = figure.subplots(1, 2)
        for axes, kind, names in (left, "loss", losses), (right, "metric", others):
            for name in names:
                # NaN, of a row without the value, is not drawn
                values = [number_in(row, name) for row in rows]
                label = f" {clip(name)} {values[-1]:.4g}"
                axes.plot(epochs, values, ".-", label=label)
            if marked:
                at = number_in(marked, "epoch")
                label = f" best {number_in(marked, best):.4g}, epoch {at:g}"
                axes.axvline(at, color="black", linestyle=":", label=label)
            if names:
                axes.legend(fontsize=8)
            axes.set(xlabel="epoch", ylabel=kind, xlim=(0.5, epochs[-1] + 0.5))
            axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
            axes.grid(alpha=0.3)


def draw_confusion(path: Path, confusion: Tensor, classes: Sequence[str]) -> None:
    """Draw the confusion matrix, int64 (classes, classes), in % of each row, of one true class."""
    counts = confusion.cpu().double().numpy()
    count = len(classes)
    sums = counts.sum(1)
    percent = 100 * counts / np.maximum(sums, 1)[:, None]
    side = min(4 + 0.24 * count, 15)  # inches
    size = min(10, max(5, 18 * side / count))  # points: 100.0 fits into a cell
    with drawing(path) as figure:
        figure.set_size_inches(side, side)
        axes = figure.subplots()
        # the root makes a few percent visible
        axes.imshow(np.sqrt(percent), vmin=0, vmax=10, cmap="Blues")
        axes.set(xlabel="prediction", ylabel="truth (number); % of each row")
        if count <= MOST_NAMES:
            names = [clip(name) for name in classes]
            axes.set_xticks(range(count), names, rotation=90, fontsize=size)
            names = [f"{each} ({n:,.0f})" for each, n in zip(names, sums, strict=True)]
            axes.set_yticks(range(count), names, fontsize=size)
        for row, column in np.argwhere(percent > 0):
            value = percent[row, column]
            if count <= MOST_NUMBERS:
                axes.text(
                    column,
                    row,
                    f"{value:.1f}",
                    color="white" if value > 30 else "black",
                    fontsize=size,
                    ha="center",
                    va="center",
                )


def draw_images(
    path: Path, examples: Iterable[Example], draw: DrawExample, classes: Sequence[str]
) -> None:
    """Draw `examples` in a grid of about 3 : 2, each as `draw` draws it; below it the legend."""
    present: set[int] = set()
    with drawing(path) as figure:
        for i, (image, target, logits, above) in enumerate(examples):
            if target.ndim == 2 and not target.is_floating_point():  # a mask
                present.update(np.unique(target.numpy()))
                present.update(np.unique(logits.argmax(0).numpy()))
            axes = figure.add_subplot(label=str(i))
            axes.axis("off")
            draw(axes, image, target, logits, classes)
            lines = list(above) + axes.get_title().split("\n")
            axes.title.set_text("\n".join(clip(line, 48) for line in lines))
        lay_out(figure)
        heading = figure.axes[0].get_xlabel()  # axes that are off do not show theirs
        if heading:
            figure.suptitle(heading, fontsize=10)
        if present:
            draw_legend(figure, classes, present)


def lay_out(figure: "Figure") -> None:
    """Put the axes of `figure`, each with an image, into a grid of cells of one size."""
    every = figure.axes
    height, width = np.max([axes.images[0].get_size() for axes in every], axis=0)
    lines = 3 + max(axes.get_title().count("\n") for axes in every)
    columns = round(math.sqrt(1.5 * len(every) * height / width))
    columns = min(max(columns, 1), len(every))
    rows = math.ceil(len(every) / columns)
    cell = WIDTH / columns * height / width + TITLE * lines
    figure.set_size_inches(WIDTH, rows * cell)
    grid = figure.add_gridspec(rows, columns)
    for i, axes in enumerate(every):
        axes.set_subplotspec(grid[i])


def draw_legend(
    figure: "Figure",
    classes: Sequence[str],
    present: set[int],
) -> None:
    """Draw the colours of classes in `present`, but for black; numbers of none stand for void."""
    from matplotlib.patches import Patch

    colors = colors_of(classes, 256) / 255
    entries = []
    for i in sorted({min(number, len(classes)) for number in present}):
        name = clip(classes[i]) if i < len(classes) else "void"
        label = f" {name}"  # a leading underscore would leave an entry out
        if colors[i].any():
            entries.append(Patch(facecolor=colors[i], edgecolor="black", label=label))
    figure.legend(
        handles=entries, loc="outside lower center", ncols=8, fontsize=9, frameon=False
    )
