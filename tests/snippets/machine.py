"""How many CPUs a run may use."""

import os
from pathlib import Path

from engine.run import machine


def cpus(*cases: list) -> list[int]:
    """For each case, what /proc/self/cgroup says and the contents of other files, by path."""
    read_text = Path.read_text
    found = []
    for group, files in cases:

        def fake(path: Path, *_: object, group: str = group, files: dict = files) -> str:
            if str(path) == "/proc/self/cgroup":
                return group
            if str(path) not in files:
                raise FileNotFoundError
            return files[str(path)]

        Path.read_text = fake
        found.append(machine.cpus())
    Path.read_text = read_text
    return found


def pinned() -> int:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return machine.cpus()


def shares(*per_task: str) -> list[int]:
    """Of 8 CPUs among 8 ranks, for each value of SLURM_CPUS_PER_TASK."""
    machine.cpus = lambda: 8
    machine.distributed.local_world_size = lambda: 8
    found = []
    for each in per_task:
        os.environ["SLURM_CPUS_PER_TASK"] = each
        found.append(machine.cpu_share())
    return found
