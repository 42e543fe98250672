"""Kaggle's runs (RLE) in a CSV file: a row per object, the image's name and START LENGTH ..."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ddpkit.convert.labels import LabelledSet, ObjectClasses, Sample, Size, part_of
from ddpkit.convert.shapes import Area, Drawing, Shape, fill_pairs
from ddpkit.convert.tree import Tree
from ddpkit.errors import UserError, shorten

# Columns, in small letters: of runs, of names of images, of classes.
RUNS = ("encodedpixels", "rle", "rle_mask", "rles", "annotation", "segmentation")
IMAGES = ("imageid", "image_id", "id", "img", "image", "image_name", "filename", "file")
CLASSES = ("classid", "class_id", "class", "label", "category")
SPLITS = ("split", "subset", "set", "partition")  # which part a row belongs to
BOTH = "imageid_classid"  # as x.jpg_3
NOTHING = ("", "-1", "nan")  # an image without objects


def columns_of(tree: Tree, name: str) -> tuple[str, str, str] | None:
    """Return the columns of runs, of images and of classes ("" if there is none), or None."""
    row = tree.first_row(name)
    known = {column.lower(): column for column in row}

    def first(names: tuple[str, ...]) -> str:
        return next((known[each] for each in names if each in known), "")

    images = first((*IMAGES, BOTH))
    runs = first(RUNS)
    return (runs, images, first(CLASSES)) if runs and images else None


def split_column(rows: Sequence[dict[str, Any]]) -> str:
    """Return the column that says of each row which part it belongs to; "" if there is none."""
    for column in rows[0] if rows else ():
        if column.lower() in SPLITS and all(
            part_of(str(row.get(column))) for row in rows
        ):
            return column
    return ""


def not_read(
    name: str, rows: Sequence[dict[str, Any]], read: Iterable[str]
) -> list[str]:
    """Return a line that names the columns besides those that are read, or none."""
    others = [column for column in (rows[0] if rows else ()) if column]
    others = [column for column in others if column not in read]
    return [f"{name}: columns that are not read: {shorten(others)}"] if others else []


def find_of_row(
    tree: Tree, given: str, name: str, stated: str
) -> tuple[Path | None, str]:
    """Return the image of a row and its part, which the row may state.

    Then its images may lie where the other ones of the file do.
    """
    path, part = tree.find_sample(given, name, stated)
    if path is None and stated and part_of(name):
        path = tree.find_image(given, name, part_of(name))
    return path, part


def find_runs(tree: Tree) -> list[str]:
    """Return the CSV files with runs, but for samples of submissions."""
    return [
        name
        for name in tree.with_ending(".csv")
        if "submission" not in name.lower() and columns_of(tree, name)
    ]


def read_runs_by_rows(tree: Tree) -> LabelledSet:
    return read_runs(tree, by_columns=False)


def read_runs(tree: Tree, by_columns: bool = True) -> LabelledSet:
    names = find_runs(tree)
    if not names:
        raise UserError(
            f"{tree.root}: no CSV file in it has a column of images and one of {', '.join(RUNS)}"
        )
    # by file and image: class and runs of its objects, with their rows
    objects: dict[tuple[str, str, str], list[tuple[str, str, int]]] = {}
    used = set()
    notes = []
    for name in names:
        runs, images, class_column = columns_of(tree, name) or ("", "", "")
        rows = list(tree.rows(name))
        split = split_column(rows)
        notes += not_read(name, rows, (runs, images, class_column, split))
        for number, row in enumerate(rows, 2):
            image = row.get(images, "")
            label = row.get(class_column, "") if class_column else ""
            if images.lower() == BOTH:
                image, _, label = image.rpartition("_")
            stated = part_of(row.get(split) or "")
            own = objects.setdefault((name, image, stated), [])
            if row.get(runs, "").lower() not in NOTHING:
                own.append((label, row[runs], number))
                used.add(label)
    in_order = sorted(used, key=lambda text: (len(text), text))  # 2 before 10
    classes = ObjectClasses(text or "object" for text in in_order)
    found = LabelledSet([], classes.names, notes=notes)
    for (name, image, stated), own in objects.items():
        path, part = find_of_row(tree, image, name, stated)
        if path is None:
            found.skipped.leave_out(f"images of {name} that are not there", image)
            continue

        def run_shapes(size: Size, own: list = own, name: str = name) -> list[Shape]:
            shapes = []
            for label, runs, number in own:
                place = f"{tree.path(name)}, row {number}"
                inside = fill_pairs(runs, size, place, by_columns)
                label_number = classes.number(label or "object", place)
                shapes.append(Shape(label_number, place, area=Area(0, 0, inside)))
            return shapes

        draw = Drawing(run_shapes, found.skipped, f"{tree.path(name)}, {image}")
        found.samples.append(Sample(path, part, draw))
    tree.count_unnamed(found)
    return found
