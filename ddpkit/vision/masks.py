"""Masks: from the values or colours in their files to class numbers, as DIR/classes.txt says.

Its lines are NAME, NAME = VALUE or NAME = R G B, in the order of the class numbers, and # begins a
comment. A class of several values or colours has a line for each. A line with the name "void" is no
class: pixels of its value or colour, or of its place if lines have names alone, count neither in
loss nor in metrics.

With colours a pixel means what it shows, however its file stores it. Without, a grey pixel means
its value, and a coloured palette the number of its entry. Masks of one set have to agree.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from ddpkit.data.format import DEFAULT_FORMAT, VOID, Format
from ddpkit.errors import UserError, shorten
from ddpkit.vision import images
from ddpkit.vision.images import LazyImage

# by what a mask shows: what it means, and in which file
Meant = dict[str, tuple[str, str]]
BLACK_WHITE = "black and white"
OF_8_BITS = ("1", "L")  # modes of Pillow, but for colours and palettes
LOSSY = ("JPEG", "MPO", "AVIF", "HEIF")  # formats of Pillow
MOST_HASHED = 512  # of known keys: of many more, two would share each hash
FACTOR = 0x9E3779B1  # by which integers are spread, 2^32 over the golden ratio
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
        self.colored = {0: VOID}  # never empty, for `_look_up`: no opaque colour is 0
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
    """Return the whole mask at `path` as class numbers or VOID, uint8 (H, W)."""
    return lazy_mask(path, labels, format).pixels


def lazy_mask(path: str, labels: Labels, format: Format = DEFAULT_FORMAT) -> LazyImage:
    """Return the mask at `path`, whose class numbers are looked up where it is read.

    Raises a UserError if the file is no mask. That a value is no class is found, too, where it is
    read: in a crop it may lie outside.
    """
    if images.is_array(path):
        values = images.read_array(path, format)
        is_wide = values.dtype not in (bool, np.uint8)
        if is_wide and labels.has_greys:
            raise UserError(
                f"{path}: a mask of {values.dtype}; save it in RGB, or grey of 8 bits"
            )
        if is_wide:
            return _mask_of(values, Legend(path, labels, labels.values))
        image = Image.fromarray(values)
    else:
        image = images.read_stored(path, format)
    _refuse_changed(path, image)
    if image.mode == "RGB":
        image = image.convert("RGBA")  # transparent where the file says so of a colour
    if image.mode in ("LA", "RGBA"):
        _refuse_clear(path, image)
    if image.mode == "RGBA":
        keys = _as_keys(np.asarray(image))
        return _mask_of(keys, Legend(path, labels, labels.colored))
    if image.mode == "LA":
        image = image.getchannel("L")
    stored = np.asarray(image)
    if image.mode == "P" and labels.kind == 3:
        shown = _every_value(image)
        if shown[..., 3].min() != VOID:
            _refuse_clear(path, image.convert("RGBA"))
        legend = Legend(path, labels, labels.colored, _as_keys(shown))
        return _mask_of(stored, legend)
    if stored.ndim > 2 or (labels.has_greys and image.mode not in OF_8_BITS):
        raise UserError(
            f"{path}: a mask of mode {image.mode}; save it in RGB, or grey of 8 bits"
        )
    if stored.dtype == bool:
        stored = stored.astype(np.uint8)
    return _mask_of(stored, _grey_legend(path, labels, image))


def _refuse_changed(path: str, image: Image.Image) -> None:
    # a file of its own, or in a TIFF
    is_jpeg = image.info.get("compression") == "jpeg"
    kind = "JPEG" if is_jpeg else image.format
    if kind in LOSSY:
        raise UserError(
            f"{path}: {kind} has changed the values of this mask; save masks as PNG"
        )


def _refuse_clear(path: str, image: Image.Image) -> None:
    if image.getchannel("A").getextrema()[0] != VOID:
        raise UserError(
            f"{path}: a mask with transparent pixels; save it without transparency"
        )


def _mask_of(stored: np.ndarray, legend: "Legend") -> LazyImage:
    height, width = stored.shape
    mask = LazyImage(height, width, lambda _: legend.translate(stored), mode="P")
    mask.stored = stored
    mask.translate = legend.translate
    return mask


def _every_value(image: Image.Image) -> np.ndarray:
    """Return what each value shows in an image with a palette, uint8 (1, 256, 4), RGBA."""
    row = image.crop((0, 0, 256, 1))
    row.frombytes(bytes(range(256)))
    return np.array(row.convert("RGBA"))


def _as_keys(colors: np.ndarray) -> np.ndarray:
    """Return colours, uint8 (H, W, 4), as one number each, (H, W): its four bytes."""
    return np.ascontiguousarray(colors).view("<u4")[..., 0]


@dataclass
class Legend:
    """What the pixels of one mask mean.

    numbers: class number or VOID, by key: a value, or a colour as `_as_keys` makes it.
    keys: of values of 8 bits, 256; without, a pixel is its own key.
    greys: what values of 8 bits show, 256; -1: no grey, or not by this value alone.
    palette: the colours that values of 8 bits show, if they mean numbers all the same.
    tones: what black and white mean in it.
    """

    path: str
    labels: Labels
    numbers: dict[int, int]
    keys: np.ndarray | None = None
    greys: np.ndarray | None = None
    palette: np.ndarray | None = None
    tones: str = "other numbers"

    def translate(self, stored: np.ndarray) -> np.ndarray:
        """Return the class numbers of pixels as they are stored, uint8 (H, W).

        Raises a UserError for a value that is no class, or means another one in other masks.
        """
        labels = self.labels
        is_colored = self.numbers is labels.colored
        used: Sequence[int] = ()
        if stored.dtype == np.uint8:
            counts = np.array(Image.fromarray(stored).histogram())
            used = np.flatnonzero(counts).tolist()
            found, unknown = self._look_up_bytes(stored, counts, used)
        else:
            found, unknown = _look_up(self.numbers, stored)
        if unknown:
            line = _explain_unknown(unknown, is_colored, labels)
            raise UserError(f"{self.path}: {line}")
        meant = self._meanings(stored, used, is_colored)
        add_meanings(labels.meant, {key: (what, self.path) for key, what in meant})
        return found

    def _look_up_bytes(
        self, stored: np.ndarray, counts: np.ndarray, used: Sequence[int]
    ) -> tuple[np.ndarray, dict[int, int]]:
        """Return the class numbers of values of 8 bits, and how many pixels have unknown keys."""
        keys = range(256) if self.keys is None else self.keys.flat
        table = np.zeros(256, np.uint8)
        unknown: dict[int, int] = {}
        for value in used:
            key = int(keys[value])
            if key in self.numbers:
                table[value] = self.numbers[key]
            else:
                unknown[key] = unknown.get(key, 0) + int(counts[value])
        if all(table[value] == value for value in used):
            return stored, unknown
        return table.take(stored), unknown

    def _meanings(
        self, stored: np.ndarray, used: Sequence[int], is_colored: bool
    ) -> Iterator[tuple[str, str]]:
        """Yield what the pixels show and what that means, where other masks may contradict it."""
        labels = self.labels
        # If greys are listed, masks in grey mean colours, too: the two may be mixed.
        if labels.kind == 3 and not labels.has_greys:
            yield "a mask", "colours" if is_colored else "numbers"
        if is_colored:
            return
        keys = used if self.keys is None else self.keys[used]
        # With white for 255 there is nothing to tell apart; black alone tells nothing.
        if labels.white != VOID and (any(keys) if len(used) else stored.any()):
            yield BLACK_WHITE, self.tones
        for value, key in zip(used, keys, strict=True):
            grey = -1 if self.greys is None else self.greys[value]
            if grey > 0:  # black may fill
                yield f"grey {grey}", f"number {key}"
            if self.palette is not None:
                yield f"value {value}", "colour {} {} {}".format(*self.palette[value])


def _grey_legend(path: str, labels: Labels, image: Image.Image) -> Legend:
    """Return what a mask in grey means, or one whose palette numbers the classes."""
    legend = Legend(path, labels, labels.values)
    if image.mode not in ("1", "P"):
        legend.greys = np.arange(256)
        return legend
    palette = _palette(image)
    shown = palette[:, 0].astype(int)
    if image.mode == "P" and (palette != palette[:, :1]).any():
        # A palette that has a colour twice goes by numbers alone.
        packed = palette @ np.array([65536, 256, 1])
        _, places, counts = np.unique(packed, return_inverse=True, return_counts=True)
        is_alone = (palette == palette[:, :1]).all(1) & (counts[places] == 1)
        legend.greys = np.where(is_alone, shown, -1)
        legend.palette = palette
        return legend
    # What counts is what it shows: an encoder numbers its greys as it likes.
    legend.keys = legend.greys = shown
    is_two_tone = image.mode == "1"
    if not is_two_tone:
        used = np.flatnonzero(image.histogram())
        is_other = (shown[used] != used).any()
        is_two_tone = bool(is_other) and set(shown[used]) <= {0, VOID}
    if is_two_tone:
        # They may be 0 and 1 as well as what they show.
        legend.keys = shown.clip(max=labels.white)
        legend.tones = "0 and 1"
    return legend


def _palette(image: Image.Image) -> np.ndarray:
    """Return the colours of the values in an image of 1 bit or with a palette, uint8 (256, 3)."""
    palette = np.zeros((256, 3), np.uint8)
    if image.mode == "P":
        colors = image.getpalette() or []  # of the entries that the file has
        palette.flat[: len(colors)] = colors
    else:
        palette[1] = 255
    return palette


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
    """Return the class numbers of `keys`, uint8 (H, W); how many pixels have each unknown key."""
    known = np.array(sorted(numbers))
    # where each key is in `known`, if it is there: an unknown one gets another's place
    if keys.dtype.kind in "iu" and keys.itemsize <= 4 and len(known) <= MOST_HASHED:
        places = _places(known, keys)
    else:
        places = np.searchsorted(known, keys).clip(max=len(known) - 1)
    table = np.array([numbers[key] for key in known.tolist()], np.uint8)
    others = keys[known.take(places) != keys]
    values, counts = np.unique(others, return_counts=True)
    unknown = dict(zip(values.tolist(), counts.tolist(), strict=True))
    return table.take(places), unknown


def _places(known: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the place in `known` of each key, integers of 32 bits or less, by 16 bits of a hash.

    np.searchsorted takes eight times as long.
    """
    factor = FACTOR
    while True:
        slots = _hash(known, factor)
        if len(np.unique(slots)) == len(known):
            break
        factor = factor * FACTOR % 2**32  # odd, so that no bit gets lost
    table = np.zeros(2**16, np.uint16)
    table[slots] = range(len(known))
    return table.take(_hash(keys, factor))


def _hash(keys: np.ndarray, factor: int) -> np.ndarray:
    return (keys.astype(np.uint32) * np.uint32(factor)) >> np.uint32(16)


def explain_values(values: list[int], names: Sequence[str]) -> str:
    """Return what is wrong with the values of all training masks, or nothing.

    names: of the classes, if classes.txt has them.
    """
    found = [value for value in values if value != VOID]
    # without names: 0 to their number, of which the last one is less
    if len(found) > 1 and (names or found[-1] < len(found)):
        return ""
    if names:
        seen = [names[value] for value in found if value < len(names)]
        hint = ""
        if VOID in values:
            seen.append("void")
            hint = f"; if {VOID} is a class, list it there: NAME = {VOID}"
        return (
            f"the training masks hold {' and '.join(seen)} alone, and no pixel of another class "
            f"of classes.txt; add images of the others, or correct classes.txt{hint}"
        )
    texts = [str(value) for value in values]
    return (
        f"the training masks hold {shorten(texts)} ({VOID} is void), not two classes or "
        "more, numbered from 0 without a gap; write what all values mean into "
        f"classes.txt, one class per line: {shorten([f'NAME = {n}' for n in texts])}"
    )
