"""Compare runs, best first: python -m ddpkit compare runs/*

Prints of each --output-dir the best value of the metric that chooses best.pt and its epoch, how
many epochs are done, how long they have trained, and the flags, and the global batch, if they
differ between the runs.
"""

import datetime
import functools
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpkit import files
from ddpkit.errors import UserError, escape, print_line
from ddpkit.run.flags import OF_A_START, Parser
from ddpkit.vision import rows
from ddpkit.vision.rows import Row

# flags that do not matter, and what data and network say
LEFT_OUT = (*OF_A_START, "output_dir", "several_labels", "crop")
NONE = "-"
BATCH = "global batch"


@dataclass
class Compared:
    """A run: its flags and global batch, its rows of metrics.csv, and the metric of its best."""

    folder: Path
    flags: Mapping[str, Any]
    rows: Sequence[Row]
    metric: str
    direction: str

    @functools.cached_property
    def top(self) -> Row:
        return rows.best_row(self.rows, self.metric, self.direction) or {}

    @property
    def score(self) -> float:
        return rows.number_in(self.top, self.metric)

    @property
    def order(self) -> tuple[bool, str, float]:
        """Return what comes first: of each metric the best, and a run without any at the end."""
        score = self.score if self.direction == "min" else -self.score
        return (not self.top, self.metric, score)

    def cells(self) -> list[str]:
        seconds = [rows.number_in(row, "train_seconds") for row in self.rows]
        known = sum(value for value in seconds if math.isfinite(value))
        epochs = str(self.rows[-1]["epoch"] if self.rows else 0)
        if "--epochs" in self.flags:
            epochs += f"/{self.flags['--epochs']}"
        best = NONE
        if self.top:
            best = f"{self.metric} {rows.as_digits(self.score)}"
        time = str(datetime.timedelta(seconds=round(known)))
        name = rows.clip_middle(escape(self.folder))
        return [name, best, str(self.top.get("epoch", NONE)), epochs, time]


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
    runs = []
    for folder in given:
        for each in [folder] if is_run(folder) else runs_in(folder):
            try:
                runs.append(read_run(each))
            except UserError as error:
                print_line(f"{escape(each)}: left out ({error.line})", sys.stdout)
    if not runs:
        raise UserError(f"no run in {given[0]}: name the --output-dir of some")
    runs.sort(key=lambda run: run.order)
    names = differing([run.flags for run in runs])
    columns = ["run", "best", "epoch", "done", "trained"]
    columns += names
    cells = []
    for run in runs:
        values = [as_cell(run.flags.get(name)) for name in names]
        cells.append(run.cells() + values)
    for line in rows.table_lines(columns, cells):
        print_line(line, sys.stdout)
    sizes = sorted({run.flags[BATCH] for run in runs if run.flags[BATCH]})
    if len(sizes) > 1:
        print_line(
            f"{BATCH}: {' and '.join(map(str, sizes))}, so that steps are not alike; compare runs "
            "of one --batch-size x ranks x --accumulate, or of an --lr that is scaled with it",
            sys.stdout,
        )


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
    """Return a run, which may be at work; raise a UserError if its files are damaged."""

    def take_facts(content: bytes) -> tuple[dict[str, Any], str, str]:
        facts = json.loads(content)
        metric, direction = facts.get("best") or ("", "")  # until it is worked out
        flags: dict[str, Any] = {BATCH: facts.get("global_batch")}
        for name, value in facts["flags"].items():
            if name not in LEFT_OUT:
                flags[f"--{name.replace('_', '-')}"] = value
        return flags, str(metric), str(direction)

    found = files.parse(folder / "args.json", take_facts, "run", most=files.OF_NOTES)
    flags, metric, direction = found
    return Compared(folder, flags, rows.recorded_rows(folder), metric, direction)


def differing(flags: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the flags of which some runs have another value; one that has none is of others."""
    names = []
    for name in dict.fromkeys(name for each in flags for name in each):
        values = {json.dumps(each.get(name), sort_keys=True) for each in flags}
        if len(values) > 1:
            names.append(name)
    return names


def as_cell(value: object) -> str:
    if value is None or value == "":
        return NONE
    return rows.clip_middle(escape(value), rows.LONGEST)
