"""Do a step of a run again, and stop in the debugger where it begins, in the loop of main.py.

One process, in a terminal, with pdb:  python -m engine.replay EPOCH:STEP [--output-dir DIR]
One rank per GPU, or two on CPUs:      ./launch.sh -m engine.replay EPOCH:STEP --debug-rank R[,R...]
In VS Code:                            F5, "DDP: replay a step"

EPOCH and STEP are as messages print them, both from 1. Flags of main.py may follow; those that are
not given are those of the run. Nothing in its folder changes, and it may go on meanwhile.
"""

import importlib
import json
import os
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import engine
from engine.errors import UserError
from engine.ranks import environment
from engine.run.flags import Parser, overrides

WORDS = sys.argv[1:]
OWN = {"eval_only", "output_dir", "workers"}  # flags that are not those of the run


def position(text: str) -> tuple[int, int]:
    """Parse EPOCH:STEP, for argparse."""
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ArgumentTypeError(f"{text} is not EPOCH:STEP, such as 3:120; both begin at 1")
    return int(parts[0]), int(parts[1])


def read_flags() -> tuple[tuple[int, int], str]:
    """Give main.py its flags; return the step, and a line about what differs from the run."""
    usage = "python -m engine.replay EPOCH:STEP [flags of main.py]"
    parser = Parser(prog=usage.partition(" EPOCH")[0], usage=usage, description=__doc__)
    parser.add_argument("step", metavar="EPOCH:STEP", type=position, help="where to stop")
    parser.add_argument("--output-dir", metavar="DIR", type=Path, default=Path("runs/default"))
    own, words = parser.parse_known_args(WORDS)
    sys.argv = ["main.py", *words, "--output-dir", str(own.output_dir)]
    environment.adopt()
    run, ranks = read_record(own.output_dir)
    line = keep_global_batch(run, ranks, int(os.environ.get("WORLD_SIZE", 1)))
    overrides.update((name, value) for name, value in run.items() if name not in OWN)
    return own.step, line


def read_record(folder: Path) -> tuple[dict[str, Any], int]:
    """Return the flags of the run in `folder` when it was last started, and its number of ranks."""
    path = folder / "args.json"
    try:
        record = json.loads(path.read_text())
        return dict(record["flags"]), int(record["ranks"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "strerror", None) or repr(error)
        raise UserError(f"{path}: cannot be read ({reason}): --output-dir names a run") from None


def keep_global_batch(run: dict[str, Any], then: int, now: int) -> str:
    """Change a run's flags such that `now` ranks have its global batch; return a line, or ""."""
    if then == now:
        return ""
    images, left = divmod(then * run["batch_size"] * run["accumulate"], now)
    if left:
        raise UserError(
            f"the global batch of {images * now + left} images cannot be divided by {now} ranks; "
            f"use the {then} rank(s) of the run, or one"
        )
    size = max(number for number in range(1, run["batch_size"] + 1) if images % number == 0)
    run.update(batch_size=size, accumulate=images // size)
    return (
        f"{then} rank(s) then, {now} now: --batch-size {size} --accumulate {images // size} make "
        "the same global batch"
    )


def main() -> None:
    step, line = read_flags()
    from engine.ranks import distributed
    from engine.run import replay

    if line:
        distributed.say(line)
    replay.repeat(importlib.import_module("main").main, step)


if __name__ == "__main__":
    engine.prepare(read_flags)
    engine.start(main)
