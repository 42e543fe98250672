"""The error for a mistake of the user's, the line for it, and a helper for lists of names."""

import sys
from collections.abc import Sequence


class UserError(Exception):
    """A mistake of the user's; its message is one line with the file, the value and the remedy."""

    def __str__(self) -> str:
        # From a loader worker it arrives as the text of a traceback, which ends with the message.
        return super().__str__().strip().rsplit("UserError: ", 1)[-1]


def print_error(line: object) -> None:
    print(f"error: {line}", file=sys.stderr, flush=True)


def shorten(names: Sequence[str]) -> str:
    """Return the first four of `names`, separated by commas, and dots if there are more."""
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
