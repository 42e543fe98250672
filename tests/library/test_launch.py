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
from dap import configuration, task
from generated import Command, Project, rows, run, wait_for
from ports import free_port
from ranks import draw_nothing, on_ranks

from ddpkit.ranks import distributed

SLOW = "__import__('time').sleep(0.2)\n"
MEETING = """
import pathlib, time
from ddpkit.ranks import distributed, failures, process
process.install_handlers()
with failures.one_line_errors():
    distributed.setup()
    distributed.barrier()
    distributed.say(f"{distributed.world_size()} rank(s) have met")
    pathlib.Path(__file__).with_name("met").touch()
    time.sleep(HELD)
    distributed.teardown()
"""
# A rank fails before it is in a group: rank 0 after the others, or, with SECONDS, only the other.
BEFORE = """
import time
from ddpkit.ranks import process
process.install_handlers()
from ddpkit.errors import UserError
from ddpkit.ranks import distributed, failures
with failures.one_line_errors():
    if distributed.rank() == 0:
        if SECONDS:
            distributed.setup(timeout=SECONDS)
        time.sleep(2)
    raise UserError(f"planted in rank {distributed.rank()}")
"""


def in_place_of_main(project: Project, folder: Path, script: str) -> Project:
    copied = project.copy(folder)
    (copied.folder / "main.py").write_text(script)
    return copied


@pytest.fixture
def meeting(project: Project, tmp_path: Path) -> Project:
    """Its main.py trains nothing."""
    return in_place_of_main(project, tmp_path / "meeting", MEETING.replace("HELD", "0"))


def srun_step(node: int, job: str) -> dict[str, str]:
    """The variables of a task of srun's, of two on as many nodes."""
    return {
        "SLURM_JOB_ID": job,  # decides on the port
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "localhost",
        **dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID"), str(node)),
        "SLURM_LOCALID": "0",
    }


def meet() -> None:
    distributed.setup(timeout=60)
    assert distributed.reduce_tensor(torch.tensor(1)) == 2


@on_ranks(2, group=False)
def test_an_address_of_ipv6():
    """Of ranks that nothing says are on one node."""
    os.environ["MASTER_ADDR"] = "::1"
    del os.environ["LOCAL_WORLD_SIZE"]
    meet()


def listening(pids: set[int]) -> set[str]:
    """The addresses, as /proc writes them, at which these processes listen."""
    links = set()
    for link in (link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()):
        with contextlib.suppress(OSError):
            links.add(os.readlink(link))
    lines = (Path(f"/proc/net/{name}").read_text().splitlines() for name in ("tcp", "tcp6"))
    fields = [line.split() for each in lines for line in each]
    own = [row for row in fields if row[3] == "0A" and f"socket:[{row[9]}]" in links]
    return {row[1].split(":")[0] for row in own}


@on_ranks(2, group=False)
def test_a_host_name_of_another_address():
    """On one node loopback alone, also where the host's name means another address."""
    os.environ["MASTER_ADDR"] = socket.gethostname()
    meet()
    assert listening({os.getpid()}) == {"0100007F"}


@pytest.mark.parametrize("flag", ["--local-rank=1", "--local_rank=1"])
@pytest.mark.parametrize("given", [None, "2"])
@on_ranks(1, group=False)
def test_local_rank_as_a_flag(project, flag, given):
    """In older launchers' spelling, too; one in the environment wins."""
    import main

    if given:
        os.environ["LOCAL_RANK"] = given
    main.parse_args([flag])
    main.distributed.setup(seed=0)
    assert distributed.local_rank() == int(given or 1)


@on_ranks(3, group=False)
def test_three_ranks_end_with_the_same_weights(project, data, tmp_path):
    """53 images are two global batches of 24 and a rest, which is left out."""
    import main

    draw_nothing()
    build, models = main.build_model, []
    main.build_model = lambda *args: models.append(build(*args)) or models[0]
    words = project.flags(data, tmp_path, "--accumulate", 2, "--epochs", 2)
    main.main([str(word) for word in words])
    assert [row["step"] for row in rows(tmp_path)] == ["2", "4"]
    saved = torch.load(tmp_path / "last.pt", weights_only=True)["model"]
    assert {*saved} == {*models[0].state_dict()}
    for name, value in models[0].state_dict().items():
        assert torch.equal(distributed.gather(value), saved[name].expand(3, *value.shape)), name


def test_a_forward_pass_beside_ddp_is_found_out(project, few, tmp_path):
    wrong = "outputs = ddp_model(images)", "outputs = ddp_model.module(images)"
    done = project.copy(tmp_path / "broken", wrong).train(few, tmp_path / "out")
    done.refused("replicas.check_called", "ddp_model(images)")
    assert not (tmp_path / "out" / "last.pt").exists()


@pytest.mark.parametrize(
    ("launcher", "said"),
    [
        ("", "1 rank"),
        (
            "-m torch.distributed.launch --nproc-per-node 2",
            "starting 2 rank(s) ...\n2 rank(s) have met\n",
        ),
    ],
)
def test_python(meeting, launcher, said):
    port = ("--master-port", free_port()) if launcher else ()
    command = [sys.executable, *launcher.split(), *port, meeting.folder / "main.py"]
    assert run(command).ok().out.startswith(said)


