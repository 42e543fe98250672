"""The rows of metrics.csv, one of each epoch, and how they are printed; without torch."""

import contextlib
import csv
import io
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ddpkit import files

Row = Mapping[str, float | str]

# columns of those who tune a run: in metrics.csv, but neither printed nor drawn
OF_TUNING = {
    "epoch",
    "step",
    "lr",
    "img_per_s",
    "train_seconds",
    "data_wait",
    "peak_memory",
}
WIDTH = 100  # letters of a line
FEW = 5  # epochs, which suggest nothing yet
LONGEST = 24  # of a column's name
GAP = "  "


def only_numbers(row: Row) -> dict[str, float]:
    return {name: x for name, x in row.items() if isinstance(x, int | float)}


def recorded_rows(folder: Path, epochs: float = math.inf) -> list[Row]:
    """Return the rows of metrics.csv up to the epoch of that number, without empty cells.

    Rows that cannot be read, as after a crash of the machine, are left out.
    """
    path = folder / "metrics.csv"
    rows: list[Row] = []
    if not path.is_file():  # nor a pipe, which may not end
        return rows
    text = files.read_text(path, "surrogateescape").replace("\0", "")
    with contextlib.suppress(csv.Error):
        for cells in csv.DictReader(io.StringIO(text, newline=""), restval=""):
            row = {
                name: as_number(cell) for name, cell in cells.items() if name and cell
            }
            number = row.get("epoch")
            if isinstance(number, int) and number <= epochs:
                rows.append(row)
    return rows


def as_number(text: str) -> float | str:
    """Return the number that a cell holds, as Python writes one, or else its text."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            value = kind(text)
            if str(value) == text:
                return value
    return text


def best_row(rows: Sequence[Row], name: str, direction: object) -> Row | None:
    """Return the first row with the best `name`; None if none has it. direction: max or min."""
    known = [row for row in rows if not math.isnan(number_in(row, name))]
    sign = -1 if direction == "min" else 1
    return max(known, key=lambda row: sign * number_in(row, name), default=None)


def what_next(rows: Sequence[Row], name: str, direction: object) -> str:
    """Return what the epochs suggest to try, by their losses and by `name`; "" if nothing.

    Overfitting: since its lowest val_loss has risen by a tenth, and train_loss has fallen.
    """
    lowest = best_row(rows, "val_loss", "min")
    if not lowest or len(rows) <= FEW:
        return ""
    last = rows[-1]
    has_risen = number_in(last, "val_loss") > 1.1 * number_in(lowest, "val_loss")
    if has_risen and number_in(last, "train_loss") < number_in(lowest, "train_loss"):
        return (
            f"overfitting since epoch {lowest['epoch']}: val_loss has risen while train_loss fell; "
            "try pretrained weights, more augmentation or fewer epochs"
        )
    if best_row(rows, name, direction) is last:
        return "the last epoch was the best: a new run with more epochs may do better"
    return ""


def number_in(row: Row, name: str) -> float:
    """Return the number of a column, NaN if there is none."""
    value = row.get(name)
    return value if isinstance(value, int | float) else math.nan


def as_digits(value: float) -> str:
    """Return `value` with four decimals, so that digits of equal weight lie below each other."""
    if isinstance(value, int):
        return str(value)
    is_usual = value == 0 or 0.001 <= abs(value) < 10_000
    return f"{value:.4f}" if is_usual or not math.isfinite(value) else f"{value:.2e}"


def clip(text: str, letters: int = LONGEST) -> str:
    # ? for what is no UTF-8 in a file name
    text = text.encode("utf-8", "replace").decode()
    if len(text) > letters:
        text = text[: letters - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return text


def clip_middle(path: str, letters: int = 40) -> str:
    """Return a path without its middle, if it is long: the end is the name of the file."""
    if len(path) > letters:
        first = path[: letters // 3]
        path = f"{first}\N{HORIZONTAL ELLIPSIS}{path[len(first) + 1 - letters :]}"
    return clip(path, letters)


def is_of_class(name: str, classes: Collection[str]) -> bool:
    """Return whether a column, such as iou_crack, is that of a single class."""
    if name in ("train_loss", "val_loss"):  # also if a class is called loss
        return False
    return name.endswith(tuple(f"_{each}" for each in classes))


def table_lines(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: names to the left, numbers, all but the first, to the right."""
    table = [columns, *cells]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        words = list(map(str.rjust, row, widths))
        words[0] = row[0].ljust(widths[0])
        lines.append(GAP.join(words).rstrip())
    return lines


def epoch_lines(
    row: Row,
    epochs: int,
    classes: Collection[str],
    left: str,
    best: str = "",
    is_best: bool = False,
) -> tuple[str, str]:
    """Return the header above the line of an epoch, and the line, at most WIDTH letters wide.

    epochs: how many there will be. classes: their columns are shown if all of them fit. left: the
    time, in column eta. best: the column by which best.pt is chosen.
    """
    numbers = only_numbers(row)
    width = len(f"epoch {epochs}/{epochs}")
    names = fitting(numbers, classes, best, width)
    titles = [clip(name).rjust(8) for name in [*names, "eta"]]
    cells = [as_digits(numbers[name]) for name in names]
    header, line = table_lines(
        [" " * width, *titles],
        [[f"epoch {row['epoch']}/{epochs}", *cells, left]],
    )
    if is_best:
        line += f"{GAP}best"
    return header, line


def fitting(
    names: Collection[str], classes: Collection[str], best: str, width: int
) -> list[str]:
    """Return the columns that fit: losses, `best`, others, and at last those of classes."""
    shown = [name for name in names if name not in OF_TUNING]
    of_class = [name for name in shown if name != best and is_of_class(name, classes)]
    others = [name for name in shown if name not in of_class]
    others.sort(key=lambda name: (not name.endswith("loss"), name != best))
    room = WIDTH - width - len("  00:00:00  best")
    found: list[str] = []
    for group in [*([name] for name in others), of_class]:
        needed = sum(len(GAP) + max(8, len(clip(name))) for name in group)
        if needed <= room:
            found += group
            room -= needed
    return found
