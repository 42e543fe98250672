"""Colours of classes, and images tinted with them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

VOID = 255  # the class number of pixels without a label

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
    if chosen is not None:
        return chosen
    numbers = np.arange(len(classes))
    return PALETTE[np.where(numbers == 0, 0, (numbers - 1) % (len(PALETTE) - 1) + 1)]


def paint(mask: np.ndarray, classes: Sequence[str]) -> Image.Image:
    """Return `mask`, uint8 (H, W), as an image of the same numbers that viewers show in colours.

    Numbers that are no class, such as void, are white.
    """
    image = Image.fromarray(mask).convert("L")
    colors = np.full((256, 3), 255, np.uint8)
    colors[: len(classes)] = colors_of(classes)
    image.putpalette(colors.tobytes())
    return image


def overlay(image: np.ndarray, mask: np.ndarray, classes: Sequence[str]) -> np.ndarray:
    """Return uint8 (H, W, 3): `image` (same) tinted by `mask` (H, W), whose void is white.

    Classes whose colour is black, such as class 0 unless classes.txt has another, are not tinted.
    """
    table = np.full((256, 3), 255)
    table[: len(classes)] = colors_of(classes)
    colors = table[mask]
    tinted = (0.4 * image + 0.6 * colors).astype(np.uint8)
    return np.where(colors.any(-1, keepdims=True), tinted, image)


def draw_masks(
    axes: "Axes", image: "Tensor", predicted: "Tensor", target: "Tensor", classes: Sequence[str]
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
