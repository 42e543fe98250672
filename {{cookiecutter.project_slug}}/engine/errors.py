"""The error that a user can mend, and how lists of names are shortened in its line."""

from collections.abc import Sequence


class UserError(Exception):
    """A mistake of the user's. Its one line names the file, the value and the remedy."""

    def __str__(self) -> str:
        # A loader worker's exception arrives as the text of its traceback; the line ends it.
        return super().__str__().strip().rsplit("UserError: ", 1)[-1]


def shorten(names: Sequence[str]) -> str:
    """Return the first four of `names`, separated by commas, and dots if there are more."""
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
