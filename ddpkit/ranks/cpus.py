"""How many CPUs this process may use, and how many of them are each rank's."""

import contextlib
import math
import os
from pathlib import Path

from ddpkit.ranks import process

# of a container: microseconds of CPU time per period
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def cpus() -> int:
    """Return how many CPUs the affinity and the container of this process let it use."""
    usable = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    count = float(len(usable(0)) if usable else os.cpu_count() or 1)
    # fails without cgroups of version 2, and without a limit, which is "max"
    with contextlib.suppress(OSError, ValueError):
        quota, period = QUOTA.read_text("utf-8").split()
        count = min(count, int(quota) / int(period))
    return max(1, math.ceil(count))


def cpu_share() -> int:
    """Return how many CPUs each rank of this machine has."""
    count = cpus()
    if not process.by_torchrun():
        dealt = int(os.environ.get("SLURM_CPUS_PER_TASK", 0))
        if count <= dealt:  # srun has divided them among the ranks
            return count
    return max(1, count // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
