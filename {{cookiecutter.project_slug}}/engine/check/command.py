"""What check_data.py does in both tasks: flags, report, files and exit status."""

import os
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from engine import files
from engine.check.plots import DrawSample, draw_page
from engine.check.reading import ERRORS, WARNINGS, Finding
from engine.check.report import Plan, describe
from engine.check.survey import Survey
from engine.data import prepared
from engine.errors import UserError
from engine.ranks import distributed, gpus
from engine.run import machine
from engine.run.flags import add_image_arguments, at_least

NAMED = 10  # findings of a kind that are printed, but all broken files; check.csv has all


def add_arguments(parser: ArgumentParser, output: Path, image_size: int) -> None:
    """Add the flags of check_data.py."""
    given = os.environ.get("NPROC", "")
    ranks = int(given) if given.isdecimal() and int(given) else gpus.count() or 2
    count, positive = at_least(0), at_least(1)
    add = parser.add_argument
    add("data", metavar="DIR", type=Path, help="as --data of main.py")
    add("--output", metavar="DIR2", type=Path, default=output, help="for check.png and check.csv")
    add("--workers", type=count, default=machine.cpus(), help="processes that read")
    add("--image-size", metavar="PIXELS", type=positive, default=image_size, help="for training")
    add("--batch-size", type=positive, help="for training, images per rank (default: main.py's)")
    add("--ranks", type=positive, default=ranks, help="for training, as launch.sh starts them")
    add_image_arguments(parser.add_argument_group("image files"))


def prepare(data: Path) -> None:
    """Make this process ready to read; a UserError if `data` is prepared already."""
    os.environ[gpus.VARIABLE] = ""  # leave GPUs to those who need one
    torch.set_num_threads(1)  # as in a loader worker
    distributed.setup(alone=True)
    if prepared.is_store(data):
        index = prepared.Index.read(data / "index.json")
        source = index.source if index else "the folder that it was made from"
        raise UserError(f"{data}: prepared data, which holds no files; check {source}")


def finish(
    data: Path,
    survey: Survey,
    classes: Sequence[str],
    plan: Plan,
    draw: DrawSample,
    output: Path,
) -> NoReturn:
    """Print the report and write check.png and check.csv; exit with 1 if there are errors."""
    for line in (*describe(survey, classes, plan), *list_findings(survey.findings, data)):
        distributed.say(line)
    errors = sum(finding.kind in ERRORS for finding in survey.findings)
    distributed.say(f"{errors} errors, {len(survey.findings) - errors} warnings")
    write_findings(survey.findings, output / "check.csv")
    draw_page(output / "check.png", survey, classes, draw)
    written = "check.png, check.csv" if survey.findings else "check.png"
    distributed.say(f"written to {os.path.relpath(output)}: {written}")
    distributed.teardown()
    sys.exit(1 if errors else 0)


def write_findings(findings: Sequence[Finding], table: Path) -> None:
    """Write all findings to the CSV file `table`."""
    table.unlink(missing_ok=True)
    with files.table(table, ("level", "what", "file", "other file", "text")) as write:
        for finding in findings:
            level = "error" if finding.kind in ERRORS else "warning"
            write((level, finding.kind, finding.file, finding.other, finding.text))


def list_findings(findings: Sequence[Finding], data: Path) -> list[str]:
    """Return lines with the first findings of each kind, with paths below `data`."""
    counts = Counter(finding.kind for finding in findings)
    lines = []
    for level, kinds in ("warning", WARNINGS), ("error", ERRORS):
        for kind, title in kinds.items():
            if not counts[kind]:
                continue
            lines.append(f"{level}: {title}: {counts[kind]}")
            some = sorted((f for f in findings if f.kind == kind), key=lambda f: f.file)
            for finding in some if kind == "broken" else some[:NAMED]:
                paths = filter(None, (finding.file, finding.other))
                names = ", ".join(os.path.relpath(path, data) for path in paths)
                lines.append(f"  {names}{': ' if finding.text else ''}{finding.text}")
            if kind != "broken" and len(some) > NAMED:
                lines.append(f"  and {len(some) - NAMED} more in check.csv")
    return lines
