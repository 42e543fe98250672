"""What this machine has, and the settings that follow from it."""

import contextlib
import os
import subprocess
import sys
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import ddpkit
from ddpkit.data import samples
from ddpkit.errors import UserError
from ddpkit.ranks import distributed, environment, process, protocol
from ddpkit.ranks.cpus import cpu_share
from ddpkit.ranks.distributed import Rank
from ddpkit.run.flags import launch


def meet() -> Rank:
    """Find the other ranks that the launcher describes; without a launcher be a group of one.

    Returns what torch.distributed.init_process_group needs: device (with GPUs each rank has one),
    backend, store, rank, world_size and timeout. Raises a UserError if the ranks do not find each
    other within --dist-timeout, or if two want the same GPU.

        here = ddpkit.meet()
    """
    # By the flags that ddpkit.Parser has read.
    return distributed.meet(
        launch.local_rank, launch.dist_timeout, bool(launch.debug_rank[0])
    )


def configure(device: torch.device, seed: int, deterministic: bool = False) -> None:
    """Seed random numbers, set torch's threads, and wait for a debugger if --debug-rank says so.

    Threads: OMP_NUM_THREADS, or else the rank's share of the CPUs, at most 4 with a GPU.

    seed: of initial weights and whatever else is drawn before training; the same on all ranks.
    deterministic: have GPUs compute the same bits each time, which is slower.

        ddpkit.configure(device, args.seed)
    """
    distributed.wait_for_debugger(*launch.debug_rank)
    samples.seed(seed)
    if deterministic:
        samples.be_deterministic()
    # by GradScaler, fp16
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
    # reported in the start line
    warnings.filterwarnings("ignore", "This DataLoader will create")
    # by torch 2.9, of this:
    warnings.filterwarnings("ignore", "Please use the new API settings")
    # TF32 for what stays float32, where a GPU has it
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(default_threads(device.type != "cpu"))


def default_threads(on_gpu: bool) -> int:
    """Return OMP_NUM_THREADS if a user has set it, or this rank's share of the CPUs."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    by_torchrun = process.by_plain_torchrun() and given == "1"
    if (
        given.isdecimal()
        and int(given)
        and not by_torchrun
        and protocol.THREADS not in os.environ
    ):
        return int(given)
    return min(cpu_share(), 4) if on_gpu else cpu_share()


def library() -> str:
    """Return which ddpkit runs, and from where."""
    return f"{ddpkit.__version__} in {Path(ddpkit.__file__).parent}"


def check_alike(classes: Sequence[str], **loaders: Any) -> None:
    """Raise a UserError, on all ranks, unless they have the same data, code and versions.

    Of a loader without ddpkit.Seeded each rank may have its share, which has no list of samples.
    """
    mine = {f"class {n}": f"class {n} {name}" for n, name in enumerate(classes)}
    mine |= {
        "classes": f"{len(classes)} classes",
        "version": f"ddpkit {ddpkit.__version__}",
    }
    mine |= {"torch": f"torch {torch.__version__}"}
    for use, loader in loaders.items():
        data = samples.of(loader)
        is_ours = isinstance(getattr(loader, "dataset", None), samples.Seeded)
        if is_ours or samples.listed(data):
            mine[use] = f"{samples.fingerprint(data)} for {use}"
        is_listed = any(samples.listed(each) for each, _ in samples.places(data, 0))
        if is_ours and not is_listed and len(data) and not distributed.is_debugged():
            for part, checksum in samples.first_checksums(loader).items():
                told = f"a first {part} for {use} with checksum {checksum:08x}"
                mine[f"{part} for {use}"] = told
    for name, checksum in code().items():
        mine[name] = f"{name} with checksum {checksum:08x}"
    (first, expected), *others = distributed.gather_objects(
        (environment.own_rank(), mine)
    )
    for rank, found in others:
        for name, here in expected.items():
            # of files those that both have imported
            if (there := found.get(name, here)) != here:
                line = f"{rank} has {there}, {first} has {here}"
                raise UserError(
                    f"{line}; all ranks need the same data, code and versions"
                )


def code() -> dict[str, int]:
    """Return a checksum of each file that is imported of the project, and one of ddpkit."""
    root, found = process.project(), dict[str, int]()
    # others are not resolved
    names = {each.name for each in root.iterdir() if each.is_file()}
    for file in (
        getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]
    ):
        if (
            os.path.basename(file) in names
            and (path := Path(file).resolve()).parent == root
        ):
            found[path.name] = zlib.crc32(path.read_bytes())
    library = sorted(Path(ddpkit.__file__).parent.rglob("*.py"))
    found["ddpkit"] = zlib.crc32(b"".join(map(Path.read_bytes, library)))
    return found


def git_commit() -> str:
    """Return the commit of the project's folder, marked if it has changes; "" without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError):
        done = subprocess.run(
            command, cwd=process.project(), capture_output=True, text=True
        )
        return done.stdout.strip()
    return ""
