"""Masks: from the values or colours in their files to class numbers, as DIR/classes.txt says.

Its lines are NAME, NAME = VALUE or NAME = R G B, in the order of the class numbers, and # begins a
comment. A line with the name "void" and a value or colour is no class: such pixels count neither in
loss nor in metrics.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from engine.data import images
from engine.data.format import DEFAULT_FORMAT, Format
from engine.errors import UserError, shorten
from engine.run.palette import VOID, Classes

JPEG = ("JPEG", "MPO")  # as Pillow calls them, whatever the files' names are
BLOCK = 8  # pixels; JPEG compresses squares of this side
LEAST_GAP = 64  # between two values that are told apart in a JPEG
KINDS = {0: "NAME", 1: "NAME = VALUE", 3: "NAME = R G B"}  # lines by how many numbers they have
LINE = re.compile(r"([^=]*[^=\s])(?:\s*=\s*(-?\d{1,9}|\d{1,3}[\s,]+\d{1,3}[\s,]+\d{1,3}))?")
NUMBERED = r"\d+[\s:;,.)]+\D.*|.*\D\s*[:;,\t]\s*\d+"  # which would be taken as a name alone
Keys = dict[tuple[int, ...], int]  # class number or VOID, by (value,) or (red, green, blue)


class Table:
    """Class numbers by values, or by colours as `pack` returns them."""

    def __init__(self, numbers: dict[int, int]) -> None:
        self.keys = np.array(sorted(numbers))
        self.numbers = np.array([numbers[key] for key in sorted(numbers)], np.uint8)

    def look_up(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the class numbers of `keys` (H, W), uint8, and those of `keys` that have none."""
        if keys.dtype == np.uint8:
            numbers, is_unknown = (translate(keys, table) for table in self.find(np.arange(256)))
            return numbers, keys[is_unknown]
        flat = keys.ravel()
        # Masks consist of areas: in each row, only the first of a run of equal keys is looked up.
        starts = np.append(0, np.flatnonzero(flat[1:] != flat[:-1]) + 1)
        lengths = np.diff(starts, append=len(flat))
        numbers, is_unknown = self.find(flat[starts])
        unknown = np.repeat(flat[starts][is_unknown], lengths[is_unknown])
        return np.repeat(numbers, lengths).reshape(keys.shape), unknown

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the class numbers of `keys`, uint8, and which have none, bool."""
        places = np.searchsorted(self.keys[:-1], keys)
        return self.numbers[places], self.keys[places] != keys


def translate(pixels: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return `table`[`pixels`] of uint8 pixels and 256 values of one byte, ten times as fast."""
    data = pixels.tobytes().translate(table.tobytes())
    return np.frombuffer(data, table.dtype).reshape(pixels.shape)


def pack(colors: np.ndarray) -> np.ndarray:
    """Return colours, uint8 (..., 3), as red + 2^8 green + 2^16 blue, uint32 (...)."""
    packed = np.zeros((*colors.shape[:-1], 4), np.uint8)
    packed[..., :3] = colors
    return packed.view("<u4")[..., 0]


def unpack(color: int) -> str:
    """Return what `pack` returned as text, R G B."""
    return f"{color & 255} {color >> 8 & 255} {color >> 16}"


class Labels(Classes):
    """The class names, and what stands for them in the files of masks.

    lines: those of classes.txt, which prepare_data.py stores. kind: a key of KINDS.
    """

    def __init__(self, names: Sequence[str], lines: Sequence[str], kind: int, keys: Keys) -> None:
        has_colors = kind == 3
        color_of = {number: key for key, number in keys.items()}
        super().__init__(names, [color_of[n] for n in range(len(names))] if has_colors else None)
        self.lines = list(lines)
        self.kind = kind
        self.listed = sorted(value for (value,) in keys) if kind == 1 else []
        own = {(number,): number for number in range(len(names))}  # of masks without colours
        values = {value: number for (value,), number in (own if has_colors else keys).items()}
        self.values = Table({VOID: VOID, **values})
        colors = pack(np.array([*keys], np.uint8)).tolist() if has_colors else []
        self.colored = Table(dict(zip(colors, keys.values(), strict=False)))


