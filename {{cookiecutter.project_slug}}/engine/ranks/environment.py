"""What launchers say through environment variables: torchrun's names, and others' put into them."""

import contextlib
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.errors import UserError
from engine.ranks import gpus, protocol

PORT, LAST_PORT = 29500, 65535  # torchrun's; of TCP
SPECIAL_STEPS = 2**32 - 16  # from here on SLURM's steps are not srun's, but salloc's shell and such

# What a person says to launch.sh, and what those call it that start it once on each node
NODES = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC")
LAUNCHERS = (  # the last that says a thing wins
    ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", ""),  # PyTorchJob v1, which counts pods
    ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", "", ""),  # one IP per line
    ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_NPROC_PER_NODE"),
)
# What torchrun says to each rank, and what mpirun does: Open MPI's, then MPICH's and Intel's
RANKS = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK")
MPI = (
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
)
Said = dict[str, tuple[str, str]]  # one of NODES -> the variable that says it, its value


@dataclass(frozen=True)
class Nodes:
    """The nodes of a launch: how many, this one's number and ranks, where node 0 listens."""

    count: int
    number: int
    ranks: int  # 0 if nobody says how many
    host: str
    port: int


@dataclass(frozen=True)
class Tasks:
    """The processes that srun or mpirun started, and which of them this one is."""

    by: str
    ranks: dict[str, int]  # the values of RANKS
    node: int  # the number of this one's
    are_one_per_node: bool
    host: str  # of rank 0; "" if it is not known
    port: int = PORT


