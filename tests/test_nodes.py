"""The launchers of several nodes meet, start again and end together, whoever dies or is late."""

import re
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest
from ports import free_port
from running import SAME_FOR_BOTH, Project, finish, flags, in_place_of_main, planted, start


@SAME_FOR_BOTH
def test_counters_that_diverge(project: Project, tmp_path: Path) -> None:
    """Both take over the lower number of restarts, and the id of the launch that began first."""
    statuses, *nodes = project.call("nodes.counters_diverge", tmp_path)
    assert statuses == [0, 0]
    for out, err in nodes:
        *_, first, second = out.splitlines()
        assert (first, second) == ("start 0, id abcd, 2 left", "start 1, id abcd, 1 left")
        assert err == ""


@SAME_FOR_BOTH
@pytest.mark.parametrize(("status", "other"), [(75, 1), (1, 75)])
def test_one_ends_for_good(project: Project, tmp_path: Path, status: int, other: int) -> None:
    """Whichever: the launcher whose ranks have failed does not start them again alone."""
    statuses, *nodes, seconds = project.call("nodes.one_ends_for_good", tmp_path, status, other)
    assert statuses == [status, other]
    failed, final = nodes if other == 75 else reversed(nodes)
    line = rf"error: not restarting: node {int(other == 75)} \(.+\) has ended with status 75\n"
    assert re.fullmatch(line, failed[1])
    assert final[1] == ""
    assert seconds < 10


@SAME_FOR_BOTH
def test_a_launcher_that_dies(project: Project, tmp_path: Path) -> None:
    """While it waits: nobody starts without it, and another may take its place."""
    statuses, *nodes = project.call("nodes.dies_while_it_waits", tmp_path)
    assert statuses == [0, 0, 0]
    assert [out.count("start 0, ") for out, _ in nodes] == [1, 1, 1]
    assert "waiting up to 30 s for node 1 of 3 (NNODES=3); here: 0 (" in nodes[0][1]


@SAME_FOR_BOTH
def test_a_launcher_that_is_late(project: Project, tmp_path: Path) -> None:
    """It disturbs nobody: refused, or with MAX_RESTARTS in the next start."""
    statuses, _, (out, other) = project.call("nodes.late", tmp_path)
    assert statuses == [0, 0]
    refused, waits = other.splitlines()
    assert refused.startswith("error: NODE_RANK=1 is there twice (")
    assert re.fullmatch(
        r"NODE_RANK=1 is running already, on .+; waiting up to 30 s for the next start", waits
    )
    assert out.count("start 0, ") == 2


@SAME_FOR_BOTH
def test_a_crowd(project: Project) -> None:
    said = project.call("nodes.crowd", 60, 7)
    who = "rank 7 of 60 (WORLD_SIZE=60); here: 0-6 ("
    assert len(said) == 59 and len(set(said)) == 1 and said[0].startswith(f"waited 3 s for {who}")
    said = project.call("nodes.nobody_opens")
    assert said.startswith("waited 0.2 s for rank 0 of 8 (WORLD_SIZE=8): start as many")


@SAME_FOR_BOTH
def test_absent_nodes(project: Project, tmp_path: Path) -> None:
    found = project.call("nodes.absent", tmp_path)
    statuses, _, (_, err) = found["alone"]
    assert statuses == [2]
    waiting, error = err.splitlines()
    assert re.match("nobody answers at MASTER_ADDR=127.0.0.1, .* Trying for 2 s", waiting)
    assert error.startswith("error: nobody answers at MASTER_ADDR=127.0.0.1, ")
    statuses, *nodes = found["absent"]
    assert statuses == [2, 2, 2]
    waiting, error = nodes[0][1].splitlines()
    which = r"s for node 2-3 of 5 \(NNODES=5\); here: 0-1 \([^()]+\), 4 \([^()]+\)"
    assert re.fullmatch(rf"waiting up to 3 {which}", waiting)
    assert re.fullmatch(rf"error: waited 3 {which}: start as many, .*", error)
    assert nodes[1][1] == nodes[4][1] == f"{error}\n"


@SAME_FOR_BOTH
def test_gloo_that_cannot_be_reached(project: Project, tmp_path: Path) -> None:
    """As Debian's /etc/hosts would have it: found out at once, where gloo would hang."""
    statuses, err = project.call("nodes.unreachable", tmp_path)
    assert statuses == [2, 2]
    assert "the name of host0 resolves there to 127.0.1.1" in err
    assert "set GLOO_SOCKET_IFNAME" in err


@SAME_FOR_BOTH
@pytest.mark.parametrize("broken", [0, 1])
def test_a_node_that_cannot_begin(project: Project, tmp_path: Path, broken: int) -> None:
    """Such as one whose Python lacks a library: the others do not wait for its ranks."""
    copy = in_place_of_main(project, tmp_path / "copy", "meeting.py").folder
    module = copy / "engine" / "ranks" / "agreeing.py"
    module.write_text(module.read_text().replace("ALONE_SECONDS = 20", "ALONE_SECONDS = 1", 1))
    lacks = f"import os, sys\nif os.environ.get('RANK') == '{broken}':\n    os._exit(9)\n"
    (tmp_path / "sitecustomize.py").write_text(lacks)
    mark, env = uuid.uuid4().hex, {"NNODES": "2", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(free_port()), "PYTHONPATH": str(tmp_path)}
    command = [copy / "launch.sh"]
    nodes = [start(command, mark, ranks=1, NODE_RANK=str(node), **env) for node in range(2)]
    done = [finish(node, mark, 100) for node in nodes]
    assert done[broken].status == 9
    assert done[1 - broken].status == 1
    where = rf"error: node {broken} \(.+\) has ended with status 9: ending the ranks of this node\n"
    assert re.fullmatch(where, done[1 - broken].err)
    assert not done[0].left


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
