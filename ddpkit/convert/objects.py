"""What all formats that mark objects have in common.

A reader yields a `MarkedImage` for each entry of its label files, and a `LeftOut` for what it
passes over. `draw_objects` makes samples of them. Objects themselves are read when a mask is drawn:
the size of the image is known only then, and those of a large set would fill the memory.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from ddpkit.convert.labels import (
    LabelledSet,
    LeftOut,
    ObjectClasses,
    Sample,
    Size,
    Skipped,
)
from ddpkit.convert.shapes import Shapes, draw_shapes
from ddpkit.convert.tree import Json, Tree
from ddpkit.errors import UserError


@dataclass
class MarkedImage:
    """An image, as one entry of a label file has it.

    where: file and entry, for messages. shapes: the size of the upright image -> its objects, and
    those that have no inside. size: what the entry says of it, or None.
    """

    image: Path
    part: str
    where: str
    shapes: Callable[[Size], Shapes]
    size: Size | None = None


Entries = Iterator[MarkedImage | LeftOut]  # of a label file


@dataclass
class Drawing:
    """What Sample.draw is for an image with objects: those of all entries that name it."""

    entries: list[MarkedImage]
    skipped: Skipped

    def __call__(self, size: Size | None) -> np.ndarray:
        stated = [entry.size for entry in self.entries if entry.size]
        known = size or next(iter(stated), None)
        if known is None:
            raise UserError(
                f"{self.entries[0].where}: the size of the image is not known; save it as PNG or "
                "JPEG"
            )
        for entry in self.entries:
            height, width = entry.size or known
            if (height, width) != known:
                raise UserError(
                    f"{entry.where}: the labels are of {width} x {height} pixels, the image has "
                    f"{known[1]} x {known[0]}; is it turned by EXIF, or another one?"
                )
        shapes = (shape for entry in self.entries for shape in entry.shapes(known))
        return draw_shapes(shapes, known, self.skipped)


def stated_size(height: Json, width: Json) -> Size | None:
    """Return the size that an entry states; None if it states none, or 0."""
    return (int(height), int(width)) if height and width else None


def not_there(name: str, given: str) -> LeftOut:
    """Return what a label file names as `given`, and no image is."""
    return LeftOut(f"images of {name} that are not there", given)


def draw_objects(
    tree: Tree,
    classes: ObjectClasses,
    label_files: Iterable[Entries],
    others: Collection[str] = (),
) -> LabelledSet:
    """Return the set of the entries of label files. others: files that are no images of the set."""
    labelled = LabelledSet([], classes.names, classes.colors)
    for entry in chain.from_iterable(label_files):
        if isinstance(entry, LeftOut):
            labelled.skipped.add(entry)
            continue
        drawing = Drawing([entry], labelled.skipped)
        labelled.samples.append(Sample(entry.image, entry.part, drawing))
    tree.count_unnamed(labelled, others)
    return labelled
