"""All ways to start main.py, on one node and on two; and that ranks agree, or say so."""

import os
import re
import signal
import socket
import sys
import uuid
from pathlib import Path

import pytest
import torch
from dap import configuration, task
from ports import free_port
from running import (
    SAME_FOR_BOTH,
    SCRIPTS,
    Project,
    edited,
    finish,
    flags,
    in_place_of_main,
    planted,
    rows,
    run,
    start,
)


@SAME_FOR_BOTH
def test_three_ranks_end_with_the_same_weights(
    project: Project, data: Path, tmp_path: Path
) -> None:
    # 53 pictures are two global batches of 24 and a rest, which is left out.
    more = flags(data, tmp_path, "--accumulate", 2, "--epochs", 2)
    script = SCRIPTS / "keep_weights.py"
    done = project.fork(tmp_path, *more, ranks=3, script=script, draws=False).ok()
    assert "batch 4 per rank x 3 rank(s) x 2 accumulated = 24" in done.out
    assert [row["step"] for row in rows(tmp_path)] == ["2", "4"]
    first, *others = (torch.load(tmp_path / f"rank{r}.pt", weights_only=True) for r in range(3))
    saved = torch.load(tmp_path / "last.pt", weights_only=True)["model"]
    for other in [*others, saved]:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)


@SAME_FOR_BOTH
def test_a_forward_pass_beside_ddp_is_found_out(
    project: Project, data: Path, tmp_path: Path
) -> None:
    wrong = "outputs = ddp_model(images)", "outputs = ddp_model.module(images)"
    main = edited(project, tmp_path / "broken", wrong).folder / "main.py"
    done = project.fork(*flags(data, tmp_path / "out"), script=main)
    done.refused("ddp_model(images)")
    assert not (tmp_path / "out" / "last.pt").exists()


