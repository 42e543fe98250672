"""The error for a mistake of the user's, the line for it, and a helper for lists of names."""

import importlib.util
import sys
from collections.abc import Sequence

from engine.ranks.protocol import MISTAKE


class UserError(Exception):
    """A mistake of the user's; its message is one line with the file, the value and the remedy."""

    def __str__(self) -> str:
        # From a loader worker it arrives as the text of a traceback, which ends with the message.
        return super().__str__().strip().rsplit("UserError: ", 1)[-1]


def print_error(line: object) -> None:
    print(f"error: {line}", file=sys.stderr, flush=True)


def no_torch() -> str:
    """Return what to do if this Python has no torch, otherwise nothing."""
    if importlib.util.find_spec("torch"):
        return ""
    remedy = "activate the environment that has it, or set PYTHON to its interpreter"
    return f'{sys.executable} has no torch: {remedy} (VS Code: "Python: Select Interpreter")'


def need_torch() -> None:
    """Exit with that line, and the status of a mistake."""
    if line := no_torch():
        print_error(line)
        sys.exit(MISTAKE)


def shorten(names: Sequence[str]) -> str:
    """Return the first four of `names`, separated by commas, and dots if there are more."""
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
