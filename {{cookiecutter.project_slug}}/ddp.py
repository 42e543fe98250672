"""How this process becomes one rank of many, in plain torch, and what ranks tell each other."""

import itertools
import math
from argparse import Namespace

import torch
import torch.distributed as dist
from torch import Tensor

import ddpkit


def setup(local_rank: int, args: Namespace) -> torch.device:
    """Join the ranks that the launcher describes; return this one's device.

    torchrun, launch.sh and srun set RANK, LOCAL_RANK and WORLD_SIZE. Without them it is a group of
    one, so that no other code has to ask whether there are several ranks.
    """
    # Who and where the ranks are. Waits for all, or fails with a line that names the missing.
    here = ddpkit.rendezvous(local_rank, args.dist_timeout, bool(args.debug))
    device = here.device  # GPU number local_rank of this node; the CPU if there is none
    has_gpu = device.type != "cpu"
    if has_gpu:
        torch.accelerator.set_device_index(device)  # torch.cuda.set_device, of any GPU
    if not dist.is_initialized():  # it is if main() runs again in this process
        dist.init_process_group(
            # nccl for tensors on GPUs, gloo for those on CPUs and for objects
            here.backend,
            store=here.store,
            rank=here.rank,
            world_size=here.world_size,
            device_id=device if has_gpu else None,
            timeout=here.timeout,  # of a collective
        )
    # Seeds, threads, and a debugger that is asked for by --debug.
    ddpkit.configure(device, args.seed, args.deterministic, args.debug)
    return device


def reduce_tensor(tensor: Tensor) -> Tensor:
    """Return the sum, not the mean, of the ranks' `tensor`s, of the same shape and dtype on all.

    Every rank has to call it. For a mean, reduce the sum and the count of samples and divide once:
    a mean of the ranks' means is wrong as soon as they hold different numbers of samples.
    """
    # a copy; of bools, whose sum would be one bool, as integers
    result = tensor.detach() + 0
    if dist.get_world_size() > 1:  # alone it would cost as much as a small layer
        dist.all_reduce(result)
    return result


def sum_exactly(*lists: list[Tensor]) -> list[float]:
    """Return for each list the sum of all ranks' scalars, the same on any number of ranks.

    It is rounded once. Every rank has to call it, and it waits for the device.
    """
    mine = [torch.stack(each).tolist() if each else [] for each in lists]
    gathered = [mine] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return [math.fsum(itertools.chain(*each)) for each in zip(*gathered, strict=True)]


def sum_device(device: torch.device) -> torch.device:
    """Return where sums and metrics are kept: Apple's GPUs have no float64, and count slowly."""
    return torch.device("cpu") if device.type == "mps" else device


def memory_layout(device: torch.device) -> torch.memory_format:
    """Return how images and weights lie in memory: channels last, which is faster.

    On Apple's GPUs torch up to 2.13 computes wrong gradients of BatchNorm with it.
    """
    if device.type == "mps":
        return torch.contiguous_format
    return torch.channels_last


def print0(line: str) -> None:
    """Print `line` once, not on every rank."""
    if dist.get_rank() == 0:
        print(line, flush=True)
