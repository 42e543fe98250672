"""Labels of whole images in CSV files: Roboflow's, Kaggle's, and those of Hugging Face.

    id,breed          filename, cat, dog     (_classes.csv)
    a,pug             a.jpg, 1, 0

    {"file_name": "a.jpg", "label": "pug"}   (metadata.jsonl, or .csv with these columns)

Described at huggingface.co, Datasets, "Create an image dataset", ImageFolder; the others are not.
Images are in the column whose cells name those that are there, whatever its name; labels are in one
that is named so, or whose cells repeat.
"""

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Sequence

from ddpkit.convert import runs
from ddpkit.convert.labels import LabelledSet, Sample
from ddpkit.convert.objects import not_there
from ddpkit.convert.tree import Json, Rows, Tree
from ddpkit.errors import UserError
from ddpkit.vision import lists

# Columns of labels; of captions or of objects; of boxes
LABEL_COLUMN = re.compile(
    "labels?|class|category|breed|species|target|tags", re.IGNORECASE
)
NO_LABELS = re.compile("text|captions?|prompt|description|objects", re.IGNORECASE)
BOX_COLUMN = re.compile(r"[xy]_?(min|max|[12])|bbox\w*|box(es)?", re.IGNORECASE)
BOX = re.compile(r"\S+( +-?[\d.]+){4}( .*)?")
NO_NAME = re.compile(r"[\[{]|.*\n")
YES_NO = {"0", "1", "0.0", "1.0"}


def find_several(tree: Tree) -> list[str]:
    """Return Roboflow's lists, with a column of 0 and 1 per class."""
    return tree.tables("_classes.csv", "filename")


def find_metadata(tree: Tree) -> list[str]:
    """Return the lists of Hugging Face that have more than images."""
    names = []
    for name in tree.files_named("metadata.csv", "metadata.jsonl"):
        _, row = next(records(tree, name), (0, {}))
        if "file_name" in row and len(row) > 1:
            names.append(name)
    return names


@functools.cache  # all rows are looked through
def find_lists(tree: Tree) -> list[str]:
    """Return the CSV files that name images that are there, and their labels."""
    names = []
    for name in lists_of_images(tree):
        with contextlib.suppress(UserError):
            choose_columns(tree, name, list(tree.rough_rows(name)))
            names.append(name)
    return names


@functools.cache
def lists_of_images(tree: Tree) -> list[str]:
    """Return the CSV files in which a row names an image that is there."""
    names = []
    for name in tree.with_ending(".csv"):
        if "submission" in name.lower():
            continue
        cells = (cell for _, row in tree.rough_rows(name) for cell in row.values())
        if any(map(tree.named_as, cells)):
            names.append(name)
    return names


def refuse_unclear(tree: Tree) -> None:
    """Raise a UserError if a CSV file has images, and it is not clear which are their labels."""
    for name in lists_of_images(tree):
        choose_columns(tree, name, list(records(tree, name)))