@SAME_FOR_BOTH
class TestLaunchers:
    """All ways to start main.py."""

    @pytest.fixture
    def bare(self, project: Project, tmp_path: Path) -> Project:
        """Without drawings, which take seconds."""
        return planted(project, tmp_path / "bare")

    @pytest.fixture
    def meeting(self, project: Project, tmp_path: Path) -> Project:
        """With a main.py that trains nothing."""
        return in_place_of_main(project, tmp_path / "meeting", "meeting.py")

    def test_torchrun(self, bare: Project, data: Path, tmp_path: Path) -> None:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
        command = [sys.executable, *launcher, bare.folder / "main.py", *flags(data, tmp_path)]
        out = run(command).ok().out
        assert re.match(r"starting 2 rank\(s\) \.\.\.\nclasses, .*\n2 rank\(s\) on CPU", out)
        assert rows(tmp_path)[0]["step"] == "6"

    def test_torch_distributed_launch(self, meeting: Project) -> None:
        launcher = f"-m torch.distributed.launch --nproc-per-node 2 --master-port {free_port()}"
        done = run([sys.executable, *launcher.split(), meeting.folder / "main.py"]).ok()
        assert done.out == "starting 2 rank(s) ...\n2 rank(s) have met\n"

    def test_plain_start_is_a_group_of_one(self, bare: Project, data: Path, tmp_path: Path) -> None:
        command = [sys.executable, bare.folder / "main.py", *flags(data, tmp_path)]
        assert "1 rank(s)" in run(command).ok().out
        assert rows(tmp_path)[0]["step"] == "13"

    @pytest.mark.parametrize("flag", ["--local-rank=1", "--local_rank=1"])
    def test_local_rank_as_a_flag(self, project: Project, flag: str) -> None:
        """In older launchers' spelling, too; one in the environment wins."""
        assert project.call("ranks.local_rank", flag, None) == 1
        assert project.call("ranks.local_rank", flag, "2") == 2

    def test_an_address_of_ipv6(self, meeting: Project) -> None:
        """Ranks that nothing says are on one node, with no launcher of torch's."""
        mark, command = uuid.uuid4().hex, [sys.executable, meeting.folder / "main.py"]
        group = {"WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": str(free_port())}
        ranks = [start(command, mark, **group, RANK=str(r), LOCAL_RANK=str(r)) for r in range(2)]
        done = [finish(each, mark).ok() for each in ranks]
        assert [each.out for each in done] == ["2 rank(s) have met\n", ""]

    def test_srun(self, meeting: Project) -> None:
        """Two nodes of one task each, as srun's variables tell of them; no SLURM is run."""
        mark, job = uuid.uuid4().hex, str(uuid.uuid4().int % 10**6)  # decides on the port
        command = [sys.executable, meeting.folder / "main.py"]
        ranks = [start(command, mark, **srun_step(r, job)) for r in range(2)]
        done = [finish(each, mark).ok() for each in ranks]
        assert [each.out for each in done] == ["2 rank(s) have met\n", ""]

    def test_srun_launch_sh(self, meeting: Project) -> None:
        """The same, with launch.sh as the task; its two ranks a node make four."""
        mark, job = uuid.uuid4().hex, str(uuid.uuid4().int % 10**6)  # decides on the port
        command = [meeting.folder / "launch.sh"]
        nodes = [start(command, mark, **srun_step(r, job)) for r in range(2)]
        done = [finish(each, mark).ok() for each in nodes]
        assert "\n4 rank(s) have met" in done[0].out
        wrong = {**srun_step(0, job), "SLURM_STEP_NUM_TASKS": "4"}
        run(command, **wrong).refused("--ntasks-per-node 1")

    def test_two_nodes(self, meeting: Project) -> None:
        mark, port = uuid.uuid4().hex, str(free_port())
        env = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [meeting.folder / "launch.sh"]
        nodes = [start(command, mark, ranks=1, NODE_RANK=str(n), **env) for n in range(2)]
        first, second = (finish(node, mark).ok() for node in nodes)
        assert first.out == "starting 2 rank(s) ...\n2 rank(s) have met\n"
        assert second.out == ""

    @pytest.mark.parametrize("by", ["launch.sh", "F5", "srun"])
    def test_what_others_can_reach(self, project: Project, tmp_path: Path, by: str) -> None:
        """On one node: loopback alone, and no store of ours but a file that its owner can open."""
        folder = in_place_of_main(project, tmp_path / "listening", "listening.py").folder
        temporary = tmp_path / "tmp"
        temporary.mkdir(0o755)
        mark, env = uuid.uuid4().hex, {"TMPDIR": str(temporary)}
        if by == "launch.sh":
            started = [start([folder / "launch.sh"], mark, **env)]
        elif by == "F5":
            f5 = configuration(folder, "DDP: torch.distributed.launch", processes="2")
            words = f5["args"].split("main.py")[0].split()
            command = [sys.executable, "-m", f5["module"], *words, folder / "main.py"]
            started = [start(command, mark, **env, **f5["env"])]
        else:
            group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
            group["MASTER_ADDR"] = socket.gethostname()  # an address that others can reach, often
            command = [sys.executable, folder / "main.py"]
            own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
            started = [start(command, mark, **env, **group, **each) for each in own]
        first, *_ = [finish(process, mark).ok() for process in started]
        assert first.err == ""
        # gloo listens at 127.0.0.1, also where the host's name means another address
        assert first.out.splitlines()[-2:] == ["lo", "0100007F"]
        for left in temporary.iterdir():  # by torch, or nothing
            assert left.stat().st_mode & 0o077 == 0

    def test_names_that_do_not_resolve(self, project: Project) -> None:
        said = project.call("nodes.nowhere")
        assert said.startswith("MASTER_ADDR=nowhere.invalid cannot be resolved (")

    def test_from_another_folder_until_a_rank_raises(
        self, project: Project, data: Path, tmp_path: Path
    ) -> None:
        """Paths on the command line are seen from where one stands; also if it has no name.

        Of a bug in the script its traceback, once, is all that is said.
        """
        bug = "if run.epoch == 1 and rank == 1:\n    raise ValueError('a bug')\n"
        script = planted(project, tmp_path / "copy", bug).folder / "launch.sh"
        nameless = "import socket\nsocket.getfqdn = lambda *_: 'nowhere.invalid'\n"
        (tmp_path / "sitecustomize.py").write_text(nameless)
        words = flags(Path(os.path.relpath(data, tmp_path)), Path("here"), "--epochs", 2)
        done = run([script, *words], cwd=tmp_path, PYTHONPATH=str(tmp_path))
        assert done.out.startswith("starting 2 rank(s) ...\n")
        assert (tmp_path / "here" / "best.pt").exists()
        assert done.status == 1
        assert done.err.count("Traceback") == 1
        assert done.err.rstrip().endswith("ValueError: a bug")
        assert not done.left

    def test_wrong_environment(self, project: Project, tmp_path: Path) -> None:
        project.launch(NNODES="2", NODE_RANK="0").refused("MASTER_ADDR")
        run([project.folder / "launch.sh"], NNODES="two").refused("NNODES=two")
        run([project.folder / "launch.sh"], MAX_RESTARTS="-1").refused("MAX_RESTARTS=-1")
        two = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "localhost", "MAX_RESTARTS": "1"}
        run([project.folder / "launch.sh"], **two).refused("MAX_RESTARTS is for one node")
        beyond = {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "localhost"}
        run([project.folder / "launch.sh"], **beyond).refused("NODE_RANK=2 is none of the NNODES=2")
        bare = tmp_path / "python"  # without installed packages
        bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
        bare.chmod(0o755)
        run([project.folder / "launch.sh"], PYTHON=str(bare)).refused("has no torch: activate")
        alone = run([bare, "main.py"], cwd=project.folder)  # F5, "One process"
        alone.refused(f"{sys.executable} has no torch", "Python: Select Interpreter")
        before = task(project.folder, "find torch")  # F5
        run([before["command"], *before["args"]], cwd=project.folder).ok()
        without = run([bare, *before["args"]], cwd=project.folder)
        assert without.refused("has no torch").err == alone.err
        assert (alone.status, without.status) == (2, 2)
        usage = run([project.folder / "launch.sh", "--help"]).ok().out
        for name in ("NPROC", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "MAX_RESTARTS"):
            assert name in usage


