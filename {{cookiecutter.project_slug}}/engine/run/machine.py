"""What this machine has, and the defaults that follow from it."""

import math
import os
import shlex
import shutil
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from engine.errors import UserError
from engine.ranks import distributed, process

CGROUPS = Path("/sys/fs/cgroup")


def set_up(args: Namespace, device: torch.device) -> None:
    """Fill in the flags that are left to the machine, and have torch make the most of it."""
    cuda = device.type == "cuda"
    if args.workers is None:
        args.workers = workers()
    if args.threads is None:
        given = os.environ.get("OMP_NUM_THREADS", "1")
        if given.isdecimal() and given != "1":  # torchrun sets 1, whoever wants it or not
            args.threads = int(given)
        else:
            args.threads = min(share(), 4) if cuda else share()
    if args.pin_memory is None:
        # Pinned pages cannot be swapped out. Of a sample: a picture, uint8, and a mask.
        size = args.workers * args.prefetch * args.batch_size * 4 * args.image_size**2
        args.pin_memory = size * distributed.local_world_size() < _free_memory() / 4
    args.pin_memory = cuda and args.pin_memory
    warnings.filterwarnings("ignore", "This DataLoader will create")  # what the start line says
    if args.amp == "auto":
        has_bf16 = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
        args.amp = "bf16" if has_bf16 else "fp16" if cuda else "off"
    if args.amp == "fp16":  # GradScaler skips steps until it has found its scale
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
    if args.compile and not _has_compiler():
        raise UserError("--compile: no C++ compiler found; install g++ or leave the flag out")
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high")  # TF32 for what stays float32, where a GPU has it


def autocast(amp: str, device: torch.device) -> torch.autocast:
    """Return a context in which networks compute in bf16 or fp16, or, with "off", as they are."""
    dtype = torch.float16 if amp == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=amp != "off")


def to_float32(outputs: Any) -> Any:
    """Return a network's `outputs`, a tensor or tuples and dicts of them, in float32."""
    return tree_map_only(Tensor, lambda x: x.float() if x.is_floating_point() else x, outputs)


def _has_compiler() -> bool:
    names = ("g++", "clang++", "cl", *shlex.split(os.environ.get("CXX", "")))
    return any(map(shutil.which, names))


def _free_memory() -> float:
    """Return the bytes of this machine's memory that are free; infinity where that is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    return next((1024 * int(s.split()[1]) for s in lines if s.startswith("MemAvail")), math.inf)


def cpus() -> int:
    """Return how many CPUs this process may use: by its affinity, and by its cgroup's quota."""
    usable = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    count = len(usable(0)) if usable else os.cpu_count() or 1
    return max(1, math.ceil(min(count, _quota())))


def _quota() -> float:
    """Return the CPUs that the cgroups of this process, v1 or v2, allow; infinity without any."""
    found = [math.inf]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return math.inf
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = CGROUPS / "cpu" if controllers else CGROUPS
        here = root / path.lstrip("/")
        # In a container the path is often the host's, and the container's own is the root.
        for folder in (here, *here.parents):
            found.append(_quota_of(folder))
            if folder == root:
                break
    return min(found)


def _quota_of(folder: Path) -> float:
    for names in ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"):
        try:
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            if quota != "max" and int(quota) > 0:
                return int(quota) / int(period)
        except (OSError, ValueError):
            continue
    return math.inf


def workers() -> int:
    """Return the loader workers of a rank: its share of the node's CPUs, from 1 to 16.

    None under a debugger, where each worker would be one more session to continue.
    """
    return 0 if process.is_debugged() else min(share(), 16)


def share() -> int:
    """Return this rank's share of the CPUs, 1 at least."""
    count = cpus()
    if not process.by_torchrun() and count <= int(os.environ.get("SLURM_CPUS_PER_TASK", 0)):
        return count  # srun has dealt them out to the ranks
    return max(1, count // distributed.local_world_size())
