"""Who speaks: a file for each rank (LOG_DIR), and the names of rank and node in errors."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from running import (
    SAME_FOR_BOTH,
    SCRIPTS,
    Project,
    finish,
    flags,
    free_port,
    run,
    start,
    wait_for,
)

from engine.ranks import copying, names

HEADER = re.compile(r"--- \d{4}-\d\d-\d\d \d\d:\d\d:\d\d (rank \d on \S+), process (\d+): (.*)")


def copy(orders: list[tuple], written: bytes, **streams: int) -> subprocess.CompletedProcess:
    """Run copying.py on one pipe into which `written` goes."""
    read_end, write_end = os.pipe()
    command = [sys.executable, copying.__file__, json.dumps([(read_end, *o) for o in orders])]
    os.write(write_end, written)
    os.close(write_end)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    done = subprocess.run(command, pass_fds=[read_end], **streams, timeout=60)
    os.close(read_end)
    return done


class TestCopying:
    def test_a_progress_bar_is_left_out_of_the_file(self, tmp_path: Path) -> None:
        said = b"one\r\n\r 1% |#\r 2% |##\r       \rtwo\nhalf\rof three"
        file = tmp_path / "rank-0.log"
        for _ in range(2):  # it is appended to
            done = copy([(2, str(file), "header")], said)
            assert (done.stdout, done.stderr) == (b"", said)
        assert file.read_bytes() == b"header\none\r\ntwo\nof three\n" * 2

    def test_nobody_reads_the_output(self, tmp_path: Path) -> None:
        closed, write_end = os.pipe()
        os.close(closed)
        file = tmp_path / "rank-0.log"
        copy([(1, str(file), "header")], b"a\nb\n", stdout=write_end)
        os.close(write_end)
        assert file.read_text() == "header\na\nb\n"

    def test_a_full_disk(self) -> None:
        done = copy([(1, "/dev/full", "header")], b"a\nb\n")
        assert done.stdout == b"a\nb\n"
        assert done.stderr.decode().splitlines() == [
            "/dev/full: cannot be written (No space left on device); it gets no further lines"
        ]


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "SLURMD_NODENAME": "n2"}.items():
        monkeypatch.setenv(name, value)
    for size, here, name in ("4", "2", "rank 3 on n2"), ("4", "4", "rank 3"), ("x", "1", "rank 3"):
        monkeypatch.setenv("WORLD_SIZE", size)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
        assert names.own_rank() == name


@SAME_FOR_BOTH
class TestFiles:
    """LOG_DIR=... ./launch.sh, with a script that prints and is killed in place of main.py."""

    def noisy(self, project: Project) -> list:
        return [sys.executable, project.folder / "engine/ranks/launcher.py", SCRIPTS / "noisy.py"]

    def test_all_that_a_killed_rank_has_printed(self, project: Project, tmp_path: Path) -> None:
        """Through a restart; what is seen of it is the same as without files, and in order."""
        command = ["sh", "-c", 'exec "$@" 2>&1', "sh", *self.noisy(project)]
        env = {"PYTHONPATH": str(project.folder), "MAX_RESTARTS": "1"}
        done = run(command, LOG_DIR=str(tmp_path / "logs"), **env)
        assert done.status == 137
        assert not done.left
        both = [str(number) for number in range(200)] * 2
        assert [line for line in done.out.splitlines() if line.isdecimal()] == both
        # The last words of a rank come before those of its launcher.
        ends = re.findall(r"half a line(.*)(?:\n|.)*?was ended by SIGKILL", done.out)
        assert len(ends) == 2
        first, second = ((tmp_path / "logs" / f"rank-{r}.log").read_text() for r in range(2))
        for rank, text in enumerate((first, second)):
            assert [rank for rank, _, _ in HEADER.findall(text)] == [
                f"rank {rank} on {os.uname().nodename}"
            ] * 2
            assert text.count(f"rank {rank}: by C\n") == 2
            assert f"rank {1 - rank}" not in text
            assert "starting" not in text
            assert "SIGKILL" not in text
        assert second.count("rank 1: half a line\n") == 2
        numbers = [line for line in first.splitlines() if line.isdecimal()]
        assert numbers == both

    def test_streams_and_terminal(self, project: Project, tmp_path: Path) -> None:
        """stdout and stderr stay apart; a progress bar is drawn if stderr is a terminal."""
        screen, terminal = pty.openpty()
        mark, env = uuid.uuid4().hex, {"PYTHONPATH": str(project.folder)}
        words = ' "$@" 2>&3 3>&-'
        process = subprocess.Popen(
            ["sh", "-c", words.strip(), "sh", *map(str, self.noisy(project))],
            env={**os.environ, **env, "LOG_DIR": str(tmp_path), "DDP_TEMPLATE_TEST": mark},
            stdout=subprocess.PIPE,
            stderr=terminal,
            pass_fds=[],
            text=True,
        ) if False else None
        assert process is None
        os.close(screen)
        os.close(terminal)
