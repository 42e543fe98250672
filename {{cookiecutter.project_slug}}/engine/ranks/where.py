"""Print where all ranks of a running job are, and why they wait for each other; end nothing.

python -m engine.ranks.where [OUTPUT_DIR], in any terminal that sees the output folder: rank 0 finds
the question there.
"""

import contextlib
import sys
import time
from argparse import ArgumentParser
from pathlib import Path

from engine.errors import UserError, print_error
from engine.ranks import process, protocol
from engine.ranks.protocol import ANSWER_SECONDS, MISTAKE

RUNS = Path(__file__).resolve().parents[2] / "runs"
LIMIT = 2 * ANSWER_SECONDS  # seconds


def question(folder: Path) -> str | None:
    """Return the answer of the run that trains into `folder`; None if there is none."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name the --output-dir of the run")
    asked, reply = folder / protocol.QUESTION, folder / protocol.REPLY
    before = reply.stat().st_mtime_ns if reply.exists() else 0
    deadline = time.monotonic() + LIMIT
    asked.touch()
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            if reply.stat().st_mtime_ns != before:
                return reply.read_text()
        time.sleep(0.1)
    asked.unlink(missing_ok=True)
    return None


def main() -> int:
    parser = ArgumentParser(
        prog="python -m engine.ranks.where", description=__doc__.splitlines()[0]
    )
    text = "--output-dir of the run (default: runs/default)"
    parser.add_argument("folder", nargs="?", type=Path, default=RUNS / "default", help=text)
    folder = parser.parse_args().folder
    try:
        found = question(folder)
    except (UserError, OSError) as error:
        print_error(error)
        return MISTAKE
    if found is None:
        print_error(f"{folder}: no answer: no run trains there, or has begun to, or it is paused")
        return 1
    print(found)
    return 0


if __name__ == "__main__":
    process.be_quiet()
    sys.exit(main())
