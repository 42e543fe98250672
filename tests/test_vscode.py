"""The tasks, as VS Code does them."""

import re
import subprocess
from pathlib import Path
from typing import Any

from dap import line_of, task
from running import ROOT, TEMPLATE_FOLDER

from ddpkit.ranks.protocol import QUESTION


def test_where_is_it(tmp_path: Path) -> None:
    found = task(ROOT / TEMPLATE_FOLDER, "Where is it?", output=str(tmp_path))
    command, folder = [found["command"], *found["args"]], ROOT / TEMPLATE_FOLDER
    no_run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    line = f"error: {tmp_path}: no run has written there; name its --output-dir\n"
    assert (no_run.returncode, no_run.stderr) == (2, line)
    (tmp_path / ".lock").touch()
    subprocess.run(command, cwd=folder, check=True)
    assert (tmp_path / QUESTION).exists()
    assert task(ROOT / TEMPLATE_FOLDER, "Where is it?")["args"][-1] == "runs/default"


FAILING = """
import pytest


def double(x):
    assert isinstance(x, int), "an integer is wanted"


def test_equal():
    assert 1 + 1 == 3


def test_several_lines():
    double(
        "4"
    )


def test_raises():
    x = {"a": 1}["b"] + 2


@pytest.fixture
def broken():
    raise OSError("no such thing")


def test_fixture(broken):
    pass
"""


def problems(matcher: dict[str, Any], lines: list[str]) -> list[tuple[str, int, str]]:
    """What a problem matcher of VS Code finds: its patterns match lines that follow each other."""
    found = []
    for start in range(len(lines)):
        fields: dict[str, str] = {}
        for pattern, line in zip(matcher["pattern"], lines[start:], strict=False):
            if not (match := re.search(pattern["regexp"], line)):
                break
            fields |= {k: match[group] for k, group in pattern.items() if k != "regexp"}
        else:
            found.append((fields["file"], int(fields["line"]), fields["message"]))
    return found


def test_problems_of_failed_tests(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(FAILING)
    found = task(ROOT / TEMPLATE_FOLDER, "test")
    command = [found["command"], *found["args"], "-p", "no:cacheprovider", "--color=yes"]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    lines = re.sub(r"\x1b\[[\d;]*m", "", out).splitlines()  # as VS Code does
    shown = [each for matcher in found["problemMatcher"] for each in problems(matcher, lines)]
    at = {
        text: line_of(tmp_path / "test_it.py", text)
        for text in ("isinstance", "== 3", '["b"]', "raise OSError")
    }
    assert set(shown) == {
        ("test_it.py", at["isinstance"], "AssertionError: an integer is wanted"),
        ("test_it.py", at["== 3"], "assert (1 + 1) == 3"),
        ("test_it.py", at['["b"]'], "KeyError: 'b'"),
        ("test_it.py", at["raise OSError"], "OSError: no such thing"),
    }
    assert len(shown) == 4
