"""Images with what the model makes of them: examples.png and worst.png, and the colours' legend."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from engine import files
from engine.data import loading, stacks
from engine.data.samples import Key, Seeded
from engine.run import metrics
from engine.run.mistakes import Drawing
from engine.run.palette import colors_of
from engine.run.plots import plain_text, shorten

DrawExample = Callable[[Axes, Tensor, Tensor, Tensor, Sequence[str]], None]
Cell = tuple[Axes, int, int]  # with its width and height in pixels

EXAMPLES = 8  # images in examples.png
LARGEST = 640  # pixels; larger images are drawn smaller
ENLARGED = 512  # pixels; up to which small images are drawn larger
MOST_PIXELS = 6_000_000  # of the drawn images together, some 10 MB
GAP, LINE, LETTER = 16, 29, 11  # pixels; between images, of a line of text, of a letter
DPI = 150
COMPRESS = {"compress_level": 2}  # photographs get hardly smaller by more, and take long
FEW = 12  # up to so many classes the legend has all, otherwise those that are in the images


def evenly_spaced(dataset: Seeded) -> dict[int, str]:
    """Return the indices of the images of examples.png, without captions."""
    last = len(dataset) - 1
    return {round(i * last / (EXAMPLES - 1)): "" for i in range(EXAMPLES)}


@torch.inference_mode()
def draw_images(path: Path, drawing: Drawing, captions: Mapping[int, str]) -> None:
    """Draw images of the data set with what the network makes of them.

    captions: index -> what to write above the image, after its file; nothing if it is empty.
    """
    dataset, classes = drawing.dataset, drawing.classes
    with plain_text():
        figure = Figure(dpi=DPI)
        cells: list[Cell] = []
        present: set[int] = set()
        for index, caption in captions.items():
            image, target, *_ = dataset[Key(0, index, is_val=True)]
            batch = loading.normalize(image[None].to(drawing.device), drawing.format)
            output = drawing.infer(batch)
            output, target = metrics.first(output)[0].cpu(), torch.as_tensor(target)
            if target.ndim == 2 and not target.is_floating_point():  # a mask
                for labels in target, output.argmax(0):
                    present |= {*np.unique(labels.numpy()).tolist()}
            axes = figure.add_axes((0, 0, 1, 1), label=str(index))
            axes.axis("off")
            drawing.draw(axes, stacks.visible(image), target, output, classes)
            cells.append((axes, *measure(axes, image.shape[-1], len(captions))))
            letters = int(cells[-1][1] / LETTER)
            lines = [shorten(line, letters) for line in axes.get_title().split("\n")]
            if caption:
                path_of = dataset.name(index).split(", ", 1)[-1]
                lines = [shorten_path(path_of, letters), caption, *lines]
            axes.title.set_text("\n".join(lines))
        arrange(figure, cells, legend_of(classes, present))
        with files.writing(path) as tmp_path:
            figure.savefig(tmp_path, format="png", dpi=DPI, pil_kwargs=COMPRESS)


def measure(axes: Axes, image_width: int, count: int) -> tuple[int, int]:
    """Return the width and height in pixels at which to draw what `axes` shows, one of `count`.

    Images that are shown in their own pixels or enlarged are not smoothed.
    """
    drawn = axes.images[0]
    height, width = drawn.get_size()
    parts = max(1, round(width / image_width))  # side by side
    side = max(height, width / parts)
    scale = min(LARGEST / side, math.sqrt(MOST_PIXELS / (count * height * width)))
    if scale >= 1:
        scale = max(1, int(min(scale, ENLARGED / side)))
        drawn.set_interpolation("nearest")
    return round(width * scale), round(height * scale)


def arrange(figure: Figure, cells: Sequence[Cell], entries: Sequence[Patch]) -> None:
    """Place the axes of `cells` in a grid of about 3 : 2, the legend of `entries` below it."""
    width = max(width for _, width, _ in cells) + GAP
    lines = max(axes.get_title().count("\n") for axes, _, _ in cells) + 1
    height = max(height for _, _, height in cells) + GAP + lines * LINE

    def ugliness(columns: int) -> float:
        rows = math.ceil(len(cells) / columns)
        empty = rows * columns - len(cells)
        return abs(math.log(columns * width / (rows * height) / 1.5)) + 0.3 * empty

    columns = min(range(1, len(cells) + 1), key=ugliness)
    rows = math.ceil(len(cells) / columns)
    total_width = columns * width + GAP
    below = draw_entries(figure, entries, total_width)
    total_height = rows * height + GAP + below
    figure.set_size_inches(total_width / DPI, total_height / DPI)
    for i, (axes, own_width, own_height) in enumerate(cells):
        row, column = divmod(i, columns)
        left = GAP + column * width + (width - GAP - own_width) // 2
        bottom = total_height - row * height - lines * LINE - GAP // 2 - own_height
        box = left / total_width, bottom / total_height
        axes.set_position((*box, own_width / total_width, own_height / total_height))


def legend_of(classes: Sequence[str], present: set[int]) -> list[Patch]:
    """Return entries for the classes in `present`, for all if they are few; none without any.

    present: class numbers; others stand for void.
    """
    if not present:
        return []
    colors = colors_of(classes) / 255
    numbers = range(len(classes))
    shown = [i for i in numbers if i in present or len(classes) <= FEW]
    entries = [
        # A leading underscore would leave the entry out.
        Patch(
            facecolor=colors[i],
            edgecolor="black",
            linewidth=0.5,
            label=f" {shorten(classes[i])}{'' if colors[i].any() else ' (not tinted)'}",
        )
        for i in shown
    ]
    if present - set(numbers):
        entries.append(Patch(facecolor="white", edgecolor="black", linewidth=0.5, label=" void"))
    return entries


def draw_entries(figure: Figure, entries: Sequence[Patch], width: int) -> int:
    """Draw a legend of `width` pixels at the bottom of `figure`; return its height in pixels."""
    if not entries:
        return 0
    longest = max(len(str(entry.get_label())) for entry in entries)
    columns = min(len(entries), max(1, int(width / (longest * LETTER + 50))))
    figure.legend(
        handles=list(entries), loc="lower center", ncols=columns, fontsize=9, frameon=False
    )
    return math.ceil(len(entries) / columns) * LINE + 2 * GAP


def draw_legend(path: Path, classes: Sequence[str]) -> None:
    """Draw the colours of all classes."""
    with plain_text():
        figure = Figure(dpi=DPI)
        entries = legend_of(classes, {*range(len(classes) + 1)})
        height = draw_entries(figure, entries, width := 1200)
        figure.set_size_inches(width / DPI, height / DPI)
        with files.writing(path, parents=True) as tmp_path:
            figure.savefig(tmp_path, format="png", dpi=DPI)


def shorten_path(path: str, letters: int) -> str:
    """Return the file and its folder's name, the last of these letters if they are more."""
    name = str(Path(*Path(path).parts[-2:])).encode("utf-8", "replace").decode()
    return name if len(name) <= letters else f"\N{HORIZONTAL ELLIPSIS}{name[1 - letters :]}"
