"""The variables of launchers: each start is the right group, or one line that tells the remedy."""

import os
import shutil
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
BATCH = {
    "SLURM_JOB_ID": "5",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "8",
}
POD = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "pod-0"}
OWN = {"NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "own", "MASTER_PORT": "1"}
ALONE = Nodes(1, 0, 1, "127.0.0.1", 29500)
SRUN = "SLURM_JOB_NUM_NODES=2", "srun --ntasks-per-node 1 ./launch.sh", "NNODES=1"


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Env], Env]:
    """Make this the whole environment, on a node of one GPU; an empty value unsets."""

    def use(env: Env) -> Env:
        env = {
            name: value
            for name, value in {environment.GPUS: "0", **env}.items()
            if value
        }
        monkeypatch.setattr(os, "environ", env)
        return env

    return use


@pytest.mark.parametrize(
    ("env", "nodes"),
    [
        ({**OWN, "NPROC": "2"}, Nodes(3, 2, 2, "own", 1)),
        ({"MAX_RESTARTS": "2"}, Nodes(1, 0, 1, "127.0.0.1", 29500, 2)),
        (ONE_EACH, Nodes(4, 2, 1, "n01", PORT)),
        (SHELL, ALONE),
        # as a person says
        ({**POD, "NNODES": "1"}, ALONE),
        ({**BATCH, "NNODES": "1"}, ALONE),
        ({**BATCH, **OWN}, Nodes(3, 2, 1, "own", 1)),
    ],
)
def test_nodes_of_launch_sh(env, nodes, use):
    use(env)
    assert environment.read_nodes() == nodes


OTHERS = [
    {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0"},  # a PyTorchJob's
    {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},  # in a rank of torchrun
    {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
    {"PMI_SIZE": "2", "PMI_RANK": "0"},
    {"MV2_COMM_WORLD_SIZE": "2"},
    {"PMIX_RANK": "1"},
    {"NODE_RANK": "1"},
    {"FLUX_JOB_SIZE": "2", "FLUX_JOB_NNODES": "2"},
    {"PBS_NUM_NODES": "2"},
    {"LSB_MCPU_HOSTS": "node-a 8 node-b 8"},
    {"NHOSTS": "2"},
    {"AWS_BATCH_JOB_NUM_NODES": "2"},
    {**SHELL, "OMPI_COMM_WORLD_SIZE": "2"},  # mpirun in the shell of srun --pty
]


@pytest.mark.parametrize("others", OTHERS)
def test_one_of_several_by_another_launcher(others, use):
    """Nobody trains alone by mistake; a person may say so, and a variable may say "one"."""
    use(others)
    with refusal("environment.check_alone", "there are other processes", "NNODES=1"):
        environment.read_nodes()
    use({**others, "RANK": ""})
    with refusal("environment.check_alone", "there are other processes", "NNODES=1"):
        environment.adopt()
    use({**others, "NNODES": "1"})
    assert environment.read_nodes() == ALONE
    use(
        {
            name: "1" if value == "2" else "0"
            for name, value in others.items()
            if name not in SHELL
        }
    )
    assert environment.read_nodes() == ALONE


def test_what_another_launcher_has_left(use):
    """A group of one divides nothing by the ranks of a launch that is over."""
    env = use({"LOCAL_WORLD_SIZE": "4"})
    assert not environment.has_other_nodes()
    environment.adopt()
    assert "LOCAL_WORLD_SIZE" not in env


@pytest.mark.parametrize(
    ("env", "code", "words"),
    [
        (BATCH, "check_alone", SRUN),
        # the shell of salloc is a step, but none of srun's
        (
            {**SHELL, "SLURM_STEP_ID": "4294967290"},
            "check_alone",
            ["NUM_NODES=4", "NNODES=1"],
        ),
        (STEP, "read_nodes", ["7 copies", "--ntasks-per-node 1"]),
        ({**STEP, "SLURM_NODEID": ""}, "read_task", ["SLURM_NODEID"]),
        (POD, "check_alone", ["PET_NNODES=2", "torchrun", "NNODES=1"]),
        ({**OWN, "NODE_RANK": ""}, "read_nodes", ["NNODES=3", "NODE_RANK"]),
        ({**OWN, "NODE_RANK": "3"}, "number", ["NODE_RANK=3", "0 to 2"]),
        ({"MASTER_PORT": "65536"}, "number", ["MASTER_PORT=65536", "1 to 65535"]),
        ({**OWN, "MAX_RESTARTS": "1"}, "read_nodes", ["MAX_RESTARTS", "one node"]),
    ],
)
def test_lines_of_launch_sh(env, code, words, use):
    use(env)
    with refusal(f"environment.{code}", words):
        environment.read_nodes()


def test_one_process_per_gpu(tmp_path, monkeypatch):
    """As nvidia-smi lists them; without it as torch does, if there is a device; else two."""

    def ranks(**env: str) -> int:
        monkeypatch.setattr(os, "environ", {"PATH": str(tmp_path), **env})
        return environment.read_nodes().ranks

    device = tmp_path / "device"
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setattr(environment, "GPU_FILES", [device])
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 5)
    assert ranks() == 2
    device.touch()
    assert ranks() == 5
    tool.write_text("#!/bin/sh\necho GPU 0; echo GPU 1; echo GPU 2\n")
    tool.chmod(0o755)
    assert ranks() == 3
    for text, count in {
        **{" 0, 2,3": 3, "0,-1,2": 1, "GPU-ab1,MIG-1/2/3": 2},  # as CUDA reads them
        **dict.fromkeys(("", "-1", "NoDevFiles"), 2),  # CPUs
    }.items():
        assert ranks(CUDA_VISIBLE_DEVICES=text) == count, text
    assert ranks(NPROC="6") == 6


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n[01-03,7],m2", "n01"),
        ("r[1-2]n[3,5]", "r1n3"),
        ("m2,n1", "m2"),
    ],
)
def test_groups_of_python_main_py(nodes, host, use):
    env = use({**STEP, "SLURM_STEP_NODELIST": nodes})
    environment.adopt()
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    assert [env[name] for name in names] == ["5", "7", "1", "2", host, str(PORT)]


@pytest.mark.parametrize(
    "env",
    [
        {},
        SHELL,
        {**BATCH, "NNODES": "1"},
        {**POD, "RANK": "0"},
    ],
)
def test_a_group_of_one_or_of_torchrun_stays(env, use):
    env = use(env)
    before = dict(env)
    environment.adopt()
    assert env == before


def test_a_batch_script_without_srun(project, few, tmp_path):

    def batch() -> None:
        os.environ.update(BATCH)

    for done in (
        run([project.folder / "launch.sh"], **BATCH),
        project.train(few, tmp_path / "out", on=1, patch=batch),
    ):
        done.refused("environment.check_alone", SRUN)
    project.run(few, "--workers", 0, script="ddpkit check", on=1, patch=batch).ok()


def test_a_batch_job_without_a_shared_disk(project, few, tmp_path):
    """What it has saved is not there at its next start: it does not begin anew."""
    out = tmp_path / "out"

    def batch() -> None:
        os.environ["DDP_JOB"] = str(tmp_path)

    project.train(few, out, patch=batch).ok()
    shutil.rmtree(out)
    project.train(few, out, patch=batch).refused("environment.check_new", out)
    assert not list(out.glob("*.pt"))
    assert (tmp_path / "mistake").exists()
