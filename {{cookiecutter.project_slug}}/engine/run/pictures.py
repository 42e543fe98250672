"""All that is drawn: classes in their colours, curves, a confusion matrix, images with predictions.

matplotlib is imported when something is drawn: that takes a second.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from torch import Tensor

from engine import files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, float | str]
DrawExample = Callable[["Axes", Tensor, Tensor, Tensor, Sequence[str]], None]
Example = tuple[Tensor, Tensor, Tensor, Sequence[str]]  # image, target, logits, lines above it

VOID = 255  # the class number of pixels without a label
NOT_DRAWN = {"epoch", "step", "lr", "img_per_s", "train_seconds", "data_wait", "peak_memory"}
HALF = 6  # curves with a colour: so many of the best, and of the worst
LETTERS = 24  # of a class's name; longer ones are shortened
LARGEST = 640  # pixels; higher images are drawn smaller, small ones are enlarged up to this
MOST_PIXELS = 700_000  # of an image with its masks; 12 of them take some 10 MB
GAP, LINE, LETTER = 32, 29, 11  # pixels; between images, of a line of text, of a letter
DPI = 150
PNG = {"compress_level": 2}  # photographs get hardly smaller by more, which takes long

# For people with any of the three kinds of colour blindness: the least distance in CIELAB (Delta E
# 1976) between two of the first 8, the black of class 0 included, is 40; of all 24 it is 18, and
# 25 to the white of void. That is the least over normal vision and the simulations of protanopia,
# deuteranopia and tritanopia by Machado et al. 2009, doi:10.1109/TVCG.2009.113, at severity 1.
PALETTE = np.array(
    [
        *([0, 0, 0], [230, 60, 40], [255, 220, 0], [30, 0, 210], [110, 255, 160], [240, 100, 255]),
        *([110, 0, 120], [140, 170, 170], [50, 90, 60], [180, 255, 120], [230, 160, 30]),
        *([80, 190, 90], [50, 50, 60], [150, 70, 255], [150, 60, 190], [190, 90, 110]),
        *([160, 0, 0], [180, 10, 120], [20, 120, 150], [240, 80, 200], [90, 0, 170]),
        *([255, 180, 255], [110, 10, 20], [190, 180, 150]),
    ],
    dtype=np.uint8,
)


class Classes(list[str]):
    """The class names, with `colors`, uint8 (classes, 3), if the user has chosen them."""

    def __init__(self, names: Sequence[str], colors: Sequence[Sequence[int]] | None = None) -> None:
        super().__init__(names)
        self.colors = np.array(colors, dtype=np.uint8) if colors else None


def colors_of(classes: Sequence[str]) -> np.ndarray:
    """Return the colours of the classes, uint8 (classes, 3): the user's, or those of PALETTE.

    Black is for what is not tinted. The colours of PALETTE but black come again from class 24 on.
    """
    chosen = getattr(classes, "colors", None)
    again = [1 + i % (len(PALETTE) - 1) for i in range(len(classes) - 1)]
    return PALETTE[[0, *again]] if chosen is None else chosen


def color_table(classes: Sequence[str]) -> np.ndarray:
    """Return the colours of mask values, uint8 (256, 3); white for what is no class."""
    table = np.full((256, 3), 255, np.uint8)
    table[: len(classes)] = colors_of(classes)
    return table


def paint(mask: np.ndarray, classes: Sequence[str]) -> Image.Image:
    """Return `mask`, uint8 (H, W), as an image of the same numbers that viewers show in colours."""
    image = Image.fromarray(mask).convert("L")
    image.putpalette(color_table(classes).tobytes())
    return image


def overlay(image: np.ndarray, mask: np.ndarray, classes: Sequence[str]) -> np.ndarray:
    """Return uint8 (H, W, 3): `image` (same) tinted by `mask` (H, W), whose void is white.

    Classes whose colour is black, such as class 0 unless classes.txt has another, are not tinted.
    """
    colors = color_table(classes)[mask]
    tinted = Image.blend(Image.fromarray(image), Image.fromarray(colors), 0.6)
    return np.where(colors.any(-1, keepdims=True), np.asarray(tinted), image)


def draw_masks(
    axes: "Axes", image: Tensor, predicted: Tensor, target: Tensor, classes: Sequence[str]
) -> None:
    """Draw an image, and tinted by its predicted and its true mask, side by side on `axes`.

    image: uint8 (3, H, W). predicted, target: uint8 (H, W). Black edges without a label, at the
    right and below, with which validation images are padded, are left out.

        engine.draw_masks(axes, image, logits.argmax(0).byte(), target, classes)
    """
    pixels, truth = image.permute(1, 2, 0).numpy(), target.numpy()
    own = np.argwhere(pixels.any(-1) | (truth != VOID))
    bottom, right = own.max(0) + 1 if len(own) else truth.shape
    pixels = pixels[:bottom, :right]
    gap = np.full((bottom, max(2, right // 128), 3), 255, np.uint8)
    masks = (mask[:bottom, :right] for mask in (predicted.numpy(), truth))
    first, second = (overlay(pixels, mask, classes) for mask in masks)
    axes.imshow(np.concatenate([pixels, gap, first, gap, second], axis=1))
    axes.set_title("image | prediction | truth", fontsize=9)


@contextlib.contextmanager
def drawing(path: Path, box: str | None = None) -> "Iterator[Figure]":
    """Give the block a figure to draw on, which is then saved as `path`; box: None or "tight".

    Names are drawn as they are: a $ is no mathematics, and signs that the font lacks are boxes.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure = Figure(dpi=DPI)
        yield figure
        with files.writing(path, parents=True) as tmp_path:
            figure.savefig(tmp_path, format="png", bbox_inches=box, pil_kwargs=PNG)


