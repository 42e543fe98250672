"""A checkpoint's tensors, copied from the device to the CPU with a single wait.

torch.save alone would copy and wait for each tensor, once for each file, and its files would name
the device: a machine without one could not load them.
"""

import copy
import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._pytree import tree_leaves

from engine.ranks import devices
from engine.run import machine
from engine.run.checkpoint import State

ALIGNED = 64  # bytes


def to_host(state: State) -> State:
    """Return `state` with all tensors on the CPU; those of a device are copies.

    As in the files of torch.save, tensors that share memory still do, and strides stay.
    """
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    away = [tensor for tensor in tensors if is_away(tensor)]
    if not away:
        return state
    plain = [tensor for tensor in away if is_plain(tensor)]
    storages = {key(tensor): tensor.untyped_storage() for tensor in plain}
    copies = dict(zip(storages, copy_storages([*storages.values()]), strict=True))
    new = {id(tensor): tensor for tensor in tensors}
    new |= {id(tensor): tensor.detach().cpu() for tensor in away if not is_plain(tensor)}
    new |= {id(tensor): rebuild(tensor, copies[key(tensor)]) for tensor in plain}
    return copy.deepcopy(state, new)  # keeps what containers have besides, such as versions


def is_away(tensor: Tensor) -> bool:
    return tensor.device.type not in ("cpu", "meta")


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is its storage, seen with a dtype, a shape and strides."""
    is_odd = tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg()
    is_known = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return is_known and not is_odd


def key(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def copy_storages(storages: Sequence[UntypedStorage]) -> list[UntypedStorage]:
    """Return copies on the CPU, all in one piece of memory."""
    sizes = [math.ceil(storage.nbytes() / ALIGNED) * ALIGNED for storage in storages]
    memory = allocate(sum(sizes)).numpy()
    copies = []
    for storage, end, size in zip(storages, itertools.accumulate(sizes), sizes, strict=True):
        if size:
            count, offset = storage.nbytes(), end - size
            part = torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=offset)
            copies.append(part.untyped_storage())
            copies[-1].copy_(storage, non_blocking=devices.copies_ahead(storage.device))
        else:
            copies.append(UntypedStorage(0))
    for device in {storage.device for storage in storages}:
        torch.accelerator.synchronize(device)
    return copies


def allocate(size: int) -> Tensor:
    """Return memory for `size` bytes: pinned, which is copied to faster, if there is enough of it.

    torch rounds pinned memory up to a power of two and keeps it for the next save.
    """
    if may_pin(size):
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # a limit on pinned memory, or a device that has none
            pass
    return torch.empty(size, dtype=torch.uint8)


@functools.cache  # for the next save as for the first one, which has taken some of what is free
def may_pin(size: int) -> bool:
    return 2 * size < machine.free_memory() / 4


def rebuild(tensor: Tensor, storage: UntypedStorage) -> Tensor:
    """Return what `tensor` is, on the copy of its storage."""
    new = torch.empty(0, dtype=tensor.dtype)
    new.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(new, tensor.requires_grad)
    return new.requires_grad_(tensor.requires_grad)
