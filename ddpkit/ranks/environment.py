"""What launchers say through environment variables: torchrun's names, and SLURM's put into them."""

import contextlib
import itertools
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

from ddpkit.errors import UserError
from ddpkit.ranks import protocol

PORT = 29500  # torchrun's
# From here on SLURM's steps are not srun's, but salloc's shell and such.
SPECIAL_STEPS = 2**32 - 16
GPUS = "CUDA_VISIBLE_DEVICES"
# There are GPUs without nvidia-smi: in containers, and of AMD.
GPU_FILES = Path("/dev/nvidiactl"), Path("/dev/kfd")
# What says that there are others: nodes of a job, processes of a launcher, and their
# numbers, from 0
NODES = """NNODES NUM_NODES PET_NNODES SLURM_JOB_NUM_NODES PBS_NUM_NODES FLUX_JOB_NNODES
    AWS_BATCH_JOB_NUM_NODES SKYPILOT_NUM_NODES SM_HOST_COUNT NHOSTS LSB_MCPU_HOSTS"""
SIZES = """WORLD_SIZE OMPI_COMM_WORLD_SIZE PMI_SIZE MV2_COMM_WORLD_SIZE MVP_COMM_WORLD_SIZE
    FLUX_JOB_SIZE JSM_NAMESPACE_SIZE HOROVOD_SIZE"""
NUMBERS = "RANK NODE_RANK PMI_RANK PMIX_RANK PALS_RANKID"
# What people set for launch.sh
TYPED = "NNODES NODE_RANK MASTER_ADDR MASTER_PORT NPROC MAX_RESTARTS"


@dataclass(frozen=True)
class Nodes:  # of a launch
    count: int
    number: int  # this one's
    ranks: int  # of this one
    host: str  # where rank 0 listens
    port: int
    restarts: int = 0


def node() -> str:
    """Return the name of this machine, as people know it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def process_space() -> str:
    """Return what is the same here and there if a process id is; "" without /proc."""
    # Not the host's name: its containers may have that, too.
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return ""


def has_other_nodes() -> bool:
    """Return whether this rank's launcher tells of ranks on other nodes."""
    if "RANK" not in os.environ:
        return False
    size = os.environ.get("WORLD_SIZE", "1")
    return size != os.environ.get("LOCAL_WORLD_SIZE", "1")


def own_rank() -> str:
    """Return such as "rank 3", or "rank 3 on n2" if there are other nodes."""
    rank = f"rank {os.environ.get('RANK', 0)}"
    return f"{rank} on {node()}" if has_other_nodes() else rank


def _typed() -> dict[str, str]:
    return {name: os.environ[name] for name in TYPED.split() if os.environ.get(name)}


def read_nodes() -> Nodes:
    """Return the nodes of launch.sh, as people or srun tell them; a mistake is a UserError."""
    said = _typed()
    task = {} if "NNODES" in said else read_task()
    if task:
        size = task["WORLD_SIZE"]
        if os.environ["SLURM_STEP_TASKS_PER_NODE"] != f"1(x{size})":
            raise UserError(
                f"srun started {size} copies of launch.sh, several on one node: use srun "
                "--ntasks-per-node 1"
            )
        # Each task is a node; what a person has typed counts more.
        said = task | {"NNODES": size, "NODE_RANK": task["RANK"]} | said

    def number(name: str, default: int, low: int, high: int = 2**31) -> int:
        text = said.get(name, str(default))
        if not (text.isdecimal() and low <= int(text) <= high):
            raise UserError(f"{name}={text} is not an integer of {low} to {high}")
        return int(text)

    count = number("NNODES", 1, 1)
    this = number("NODE_RANK", 0, 0, count - 1) if count > 1 else 0
    for name in ("NODE_RANK", "MASTER_ADDR"):
        if count > 1 and name not in said:
            raise UserError(
                f"NNODES={count} also requires {name}; see ./launch.sh --help"
            )
    port = number("MASTER_PORT", PORT, 1, 65535)
    restarts = number("MAX_RESTARTS", 0, 0)
    if count > 1 and restarts:
        raise UserError(
            "MAX_RESTARTS is for one node: slurm/train.sbatch restarts several"
        )
    ranks = number("NPROC", 0, 1) if "NPROC" in said else count_gpus() or 2
    host = said["MASTER_ADDR"] if count > 1 else "127.0.0.1"
    return Nodes(count, this, ranks, host, port, restarts)


def adopt() -> None:
    """Set torchrun's variables for a process that srun started."""
    if "RANK" not in os.environ:
        # A person may want another MASTER_ADDR.
        os.environ.update(read_task() | _typed())
    if "RANK" not in os.environ:
        os.environ.pop("LOCAL_WORLD_SIZE", None)  # left by another launcher


