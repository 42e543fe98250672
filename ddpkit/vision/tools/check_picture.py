"""check.png: training images with their labels, and what dataset.py makes of them."""

import contextlib
import io
import math
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2.functional import InterpolationMode, resize

from ddpkit.data import samples
from ddpkit.data.format import VOID
from ddpkit.data.samples import Key, Seeded
from ddpkit.errors import UserError
from ddpkit.ranks import distributed, process
from ddpkit.vision import images, mistakes, pictures

COUNT = 12  # images
HEIGHT = 240  # pixels that each is drawn with


def draw_check(path: Path, args: Namespace) -> str:
    """Draw images of the training set that dataset.py builds, each as it is and augmented.

    Returns why training would not start, or nothing.
    """
    try:
        # its lines are those of the report, said again
        with contextlib.redirect_stdout(io.StringIO()):
            train_set, _, classes = process.own("dataset").build_datasets(args)
    except UserError as error:
        distributed.print0(f"{path} was not drawn: {error.line}")
        return error.line
    seeded = Seeded(train_set, classes, 0)
    samples.tell_epoch(train_set, 0)
    present: set[int] = set()  # in masks
    chosen = mistakes.spread(len(train_set), COUNT)
    captions = mistakes.short_names(train_set, chosen)
    void = []  # the share of each mask, as training has it
    # longer sides of images of classes: in their files, and as training has all
    stored = []
    trained = 0
    with pictures.drawing(path) as figure:
        for index, caption in zip(chosen, captions, strict=True):
            try:
                target, shown = views(seeded, index)
            except UserError:  # which the report has
                continue
            axes = figure.add_subplot(label=str(index))
            axes.axis("off")
            axes.imshow(pictures.in_a_row([panel(classes, *view) for view in shown]))
            lines = [caption or samples.name(train_set, index)]
            if target.ndim == 2:
                void.append((target == VOID).float().mean())
                for _, mask in shown:
                    present.update(mask.unique().tolist())
            else:
                if len(shown) > 1:  # else the file is not known
                    stored.append(max(shown[0][0].shape[-2:]))
                    trained = max(shown[1][0].shape[-2:])
                # a number, or float (classes,) of several
                numbers = target.nonzero().flatten() if target.ndim else target[None]
                text = "; ".join(classes[int(number)] for number in numbers) or "none"
                lines.insert(0, pictures.clip(text, 40))
            axes.set_title("\n".join(lines), fontsize=9)
        if figure.axes:
            pictures.lay_out(figure)
            figure.suptitle("as it is | as dataset.py augments it", fontsize=10)
        if present:
            pictures.draw_legend(figure, classes, present)
    distributed.print0(
        f"{path}: {len(figure.axes)} training images; as augmented, do they still show "
        "their labels? If not: --hflip 0 and, for classification, --crop-scale 1"
    )
    if void and np.mean(void) > 0.7:
        distributed.print0(
            f"{np.mean(void):.0%} of the training pixels are void and do not count: try a smaller "
            "--image-size, unless the masks themselves have so few labels"
        )
    say_small(stored, trained)
    return ""


def say_small(stored: Sequence[int], trained: int) -> None:
    """Say a line if training enlarges most images at least twice."""
    usual = sorted(stored)[len(stored) // 2] if stored else 0
    better = math.ceil(usual / 32) * 32  # as networks with five halvings want it
    if usual and 2 * better <= trained:
        distributed.print0(
            f"most images are at most {usual} pixels wide or high: from scratch try --image-size "
            f"{better}, up to {(trained / better) ** 2:.0f} times as fast as {trained}; with "
            f"pretrained weights try {2 * better} first, which may be more accurate"
        )


def views(seeded: Seeded, index: int) -> tuple[Tensor, list[list[Tensor]]]:
    """Return a sample's target; image and mask as files have them, if known, and as augmented."""
    shown = []
    for dataset, number in samples.places(seeded.dataset, index):
        if hasattr(dataset, "open"):
            shown.append([part.read() for part in dataset.open(number)])
            break
    image, target = seeded[Key(0, index)][:2]
    target = torch.as_tensor(target)
    shown.append([image, target] if target.ndim == 2 else [image])
    return target, shown


def panel(
    classes: Sequence[str], image: Tensor, mask: Tensor | None = None
) -> np.ndarray:
    """Return an image, uint8 (HEIGHT, W, 3), tinted by its mask (H, W)."""
    pixels = images.visible(image)
    height, width = pixels.shape[1:]
    size = [HEIGHT, max(1, round(width * HEIGHT / height))]
    drawn = resize(pixels, size).permute(1, 2, 0).numpy()
    if mask is None:
        return drawn
    numbers = resize(mask[None].byte(), size, InterpolationMode.NEAREST)
    return pictures.overlay(drawn, numbers[0].numpy(), classes)
