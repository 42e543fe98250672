"""Masks: from the values or colours in their files to class numbers, as DIR/classes.txt says.

Its lines are NAME, NAME = VALUE or NAME = R G B, in the order of the class numbers, and # begins a
comment. A class of several values or colours has a line for each. A line with the name "void" is no
class: pixels of its value or colour, or of its place if lines have names alone, count neither in
loss nor in metrics.

With colours a pixel means what it shows, however its file stores it. Without, a grey pixel means
its value, and a coloured palette the number of its entry. Masks of one set have to agree.
"""

import functools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from ddpkit import files
from ddpkit.data.format import DEFAULT_FORMAT, VOID, Format
from ddpkit.errors import UserError, shorten
from ddpkit.vision import images
from ddpkit.vision.images import LazyMask
from ddpkit.vision.names import refuse_alike

# by what a mask shows: what it means, and in which file
Meant = dict[str, tuple[str, str]]
BLACK_WHITE = "black and white"
BLACK = [0, 0, 0]
WHITE = [255, 255, 255]
GREYS = [[value] * 3 for value in range(256)]
OF_8_BITS = ("1", "L", "P")  # modes of Pillow
MOST_OF_LISTS = 1 << 18  # bytes of a list of classes
KEYS = 2**24  # colours that a table has room for
KNOWN = 256  # the bit above those of a class number
LOSSY = ("JPEG", "MPO", "AVIF", "HEIF")  # formats of Pillow
MANY = 8  # values that no line of classes.txt has, as smoothed edges have
FORMS = "NAME, NAME = VALUE, or NAME = R G B with colours of 0 to 255"
RGB = r"\d{1,3}[\s,]+\d{1,3}[\s,]+\d{1,3}"
LINE = re.compile(rf"([^=]*[^=\s])(?:\s*=\s*(-?\d{{1,9}}|{RGB}))?")
# Lists of other programs: NAME,R,G,B; NAME:R,G,B::; R G B NAME; VALUE, NAME; NAME.
OTHER_LISTS = re.compile(
    r"\w*class_?dict\w*\.csv|_classes\.csv|label_?colou?rs\.txt|labelmap\.txt|"
    r"codes\.txt|class_names\.txt",
    re.IGNORECASE,
)
NAME_FIRST = re.compile(rf"(?P<name>.*?)[\s,:;]+(?P<value>{RGB})[\s:]*")
NAME_LAST = re.compile(rf"(?P<value>{RGB}|\d+)[\s,:;]+(?P<name>.+)")
# Names of no class in such lists, in small letters: their pixels are void.
VOID_NAMES = ("void", "ignore", "ignored", "unlabeled", "unlabelled")


