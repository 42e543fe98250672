"""The variables of launchers: each start is the right group, or one line that tells the remedy."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from running import SAME_FOR_BOTH, SCRIPTS, Project, flags, run, small

from ddpkit.errors import UserError
from ddpkit.ranks import environment
from ddpkit.ranks.environment import Nodes

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
POD = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "pod-0"}
RANK = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "23456"}
OWN = {"NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "own", "MASTER_PORT": "1"}


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
            ({}, Nodes(1, 0, 1, "127.0.0.1", 29500)),
            ({**OWN, "NPROC": "2"}, Nodes(3, 2, 2, "own", 1)),
            ({"MAX_RESTARTS": "2"}, Nodes(1, 0, 1, "127.0.0.1", 29500, 2)),
            ({"WORLD_SIZE": "8"}, Nodes(1, 0, 1, "127.0.0.1", 29500)),
            ({**STEP, **ONE_EACH}, Nodes(4, 2, 1, "n01", STEP_PORT)),
            ({**STEP, **ONE_EACH, "MASTER_ADDR": "m"}, Nodes(4, 2, 1, "m", STEP_PORT)),
            ({**STEP, **SHELL}, Nodes(1, 0, 1, "127.0.0.1", 29500)),
            # one node because a person says so
            ({**POD, "NNODES": "1"}, Nodes(1, 0, 1, "127.0.0.1", 29500)),
            ({**STEP, "NNODES": "1"}, Nodes(1, 0, 1, "127.0.0.1", 29500)),
            ({**BATCH, "NNODES": "1"}, Nodes(1, 0, 1, "127.0.0.1", 29500)),
            ({**BATCH, "SLURM_JOB_NUM_NODES": "1"}, Nodes(1, 0, 1, "127.0.0.1", 29500)),
            ({**BATCH, **OWN}, Nodes(3, 2, 1, "own", 1)),
        ],
    )
    def test_nodes(self, env: Env, nodes: Nodes, use: Callable[[Env], Env]) -> None:
        use(env)
        assert environment.read_nodes() == nodes

    @pytest.mark.parametrize(
        ("env", "words"),
        [
            (BATCH, ["2 nodes", "srun --ntasks-per-node 1 ./launch.sh", "NNODES=1"]),
            # the shell of salloc is a step, but none of srun's
            ({**STEP, **SHELL, "SLURM_STEP_ID": "4294967290"}, ["4 nodes", "srun", "NNODES=1"]),
            (STEP, ["srun started 7 copies", "--ntasks-per-node 1"]),
            ({**STEP, "SLURM_NODEID": ""}, ["incomplete ('SLURM_NODEID')"]),
            ({**STEP, "SLURM_NODEID": "4"}, ["incomplete", "one group of tasks"]),
            (POD, ["2 nodes", "torchrun", "NNODES=1"]),
            ({**OWN, "NODE_RANK": ""}, ["NNODES=3 also requires NODE_RANK"]),
            ({**OWN, "NODE_RANK": "x"}, ["NODE_RANK=x is not an integer of 0 to "]),
            ({"MASTER_PORT": "65536"}, ["MASTER_PORT=65536 is not an integer of 1 to 65535"]),
            ({"NPROC": "0"}, ["NPROC=0 is not an integer of 1 to "]),
            ({"MAX_RESTARTS": "-1"}, ["MAX_RESTARTS=-1 is not an integer of 0 to "]),
            ({**OWN, "MAX_RESTARTS": "1"}, ["MAX_RESTARTS is for one node"]),
            ({**OWN, "NODE_RANK": "3"}, ["NODE_RANK=3 is none of the NNODES=3 nodes: 0 to 2"]),
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
            return environment.read_nodes().ranks

        device, tool = tmp_path / "device", tmp_path / "nvidia-smi"
        monkeypatch.setattr(environment, "GPU_FILES", [device])
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 5)
        assert ranks() == 2
        device.touch()
        assert ranks() == 5
        tool.write_text("#!/bin/sh\necho GPU 0; echo GPU 1; echo GPU 2\n")
        tool.chmod(0o755)
        assert ranks() == 3
        assert ranks(CUDA_VISIBLE_DEVICES="0,2,-1,7") == 2
        assert ranks(CUDA_VISIBLE_DEVICES="") == ranks(CUDA_VISIBLE_DEVICES="-1") == 2
        assert ranks(NPROC="6") == 6


class TestPythonMain:
    """What `python main.py` makes of them: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, ..."""

    @pytest.mark.parametrize(
        ("env", "group"),
        [
            (STEP, [5, 7, 1, 2, "n01", STEP_PORT]),
            ({**STEP, "SLURM_STEP_NODELIST": "r[1-2]n[3,5]"}, [5, 7, 1, 2, "r1n3", STEP_PORT]),
            ({**STEP, "MASTER_ADDR": "a", "MASTER_PORT": "1"}, [5, 7, 1, 2, "a", 1]),
            ({**STEP, "NNODES": "4"}, [5, 7, 1, 2, "n01", STEP_PORT]),
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
            RANK,
            {**STEP, "SLURM_NODEID": "", "RANK": "0"},  # torchrun within a step
            {**POD, "RANK": "0"},
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
            ({**STEP, "SLURM_STEP_TASKS_PER_NODE": ""}, ["SLURM_STEP_TASKS_PER_NODE"]),
            (OWN, ["3 nodes", "start with torchrun or", "set NNODES=1"]),
            (POD, ["2 nodes", "start with torchrun or", "set NNODES=1"]),
        ],
    )
    def test_lines(self, env: Env, words: list[str], use: Callable[[Env], Env]) -> None:
        """Main.py refuses to train alone; tools that need no others do not."""
        before = dict(use(env))
        if "SLURM_STEP" not in words[0]:
            environment.adopt(alone=True)
            assert os.environ == before
        with pytest.raises(UserError) as error:
            environment.adopt()
        for word in words:
            assert word in str(error.value)


@SAME_FOR_BOTH
class TestRuns:
    def test_refused(self, project: Project, data: Path, tmp_path: Path) -> None:
        """A batch script without srun: nothing trains; preparing the data may."""
        run([project.folder / "launch.sh"], **BATCH).refused("srun --ntasks-per-node 1", "NNODES=1")
        words = ["--data", data, "--output", tmp_path / "fast", "--workers", "0"]
        with contextlib.closing(Project(project.folder, project.task, **BATCH)) as batch:
            batch.alone(*flags(data, tmp_path)).refused("srun --ntasks-per-node 1", "NNODES=1")
            batch.alone(*words, script="ddpkit prepare").ok()

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
