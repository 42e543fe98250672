"""All that is drawn, by matplotlib, whose import takes a second: so only when it is needed."""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from torch import Tensor

from ddpkit import files
from ddpkit.data.masks import VOID, Classes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, float | str]
DrawExample = Callable[["Axes", Tensor, Tensor, Tensor, Sequence[str]], None]
# image uint8 (C, H, W), target, logits, lines above it
Example = tuple[Tensor, Tensor, Tensor, Sequence[str]]

NOT_DRAWN = {
    "epoch",
    "step",
    "lr",
    "img_per_s",
    "train_seconds",
    "data_wait",
    "peak_memory",
}
# pixels; higher images are drawn smaller, small ones are enlarged up to this
HIGHEST = 480
MOST_PIXELS = 400_000  # of an image with its masks
DPI = 150

# For people with any kind of colour blindness, too (Machado et al. 2009, at severity
# 1), the least distance in CIELAB is 40 between two of the first 8, 18 of all 24, and
# 25 to the white of void.
COLORS = """
    000000 e63c28 ffdc00 1e00d2 6effa0 f064ff 6e0078 8caaaa 325a3c b4ff78 e6a01e 50be5a
    32323c 9646ff 963cbe be5a6e a00000 b40a78 147896 f050c8 5a00aa ffb4ff 6e0a14 beb496
"""
PALETTE = np.frombuffer(bytes.fromhex(COLORS), np.uint8).reshape(-1, 3)


def legible(classes: Sequence[str]) -> Sequence[str]:
    """Return the names as the font can write them: after their numbers if it lacks a letter."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    letters = {ord(letter) for name in classes for letter in name}
    if letters <= get_font(findfont(FontProperties())).get_charmap().keys():
        return classes
    found = Classes([f"{number} {name}" for number, name in enumerate(classes)])
    found.colors = getattr(classes, "colors", None)
    return found


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
    """Return uint8 (H, W, 3): `image` (same) tinted by `mask` (H, W), but for black classes."""
    colors = colors_of(classes, 256)[mask]
    tinted = Image.blend(Image.fromarray(image), Image.fromarray(colors), 0.6)
    return np.where(colors.any(-1, keepdims=True), np.asarray(tinted), image)


def draw_masks(
    axes: "Axes",
    image: Tensor,
    predicted: Tensor,
    target: Tensor,
    classes: Sequence[str],
) -> None:
    """Draw an image, and tinted by its predicted and its true mask, side by side on `axes`.

    image: uint8 (3, H, W). predicted, target: uint8 (H, W). Black edges without a label, at the
    right and below, with which validation images are padded, are left out.

        ddpkit.draw_masks(axes, image, logits.argmax(0).byte(), target, classes)
    """
    pixels = image.permute(1, 2, 0).numpy()
    truth = target.numpy()
    own = np.argwhere(pixels.any(-1) | (truth != VOID))
    bottom, right = own.max(0) + 1 if len(own) else truth.shape
    pixels = pixels[:bottom, :right]
    first = overlay(pixels, predicted.numpy()[:bottom, :right], classes)
    second = overlay(pixels, truth[:bottom, :right], classes)
    gap = np.full((bottom, max(2, right // 128), 3), 255, np.uint8)
    axes.imshow(np.concatenate([pixels, gap, first, gap, second], axis=1))
    axes.set_title("image | prediction | truth", fontsize=9)


@contextlib.contextmanager
def drawing(path: Path) -> "Iterator[Figure]":
    """Give the block a figure to draw on, which is then saved as `path`; a $ in names is a $."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure = Figure(dpi=DPI, layout="constrained")
        yield figure
        with files.writing(path, parents=True) as tmp_path:
            # more takes long, and photographs get hardly smaller
            how = {"compress_level": 2}
            figure.savefig(tmp_path, format="png", bbox_inches="tight", pil_kwargs=how)


def draw_curves(path: Path, rows: Sequence[Row], classes: Sequence[str]) -> None:
    """Draw the losses, and the other metrics, over the epochs; those of single classes are not."""
    of_class = tuple(f"_{name}" for name in classes)
    losses = []
    others = []
    for name, value in rows[-1].items():
        if isinstance(value, str) or name in NOT_DRAWN:
            continue
        if name.endswith("loss"):
            losses.append(name)
        elif not name.endswith(of_class):
            others.append(name)
    epochs = [row["epoch"] for row in rows]
    with drawing(path) as figure:
        figure.set_size_inches(10, 4)
        for axes, shown in zip(figure.subplots(1, 2), (losses, others), strict=True):
            for name in shown:
                # of dtype float None, of a row without the value, is NaN: not drawn
                values = [row.get(name) for row in rows]
                shown_values = [None if isinstance(x, str) else x for x in values]
                line = np.array(shown_values, dtype=float)
                axes.plot(epochs, line, ".-", label=f" {clip(name)} {line[-1]:.4g}")
            if shown:
                axes.legend(fontsize=8)
            axes.set_xlabel("epoch")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(alpha=0.3)