def records(tree: Tree, name: str) -> Iterator[tuple[int, dict[str, Json]]]:
    """Yield the rows of a CSV file, or the objects of a file with one in each line; numbered."""
    if not name.endswith(".jsonl"):
        yield from lists.read_rows(tree.path(name))
        return
    for number, line in enumerate(tree.lines(name), 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise UserError(
                f"{tree.path(name)}, line {number}: not a JSON object; repair or remove it"
            )
        yield number, row


def choose_columns(tree: Tree, name: str, rows: Rows) -> tuple[str, str, list[str]]:
    """Return the columns of images, of parts ("" if there is none), and of labels.

    Those of labels are one, or several with 0 or 1 in each row. A UserError if that is not clear.
    """
    path = tree.path(name)
    image = tree.image_column(path, rows)
    part = lists.part_column(rows, path)
    others = [
        each for each in rows[0][1] if each and each not in (image, part, "group")
    ]
    for column in filter(BOX_COLUMN.fullmatch, others):
        raise UserError(
            f"{path}: column {column} is of boxes around objects, which have no outline; "
            "export outlines, or, of labels of images, remove the columns of boxes"
        )
    columns = [each for each in others if each.lower() == "label"]
    columns = columns or list(filter(LABEL_COLUMN.fullmatch, others))
    if len(columns) > 1:
        raise UserError(
            f"{path}: {' and '.join(columns)} may each be the labels; name the right one label"
        )
    columns = columns or others
    if not columns:
        raise UserError(f"{path}: no column beside {image}; add one named label")
    if len(columns) == 1:
        seen = explain_cells(columns[0], [row.get(columns[0]) for _, row in rows])
        if seen:
            raise UserError(f"{path}: its column {columns[0]} {seen}")
        return image, part, columns
    for number, row in rows:
        for column in columns:
            if str(row.get(column)) not in YES_NO:
                raise UserError(
                    f"{path}, line {number}: {column} is {row.get(column)}, but with a column for "
                    "each label all cells are 0 or 1; correct it, remove the column, or name the "
                    "one that has the labels label"
                )
    return image, part, columns


def explain_cells(column: str, cells: Sequence[Json]) -> str:
    """Return what the cells of a column hold in place of labels of images; nothing of labels."""
    has_objects = any(isinstance(cell, dict) for cell in cells)
    if has_objects or NO_LABELS.fullmatch(column):
        return "has texts or objects, no labels of images; name the column of the labels label"
    labels = [label for cell in cells for label in labels_in(cell)]
    numbers = list(filter(runs.RUNS.fullmatch, labels))
    if 2 * len(numbers) > len(labels):
        if any(len(text.split()) % 2 for text in labels):
            return "has several numbers in a cell; if they are labels, write ; between them"
        return "has pairs of numbers, as runs (RLE) of masks; if it is one, name it rle"
    if any(map(NO_NAME.match, labels)):
        return "has lists in brackets, or an open quote; write a name, or several with ; between"
    if {*labels} <= YES_NO and len(labels) > len(cells):
        return "has lists of 0 and 1, of which nothing tells the names; write these"
    boxes = list(filter(BOX.fullmatch, labels))
    if 2 * len(boxes) > len(labels):
        return "has boxes around objects, not labels; add a column label"
    is_known = LABEL_COLUMN.fullmatch(column)
    most = max(9, len(labels) - 1) if is_known else len(labels) / 2
    if len(set(labels)) > most:
        return (
            "has another value in nearly each row, but labels repeat; name theirs label"
        )
    return ""


def labels_in(cell: Json, separators: str = ";|") -> list[str]:
    """Return the labels in a cell of CSV, or, without separators, in a value of JSON."""
    if isinstance(cell, str) and separators:
        return lists.labels_in(cell, separators)
    own = cell if isinstance(cell, list) else [cell]
    return [str(label) for label in own if label not in ("", None)]


def read_lists(tree: Tree, names: Sequence[str]) -> LabelledSet:
    labelled = LabelledSet([])
    for name in names:
        rows = list(records(tree, name))
        image, part_column, columns = choose_columns(tree, name, rows)
        labelled.notes += runs.not_read(
            name, rows, image, part_column, "group", *columns
        )
        separators = "" if name.endswith(".jsonl") else ";|"
        for number, row in rows:
            where = f"{tree.path(name)}, line {number}"
            given = str(row.get(image) or "")
            stated = lists.stated_part(row, part_column, where)
            path, part = tree.find_sample(given, name, stated)
            if path is None:
                labelled.skipped.leave_out(*not_there(name, given))
                continue
            own = labels_in(row.get(columns[0]), separators)
            if len(columns) > 1:
                own = [column for column in columns if float(row[column])]
            labels = tuple(sorted(set(own)))
            group = str(row.get("group") or "")
            lists.refuse_missing(where, columns[0], labels)
            lists.refuse_missing(where, "group", [group])
            labelled.samples.append(Sample(path, part, labels=labels, group=group))
    tree.count_unnamed(labelled, everywhere=True)
    labelled.use_labels(tree.root)
    is_list = columns[0].lower() in ("labels", "tags")
    joined = [x for x in labelled.names if "," in x or (is_list and " " in x)]
    if joined:
        labelled.notes.append(
            f'{name}: "{joined[0]}" is one class; if these are several labels, write ; between'
        )
    return labelled
