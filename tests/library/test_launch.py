"""All ways to start main.py, on one node and on several; and who says so if that goes wrong."""

import contextlib
import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest
import torch
from dap import configuration
from generated import ROOT, Command, Ranks, after_step, rows, run, wait_for
from launcher import Launch
from ports import free_port
from ranks import Patch, draw_nothing, on_ranks, setup

from ddpkit.ranks import distributed

MEETING = """
import pathlib, time, torch
from ddpkit.ranks import distributed, failures, handlers, process
handlers.install_handlers()
with failures.one_line_errors():
    here = distributed.rendezvous()
    torch.distributed.init_process_group(
        here.backend, None, here.timeout, here.world_size, here.rank, here.store
    )
    distributed.barrier()
    pathlib.Path(__file__).with_name("met").touch()
    time.sleep(600)
"""


def listening(pids: set[int]) -> set[str]:
    """The addresses, as /proc writes them, at which these processes listen."""
    links = set()
    for link in (link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()):
        with contextlib.suppress(OSError):
            links.add(os.readlink(link))
    lines = (
        Path(f"/proc/net/{name}").read_text().splitlines() for name in ("tcp", "tcp6")
    )
    fields = [line.split() for each in lines for line in each]
    own = [row for row in fields if row[3] == "0A" and f"socket:[{row[9]}]" in links]
    return {row[1].split(":")[0] for row in own}


@on_ranks(2, group=False)
def test_a_host_name_of_another_address():
    """On one node loopback alone, also where the host's name means another address."""
    os.environ["MASTER_ADDR"] = socket.gethostname()
    setup(timeout=60)
    assert listening({os.getpid()}) == {"0100007F"}


@on_ranks(3, group=False)
def test_three_ranks_end_with_the_same_weights(project, data, tmp_path):
    """53 images are two global batches of 24 and a rest, which is left out."""
    import main

    draw_nothing()
    build = main.build_model
    models = []

    def kept(*args: object) -> torch.nn.Module:
        models.append(build(*args))
        return models[-1]

    main.build_model = kept
    words = project.flags(data, tmp_path, "--accumulate", 2, "--epochs", 2)
    main.main([str(word) for word in words])
    assert [row["step"] for row in rows(tmp_path)] == ["2", "4"]
    saved = torch.load(tmp_path / "last.pt", weights_only=True)["model"]
    assert set(saved) == set(models[0].state_dict())
    for name, value in models[0].state_dict().items():
        for everywhere in distributed.gather_objects(value):
            assert torch.equal(everywhere, saved[name]), name


@pytest.mark.parametrize("by", ["launch.sh", "F5"])
def test_what_others_can_reach(project, tmp_path, by):
    """On one node: loopback alone, and no store of ours but a file that its owner can open."""
    held = project.copy(tmp_path / "held").folder
    (held / "main.py").write_text(MEETING)
    temporary = tmp_path / "tmp"
    temporary.mkdir(0o755)
    if by == "F5":
        f5 = configuration(held, "DDP: torch.distributed.launch", processes="2")
        env = f5["env"]
        command = [sys.executable, f5["program"]]
        command += f5["args"].split("main.py")[0].split()
        command.append(held / "main.py")
    else:
        env = {"NPROC": "2"}
        command = [held / "launch.sh"]
    started = Command(command, **env, TMPDIR=str(temporary))
    wait_for((held / "met").exists)
    pids = set(started.ranks().values()) | {started.process.pid}
    assert listening(pids) == {"0100007F"}  # of gloo
    files = list(temporary.iterdir())
    assert files
    assert not any(file.stat().st_mode & 0o077 for file in files)
    started.kill(signal.SIGTERM)
    assert not started.end().left


def test_wrong_environment(project, tmp_path):
    project.launch(NNODES="2", NODE_RANK="0").end().refused(
        "environment.read_nodes", "MASTER_ADDR"
    )
    bare = tmp_path / "python"  # without installed packages
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    project.launch(PYTHON=str(bare)).end().refused(
        "launch.main", "has no torch: activate"
    )
    alone = run([bare, "main.py"], cwd=project.folder)  # F5, "One process"
    alone.refused("", f"{sys.executable} has no torch", "Python: Select Interpreter")
    usage = run([project.folder / "launch.sh", "--help"]).ok().out
    for name in "NPROC", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT":
        assert name in usage
    assert "MAX_RESTARTS" in usage


def test_a_mistake_is_not_repeated(project, tmp_path):
    """Under MAX_RESTARTS; and the ranks say it once, of a flag nothing else."""
    words = project.flags(Path("/nowhere"), tmp_path / "out")
    env = {"NPROC": "2", "MAX_RESTARTS": "3"}
    launched = Launch(project.folder, words, tmp_path / "said", draw_nothing, **env)
    launched.end().refused("places.inner_folders", "/nowhere")
    done = project.launch("--epochs", "none", MAX_RESTARTS="3").end()
    assert done.out == ""
    done.refused("flags.error", "--epochs")


