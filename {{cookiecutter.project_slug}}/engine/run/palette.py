"""Colours of classes."""

from collections.abc import Sequence

import numpy as np

PALETTE = np.array(  # of the classes in images; class 0 is not tinted
    [[0, 0, 0], [230, 60, 40], [60, 140, 240], [250, 200, 40], [70, 190, 90], [180, 80, 200]],
    dtype=np.uint8,
)


class Classes(list[str]):
    """The class names, with `colors`, uint8 (classes, 3), if the user has chosen them."""

    def __init__(self, names: Sequence[str], colors: Sequence[Sequence[int]] | None = None) -> None:
        super().__init__(names)
        self.colors = np.array(colors, dtype=np.uint8) if colors else None


def colors_of(classes: Sequence[str]) -> np.ndarray:
    """Return the colours of the classes, uint8 (classes, 3): the user's, or those of PALETTE."""
    chosen = getattr(classes, "colors", None)
    return PALETTE[np.arange(len(classes)) % len(PALETTE)] if chosen is None else chosen
