"""What this machine has, and the settings that follow from it."""

import os
import warnings
from collections.abc import Sequence

import torch

from ddpkit.data import samples
from ddpkit.ranks import attaching, process, protocol
from ddpkit.ranks.cpus import cpu_share


def configure(
    device: torch.device,
    seed: int,
    deterministic: bool = False,
    debugged: tuple[Sequence[int], int] | None = None,
) -> None:
    """Seed random numbers, set torch's threads, and wait for a debugger in ranks that get one.

    Threads: OMP_NUM_THREADS, or else the rank's share of the CPUs, at most 4 with a GPU. GPUs
    multiply float32 matrices as TF32: torch.set_float32_matmul_precision("high").

    seed: of initial weights and whatever else is drawn before training; the same on all ranks.
    deterministic: have GPUs compute the same bits each time, which is slower.
    debugged: ranks (-1: all of them) and the port of rank 0, as `Parser.ranks` returns them.

    Raises a UserError for a rank that does not exist, or a port that is taken.

        ddpkit.configure(device, args.seed)
    """
    if debugged:
        attaching.wait_for_debugger(*debugged)
    samples.seed(seed)
    if deterministic:
        samples.be_deterministic()
    # of workers, which the start line tells
    warnings.filterwarnings("ignore", "This DataLoader will create")
    # of weights 1 x 1, whose strides mean nothing
    warnings.filterwarnings("ignore", "Grad strides do not match")
    # of torch 2.9, on the precision that is set here
    warnings.filterwarnings("ignore", "Please use the new API settings")
    # TF32 for what stays float32, where a GPU has it
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(default_threads(device.type != "cpu"))


def default_threads(on_gpu: bool) -> int:
    """Return OMP_NUM_THREADS if a user has set it, or this rank's share of the CPUs."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    by_launcher = protocol.THREADS in os.environ
    by_torchrun = process.by_plain_torchrun() and given == "1"
    by_user = given.isdecimal() and not by_launcher and not by_torchrun
    if by_user and int(given) > 0:
        return int(given)
    return min(cpu_share(), 4) if on_gpu else cpu_share()
