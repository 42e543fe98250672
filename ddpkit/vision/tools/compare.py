"""Compare runs, best first: python -m ddpkit compare runs/*

Prints of each --output-dir the best value of the metric that chooses best.pt and its epoch, how
many epochs are done, how long they have trained, and the flags that differ between the runs.
"""

import csv
import datetime
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpkit.errors import UserError, escape, print_line, reason_of
from ddpkit.run.flags import OF_A_START, Parser
from ddpkit.vision import rows
from ddpkit.vision.rows import Row

# flags that do not matter, and what data and network say
LEFT_OUT = (*OF_A_START, "output_dir", "several_labels", "crop")
NONE = "-"


@dataclass
class Compared:
    """A run: its flags, its rows of metrics.csv, and the metric by which it has its best epoch."""

    folder: Path
    flags: Mapping[str, object]
    rows: Sequence[Row]
    metric: str
    direction: str
    best: Row

    @property
    def order(self) -> tuple[bool, str, float]:
        """Return what comes first: of each metric the best, and a run without any at the end."""
        if not self.best:
            return (True, self.metric, 0)
        score = rows.number_in(self.best, self.metric)
        return (False, self.metric, score if self.direction == "min" else -score)

    def cells(self) -> list[str]:
        seconds = [rows.number_in(row, "train_seconds") for row in self.rows]
        known = sum(value for value in seconds if math.isfinite(value))
        epochs = str(self.rows[-1]["epoch"] if self.rows else 0)
        if "epochs" in self.flags:
            epochs += f"/{self.flags['epochs']}"
        best = NONE
        if self.best:
            score = rows.number_in(self.best, self.metric)
            best = f"{self.metric} {rows.as_digits(score)}"
        time = str(datetime.timedelta(seconds=round(known)))
        name = rows.clip_middle(escape(self.folder))
        return [name, best, str(self.best.get("epoch", NONE)), epochs, time]


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m ddpkit compare", description=__doc__)
    parser.add_argument(
        "folders",
        nargs="*",
        metavar="RUN",
        type=Path,
        default=[Path("runs")],
        help="an --output-dir, or a folder of some (default: runs)",
    )
    given = parser.parse_args(argv).folders
    found = []
    for folder in given:
        for each in [folder] if is_run(folder) else runs_in(folder):
            try:
                found.append(read_run(each))
            except (OSError, ValueError, RecursionError, csv.Error) as error:
                reason = f"cannot be read: {reason_of(error)}"
                print_line(f"{escape(each)}: left out ({reason})", sys.stdout)
    if not found:
        raise UserError(f"no run in {given[0]}: name the --output-dir of some")
    found.sort(key=lambda run: run.order)
    names = differing([run.flags for run in found])
    columns = ["run", "best", "epoch", "done", "trained"]
    columns += [f"--{name.replace('_', '-')}" for name in names]
    cells = []
    for run in found:
        values = [as_cell(run.flags.get(name)) for name in names]
        cells.append(run.cells() + values)
    for line in rows.table_lines(columns, cells):
        print_line(line, sys.stdout)


def is_run(folder: Path) -> bool:
    # not Path's, which raises for a folder that is closed to this user
    return os.path.isfile(folder / "args.json")


def runs_in(folder: Path) -> list[Path]:
    """Return the folders of runs in a folder; without any, say so."""
    inner = [each for each in sorted(folder.glob("*")) if is_run(each)]
    if not inner:
        print_line(f"{escape(folder)}: left out (no args.json of a run)", sys.stdout)
    return inner


def read_run(folder: Path) -> Compared:
    """Return a run, which may be at work; raise a ValueError if its args.json is damaged."""
    facts = json.loads((folder / "args.json").read_bytes())
    flags = facts.get("flags") if isinstance(facts, dict) else None
    if not isinstance(flags, dict):
        raise ValueError("args.json has no flags")
    best = facts.get("best")
    # which it has once it has been worked out
    is_known = isinstance(best, list) and len(best) == 2
    metric, direction = map(str, best) if is_known else ("", "")
    recorded = rows.recorded_rows(folder)
    best_row = rows.best_row(recorded, metric, direction) or {}
    return Compared(folder, flags, recorded, metric, direction, best_row)


def differing(flags: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the flags of which some runs have another value; one that has none is of others."""
    found = []
    for name in dict.fromkeys(name for each in flags for name in each):
        values = {json.dumps(each.get(name), sort_keys=True) for each in flags}
        if len(values) > 1 and name not in LEFT_OUT:
            found.append(name)
    return found


def as_cell(value: object) -> str:
    if value is None or value == "":
        return NONE
    return rows.clip_middle(escape(value), rows.LONGEST)
