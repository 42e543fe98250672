"""Samples listed in a CSV file."""

import csv
import os
from collections.abc import Sequence
from pathlib import Path

from engine.errors import UserError


def read_list(path: Path, columns: Sequence[str], files: int) -> list[tuple[str, ...]]:
    """Return the values of `columns` in each row of the CSV file `path`; its first line names them.

    The first `files` of them are file names relative to the folder of `path`, returned as paths.
    Raises a UserError if a column or a value is missing, or a file does not exist.
    """
    found = []
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            if missing := [name for name in columns if name not in (table.fieldnames or ())]:
                has = ",".join(table.fieldnames or ())[:80]
                raise UserError(
                    f"{path}: no column {missing[0]} in its first line, {has!r}; it must name the "
                    f"columns {','.join(columns)}. Rename it if folders are to be used instead"
                )
            for row in table:
                values = [(row[name] or "").strip() for name in columns]
                if "" in values:
                    empty = columns[values.index("")]
                    raise UserError(f"{path}, line {table.line_num}: no {empty}; add it")
                for number in range(files):
                    values[number] = os.path.join(path.parent, values[number])
                    if not os.path.isfile(values[number]):
                        line = f"{path}, line {table.line_num}"
                        raise UserError(
                            f"{line}: {values[number]} does not exist; correct the line"
                        )
                found.append(tuple(values))
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8; save it as UTF-8") from None
    except csv.Error as error:
        raise UserError(f"{path}: cannot be read ({error}); save it as CSV") from None
    if not found:
        raise UserError(f"{path}: no rows; list the samples in it, or remove the file")
    return found
