"""Outlines and runs to masks.

A pixel belongs to an outline if its centre lies inside. Of objects that overlap the larger ones are
drawn first, so that the smaller ones lie over them.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ddpkit.convert.labels import LeftOut, Size, Skipped
from ddpkit.data.format import DEFAULT_FORMAT
from ddpkit.errors import UserError

CORNERS = 256  # of a circle
FURTHEST = 1e9  # pixels from the first one: larger numbers cannot be computed with
MOST_BITS = 60  # of a number in COCO's compressed form


@dataclass
class Area:
    """Pixels of an image: `inside`, bool (H, W), whose first one is at `top`, `left`."""

    top: int
    left: int
    inside: np.ndarray

    def view(self, pixels: np.ndarray) -> np.ndarray:
        """Return the view of an image's pixels that lies in the area."""
        height, width = self.inside.shape
        return pixels[self.top : self.top + height, self.left : self.left + width]


@dataclass
class Shape:
    """An object. cover: its outlines, each (points, 2), x and y in pixels; or an area.

    label: a class number or VOID. where: file and object, for messages. order: those of a higher
    one lie above.
    """

    label: int
    where: str
    cover: Sequence[np.ndarray] | Area
    order: float = 0


Shapes = Iterable[Shape | LeftOut]  # of an image


def draw_shapes(shapes: Shapes, size: Size, skipped: Skipped) -> np.ndarray:
    """Return the mask of all objects, uint8 (H, W), 0 where there is none."""
    mask = np.zeros(size, np.uint8)
    drawn = []
    for shape in shapes:
        if isinstance(shape, LeftOut):
            skipped.leave_out(*shape)
            continue
        area = shape.cover
        if not isinstance(area, Area):
            outlines = [points for points in area if len(points) > 2]
            for _ in range(len(area) - len(outlines)):
                skipped.leave_out("outlines of fewer than 3 points", shape.where)
            if not outlines:
                continue
            area = fill_outlines(outlines, size)
        if min(area.top, area.left) < 0 or area.view(mask).shape != area.inside.shape:
            raise UserError(
                f"{shape.where}: it reaches beyond the image; draw it, or export it again"
            )
        pixels = int(area.inside.sum())
        if pixels:
            drawn.append((shape.order, -pixels, shape.label, area))
        else:
            skipped.leave_out("objects that cover no pixel", shape.where)
    # of one order and size, those that come later lie above
    for _, _, label, area in sorted(drawn, key=lambda each: each[:2]):
        area.view(mask)[area.inside] = label
    return mask


def fill_outlines(outlines: Sequence[np.ndarray], size: Size) -> Area:
    """Return the pixels that lie in any of the outlines."""
    areas = [fill_outline(points, size) for points in outlines]
    if len(areas) == 1:
        return areas[0]
    whole = np.zeros(size, bool)
    for area in areas:
        area.view(whole)[area.inside] = True
    return Area(0, 0, whole)


def fill_outline(points: np.ndarray, size: Size) -> Area:
    """Return the pixels whose centres lie in an outline; where it crosses itself, by even and odd.

    points: float (points, 2), x and y.
    """
    # what of it lies in the image
    left, top = np.floor(points.min(0)).clip(0, size[::-1]).astype(int)
    right, bottom = np.ceil(points.max(0)).clip(0, size[::-1]).astype(int)
    ends = np.roll(points, -1, axis=0)
    # of each edge the rows whose centres it passes
    low = np.ceil(np.minimum(points[:, 1], ends[:, 1]) - 0.5)
    high = np.ceil(np.maximum(points[:, 1], ends[:, 1]) - 0.5)
    first = low.clip(top, bottom).astype(int)
    counts = high.clip(top, bottom).astype(int) - first
    edges = np.repeat(np.arange(len(points)), counts)
    rows = np.arange(len(edges)) + np.repeat(first - np.cumsum(counts) + counts, counts)
    x, y = points[edges].T
    end_x, end_y = ends[edges].T
    # and the column there: from it on, it is inside, or outside again
    at = x + (rows + 0.5 - y) * ((end_x - x) / (end_y - y))
    columns = np.ceil(at - 0.5).clip(left, right).astype(int)
    shape = (int(bottom - top), int(right - left + 1))
    slots = (rows - top) * shape[1] + columns - left
    passes = np.bincount(slots, minlength=shape[0] * shape[1]).reshape(shape) % 2 == 1
    inside = np.logical_xor.accumulate(passes, axis=1)[:, :-1]
    return Area(int(top), int(left), inside)


