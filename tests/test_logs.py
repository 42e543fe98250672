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
from ports import free_port
from running import SAME_FOR_BOTH, SCRIPTS, Project, finish, flags, run, start, wait_for

from engine.ranks import copying, names

HEADER = re.compile(r"--- \d{4}-\d\d-\d\d \d\d:\d\d:\d\d (rank \d on \S+), process (\d+): (.*)")


def copy(orders: list[tuple], written: bytes, **streams: int) -> subprocess.CompletedProcess:
    """Run copying.py on one pipe into which `written` goes."""
    read_end, write_end = os.pipe()
    command, text = [sys.executable, copying.__file__], json.dumps([(read_end, *o) for o in orders])
    os.write(write_end, written)
    os.close(write_end)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    done = subprocess.run(command, input=text.encode(), pass_fds=[read_end], **streams, timeout=60)
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
        assert done.out.count("rank 1: half a lineerror: rank 1 (process ") == 2
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
        mark, env = uuid.uuid4().hex, {"PYTHONPATH": str(project.folder), "LOG_DIR": str(tmp_path)}
        onto_terminal = ["sh", "-c", 'exec "$@" 2>"$0"', os.ttyname(terminal)]
        process = start([*onto_terminal, *self.noisy(project)], mark, **env)
        done = finish(process, mark)
        said = b""
        while not said.endswith(b"out of memory?\r\n"):
            said += os.read(screen, 4096)
        os.close(screen)
        os.close(terminal)
        assert done.status == 137
        assert not done.left
        assert "rank 0: terminal True\n" in done.out
        assert [line for line in done.out.splitlines() if line.isdecimal()] == [
            str(number) for number in range(0, 200, 2)
        ]
        odd = [line for line in said.decode().splitlines() if line.isdecimal()]
        assert odd == [str(number) for number in range(1, 200, 2)]

    def test_a_folder_that_cannot_be(self, project: Project, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        done = run(self.noisy(project), LOG_DIR=str(tmp_path / "file"))
        done.refused(f"LOG_DIR={tmp_path / 'file'}: no file can be made there (File exists)")
        assert done.status == 2


@SAME_FOR_BOTH
def test_torchruns_own_logs(project: Project, tmp_path: Path) -> None:
    """--redirects: its two files a rank, and nothing else is printed."""
    words = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--redirects", "3")
    own = ("--log-dir", tmp_path, "--master-port", free_port(), SCRIPTS / "before_the_group.py", 0)
    done = run([sys.executable, *words, *own], PYTHONPATH=str(project.folder))
    assert done.status == 1
    assert "planted" not in done.out + done.err
    said = {path.parent.name: path.read_text() for path in tmp_path.rglob("stderr.log")}
    assert said == {"0": "error: planted in rank 0\n", "1": ""}


def two_nodes(
    project: Project, folder: Path, *words: object, more: tuple = ()
) -> tuple[list[subprocess.Popen], str]:
    """Start two nodes of one rank, n1 and n2, with logs in `folder`; n2 has `more` flags."""
    mark, env = uuid.uuid4().hex, {"NNODES": "2", "MASTER_ADDR": "127.0.0.1"}
    env.update(MASTER_PORT=str(free_port()), LOG_DIR=str(folder))
    nodes = []
    for node, own in enumerate(((), more)):
        command = [project.folder / "launch.sh", *words, *own]
        names = {"NODE_RANK": str(node), "SLURMD_NODENAME": f"n{node + 1}"}
        nodes.append(start(command, mark, 1, **env, **names))
    return nodes, mark


@SAME_FOR_BOTH
class TestNodes:
    def test_data_that_one_node_lacks(self, project: Project, data: Path, tmp_path: Path) -> None:
        """Each node's output says which rank has failed; the file of that rank says why."""
        words = flags(data, tmp_path / "out")
        nodes, mark = two_nodes(project, tmp_path / "logs", *words, more=("--data", "/nowhere"))
        first, second = (finish(node, mark) for node in nodes)
        assert (first.status, second.status) == (2, 2)
        line = "error: rank 1 on n2: /nowhere/train: no such folder; "
        assert second.err.startswith(line)
        assert first.err == "error: rank 1 on n2 has failed\n"
        logs = [(tmp_path / "logs" / f"rank-{rank}.log").read_text() for rank in range(2)]
        assert logs[1].split("\n", 1)[1] == second.err
        assert "error" not in logs[0]
        assert [HEADER.match(text)[1] for text in logs] == ["rank 0 on n1", "rank 1 on n2"]

    def test_a_rank_that_is_killed(self, project: Project, data: Path, tmp_path: Path) -> None:
        words = flags(data, tmp_path / "out", "--epochs", 1000)
        nodes, mark = two_nodes(project, tmp_path / "logs", *words)
        logs = [tmp_path / "logs" / f"rank-{rank}.log" for rank in range(2)]
        wait_for(lambda: logs[0].exists() and "epoch 1/1000  " in logs[0].read_text(), nodes[0])
        pid = HEADER.match(logs[1].read_text())[2]
        os.kill(int(pid), signal.SIGKILL)
        first, second = (finish(node, mark) for node in nodes)
        killed = f"error: rank 1 (process {pid}) on n2 was ended by SIGKILL: out of memory?\n"
        assert second.err == killed
        assert "rank 0 on n1 lost another rank:\n" in first.err
        assert f"rank 1 does not answer (process {pid} on n2)\n" in first.err
        assert "\nstack of rank 0 on n1, epoch " in first.err
        assert first.err.endswith("error: rank 0 on n1 lost another rank\n")
        assert logs[0].read_text().endswith(first.err)
        assert "SIGKILL" not in logs[1].read_text()  # what launchers print is not a rank's