def draw_curves(path: Path, rows: Sequence[Row], classes: Sequence[str]) -> None:
    """Draw the losses, the other metrics, and those of each of `classes`, over the epochs.

    Of many classes the best and the worst at the end have a colour and a name.
    """
    last = [n for n, v in rows[-1].items() if n not in NOT_DRAWN and not isinstance(v, str)]
    epochs, shown = [row["epoch"] for row in rows], panels(last, classes)
    with drawing(path) as figure:
        figure.set_layout_engine("constrained")
        figure.set_size_inches(5 * len(shown), 4)
        for axes, (title, columns) in zip(figure.subplots(1, len(shown)), shown, strict=True):
            lines = {
                label: np.array([row.get(name) for row in rows], dtype=float)
                for label, name in columns.items()
            }
            ends = {
                n: line[~np.isnan(line)][-1] for n, line in lines.items() if np.any(line == line)
            }
            ranked = [*ends]
            if len(ranked) > 2 * HALF:
                ranked.sort(key=lambda name: -ends[name])
            for i, name in enumerate(ranked):
                color, label = f"C{i % HALF}", f" {shorten(name)} {ends[name]:.4g}"
                if HALF <= i < len(ranked) - HALF:
                    color, label = "0.85", "_"  # not in the legend
                style = "o-" if i < HALF else "o--"
                axes.plot(epochs, lines[name], style, color=color, label=label, markersize=3)
            if 0 < len(ranked) <= 4:
                axes.legend(fontsize=8)
            elif ranked:  # beside the lines
                axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
            axes.set(title=title, xlabel="epoch")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(alpha=0.3)


