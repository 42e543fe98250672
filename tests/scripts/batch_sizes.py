"""Prints the batch sizes that are found on made-up machines: JSON, a line for each machine.

Each argument is a machine: for each rank the bytes that are free, those that an image takes, and
with how many images a step still succeeds. A line has for each rank the size that is found, the
largest that was tried, and the bytes that its images may take.
"""

import json
import sys

import torch

from engine.ranks import distributed
from engine.run import machine, probing

KEPT = 3e8  # bytes: gradients and the like
device = distributed.setup()


def find(free: float, each: float, most: int) -> tuple[int, int, float]:
    used, tried = {"VmRSS:": 1e9, "VmHWM:": 1e9}, []

    def try_step(size: int) -> None:
        tried.append(size)
        if size > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. G")
        used["VmHWM:"] = 1e9 + KEPT + size * each

    machine.free_memory = lambda: free
    probing.memory_in_use = used.__getitem__
    size = probing.find_batch_size(try_step, device, 10_000)
    return size, max(tried), 0.9 * free / distributed.local_world_size() - KEPT


for argument in sys.argv[1:]:
    found = find(*json.loads(argument)[distributed.rank()])
    distributed.say(json.dumps(distributed.gather_objects(found)))
distributed.teardown()
