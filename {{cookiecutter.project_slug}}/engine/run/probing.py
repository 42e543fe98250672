"""--find-batch-size: the largest batch with which training and validation fit into memory."""

import contextlib
import gc
import math
from collections.abc import Callable
from pathlib import Path

import torch

from engine.data import loading
from engine.data.handover import collate
from engine.data.images import Format
from engine.data.loading import Loader
from engine.errors import UserError
from engine.ranks import distributed, memory
from engine.run import machine

SHARE = 0.9  # of the free memory; loader workers, fragments and NCCL's buffers get the rest
GROWTH = 2**28  # bytes; a growth of the peak that shows what an image takes
SELF = Path("/proc/self")


def batch(
    loader: Loader, size: int, device: torch.device, format: Format
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `size` times the first sample of `loader`'s data set: images and targets."""
    samples = [loader.dataset.dataset[0]] * size
    images, targets = next(loading.to_device([collate(samples)], device, format))
    return images, targets


def find_batch_size(try_step: Callable[[int], object], device: torch.device, images: int) -> int:
    """Return the largest size of a batch that fits into memory, on all ranks.

    images: in the training set, for one pass of all ranks.
    try_step: does with a batch of a given size what training and validation do, but without
    collectives: a rank that runs out of memory would leave the others waiting in one.
    """

    def attempt(size: int) -> bool:
        is_enough = torch.ones((), device=device)
        try:
            try_step(size)
        except Exception as error:
            if not memory.lacking(error):
                raise
            is_enough.zero_()
        if not is_enough:
            gc.collect()  # only now: the error held the tensors of its step
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()
        return bool(distributed.reduce_tensor(is_enough, "min"))

    distributed.barrier()  # creates nccl's buffers
    limit = images // distributed.world_size()
    if device.type == "cpu":
        host = HostMemory(attempt)
        size = search(host.fits, limit)
        distributed.say(str(host))
    else:
        limit_memory(device)
        size = search(attempt, limit)
    if size == limit:
        distributed.say(f"more than {size} images per rank would be more than the training images")
    if not size:
        raise UserError(
            "--find-batch-size: not even 2 images fit into memory; lower --image-size, or choose "
            "a smaller network"
        )
    return size


def limit_memory(device: torch.device) -> None:
    """Let tensors on `device` take SHARE of what is free there, as far as torch can say that."""
    module, share = torch.get_device_module(device), SHARE
    if hasattr(module, "mem_get_info"):
        free, total = module.mem_get_info(device)
        share *= (free + module.memory_reserved(device)) / total
    if hasattr(module, "set_per_process_memory_fraction"):
        module.set_per_process_memory_fraction(share)


def search(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest size up to `limit` that fits, from 16 on a multiple of 8; 0 if 2 do not.

    By doubling it, then by bisection.
    """
    good, bad, size = 0, limit + 1, min(2, limit)
    while size < bad:
        if fits(size):
            good = size
        elif good:
            bad = size
        else:
            return 0
        if bad > limit and good < limit:
            size = min(2 * good, limit)
        else:
            step = 8 if good >= 16 else 1
            size = max((good + bad) // 2, good + step) // step * step
    return good


class HostMemory:
    """Whether a batch fits into the memory of a machine without a GPU.

    There a batch that is too large would not fail, but make the machine swap, or be killed. So
    small ones are tried, and their peaks extrapolated by a line.
    """

    def __init__(self, attempt: Callable[[int], bool]) -> None:
        if machine.free_memory() == math.inf:
            raise UserError("--find-batch-size: needs a GPU, or Linux, which says what is free")
        self.attempt = attempt
        self.sizes: list[int] = []
        self.peaks: list[float] = []  # of `sizes`, in bytes above what was in use before
        self.start, self.budget = 0.0, 0.0  # bytes

    def fits(self, size: int) -> bool:
        if self.sizes and (self.is_clear() or self.predict(size) > self.budget):
            return self.predict(size) <= self.budget
        if not self.sizes:  # makes gradients and the optimizer's state, which stay
            if not self.attempt(size):
                return False
            self.start = memory_in_use("VmRSS:")
            share = SHARE / distributed.local_world_size()
            self.budget = reduce(share * machine.free_memory(), "min")
        with contextlib.suppress(OSError):
            (SELF / "clear_refs").write_text("5")  # the peak begins anew
        if not self.attempt(size):
            return False
        self.sizes.append(size)
        self.peaks.append(reduce(memory_in_use("VmHWM:") - self.start, "max"))
        return self.peaks[-1] <= self.budget

    def is_clear(self) -> bool:
        """Return whether the peaks grow along a line; at first, earlier ones may hide them."""
        if len(self.peaks) < 3:
            return False
        before, last = self.peaks[-2] - self.peaks[-3], self.peaks[-1] - self.peaks[-2]
        return last > GROWTH and before > 0.4 * last

    def predict(self, size: int) -> float:
        """Return the peak with a batch of `size`; until that is clear, at least as much."""
        if not self.is_clear():
            return self.peaks[-1] * size / self.sizes[-1]
        slope = (self.peaks[-1] - self.peaks[-2]) / (self.sizes[-1] - self.sizes[-2])
        return self.peaks[-1] + slope * (size - self.sizes[-1])

    def __str__(self) -> str:
        tried, free = self.sizes[-1:] or [2], self.budget / SHARE / 2**30
        return f"tried up to {tried[0]} images per rank; {free:.1f} GiB are free for each rank"


def memory_in_use(name: str) -> float:
    """Return a line of /proc/self/status in bytes: memory now (VmRSS:), or its peak (VmHWM:)."""
    lines = (SELF / "status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(name))


def reduce(value: float, op: str) -> float:
    return distributed.reduce_tensor(torch.tensor(value, dtype=torch.float64), op).item()
