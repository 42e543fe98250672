"""What each node has for the job: versions, code, memory, an output folder."""

import contextlib
import math
import os
import platform
import re
import secrets
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import torch

from engine.check.preflight import Table, attempt, gather
from engine.data import images
from engine.ranks import distributed
from engine.run import machine
from engine.run.folder import KEEP

RECORDED = ("NCCL_", "GLOO_", "TORCH_", "OMP_NUM_THREADS")  # environment variables
NOT_RECORDED = ("NCCL_DEBUG", "TORCH_CPP_LOG_LEVEL")  # which this program sets
SEEN_SECONDS = 3.0  # until a network disk shows a new file
OPEN_FILES = 1024  # fewer may be too few for loader workers
SHARED_MEMORY = Path("/dev/shm")


def size(count: float) -> str:
    """Return a number of bytes as text."""
    return f"{count / 1e9:.3g} GB" if count >= 1e8 else f"{count / 1e6:.2g} MB"


def check_software(table: Table, root: Path, device: torch.device) -> None:
    """Compare versions, the code below `root`, environment variables and GPUs."""
    table.compare("versions", versions())
    own = code(root)
    table.compare("code", own, f"{len(own)} files of the project")
    variables = {
        f"{name}:": value
        for name, value in sorted(os.environ.items())
        if name.startswith(RECORDED) and not name.startswith(NOT_RECORDED)
    }
    table.compare("environment", variables, is_fault=False)
    table.compare("device", hardware(device), is_fault=False)


def versions() -> dict[str, str]:
    has_nccl = torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl"
    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "torchvision", "numpy")},
        "CUDA": torch.version.cuda or torch.version.hip or "none",
        "cuDNN": str(torch.backends.cudnn.version() or "none"),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "not used",
        "JPEGs by": images.decoder(),
    }


def code(root: Path) -> dict[str, str]:
    """Return a checksum of each file below `root` that this program has imported."""
    root = root.resolve()
    files = (getattr(module, "__file__", None) for module in [*sys.modules.values()])
    paths = sorted({Path(file).resolve() for file in files if file})
    own = [path for path in paths if path.is_relative_to(root) and path.is_file()]
    own = [path for path in own if "site-packages" not in path.parts]  # of a .venv
    return {str(p.relative_to(root)): f"{zlib.crc32(p.read_bytes()):08x}" for p in own}


def hardware(device: torch.device) -> dict[str, str]:
    if device.type == "cpu":
        return {"CPU": "with gloo"}
    module = torch.get_device_module(device)
    if not hasattr(module, "get_device_properties"):
        return {"GPU": device.type}
    found = module.get_device_properties(device)
    driver = ["unknown"]
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        driver = re.findall(r"Module.*?\s(\d+\.[\d.]+)", text) or driver
    return {"GPU": f"{found.name}, {found.total_memory / 2**30:.0f} GiB", "driver": driver[0]}


def check_machine(table: Table, workers: int, bytes_per_worker: int) -> None:
    """Look for CPUs, memory, open files, and /dev/shm, through which batches leave the workers.

    bytes_per_worker: of the batches that a loader worker prepares.
    """
    shared = files = math.inf
    if SHARED_MEMORY.is_dir() and workers:
        shared = shutil.disk_usage(SHARED_MEMORY).free
    with contextlib.suppress(ImportError, AttributeError):  # Windows
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        files = math.inf if limit == resource.RLIM_INFINITY else limit
    needed = workers * bytes_per_worker * distributed.local_world_size()
    here = (machine.cpus(), machine.free_memory(), files, shared, needed)
    cpus, memory, limits, free, most = zip(*gather("machine", here), strict=True)
    text = f"CPUs: {table.numbers(cpus, '{:.0f}'.format)}; "
    text += f"free memory: {table.numbers(memory, size)}"
    few = f"ulimit -n is below {OPEN_FILES}: raise it" if min(limits) < OPEN_FILES else ""
    table.row("machine", text, note=few)
    if workers:
        short = [rank for rank, left in enumerate(free) if left < most[rank]]
        remedy = "lower --workers; of a container raise --shm-size, or use --ipc=host"
        fault = f"too small on {table.who(short)}: {remedy}" if short else ""
        text = f"{table.numbers(free, size)} free; {workers} loader workers per rank may fill "
        table.row("/dev/shm", text + table.numbers(most, size), fault)


def check_output(table: Table, folder: Path, checkpoint: float) -> None:
    """Look whether rank 0 can write in `folder`, which other nodes see that, and for free space.

    checkpoint: its size in bytes, at most. Nothing is left in `folder`, which is not made if it is
    missing.
    """
    folder, needed = folder.absolute(), (KEEP + 2) * checkpoint  # with best.pt and a new one
    with probing(existing(folder)) as (name, error):
        seen = table.on_nodes("output", appears, existing(folder) / name)
    free = gather("disk", shutil.disk_usage(existing(folder)).free + checkpoints(folder))[0]
    text = f"{folder}: {size(free)} free, checkpoints take up to {size(needed)}"
    fault, note, home = "", "", table.nodes[0]
    if error:
        fault = f"cannot be written ({error})"
    elif free < needed:
        fault = "too little space: make room"
    elif apart := [rank for rank, (is_seen, _) in enumerate(seen) if not is_seen]:
        note = f"not shared: {table.who(apart)} cannot see the files of {home}, which has rank 0; "
        note += f"only {home} will have checkpoints, so a restart has to include it"
    elif len(table.nodes) > 1:
        text += "; all nodes share it"
    table.row("output", text, fault, note)


@contextlib.contextmanager
def probing(folder: Path) -> Iterator[tuple[str, str]]:
    """Have rank 0 write a file in `folder` during the block; yield its name, and what is wrong."""
    name, error = gather("probe", f".check-{secrets.token_hex(8)}")[0], ""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if distributed.is_rank_zero():
            error = attempt((folder / name).touch)[1]
        yield name, gather("probed", error)[0]
    finally:
        if distributed.is_rank_zero():
            with contextlib.suppress(OSError):
                (folder / name).unlink()
        signal.signal(signal.SIGTERM, before)


def checkpoints(folder: Path) -> int:
    """Return the bytes of the checkpoints in `folder`, which later ones replace."""
    with contextlib.suppress(OSError):  # a run that is at work there renames them
        return sum(path.stat().st_size for path in folder.glob("*.pt"))
    return 0


def existing(folder: Path) -> Path:
    """Return `folder`, or the nearest folder above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def appears(path: Path) -> bool:
    """Return whether `path` exists, or does within SEEN_SECONDS."""
    deadline = time.monotonic() + SEEN_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def check_network(table: Table, weigh: Callable[..., int], *args: object) -> int:
    """Print the size of the network that `weigh(*args)` builds, on rank 0; return it in bytes."""
    found = attempt(weigh, *args) if distributed.is_rank_zero() else (0, "")
    count, fault = gather("network", found)[0]
    table.row("network", "" if fault else f"{size(count or 0)} of weights", fault)
    return count or 0
