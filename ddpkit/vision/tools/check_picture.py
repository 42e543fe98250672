"""check.png: training images with their labels, and what dataset.py makes of them."""

import contextlib
import io
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddpkit.data import samples
from ddpkit.data.samples import Key, MapDataset, Seeded
from ddpkit.errors import UserError
from ddpkit.ranks import distributed, process
from ddpkit.run.first_steps import say_void
from ddpkit.vision import images, mistakes, pictures

COUNT = 12  # images


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
    seeded = Seeded(train_set, classes, 0)
    samples.tell_epoch(train_set, 0)
    cells: list[pictures.Cell] = []
    masks: list[Tensor] = []  # as training has them
    for index in mistakes.spread(len(train_set), COUNT):
        with contextlib.suppress(UserError):  # which the report has
            image, target = seeded[Key(0, index)][:2]
            target = torch.as_tensor(target)
            above = [mistakes.short_name(train_set, index)]
            numbers: list[int] = []
            parts = [image]
            if target.ndim == 2:
                parts.append(target)
                masks.append(target)
                numbers += target.unique().tolist()
            else:
                # a number, or float (classes,) of several
                labels = target.nonzero().flatten() if target.ndim else target[None]
                text = "; ".join(classes[int(label)] for label in labels) or "none"
                above.insert(0, text)
            panels = [panel(classes, *parts)]
            before = as_it_is(train_set, index, image.shape[1])
            if before:
                panels.insert(0, panel(classes, *before))
            cells.append(([panels], above, numbers))
    count = pictures.draw_grid(path, cells, draw_panels, classes)
    distributed.print0(
        f"{path}: {count} training images; as augmented, do they still show their labels? If not: "
        "--hflip 0 and, for classification, --crop-scale 1"
    )
    say_void(masks)
    return ""


def as_it_is(dataset: MapDataset, index: int, height: int) -> list[Tensor]:
    """Return a sample's image and mask as files have them, of that height, if they are known."""
    for each, number in samples.places(dataset, index):
        if hasattr(each, "open"):
            parts = each.open(number)
            width = round(parts[0].width * height / parts[0].height)
            return [part.read(size=(height, max(width, 1))) for part in parts]
    return []


def panel(
    classes: Sequence[str], image: Tensor, mask: Tensor | None = None
) -> np.ndarray:
    """Return an image, uint8 (H, W, 3), tinted by its mask (H, W)."""
    pixels = images.visible(image).permute(1, 2, 0).numpy()
    if mask is None:
        return pixels
    return pictures.overlay(pixels, mask.byte().numpy(), classes)


def draw_panels(axes: Any, panels: Sequence[np.ndarray]) -> None:
    axes.imshow(pictures.in_a_row(panels))
    axes.set_xlabel("as it is | as dataset.py augments it")
