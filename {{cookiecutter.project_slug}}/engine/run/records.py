"""The metrics of all epochs: metrics.csv, and a tracker such as MLflow, W&B or Aim. On rank 0."""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from engine import files
from engine.ranks import distributed

FILE = "tracker.json"  # the id of the tracker's run, and how many epochs it has got
IMAGES = ("examples.png", "per_class.csv", "confusion.png", "worst.png")  # of best.pt
# Takes the id of the run to continue, or None; returns its id, and what takes a row of numbers.
Start = Callable[[str | None], tuple[str, Callable[[dict[str, float]], object]]]


def write_table(folder: Path, rows: Sequence[Mapping[str, float | str]]) -> None:
    """Write metrics.csv."""
    columns = dict.fromkeys(name for row in rows for name in row)
    path = folder / "metrics.csv"
    with files.writing(path) as tmp_path, open(tmp_path, "w", encoding="utf-8") as file:
        table = csv.DictWriter(file, columns, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def count(folder: Path) -> int:
    """Return how many rows metrics.csv has."""
    path = folder / "metrics.csv"
    return max(0, len(path.read_bytes().splitlines()) - 1) if path.exists() else 0


def remove_images(folder: Path) -> None:
    """Remove the images of best.pt, before another file gets that name."""
    for name in IMAGES:
        (folder / name).unlink(missing_ok=True)


def are_drawn(folder: Path) -> bool:
    """Return whether best.pt has its images, of which examples.png comes last, and curves.png is
    as new as metrics.csv: a run may have been killed after saving.
    """
    table, curves = folder / "metrics.csv", folder / "curves.png"
    if (folder / "best.pt").exists() and not (folder / "examples.png").exists():
        return False
    has_curves = curves.exists() and curves.stat().st_mtime >= table.stat().st_mtime
    return has_curves or not table.exists()


def are_complete(folder: Path, epochs: int) -> bool:
    """Return, on all ranks, whether the run in `folder` has recorded and drawn all `epochs`."""

    def check() -> bool:
        known = read_tracker(folder)
        recorded = min(count(folder), known["epochs"] if known else epochs)
        is_recorded = recorded >= epochs and are_drawn(folder)
        return is_recorded or not (folder / "last.pt").exists()

    return distributed.from_rank_zero(check)


class Tracker:
    """Gives rows to a tracker: all of them, in order, also those that it missed before a kill.

    A kill just after a row was given repeats it, with the same `epoch`.
    """

    def __init__(self, folder: Path, start: Start, finished: int) -> None:
        """Start the tracker, or continue its run if the `folder` has one; see Start.

        Rows of later epochs than `finished`, before going back to an earlier checkpoint, are given
        again.
        """
        self.path = folder / FILE
        known = read_tracker(folder) or {"run": None, "epochs": 0}
        self.run, self.log = start(known["run"])
        self.epochs = min(known["epochs"], finished)
        self.save()

    def save(self) -> None:
        with files.writing(self.path) as tmp_path:
            tmp_path.write_text(json.dumps({"run": self.run, "epochs": self.epochs}) + "\n")

    def update(self, rows: Sequence[Mapping[str, float | str]]) -> None:
        """Give the tracker the rows that it lacks; if it fails, try again after the next epoch."""
        for row in rows[self.epochs :]:
            numbers = {name: value for name, value in row.items() if not isinstance(value, str)}
            try:
                self.log(numbers)
            except Exception as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                line = f"the tracker did not take epoch {row['epoch']} ({reason[:200]})"
                return distributed.say(f"{line}; trying again after the next one, and on resume")
            self.epochs += 1
            self.save()


def read_tracker(folder: Path) -> dict | None:
    path = folder / FILE
    return json.loads(path.read_text()) if path.exists() else None