UNNAMED = Labels([], [], 0, {(number,): number for number in range(VOID)})  # without classes.txt


def read_classes(path: Path) -> Labels:
    """Return what the file at `path` says; UNNAMED without it."""
    if not path.is_file():
        return UNNAMED
    try:
        return parse(path.read_text(encoding="utf-8-sig").splitlines(), path)
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8; save it as UTF-8") from None


def parse(lines: Sequence[str], path: Path) -> Labels:
    """Return what the lines of the classes.txt at `path` say; a UserError names a wrong line."""
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in lines]
    rows = [(row, *split(line, path, row)) for row, line in enumerate(lines, 1) if line]
    kind = next((len(value) for _, name, value in rows if not is_void(name, value)), 0)
    names: list[str] = []
    keys: Keys = {}
    for row, name, value in rows:
        void = is_void(name, value)
        if len(value) != (max(kind, 1) if void else kind):
            reason = f"{KINDS[len(value)]} after {KINDS[kind]}; write all lines in one way"
        elif name in names:
            reason = f"{name} comes twice; names must be unique"
        elif (key := value or (len(names),)) in keys:
            reason = f"{' '.join(map(str, key))} comes twice; it can stand for one class only"
        else:
            keys[key] = VOID if void else len(names)
            names += [] if void else [name]
            continue
        raise UserError(f"{path}, line {row}: {reason}")
    if not 2 <= len(names) <= VOID:
        raise UserError(f"{path}: {len(names)} classes; needs 2 to {VOID}, one per line")
    if not kind and all(re.fullmatch(NUMBERED, name) for name in names):
        forms = ", ".join(KINDS.values())
        raise UserError(f"{path}: {names[0]} is a name and a number; lines must be one of {forms}")
    return Labels(names, list(filter(None, lines)), kind, keys)


def split(line: str, path: Path, row: int) -> tuple[str, tuple[int, ...]]:
    """Return the name and the numbers in a line."""
    match = LINE.fullmatch(line.strip())
    value = tuple(map(int, re.findall(r"-?\d+", match[2] or ""))) if match else ()
    if not match or (len(value) == 3 and max(value) > 255):
        forms = ", ".join(KINDS.values())
        raise UserError(f"{path}, line {row}: expected one of {forms}, with colours of 0 to 255")
    return match[1], value


def is_void(name: str, value: tuple[int, ...]) -> bool:
    return bool(value) and name.lower() == "void"


def read_mask(path: str, labels: Labels, format: Format = DEFAULT_FORMAT) -> np.ndarray:
    """Return the mask at `path` as class numbers or VOID, uint8 (H, W)."""
    image = images.read_image(path, None, format)
    if image.format in JPEG or image.info.get("compression") == "jpeg":  # the latter in a TIFF
        pixels = undo_jpeg(path, image, labels)
    else:
        if image.mode == "1" and VOID in labels.listed:  # 1 is white, as 255 is
            image = image.convert("L")
        if image.mode == "P" and labels.kind == 3:  # else a palette's numbers, not its colours
            image = image.convert("RGBA" if "transparency" in image.info else "RGB")
        pixels = drop_alpha(path, np.array(image), image.mode)
    if pixels.ndim == 2:
        numbers, unknown = labels.values.look_up(pixels)
    elif labels.kind == 3:
        pixels = pack(pixels)
        numbers, unknown = labels.colored.look_up(pixels)
    else:
        lines = [f"NAME = {unpack(color)}" for color in np.unique(pack(pixels))]
        raise UserError(
            f"{path}: a mask with 3 channels; save class numbers in one channel, or write what the "
            f"colours mean into classes.txt ({shorten(lines)})"
        )
    if len(unknown):
        raise UserError(f"{path}: {describe(unknown, labels)}")
    return numbers


