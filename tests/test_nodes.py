"""Ranks of several nodes meet, and end together, whoever dies or is late; and who says so."""

import os
import re
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest
from ports import free_port
from running import (
    SAME_FOR_BOTH,
    SCRIPTS,
    Project,
    finish,
    flags,
    planted,
    processes,
    run,
    start,
    wait_for,
)

from ddpkit.ranks import environment


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "SLURMD_NODENAME": "n2"}.items():
        monkeypatch.setenv(name, value)
    for size, here, name in ("4", "2", "rank 3 on n2"), ("4", "4", "rank 3"):
        monkeypatch.setenv("WORLD_SIZE", size)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
        assert environment.own_rank() == name


def begin(
    folder: Path, numbers: tuple[int, ...], count: int, *words: object, own: tuple = (), **env: str
) -> tuple[list[subprocess.Popen], str]:
    """Start some of `count` nodes of one rank, the last one of them with `own` flags, too."""
    mark, port = uuid.uuid4().hex, str(free_port())
    env |= {"NNODES": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    nodes = []
    for number in numbers:
        command = [folder / "launch.sh", *words, *(own if number == numbers[-1] else ())]
        names = {"NODE_RANK": str(number), "SLURMD_NODENAME": f"n{number}"}
        nodes.append(start(command, mark, 1, **env, **names))
    return nodes, mark


@SAME_FOR_BOTH
class TestMeeting:
    def test_a_crowd(self, project: Project) -> None:
        said = project.call("nodes.crowd", 60, 7)
        who = "rank 7 of 60 (WORLD_SIZE=60); here: "
        assert len(said) == 59 and len(set(said)) == 1
        assert said[0].startswith(f"waited 3 s for {who}")
        said = project.call("nodes.nobody_opens")
        assert said.startswith("waited 0.2 s for rank 0, 1, 2, 4, ... of 8 (WORLD_SIZE=8); here: ")

    def test_a_stray(self, project: Project) -> None:
        """It is told why it is one; those who have met do not hear of it."""
        first, twice, size, beyond, after = project.call("nodes.a_stray")
        assert first == "joined"
        assert twice.startswith("RANK=0 is there twice (")
        assert size == "WORLD_SIZE is 2 for rank 1, 1 for rank 0"
        assert beyond == "RANK=1 with WORLD_SIZE=1: the last rank is 0"
        assert after == twice

    def test_absent_nodes(self, project: Project, data: Path, tmp_path: Path) -> None:
        """A line says which, after a while and at the end; without node 0, that nobody answers."""
        words = [*flags(data, tmp_path / "out"), "--dist-timeout", 12]
        started = [
            begin(project.folder, (0, 1, 4), 5, *words),
            begin(project.folder, (1,), 2, *words),
        ]
        *some, alone = [finish(node, mark, 60) for nodes, mark in started for node in nodes]
        waiting, error = some[0].err.splitlines()
        which = r"12 s for rank 2, 3 of 5 \(WORLD_SIZE=5\); here: n0, n1, n4"
        assert re.fullmatch(rf"waiting up to {which}", waiting)
        assert re.fullmatch(rf"error: rank 0 on n0: waited {which}: start as many, .*", error)
        for other in some[1:]:
            assert other.err == "error: rank 0 on n0 has failed\n"
        assert [done.status for done in (*some, alone)] == [2, 2, 2, 2]
        waiting, error = alone.err.splitlines()
        line = r"nobody answers at MASTER_ADDR=127.0.0.1, MASTER_PORT=\d+"
        assert re.fullmatch(rf"{line}; trying for 12 s", waiting)
        assert re.match(rf"error: rank 1 on n1: {line}: is rank 0 there", error)


@SAME_FOR_BOTH
class TestFaults:
    def test_data_that_one_node_lacks(self, project: Project, data: Path, tmp_path: Path) -> None:
        """Its line is that rank's own; the other node's output says which rank it was."""
        words = flags(data, tmp_path / "out")
        nodes, mark = begin(project.folder, (0, 1), 2, *words, own=("--data", "/nowhere"))
        first, second = (finish(node, mark) for node in nodes)
        assert (first.status, second.status) == (2, 2)
        assert second.err.startswith("error: rank 1 on n1: /nowhere")
        assert second.err.count("\n") == 1
        assert first.err == "error: rank 1 on n1 has failed\n"

    def test_a_rank_that_is_killed(self, project: Project, data: Path, tmp_path: Path) -> None:
        words = flags(data, tmp_path / "out", "--epochs", 1000, "--save-every", 1)
        nodes, mark = begin(project.folder, (0, 1), 2, *words)
        wait_for((tmp_path / "out" / "last.pt").exists, nodes[0])
        (pid,) = (pid for pid, rank in processes(mark) if rank == 1)
        os.kill(pid, signal.SIGKILL)
        first, second = (finish(node, mark) for node in nodes)
        killed = f"error: rank 1 (process {pid}) on n1 was ended by SIGKILL: out of memory?\n"
        assert second.err == killed
        assert first.err.endswith("error: rank 0 on n0 lost another rank\n")
        assert (first.status, second.status) == (1, 137)

    def test_a_signal_to_one_launcher(self, project: Project, data: Path, tmp_path: Path) -> None:
        """All nodes' ranks stop after the same step, and save."""
        words = flags(data, tmp_path / "out", "--epochs", 1000, "--save-every", 1)
        nodes, mark = begin(project.folder, (0, 1), 2, *words)
        wait_for((tmp_path / "out" / "last.pt").exists, nodes[0])
        nodes[1].send_signal(signal.SIGTERM)
        done = [finish(node, mark) for node in nodes]
        assert [each.status for each in done] == [75, 75]
        assert "SIGTERM: stopped and saved at epoch" in done[0].out
        assert [each.err for each in done] == ["", ""]


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


@SAME_FOR_BOTH
def test_elastic_torchrun(project: Project, data: Path, tmp_path: Path) -> None:
    """A node joins and leaves: each round goes on where the ranks of the one before stopped."""
    mark, port = uuid.uuid4().hex, free_port()
    more = "--nnodes=1:3 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-id=x --max-restarts=2"
    where = ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    where += ["--rdzv-conf", "last_call_timeout=4"]  # for a third node: 30 s otherwise, each round
    slow = planted(project, tmp_path / "slow", "__import__('time').sleep(0.2)\n")
    words = flags(data, tmp_path, "--image-size", 32, "--epochs", 1000)
    command = [sys.executable, "-m", "torch.distributed.run", *more.split(), *where]
    nodes: list[subprocess.Popen] = []
    timer = threading.Timer(280, lambda: [node.kill() for node in nodes])
    timer.start()

    def launch() -> subprocess.Popen:
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        nodes.append(start([*command, slow.folder / "main.py", *words], mark, **env))
        return nodes[-1]

    def until(ranks: int) -> str:
        """Read on until that many ranks have trained an epoch; return what was said before."""
        found = ""
        for line in nodes[0].stdout:
            found += line
            if (
                f"{ranks} rank(s) on CPU" in found.rpartition("starting ")[2]
                and "epoch" in line[:6]
            ):
                return found
        raise AssertionError(found)

    try:
        first = launch()
        until(1)
        second = launch()
        assert "SIGTERM: stopped and saved at epoch" in (joined := until(2))
        assert "1 rank(s) then, 2 now" in joined
        second.terminate()
        assert "2 rank(s) then, 1 now" in until(1)
        first.terminate()
    except BaseException:
        for node in nodes:
            node.kill()  # its ranks stop
        raise
    finally:
        timer.cancel()
    done = [finish(node, mark) for node in nodes]
    assert not any(each.left for each in done)
