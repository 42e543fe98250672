"""Errors whose message is one line, and how a line is printed."""

import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ddpkit.ranks.protocol import MISTAKE

CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # such as the end of a line
CODE = re.compile(r"\s*\[(\w+\.\w+)\]\s*$")


class LineError(Exception):
    """An error whose message is one line with the file, the value and the remedy.

    It ends with a code, the function that raises it: "... [masks.parse]".
    """

    def __init__(self, line: str) -> None:
        # From a loader worker it arrives as the text of a traceback, which ends with the message.
        line = line.strip().rsplit(f"{type(self).__name__}: ", 1)[-1]
        if not CODE.search(line):
            caller = sys._getframe(1).f_code
            line = f"{line} [{Path(caller.co_filename).stem}.{caller.co_name.strip('_<>')}]"
        super().__init__(line)

    @property
    def line(self) -> str:
        return CODE.sub("", str(self))  # without the code


class UserError(LineError):
    """A mistake of the user's.

    `start` prints it as one line and ends all ranks with status 2.

        raise ddpkit.UserError(f"--teacher {path}: no such file")
    """


class DiskError(LineError):
    """What a restart may find mended: a disk that does not answer, a want of memory or handles."""


def escape(line: object) -> str:
    """Return `line` with control characters, as names of files may have, as Python writes them."""
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], str(line))


def print_error(line: object) -> None:
    print(f"error: {escape(line)}", file=sys.stderr, flush=True)


def no_torch() -> str:
    """Return what to do if this Python has no torch, otherwise nothing."""
    remedy = "activate the environment that has it, or set PYTHON to its interpreter"
    line = f'{sys.executable} has no torch: {remedy} (VS Code: "Python: Select Interpreter")'
    return "" if importlib.util.find_spec("torch") else line


def need_torch() -> None:
    """Exit with that line, and the status of a mistake."""
    if line := no_torch():
        print_error(line)
        sys.exit(MISTAKE)


def shorten(names: Sequence[str]) -> str:
    """Return the first four of `names`, and dots if there are more."""
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