def srun_step(node: int, job: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(node),
        "SLURM_LOCALID": "0",
    }


@SAME_FOR_BOTH
def test_an_error_before_the_group(project: Project, tmp_path: Path) -> None:
    """Its line is not lost if rank 0 is late with it, nor if rank 0 has none; nor repeated.

    Without a launcher each rank prints it.
    """
    script = "before_the_group.py"
    copy = in_place_of_main(project, tmp_path / "copy", script)
    for seconds, rank in ((0, 0), (30, 1)):
        done = copy.launch(seconds, timeout=60, MAX_RESTARTS="3")
        assert done.status == 2
        done.refused(f"error: planted in rank {rank}\n")
    err = project.fork(0, script=SCRIPTS / script).err
    assert [f"error: planted in rank {rank}\n" in err for rank in (0, 1)] == [True, True]


@SAME_FOR_BOTH
def test_a_launcher_that_took_the_store_with_it(project: Project) -> None:
    """Its ranks end with the signal that follows; without one they wait for a while."""
    assert project.call("ranks.without_store") == [128 + signal.SIGTERM, 1]


@SAME_FOR_BOTH
def test_scripts_that_begin_quietly_end_so(project: Project) -> None:
    for path in project.folder.glob("*.py"):
        text = path.read_text()
        begins = "process.install_handlers()" in text or "ddpkit.prepare(" in text
        assert begins == ("with one_line_errors(" in text or "ddpkit.start(" in text)


@SAME_FOR_BOTH
def test_loader_workers_end_with_their_rank(project: Project) -> None:
    """Whichever way Python starts processes by: its default is another from 3.14 on."""
    done = run([sys.executable, SCRIPTS / "loader_workers.py"], cwd=project.folder)
    assert [line.split()[0] for line in done.out.splitlines()] == ["fork", "spawn"]
    assert not done.left
