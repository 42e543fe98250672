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
from ddpkit.data.format import DEFAULT_FORMAT
from ddpkit.errors import UserError
from ddpkit.vision.names import refuse_alike


@dataclass
class MarkedImage:
    """An image, as one entry of a label file has it.

    where: file and entry, for messages. shapes: the size of the upright image -> its objects, and
    those that have no inside. size: what the entry says of it, or None. labels: of the whole image.
    """

    image: Path
    part: str
    where: str
    shapes: Callable[[Size], Shapes]
    size: Size | None = None
    labels: tuple[str, ...] = ()


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
                    f"{known[1]} x {known[0]}; is it rotated by EXIF, or another image?"
                )
        # a file that cannot be read is of any size that its labels claim
        DEFAULT_FORMAT.check_size(self.entries[0].where, (known[1], known[0]))
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
    classes: ObjectClasses | None,
    label_files: Iterable[Entries],
    others: Collection[str] = (),
) -> LabelledSet:
    """Return the set of the entries of label files.

    classes: of objects; None if there are none, but labels of whole images. others: files that are
    no images of the set.
    """
    labelled = LabelledSet([])
    if classes:
        refuse_alike(classes.names, tree.root)
        labelled.names = classes.names
        labelled.colors = classes.colors
    for entry in chain.from_iterable(label_files):
        if isinstance(entry, LeftOut):
            labelled.skipped.leave_out(*entry)
            continue
        sample = Sample(entry.image, entry.part, labels=entry.labels)
        labelled.samples.append(sample)
        if not classes:
            continue
        sample.draw = Drawing([entry], labelled.skipped)
        for label in entry.labels:
            labelled.skipped.leave_out(
                "labels of whole images, which also have objects",
                f"{entry.where}, {label}",
            )
    tree.count_unnamed(labelled, others)
    if not classes:
        labelled.use_labels(tree.root)
    return labelled
