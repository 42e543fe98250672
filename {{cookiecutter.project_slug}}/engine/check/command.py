"""What check_data.py does in both tasks: flags, report, files and exit status."""

import contextlib
import io
import json
import os
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TypeVar

import torch

from engine import files
from engine.check.plots import DrawSample, draw_page
from engine.check.reading import ERRORS, WARNINGS, Finding
from engine.check.report import Plan, describe, propose
from engine.check.survey import Survey
from engine.data import prepared, stacks
from engine.data.format import NAME, Format, read_format, write_format
from engine.data.images import open_image
from engine.data.samples import MapDataset
from engine.errors import UserError
from engine.ranks import distributed, gpus
from engine.run import machine
from engine.run.flags import at_least

Arguments = TypeVar("Arguments")

NAMED = 10  # findings of a kind that are printed, but all broken files; check.csv has all


def add_arguments(parser: ArgumentParser, output: Path) -> None:
    """Add the flags of check_data.py."""
    given = os.environ.get("NPROC", "")
    ranks = int(given) if given.isdecimal() and int(given) else gpus.count() or 2
    count, positive = at_least(0), at_least(1)
    add = parser.add_argument
    add("data", metavar="DIR", type=Path, help="as --data of main.py")
    add("--output", metavar="DIR2", type=Path, default=output, help="for check.png and check.csv")
    add("--workers", type=count, default=machine.cpus(), help="processes that read")
    add("--image-size", metavar="PIXELS", type=positive, help="for training (default: main.py's)")
    add("--batch-size", type=positive, help="for training, images per rank (default: main.py's)")
    add("--ranks", type=positive, default=ranks, help="for training, as launch.sh starts them")
    add("--channels", metavar="N", type=positive, help="of images (default: by data.json, files)")
    add("--write", action="store_true", help="write what the report proposes for DIR/data.json")


def prepare(data: Path) -> None:
    """Make this process ready to read; a UserError if `data` is prepared already."""
    os.environ[gpus.VARIABLE] = ""  # leave GPUs to those who need one
    torch.set_num_threads(1)  # as in a loader worker
    distributed.setup(alone=True)
    if prepared.is_store(data):
        index = prepared.Index.read(data / "index.json")
        source = index.source if index else "the folder that it was made from"
        raise UserError(f"{data}: prepared data, which holds no files; check {source}")


def find_format(data: Path, samples: Sequence[tuple], channels: int | None) -> Format:
    """Return what data.json says; if it has no "channels", with those that images need.

    channels: of the flag, which comes before data.json.
    """
    format = read_format(data)
    found = channels or format.channels or count_channels(samples[0][0], format)
    if found == format.channels:
        return format
    return replace(format, channels=found, mean=None, std=None)


def count_channels(path: str, format: Format) -> int | None:
    """Return the channels of an image that cannot be read as RGB, but with as many."""
    try:
        open_image(path, format)
        return None
    except UserError:
        with contextlib.suppress(Exception):  # of many types for malformed files
            found = stacks.count_channels(path)
            # TIFFs of 1 or 3 can be read as RGB: something else is wrong with this one.
            return found if found not in (1, 3) or path.lower().endswith(".npy") else None
    return None


def training_set(
    build_datasets: Callable[[Arguments], tuple[MapDataset, MapDataset, Sequence[str]]],
    args: Arguments,
) -> MapDataset | None:
    """Return the training set of dataset.py, None if it refuses the data."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):
        return build_datasets(args)[0]
    return None


def finish(
    data: Path,
    survey: Survey,
    classes: Sequence[str],
    plan: Plan,
    draw: DrawSample,
    output: Path,
    has_to_write: bool,
) -> NoReturn:
    """Print the report and write check.png and check.csv; exit with 1 if there are errors.

    has_to_write: also data.json.
    """
    for line in (*describe(survey, classes, plan), *list_findings(survey.findings, data)):
        distributed.say(line)
    errors = sum(finding.kind in ERRORS for finding in survey.findings)
    distributed.say(f"{errors} errors, {len(survey.findings) - errors} warnings")
    write_findings(survey.findings, output / "check.csv")
    draw_page(output / "check.png", survey, classes, draw)
    written = "check.png, check.csv" if survey.findings else "check.png"
    distributed.say(f"written to {os.path.relpath(output)}: {written}")
    wanted = propose(survey, plan.format)
    if has_to_write and wanted != read_format(data):
        write_format(data, wanted)
        more = "" if wanted.value_range == plan.format.value_range else "; run this again"
        distributed.say(f"written: {data / NAME}: {json.dumps(wanted.keys())}{more}")
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
