"""What this machine has, and the settings that follow from it."""

import contextlib
import functools
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from engine.errors import UserError
from engine.ranks import devices, distributed, process

CGROUPS = Path("/sys/fs/cgroup")

Outputs = TypeVar("Outputs")


@dataclass(frozen=True)
class Settings:
    """What a rank uses of its machine.

    workers: loader processes. threads: CPU threads of torch. amp: "bf16", "fp16" or "off".
    """

    workers: int
    threads: int
    pin_memory: bool
    amp: str


def set_up(
    device: torch.device,
    workers: int | None,
    threads: int | None,
    pin_memory: bool | None,
    amp: str,
    bytes_per_worker: int,
) -> Settings:
    """Choose what is None or "auto", apply it to torch, and return it.

    bytes_per_worker: the size of the batches that one loader worker prepares. Pinned memory cannot
    be swapped out, so by default it may take at most a quarter of the free memory.
    """
    on_gpu = device.type != "cpu"
    workers = default_workers() if workers is None else workers
    threads = default_threads(on_gpu) if threads is None else threads
    if pin_memory is None:
        size = bytes_per_worker * workers * distributed.local_world_size()
        pin_memory = size < free_memory() / 4
    if amp == "auto":
        amp = _best_amp(device)
    if amp == "fp16":  # GradScaler skips steps until it has found its scale
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
    warnings.filterwarnings("ignore", "This DataLoader will create")  # reported in the start line
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore", "Please use the new API settings")  # by torch 2.9, of this:
    torch.set_float32_matmul_precision("high")  # TF32 for what stays float32, where a GPU has it
    is_pinned = pin_memory and on_gpu and devices.copies_ahead(device)
    return Settings(workers, threads, is_pinned, amp)


def _best_amp(device: torch.device) -> str:
    """Return "bf16" if `device` computes in that by itself, else what it does compute in."""
    module = torch.get_device_module(device)
    if device.type == "cuda":
        return "bf16" if module.is_bf16_supported(including_emulation=False) else "fp16"
    has_bf16 = device.type != "cpu" and getattr(module, "is_bf16_supported", bool)()
    return "bf16" if has_bf16 else "off"


def compile_network(model: nn.Module) -> None:
    """Compile `model` in place: its checkpoints fit an uncompiled one."""
    _need_compiler(next(model.parameters()).device)
    distributed.say("--compile: compiling the network, which takes minutes")
    model.compile()


def _need_compiler(device: torch.device) -> None:
    """Raise a UserError without what torch.compile calls: for GPUs Triton, and so a C compiler."""
    on_cpu = device.type == "cpu"
    variable, kind, names = ("CXX", "C++", ["g++"]) if on_cpu else ("CC", "C", ["gcc", "clang"])
    if on_cpu and sys.platform != "linux":
        names = ["clang++" if sys.platform == "darwin" else "cl"]
    if variable in os.environ:
        names = [os.environ[variable]]
        if on_cpu and sys.platform != "win32":  # inductor splits "ccache g++"; Triton does not
            names = shlex.split(names[0])[:1]
    if not any(map(shutil.which, names)):
        needed = f"no {kind} compiler ({' or '.join(names)})"
        raise UserError(f"--compile: {needed}; install one, set {variable}, or omit the flag")
    folders = {sysconfig.get_path("include"), sysconfig.get_path("include", "posix_prefix")}
    has_headers = any(Path(folder, "Python.h").exists() for folder in folders)
    if sys.platform == "linux" and not has_headers:
        raise UserError(
            f"--compile: no Python.h in {sysconfig.get_path('include')}; install this Python's "
            "headers (python3-dev), or omit the flag"
        )


def autocast(amp: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which networks compute in bf16 or fp16; with "off", in float32."""
    if amp == "off":
        return contextlib.nullcontext()
    dtype = torch.float16 if amp == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype)


@functools.cache
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return `values` as float32 on `device`; a copy to it at every step would wait for it."""
    with torch.inference_mode(False):  # a resumed run may evaluate before it trains
        return torch.tensor(values, device=device)


def zeros(count: int, device: torch.device) -> Tensor:
    """Return `count` sums to begin with, float64; on Apple's GPUs, which lack it, float32."""
    return torch.zeros(count, dtype=devices.double(device), device=device)


def to_float32(outputs: Outputs) -> Outputs:
    """Return a network's `outputs`, a tensor or tuples and dicts of them, in float32."""
    if isinstance(outputs, Tensor):  # to search a tree takes longer
        return cast(Outputs, _float32(outputs))
    return tree_map_only(Tensor, _float32, outputs)


def _float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


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
    given = os.environ.get("OMP_NUM_THREADS", "1")
    if given.isdecimal() and int(given) > 1:  # torchrun sets 1 unless the user sets it
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