def test_srun_launch_sh(meeting):
    """launch.sh as the task of each of two nodes; its two ranks a node make four."""
    job = str(free_port())  # decides on the port
    nodes = [meeting.launch(**srun_step(node, job)) for node in range(2)]
    first, second = [node.end().ok() for node in nodes]
    assert first.out == "starting 4 rank(s) ...\n4 rank(s) have met\n"
    assert second.out == ""
    wrong = {**srun_step(0, job), "SLURM_STEP_NUM_TASKS": "4"}
    meeting.launch(**wrong).end().refused("environment.read_nodes", "--ntasks-per-node 1")


@pytest.mark.parametrize("by", ["launch.sh", "F5"])
def test_what_others_can_reach(project, tmp_path, by):
    """On one node: loopback alone, and no store of ours but a file that its owner can open."""
    held = in_place_of_main(project, tmp_path / "held", MEETING.replace("HELD", "600")).folder
    temporary = tmp_path / "tmp"
    temporary.mkdir(0o755)
    command, env = [held / "launch.sh"], {"NPROC": "2"}
    if by == "F5":
        f5 = configuration(held, "DDP: torch.distributed.launch", processes="2")
        words = f5["args"].split("main.py")[0].split()
        command, env = [sys.executable, "-m", f5["module"], *words, held / "main.py"], f5["env"]
    started = Command(command, **env, TMPDIR=str(temporary))
    wait_for((held / "met").exists)
    pids = {*started.ranks().values(), started.process.pid}
    assert listening(pids) == {"0100007F"}  # of gloo
    files = [*temporary.iterdir()]
    assert files and not any(file.stat().st_mode & 0o077 for file in files)
    started.kill(signal.SIGTERM)
    assert not started.end().left


def test_from_another_folder_until_a_rank_raises(project, few, tmp_path):
    """Paths on the command line are seen from where one stands; also if it has no name.

    Of a bug in the script its traceback, once, is all that is said.
    """
    bug = "if run.epoch == 1 and rank == 1:\n    raise ValueError('a bug')\n"
    script = project.planted(tmp_path / "copy", bug).folder / "launch.sh"
    nameless = "import socket\nsocket.getfqdn = lambda *_: 'nowhere.invalid'\n"
    (tmp_path / "sitecustomize.py").write_text(nameless)
    words = project.flags(Path(os.path.relpath(few, tmp_path)), Path("here"), "--epochs", 2)
    done = run([script, *words], cwd=tmp_path, PYTHONPATH=str(tmp_path), NPROC="2")
    assert done.out.startswith("starting 2 rank(s) ...\n")
    assert (tmp_path / "here" / "best.pt").exists()
    assert (done.status, done.left) == (1, [])
    assert done.err.count("Traceback") == 1
    assert done.err.rstrip().endswith("ValueError: a bug")


def test_wrong_environment(project, tmp_path):
    project.launch(NNODES="2", NODE_RANK="0").end().refused("environment.read_nodes", "MASTER_ADDR")
    bare = tmp_path / "python"  # without installed packages
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    project.launch(PYTHON=str(bare)).end().refused("launch.main", "has no torch: activate")
    alone = run([bare, "main.py"], cwd=project.folder)  # F5, "One process"
    alone.refused("", f"{sys.executable} has no torch", "Python: Select Interpreter")
    before = task(project.folder, "find torch")  # F5
    run([before["command"], *before["args"]], cwd=project.folder).ok()
    without = run([bare, *before["args"]], cwd=project.folder)
    assert (without.status, without.err) == (alone.status, alone.err)
    usage = run([project.folder / "launch.sh", "--help"]).ok().out
    for name in ("NPROC", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "MAX_RESTARTS"):
        assert name in usage


@pytest.mark.parametrize(("seconds", "rank"), [(0, 0), (30, 1)])
def test_an_error_before_the_group(project, tmp_path, seconds, rank):
    """Its line is not lost if rank 0 is late with it, nor if rank 0 has none; nor repeated."""
    script = BEFORE.replace("SECONDS", str(seconds))
    copied = in_place_of_main(project, tmp_path / "copy", script)
    copied.launch(MAX_RESTARTS="3").end(60).refused("main.module", f"planted in rank {rank} ")
    if seconds:
        return
    # Without a launcher each rank prints it. torchrun's --redirects: its two files a rank.
    err = copied.run().err
    assert all(f"error: planted in rank {rank} " in err for rank in range(2))
    words = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--redirects",
        "3",
        "--log-dir",
    ]
    own = (tmp_path / "logs", "--master-port", free_port(), copied.folder / "main.py")
    done = run([sys.executable, *words, *own])
    assert done.status == 1
    assert "planted" not in done.out + done.err
    said = {path.parent.name: path.read_text() for path in tmp_path.rglob("stderr.log")}
    assert said == {"0": "error: planted in rank 0 [main.module]\n", "1": ""}