def node() -> str:
    """Return the name of this machine, as people know it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def prepare() -> tuple[Nodes, int]:
    """Return the nodes of launch.sh, and how many restarts there may be."""
    nodes = read_nodes()
    nodes = replace(nodes, ranks=nodes.ranks or gpus.count() or 2)
    for name, default, least in (("MAX_RESTARTS", "0", 0), ("JOIN_TIMEOUT", "600", 1)):
        value = os.environ[name] = os.environ.get(name) or default
        if not (value.isdecimal() and int(value) >= least):
            raise UserError(f"{name}={value} is not an integer of {least} or more")
    export_nodes(nodes)
    # As torchrun does, with a warning; main.py sets the threads.
    if not os.environ.get("OMP_NUM_THREADS"):  # torchrun would print a warning
        os.environ.update({"OMP_NUM_THREADS": "1", protocol.THREADS: "auto"})
    if nodes.number == 0:
        with contextlib.suppress(OSError):  # a closed pipe
            print(f"starting {nodes.count * nodes.ranks} rank(s) ...", flush=True)
    return nodes, int(os.environ["MAX_RESTARTS"])


def read_nodes(own: Sequence[str] = NODES) -> Nodes:
    """Return the nodes of the job as its launcher tells of them; what a person says in `own` wins.

    Raises a UserError if this is one of several nodes and nothing would bring them together.
    """
    said = {name: (name, os.environ[name]) for name in own if os.environ.get(name)}
    try:
        told = _read_launcher()
    except UserError:
        if "NNODES" not in said:
            raise
        told = {}
    if "NNODES" in said and told.get("NNODES", said["NNODES"])[1] != said["NNODES"][1]:
        told = {name: told[name] for name in told if name == "NPROC"}
    return _as_nodes({**told, **said})


def _read_launcher() -> Said:
    env, tasks = os.environ, read_tasks()
    if tasks and (size := tasks.ranks["WORLD_SIZE"]) > 1:
        if not tasks.are_one_per_node:
            raise UserError(
                f"{tasks.by} started {size} copies of launch.sh, several on one node: "
                "use srun --ntasks-per-node 1 (mpirun -N 1)"
            )
        values = zip(NODES, (size, tasks.node, tasks.host, tasks.port), strict=False)
        return {name: (f"{tasks.by}: {name}", str(value)) for name, value in values if value != ""}
    if {"RANK", "LOCAL_RANK"} <= env.keys() and env.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            f"launch.sh was started as rank {env['RANK']} of {env['WORLD_SIZE']}: "
            "start main.py in its place, or unset LOCAL_RANK"
        )
    told: Said = {}
    for names in LAUNCHERS if env.get("RANK") else LAUNCHERS[1:]:
        for name, theirs in zip(NODES, names, strict=True):
            if value := env.get(theirs):
                told[name] = theirs, value.split("\n")[0]
    nodes = env.get("SLURM_JOB_NUM_NODES", "1")
    if nodes != "1" and not tasks and "NNODES" not in told:
        raise UserError(
            f"SLURM gave this job {nodes} nodes, but only this one would train: start with srun "
            "--ntasks-per-node 1 ./launch.sh, or set NNODES=1 for this node alone"
        )
    return told


def _as_nodes(said: Said) -> Nodes:
    def number(name: str, default: int, low: int, high: int = 0) -> int:
        variable, text = said.get(name, (name, str(default)))
        if not (text.isdecimal() and low <= int(text) <= (high or int(text))):
            hint = "; an elastic job is started by torchrun main.py" if ":" in text else ""
            span = f"{low} to {high}" if high else f"{low} or more"
            raise UserError(f"{variable}={text} is not an integer of {span}{hint}")
        return int(text)

    count, told = number("NNODES", 1, 1), said.get("NNODES", [""])[0]
    for name in ("NODE_RANK", "MASTER_ADDR"):
        if count > 1 and name not in said:
            raise UserError(f"{told}={count} also requires {name}; see ./launch.sh --help")
    variable, text = said.get("NPROC", ("", "auto"))
    words = {"auto": 0, "gpu": 0, "cpu": os.cpu_count() or 1}  # torchrun's
    ranks = words[text] if text in words else number("NPROC", 0, 1)
    if text == "gpu" and not gpus.count():
        raise UserError(f"{variable}=gpu, but this node shows no GPU")
    port = number("MASTER_PORT", PORT, int(count > 1), LAST_PORT)
    host = said.get("MASTER_ADDR", ("", ""))[1]
    return Nodes(count, number("NODE_RANK", 0, 0), ranks, host, port)


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


def adopt(alone: bool = False) -> None:
    """Set torchrun's variables for a process that something else than torchrun started.

    alone: whether this process may be on its own in a job of several nodes; else that is a
    UserError.
    """
    if "RANK" in (env := os.environ):
        return
    if (tasks := read_tasks()) and tasks.ranks["WORLD_SIZE"] > 1:
        if not (tasks.host or env.get("MASTER_ADDR")):
            raise UserError(
                f"{tasks.by} started ranks on several nodes: set MASTER_ADDR to the address of "
                "rank 0's, on all of them (Open MPI: mpirun -x MASTER_ADDR=HOST)"
            )
        _set_rank(tasks.ranks, tasks.host, tasks.port)
        return
    if alone or (count := env.get("NNODES")) == "1":
        return
    if count:
        raise UserError(f"NNODES={count} is for ./launch.sh: start that, or unset NNODES")
    nodes = read_nodes(("MASTER_ADDR", "MASTER_PORT"))
    ranks = nodes.ranks or (gpus.count() if nodes.count > 1 else 1)
    if ranks > 1:
        raise UserError(
            f"this job has {nodes.count} node(s) of {ranks} ranks: start ./launch.sh or torchrun "
            "main.py in place of python main.py, or set NNODES=1 for one process alone"
        )
    if nodes.count > 1:
        values = zip(RANKS, (nodes.count, nodes.number, 1, 0), strict=True)
        _set_rank(dict(values), nodes.host, nodes.port)


def _set_rank(ranks: dict[str, int], host: str, port: int) -> None:
    os.environ.update({name: str(value) for name, value in ranks.items()})
    os.environ.setdefault("MASTER_ADDR", host)
    os.environ.setdefault("MASTER_PORT", str(port))


def read_tasks() -> Tasks | None:
    """Return what mpirun, or else srun, says; None if neither started this process.

    mpirun first: within a job of SLURM it is itself started by srun, once on each node.
    """
    env = os.environ
    for names in MPI:
        if all(env.get(name, "").isdecimal() for name in names):
            ranks = dict(zip(RANKS, (int(env[name]) for name in names), strict=True))
            size, local_size = ranks["WORLD_SIZE"], ranks["LOCAL_WORLD_SIZE"]
            host = "127.0.0.1" if size == local_size else ""
            return Tasks("mpirun", ranks, ranks["RANK"], local_size == 1, host)
    if int(env.get("SLURM_STEP_ID", SPECIAL_STEPS)) >= SPECIAL_STEPS:
        return None
    try:
        size, node = int(env["SLURM_STEP_NUM_TASKS"]), int(env["SLURM_NODEID"])
        per_node: list[int] = []  # "2(x3),1" means 2, 2, 2, 1
        for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", env["SLURM_STEP_TASKS_PER_NODE"]):
            per_node += [int(tasks)] * int(times or 1)
        values = size, int(env["SLURM_PROCID"]), per_node[node], int(env["SLURM_LOCALID"])
        host = re.sub(r"\[(\w+)[^]]*\]", r"\1", env["SLURM_STEP_NODELIST"]).split(",")[0]
        port = 20000 + (int(env["SLURM_JOB_ID"]) * 7 + int(env["SLURM_STEP_ID"])) % 10000
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(
            f"srun's variables are incomplete ({error}): pass all of SLURM_* on, and start one "
            "group of tasks"
        ) from None
    ranks = dict(zip(RANKS, values, strict=True))
    return Tasks("srun", ranks, node, per_node == [1] * size, host, port)


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
