"""Kaggle's runs (RLE) in a CSV file: a row per object.

    ImageId,ClassId,EncodedPixels
    a.jpg,3,1 4 17 4                (4 pixels from the first one down, 4 from the 17th)
    b.jpg,,                         (an image without objects)

There is no common description: each competition has its own under "Data" and "Evaluation". Starts
count from 1. Whether runs go down the columns, as most do, or along the rows, nothing in a file
says: the objects do, whose outlines are much longer if they are read the other way.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ddpkit.convert.labels import LabelledSet, ObjectClasses, Size
from ddpkit.convert.objects import MarkedImage, draw_objects, not_there
from ddpkit.convert.result import size_of
from ddpkit.convert.shapes import Area, Shape, fill_pairs
from ddpkit.convert.tree import Rows, Tree
from ddpkit.errors import UserError, shorten
from ddpkit.vision import lists

# Columns, in small letters: of runs, of classes.
RUN_COLUMNS = ("encodedpixels", "rle", "rle_mask", "rles", "annotation", "segmentation")
CLASS_COLUMNS = ("classid", "class_id", "class", "label", "category")
BOTH = "imageid_classid"  # as x.jpg_3
NO_RUNS = ("", "-1", "nan")  # an image without objects
RUNS = re.compile(r"\d+( +\d+)+")
LOOKED_AT = 20  # images, to find out which way runs go
CLEAR = 1.1  # times as long outlines are if runs are read the other way


class Row(NamedTuple):
    """An object. where: file and row, for messages."""

    label: str
    runs: str
    where: str


def run_column(tree: Tree, name: str) -> str:
    """Return the column of a CSV file that has such a name, and runs; "" if there is none."""
    for _, row in tree.rough_rows(name):
        for column, cell in row.items():
            if column.lower() in RUN_COLUMNS and RUNS.match(cell):
                return column
    return ""


def not_read(name: str, rows: Rows, *read: str) -> list[str]:
    """Return a line that names the columns besides those that are read, or none."""
    others = sorted(rows[0][1].keys() - {"", *read})
    return [f"{name}: columns that are not read: {shorten(others)}"] if others else []


def find_runs(tree: Tree) -> list[str]:
    """Return the CSV files with runs, but for samples of submissions."""
    return [
        name
        for name in tree.with_ending(".csv")
        if "submission" not in name.lower() and run_column(tree, name)
    ]


def read_runs(
    tree: Tree, names: Sequence[str], by_columns: bool | None = None
) -> LabelledSet:
    """Return the set; by_columns: which way runs go, None to find it out."""
    # by file, image and part that is stated
    rows_of: dict[tuple[str, str, str], list[Row]] = {}
    used = set()
    notes = []
    for name in names:
        path = tree.path(name)
        rows = list(lists.read_rows(path))
        runs = run_column(tree, name)
        known = {column.lower(): column for column in rows[0][1]}
        images = known.get(BOTH) or tree.image_column(path, rows)
        class_column = next((known[x] for x in CLASS_COLUMNS if x in known), "")
        split = lists.part_column(rows, path)
        notes += not_read(name, rows, runs, images, class_column, split)
        for number, row in rows:
            where = f"{path}, row {number}"
            image = row[images]
            label = row.get(class_column, "")
            if images.lower() == BOTH:
                image, _, label = image.rpartition("_")
            stated = lists.stated_part(row, split, where)
            lists.refuse_missing(where, class_column, [label])
            own = rows_of.setdefault((name, image, stated), [])
            if row[runs].lower() not in NO_RUNS:
                own.append(Row(label or "object", row[runs], where))
                used.add(label or "object")
    in_order = sorted(used, key=lambda text: (len(text), text))  # 2 before 10
    classes = ObjectClasses(in_order)
    found: list[tuple[Path, str, str, list[Row]]] = []
    left_out = []
    for (name, given, stated), own in rows_of.items():
        image_path, part = tree.find_sample(given, name, stated)
        if image_path:
            found.append((image_path, part, f"{tree.path(name)}, {given}", own))
        else:
            left_out.append(not_there(name, given))
    if by_columns is None:
        by_columns = go_down(found)
        if not by_columns:
            notes.append("runs go along the rows: outlines are shorter so")
    marked = (
        MarkedImage(path, part, where, partial(run_shapes, own, classes, by_columns))
        for path, part, where, own in found
    )
    labelled = draw_objects(tree, classes, [iter(left_out), marked])
    labelled.notes = notes
    return labelled


def go_down(marked: Sequence[tuple[Path, str, str, list[Row]]]) -> bool:
    """Return whether runs go down the columns: whether outlines are shorter so, in some images.

    marked: images, parts, places in files, and rows. Raises a UserError if outlines are of about
    one length, as in square images always. Of single runs alone nothing tells, so they go as most.
    """
    several = [row for *_, rows in marked for row in rows if row.runs.count(" ") > 1]
    if not several:
        return True
    down = 0
    along = 0
    for path, *_, rows in marked[:: 1 + len(marked) // LOOKED_AT]:
        with contextlib.suppress(OSError, ValueError):  # it is left out later
            size = size_of(path)
            if size:
                down += outlines_of(rows, size, by_columns=True)
                along += outlines_of(rows, size, by_columns=False)
    if max(down, along) > CLEAR * min(down, along):
        return down < along
    raise UserError(
        f"{several[0].where}: it is not clear whether runs (RLE) go down the columns or along the "
        "rows; add --format rle-csv-columns or --format rle-csv-rows, and look at check.png"
    )


def outlines_of(rows: Sequence[Row], size: Size, by_columns: bool) -> int:
    """Return at how many places a pixel inside an object is next to one outside."""
    total = 0
    for row in rows:
        inside = fill_pairs(row.runs, size, row.where, by_columns)
        total += int(np.diff(inside, axis=0).sum() + np.diff(inside, axis=1).sum())
    return total


def run_shapes(
    rows: Sequence[Row], classes: ObjectClasses, by_columns: bool, size: Size
) -> Iterator[Shape]:
    for row in rows:
        inside = fill_pairs(row.runs, size, row.where, by_columns)
        number = classes.number(row.label, row.where)
        yield Shape(number, row.where, Area(0, 0, inside))
