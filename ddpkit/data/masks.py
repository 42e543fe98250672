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

from ddpkit.data import images
from ddpkit.data.format import DEFAULT_FORMAT, Format
from ddpkit.errors import UserError, shorten
from ddpkit.run.pictures import VOID, Classes

FORMS = "NAME, NAME = VALUE, or NAME = R G B with colours of 0 to 255"
LINE = re.compile(r"([^=]*[^=\s])(?:\s*=\s*(-?\d{1,9}|\d{1,3}[\s,]+\d{1,3}[\s,]+\d{1,3}))?")


class Labels(Classes):
    """The class names, and what stands for them in masks, as the lines of classes.txt say.

    kind: how many numbers each line has. values, colored: class number or VOID, by value, and by
    the four bytes of a colour, RGBA.
    """

    def __init__(self, names: Sequence[str], kind: int, keys: dict[tuple, int]) -> None:
        colors = {number: key for key, number in keys.items() if number != VOID}
        super().__init__(names, [*colors.values()] if kind == 3 else None)
        self.kind = kind
        own = {(number,): number for number in range(len(names))}  # of masks without colours
        values = {key[0]: number for key, number in (own if kind == 3 else keys).items()}
        self.values = {VOID: VOID, **values}
        colored = keys if kind == 3 else {}
        keys_of = {int.from_bytes((*c, 255), "little"): n for c, n in colored.items()}
        self.colored = {-1: VOID, **keys_of}  # never empty


UNNAMED = Labels([], 0, {(number,): number for number in range(VOID)})  # without classes.txt


def read_classes(path: Path) -> Labels:
    """Return what the file at `path` says; UNNAMED without it."""
    if not path.is_file():
        return UNNAMED
    return parse(path.read_text(encoding="utf-8-sig", errors="replace").splitlines(), path)


def parse(lines: Sequence[str], path: Path) -> Labels:
    """Return what the lines of the classes.txt at `path` say; a UserError names a wrong line."""
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in lines]
    rows: list[tuple[str, tuple[int, ...], bool]] = []
    for row, line in enumerate(lines, 1):
        match = LINE.fullmatch(line)
        key = tuple(map(int, re.findall(r"-?\d+", match[2] or ""))) if match else ()
        if line and (not match or (len(key) == 3 and max(key) > 255)):
            raise UserError(f"{path}, line {row}: expected one of {FORMS}")
        if match:
            rows.append((match[1], key, bool(key) and match[1].lower() == "void"))
    kind = next((len(key) for _, key, is_void in rows if not is_void), 0)
    names: list[str] = []
    keys: dict[tuple, int] = {}
    for name, given, is_void in rows:
        key = given or (len(names),)
        if len(given) != (max(kind, 1) if is_void else kind):
            raise UserError(f"{path}: {name}: write all lines in one way: {FORMS}")
        if name in names or key in keys:
            raise UserError(f"{path}: {name}: its name or its value comes twice")
        keys[key] = VOID if is_void else len(names)
        names += [] if is_void else [name]
    if not 2 <= len(names) <= VOID:
        raise UserError(f"{path}: {len(names)} classes; needs 2 to {VOID}, one per line")
    return Labels(names, kind, keys)


def read_mask(path: str, labels: Labels, format: Format = DEFAULT_FORMAT) -> np.ndarray:
    """Return the mask at `path` as class numbers or VOID, uint8 (H, W)."""
    image, numbers = images.read_stored(path, format), labels.values
    if image.format in ("JPEG", "MPO") or image.info.get("compression") == "jpeg":  # or in a TIFF
        raise UserError(f"{path}: JPEG has changed the values of this mask; save masks as PNG")
    if image.mode == "P" and labels.kind == 3:  # else a palette's numbers, not its colours
        image = image.convert("RGBA")
    if image.mode in ("LA", "RGBA") and image.getchannel("A").getextrema()[0] != 255:
        raise UserError(f"{path}: a mask with transparent pixels; save it without transparency")
    is_colored = image.mode in ("RGB", "RGBA")
    if is_colored:
        keys, numbers = np.array(image.convert("RGBA")).view("<u4")[..., 0], labels.colored
    else:
        keys = np.array(image.convert("L") if image.mode == "LA" else image)
    if keys.ndim > 2:
        raise UserError(f"{path}: a mask of mode {image.mode}; save it in grey or RGB")
    found, unknown = _look_up(numbers, keys)
    if unknown:
        count, key = max((count, key) for key, count in unknown.items())
        text = " ".join(map(str, key.to_bytes(4, "little")[:3])) if is_colored else f"{key:g}"
        raise UserError(
            f"{path}: {'colour' if is_colored else 'value'} {text} in {count} pixels is no class; "
            f"correct the mask, or write into classes.txt: NAME = {text} or void = {text}"
        )
    return found


def _look_up(numbers: dict[int, int], keys: np.ndarray) -> tuple[np.ndarray, dict[int, int]]:
    """Return the class numbers of `keys`, uint8 (H, W); how many pixels have each unknown key."""
    if keys.dtype == np.uint8:  # Pillow takes a fifth of numpy's time
        image = Image.fromarray(keys)
        counts = {n: count for n, count in enumerate(image.histogram()) if count}
        unknown = {key: count for key, count in counts.items() if key not in numbers}
        return np.array(image.point([numbers.get(key, VOID) for key in range(256)])), unknown
    known = np.array(sorted(numbers))
    places = np.searchsorted(known, keys).clip(max=len(known) - 1)
    found = np.array([numbers[key] for key in known.tolist()], np.uint8)[places]
    others = np.unique(keys[known[places] != keys], return_counts=True)
    return found, dict(zip(*(each.tolist() for each in others), strict=True))


def explain_values(values: list[int], has_names: bool) -> str:
    """Return what is wrong with the values of all training masks, or nothing."""
    found = [value for value in values if value != VOID]
    if len(found) > 1 and (has_names or found[-1] < len(found)):
        return ""
    return (
        f"the training masks hold {shorten([*map(str, values)])} ({VOID} is void), not two classes "
        "or more, numbered from 0 without a gap; write what all values mean into classes.txt, one "
        f"class per line: {shorten([f'NAME = {value}' for value in values])}"
    )