class Classes(list[str]):
    """The class names, with `colors`, uint8 (classes, 3), if the user has chosen them."""

    def __init__(
        self,
        names: Sequence[str],
        colors: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(names)
        self.colors: np.ndarray | None = None
        if colors:
            self.colors = np.array(colors, dtype=np.uint8).reshape(-1, 3)


class Labels(Classes):
    """The class names, and what stands for them in masks, as the lines of classes.txt say.

    kind: how many numbers each line has. values, colored: class number or VOID, by grey value, and
    by colour, as `_as_keys` has it. has_greys: whether grey values are listed colours.
    white: the value of white in masks that are stored in black and white.
    meant: what the masks that were read mean.
    """

    def __init__(
        self,
        names: Sequence[str],
        kind: int,
        keys: dict[tuple, int],
    ) -> None:
        self.colored: dict[int, int] = {}
        greys: dict[int, int] = {}
        if kind == 3:
            # of a class with several colours the first
            color_of = {number: color for color, number in reversed(keys.items())}
            super().__init__(names, [color_of[n] for n in range(len(names))])
            for color, number in keys.items():
                self.colored[int.from_bytes(bytes(color), "little")] = number
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
    """Return what the classes.txt at `path` says, or beside it a list of another program."""
    listed = path if os.path.lexists(path) else find_list(path.parent)
    return parse(read_lines(listed), listed) if listed else unnamed()


def find_list(folder: Path) -> Path | None:
    """Return the file in `folder` in which another program lists the classes of masks."""
    found = (each for each in folder.iterdir() if OTHER_LISTS.fullmatch(each.name))
    return min(found, default=None)


def read_lines(path: Path) -> list[str]:
    """Return the lines of classes.txt; those of another list as classes.txt would have them."""
    lines = files.read_text(path, "replace", MOST_OF_LISTS).splitlines()
    if path.name == "classes.txt":
        return lines
    if path.suffix.lower() == ".csv":
        lines[:1] = []  # which names the columns
    return [translate_line(re.sub(r'["\[\]]', "", line).strip()) for line in lines]


def translate_line(line: str) -> str:
    """Return a line of another program's list as classes.txt has it."""
    match = NAME_FIRST.fullmatch(line) or NAME_LAST.fullmatch(line)
    name = usual_name(match["name"] if match else line)
    return f"{name} = {match['value']}" if match else name


def usual_name(name: str) -> str:
    """Return "void" or "background" for what other programs call so, else the name."""
    plain = name.strip(" _").lower()
    if plain in VOID_NAMES:
        return "void"
    return plain if plain == "background" else name


def parse(
    lines: Sequence[str],
    path: Path,
) -> Labels:
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
    number_of: dict[str, int] = {}
    keys: dict[tuple, int] = {}
    position = 0  # among the lines with a name alone
    for name, given, is_void in rows:
        key = given or (position,)
        position += not given
        # beside names alone, void may have a value
        if len(given) != kind and not (is_void and kind == 0 and len(given) == 1):
            raise UserError(f"{path}: {name}: write all lines in one way: {FORMS}")
        if key in keys or (name in number_of and not given):
            raise UserError(f"{path}: {name}: its name or its value appears twice")
        if is_void:
            keys[key] = VOID  # no class
        else:  # one class may have several values
            keys[key] = number_of.setdefault(name, len(number_of))
    names = list(number_of)
    refuse_alike(names, path)
    if not 2 <= len(names) <= VOID:
        raise UserError(
            f"{path}: {len(names)} classes; needs 2 to {VOID}, one per line"
        )
    return Labels(names, kind, keys)


def read_mask(
    path: str,
    labels: Labels,
    format: Format = DEFAULT_FORMAT,
) -> np.ndarray:
    """Return the whole mask at `path` as class numbers or VOID, uint8 (H, W)."""
    return lazy_mask(path, labels, format).pixels


def lazy_mask(
    path: str,
    labels: Labels,
    format: Format = DEFAULT_FORMAT,
) -> LazyMask:
    """Return the mask at `path`, whose class numbers are looked up where it is read.

    Raises a UserError if the file is no mask. That a value is no class is found, too, where it is
    read: in a crop it may lie outside.
    """
    image = images.read_stored(path, format)
    _refuse_changed(path, image)
    if image.mode == "RGB" or (image.mode == "P" and labels.kind == 3):
        image = image.convert("RGBA")  # transparent where the file says so of a colour
    if images.is_clear(image):
        raise UserError(
            f"{path}: a mask with transparent pixels; save it without transparency"
        )
    if image.mode == "RGBA":
        legend = Legend(path, labels, of_colors=True)
        return LazyMask(_as_keys(np.asarray(image)), legend.translate)
    if image.mode == "LA":
        image = image.getchannel("L")
    if image.mode in OF_8_BITS:
        stored, legend = _read_bytes(path, labels, image)
        return LazyMask(stored, legend.translate)
    values = np.asarray(image)
    if values.ndim > 2 or labels.has_greys:
        raise UserError(
            f"{path}: a mask of mode {image.mode}; save it in RGB, or grey of 8 bits"
        )
    return LazyMask(values, Legend(path, labels).translate)


def _read_bytes(
    path: str,
    labels: Labels,
    image: Image.Image,
) -> tuple[np.ndarray, "Legend"]:
    """Return the values of 8 bits that stand for classes, uint8 (H, W), and their legend."""
    stored = np.asarray(image)
    is_two_tone = image.mode == "1"
    is_stretched = image.info.get(images.STRETCHED)
    shown = stored
    if is_two_tone:
        shown = stored.astype(np.uint8) * 255
    elif image.mode == "P":
        colors = np.zeros((256, 3), np.uint8)
        palette = image.getpalette() or []  # of the entries that the file has
        colors.flat[: len(palette)] = palette
        if (colors != colors[:, :1]).any():
            return stored, Legend(path, labels, colors.tolist(), is_palette=True)
        # What counts is what it shows: an encoder numbers its greys as it likes.
        shown = colors[:, 0].take(stored)
        is_two_tone = not (shown % 255).any() and (shown != stored).any()
        # as numbers of 2 or 4 bits get, to be seen
        wide = stored.astype(int)
        is_stretched = shown.any() and any((shown == n * wide).all() for n in (17, 85))
    if is_stretched and not labels.has_greys:
        raise UserError(
            f"{path}: greys of 2 or 4 bits, which may mean their numbers or what they show; save "
            "masks with 8 bits, or list what they show in classes.txt: NAME = R G B"
        )
    if is_two_tone:  # 0 and 1 may be meant as well as 0 and 255
        # that its value is white; the others are black
        tones = [BLACK] * labels.white + [WHITE]
        return shown.clip(max=labels.white), Legend(path, labels, tones, "0 and 1")
    return shown, Legend(path, labels, GREYS)


def _refuse_changed(
    path: str,
    image: Image.Image,
) -> None:
    # a file of its own, or in a TIFF
    is_jpeg = image.info.get("compression") == "jpeg"
    kind = "JPEG" if is_jpeg else image.format
    if kind in LOSSY:
        raise UserError(
            f"{path}: {kind} has changed the values of this mask; save masks as PNG"
        )


def _as_keys(colors: np.ndarray) -> np.ndarray:
    """Return colours, uint8 (H, W, 4), (H, W) of one number each: its bytes but for alpha."""
    return np.ascontiguousarray(colors).view("<u4")[..., 0] & (KEYS - 1)


class Legend:
    """What the pixels of one mask mean, by the values that it has.

    colors: what each value of 8 bits shows, (red, green, blue); none of other types. tones: what
    black and white mean in the mask. is_palette: whether its file says which colours these are.
    of_colors: whether the values are colours, as `_as_keys` has them.
    """

    def __init__(
        self,
        path: str,
        labels: Labels,
        colors: Sequence[Sequence[int]] = (),
        tones: str = "other numbers",
        is_palette: bool = False,
        of_colors: bool = False,
    ) -> None:
        self.path = path
        self.labels = labels
        self.colors = colors
        self.tones = tones
        self.is_palette = is_palette
        self.of_colors = of_colors
        # class number or VOID, by what a pixel has
        self.numbers = labels.colored if of_colors else labels.values

    def translate(self, stored: np.ndarray) -> np.ndarray:
        """Return the class numbers of pixels as they are stored, uint8 (H, W).

        Raises a UserError for a value that is no class, or means another one in other masks.
        """
        numbers, is_known = _look_up(self.numbers, stored)
        if not is_known.all():
            raise UserError(f"{self.path}: {self._explain(stored[~is_known])}")
        meant = {shown: (what, self.path) for shown, what in self.meanings(stored)}
        add_meanings(self.labels.meant, meant)
        return numbers

    def meanings(self, stored: np.ndarray) -> Iterator[tuple[str, str]]:
        """Yield what the pixels show and what that means, where other masks may contradict it."""
        # If greys are listed, masks in grey mean colours, too: the two may be mixed.
        if self.labels.kind == 3 and not self.labels.has_greys:
            yield "a mask", "colours" if self.of_colors else "numbers"
        # With white for 255 there is nothing to tell apart; black alone tells nothing.
        if self.labels.white != VOID and stored.any():
            yield BLACK_WHITE, self.tones
        counts = Image.fromarray(stored).histogram() if self.colors else ()
        for value in np.flatnonzero(counts).tolist():
            color = self.colors[value]
            shown = "colour {} {} {}".format(*color)
            # Black may fill. Of a palette that has a colour twice its number alone tells.
            if any(color) and self.colors.count(color) == 1:
                yield shown, f"number {value}"
            if self.is_palette:
                yield f"value {value}", shown

    def text_of(self, key: float) -> str:
        """Return a value as a line of classes.txt has it."""
        if self.of_colors:
            return " ".join(map(str, int(key).to_bytes(3, "little")))
        return " ".join([f"{key:g}"] * (3 if self.labels.has_greys else 1))

    def _explain(self, unknown: np.ndarray) -> str:
        """Return what to do about pixels that are no class."""
        keys, counts = np.unique(unknown, return_counts=True)
        # the one that most pixels have
        count, key = max(zip(counts.tolist(), keys.tolist(), strict=True))
        text = self.text_of(key)
        kind = "colour" if " " in text else "value"
        if len(keys) > MANY:
            return (
                f"more than {MANY} {kind}s are not classes, such as {text} in {count} pixels; "
                "correct the mask: its edges may be smoothed, or its objects numbered"
            )
        line = f"{kind} {text} in {count} pixels is not a class; correct the mask"
        if not float(key).is_integer():  # which classes.txt cannot list
            return line
        return f"{line}, or write into classes.txt: NAME = {text} or void = {text}"


def add_meanings(
    known: Meant,
    meant: Meant,
) -> None:
    """Add to what masks mean what another one means; a UserError if it contradicts them."""
    for shown, (meaning, path) in meant.items():
        before, other = known.setdefault(shown, (meaning, path))
        if before != meaning:
            raise UserError(
                f"{path}: {shown} means {meaning}, but {before} in {other}; save all masks "
                "in one way, or list their colours in classes.txt: NAME = R G B"
            )


def _look_up(
    numbers: dict[int, int],
    keys: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the class numbers of `keys`, uint8 (H, W), and whether each is known, bool (H, W)."""
    if keys.dtype.kind == "u":  # values of 8 or 16 bits, or colours
        marked = _table(tuple(numbers.items())).take(keys)
    else:
        values, places = np.unique(keys, return_inverse=True)
        own = [numbers.get(value, -KNOWN) + KNOWN for value in values.tolist()]
        marked = np.array(own).take(places).reshape(keys.shape)
    return marked.astype(np.uint8), marked >= KNOWN


@functools.lru_cache(4)
def _table(numbers: tuple[tuple[int, int], ...]) -> np.ndarray:
    """Return KNOWN and the class number of each key below KEYS, in one number; 0 if it has none.

    Most of it is never touched, and takes no memory.
    """
    table = np.zeros(KEYS, np.uint16)
    for key, number in numbers:
        if 0 <= key < KEYS:  # others are values of more bits
            table[key] = KNOWN + number
    return table


def explain_values(
    values: list[int],
    names: Sequence[str],
) -> str:
    """Return what is wrong with the values of all training masks, or nothing.

    names: of the classes, if classes.txt has them.
    """
    used = [value for value in values if value != VOID]
    # without names: 0 to their number, of which the last one is less
    if len(used) > 1 and (names or used[-1] < len(used)):
        return ""
    if names:
        seen = [names[value] for value in used if value < len(names)]
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
