"""Errors in one line: their codes, and the list of their words."""

import copy
import io
import os
import pickle
import re
import subprocess
import sys

import errors as table
import pytest
from ranks import on_ranks
from torch._utils import ExceptionWrapper

from ddpkit import errors, launch
from ddpkit.errors import UserError
from ddpkit.run.checkpoint import Damaged


def test_the_list() -> None:
    """messages.md has the words of all errors, of each the code; this is where they change."""
    update = f"python {table.__file__}"
    assert table.PAGE.read_text() == table.page(), f"to write it anew: {update}"
    assert table.MESSAGES.read_text() == table.messages(), f"to write it anew: {update}"


def test_what_is_explained() -> None:
    """Errors that there are, each once, in a few lines."""
    codes = table.explained()
    assert len(codes) == len(set(codes)) >= 40
    assert set(codes) <= {code for _, code, _ in table.raised()}
    for part in table.EXPLAINED.read_text().split("\n### ")[1:]:
        lines = part.split("\n## ")[0].strip().splitlines()
        assert 2 <= len(lines) <= 4, lines[0]
        assert all(len(line) <= 150 for line in lines), lines[0]


def test_the_form_of_lines() -> None:
    raised = list(table.raised())
    assert len(raised) > 150
    for file, code, text in raised:
        assert "\n" not in text, (file, code, text)
        assert not text.endswith("."), (file, code, text)
        assert not re.search(r"\b(please|sorry|invalid|illegal)\b", text, re.I), (
            file,
            code,
            text,
        )


def find() -> UserError:
    return UserError("a.jpg: cannot be read")


def from_worker(error: UserError) -> UserError:
    """The error as it arrives from a loader worker."""
    try:
        raise error
    except UserError:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(UserError) as caught:
        wrapped.reraise()
    return caught.value


def test_a_code() -> None:
    """The function that raises it; it stays when the error comes from another process."""
    error = find()
    assert str(error) == "a.jpg: cannot be read [test_errors.find]"
    assert error.line == "a.jpg: cannot be read"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(Damaged(f"Traceback\n  File ...\nddpkit.Damaged: {error}\n")) == str(
        error
    )
    assert str(copy.copy(error)) == str(error)
    assert str(from_worker(error)) == str(error)


@pytest.mark.parametrize(
    "line",
    [
        # what looks like the end of a traceback
        "a.csv: the reader says UserError: no such user",
        "b.jpg is not in [train.csv]",  # or like a code
    ],
)
def test_lines_that_look_like_more(line: str) -> None:
    """They are whole, also if they come from a loader worker."""
    error = UserError(line)
    assert error.line == line
    assert error.code == "test_errors.test_lines_that_look_like_more"
    arrived = from_worker(error)
    assert arrived.line == error.line
    assert arrived.code == error.code


class Refusing(io.StringIO):
    """As the wrapper of a tracker that has ended."""

    def write(self, text: str) -> int:
        raise RuntimeError


def test_streams_that_take_no_line():
    """Nothing is raised, whatever has become of a stream; letters that it lacks become `\\u`."""
    closed = io.StringIO()
    closed.close()
    pipe = os.pipe()
    os.close(pipe[0])
    for stream in (
        None,
        closed,
        open(pipe[1], "w"),  # noqa: SIM115
        open("/dev/full", "w"),  # noqa: SIM115
        Refusing(),
    ):
        errors.print_line("a line", stream)
    for encoding, text in (
        ("ascii", "caf\\xe9 \\udcff\n"),
        ("latin-1", "café \\udcff\n"),
    ):
        stream = io.TextIOWrapper(io.BytesIO(), encoding)
        errors.print_line("café \udcff", stream)
        assert stream.buffer.getvalue().decode(encoding) == text


BROKEN = """
import sys
from ddpkit.errors import guard_streams, print_line
guard_streams()
with open(sys.argv[1], "w") as file:  # gets the number of no stream
    assert file.fileno() > 2
print_line("a line", sys.stdout)
print("half a line", end="")
sys.exit(75)
"""


@pytest.mark.parametrize(
    "redirection", [">/dev/full", "| :", ">&-", "2>&-", ">&- 2>&- <&-"]
)
def test_the_status_with_a_broken_stream(tmp_path, redirection):
    """It is what it is otherwise, at the end, too; files do not take the place of a stream."""
    script = f'{{ "$0" -c "$1" "$2"; echo $? >"$3"; }} {redirection}'
    command = ["sh", "-c", script, sys.executable, BROKEN]
    command += [tmp_path / "file", tmp_path / "status"]
    env = {**os.environ, "PYTHONUNBUFFERED": ""}
    subprocess.run(command, check=False, capture_output=True, env=env)
    assert (tmp_path / "status").read_text() == "75\n"


@on_ranks(1, group=False)
def test_a_launcher_whose_terminal_is_closed():
    """It restarts the ranks, and its status is theirs."""
    ended = iter((1, 0))
    launch.Ranks.start_all = lambda *_: None
    launch.Ranks.wait = lambda _: next(ended)
    os.environ.update(NPROC="2", MAX_RESTARTS="1")
    sys.argv = ["launch.py"]
    sys.stdout = sys.stderr = Refusing()
    assert launch.main() == 0
