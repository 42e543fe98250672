"""A machine with GPUs that are not there: builds fakegpu/, and says with which environment.

torch's CUDA wheel runs the whole project on them, on any x86 Linux with gcc.
Real: torch.cuda, its caching and pinned allocators, streams and events, autograd's threads, DDP's
Reducer, GradScaler, ProcessGroupNCCL with watchdog, time-outs and flight recorder. Made up: the
CUDA runtime and NCCL (fakegpu/*.c), and the kernels (fakegpu/emulate.py computes on the CPU).
Not there: cuDNN, its attention (--arch vit_b_16), cuBLAS, graphs, torch.compile's kernels,
SyncBatchNorm, --fsdp, speed.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch

SOURCES = Path(__file__).resolve().parent / "fakegpu"
MAJOR = "13"  # of CUDA: how it lays out its structures


def missing() -> str:
    """Return why there can be no made-up GPUs here, or ""."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return "made-up GPUs: on x86_64 Linux only"
    if (torch.version.cuda or "none").split(".")[0] != MAJOR:
        return f"made-up GPUs: for torch's CUDA {MAJOR} wheel; this one's is {torch.version.cuda}"
    return "" if shutil.which("gcc") else "made-up GPUs: no gcc"


def build(folder: Path) -> None:
    """Write the libraries and a nvidia-smi into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libcuda.so.1"  # the driver's name: torch loads no other one
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library]
    command += sorted(SOURCES.glob("*.c"))
    command.append("-lpthread")
    subprocess.run(command, check=True)
    smi = folder / "nvidia-smi"
    each = 'echo "GPU $i: Fake GPU $i (UUID: GPU-$i)"'
    smi.write_text(f"#!/bin/bash\nfor ((i = 0; i < FAKE_GPUS; i++)); do {each}; done\n")
    smi.chmod(0o755)


# gpus.py N COMMAND...: run a command on a machine with N GPUs
if __name__ == "__main__":
    place = Path(os.environ.get("FAKE_GPU_FOLDER", "/tmp/ddp-template-fakegpu"))
    built = place / "nvidia-smi"  # the last file of it
    if missing():
        sys.exit(missing())
    sources = [*SOURCES.iterdir(), Path(__file__)]
    newest = max(source.stat().st_mtime for source in sources)
    if not built.exists() or built.stat().st_mtime < newest:
        build(place)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ |= {"FAKE_GPUS": sys.argv[1], "PYTHONPATH": str(SOURCES)}
    os.environ |= {"LD_PRELOAD": f"{place}/libcuda.so.1", "LD_LIBRARY_PATH": str(place)}
    os.environ["PATH"] = f"{place}:{os.environ['PATH']}"
    os.execvp(sys.argv[2], sys.argv[2:])
