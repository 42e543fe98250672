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
from ddpkit.vision.masks import Classes
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
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DrawExample = Callable[["Axes", Tensor, Tensor, Tensor, Sequence[str]], None]
# image uint8 (C, H, W), target, logits, lines above it
Example = tuple[Tensor, Tensor, Tensor, Sequence[str]]

# pixels; higher images are drawn smaller, small ones are enlarged up to this
HIGHEST = 480
MOST_PIXELS = 400_000  # of an image with its masks
DPI = 150
MOST_NUMBERS = 45  # classes of a confusion matrix with numbers in it
PANEL = 320  # pixels of a small image's longer side
OTHER = "other class"
ERRORS = {  # Okabe and Ito's colours
    "right": (0, 158, 115),
    "missed": (213, 94, 0),
    "false": (86, 180, 233),
    OTHER: (240, 228, 66),
}

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
    """Return uint8 (H, W, 3): `image` tinted and outlined by `mask` (H, W), but for black."""
    colors = colors_of(classes, 256)[mask]
    tinted = Image.blend(Image.fromarray(image), Image.fromarray(colors), 0.4)
    shown = np.where(colors.any(-1, keepdims=True), np.asarray(tinted), image)
    return outline(shown, mask, classes, width=1 + min(mask.shape) // 400)


def outline(
    pixels: np.ndarray, mask: np.ndarray, classes: Sequence[str], width: int = 2
) -> np.ndarray:
    """Return the image (H, W, 3) with the edges of each class in its colour, but of black ones."""
    is_edge = np.zeros(mask.shape, bool)
    # down, and to the right
    for numbers, edge in ((mask, is_edge), (mask.T, is_edge.T)):
        for step in range(1, width + 1):
            differs = numbers[step:] != numbers[:-step]
            edge[step:] |= differs
            edge[:-step] |= differs
    colors = colors_of(classes, 256)[mask]
    is_drawn = is_edge & colors.any(-1)
    return np.where(is_drawn[..., None], colors, pixels)


def draw_masks(
    axes: "Axes",
    image: Tensor,
    predicted: Tensor,
    target: Tensor,
    classes: Sequence[str],
) -> None:
    """Draw an image, with the outlines of its predicted and its true mask, and what is wrong.

    Side by side on `axes`, with the image's mean IoU. image: uint8 (3, H, W). predicted, target:
    uint8 (H, W). Black edges without a label, at the right and below, with which validation images
    are padded, are left out.

        ddpkit.draw_masks(axes, image, logits.argmax(0).byte(), target, classes)
    """
    pixels = image.permute(1, 2, 0).numpy()
    truth = target.numpy()
    own = np.argwhere(pixels.any(-1) | (truth != VOID))
    bottom, right = own.max(0) + 1 if len(own) else truth.shape
    parts = [each[:bottom, :right] for each in (pixels, predicted.numpy(), truth)]
    axes.set_title(
        f"mean IoU {mean_iou(parts[1], parts[2], len(classes)):.2f}", fontsize=9
    )
    # outlines are lines of the picture: small images are enlarged before, large ones reduced
    longest = max(bottom, right)
    times = max(1, PANEL // longest)
    step = max(1, longest // (2 * PANEL))
    for i, part in enumerate(parts):
        parts[i] = part[::step, ::step].repeat(times, 0).repeat(times, 1)
    pixels, guess, truth = parts
    width = max(2, max(pixels.shape) // 150)
    shown = [
        pixels,
        outline(pixels, guess, classes, width),
        outline(pixels, truth, classes, width),
        draw_errors(axes, pixels, guess, truth, classes),
    ]
    axes.imshow(in_a_row(shown, max(4, width)))
    axes.set_xlabel("image | prediction | truth | errors")


def in_a_row(panels: Sequence[np.ndarray], gap: int = 4) -> np.ndarray:
    """Return images of one height, uint8 (H, W, 3), beside each other, with white between them."""
    edges = ((0, 0), (0, gap), (0, 0))
    padded = [np.pad(each, edges, constant_values=255) for each in panels]
    return np.concatenate(padded, axis=1)[:, :-gap]


def mean_iou(guess: np.ndarray, truth: np.ndarray, count: int) -> float:
    """Return the mean over the classes that either mask has, of pixels with a label."""
    is_label = (truth >= 0) & (truth < count)
    guess = guess[is_label]
    truth = truth[is_label]
    shares = []
    for number in np.union1d(guess, truth):
        said = guess == number
        was = truth == number
        shares.append((said & was).sum() / (said | was).sum())
    return float(np.mean(shares)) if shares else math.nan


def draw_errors(
    axes: "Axes",
    pixels: np.ndarray,
    guess: np.ndarray,
    truth: np.ndarray,
    classes: Sequence[str],
) -> np.ndarray:
    """Return a pale image (H, W, 3) with ERRORS in their colours, which go to the legend of `axes`.

    An object is what has a class with a colour; black ones are its ground.
    """
    is_object: np.ndarray = np.any(colors_of(classes, 256), axis=-1)
    is_label = (truth >= 0) & (truth < len(classes))
    was = is_object[truth] & is_label
    said = is_object[guess] & is_label
    places = [
        was & said & (guess == truth),
        was & ~said,
        said & ~was,
        was & said & (guess != truth),
    ]
    grey = np.asarray(Image.fromarray(pixels).convert("L"))[..., None]
    drawn = np.repeat(160 + grey // 3, 3, axis=2)
    for place, (name, color) in zip(places, ERRORS.items(), strict=True):
        drawn[place] = color
        if name == OTHER and is_object[: len(classes)].sum() < 2:
            continue
        axes.scatter([], [], marker="s", color=np.array(color) / 255, label=name)
    return drawn


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
    losses = []
    others = []
    for name in only_numbers(rows[-1]):
        if name in OF_TUNING:
            continue
        if name.endswith("loss"):
            losses.append(name)
        elif not is_of_class(name, classes) or name == best:
            others.append(name)
    epochs = [number_in(row, "epoch") for row in rows]
    marked = best_row(rows, best, direction)
    with drawing(path) as figure:
        figure.set_size_inches(10, 4)
        left, right = figure.subplots(1, 2)
        for axes, kind, shown in (left, "loss", losses), (right, "metric", others):
            for name in shown:
                # NaN, of a row without the value, is not drawn
                line = [number_in(row, name) for row in rows]
                label = f" {clip(name)} {line[-1]:.4g}"
                if marked and name == best:
                    label += f", best {number_in(marked, name):.4g}"
                axes.plot(epochs, line, ".-", label=label)
            if marked:
                at = number_in(marked, "epoch")
                axes.axvline(
                    at, color="black", linestyle=":", label=f" best, epoch {at}"
                )
            if shown:
                axes.legend(fontsize=8)
            ends = (min(epochs) - 0.5, max(epochs) + 0.5)
            axes.set(xlabel="epoch", ylabel=kind, xlim=ends)
            axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
            axes.grid(alpha=0.3)


def draw_confusion(path: Path, confusion: Tensor, classes: Sequence[str]) -> None:
    """Draw the confusion matrix, int64 (classes, classes), in % of each row, of one true class."""
    from matplotlib.colors import PowerNorm

    counts = confusion.cpu().double().numpy()
    count = len(classes)
    sums = counts.sum(1)
    with np.errstate(invalid="ignore"):
        percent = 100 * counts / sums[:, None]
    side = min(4 + 0.24 * count, 15)  # inches
    # points of text, of which a cell takes 72 to the inch
    cell = 72 * 0.75 * side / count
    has_numbers = count <= MOST_NUMBERS
    with drawing(path) as figure:
        figure.set_size_inches(side, side)
        axes = figure.subplots()
        # the root makes a few percent visible, where there are no numbers
        norm = PowerNorm(1 if has_numbers else 0.5, 0, 100)
        drawn = axes.imshow(percent, norm=norm, cmap="Blues", interpolation="nearest")
        axes.set_facecolor("0.85")  # of a row without labels
        if not has_numbers:
            figure.colorbar(drawn, shrink=0.6, ticks=[0, 1, 5, 10, 25, 50, 100])
        if count <= 120:
            names = [clip(name) for name in legible(classes)]
            size = min(10, max(5, 0.6 * cell))
            axes.set_xticks(range(count), names, rotation=90, fontsize=size)
            totals = [
                f"{name} ({total:,.0f})"
                for name, total in zip(names, sums, strict=True)
            ]
            axes.set_yticks(range(count), totals, fontsize=size)
        right = counts.trace()
        total = counts.sum()
        share = right / total if total else math.nan
        axes.set_title(f"right: {share:.1%}, {right:,.0f} of {total:,.0f}")
        axes.set(xlabel="prediction", ylabel="truth (number); % of each row")
        if has_numbers:
            for row, column in np.argwhere(percent > 0):
                value = percent[row, column]
                text = f"{value:.0f}" if value >= 0.5 else "<1"
                size = max(4, cell / 2.6)
                if cell >= 30:  # there is room for two lines
                    text = f"{value:.1f}%\n{counts[row, column]:,.0f}"
                    size = min(12, cell / 5.5)
                color = "white" if value > 50 else "black"
                drawn_text = axes.text(column, row, text, color=color, fontsize=size)
                drawn_text.set(ha="center", va="center")


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
        heading = figure.axes[0].get_xlabel()  # axes that are off do not show theirs
        if heading:
            figure.suptitle(heading, fontsize=10)
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
    black: str = "",
) -> None:
    """Draw the colours of the classes in `present`; numbers that are no class stand for void.

    Other marks come from the figure's first axes. black: what is said of black ones, which are left
    out without it.
    """
    from matplotlib.patches import Patch

    colors = colors_of(classes, 256) / 255
    classes = legible(classes)
    entries: list[Artist] = []
    for i in sorted({min(number, len(classes)) for number in present}):
        name = clip(classes[i]) if i < len(classes) else "void"
        if not colors[i].any():
            if not black:
                continue
            name += f" ({black})"
        label = f" {name}"  # a leading underscore would leave an entry out
        entries.append(Patch(facecolor=colors[i], edgecolor="black", label=label))
    for axes in figure.axes[:1]:
        entries += axes.get_legend_handles_labels()[0]
    figure.legend(
        handles=entries, loc="outside lower center", ncols=8, fontsize=9, frameon=False
    )
