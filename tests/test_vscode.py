"""Attaching to ranks, to processes, and the tasks, as VS Code does it."""

import contextlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dap import Debugger, configuration, line_of, read, task
from ports import free_port
from running import ROOT, SAME_FOR_BOTH, TEMPLATE_FOLDER, Project, flags, marked, small
from test_debug import LOOP, at

STUCK = """if i:
            print("it stays here", flush=True)
        while i and globals().setdefault('stuck', True):
            __import__("time").sleep(0.1)
        """


@SAME_FOR_BOTH
def test_ranks_as_named_sessions(project: Project, data: Path, tmp_path: Path) -> None:
    """The compound: a task that starts two ranks, a session for each, a task that ends them."""
    launch = read(project.folder, "launch.json")
    (compound,) = launch["compounds"]
    assert compound["stopAll"]
    port = free_port(2)
    more = ["--data", data, "--output-dir", tmp_path, "--debug-port", port, *small(data)]
    with Debugger(project.folder, at(project, "main.py", LOOP)) as debugger:
        answer = shlex.join(map(str, more))
        debugger.run(task(project.folder, compound["preLaunchTask"], flags=answer))
        ends = []
        for number, name in enumerate(compound["configurations"]):
            config = configuration(project.folder, name)
            assert config["connect"] == {"host": "127.0.0.1", "port": 5678 + number}
            assert config["name"] == f"rank {number}"
            ends.append(config.get("postDebugTask"))
            config["connect"]["port"] = port + number
            debugger.attach(config)
        for number, rank in enumerate(debugger.stopped()):
            assert rank.threads()[0] == f"rank {number}"
            assert rank.evaluate("rank") == str(number)
        for rank in debugger.held():  # Stop, of one and thereby of both
            rank.disconnect()
        (label,) = filter(None, ends)
        end = task(project.folder, label)
        words = f"{project.folder}/main.py --debug-rank 0,1 "  # as of another job of this folder
        with subprocess.Popen([sys.executable, "-c", "input()", words], stdin=-1) as other:
            subprocess.run([end["command"], *end["args"]], cwd=project.folder, check=True)
            debugger.finish()
            assert not debugger.left(5)
            assert other.poll() is None
            other.kill()
        assert not (project.folder / "runs/debug/.pid").exists()


@contextlib.contextmanager
def stuck(
    project: Project, data: Path, output: Path, *more: object
) -> Iterator[tuple[Debugger, Path]]:
    """Give the block a run that stays in its second pass, and its folder, to attach to.

    Then it has to stop at a breakpoint there, and after Disconnect to run on to its end.
    """
    folder = project.copy(output.with_name("copy")).folder
    main = folder / "main.py"
    main.write_text(main.read_text().replace("is_last = ", f"{STUCK}is_last = ", 1))
    with Debugger(folder, {"main.py": [{"line": line_of(main, "sleep(0.1)")}]}) as debugger:
        command = [sys.executable, main, *flags(data, output), *more]
        debugger.type([str(word) for word in command], folder, {})
        debugger.wait(lambda: "it stays here" in debugger.text, "the second pass")
        yield debugger, folder
        (session,) = debugger.stopped(1)
        assert session.frame["name"] == "train_one_epoch"
        assert session.evaluate("(rank, i)") == "(0, 1)"
        session.evaluate("globals().update(stuck=False)")
        debugger.set({})
        session.disconnect()
        assert debugger.finish() == 0
        assert "done: best" in debugger.text
    assert not marked(debugger.mark)


def has_gdb() -> bool:
    """Whether gdb can call a function in another process, as debugpy has it do."""
    with subprocess.Popen(["sleep", "60"]) as other:
        command = ["gdb", "-nx", "-batch", "-p", str(other.pid), "-ex", "call (int)getpid()"]
        try:
            out = subprocess.run(command, capture_output=True, text=True).stdout
        except FileNotFoundError:
            out = ""
        other.kill()
    return f"$1 = {other.pid}" in out


@SAME_FOR_BOTH
def test_attach_to_a_process(
    project: Project, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To one that is stuck: it stops at a breakpoint, and after Disconnect it runs on."""
    if not hasattr(sys, "remote_exec") and not has_gdb():
        pytest.skip("no gdb that can call functions of another process")
    monkeypatch.setenv("PYDEVD_GDB_SCAN_SHARED_LIBRARIES", "libc")
    with stuck(project, data, tmp_path / "out") as (debugger, folder):
        debugger.attach(configuration(folder, "Attach to a process", pid=str(debugger.shell.pid)))


@SAME_FOR_BOTH
def test_attach_to_a_rank_that_is_stuck(project: Project, data: Path, tmp_path: Path) -> None:
    """where.py has it listen; it stops at a breakpoint, and after Disconnect the run goes on."""
    port = free_port(2)
    with stuck(project, data, tmp_path / "out", "--debug-port", port) as (debugger, folder):
        ask = task(folder, "Where is it? Let me attach", output=str(tmp_path / "out"), rank="0")
        out = subprocess.run(
            [ask["command"], *ask["args"]], cwd=folder, capture_output=True, text=True, check=True
        ).stdout
        assert "stack of rank 0, epoch 1, step 1:" in out
        assert out.splitlines()[-1].startswith("rank 0 listens on ")
        assert f'"Attach to a rank": host 127.0.0.1, port {port}' in out
        debugger.attach(configuration(folder, "Attach to a rank", host="127.0.0.1", port=str(port)))


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
