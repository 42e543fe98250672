"""Masks: from the values or colours in their files to class numbers, as DIR/classes.txt says.

Its lines are NAME, NAME = VALUE or NAME = R G B, in the order of the class numbers, and # begins a
comment. A line with the name "void" and a value or colour is no class: such pixels count neither in
loss nor in metrics.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.data import images
from engine.data.format import DEFAULT_FORMAT, Format
from engine.errors import UserError, shorten
from engine.run.pictures import VOID, Classes

JPEG = ("JPEG", "MPO")  # as Pillow calls them, whatever the files' names are
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
        if keys.dtype == np.uint8:  # bytes.translate is ten times as fast as indexing
            tables, data = self.find(np.arange(256)), keys.tobytes()
            numbers, is_unknown = (
                np.frombuffer(data.translate(table.tobytes()), table.dtype).reshape(keys.shape)
                for table in tables
            )
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


def pack(colors: np.ndarray) -> np.ndarray:
    """Return colours, uint8 (..., 3), as red + 2^8 green + 2^16 blue, uint32 (...)."""
    packed = np.zeros((*colors.shape[:-1], 4), np.uint8)
    packed[..., :3] = colors
    return packed.view("<u4")[..., 0]


def unpack(color: int) -> str:
    """Return what `pack` returned as text, R G B."""
    return f"{color & 255} {color >> 8 & 255} {color >> 16}"


class Labels(Classes):
    """The class names, and what stands for them in masks, as the lines of classes.txt say."""

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
    forms, rows = ", ".join(KINDS.values()), []
    for row, line in enumerate(lines, 1):
        match = LINE.fullmatch(line)
        value = tuple(map(int, re.findall(r"-?\d+", match[2] or ""))) if match else ()
        if line and (not match or (len(value) == 3 and max(value) > 255)):
            line = f"{path}, line {row}: expected one of {forms}, with colours of 0 to 255"
            raise UserError(line)
        if match:
            rows.append((row, match[1], value, bool(value) and match[1].lower() == "void"))
    kind = next((len(value) for *_, value, is_void in rows if not is_void), 0)
    names: list[str] = []
    keys: Keys = {}
    for row, name, value, is_void in rows:
        key = value or (len(names),)
        if len(value) != (max(kind, 1) if is_void else kind):
            reason = f"{KINDS[len(value)]} after {KINDS[kind]}; write all lines in one way"
        elif name in names or key in keys:
            twice = name if name in names else " ".join(map(str, key))
            reason = f"{twice} comes twice; each line needs its own"
        else:
            keys[key] = VOID if is_void else len(names)
            names += [] if is_void else [name]
            continue
        raise UserError(f"{path}, line {row}: {reason}")
    if not 2 <= len(names) <= VOID:
        raise UserError(f"{path}: {len(names)} classes; needs 2 to {VOID}, one per line")
    if not kind and all(re.fullmatch(NUMBERED, name) for name in names):
        raise UserError(f"{path}: {names[0]} is a name and a number; lines must be one of {forms}")
    return Labels(names, list(filter(None, lines)), kind, keys)


def read_mask(path: str, labels: Labels, format: Format = DEFAULT_FORMAT) -> np.ndarray:
    """Return the mask at `path` as class numbers or VOID, uint8 (H, W)."""
    image = images.read_image(path, None, format)
    if image.format in JPEG or image.info.get("compression") == "jpeg":  # the latter in a TIFF
        raise UserError(f"{path}: JPEG has changed the values of this mask; save masks as PNG")
    if image.mode == "1" and VOID in labels.listed:  # 1 is white, as 255 is
        image = image.convert("L")
    if image.mode == "P" and labels.kind == 3:  # else a palette's numbers, not its colours
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")
    pixels = np.array(image)
    if image.mode not in ("LA", "RGB", "RGBA") and pixels.ndim > 2:
        raise UserError(f"{path}: a mask of mode {image.mode}; save it in grey or RGB")
    if image.mode in ("LA", "RGBA"):
        if (pixels[..., -1] < 255).any():
            raise UserError(f"{path}: a mask with transparent pixels; save it without transparency")
        pixels = pixels[..., 0] if image.mode == "LA" else pixels[..., :3]
    keys = pixels if pixels.ndim == 2 else pack(pixels)
    if pixels.ndim == 3 and labels.kind != 3:
        lines = [f"NAME = {unpack(color)}" for color in np.unique(keys)]
        raise UserError(
            f"{path}: a mask with 3 channels; save class numbers in one channel, or write what the "
            f"colours mean into classes.txt ({shorten(lines)})"
        )
    table = labels.values if pixels.ndim == 2 else labels.colored
    numbers, unknown = table.look_up(keys)
    if len(unknown):
        found, counts = np.unique(unknown, return_counts=True)
        key = found[counts.argmax()]
        what = f"value {key:g}" if pixels.ndim == 2 else f"colour {unpack(key)}"
        own = f" (the classes are 0 to {len(labels) - 1})" if labels and not labels.kind else ""
        key = what.split(" ", 1)[1]
        raise UserError(
            f"{path}: {what} in {counts.max()} pixels is no class{own}; correct the mask, or write "
            f"what it means into classes.txt: NAME = {key} or void = {key}"
        )
    return numbers


def explain_lack(labels: Labels, found: list[int], total: int, has_void: bool) -> str:
    """Say that all masks have one class, or none."""
    only = f"class {found[0]} and nothing else" if found else "no class"
    line = f"all {total} training masks hold {only}; at least two classes are needed"
    if not has_void:
        return line
    remedy = "correct classes.txt" if labels.kind else "write what values mean into classes.txt"
    return f"{line} ({VOID} is void; if it is a class, {remedy}: 'NAME = {VOID}')"
