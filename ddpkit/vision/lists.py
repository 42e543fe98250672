"""Tables of samples: the rows of a CSV file, the column of their parts, the labels in a cell."""

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ddpkit import files
from ddpkit.errors import UserError
from ddpkit.vision import places

# in small letters
PART_COLUMNS = {"split", "subset", "set", "part", "partition", "data set"}
# What programs write for a value that is missing; none, in small letters, is a word of people's.
MISSING = {
    "nan",
    "NaN",
    "NaT",
    "None",
    "NULL",
    "null",
    "NA",
    "N/A",
    "n/a",
    "<NA>",
    "#N/A",
}
# a column that tells the rows of a part by yes and no
ANSWER = re.compile(f"is_?({'|'.join(places.PART_OF)})", re.IGNORECASE)
Row = dict[str, str]
Rows = Iterator[tuple[int, Row]]  # with the numbers of their lines


def read_rows(path: Path) -> Rows:
    """Yield the rows of a CSV file; a UserError if one has more cells than there are columns."""
    return parse_rows(files.read_text(path), path)


def parse_rows(text: str, path: Path | None = None) -> Rows:
    """Yield the rows of a CSV text that are not empty, without blanks around names and cells.

    path: of the file, for errors; without it the text may be any, and none is raised.
    """
    first = text.partition("\n")[0]
    # a cell of runs or labels has blanks within
    separator = max(",;\t", key=first.count)
    csv.field_size_limit(2**31 - 1)  # runs of a large mask are one cell
    table = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    names = [name.strip() for name in next(table, ())]
    twice = [name for name, count in Counter(names).items() if name and count > 1]
    if path and twice:
        raise UserError(f"{path}: column {twice[0]} appears twice; rename one of them")
    for cells in table:
        if path and any(cells[len(names) :]):
            raise UserError(
                f"{path}, line {table.line_num}: more cells than the first line has columns; put "
                "quotes around a cell with the separator in it"
            )
        cells += [""] * (len(names) - len(cells))
        row = dict(zip(names, map(str.strip, cells), strict=False))
        if any(row.values()):
            yield table.line_num, row


def part_column(rows: Iterable[tuple[int, Mapping]], path: Path) -> str:
    """Return the column in which rows name train, val or test; "" if there is none.

    path: of the table. Raises a UserError if a column tells a part by yes and no.
    """
    found = ""
    for _, row in rows:
        for column, cell in row.items():
            if ANSWER.fullmatch(column):
                raise UserError(
                    f"{path}: column {column} tells splits apart by yes and no; write a list for "
                    "each split, or train, val or test into a column split, which convert reads; "
                    "if it has the labels, name it label"
                )
            if column.lower() in PART_COLUMNS and places.is_part(str(cell)):
                found = found or column
    return found


def stated_part(row: Mapping[str, object], column: str, where: object) -> str:
    """Return the part that a row names in `column`; "" without a column, an error if it is none."""
    part = places.part_in_name(str(row.get(column)))
    if column and not part:
        raise UserError(
            f"{where}: {column} is {row.get(column)}, which is none of {', '.join(places.PARTS)}; "
            "correct it, or remove the column"
        )
    return part


def labels_in(cell: str, separators: str) -> list[str]:
    """Return the labels in a cell, between any of the letters `separators`."""
    labels = map(str.strip, re.split(f"[{separators}]", cell))
    return list(filter(None, labels))


def refuse_missing(where: object, column: str, labels: Iterable[str]) -> None:
    """Raise a UserError if one of the labels in a row is a missing value."""
    for label in MISSING.intersection(labels):
        raise UserError(
            f"{where}: {column} is {label}, which usually means a missing value; remove the "
            "row, or, if it is a class, rename it, such as none"
        )
