"""Kaggle's runs (RLE) in a CSV file: a row per object.

    ImageId,ClassId,EncodedPixels
    a.jpg,3,1 4 17 4                (4 pixels from the first one down, 4 from the 17th)
    b.jpg,,                         (an image without objects)

There is no common description: each competition has its own under "Data" and "Evaluation". What
most have in common, starts from 1 and down the columns, is taken; nothing in a file says otherwise.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from ddpkit.convert.labels import LabelledSet, ObjectClasses, Size
from ddpkit.convert.objects import Entries, MarkedImage, draw_objects, not_there
from ddpkit.convert.shapes import Area, Shape, fill_pairs
from ddpkit.convert.tree import Tree
from ddpkit.errors import shorten
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


def read_runs(tree: Tree, names: Sequence[str], by_columns: bool = True) -> LabelledSet:
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
    entries = marked_images(tree, objects, classes, by_columns)
    labelled = draw_objects(tree, classes, [entries])
    labelled.notes = notes
    return labelled


def marked_images(
    tree: Tree,
    objects: dict[tuple[str, str, str], list[Row]],
    classes: ObjectClasses,
    by_columns: bool,
) -> Entries:
    for (name, image, stated), own in objects.items():
        path, part = tree.find_sample(image, name, stated)
        if path is None:
            yield not_there(name, image)
            continue
        shapes = partial(run_shapes, own, str(tree.path(name)), classes, by_columns)
        yield MarkedImage(path, part, f"{tree.path(name)}, {image}", shapes)


def run_shapes(
    rows: Sequence[Row], file: str, classes: ObjectClasses, by_columns: bool, size: Size
) -> Iterator[Shape]:
    for label, runs, number in rows:
        where = f"{file}, row {number}"
        inside = fill_pairs(runs, size, where, by_columns)
        yield Shape(classes.number(label, where), where, Area(0, 0, inside))
