"""Kaggle's runs (RLE) in a CSV file: a row per object.

    ImageId,ClassId,EncodedPixels
    a.jpg,3,1 4 17 4                (4 pixels from the first one down, 4 from the 17th)
    b.jpg,,                         (an image without objects)

There is no common description: each competition has its own under "Data" and "Evaluation". Starts
count from 1. Whether runs go down the columns, as most do, or along the rows, nothing in a file
says: the objects do, whose outlines are much longer if they are read the other way.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ddpkit.convert.labels import LabelledSet, ObjectClasses, Size
from ddpkit.convert.objects import Entries, MarkedImage, draw_objects, not_there
from ddpkit.convert.result import size_of
from ddpkit.convert.shapes import Area, Shape, Shapes, fill_pairs
from ddpkit.convert.tree import Tree
from ddpkit.errors import UserError, shorten
from ddpkit.vision import lists

# Columns, in small letters: of runs, of names of images, of classes.
RUN_COLUMNS = ("encodedpixels", "rle", "rle_mask", "rles", "annotation", "segmentation")
IMAGE_COLUMNS = (
    "imageid",
    "image_id",
    "id",
    "img",
    "image",
    "image_name",
    "filename",
    "file",
)
CLASS_COLUMNS = ("classid", "class_id", "class", "label", "category")
BOTH = "imageid_classid"  # as x.jpg_3
NO_RUNS = ("", "-1", "nan")  # an image without objects
Row = tuple[str, str, int]  # class, runs, number of the row
LOOKED_AT = 20  # images, to find out which way runs go
CLEAR = 1.1  # times as long outlines are if runs are read the other way


def columns_of(tree: Tree, name: str) -> tuple[str, str, str] | None:
    """Return the columns of runs, of images and of classes ("" if there is none), or None."""
    row = tree.first_row(name)
    known = {column.lower(): column for column in row}

    def first(names: tuple[str, ...]) -> str:
        return next((known[each] for each in names if each in known), "")

    images = first((*IMAGE_COLUMNS, BOTH))
    runs = first(RUN_COLUMNS)
    return (runs, images, first(CLASS_COLUMNS)) if runs and images else None


def not_read(
    name: str, rows: Sequence[dict[str, Any]], read: Iterable[str]
) -> list[str]:
    """Return a line that names the columns besides those that are read, or none."""
    others = [column for column in (rows[0] if rows else ()) if column]
    others = [column for column in others if column not in read]
    return [f"{name}: columns that are not read: {shorten(others)}"] if others else []


def find_runs(tree: Tree) -> list[str]:
    """Return the CSV files with runs, but for samples of submissions."""
    return [
        name
        for name in tree.with_ending(".csv")
        if "submission" not in name.lower() and columns_of(tree, name)
    ]


def read_runs(
    tree: Tree, names: Sequence[str], by_columns: bool | None = None
) -> LabelledSet:
    """Return the set; by_columns: which way runs go, None to find it out."""
    # by file, image and part that is stated: class and runs of its objects, with their rows
    objects: dict[tuple[str, str, str], list[Row]] = {}
    used = set()
    notes = []
    for name in names:
        runs, images, class_column = columns_of(tree, name) or ("", "", "")
        rows = list(tree.rows(name))
        if images.lower() != BOTH:
            images = tree.image_column(tree.path(name), rows) or images
        split = lists.part_column(rows)
        notes += not_read(name, rows, (runs, images, class_column, split))
        for number, row in enumerate(rows, 2):
            image = row.get(images, "")
            label = row.get(class_column, "") if class_column else ""
            if images.lower() == BOTH:
                image, _, label = image.rpartition("_")
            stated = lists.stated_part(row, split, f"{tree.path(name)}, row {number}")
            own = objects.setdefault((name, image, stated), [])
            if row.get(runs, "").lower() not in NO_RUNS:
                own.append((label or "object", row[runs], number))
                used.add(label)
    in_order = sorted(used, key=lambda text: (len(text), text))  # 2 before 10
    classes = ObjectClasses(text or "object" for text in in_order)
    entries = list(marked_images(tree, objects, classes))
    marked = [each for each in entries if isinstance(each, MarkedImage)]
    if marked and by_columns is None:
        # of single runs alone nothing tells, so they go as most do
        runs_of = [row[1] for own in objects.values() for row in own]
        by_columns = all(text.count(" ") < 2 for text in runs_of) or go_down(marked)
        if not by_columns:
            notes.append("runs go along the rows: outlines are shorter so")
    for each in marked:
        each.shapes = partial(each.shapes, by_columns=by_columns)
    labelled = draw_objects(tree, classes, [iter(entries)])
    labelled.notes = notes
    return labelled


def marked_images(
    tree: Tree, objects: dict[tuple[str, str, str], list[Row]], classes: ObjectClasses
) -> Entries:
    """Yield the images; of each `shapes` still needs to know which way runs go."""
    for (name, image, stated), own in objects.items():
        path, part = tree.find_sample(image, name, stated)
        if path is None:
            yield not_there(name, image)
            continue
        shapes = partial(run_shapes, own, str(tree.path(name)), classes)
        yield MarkedImage(path, part, f"{tree.path(name)}, {image}", shapes)


def go_down(marked: Sequence[MarkedImage]) -> bool:
    """Return whether runs go down the columns: whether outlines are shorter so, in some images.

    Raises a UserError if they are of about one length, as in square images always.
    """
    down = along = 0
    for each in marked[:: 1 + len(marked) // LOOKED_AT]:
        with contextlib.suppress(OSError, ValueError):  # it is left out later
            size = size_of(each.image)
            down += outline_of(each.shapes(size, by_columns=True))
            along += outline_of(each.shapes(size, by_columns=False))
    if max(down, along) > CLEAR * min(down, along):
        return down < along
    raise UserError(
        f"{marked[0].where}: it is not clear whether runs (RLE) go down the columns or along the "
        "rows; add --format rle-csv-columns or --format rle-csv-rows, and look at check.png"
    )


def outline_of(shapes: Shapes) -> int:
    """Return at how many places a pixel inside an object is next to one outside."""
    total = 0
    for shape in shapes:
        inside = shape.cover.inside
        total += np.diff(inside, axis=0).sum() + np.diff(inside, axis=1).sum()
    return total


def run_shapes(
    rows: Sequence[Row], file: str, classes: ObjectClasses, size: Size, by_columns: bool
) -> Iterator[Shape]:
    for label, runs, number in rows:
        where = f"{file}, row {number}"
        inside = fill_pairs(runs, size, where, by_columns)
        yield Shape(classes.number(label, where), where, Area(0, 0, inside))
