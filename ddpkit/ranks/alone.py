"""The process group of one process, on a device for which torch has no collectives.

They leave tensors as they are, on the CPU, too. torch's own stand-in, "fake", is not for DDP.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future

NAME = "alone"
# torch declares each method with several lists of arguments, of which these have one.
Base: Any = dist.ProcessGroup


def _done(result: object) -> dist.Work:
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


class Alone(Base):
    supports_splitting = False  # which torch asks a group's backend

    def __init__(self, *_: object) -> None:
        super().__init__(0, 1)

    def _get_backend(self, _: torch.device) -> "Alone":
        return self

    def allreduce(self, tensors: object = (), *_: object, **__: object) -> dist.Work:
        return _done(tensors)

    broadcast = allreduce
    barrier = allreduce

    def allgather(
        self, results: list, tensors: list, *_: object, **__: object
    ) -> dist.Work:
        results[0][0].copy_(tensors[0])
        return _done(results)

    def all_gather_single(
        self, result: Tensor, tensor: Tensor, *_: object, **__: object
    ) -> dist.Work:
        return _done([result.copy_(tensor)])

    _allgather_base = all_gather_single  # its older name


def register(kind: str) -> None:
    """Have torch know it by its NAME, for tensors of that kind of device."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, Alone, devices=["cpu", kind])
