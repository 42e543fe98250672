"""The variables of launchers: each start is the right group, or one line that tells the remedy."""

import os
from collections.abc import Callable

import pytest
import torch
from generated import refusal, run

from ddpkit.ranks import environment
from ddpkit.ranks.environment import Nodes

Env = dict[str, str]
STEP = {
    **{"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "3", "SLURM_JOB_NUM_NODES": "4"},
    **{"SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"},
    **{"SLURM_STEP_NODELIST": "n[01-03,7],m2", "SLURM_NODEID": "2"},
    **{"SLURM_PROCID": "5", "SLURM_LOCALID": "1"},
}
PORT = 20000 + 5 * 7 + 3
ONE_EACH = {
    **{**STEP, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"},
    **{"SLURM_PROCID": "2", "SLURM_LOCALID": "0"},
}
SHELL = {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
BATCH = {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
POD = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "pod-0"}
OWN = {"NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "own", "MASTER_PORT": "1"}
ALONE = Nodes(1, 0, 1, "127.0.0.1", 29500)
SRUN = "2 nodes", "srun --ntasks-per-node 1 ./launch.sh", "NNODES=1"


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Env], Env]:
    """Make this the whole environment, on a node of one GPU; an empty value unsets."""

    def use(env: Env) -> Env:
        env = {name: value for name, value in {environment.GPUS: "0", **env}.items() if value}
        monkeypatch.setattr(os, "environ", env)
        return env

    return use


@pytest.mark.parametrize(
    ("env", "nodes"),
    [
        ({"WORLD_SIZE": "8"}, ALONE),
        ({**OWN, "NPROC": "2"}, Nodes(3, 2, 2, "own", 1)),
        ({"MAX_RESTARTS": "2"}, Nodes(1, 0, 1, "127.0.0.1", 29500, 2)),
        (ONE_EACH, Nodes(4, 2, 1, "n01", PORT)),
        ({**ONE_EACH, "MASTER_ADDR": "m"}, Nodes(4, 2, 1, "m", PORT)),
        (SHELL, ALONE),
        *(({**each, "NNODES": "1"}, ALONE) for each in (POD, STEP, BATCH)),  # as a person says
        ({**BATCH, "SLURM_JOB_NUM_NODES": "1"}, ALONE),
        ({**BATCH, **OWN}, Nodes(3, 2, 1, "own", 1)),
    ],
)
def test_nodes_of_launch_sh(env, nodes, use):
    use(env)
    assert environment.read_nodes() == nodes


@pytest.mark.parametrize(
    ("env", "code", "words"),
    [
        (BATCH, "read_task", SRUN),
        # the shell of salloc is a step, but none of srun's
        ({**SHELL, "SLURM_STEP_ID": "4294967290"}, "read_task", ["4 nodes", "NNODES=1"]),
        (STEP, "read_nodes", ["7 copies", "--ntasks-per-node 1"]),
        ({**STEP, "SLURM_NODEID": ""}, "read_task", ["SLURM_NODEID"]),
        ({**STEP, "SLURM_NODEID": "4"}, "read_task", ["incomplete"]),
        (POD, "read_task", ["2 nodes", "torchrun", "NNODES=1"]),
        ({**OWN, "NODE_RANK": ""}, "read_nodes", ["NNODES=3", "NODE_RANK"]),
        ({**OWN, "NODE_RANK": "x"}, "number", ["NODE_RANK=x", " 0 to "]),
        ({**OWN, "NODE_RANK": "3"}, "read_nodes", ["NODE_RANK=3", "0 to 2"]),
        ({"MASTER_PORT": "65536"}, "number", ["MASTER_PORT=65536", "1 to 65535"]),
        ({"NPROC": "0"}, "number", ["NPROC=0"]),
        ({"MAX_RESTARTS": "-1"}, "number", ["MAX_RESTARTS=-1"]),
        ({**OWN, "MAX_RESTARTS": "1"}, "read_nodes", ["MAX_RESTARTS", "one node"]),
    ],
)
def test_lines_of_launch_sh(env, code, words, use):
    use(env)
    with refusal(f"environment.{code}", *words):
        environment.read_nodes()


def test_one_process_per_gpu(tmp_path, monkeypatch):
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
    for text, count in {
        **{"0,1,2": 3, " 0, 2": 2, "1gpu,2": 2, "0,1,-1,2": 2, "0,,1": 1},  # as CUDA reads them
        **{"GPU-ab1,GPU-c": 2, "MIG-1/2/3": 1},
        **dict.fromkeys(("", " ", "-1", "NoDevFiles", "none", "void"), 2),  # CPUs
    }.items():
        assert ranks(CUDA_VISIBLE_DEVICES=text) == count, text
    assert ranks(NPROC="6") == 6


@pytest.mark.parametrize(
    ("env", "host", "port"),
    [
        (STEP, "n01", PORT),
        ({**STEP, "SLURM_STEP_NODELIST": "r[1-2]n[3,5]"}, "r1n3", PORT),
        ({**STEP, "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "a", 1),
        ({**STEP, "NNODES": "4"}, "n01", PORT),
    ],
)
def test_groups_of_python_main_py(env, host, port, use):
    env = use(env)
    environment.adopt()
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
    assert [env[name] for name in names] == ["5", "7", "1", "2", host, str(port)]


@pytest.mark.parametrize(
    "env",
    [
        *({}, {"NPROC": "8"}, SHELL, {**POD, "PET_NNODES": "1"}),
        *({**BATCH, "SLURM_JOB_NUM_NODES": "1"}, {**BATCH, "NNODES": "1"}, {**POD, "NNODES": "1"}),
        *({**STEP, "SLURM_NODEID": "", "RANK": "0"}, {**POD, "RANK": "0"}),  # by torchrun
    ],
)
def test_a_group_of_one_or_of_torchrun_stays(env, use):
    env = use(env)
    before = dict(env)
    environment.adopt()
    assert env == before


@pytest.mark.parametrize(
    ("env", "words"),
    [(BATCH, SRUN), (OWN, ["3 nodes", "torchrun", "NNODES=1"]), (POD, ["2 nodes", "torchrun"])],
)
def test_one_process_of_a_job_of_several_nodes(env, words, use):
    """It does not train alone; tools that need no others run."""
    before = dict(use(env))
    environment.adopt(alone=True)
    assert os.environ == before
    with refusal("environment.read_task", *words):
        environment.adopt()


def test_a_batch_script_without_srun(project, few, tmp_path):
    run([project.folder / "launch.sh"], **BATCH).refused("environment.read_task", *SRUN)
    words = "--data", few, "--output", tmp_path / "fast", "--workers", 0

    def batch() -> None:
        os.environ.update(BATCH)

    done = project.train(few, tmp_path / "out", on=1, patch=batch)
    done.refused("environment.read_task", *SRUN)
    project.run(*words, script="ddpkit prepare", on=1, patch=batch).ok()