def node(number: int, ranks: int) -> None:
    """Make this fork the only rank of the node with that number."""
    own = {"RANK": number, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": 1}
    own["SLURMD_NODENAME"] = f"n{number}"
    os.environ.update({name: str(value) for name, value in own.items()})
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(free_port()))


def test_absent_nodes(project, few, tmp_path):
    """A line says which, after a while and at the end; without node 0, that nobody answers."""
    words = project.flags(few, tmp_path / "out", "--dist-timeout", 4)
    some = project.start(*words, on=3, patch=lambda: node((0, 1, 4)[distributed.rank()], 5))
    alone = project.start(*words, on=1, patch=lambda: node(1, 2)).end()
    done = some.end()
    which = r"4 s for rank 2, 3 of 5 \(WORLD_SIZE=5\); here: n0, n1, n4"
    assert re.search(rf"^waiting up to {which}$", done.err, re.M)
    line = rf"^error: rank 0 on n0: waited {which}: start as many, .* \[meeting.fail\]$"
    assert re.search(line, done.err, re.M)
    assert done.err.count("error: rank 0 on n0 has failed\n") == 2
    assert (done.statuses, alone.statuses) == ([2, 2, 2], [2])
    line = r"nobody answers at MASTER_ADDR=127.0.0.1, MASTER_PORT=\d+"
    assert re.match(rf"{line}; trying for 4 s\nerror: rank 1 on n1: {line}: is rank 0", alone.err)


def test_data_that_one_node_lacks(project, few, tmp_path):
    """Its line is that rank's own; the other node's output says which rank it was."""

    def patch() -> None:
        node(distributed.rank(), 2)
        sys.argv += ["--data", "/nowhere"] * distributed.rank()

    done = project.train(few, tmp_path / "out", patch=patch)
    assert (done.statuses, done.left) == ([2, 2], [])
    own, other = sorted(done.err.splitlines(), key=len, reverse=True)
    assert re.fullmatch(r"error: rank 1 on n1: /nowhere.* \[\w+.\w+\]", own)
    assert other == "error: rank 1 on n1 has failed"


def test_two_nodes(project, few, tmp_path):
    """A signal to one launcher stops all, and they save; of a killed rank both nodes tell."""
    words = project.flags(few, tmp_path, "--epochs", 1000, "--save-every", 1)
    env = {"NPROC": "1", "NNODES": "2", "MASTER_ADDR": "127.0.0.1"}
    slow = project.planted(tmp_path / "slow", SLOW)

    def begin(name: str) -> list[Command]:
        own = {**env, "MASTER_PORT": str(free_port())}
        more = (*words, "--output-dir", tmp_path / name)
        nodes = [
            slow.launch(*more, **own, NODE_RANK=str(n), SLURMD_NODENAME=f"n{n}") for n in range(2)
        ]
        wait_for((tmp_path / name / "last.pt").exists)
        return nodes

    nodes = begin("stopped")
    nodes[1].kill(signal.SIGTERM)
    done = [each.end() for each in nodes]
    assert [(each.status, each.err) for each in done] == [(75, "")] * 2
    assert "SIGTERM: stopped and saved at epoch" in done[0].out
    nodes = begin("killed")
    pid = nodes[1].ranks()[1]
    nodes[1].kill(signal.SIGKILL, 1)
    first, second = (each.end() for each in nodes)
    killed = f"error: rank 1 (process {pid}) on n1 was ended by SIGKILL: out of memory?\n"
    assert (second.status, second.err) == (137, killed)
    assert first.err.endswith("error: rank 0 on n0 lost another rank\n")
    assert first.status == 1


@pytest.mark.timeout(300)
def test_elastic_torchrun(project, few, tmp_path):
    """A node joins and leaves: each round goes on where the ranks of the one before stopped."""
    more = "--nnodes=1:3 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-id=x --max-restarts=2"
    where = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    where += ["--rdzv-conf", "last_call_timeout=4"]  # for a third node: 30 s otherwise, each round
    main = project.planted(tmp_path / "slow", SLOW).folder / "main.py"
    command = [sys.executable, "-m", "torch.distributed.run", *more.split(), *where, main]
    command += project.flags(few, tmp_path, "--image-size", 32, "--epochs", 1000)

    def launch() -> Command:
        return Command(command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

    def until(ranks: int) -> str:
        """Read on until that many ranks have trained an epoch; return what was said before."""
        found = ""
        for line in first.process.stdout:
            found += line
            start = found.rpartition("starting ")[2]
            if f"{ranks} rank(s) on CPU" in start and "epoch" in line[:6]:
                return found
        raise AssertionError(found)

    first = launch()
    until(1)
    second = launch()
    joined = until(2)
    assert "SIGTERM: stopped and saved at epoch" in joined
    assert "1 rank(s) then, 2 now" in joined
    second.kill(signal.SIGTERM)
    assert "2 rank(s) then, 1 now" in until(1)
    first.kill(signal.SIGTERM)
    assert not first.end().left and not second.end().left
