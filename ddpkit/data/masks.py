"""Masks: from the values or colours in their files to class numbers, as DIR/classes.txt says.

Its lines are NAME, NAME = VALUE or NAME = R G B, in the order of the class numbers, and # begins a
comment. A line with the name "void" and a value or colour is no class: such pixels count neither in
loss nor in metrics.

With colours a pixel means what it shows, however its file stores it. Without, a grey pixel means
its value, and a coloured palette the number of its entry. Masks of one set have to agree.
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

# by what a mask shows: what it means, and in which file
Meant = dict[str, tuple[str, str]]
BLACK_WHITE = "black and white"
OF_8_BITS = ("1", "L", "LA", "RGBA")
MANY = 8  # values that no line of classes.txt has, as smoothed edges have
FORMS = "NAME, NAME = VALUE, or NAME = R G B with colours of 0 to 255"
LINE = re.compile(
    r"([^=]*[^=\s])(?:\s*=\s*(-?\d{1,9}|\d{1,3}[\s,]+\d{1,3}[\s,]+\d{1,3}))?"
)


class Labels(Classes):
    """The class names, and what stands for them in masks, as the lines of classes.txt say.

    kind: how many numbers each line has. values, colored: class number or VOID, by grey value, and
    by the four bytes of a colour, RGBA. has_greys: whether grey values are listed colours.
    white: the value of white in masks that are stored in black and white.
    meant: what the masks that were read mean.
    """

    def __init__(self, names: Sequence[str], kind: int, keys: dict[tuple, int]) -> None:
        colors = {number: key for key, number in keys.items() if number != VOID}
        super().__init__(names, [*colors.values()] if kind == 3 else None)
        self.kind = kind
        greys = {key[0]: n for key, n in keys.items() if kind == 3 and len({*key}) == 1}
        # nothing else can be meant by grey
        own = {number: number for number in range(len(names))}
        listed = own if kind == 3 else {key[0]: number for key, number in keys.items()}
        self.values = greys or {VOID: VOID, **listed}
        self.has_greys = bool(greys)
        self.white = 255 if greys or self.values[VOID] != VOID else 1
        self.meant: Meant = {}
        colored = keys if kind == 3 else {}
        keys_of = {int.from_bytes((*c, 255), "little"): n for c, n in colored.items()}
        self.colored = {-1: VOID, **keys_of}  # never empty


def unnamed() -> Labels:
    """Return what masks mean without classes.txt."""
    return Labels([], 0, {(number,): number for number in range(VOID)})


def read_classes(path: Path) -> Labels:
    """Return what the file at `path` says."""
    if not path.is_file():
        return unnamed()
    return parse(
        path.read_text(encoding="utf-8-sig", errors="replace").splitlines(), path
    )


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
        raise UserError(
            f"{path}: {len(names)} classes; needs 2 to {VOID}, one per line"
        )
    return Labels(names, kind, keys)


def read_mask(path: str, labels: Labels, format: Format = DEFAULT_FORMAT) -> np.ndarray:
    """Return the mask at `path` as class numbers or VOID, uint8 (H, W)."""
    image, numbers = images.read_stored(path, format), labels.values
    # or in a TIFF
    if image.format in ("JPEG", "MPO") or image.info.get("compression") == "jpeg":
        raise UserError(
            f"{path}: JPEG has changed the values of this mask; save masks as PNG"
        )
    if image.mode == "RGB" or (image.mode == "P" and labels.kind == 3):
        image = image.convert("RGBA")  # transparent where the file says so of a colour
    if image.mode in ("LA", "RGBA") and image.getchannel("A").getextrema()[0] != 255:
        raise UserError(
            f"{path}: a mask with transparent pixels; save it without transparency"
        )
    if image.mode == "RGBA":
        keys, numbers = np.array(image).view("<u4")[..., 0], labels.colored
        # then grey means one, too
        meant = {} if labels.has_greys else {"a mask": "colours"}
    else:
        keys, meant = _read_grey(image, labels)
    if keys.ndim > 2 or (labels.has_greys and image.mode not in OF_8_BITS):
        raise UserError(
            f"{path}: a mask of mode {image.mode}; save it in RGB, or grey of 8 bits"
        )
    found, counts = _look_up(numbers, keys)
    unknown = {key: count for key, count in counts.items() if key not in numbers}
    if unknown:
        raise UserError(
            f"{path}: {_explain_unknown(unknown, image.mode == 'RGBA', labels)}"
        )
    palette = _palette(image)
    if image.mode == "P" and _is_coloured(palette):
        meant |= {f"value {n}": "colour {} {} {}".format(*palette[n]) for n in counts}
    agree(labels.meant, {shown: (what, path) for shown, what in meant.items()})
    return found


def _read_grey(image: Image.Image, labels: Labels) -> tuple[np.ndarray, dict[str, str]]:
    """Return the values of a mask in grey, or a palette's numbers; what is meant by what it shows.

    The values are (H, W), of any type; of an image that is no mask (H, W, channels).
    """
    keys = np.array(image.getchannel("L") if image.mode == "LA" else image)
    meant = {"a mask": "numbers"} if labels.kind == 3 and not labels.has_greys else {}
    others = {} if labels.white == VOID else {BLACK_WHITE: "other numbers"}
    palette = _palette(image)
    is_coloured = image.mode == "P" and _is_coloured(palette)
    if image.mode == "1" or (image.mode == "P" and not is_coloured):
        keys = keys.astype(np.uint8)
        used = np.flatnonzero(Image.fromarray(keys).histogram())
        values = palette[:, 0]
        if {*values[used]} <= {0, VOID} and (values[used] != used).any():
            # Stored in two tones, which may be 0 and 1 as well as what they show.
            values = values.clip(max=labels.white)
            others = {BLACK_WHITE: "0 and 1"} if others else {}
        meant |= _greys(palette[used, 0], values[used])
        keys = values[keys]
    elif keys.dtype == np.uint8 and keys.ndim == 2:
        used = np.flatnonzero(Image.fromarray(keys).histogram())
        if is_coloured:
            # A palette that has a colour twice goes by numbers alone.
            once = [n for n in used if (palette == palette[n]).all(1).sum() == 1]
            shown = np.array([n for n in once if len({*palette[n]}) == 1], int)
            meant |= _greys(palette[shown, 0], shown)
        else:
            meant |= _greys(used, used)
    return keys, meant | (others if keys.any() else {})


def _greys(shown: np.ndarray, numbers: np.ndarray) -> dict[str, str]:
    """Return the number that each grey means which a mask shows, but for black: that may fill."""
    pairs = zip(shown.tolist(), numbers.tolist(), strict=True)
    return {f"grey {grey}": f"number {number}" for grey, number in pairs if grey}


def _palette(image: Image.Image) -> np.ndarray:
    """Return the colours of the values in an image of 1 bit or with a palette, uint8 (256, 3)."""
    colors = (
        (image.getpalette() or []) if image.mode == "P" else [0, 0, 0, 255, 255, 255]
    )
    palette = np.zeros((256, 3), np.uint8)
    palette.flat[: len(colors)] = colors
    return palette


def _is_coloured(palette: np.ndarray) -> bool:
    return bool((palette != palette[:, :1]).any())


def agree(known: Meant, found: Meant) -> None:
    """Add to what masks mean what another one means; a UserError if it contradicts them."""
    for shown, (meaning, path) in found.items():
        before, other = known.setdefault(shown, (meaning, path))
        if before != meaning:
            line = f"{path}: {shown} means {meaning}, but {before} in {other}"
            how = "save all masks in one way, or list their colours in classes.txt: NAME = R G B"
            raise UserError(f"{line}; {how}")


def _explain_unknown(unknown: dict[int, int], is_colored: bool, labels: Labels) -> str:
    """Return what to do about keys, with their numbers of pixels, that are no class."""
    count, key = max((count, key) for key, count in unknown.items())
    text = f"{key:g}"
    if is_colored:
        text = " ".join(map(str, key.to_bytes(4, "little")[:3]))
    elif labels.has_greys:
        text = f"{text} {text} {text}"
    kind = "colour" if " " in text else "value"
    line = f"{kind} {text} in {count} pixels is no class; correct the mask"
    if len(unknown) > MANY:
        others = (
            f"{len(unknown) - 1} more {kind}s are none, as in masks with smoothed edges"
        )
        return f"{line}: {others}"
    if not float(key).is_integer():
        return line
    return f"{line}, or write into classes.txt: NAME = {text} or void = {text}"


def _look_up(
    numbers: dict[int, int], keys: np.ndarray
) -> tuple[np.ndarray, dict[int, int]]:
    """Return the class numbers of `keys`, uint8 (H, W); how many pixels have each key.

    Of more than 8 bits only unknown keys are counted.
    """
    if keys.dtype == np.uint8:  # Pillow takes a fifth of numpy's time
        image = Image.fromarray(keys)
        counts = {n: count for n, count in enumerate(image.histogram()) if count}
        return np.array(
            image.point([numbers.get(key, VOID) for key in range(256)])
        ), counts
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