def to_points(values: object, where: str) -> np.ndarray:
    """Return x, y, x, y, ... as float (points, 2); a UserError if they are none."""
    try:
        flat = np.array(values, np.float64).reshape(-1)
        points = flat.reshape(-1, 2)
    except (ValueError, TypeError, OverflowError):
        points = np.full((1, 2), np.nan)
    if not (abs(points) < FURTHEST).all():  # also of NaN
        raise UserError(
            f"{where}: its outline is not a list of x, y, x, y, ...; repair or remove it"
        )
    return points


def numbers_of(get: Callable, where: str, *names: str) -> list[float]:
    """Return what `get` has of these names, an even count; a UserError if one is none."""
    return to_points([get(name) for name in names], where).reshape(-1).tolist()


def box_outline(left: float, top: float, right: float, bottom: float) -> np.ndarray:
    return np.array([[left, top], [right, top], [right, bottom], [left, bottom]])


def oval(center: Sequence[float], radius: Sequence[float]) -> np.ndarray:
    """Return the outline of a circle or an ellipse whose axes are upright."""
    angles = np.linspace(0, 2 * math.pi, CORNERS, endpoint=False)
    return np.stack([np.cos(angles), np.sin(angles)], 1) * radius + center


def fill_counts(
    counts: Iterable[int | str], size: Size, where: str, by_columns: bool = True
) -> np.ndarray:
    """Return bool (H, W) of the lengths of runs, in turn outside and inside.

    by_columns: whether they go down the columns, as COCO's do, or along the rows.
    """
    height, width = size
    DEFAULT_FORMAT.check_size(where, (width, height))
    try:
        lengths = np.array([int(count) for count in counts], np.int64)
    except (ValueError, TypeError, OverflowError):
        raise UserError(
            f"{where}: its runs (RLE) are not integers; export it again"
        ) from None
    if (lengths < 0).any() or lengths.sum() != height * width:
        raise UserError(
            f"{where}: its runs (RLE) have {lengths.sum()} pixels, not the {width} x {height} of "
            "the image; export it again"
        )
    values = np.arange(len(lengths)) % 2 == 1
    return np.repeat(values, lengths).reshape(size, order="F" if by_columns else "C")


def unpack_counts(text: str, where: str) -> list[int]:
    """Return the lengths of runs in COCO's compressed form.

    Each letter has 5 bits of a number, the lowest first, and a bit that says whether more follow;
    from the fourth number on it is the difference from the one before the last.
    """
    counts: list[int] = []
    value = 0
    shift = 0
    for letter in text:
        code = ord(letter) - 48
        if not 0 <= code < 64 or shift > MOST_BITS:
            raise UserError(
                f"{where}: {letter!r} is not a letter of runs (RLE); export it again"
            )
        value |= (code & 31) << shift
        shift += 5
        if code & 32:  # more follow
            continue
        if code & 16:  # negative
            value -= 1 << shift
        if len(counts) > 2:
            value += counts[-2]
        counts.append(value)
        value = 0
        shift = 0
    return counts


def fill_pairs(
    text: str, size: Size, where: str, by_columns: bool = True
) -> np.ndarray:
    """Return bool (H, W) of Kaggle's runs: START LENGTH START LENGTH ..., of which 1 is the first.

    They go down the columns, unless `by_columns` is false.
    """
    height, width = size
    inside = np.zeros(height * width, bool)
    try:
        numbers = np.array([int(float(word)) for word in text.split()], np.int64)
        pairs = numbers.reshape(-1, 2).tolist()
    except (ValueError, OverflowError):
        raise UserError(
            f"{where}: its runs (RLE) are not pairs of START LENGTH; repair or remove the row"
        ) from None
    end = 0
    for start, length in pairs:
        if start < 1 or length < 0 or start - 1 + length > len(inside):
            raise UserError(
                f"{where}: the run {start} {length} (RLE) does not fit into the {width} x "
                f"{height} pixels of the image; is it of another size?"
            )
        if start <= end:
            raise UserError(
                f"{where}: the starts of its runs (RLE) do not rise, or runs overlap; if they "
                "count from the end of the run before, as SIIM-ACR's do, add them up"
            )
        end = start - 1 + length
        inside[start - 1 : end] = True
    return inside.reshape(size, order="F" if by_columns else "C")


def turned(points: np.ndarray, degrees: float) -> np.ndarray:
    """Return an outline, clockwise by that much about its middle."""
    angle = math.radians(degrees)
    middle = points.mean(0)
    turn = [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]
    return (points - middle) @ np.array(turn) + middle