def test_runs_of_one_node_side_by_side(tmp_path):
    """Ranks of any script meet at a port that no other run has, whatever the environment says."""
    script = tmp_path / "script.py"
    # at once: print would write the end of the line by itself
    text = "import os\nos.write(1, (os.environ['MASTER_PORT'] + '\\n').encode())\n"
    script.write_text(text)
    env = {"MASTER_PORT": "31777", "NPROC": "2", "PYTHONPATH": str(ROOT)}
    ports = []
    for _ in range(2):
        command = [sys.executable, "-m", "ddpkit", "launch", script]
        one, other = run(command, cwd=tmp_path, **env).ok().out.split()
        assert one == other
        ports.append(one)
    assert len({"31777", *ports}) == 3


def node(number: int, ranks: int) -> None:
    """Make this fork the only rank of the node with that number."""
    own = {"RANK": number, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": 1}
    own["SLURMD_NODENAME"] = f"n{number}"
    os.environ.update({name: str(value) for name, value in own.items()})
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(free_port()))


def test_absent_nodes(project, few, tmp_path):
    """A line says which, after a while and at the end; without node 0, that nobody answers."""

    def start(on: int, patch: Patch) -> Ranks:
        words = project.flags(few, tmp_path / "out", "--dist-timeout", 4)
        return project.start(words, on=on, patch=patch)

    some = start(3, lambda: node((0, 1, 4)[distributed.rank()], 5))
    alone = start(1, lambda: node(1, 2)).end()
    done = some.end()
    which = r"4 s for rank 2, 3 of 5 \(WORLD_SIZE=5\); here: n0, n1, n4"
    late = which.replace("for", "waiting for")
    assert re.search(rf"^waiting up to {which}$", done.err, re.M)
    line = rf"^error: (rank \d on n\d): timed out after {late}: start all .* \[meeting.join\]$"
    first = re.search(line, done.err, re.M)[1]  # rank 0, unless this machine is slow
    assert done.err.count(f"error: {first} has failed\n") == 2
    assert done.statuses == [2, 2, 2]
    assert alone.statuses == [2]
    line = r"no answer from MASTER_ADDR=127.0.0.1, MASTER_PORT=\d+"
    assert re.match(
        rf"{line}; retrying for 4 s\nerror: rank 1 on n1: {line}: is rank 0", alone.err
    )


def test_data_that_one_node_lacks(project, few, tmp_path):
    """Its line is that rank's own; the other node's output says which rank it was."""

    def patch() -> None:
        node(distributed.rank(), 2)
        sys.argv += ["--data", "/nowhere"] * distributed.rank()

    done = project.train(few, tmp_path / "out", patch=patch)
    assert done.statuses == [2, 2]
    assert done.left == []
    own, other = sorted(done.err.splitlines(), key=len, reverse=True)
    assert re.fullmatch(r"error: rank 1 on n1: /nowhere.* \[\w+.\w+\]", own)
    assert other == "error: rank 1 on n1 has failed"


def test_a_signal_on_one_of_two_nodes(project, few, tmp_path):
    """All stop, and save."""

    def patch() -> None:
        node(distributed.rank(), 2)
        after_step(2, lambda: os.kill(os.getpid(), signal.SIGTERM), 1)()

    done = project.train(few, tmp_path / "out", patch=patch)
    assert done.err == ""
    assert done.statuses == [75, 75]
    assert "SIGTERM: stopped and saved at epoch" in done.out


def test_a_killed_rank_of_two_nodes(project, few, tmp_path):
    """Both nodes' launchers tell of it."""
    data = os.path.relpath(few)  # from where one stands
    words = project.flags(data, tmp_path / "out", "--epochs", 1000, "--save-every", 1)
    env = {
        "NPROC": "1",
        "NNODES": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }

    def launch(number: int) -> Launch:
        own = {"NODE_RANK": str(number), "SLURMD_NODENAME": f"n{number}"}
        said = tmp_path / f"node {number}"
        return Launch(project.folder, words, said, draw_nothing, **env, **own)

    nodes = [launch(0), launch(1)]
    wait_for((tmp_path / "out" / "last.pt").exists)
    (pid,) = nodes[1].ranks()
    os.kill(pid, signal.SIGKILL)
    first, second = (each.end() for each in nodes)
    killed = f"rank 1 (process {pid}) on n1 was killed by SIGKILL: out of memory?"
    assert second.err == f"error: {killed}\n"
    assert second.status == 137
    assert first.err.endswith("error: rank 0 on n0 lost another rank\n")
    assert first.status == 1


def test_a_module(tmp_path):
    """As torchrun and Python take one."""
    (tmp_path / "trainer").mkdir()
    script = tmp_path / "trainer" / "__main__.py"
    script.write_text("import os, sys; os.write(1, f'{sys.argv[1:]}\\n'.encode())")
    command = [sys.executable, "-m", "ddpkit", "launch", "-m", "trainer", "--lr", 1]
    done = run(command, cwd=tmp_path, NPROC="2", PYTHONPATH=str(ROOT)).ok()
    assert done.out == "['--lr', '1']\n" * 2
    command = [sys.executable, "-m", "ddpkit", "launch", "none.py"]
    done = run(command, cwd=tmp_path, PYTHONPATH=str(ROOT))
    done.refused("launch.main", "launch none.py: no such script")
