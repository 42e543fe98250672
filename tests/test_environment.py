"""The variables of launchers: each start is the right group, or one line that tells the remedy."""

import contextlib
import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ports import free_port
from running import SAME_FOR_BOTH, SCRIPTS, Project, finish, flags, run, small, start

from engine.errors import UserError
from engine.ranks import environment, gpus
from engine.ranks.environment import Nodes

Env = dict[str, str]
MEETING = SCRIPTS / "meeting.py"
STEP = {
    **{"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "3", "SLURM_JOB_NUM_NODES": "4"},
    **{"SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"},
    **{"SLURM_STEP_NODELIST": "n[01-03,7],m2", "SLURM_NODEID": "2"},
    **{"SLURM_PROCID": "5", "SLURM_LOCALID": "1"},
}
STEP_PORT = 20000 + 5 * 7 + 3
ONE_EACH = {
    **{"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"},
    **{"SLURM_PROCID": "2", "SLURM_LOCALID": "0"},
}
SHELL = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0"}
BATCH = {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
POD = {
    **{"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "pod-0"},
    **{"PET_MASTER_PORT": "29400", "PET_NPROC_PER_NODE": "auto"},
}
OLD_POD = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "old-0", "MASTER_PORT": "23456"}
SKY = {
    **{"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"},
    **{"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"},
}
OWN = {"NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "own", "MASTER_PORT": "1"}


def mpi(size: int, rank: int, local_size: int, local_rank: int, is_open: bool = True) -> Env:
    names = environment.MPI[0 if is_open else 1]
    return dict(zip(names, map(str, (size, rank, local_size, local_rank)), strict=True))


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Env], Env]:
    """Make this the whole environment, on a node of one GPU; an empty value unsets."""

    def use(env: Env) -> Env:
        env = {name: value for name, value in {"CUDA_VISIBLE_DEVICES": "0", **env}.items() if value}
        monkeypatch.setattr(os, "environ", env)
        return env

    return use


class TestLaunchSh:
    @pytest.mark.parametrize(
        ("env", "nodes"),
        [
            ({}, Nodes(1, 0, 0, "", 29500)),
            ({**OWN, "NPROC": "2"}, Nodes(3, 2, 2, "own", 1)),
            (POD, Nodes(2, 1, 0, "pod-0", 29400)),
            ({**POD, "PET_NPROC_PER_NODE": "4"}, Nodes(2, 1, 4, "pod-0", 29400)),
            ({**POD, "PET_NPROC_PER_NODE": "gpu"}, Nodes(2, 1, 0, "pod-0", 29400)),
            ({**POD, "PET_NPROC_PER_NODE": "cpu"}, Nodes(2, 1, os.cpu_count(), "pod-0", 29400)),
            ({**POD, **OLD_POD}, Nodes(2, 1, 0, "old-0", 23456)),
            ({"PET_NPROC_PER_NODE": "7"}, Nodes(1, 0, 7, "", 29500)),
            (OLD_POD, Nodes(2, 1, 0, "old-0", 23456)),
            ({"WORLD_SIZE": "8"}, Nodes(1, 0, 0, "", 29500)),
            (SKY, Nodes(2, 1, 0, "10.0.0.1", 29500)),
            ({**STEP, **ONE_EACH}, Nodes(4, 2, 0, "n01", STEP_PORT)),
            (
                {**STEP, **ONE_EACH, "MASTER_ADDR": "m", "NNODES": "4"},
                Nodes(4, 2, 0, "m", STEP_PORT),
            ),
            ({**STEP, **SHELL}, Nodes(1, 0, 0, "", 29500)),
            ({**mpi(2, 1, 1, 0), "MASTER_ADDR": "m"}, Nodes(2, 1, 0, "m", 29500)),
            # within SLURM, mpirun itself is one task of srun's on each node
            (
                {**STEP, **ONE_EACH, **mpi(2, 1, 1, 0), "MASTER_ADDR": "m"},
                Nodes(2, 1, 0, "m", 29500),
            ),
            # one node because a person says so
            ({**POD, "NNODES": "1"}, Nodes(1, 0, 0, "", 29400)),
            ({**SKY, "NNODES": "1"}, Nodes(1, 0, 0, "", 29500)),
            ({**STEP, "NNODES": "1"}, Nodes(1, 0, 0, "", 29500)),
            ({**BATCH, "NNODES": "1"}, Nodes(1, 0, 0, "", 29500)),
            ({**BATCH, "SLURM_JOB_NUM_NODES": "1"}, Nodes(1, 0, 0, "", 29500)),
            ({**BATCH, **OWN}, Nodes(3, 2, 0, "own", 1)),
        ],
    )
    def test_nodes(self, env: Env, nodes: Nodes, use: Callable[[Env], Env]) -> None:
        use(env)
        found = environment.read_nodes()
        assert found.count == nodes.count
        if nodes.count > 1:
            assert found == nodes
        assert found.ranks == nodes.ranks

    @pytest.mark.parametrize(
        ("env", "words"),
        [
            (BATCH, ["2 nodes", "srun --ntasks-per-node 1 ./launch.sh", "NNODES=1"]),
            # the shell of salloc is a step, but none of srun's
            ({**STEP, **SHELL, "SLURM_STEP_ID": "4294967290"}, ["4 nodes", "srun", "NNODES=1"]),
            (STEP, ["srun started 7 copies", "--ntasks-per-node 1"]),
            ({**STEP, "SLURM_NODEID": ""}, ["incomplete ('SLURM_NODEID')"]),
            ({**STEP, "SLURM_NODEID": "4"}, ["incomplete", "one group of tasks"]),
            (mpi(4, 3, 4, 3, is_open=False), ["mpirun started 4 copies", "mpirun -N 1"]),
            (mpi(2, 1, 1, 0), ["mpirun: NNODES=2 also requires MASTER_ADDR"]),
            ({**POD, "PET_NODE_RANK": ""}, ["PET_NNODES=2 also requires NODE_RANK"]),
            (
                {**POD, "PET_NNODES": "1:3"},
                ["PET_NNODES=1:3 is not an integer", "torchrun main.py"],
            ),
            (
                {**POD, "PET_MASTER_PORT": "70000"},
                ["PET_MASTER_PORT=70000 is not an integer of 1 to 65535"],
            ),
            ({**POD, "PET_NODE_RANK": "x"}, ["PET_NODE_RANK=x is not an integer of 0 or more"]),
            ({"MASTER_PORT": "65536"}, ["MASTER_PORT=65536 is not an integer of 0 to 65535"]),
            ({**POD, "PET_NPROC_PER_NODE": "0"}, ["PET_NPROC_PER_NODE=0 is not an integer of 1"]),
            (
                {**POD, "PET_NPROC_PER_NODE": "gpu", "CUDA_VISIBLE_DEVICES": "-1"},
                ["PET_NPROC_PER_NODE=gpu, but this node shows no GPU"],
            ),
            ({**POD, "NNODES": "3"}, ["NNODES=3 also requires NODE_RANK"]),
            ({**OLD_POD, "LOCAL_RANK": "0"}, ["rank 1 of 2", "start main.py", "unset LOCAL_RANK"]),
        ],
    )
    def test_lines(self, env: Env, words: list[str], use: Callable[[Env], Env]) -> None:
        use(env)
        with pytest.raises(UserError) as error:
            environment.read_nodes()
        for word in words:
            assert word in str(error.value)

    def test_one_process_per_gpu(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As nvidia-smi lists them; without it as torch does, if there is a device; else two."""

        def ranks(**env: str) -> int:
            monkeypatch.setattr(os, "environ", {"PATH": str(tmp_path), **env})
            return environment.prepare()[0].ranks

        device, tool = tmp_path / "device", tmp_path / "nvidia-smi"
        monkeypatch.setattr(gpus, "DEVICES", [device])
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 5)
        assert ranks() == 2
        device.touch()
        assert ranks() == 5
        tool.write_text("#!/bin/sh\necho GPU 0; echo GPU 1; echo GPU 2\n")
        tool.chmod(0o755)
        assert ranks() == 3
        assert ranks(CUDA_VISIBLE_DEVICES="0,2,5,7") == 2
        assert ranks(CUDA_VISIBLE_DEVICES="") == ranks(CUDA_VISIBLE_DEVICES="-1") == 2
        assert ranks(NPROC="6", PET_NPROC_PER_NODE="7") == 6
        assert ranks(PET_NPROC_PER_NODE="auto") == ranks(PET_NPROC_PER_NODE="gpu") == 3

    def test_again(self, use: Callable[[Env], Env]) -> None:
        """A restart reads what the first start has found; torchrun finds no flags of its own."""
        env = use({**POD, "PET_MAX_RESTARTS": "3"})
        first, _ = environment.prepare()
        assert first == Nodes(2, 1, 1, "pod-0", 29400)
        assert not [name for name in env if name.startswith("PET_")]
        assert environment.prepare()[0] == first


class TestPythonMain:
    """What `python main.py` makes of them: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, ..."""

    @pytest.mark.parametrize(
        ("env", "group"),
        [
            (STEP, [5, 7, 1, 2, "n01", STEP_PORT]),
            ({**STEP, "SLURM_STEP_NODELIST": "r[1-2]n[3,5]"}, [5, 7, 1, 2, "r1n3", STEP_PORT]),
            ({**STEP, "MASTER_ADDR": "a", "MASTER_PORT": "1"}, [5, 7, 1, 2, "a", 1]),
            ({**STEP, "NNODES": "4"}, [5, 7, 1, 2, "n01", STEP_PORT]),
            (mpi(4, 3, 4, 3), [3, 4, 3, 4, "127.0.0.1", 29500]),
            (mpi(4, 3, 4, 3, is_open=False), [3, 4, 3, 4, "127.0.0.1", 29500]),
            ({**mpi(4, 3, 2, 1), "MASTER_ADDR": "m"}, [3, 4, 1, 2, "m", 29500]),
            ({**STEP, **mpi(4, 3, 4, 3)}, [3, 4, 3, 4, "127.0.0.1", 29500]),
            (POD, [1, 2, 0, 1, "pod-0", 29400]),
            ({**POD, "NPROC": "8"}, [1, 2, 0, 1, "pod-0", 29400]),
            (SKY, [1, 2, 0, 1, "10.0.0.1", 29500]),
        ],
    )
    def test_groups(self, env: Env, group: list, use: Callable[[Env], Env]) -> None:
        env = use(env)
        environment.adopt()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        assert [env[name] for name in (*names, "MASTER_ADDR", "MASTER_PORT")] == list(
            map(str, group)
        )

    @pytest.mark.parametrize(
        "env",
        [
            {},
            {"NPROC": "8"},
            {**BATCH, "NNODES": "1"},
            {**BATCH, "SLURM_JOB_NUM_NODES": "1"},
            {**STEP, **SHELL},  # srun --pty bash
            {**POD, "NNODES": "1"},
            {**POD, "PET_NNODES": "1"},
            {**SKY, "SKYPILOT_NUM_NODES": "1", "CUDA_VISIBLE_DEVICES": "0,1"},
            OLD_POD,
            {**STEP, "SLURM_NODEID": "", "RANK": "0"},  # torchrun within a step
            {**POD, "RANK": "0"},
            mpi(1, 0, 1, 0),
        ],
    )
    def test_what_stays(self, env: Env, use: Callable[[Env], Env]) -> None:
        """A group of one, or that of a launcher which has set RANK."""
        env = use(env)
        before = dict(env)
        environment.adopt()
        assert env == before

    @pytest.mark.parametrize(
        ("env", "words"),
        [
            (BATCH, ["2 nodes", "srun --ntasks-per-node 1 ./launch.sh", "NNODES=1"]),
            ({**POD, "PET_NPROC_PER_NODE": "8"}, ["2 node(s) of 8 ranks", "torchrun", "NNODES=1"]),
            ({**POD, "CUDA_VISIBLE_DEVICES": "0,1"}, ["2 node(s) of 2 ranks", "./launch.sh"]),
            ({**POD, "PET_NNODES": "1", "PET_NPROC_PER_NODE": "8"}, ["1 node(s) of 8 ranks"]),
            ({**SKY, "CUDA_VISIBLE_DEVICES": "0,1"}, ["2 node(s) of 2 ranks"]),
            (mpi(4, 3, 2, 1), ["set MASTER_ADDR", "mpirun -x MASTER_ADDR=HOST"]),
            ({**STEP, "SLURM_STEP_TASKS_PER_NODE": ""}, ["SLURM_STEP_TASKS_PER_NODE"]),
            (OWN, ["NNODES=3 is for ./launch.sh", "unset NNODES"]),
        ],
    )
    def test_lines(self, env: Env, words: list[str], use: Callable[[Env], Env]) -> None:
        """Main.py refuses to train alone; tools that need no others do not."""
        before = dict(use(env))
        if "MASTER_ADDR" not in words[0] and "SLURM_STEP" not in words[0]:
            environment.adopt(alone=True)
            assert os.environ == before
        with pytest.raises(UserError) as error:
            environment.adopt()
        for word in words:
            assert word in str(error.value)


@SAME_FOR_BOTH
class TestRuns:
    def test_launch_sh(self, project: Project) -> None:
        """A pod of PyTorchJob's and a machine of SkyPilot's, by the words of each."""
        mark, port = uuid.uuid4().hex, str(free_port())
        pod = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        sky = {**SKY, "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "MASTER_PORT": port}
        launcher = project.folder / "engine/ranks/launcher.py"  # all that launch.sh starts
        command, path = [sys.executable, launcher, MEETING], str(project.folder)
        nodes = [start(command, mark, ranks=1, PYTHONPATH=path, **env) for env in (pod, sky)]
        first, second = (finish(node, mark).ok() for node in nodes)
        assert first.out == "starting 2 rank(s) ...\n2 rank(s) have met\n"
        assert second.out == ""

    def test_python_main(self, project: Project) -> None:
        """The same of a pod of TrainJob's and a rank of mpirun's."""
        mark, port = uuid.uuid4().hex, str(free_port())
        pod = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "1"}
        pod |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
        other = {**mpi(2, 1, 1, 0), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command, path = [sys.executable, MEETING], str(project.folder)
        ranks = [start(command, mark, PYTHONPATH=path, **env) for env in (pod, other)]
        first, second = (finish(rank, mark).ok() for rank in ranks)
        assert first.out == "2 rank(s) have met\n"
        assert second.out == ""

    def test_refused(self, project: Project, data: Path, tmp_path: Path) -> None:
        """A batch script without srun: nothing trains; preparing the data may."""
        run([project.folder / "launch.sh"], **BATCH).refused("srun --ntasks-per-node 1", "NNODES=1")
        words = ["--data", data, "--output", tmp_path / "fast", "--workers", "0"]
        with contextlib.closing(Project(project.folder, project.task, **BATCH)) as batch:
            batch.alone(*flags(data, tmp_path)).refused("srun --ntasks-per-node 1", "NNODES=1")
            batch.alone(*words, script="prepare_data.py").ok()

    def test_a_group_that_exists(self, project: Project, data: Path, tmp_path: Path) -> None:
        """As in a train function of Ray's: in a thread, two runs one after the other."""
        words = [str(word) for word in flags(data, tmp_path)]
        statuses, out, err = project.call("ranks.as_ray", str(tmp_path / "said"), words)
        assert statuses == [0, 0], err
        assert out.count("2 rank(s) on CPU") == out.count("done: best") == 2
        assert out.count("left as it was") == 2
        assert err.count("--epochs: none is not") == 2  # a mistake is raised, and ends no process

    def test_rank_zero_is_lost(self, project: Project, data: Path, tmp_path: Path) -> None:
        """It holds the store, by which the others would agree on who speaks: each does."""
        found = project.call("ranks.killed", data, tmp_path, *small(data))
        statuses, err = found["0"]
        assert statuses == [-9, 1, 1]
        lines = [f"error: rank {rank} lost rank 0, at MASTER_ADDR=127.0.0.1" for rank in (1, 2)]
        assert sorted(err.splitlines()) == lines
        statuses, err = found["1"]
        assert statuses == [1, -9, 1]
        assert err.count("error: ") == 1
        assert "lost another rank" in err
