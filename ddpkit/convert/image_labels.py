"""Labels of whole images in CSV files: Roboflow's, Kaggle's, and those of Hugging Face.

    id,breed          filename, cat, dog     (_classes.csv)
    a,pug             a.jpg, 1, 0

    {"file_name": "a.jpg", "label": "pug"}   (metadata.jsonl, or .csv with these columns)

Described at huggingface.co, Datasets, "Create an image dataset", ImageFolder; the others are not.
What the columns mean is told by their names alone.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddpkit.convert import runs
from ddpkit.convert.labels import LabelledSet, Sample
from ddpkit.convert.objects import not_there
from ddpkit.convert.tree import Json, Tree
from ddpkit.errors import UserError
from ddpkit.vision import lists

# Columns, in small letters: of images, and of labels.
IMAGE_COLUMNS = (*runs.IMAGE_COLUMNS, "file_name", "image_path", "path", "name")
LABEL_COLUMNS = (
    "label",
    "labels",
    "class",
    "category",
    "breed",
    "species",
    "target",
    "tags",
)
METADATA = ("metadata.csv", "metadata.jsonl")
# columns that are none, of sets of captions or of objects
NO_LABELS = {"text", "caption", "captions", "prompt", "description", "objects", "bbox"}
YES_NO = {"0", "1", "0.0", "1.0"}


def find_several(tree: Tree) -> list[str]:
    """Return Roboflow's lists, with a column of 0 and 1 per class."""
    return tree.tables("_classes.csv", "filename")


def find_metadata(tree: Tree) -> list[str]:
    """Return the lists of Hugging Face that have labels."""
    names = []
    for name in tree.files_named(*METADATA):
        row = next(records(tree, name), {})
        if "file_name" in row and label_columns([row], "file_name"):
            names.append(name)
    return names


def find_lists(tree: Tree) -> list[str]:
    """Return the CSV files whose first row names an image that is there, and has a label."""
    names = []
    for name in lists_of_images(tree):
        row = tree.first_row(name)
        if label_columns([row], image_column(row)):
            names.append(name)
    return names


def lists_of_images(tree: Tree) -> list[str]:
    """Return the CSV files in which a row names an image that is there."""
    names = []
    several = find_several(tree)
    for name in tree.with_ending(".csv"):
        is_other = name in several or runs.columns_of(tree, name)
        row = tree.first_row(name)
        image = image_column(row)
        if "submission" in name.lower() or is_other or not row:
            continue
        rows = tree.rough_rows(name)
        if any(tree.has_image(each.get(image, "")) for each in rows):
            names.append(name)
    return names


def refuse_unclear(tree: Tree) -> None:
    """Raise a UserError if a CSV file has images, and no column that is known as their labels."""
    for name in lists_of_images(tree):
        row = tree.first_row(name)
        others = [column for column in row if column != image_column(row)]
        if others:
            raise UserError(
                f"{tree.path(name)}: none of its columns {', '.join(others)} is known as that of "
                "the labels; name it label in the first line"
            )


def records(tree: Tree, name: str) -> Iterator[dict[str, Json]]:
    """Yield the rows of a CSV file, or the objects of a file with one in each line."""
    if not name.endswith(".jsonl"):
        yield from tree.rows(name)
        return
    for number, line in enumerate(tree.lines(name), 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise UserError(
                f"{tree.path(name)}, line {number}: no JSON object; repair or remove it"
            )
        yield row


def image_column(row: dict[str, Json]) -> str:
    known = {column.lower(): column for column in row}
    named = [known[each] for each in IMAGE_COLUMNS if each in known]
    # else the first one
    return named[0] if named else next(iter(row), "")


def label_columns(rows: Sequence[dict[str, Json]], image: str) -> list[str]:
    """Return the column of labels; or those of classes, which have 0 or 1; or none."""
    split = lists.part_column(rows)
    others = [column for column in rows[0] if column and column not in (image, split)]
    for column in others:
        if column.lower() in LABEL_COLUMNS:
            return [column]
    if len(others) > 1:
        are_classes = all(
            str(row.get(column)) in YES_NO for row in rows for column in others
        )
        return others if are_classes else []
    return others


def refuse_others(tree: Tree, name: str, column: str, value: Json) -> None:
    """Raise a UserError if a column has no labels of images, but texts or objects."""
    if column.lower() in NO_LABELS or isinstance(value, dict):
        raise UserError(
            f"{tree.path(name)}: its column {column} has texts or objects, no labels of images; "
            "name the column of the labels label"
        )


def labels_in_row(row: dict[str, Json], columns: Sequence[str]) -> list[str]:
    if len(columns) > 1:
        return [column for column in columns if float(row[column] or 0) >= 0.5]
    value = row.get(columns[0])
    if isinstance(value, list):
        return [str(each) for each in value]
    return lists.labels_in("" if value is None else str(value), ";|")


def blanks_in(
    name: str, rows: Sequence[dict[str, Json]], columns: Sequence[str]
) -> list[str]:
    """Return a line if a column for several labels may have blanks between them, or none."""
    if len(columns) > 1 or columns[0].lower() not in ("labels", "tags"):
        return []
    for row in rows:
        for label in labels_in_row(row, columns):
            if " " in label:
                return [
                    f'{name}: "{label}" is one class; if these are several labels, write ; between'
                ]
    return []


def read_lists(tree: Tree, names: Sequence[str]) -> LabelledSet:
    labelled = LabelledSet([])
    of_image: dict[Path, tuple[str, ...]] = {}
    classes: set[str] = set()
    for name in names:
        rows = list(records(tree, name))
        image = image_column(rows[0])
        split = lists.part_column(rows)
        columns = label_columns(rows, image)
        if not columns:
            raise UserError(
                f"{tree.path(name)}: its columns are not 0 and 1 in each row; name the column of "
                "the labels label, or correct them"
            )
        labelled.notes += runs.not_read(name, rows, (image, split, *columns))
        labelled.notes += blanks_in(name, rows, columns)
        for row in rows:
            refuse_others(tree, name, columns[0], row.get(columns[0]))
            given = str(row.get(image) or "")
            stated = lists.stated_part(row, split, f"{tree.path(name)}, {given}")
            path = None
            if given:
                path, part = tree.find_sample(given, name, stated)
            if path is None:
                labelled.skipped.add(not_there(name, given))
                continue
            try:
                labels = tuple(sorted(set(labels_in_row(row, columns))))
            except ValueError:
                raise UserError(
                    f"{tree.path(name)}: {given}: its labels are not 0 and 1; correct them"
                ) from None
            if of_image.setdefault(path, labels) != labels:
                raise UserError(
                    f"{tree.path(name)}: {given} comes twice, with other labels; remove one row, "
                    "or write them into one, with ; between"
                )
            classes.update(labels)
            labelled.samples.append(Sample(path, part, labels=labels))
    tree.count_unnamed(labelled)
    labelled.several = any(len(sample.labels) > 1 for sample in labelled.samples)
    if len(classes) > 1 and not labelled.several:
        # of several labels one may be none; of one, there is nothing to learn
        for sample in [each for each in labelled.samples if not each.labels]:
            labelled.skipped.leave_out(
                "images without a label", tree.below(sample.image)
            )
            labelled.samples.remove(sample)
    labelled.names = sorted(classes)
    return labelled