def draw_confusion(path: Path, confusion: Tensor, classes: Sequence[str]) -> None:
    """Draw the confusion matrix, int64 (classes, classes), in % of each row, of one true class."""
    from matplotlib.colors import PowerNorm

    counts = confusion.cpu().double().numpy()
    count = len(classes)
    with np.errstate(invalid="ignore"):
        percent = 100 * counts / counts.sum(1, keepdims=True)
    side = min(4 + 0.24 * count, 15)  # inches
    with drawing(path) as figure:
        figure.set_size_inches(side, side)
        axes = figure.subplots()
        norm = PowerNorm(0.5, 0, 100)  # the root makes a few percent visible
        drawn = axes.imshow(percent, norm=norm, cmap="Blues", interpolation="nearest")
        axes.set_facecolor("0.85")  # of a row without labels
        figure.colorbar(drawn, shrink=0.6, ticks=[0, 1, 5, 10, 25, 50, 100])
        if count <= 120:
            names = [clip(name) for name in legible(classes)]
            size = 8 if count < 60 else 5
            axes.set_xticks(range(count), names, rotation=90, fontsize=size)
            axes.set_yticks(range(count), names, fontsize=size)
        axes.set(xlabel="prediction", ylabel="truth", title="% of each row")
        if count <= 20:  # there is room for numbers
            for row, column in np.argwhere(percent > 0):
                value = percent[row, column]
                color = "white" if value > 35 else "black"
                text = axes.text(column, row, f"{value:.0f}", color=color, fontsize=7)
                text.set(ha="center", va="center")


def draw_images(
    path: Path, examples: Iterable[Example], draw: DrawExample, classes: Sequence[str]
) -> None:
    """Draw `examples` in a grid of about 3 : 2, each as `draw` draws it; below it the legend."""
    present: set[int] = set()
    names = legible(classes)
    with drawing(path) as figure:
        for i, (image, target, logits, above) in enumerate(examples):
            if target.ndim == 2 and not target.is_floating_point():  # a mask
                present.update(np.unique(target.numpy()))
                present.update(np.unique(logits.argmax(0).numpy()))
            axes = figure.add_subplot(label=str(i))
            axes.axis("off")
            draw(axes, image, target, logits, names)
            lines = list(above) + axes.get_title().split("\n")
            axes.title.set_text("\n".join(clip(line, 48) for line in lines))
        lay_out(figure)
        if present:
            draw_legend(figure, classes, present)


def lay_out(figure: "Figure") -> None:
    """Put the axes of `figure`, each with an image, into a grid of cells of one size."""
    every = figure.axes
    height, width = np.max([axes.images[0].get_size() for axes in every], axis=0)
    scale = min(HIGHEST / height, math.sqrt(MOST_PIXELS / (height * width)))
    # a cell, in pixels: the image and, above it, its lines and a margin
    lines = 1 + max(axes.get_title().count("\n") for axes in every)
    height = height * scale + 22 * (2 + lines)
    width = width * scale
    rows = round(math.sqrt(len(every) * width / (1.5 * height))) or 1
    columns = math.ceil(len(every) / rows)
    rows = math.ceil(len(every) / columns)  # as few as these columns need
    figure.set_size_inches(columns * width / DPI, rows * height / DPI)
    grid = figure.add_gridspec(rows, columns)
    for i, axes in enumerate(every):
        axes.set_subplotspec(grid[i])
        axes.images[0].set_interpolation("auto" if scale < 1 else "nearest")


def draw_legend(
    figure: "Figure",
    classes: Sequence[str],
    present: set[int],
    without: str = "not tinted",
) -> None:
    """Draw the colours of the classes in `present`; numbers that are no class stand for void.

    without: what is said of black ones.
    """
    from matplotlib.patches import Patch

    colors = colors_of(classes, 256) / 255
    classes = legible(classes)
    entries = []
    for i in sorted({min(number, len(classes)) for number in present}):
        name = clip(classes[i]) if i < len(classes) else "void"
        hint = "" if colors[i].any() else f" ({without})"
        label = f" {name}{hint}"  # a leading underscore would leave an entry out
        entries.append(Patch(facecolor=colors[i], edgecolor="black", label=label))
    figure.legend(
        handles=entries, loc="outside lower center", ncols=8, fontsize=9, frameon=False
    )


def clip(text: str, letters: int = 24) -> str:
    # ? for what is no UTF-8 in a file name
    text = text.encode("utf-8", "replace").decode()
    if len(text) > letters:
        text = text[: letters - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return text
