"""What a labelled set has: classes, samples, and what of it is left out."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ddpkit.data.format import VOID
from ddpkit.errors import UserError, shorten
from ddpkit.vision import places
from ddpkit.vision.masks import usual_name
from ddpkit.vision.names import refuse_alike, seen

part_of = places.part_of
BACKGROUND = "background"
Size = tuple[int, int]  # height and width
Color = tuple[int, int, int]


class LeftOut(NamedTuple):
    """What a reader passes over. name: of a file, or of something in it."""

    reason: str
    name: object


class Skipped:
    """What is left out, by the reason."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}

    def leave_out(self, reason: str, name: object) -> None:
        self.names.setdefault(reason, []).append(str(name))

    def remarks(self, root: Path) -> Iterable[str]:
        """Yield a line for each reason: how many there are, and the first of them, below `root`."""
        for reason, names in sorted(self.names.items()):
            short = sorted(name.removeprefix(f"{root}/") for name in names)
            yield f"skipped: {len(names)} {reason}: {shorten(short)}"


@dataclass
class Sample:
    """An image with its labels.

    part: train, val or test. draw: for segmentation, the size of the upright image, or None if
    Pillow cannot read it -> the mask, class numbers or VOID, uint8 (H, W). labels: for
    classification, the names of its classes. group: of images that belong together, or nothing.
    """

    image: Path
    part: str
    draw: Callable[[Size | None], np.ndarray] | None = None
    labels: tuple[str, ...] = ()
    group: str = ""


@dataclass
class LabelledSet:
    """What a format has read.

    names: the classes of masks, by number. colors: of each, or none. several: whether an image may
    have several labels. notes: lines to say.
    """

    samples: list[Sample]
    names: list[str] = field(default_factory=list)
    colors: list[Color] = field(default_factory=list)
    skipped: Skipped = field(default_factory=Skipped)
    several: bool = False
    notes: list[str] = field(default_factory=list)

    def use_labels(self, root: Path) -> None:
        """Make the labels of samples the classes, and leave out samples without one.

        Raises a UserError if an image has entries with different labels, or if names look alike.
        """
        labels_of: dict[Path, tuple[str, ...]] = {}
        for sample in self.samples:
            path = sample.image.resolve()
            other = labels_of.setdefault(path, sample.labels)
            if other != sample.labels:
                raise UserError(
                    f"{sample.image}: has two entries with different labels, {shorten(other)} and "
                    f"{shorten(sample.labels)}; remove one, or write all labels into it"
                )
        self.names = sorted(set().union(*labels_of.values()))
        refuse_alike(self.names, root)
        self.several = any(len(labels) > 1 for labels in labels_of.values())
        # of several labels one may be none; of one, there is nothing to learn
        if self.several or len(self.names) == 1:
            return
        for sample in self.samples:
            if not sample.labels:
                self.skipped.leave_out("images without a label", sample.image)
        self.samples = [sample for sample in self.samples if sample.labels]


def to_color(value: object) -> Color | None:
    """Return the colour that #rrggbb or the numbers red, green, blue mean; None of what is none."""
    if isinstance(value, str) and re.fullmatch("#[0-9a-fA-F]{6}", value):
        value = list(bytes.fromhex(value[1:]))
    if not isinstance(value, list) or len(value) < 3:
        return None
    if not all(isinstance(n, int) and 0 <= n <= 255 for n in value[:3]):
        return None
    red, green, blue = value[:3]  # a fourth one is opacity
    return red, green, blue


class ObjectClasses:
    """Class numbers of objects by name: 0 is the background, which no object covers.

    colors: of some of `names`. A class that is named as the background is that; see `usual_name`.
    """

    def __init__(
        self, names: Iterable[object], colors: dict[str, Color | None] | None = None
    ):
        self.names = [BACKGROUND]
        self.number_of = {BACKGROUND: 0}
        self.colors: list[Color] = []
        given_of: dict[str, str] = {}
        for name in names:
            name = seen("" if name is None else str(name))
            if not name:
                raise UserError(
                    "a class has no name (null), or none that can be seen; add one"
                )
            text = clean_name(name)
            given = given_of.setdefault(text, name)
            if given != name and text not in (BACKGROUND, "void"):
                raise UserError(
                    f"classes {given} and {name} would both be {text}, as classes.txt has no = "
                    "and no # in front of a word; rename one of them"
                )
            if text == "void":
                self.number_of[text] = VOID
            elif text not in self.number_of:
                self.number_of[text] = len(self.names)
                self.names.append(text)
        if colors:
            of_names = {BACKGROUND: (0, 0, 0)}
            for name, color in colors.items():
                if color:
                    of_names[clean_name(name)] = color
            known = [of_names[name] for name in self.names if name in of_names]
            if len({*known}) == len(self.names):  # all have one, and each another
                self.colors = known

    def number(self, name: str, where: object) -> int:
        """Return the number of a class that there has to be."""
        number = self.number_of.get(clean_name(name))
        if number is None:
            raise UserError(
                f"{where}: class {name} is not among the classes of the set; add it there, or "
                "correct the name"
            )
        return number


def clean_name(name: object) -> str:
    """Return a name as a line of classes.txt can have it: without = and comments, not empty."""
    text = seen(re.sub(r"=|(?<![^\s=])#+", " ", str(name)))
    return usual_name(text) or "unnamed"