def drop_alpha(path: str, pixels: np.ndarray, mode: str) -> np.ndarray:
    """Return (H, W) or (H, W, 3) of `pixels`, which are of an image of that mode of Pillow."""
    if mode not in ("LA", "RGB", "RGBA") and pixels.ndim > 2:
        raise UserError(f"{path}: a mask of mode {mode}; save it in grey or RGB")
    if mode not in ("LA", "RGBA"):
        return pixels
    if (pixels[..., -1] < 255).any():
        raise UserError(f"{path}: a mask with transparent pixels; save it without transparency")
    return pixels[..., 0] if mode == "LA" else pixels[..., :3]


def undo_jpeg(path: str, image: Image.Image, labels: Labels) -> np.ndarray:
    """Return the nearest of the two values that the classes have for each pixel, (H, W).

    JPEG changes values near edges. Of two that are far apart, the nearest is the one that was
    meant; among more, an edge between the lowest and the highest would pass through the others.
    """
    low, high = labels.listed if len(labels.listed) == 2 else (0, 0)
    if high - low < LEAST_GAP:
        raise UserError(
            f"{path}: JPEG has changed the values of this mask; save masks as PNG, or, if they "
            "have two values, write those into classes.txt, such as 'background = 0' and "
            "'object = 255'"
        )
    pixels = np.array(image.convert("L")).astype(np.int16)
    nearest = np.where(2 * pixels > low + high, high, low)
    is_far = 4 * abs(pixels - nearest) > high - low
    height, width = (length - length % BLOCK for length in is_far.shape)
    blocks = is_far[:height, :width].reshape(height // BLOCK, BLOCK, width // BLOCK, BLOCK)
    if (flat := blocks.all(axis=(1, 3))).any():
        row, column = np.argwhere(flat)[0] * BLOCK
        raise UserError(
            f"{path}: value {pixels[row, column]} in a JPEG mask, at row {row}, column {column}, "
            f"is neither near {low} nor near {high}; save masks as PNG"
        )
    return nearest


def describe(unknown: np.ndarray, labels: Labels) -> str:
    """Name the most frequent of the unknown values or colours, and the remedy."""
    values, counts = np.unique(unknown, return_counts=True)
    value, count = values[counts.argmax()], counts.max()
    if labels.kind == 3 and unknown.dtype == np.uint32:  # of `pack`
        key = unpack(value)
        return (
            f"colour {key} in {count} pixels is not in classes.txt; correct the mask, or add a "
            f"line 'NAME = {key}' or 'void = {key}'"
        )
    if not labels:
        return f"value {value:g} is no class number; write classes.txt with lines NAME = VALUE"
    if labels.kind == 1:
        return (
            f"value {value:g} in {count} pixels is not in classes.txt; correct the mask, or add a "
            f"line 'NAME = {value:g}' or 'void = {value:g}'"
        )
    remedy = f", or write what values mean into classes.txt, such as '{labels[-1]} = {value:g}'"
    return (
        f"label {value:g} in {count} pixels, but the classes are 0 to {len(labels) - 1} ({VOID} is "
        f"void); correct the mask" + ("" if labels.kind else remedy)
    )


def explain_lack(labels: Labels, found: list[int], total: int, has_void: bool) -> str:
    """Say that all masks have one class, or none."""
    only = f"class {found[0]} and nothing else" if found else "no class"
    line = f"all {total} training masks hold {only}"
    if not has_void:
        return f"{line}; at least two classes are needed"
    if labels.kind:
        return f"{line} but void; correct classes.txt ({VOID} is void, unless it is listed there)"
    example = f"'{labels[0]} = 0' and '{labels[-1]} = {VOID}'" if labels else f"'NAME = {VOID}'"
    return (
        f"{line} ({VOID} is void, not a class); if {VOID} is meant as a class, write what each "
        f"value means into classes.txt, such as {example}"
    )
