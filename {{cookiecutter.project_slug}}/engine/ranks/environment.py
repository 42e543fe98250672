"""What launchers say through environment variables: torchrun's names, and others' put into them."""

import contextlib
import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from engine.errors import UserError
from engine.ranks import protocol

PORT = 29500  # torchrun's
DEVICES = Path("/dev/nvidia0"), Path("/dev/kfd")  # of some containers; of AMD


@dataclass(frozen=True)
class Nodes:
    """The nodes of a launch: how many, this one's number and ranks, where node 0 listens."""

    count: int
    number: int
    ranks: int
    host: str
    port: int


def node() -> str:
    """Return the name of this machine, as people know it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def prepare() -> tuple[Nodes, int]:
    """Return the nodes of launch.sh and how many restarts there may be, or exit with one line."""
    try:
        nodes = read_nodes()
        for name, default, least in (("MAX_RESTARTS", "0", 0), ("JOIN_TIMEOUT", "600", 1)):
            value = os.environ[name] = os.environ.get(name) or default
            if not (value.isdecimal() and int(value) >= least):
                raise UserError(f"{name}={value} is not an integer of {least} or more")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(protocol.MISTAKE)
    export_nodes(nodes)
    # As torchrun does, with a warning; main.py sets the threads.
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or "1"
    if nodes.number == 0:
        with contextlib.suppress(OSError):  # a closed pipe
            print(f"starting {nodes.count * nodes.ranks} rank(s) ...", flush=True)
    return nodes, int(os.environ["MAX_RESTARTS"])


def read_nodes() -> Nodes:
    """Return what launch.sh is told by NNODES and so on, by Kubernetes (PET_...), by srun."""
    env = os.environ
    names = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    given = {name: env.get(name) or env.get(f"PET_{name}", "") for name in names}
    if not given["NNODES"] and "SLURM_STEP_NUM_NODES" in env:
        nodes, tasks = env["SLURM_STEP_NUM_NODES"], env["SLURM_STEP_NUM_TASKS"]
        if nodes != tasks:
            raise UserError(
                f"srun started {tasks} copies of launch.sh on {nodes} node(s): "
                "use --ntasks-per-node 1"
            )
        step = {"NNODES": nodes, "NODE_RANK": env["SLURM_NODEID"], "MASTER_ADDR": _first_host()}
        given = {**step, "MASTER_PORT": _step_port(), **{k: v for k, v in given.items() if v}}
    ranks = env.get("NPROC") or env.get("PET_NPROC_PER_NODE", "")
    if not ranks or not (ranks.isdecimal() or env.get("NPROC")):  # PET_NPROC_PER_NODE=auto
        ranks = str(count_gpus() or 2)
    numbers = {"NPROC": ranks, "NNODES": given["NNODES"] or "1"}
    for name, value in numbers.items():
        if not (value.isdecimal() and int(value)):
            raise UserError(f"{name}={value} is not an integer of 1 or more")
    count = int(numbers["NNODES"])
    if count > 1:
        for name in ("NODE_RANK", "MASTER_ADDR"):
            if not given[name]:
                raise UserError(f"NNODES={count} also requires {name}; see ./launch.sh --help")
    for name in ("NODE_RANK", "MASTER_PORT"):
        if given[name] and not given[name].isdecimal():
            raise UserError(f"{name}={given[name]} is not a number")
    number, port = int(given["NODE_RANK"] or 0), int(given["MASTER_PORT"] or PORT)
    return Nodes(count, number, int(ranks), given["MASTER_ADDR"], port)


def export_nodes(nodes: Nodes) -> None:
    """Put `nodes` into the variables that come first, for a restart and for programs that follow.

    torchrun would read flags of its own from PET_ variables.
    """
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]
    values = (nodes.count, nodes.number, nodes.ranks)
    os.environ.update(zip(("NNODES", "NODE_RANK", "NPROC"), map(str, values), strict=True))
    if nodes.count > 1:
        os.environ.update(MASTER_ADDR=nodes.host, MASTER_PORT=str(nodes.port))


def count_gpus() -> int:
    """Return the number of GPUs that a rank will see, without torch if that can be."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return 0 if listed.strip() == "-1" else len([gpu for gpu in listed.split(",") if gpu])
    if shutil.which("nvidia-smi"):
        done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
        return len(re.findall("^GPU", done.stdout, re.MULTILINE))
    if any(device.exists() for device in DEVICES):
        import torch

        return torch.cuda.device_count()
    return 0


def adopt_slurm_step() -> bool:
    """Set torchrun's variables from those of `srun python main.py`; return whether it was used.

    A plain start in a batch script or in an interactive allocation is not a step of several
    tasks; it stays a group of one.
    """
    env = os.environ
    if "RANK" in env or int(env.get("SLURM_STEP_NUM_TASKS", 1)) == 1:
        return False
    per_node: list[str] = []  # "2(x3),1" means 2, 2, 2, 1
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", env["SLURM_STEP_TASKS_PER_NODE"]):
        per_node += [tasks] * int(times or 1)
    env["RANK"] = env["SLURM_PROCID"]
    env["WORLD_SIZE"] = env["SLURM_STEP_NUM_TASKS"]
    env["LOCAL_RANK"] = env["SLURM_LOCALID"]
    env["LOCAL_WORLD_SIZE"] = per_node[int(env["SLURM_NODEID"])]
    env.setdefault("MASTER_ADDR", _first_host())
    env.setdefault("MASTER_PORT", _step_port())
    return True


def _first_host() -> str:
    command = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]


def _step_port() -> str:
    """Return a port for this step of SLURM, the same on all its tasks."""
    step = int(os.environ["SLURM_JOB_ID"]) * 7 + int(os.environ["SLURM_STEP_ID"])
    return str(20000 + step % 10000)


def read_group() -> tuple[str, int, int, int]:
    """Return MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE; raise a UserError if one is missing."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        value = os.environ.get(name, "")
        if not value or not (value.isdecimal() or name == "MASTER_ADDR"):
            what = f"{name}={value} is not a number" if value else f"RANK is set, {name} is not"
            raise UserError(f"{what}: start with ./launch.sh or torchrun, or unset RANK")
    env = os.environ
    return env["MASTER_ADDR"], int(env["MASTER_PORT"]), int(env["RANK"]), int(env["WORLD_SIZE"])


def wait_for_name(host: str, seconds: float = 60) -> None:
    """Return once `host` resolves, which may take a while after its node has started.

    Raises a UserError after `seconds`.
    """
    deadline = time.monotonic() + seconds
    for attempt in itertools.count():
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            line = f"MASTER_ADDR={host} cannot be resolved ({error.strerror})"
        if time.monotonic() > deadline:
            raise UserError(f"{line}: check the name, or use an IP address")
        if attempt == 0 and int(os.environ.get("LOCAL_RANK", 0)) == 0:
            print(f"{line}; trying for {seconds:g} s", file=sys.stderr, flush=True)
        time.sleep(1)
