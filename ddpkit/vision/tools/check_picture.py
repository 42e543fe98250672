"""check.png: training images with their labels, and what dataset.py makes of them."""

import contextlib
import io
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ddpkit.data import samples
from ddpkit.data.samples import Key, Seeded
from ddpkit.errors import UserError
from ddpkit.ranks import distributed, process
from ddpkit.run.first_steps import say_void
from ddpkit.vision import images, mistakes, pictures

COUNT = 12  # images
HEIGHT = 240  # pixels that each is drawn with
Shown = tuple[np.ndarray, np.ndarray | None]  # (H, W, 3), and a mask (H, W), both uint8


def draw_check(path: Path, args: Namespace) -> str:
    """Draw images of the training set that dataset.py builds, each as it is and augmented.

    Returns why training would not start, or nothing.
    """
    try:
        # its lines are those of the report, said again
        with contextlib.redirect_stdout(io.StringIO()):
            train_set, _, classes = process.own("dataset").build_datasets(args)
    except UserError as error:
        distributed.print0(f"{path} is not drawn: {error.line}")
        return error.line
    names = pictures.legible(classes)
    seeded = Seeded(train_set, classes, 0)
    samples.tell_epoch(train_set, 0)
    present: set[int] = set()
    chosen = mistakes.spread(len(train_set), COUNT)
    files = mistakes.short_names(train_set, chosen)
    targets = []
    with pictures.drawing(path) as figure:
        for index, file in zip(chosen, files, strict=True):
            try:
                target, shown = views(seeded, index)
            except UserError:  # which the report has
                continue
            axes = figure.add_subplot(label=str(index))
            axes.axis("off")
            panels = []
            for pixels, mask in shown:
                if mask is not None:
                    present.update(np.unique(mask).tolist())
                    pixels = pictures.overlay(pixels, mask, classes)
                panels.append(pixels)
            axes.imshow(pictures.in_a_row(panels))
            lines = [file or samples.name(train_set, index)]
            targets.append(target)
            if target.ndim < 2:
                # a number, or float (classes,) of several
                numbers = target.nonzero().flatten() if target.ndim else target[None]
                text = "; ".join(names[int(number)] for number in numbers) or "none"
                lines.insert(0, pictures.clip(text, 40))
            axes.set_title("\n".join(lines), fontsize=9)
        if figure.axes:
            pictures.lay_out(figure)
            figure.suptitle("as it is | as dataset.py augments it", fontsize=10)
        if present:
            pictures.draw_legend(figure, classes, present)
    distributed.print0(f"{path}: {len(figure.axes)} training images; look at them")
    say_void([each for each in targets if each.ndim == 2])
    return ""


def views(dataset: Seeded, index: int) -> tuple[Tensor, list[Shown]]:
    """Return a sample's target; and the image as its file has it, if known, and as augmented."""
    shown: list[Shown] = []
    for each, at in samples.places(dataset.dataset, index):
        if hasattr(each, "open"):
            shown.append(small(*[part.read() for part in each.open(at)]))
            break
    image, target = dataset[Key(0, index)][:2]
    target = torch.as_tensor(target)
    return target, [*shown, small(image, target if target.ndim == 2 else None)]


def small(image: Tensor, mask: Tensor | None = None) -> Shown:
    """Return image and mask HEIGHT pixels high."""
    pixels = images.visible(image).permute(1, 2, 0).numpy()
    height, width = pixels.shape[:2]
    size = (max(1, round(width * HEIGHT / height)), HEIGHT)
    drawn = np.array(Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR))
    if mask is None:
        return drawn, None
    numbers = Image.fromarray(mask.numpy().astype(np.uint8))
    return drawn, np.array(numbers.resize(size, Image.Resampling.NEAREST))
