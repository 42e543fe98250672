"""Print where all ranks of a running job are, without ending it.

python -m engine.ranks.where [--debug-rank R] [OUTPUT_DIR], in any terminal that sees the output
folder: rank 0 finds the question there, asks the other ranks, and writes the answer next to it.
"""

import os
import sys
import time
import uuid
from argparse import ArgumentParser
from pathlib import Path

from engine.errors import UserError
from engine.ranks import process
from engine.ranks.protocol import ASKED, ATTACH, MISTAKE

RUNS = Path(__file__).resolve().parents[2] / "runs"
ANSWER_SECONDS = 10


def ask(folder: Path, rank: int | None) -> str | None:
    """Return the answer of the run that trains into `folder`; None if there is none.

    rank: it is to listen for a debugger.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name the --output-dir of the run")
    asked = folder / f"{ASKED}-{uuid.uuid4().hex}"  # others may ask, too
    answer, attach = asked.with_suffix(".txt"), folder / f"{ATTACH}-{rank}"
    deadline = time.monotonic() + ANSWER_SECONDS
    try:
        if rank is not None:
            attach.unlink(missing_ok=True)
            os.close(os.open(attach, os.O_CREAT | os.O_EXCL, 0o600))
        asked.touch()
        while time.monotonic() < deadline:
            if answer.exists():
                return answer.read_text()
            time.sleep(0.1)
    finally:
        for path in (asked, answer, *([attach] if rank is not None else [])):
            path.unlink(missing_ok=True)
    return None


def main() -> int:
    parser = ArgumentParser(
        prog="python -m engine.ranks.where", description=__doc__.splitlines()[0]
    )
    text = "--output-dir of the run (default: runs/default)"
    parser.add_argument("folder", nargs="?", type=Path, default=RUNS / "default", help=text)
    text = "let a debugger attach to that rank, at the run's --debug-port + R"
    parser.add_argument("--debug-rank", metavar="R", type=int, help=text)
    folder, rank = vars(parser.parse_args()).values()
    try:
        answer = ask(folder, rank)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    if answer is None:
        why = "no run trains there, or it has not begun to, or is paused"
        print(f"error: {folder}: no answer in {ANSWER_SECONDS} s: {why}", file=sys.stderr)
        return 1
    print(answer)
    return 0


if __name__ == "__main__":
    process.be_quiet()
    sys.exit(main())