def read_task() -> dict[str, str]:
    """Return torchrun's variables for one of several tasks of srun's; {} if it is alone."""
    env = os.environ
    if int(env.get("SLURM_STEP_ID", SPECIAL_STEPS)) >= SPECIAL_STEPS:
        check_alone(f"{NODES} {SIZES} {NUMBERS}")
        return {}
    if env.get("SLURM_STEP_NUM_TASKS") == "1":
        check_alone(f"{SIZES} {NUMBERS}")  # of the job's nodes it has one
        return {}
    try:
        # "2(x3),1" is 2, 2, 2, 1 tasks
        groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", env["SLURM_STEP_TASKS_PER_NODE"])
        per_node = [tasks for tasks, times in groups for _ in range(int(times or 1))]
        # "n[01-04,07],x1" is n01, ...
        hosts = re.sub(r"\[(\w+)[^]]*\]", r"\1", env["SLURM_STEP_NODELIST"])
        # Jobs and steps that share a node need ports of their own.
        step = int(env["SLURM_JOB_ID"]) * 7 + int(env["SLURM_STEP_ID"])
        return {
            "RANK": env["SLURM_PROCID"],
            "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": env["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": per_node[int(env["SLURM_NODEID"])],
            "MASTER_ADDR": hosts.split(",")[0],
            "MASTER_PORT": str(20000 + step % 10000),
        }
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(
            f"srun's variables are incomplete ({error}): pass on all SLURM_* variables, and start "
            "one group of tasks"
        ) from None


def check_alone(names: str) -> None:
    """Raise a UserError if one of these variables says that there are others."""
    if os.environ.get("NNODES") == "1":
        return
    for name in names.split():
        # An elastic job has LEAST:MOST. LSF has pairs, as in "a 8 b 8": each host and its CPUs.
        value = os.environ.get(name, "")
        hosts = value.split()[::2]
        count = str(len(hosts)) if len(hosts) > 1 else value.split(":")[-1]
        least = 1 if name in NUMBERS.split() else 2
        if count.isdecimal() and int(count) >= least:
            raise UserError(
                f"{name}={count}: there are other processes, but this one would train alone; start "
                "./launch.sh once on each node with NNODES, NODE_RANK and MASTER_ADDR (SLURM: srun "
                "--ntasks-per-node 1 ./launch.sh), or torchrun main.py; or set NNODES=1"
            )


def read_group() -> tuple[str, int, int, int]:
    """Return MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE; raise a UserError if one is missing."""
    names = "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"
    known = {name: os.environ.get(name, "") for name in names}
    host, *numbers = known.values()
    if not (host and all(map(str.isdecimal, numbers))):
        said = " ".join(f"{name}={known[name]}" for name in names)
        raise UserError(
            f"{said} are not an address and three integers: start with ./launch.sh or torchrun, or "
            "unset RANK"
        )
    port, rank, size = map(int, numbers)
    return host, port, rank, size


def visible_gpus() -> list[str] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, such as none by "-1"; None if not set."""
    if GPUS not in os.environ:
        return None
    words = os.environ[GPUS].split(",")
    # CUDA stops at the first word that names none.
    is_name = re.compile(r"\s*(\d|(GPU|MIG)-.)").match
    return list(itertools.takewhile(is_name, words))


def list_gpus() -> int:
    """Return how many GPUs nvidia-smi lists; 0 if it is not installed."""
    if not shutil.which("nvidia-smi"):
        return 0
    seconds = protocol.NOTICE_SECONDS
    started = subprocess.Popen(
        ["nvidia-smi", "-L"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        lines = started.communicate(timeout=seconds)[0].splitlines()
    except subprocess.TimeoutExpired:
        # Do not wait, as subprocess.run does: in the driver it may not end.
        started.kill()
        raise UserError(
            f"nvidia-smi has not responded for {seconds} s, so a GPU may have failed: reboot this "
            f"node or exclude it, or train on CPUs with {GPUS}="
        ) from None
    return sum(line.startswith("GPU ") for line in lines)


def count_gpus() -> int:
    """Return the number of GPUs that a rank will see, without torch if that can be."""
    names = visible_gpus()
    if names is not None:
        return len(names)
    if (sys.platform, platform.machine()) == ("darwin", "arm64"):
        return 1  # Apple's
    count = list_gpus()
    if count or not any(file.exists() for file in GPU_FILES):
        return count
    import torch

    return torch.accelerator.device_count()


def note_mistake() -> None:
    """Tell slurm/train.sbatch that another start would end alike; srun's status may not say it."""
    _note("mistake")


def note_checkpoint(folder: Path) -> None:
    """Tell this batch job's later starts that `folder` has a checkpoint."""
    _note(_saved(folder))


def check_new(folder: Path) -> None:
    """Raise a UserError if an earlier start of this batch job had a checkpoint in `folder`."""
    with contextlib.suppress(OSError, KeyError):
        before = Path(os.environ[protocol.JOB], _saved(folder)).read_text("utf-8")
        raise UserError(
            f"{folder}: this job saved here on {before}, but {node()} has no checkpoint: use a "
            "folder shared by all nodes, or submit a new job to start over"
        )


def _saved(folder: Path) -> str:
    return f"saved-{zlib.crc32(os.fsencode(os.path.abspath(folder))):08x}"


def _note(name: str) -> None:
    """Write this node into a file of the folder that slurm/train.sbatch keeps for its job."""
    folder = os.environ.get(protocol.JOB)
    if folder:
        with contextlib.suppress(OSError):
            Path(folder, name).write_text(node(), "utf-8")
