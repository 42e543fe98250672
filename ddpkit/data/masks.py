"""Masks: from the values or colours in their files to class numbers, as DIR/classes.txt says.

Its lines are NAME, NAME = VALUE or NAME = R G B, in the order of the class numbers, and # begins a
comment. A class of several values or colours has a line for each. A line with the name "void" is no
class: pixels of its value or colour, or of its place if lines have names alone, count neither in
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

VOID = 255  # the class number of pixels without a label
# by what a mask shows: what it means, and in which file
Meant = dict[str, tuple[str, str]]
BLACK_WHITE = "black and white"
OF_8_BITS = ("1", "L", "LA", "RGBA")  # modes of Pillow, but for palettes
MANY = 8  # values that no line of classes.txt has, as smoothed edges have
FORMS = "NAME, NAME = VALUE, or NAME = R G B with colours of 0 to 255"
LINE = re.compile(
    r"([^=]*[^=\s])(?:\s*=\s*(-?\d{1,9}|\d{1,3}[\s,]+\d{1,3}[\s,]+\d{1,3}))?"
)


class Classes(list[str]):
    """The class names, with `colors`, uint8 (classes, 3), if the user has chosen them."""

    def __init__(
        self, names: Sequence[str], colors: Sequence[Sequence[int]] | None = None
    ) -> None:
        super().__init__(names)
        self.colors = np.array(colors, dtype=np.uint8) if colors else None


class Labels(Classes):
    """The class names, and what stands for them in masks, as the lines of classes.txt say.

    kind: how many numbers each line has. values, colored: class number or VOID, by grey value, and
    by the four bytes of a colour, RGBA. has_greys: whether grey values are listed colours.
    white: the value of white in masks that are stored in black and white.
    meant: what the masks that were read mean.
    """

    def __init__(self, names: Sequence[str], kind: int, keys: dict[tuple, int]) -> None:
        greys: dict[int, int] = {}
        self.colored = {-1: VOID}  # never empty, see `_look_up`
        if kind == 3:
            first: dict[int, tuple] = {}  # of a class with several colours
            for color, number in keys.items():
                first.setdefault(number, color)
            super().__init__(names, [first[number] for number in range(len(names))])
            for color, number in keys.items():
                opaque = bytes(color) + b"\xff"  # RGBA, as Pillow has it in memory
                self.colored[int.from_bytes(opaque, "little")] = number
                if len(set(color)) == 1:
                    greys[color[0]] = number
            # Without a listed grey a mask in grey can only mean the class numbers.
            values = {number: number for number in range(len(names))}
        else:
            super().__init__(names)
            values = {key[0]: number for key, number in keys.items()}
        self.kind = kind
        self.values = greys or {VOID: VOID, **values}
        self.has_greys = bool(greys)
        # which class number white stands for, unless classes.txt says what 255 means
        self.white = 255 if greys or self.values[VOID] != VOID else 1
        self.meant: Meant = {}


def unnamed() -> Labels:
    """Return what masks mean without classes.txt."""
    return Labels([], 0, {(number,): number for number in range(VOID)})


def read_classes(path: Path) -> Labels:
    """Return what the file at `path` says."""
    if not path.is_file():
        return unnamed()
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    return parse(text.splitlines(), path)


def parse(lines: Sequence[str], path: Path) -> Labels:
    """Return what the lines of the classes.txt at `path` say; a UserError names a wrong line."""
    rows: list[tuple[str, tuple[int, ...], bool]] = []
    for row, line in enumerate(lines, 1):
        line = re.sub(r"(^|\s)#.*", "", line).strip()  # a comment
        if not line:
            continue
        match = LINE.fullmatch(line)
        key = tuple(map(int, re.findall(r"-?\d+", match[2] or ""))) if match else ()
        if not match or (len(key) == 3 and max(key) > 255):
            raise UserError(f"{path}, line {row}: expected one of {FORMS}")
        rows.append((match[1], key, match[1].lower() == "void"))
    # The first class decides how many numbers each line has: 0, 1 or 3.
    kind = next((len(key) for _, key, is_void in rows if not is_void), 0)
    names: list[str] = []
    keys: dict[tuple, int] = {}
    place = 0  # among the lines with a name alone
    for name, given, is_void in rows:
        key = given or (place,)
        place += not given
        # beside names alone, void may have a value
        if len(given) != kind and not (is_void and kind == 0 and len(given) == 1):
            raise UserError(f"{path}: {name}: write all lines in one way: {FORMS}")
        if key in keys or (name in names and not given):
            raise UserError(f"{path}: {name}: its name or its value comes twice")
        if is_void:
            keys[key] = VOID  # no class
        elif name in names:  # one class may have several values
            keys[key] = names.index(name)
        else:
            keys[key] = len(names)
            names.append(name)
    if not 2 <= len(names) <= VOID:
        raise UserError(
            f"{path}: {len(names)} classes; needs 2 to {VOID}, one per line"
        )
    return Labels(names, kind, keys)


def read_mask(path: str, labels: Labels, format: Format = DEFAULT_FORMAT) -> np.ndarray:
    """Return the mask at `path` as class numbers or VOID, uint8 (H, W)."""
    image = images.read_stored(path, format)
    # a file of its own, or in a TIFF
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
        numbers = labels.colored
        keys = np.array(image).view("<u4")[..., 0]  # the four bytes as one number
        # If greys are listed, masks in grey mean colours, too: the two may be mixed.
        meant = {} if labels.has_greys else {"a mask": "colours"}
    else:
        numbers = labels.values
        keys, meant = _read_grey(image, labels)
    if keys.ndim > 2 or (labels.has_greys and image.mode not in OF_8_BITS):
        raise UserError(
            f"{path}: a mask of mode {image.mode}; save it in RGB, or grey of 8 bits"
        )
    # `counts` has the unknown keys in any case
    found, counts = _look_up(numbers, keys)
    unknown = {key: count for key, count in counts.items() if key not in numbers}
    if unknown:
        raise UserError(
            f"{path}: {_explain_unknown(unknown, image.mode == 'RGBA', labels)}"
        )
    palette = _palette(image)
    if image.mode == "P" and _is_coloured(palette):
        meant |= {f"value {n}": "colour {} {} {}".format(*palette[n]) for n in counts}
    add_meanings(labels.meant, {shown: (what, path) for shown, what in meant.items()})
    return found


def _read_grey(image: Image.Image, labels: Labels) -> tuple[np.ndarray, dict[str, str]]:
    """Return the values of a mask in grey, or a palette's numbers; what is meant by what it shows.

    The values are (H, W), of any type; of an image that is no mask (H, W, channels).
    """
    keys = np.array(image.getchannel("L") if image.mode == "LA" else image)
    meant: dict[str, str] = {}
    if labels.kind == 3 and not labels.has_greys:
        meant["a mask"] = "numbers"
    black_white = "other numbers"
    palette = _palette(image)
    is_coloured = image.mode == "P" and _is_coloured(palette)
    if keys.dtype == bool:
        keys = keys.astype(np.uint8)
    used = np.array([], int)
    if keys.dtype == np.uint8 and keys.ndim == 2:
        used = np.flatnonzero(Image.fromarray(keys).histogram())
    if image.mode == "1" or (image.mode == "P" and not is_coloured):
        # What counts is what it shows: an encoder numbers its greys as it likes.
        values = palette[:, 0]
        if set(values[used]) <= {0, VOID} and (values[used] != used).any():
            # Stored in two tones, which may be 0 and 1 as well as what they show.
            values = values.clip(max=labels.white)
            black_white = "0 and 1"
        meant |= _greys(palette[used, 0], values[used])
        keys = values[keys]
    elif is_coloured:
        # A palette that has a colour twice goes by numbers alone.
        once = [n for n in used if (palette == palette[n]).all(1).sum() == 1]
        used = np.array([n for n in once if len(set(palette[n])) == 1], int)
        meant |= _greys(palette[used, 0], used)
    else:
        meant |= _greys(used, used)
    # With white for 255 there is nothing to tell apart; black alone tells nothing.
    if labels.white != VOID and keys.any():
        meant[BLACK_WHITE] = black_white
    return keys, meant


def _greys(shown: np.ndarray, numbers: np.ndarray) -> dict[str, str]:
    """Return the number that each grey means which a mask shows, but for black: that may fill."""
    pairs = zip(shown.tolist(), numbers.tolist(), strict=True)
    return {f"grey {grey}": f"number {number}" for grey, number in pairs if grey}


def _palette(image: Image.Image) -> np.ndarray:
    """Return the colours of the values in an image of 1 bit or with a palette, uint8 (256, 3)."""
    palette = np.zeros((256, 3), np.uint8)
    if image.mode == "P":
        colors = image.getpalette() or []  # of the entries that the file has
        palette.flat[: len(colors)] = colors
    else:
        palette[1] = 255
    return palette


def _is_coloured(palette: np.ndarray) -> bool:
    return bool((palette != palette[:, :1]).any())


def add_meanings(known: Meant, found: Meant) -> None:
    """Add to what masks mean what another one means; a UserError if it contradicts them."""
    for shown, (meaning, path) in found.items():
        before, other = known.setdefault(shown, (meaning, path))
        if before != meaning:
            raise UserError(
                f"{path}: {shown} means {meaning}, but {before} in {other}; save all masks "
                "in one way, or list their colours in classes.txt: NAME = R G B"
            )


def _explain_unknown(unknown: dict[int, int], is_colored: bool, labels: Labels) -> str:
    """Return what to do about keys, with their numbers of pixels, that are no class."""
    # the one that most pixels have
    count, key = max((count, key) for key, count in unknown.items())
    text = f"{key:g}"
    if is_colored:
        red, green, blue, _ = key.to_bytes(4, "little")
        text = f"{red} {green} {blue}"
    elif labels.has_greys:
        text = f"{text} {text} {text}"
    kind = "colour" if " " in text else "value"
    line = f"{kind} {text} in {count} pixels is no class; correct the mask"
    if len(unknown) > MANY:
        others = len(unknown) - 1
        return (
            f"{line}: {others} more {kind}s are none, as in masks with smoothed edges"
        )
    if not float(key).is_integer():  # which classes.txt cannot list
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
        counts = {key: count for key, count in enumerate(image.histogram()) if count}
        meaning = [numbers.get(key, VOID) for key in range(256)]
        return np.array(image.point(meaning)), counts
    known = np.array(sorted(numbers))
    # where each key is in `known`, if it is there: an unknown one gets a neighbour's place
    places = np.searchsorted(known, keys).clip(max=len(known) - 1)
    found = np.array([numbers[key] for key in known.tolist()], np.uint8)[places]
    others, counted = np.unique(keys[known[places] != keys], return_counts=True)
    return found, dict(zip(others.tolist(), counted.tolist(), strict=True))


def explain_values(values: list[int], has_names: bool) -> str:
    """Return what is wrong with the values of all training masks, or nothing."""
    found = [value for value in values if value != VOID]
    # without names: 0 to their number, of which the last one is less
    if len(found) > 1 and (has_names or found[-1] < len(found)):
        return ""
    texts = [str(value) for value in values]
    return (
        f"the training masks hold {shorten(texts)} ({VOID} is void), not two classes or "
        "more, numbered from 0 without a gap; write what all values mean into "
        f"classes.txt, one class per line: {shorten([f'NAME = {n}' for n in texts])}"
    )
