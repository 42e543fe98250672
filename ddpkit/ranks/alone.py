"""The process group of one process, on a device for which torch has no collectives.

They leave tensors as they are, on the CPU, too. torch's own stand-in, "fake", is not for DDP.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future

NAME = "alone"


class Alone(dist.ProcessGroup):
    supports_splitting = False  # which torch asks a group's backend

    def __init__(self, *_: object) -> None:
        super().__init__(0, 1)


def _done(result: object) -> dist.Work:
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


def _own(group: Alone, _: torch.device) -> Alone:
    return group


def _leave(_: Alone, tensors: object = (), *__: object, **___: object) -> dist.Work:
    return _done(tensors)


def _copy_all(
    _: Alone, results: list, tensors: list[Tensor], *__: object, **___: object
) -> dist.Work:
    results[0][0].copy_(tensors[0])
    return _done(results)


def _copy(
    _: Alone, result: Tensor, tensor: Tensor, *__: object, **___: object
) -> dist.Work:
    return _done([result.copy_(tensor)])


# Not written as methods: torch has each with several lists of arguments.
METHODS = {
    "_get_backend": _own,
    "allreduce": _leave,
    "broadcast": _leave,
    "barrier": _leave,
    "allgather": _copy_all,
    "all_gather_single": _copy,
    "_allgather_base": _copy,  # its older name
}
for name, method in METHODS.items():
    setattr(Alone, name, method)


def register(kind: str) -> None:
    """Have torch know it by its NAME, for tensors of that kind of device."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, Alone, devices=["cpu", kind])
