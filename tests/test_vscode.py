"""Attaching to a rank, and the tasks, as VS Code does it."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from dap import Debugger, configuration, line_of, task
from ports import free_port
from running import ROOT, SAME_FOR_BOTH, TEMPLATE_FOLDER, Project, edited, flags, marked

STUCK = """if i:
            print("it stays here", flush=True)
        while i and globals().setdefault('stuck', True):
            __import__("time").sleep(0.1)
        """


@SAME_FOR_BOTH
def test_attach_to_a_rank_that_is_stuck(project: Project, data: Path, tmp_path: Path) -> None:
    """where.py has it listen; it stops at a breakpoint, and after Disconnect the run goes on."""
    port, output = free_port(2), tmp_path / "out"
    folder = edited(project, tmp_path / "copy", ("is_last = ", f"{STUCK}is_last = ")).folder
    main = folder / "main.py"
    with Debugger(folder, {"main.py": [{"line": line_of(main, "sleep(0.1)")}]}) as debugger:
        command = [sys.executable, main, *flags(data, output, "--debug-port", port)]
        debugger.type([str(word) for word in command], folder, {})
        debugger.wait(lambda: "it stays here" in debugger.text, "the second pass")
        ask = task(folder, "Where is it? Let me attach", output=str(output), rank="0")
        out = subprocess.run(
            [ask["command"], *ask["args"]], cwd=folder, capture_output=True, text=True, check=True
        ).stdout
        assert "stack of rank 0, epoch 1, step 1:" in out
        assert out.splitlines()[-1].startswith("rank 0 listens on ")
        assert f'"Attach to a rank": host 127.0.0.1, port {port}' in out
        debugger.attach(configuration(folder, "Attach to a rank", host="127.0.0.1", port=str(port)))
        (session,) = debugger.stopped(1)
        assert session.frame["name"] == "train_one_epoch"
        assert session.evaluate("(rank, i)") == "(0, 1)"
        session.evaluate("globals().update(stuck=False)")
        debugger.set({})
        session.disconnect()
        assert debugger.finish() == 0
        assert "done: best" in debugger.text
    assert not marked(debugger.mark)


def test_where_is_it() -> None:
    found = task(ROOT / TEMPLATE_FOLDER, "Where is it?", output="runs/a b")
    assert [found["type"], found["command"]] == ["process", sys.executable]
    assert found["args"] == ["-m", "engine.ranks.where", "runs/a b"]
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
