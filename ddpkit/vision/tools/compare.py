"""Compare runs, best first: python -m ddpkit compare runs/*

Prints for each --output-dir the best value of the metric that selects best.pt
and its epoch, the number of epochs done, the training time, and the flags and
the global batch if they differ between the runs.
"""

import datetime
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ddpkit import files
from ddpkit.errors import UserError, escape, print_line
from ddpkit.run.flags import OF_A_START, Parser
from ddpkit.vision import rows

# flags that do not matter, and what data and network say
LEFT_OUT = (*OF_A_START, "output_dir", "several_labels", "crop")
NONE = "-"
BATCH = "global batch"


class Compared(NamedTuple):
    """A run, as it is listed, with its flags and global batch.

    order: what comes first, of each metric the best, and a run without any at the end.
    """

    order: tuple[bool, str, float]
    cells: list[str]
    flags: Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m ddpkit compare", description=__doc__)
    parser.add_argument(
        "folders",
        nargs="*",
        metavar="RUN",
        type=Path,
        help="an --output-dir, or a folder of several (default: runs)",
    )
    given = parser.parse_args(argv).folders or [Path("runs")]
    runs = []
    for folder in given:
        for each in [folder] if is_run(folder) else runs_in(folder):
            try:
                runs.append(read_run(each))
            except UserError as error:
                print_line(f"{escape(each)}: skipped ({error.line})", sys.stdout)
    if not runs:
        raise UserError(f"no run in {given[0]}: give the --output-dir of a run")
    runs.sort(key=lambda run: run.order)
    names = differing([run.flags for run in runs])
    columns = ["run", "best", "epoch", "done", "trained", *names]
    cells = []
    for run in runs:
        values = [as_cell(run.flags.get(name)) for name in names]
        cells.append(run.cells + values)
    for line in rows.table_lines(columns, cells):
        print_line(line, sys.stdout)


def is_run(folder: Path) -> bool:
    # not Path's, which raises for a folder that is closed to this user
    return os.path.isfile(folder / "args.json")


def runs_in(folder: Path) -> list[Path]:
    """Return the folders of runs in a folder; without any, say so."""
    inner = [each for each in sorted(folder.glob("*")) if is_run(each)]
    if not inner:
        why = "no args.json of a run" if os.path.isdir(folder) else "not found"
        print_line(f"{escape(folder)}: skipped ({why})", sys.stdout)
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

    flags, metric, direction = files.parse(
        folder / "args.json", take_facts, "a run", most=files.OF_TEXT
    )
    history = rows.recorded_rows(folder)
    best = rows.best_row(history, metric, direction) or {}
    score = rows.number_in(best, metric)
    epochs = str(history[-1]["epoch"] if history else 0)
    if "--epochs" in flags:
        epochs += f"/{flags['--epochs']}"
    seconds = [rows.number_in(row, "train_seconds") for row in history]
    known = sum(value for value in seconds if math.isfinite(value))
    cells = [
        rows.clip_middle(escape(folder)),
        f"{metric} {rows.as_digits(score)}" if best else NONE,
        str(best.get("epoch", NONE)),
        epochs,
        str(datetime.timedelta(seconds=round(known))),
    ]
    order = (not best, metric, score if direction == "min" else -score)
    return Compared(order, cells, flags)


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
