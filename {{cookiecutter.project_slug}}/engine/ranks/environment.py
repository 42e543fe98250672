"""What launchers say through environment variables: torchrun's names, and SLURM's put into them."""

import contextlib
import itertools
import os
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from engine.errors import UserError
from engine.ranks import protocol

PORT, LAST_PORT = 29500, 65535  # torchrun's; of TCP
SPECIAL_STEPS = 2**32 - 16  # from here on SLURM's steps are not srun's, but salloc's shell and such
GPUS = "CUDA_VISIBLE_DEVICES"
GPU_FILES = Path("/dev/nvidiactl"), Path("/dev/kfd")  # of containers without nvidia-smi; of AMD
# What a person says to launch.sh, and what torchrun reads the same from, as in Kubeflow's pods
NODES = {name: f"PET_{name}" for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")}
NODES["NPROC"] = "PET_NPROC_PER_NODE"


@dataclass(frozen=True)
class Nodes:
    """The nodes of a launch: how many, this one's number and ranks, where rank 0 listens."""

    count: int
    number: int
    ranks: int
    host: str
    port: int


class Task(NamedTuple):
    """One of the processes that srun started."""

    ranks: dict[str, int]  # torchrun's variables
    nodes: dict[str, str]  # those of NODES, if there is one on each
    host: str  # of rank 0
    port: int


def node() -> str:
    """Return the name of this machine, as people know it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def has_other_nodes() -> bool:
    """Return whether this rank's launcher tells of ranks on other nodes."""
    size, here = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return size.isdecimal() and here.isdecimal() and int(size) > int(here)


def own_rank() -> str:
    """Return such as "rank 3", or "rank 3 on n2" if there are other nodes."""
    rank = f"rank {os.environ.get('RANK', 0)}"
    return f"{rank} on {node()}" if has_other_nodes() else rank


def read_nodes() -> Nodes:
    """Return the nodes of launch.sh: as NNODES and so on say, else as srun or Kubeflow tell.

    Raises a UserError if this is one of several nodes and nothing would bring them together.
    """
    said = {name: os.environ[name] for name in NODES if os.environ.get(name)}
    if "NNODES" not in said:
        said = _told() | said

    def number(name: str, default: int, low: int, high: int = 2**31) -> int:
        text = said.get(name, str(default))
        if not (text.isdecimal() and low <= int(text) <= high):
            variable = name if os.environ.get(name) else NODES[name]
            hint = "; an elastic job is started by torchrun main.py" if ":" in text else ""
            raise UserError(f"{variable}={text} is not an integer of {low} to {high}{hint}")
        return int(text)

    count, this = number("NNODES", 1, 1), number("NODE_RANK", 0, 0)
    for name in ("NODE_RANK", "MASTER_ADDR"):
        if count > 1 and name not in said:
            raise UserError(f"NNODES={count} also requires {name}; see ./launch.sh --help")
    if this >= count > 1:
        raise UserError(f"NODE_RANK={this} is none of the NNODES={count} nodes: 0 to {count - 1}")
    is_counted = said.get("NPROC", "auto") in ("auto", "gpu")  # torchrun's words
    ranks = count_gpus() or 2 if is_counted else number("NPROC", 0, 1)
    host = said["MASTER_ADDR"] if count > 1 else "127.0.0.1"
    return Nodes(count, this, ranks, host, number("MASTER_PORT", PORT, 1, LAST_PORT))


def _told() -> dict[str, str]:
    env, task = os.environ, read_task()
    if task and (size := task.ranks["WORLD_SIZE"]) > 1:
        if not task.nodes:
            raise UserError(
                f"srun started {size} copies of launch.sh, several on one node: "
                "use srun --ntasks-per-node 1"
            )
        return task.nodes
    if {"RANK", "LOCAL_RANK"} <= env.keys() and env.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            f"launch.sh was started as rank {env['RANK']} of {env['WORLD_SIZE']}: "
            "start main.py in its place, or unset LOCAL_RANK"
        )
    told = {name: env[theirs] for name, theirs in NODES.items() if env.get(theirs)}
    if "NNODES" not in told:
        _refuse_one_of_several(task)
    return told


