"""Errors whose message is one line, and how a line is printed."""

import atexit
import contextlib
import importlib.util
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import TextIO

MOST = 10_000  # letters of a line
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # such as the end of a line


class LineError(Exception):
    """An error whose message is one line with the file, the value and the remedy.

    line: that message. code: the function that raises it, such as masks.parse, which is printed
    after the line: "... [masks.parse]".
    """

    def __init__(self, line: str, code: str = "") -> None:
        in_worker = self._end_of_traceback(line)
        if in_worker:
            line, code = in_worker.groups()
        self.line = line.strip()
        self.code = code or _code_of(sys._getframe(1))
        # with which pickle makes it anew in another process
        super().__init__(self.line, self.code)

    def __str__(self) -> str:
        return f"{self.line} [{self.code}]"

    @classmethod
    def _end_of_traceback(cls, text: str) -> re.Match | None:
        """Return the line and the code in the text of a traceback, which ends with `__str__`.

        From that text alone torch makes the error of a loader worker anew in its rank.
        """
        last = rf".*\n(?:\w+\.)*{cls.__name__}: (.*?)\s*\[(\w+\.\w+)\]\s*"
        return re.fullmatch(last, text, re.DOTALL)


def _code_of(caller: FrameType) -> str:
    """Return the file and the function in which an error is made, such as "masks.parse"."""
    name = caller.f_code.co_name.strip("_<>")
    return f"{Path(caller.f_code.co_filename).stem}.{name}"


class UserError(LineError):
    """A mistake of the user's.

    `run_main` prints it as one line and ends all ranks with status 2.

        raise ddpkit.UserError(f"--teacher {path}: no such file")
    """


class NoLabelsError(UserError):
    """There is nothing to work out a loss of; in one batch, with which `sanity_check` tries, it may
    be so.

        raise ddpkit.NoLabelsError("the validation set has no labelled samples")
    """


class DiskError(LineError):
    """What a restart may find mended: a disk that does not answer, a want of memory or handles."""


def reason_of(error: BaseException, most: int = sys.maxsize) -> str:
    """Return what an error says, as `clip` does; its type if it says nothing."""
    return clip(error, most) or type(error).__name__


def clip(text: object, most: int) -> str:
    """Return `text` in one line of whole words, at most so many letters long."""
    return textwrap.shorten(str(text), most, placeholder=" ...")


def suggest(name: str, known: Iterable[str]) -> str:
    """Return a question after the `known` names that are most like `name`; nothing without any."""
    import difflib  # only once something is wrong

    near = difflib.get_close_matches(name, known, cutoff=0.7)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def escape(line: object) -> str:
    """Return `line` with control characters, as names of files may have, as Python writes them."""
    return CONTROL.sub(lambda each: repr(each[0])[1:-1], str(line))


def print_error(line: object) -> None:
    print_line(f"error: {escape(line)}", sys.stderr)


def print_line(line: str, stream: TextIO | None) -> None:
    """Print `line` on sys.stdout or sys.stderr, as far as that can be: it never raises.

    The terminal or the reader of the pipe may have gone, the disk of a log may be full, and a
    stream may be closed, None or of another encoding.
    """
    if stream is None:  # as under pythonw
        return
    with contextlib.suppress(Exception):
        # a stand-in for a stream may have none
        encoding = getattr(stream, "encoding", None) or "utf-8"
        # of a name of 50 MB the beginning is enough
        text = line[:MOST].encode(encoding, "backslashreplace").decode(encoding)
        # at once, so that the lines of several ranks do not mix
        stream.write(f"{text}\n")
        stream.flush()


def guard_streams() -> None:
    """Have closed streams, and what cannot be printed at the end, do no harm."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # the next file would get the number, and what C++ prints
            # the lowest number that is free, so this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    atexit.register(drop_unprinted)


def drop_unprinted() -> None:
    """Drop what cannot be printed, for which Python would exit with status 120."""
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except Exception:
            setattr(sys, name, None)


def no_torch() -> str:
    """Return what to do if this Python has no torch, otherwise nothing."""
    if importlib.util.find_spec("torch"):  # without the seconds of importing it
        return ""
    return (
        f"{sys.executable} has no torch: activate the environment that has it, or set "
        'PYTHON to its interpreter (VS Code: "Python: Select Interpreter")'
    )


def shorten(names: Sequence[str]) -> str:
    """Return the first four of `names`, and dots if there are more."""
    listed = ", ".join(names[:4])
    return f"{listed}, ..." if len(names) > 4 else listed