def panels(names: Sequence[str], classes: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """Return what to draw side by side: a title, and the column of metrics.csv by label.

    Losses, other metrics, and those of each class: iou_road and iou_car are of the kind iou, if
    road and car are all classes; so are iou_0 and iou_1.
    """
    by_class = {}
    for labels in [str(number) for number in range(len(classes))], classes:
        for name in names if len(labels) > 1 else ():
            kind = name.removesuffix(f"_{labels[0]}")
            columns = {label: f"{kind}_{label}" for label in labels}
            if {*columns.values()} <= {*names}:
                by_class[kind] = columns
    apart = {name for columns in by_class.values() for name in columns.values()}
    losses = {name: name for name in names if name.endswith("loss") and name not in apart}
    means = {name: name for name in names if name not in losses and name not in apart}
    return [("losses", losses), ("metrics", means), *by_class.items()]


def draw_confusion(path: Path, confusion: Tensor, classes: Sequence[str]) -> None:
    """Draw the confusion matrix, int64 (classes, classes), rows labels and columns predictions.

    The colour is the share of the row, and rows without labels are grey.
    """
    from matplotlib.colors import PowerNorm

    counts, count = confusion.cpu().double().numpy(), len(classes)
    with np.errstate(invalid="ignore"):
        percent = 100 * counts / counts.sum(1, keepdims=True)
    side = min(max(2.0, 0.24 * count), 12.0)  # inches
    with drawing(path, "tight") as figure:
        figure.set_size_inches(side, side)
        axes = figure.add_axes((0, 0, 1, 1))
        norm = PowerNorm(0.5, 0, 100)  # the root makes a few percent visible
        drawn = axes.imshow(percent, norm=norm, cmap="Blues", interpolation="nearest")
        axes.set_facecolor("0.85")  # shows where a row is 0 / 0
        bar = figure.add_axes((1 + 0.15 / side, 0, 0.12 / side, 1))
        figure.colorbar(drawn, cax=bar, ticks=[0, 1, 5, 10, 25, 50, 100])
        step = math.ceil(count / 120)
        names, size = [shorten(name) for name in classes[::step]], 8 if count < 60 else 5
        axes.set_xticks(range(0, count, step), names, rotation=90, fontsize=size)
        axes.set_yticks(range(0, count, step), names, fontsize=size)
        axes.set(xlabel="prediction", ylabel="truth", title="% of each row")
        for (row, column), value in np.ndenumerate(percent) if count <= 20 else ():
            text = "" if not value > 0 else f"{value:.0f}" if value >= 0.5 else "<1"
            color = "white" if value > 35 else "black"
            axes.text(column, row, text, ha="center", va="center", color=color, fontsize=7)


def draw_images(
    path: Path, examples: Iterable[Example], draw: DrawExample, classes: Sequence[str]
) -> None:
    """Draw `examples` in a grid of about 3 : 2, each as `draw` draws it; below it the legend.

    An example: an image uint8 (3, H, W), its target, logits, and lines of text. Images that are not
    made smaller are not smoothed.
    """
    present: set[int] = set()
    with drawing(path, "tight") as figure:
        for i, (image, target, logits, above) in enumerate(examples):
            if target.ndim == 2 and not target.is_floating_point():  # a mask
                present.update(np.unique(target.numpy()), np.unique(logits.argmax(0).numpy()))
            axes = figure.add_axes((0, 0, 1, 1), label=str(i))
            axes.axis("off")
            draw(axes, image, target, logits, classes)
            axes.title.set_text("\n".join([*above, *axes.get_title().split("\n")]))
        every = figure.axes
        height, width = np.max([axes.images[0].get_size() for axes in every], axis=0)
        scale = min(LARGEST / height, math.sqrt(MOST_PIXELS / (height * width)))
        scale = scale if scale < 1 else int(scale)
        height, width = height * scale, width * scale
        figure.set_size_inches(width / DPI, height / DPI)  # of one; the others lie outside
        lines = 1 + max(axes.get_title().count("\n") for axes in every)
        right, down = 1 + GAP / width, 1 + (GAP + LINE * lines) / height
        rows = round(math.sqrt(len(every) * width * right / (1.5 * height * down))) or 1
        columns = math.ceil(len(every) / rows)
        for i, axes in enumerate(every):
            axes.set_position((i % columns * right, -(i // columns) * down, 1, 1))
            axes.images[0].set_interpolation("auto" if scale < 1 else "nearest")
            text = [shorten(line, int(width / LETTER)) for line in axes.get_title().split("\n")]
            axes.title.set_text("\n".join(text))
        if present:
            bottom = -((len(every) - 1) // columns) * down - GAP / height
            draw_legend(figure, classes, present, (columns * right / 2, bottom))


def draw_legend(
    figure: "Figure", classes: Sequence[str], present: set[int], top: tuple[float, float]
) -> None:
    """Draw the colours of the classes in `present`; numbers that are no class stand for void."""
    from matplotlib.patches import Patch

    shown = [i for i in range(len(classes)) if i in present]
    colors = color_table(classes) / 255
    # A leading underscore would leave an entry out.
    names = {i: f" {shorten(classes[i])}{' (not tinted)' * (not colors[i].any())}" for i in shown}
    if present - {*shown}:
        names[VOID] = " void"
    entries = [
        Patch(facecolor=colors[i], edgecolor="black", linewidth=0.5, label=name)
        for i, name in names.items()
    ]
    figure.legend(
        handles=entries, loc="upper center", bbox_to_anchor=top, ncols=8, fontsize=9, frameon=False
    )


def shorten(text: str, letters: int = LETTERS) -> str:
    """Return at most so many letters of `text`, without what is not UTF-8."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= letters else f"{text[: letters - 1]}\N{HORIZONTAL ELLIPSIS}"