def _refuse_one_of_several(task: Task | None) -> None:
    """Raise a UserError in a batch script of SLURM's for several nodes, outside srun."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if nodes != "1" and not task:
        raise UserError(
            f"SLURM gave this job {nodes} nodes, but only this one would train: start with srun "
            "--ntasks-per-node 1 ./launch.sh, or set NNODES=1 for this node alone"
        )


def adopt(alone: bool = False) -> None:
    """Set torchrun's variables for a process that srun started without a launcher.

    alone: whether this process may be on its own in a job of several nodes; else that is a
    UserError.
    """
    if "RANK" in (env := os.environ):
        return
    task = read_task()
    if task and task.ranks["WORLD_SIZE"] > 1:
        env.update({name: str(value) for name, value in task.ranks.items()})
        env.setdefault("MASTER_ADDR", task.host)
        env.setdefault("MASTER_PORT", str(task.port))
        return
    count = env.get("NNODES") or env.get("PET_NNODES")
    if alone or count == "1":
        return
    if count:
        raise UserError(
            f"NNODES={count}: start ./launch.sh or torchrun main.py in place of python main.py, "
            "or set NNODES=1 for one process alone"
        )
    _refuse_one_of_several(task)


def read_task() -> Task | None:
    """Return what srun says; None if it did not start this process."""
    env = os.environ
    if int(env.get("SLURM_STEP_ID", SPECIAL_STEPS)) >= SPECIAL_STEPS:
        return None
    try:
        size, this = int(env["SLURM_STEP_NUM_TASKS"]), int(env["SLURM_NODEID"])
        per_node: list[int] = []  # "2(x3),1" means 2, 2, 2, 1
        for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", env["SLURM_STEP_TASKS_PER_NODE"]):
            per_node += [int(tasks)] * int(times or 1)
        ranks = {"RANK": int(env["SLURM_PROCID"]), "LOCAL_RANK": int(env["SLURM_LOCALID"])}
        ranks |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": per_node[this]}
        host = re.sub(r"\[(\w+)[^]]*\]", r"\1", env["SLURM_STEP_NODELIST"]).split(",")[0]
        port = 20000 + (int(env["SLURM_JOB_ID"]) * 7 + int(env["SLURM_STEP_ID"])) % 10000
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(
            f"srun's variables are incomplete ({error}): pass all of SLURM_* on, and start one "
            "group of tasks"
        ) from None
    nodes = zip(NODES, map(str, (size, this, host, port)), strict=False)
    return Task(ranks, dict(nodes) if per_node == [1] * size else {}, host, port)


def read_group() -> tuple[str, int, int, int]:
    """Return MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE; raise a UserError if one is missing."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        value = os.environ.get(name, "")
        if not value or not (value.isdecimal() or name == "MASTER_ADDR"):
            what = f"{name}={value} is not a number" if value else f"RANK is set, {name} is not"
            raise UserError(f"{what}: start with ./launch.sh or torchrun, or unset RANK")
    env = os.environ
    if (port := int(env["MASTER_PORT"])) > LAST_PORT:
        raise UserError(f"MASTER_PORT={port} is above {LAST_PORT}, the last port")
    return env["MASTER_ADDR"], port, int(env["RANK"]), int(env["WORLD_SIZE"])


def visible_gpus() -> list[str] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, as CUDA reads it; None if it is not set.

    It ends at the first word that names none: "", "-1", "none" and SLURM's "NoDevFiles" give [].
    """
    text = os.environ.get(GPUS)
    if text is None:
        return None
    found = map(re.compile(r"\s*(\d+|(?:GPU|MIG)-.+)").match, text.split(","))
    return [each[1] for each in itertools.takewhile(bool, found) if each]


def list_gpus() -> list[str] | None:
    """Return what nvidia-smi says: a line "GPU ..." for each; None if there is no nvidia-smi.

    Raises a UserError if it hangs, as it does if a GPU has failed.
    """
    if not shutil.which("nvidia-smi"):
        return None
    pipe, command = subprocess.PIPE, ["nvidia-smi", "--list-gpus"]
    started = subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    try:
        return started.communicate(timeout=protocol.NOTICE_SECONDS)[0].splitlines()
    except subprocess.TimeoutExpired:
        started.kill()  # without waiting: in the driver it may not end
        raise UserError(
            f"nvidia-smi has not answered in {protocol.NOTICE_SECONDS} s, as if a GPU has failed: "
            f"restart this node or leave it out, or train on CPUs with {GPUS}="
        ) from None


def count_gpus() -> int:
    """Return the number of GPUs that a rank will see, without torch if that can be."""
    if (names := visible_gpus()) is not None:
        return len(names)
    if (lines := list_gpus()) is not None:
        return sum(line.startswith("GPU ") for line in lines)
    if any(file.exists() for file in GPU_FILES):
        import torch

        return torch.accelerator.device_count()
    return 0


def note_mistake() -> None:
    """Tell slurm/train.sbatch that another start would end in the same way.

    srun returns the highest of all statuses, often that of a task that it has killed.
    """
    _note("mistake", node())


def note_checkpoint(folder: Path) -> None:
    """Tell this batch job's later starts that `folder` has a checkpoint."""
    if os.path.abspath(folder) not in _saved():
        _note("saved", f"{node()} {os.path.abspath(folder)}")


def check_new(folder: Path) -> None:
    """Raise a UserError if an earlier start of this job had a checkpoint in `folder`.

    It is on a disk that the nodes do not share, or has been removed.
    """
    if before := _saved().get(os.path.abspath(folder)):
        raise UserError(
            f"--output-dir {folder}: this job has saved there on {before}, but there is no "
            f"checkpoint on {node()}: use a folder that all nodes share, or submit a new job to "
            "start over"
        )


def _saved() -> dict[str, str]:
    """Return on which node each folder got its first checkpoint."""
    with contextlib.suppress(OSError, KeyError):
        lines = Path(os.environ[protocol.JOB], "saved").read_text().splitlines()
        return {folder: node for node, folder in (line.split(" ", 1) for line in lines)}
    return {}


def _note(name: str, line: str) -> None:
    """Write `line` to a file of the folder that slurm/train.sbatch keeps for its job."""
    if folder := os.environ.get(protocol.JOB):
        with contextlib.suppress(OSError), open(f"{folder}/{name}", "a") as file:
            file.write(f"{line}\n")
