"""What this machine has, and the settings that follow from it."""

import contextlib
import math
import os
import re
import subprocess
import warnings
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from engine.data import seeding
from engine.ranks import debugging, devices, distributed, process, protocol
from engine.run.flags import launch, overrides

CGROUPS = Path("/sys/fs/cgroup")

Outputs = TypeVar("Outputs")


def setup(seed: int, deterministic: bool = False) -> torch.device:
    """Join the other ranks, seed the random numbers, and return this rank's device.

    Without a launcher it is a group of one. With GPUs each rank has one; without, the CPU. Flags of
    the launcher and the debugger are those that engine.Parser has read. Sets the number of torch's
    CPU threads: OMP_NUM_THREADS, or else the rank's share of the CPUs, at most 4 with a GPU.

    seed: of initial weights and whatever else is drawn before training; the same on all ranks.
    deterministic: have GPUs compute the same bits each time, which is slower.

    Raises a UserError if the ranks do not find each other, or two want the same GPU.

        device = engine.setup(args.seed)
    """
    device = distributed.setup(
        launch.local_rank,
        launch.dist_timeout,
        bool(launch.debug_rank) or bool(overrides),
    )
    debugging.wait_for_debugger(launch.debug_rank, launch.debug_port)
    seeding.seed(seed)
    if deterministic:
        seeding.be_deterministic()
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # by GradScaler, fp16
    warnings.filterwarnings("ignore", "This DataLoader will create")  # reported in the start line
    warnings.filterwarnings("ignore", "Please use the new API settings")  # by torch 2.9, of this:
    torch.set_float32_matmul_precision("high")  # TF32 for what stays float32, where a GPU has it
    torch.set_num_threads(default_threads(device.type != "cpu"))
    return device


def zeros(count: int, device: torch.device) -> Tensor:
    """Return zeros to add to, float64 (count,); on Apple's GPUs, which lack it, float32.

    count: how many.

        totals = engine.zeros(2, device)  # a sum of losses, and their count
    """
    return torch.zeros(count, dtype=devices.double(device), device=device)


def free_memory() -> float:
    """Return the memory in bytes that is free for this process; infinity if it is unknown."""
    found = [math.inf]
    with contextlib.suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvail")]
    for folder in _cgroups(""):
        found += _left(folder, "memory.max", "memory.current", "")
    for folder in _cgroups("memory"):
        found += _left(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    return min(found)


def _left(folder: Path, limit: str, used: str, prefix: str) -> list[int]:
    """Return what a cgroup's memory limit leaves, its file cache included; [] without a limit."""
    try:
        pairs = [line.split() for line in (folder / "memory.stat").read_text().splitlines()]
        cache = [int(n) for name, n in pairs if re.fullmatch(f"{prefix}(in)?active_file", name)]
        limit, used = ((folder / name).read_text() for name in (limit, used))
        return [int(limit) - int(used) + sum(cache)]
    except (OSError, ValueError):
        return []


def cpus() -> int:
    """Return how many CPUs the affinity and the cgroups of this process let it use."""
    usable = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    count = len(usable(0)) if usable else os.cpu_count() or 1
    return max(1, math.ceil(min(count, _quota())))


def _quota() -> float:
    """Return the CPUs that the cgroups (v2) of this process allow; infinity without a limit."""
    found = [math.inf]
    for folder in _cgroups(""):
        with contextlib.suppress(OSError, ValueError):  # no limit, which is "max"
            quota, period = (folder / "cpu.max").read_text().split()
            found.append(int(quota) / int(period))
    return min(found)


def _cgroups(controller: str) -> list[Path]:
    """Return the folders of this process's cgroup and of its parents.

    controller: "" for those of v2, a name for those of v1.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    paths = [path for _, name, path in (line.split(":", 2) for line in lines) if name == controller]
    # In a container, the path is often the host's, and the container's own cgroup is the root.
    root = CGROUPS / controller
    here = root / (paths or ["/"])[0].lstrip("/")
    return [folder for folder in (here, *here.parents) if folder.is_relative_to(root)]


def default_threads(on_gpu: bool) -> int:
    """Return torch's CPU threads per rank: its share of the CPUs, at most 4 with a GPU."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    # Plain torchrun sets 1 unless the user sets it.
    is_default = protocol.THREADS in os.environ or (process.by_plain_torchrun() and given == "1")
    if given.isdecimal() and int(given) > 0 and not is_default:
        return int(given)
    return min(cpu_share(), 4) if on_gpu else cpu_share()


def default_workers() -> int:
    """Return the number of loader workers per rank: its share of the node's CPUs, at most 16.

    0 under a debugger, where each worker would be one more session to continue.
    """
    return 0 if process.is_debugged() else min(cpu_share(), 16)


def cpu_share() -> int:
    """Return this rank's share of the CPUs, at least 1."""
    count = cpus()
    if not process.by_torchrun() and count <= int(os.environ.get("SLURM_CPUS_PER_TASK", 0)):
        return count  # srun has divided them among the ranks
    return max(1, count // distributed.local_world_size())


def git_commit() -> str | None:
    """Return the commit of the project's folder, marked if it has changes; None without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
