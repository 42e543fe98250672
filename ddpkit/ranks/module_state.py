"""What modules have besides weights, and how it is kept for each virtual rank."""

import collections
import copy
import itertools
import pickle
import random
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_group
from torch.utils._pytree import tree_leaves, tree_map

from ddpkit.ranks import distributed

Space = dict[str, Any]  # attributes, or buffers, of a module by name

# What torch itself keeps in a module, beside which it has attributes of its own.
OF_TORCH = vars(nn.Module()).keys()
PLAIN = {type(None), bool, int, float, str, bytes}
AnyGenerator = (
    torch.Generator | np.random.Generator | np.random.RandomState | random.Random
)
# What changes in place, besides tensors, dicts, lists and deques.
CHANGING = set | collections.Counter | np.ndarray | AnyGenerator


class Sent:
    """A tensor on its way to other processes."""

    def __init__(self, tensor: Tensor) -> None:
        self.bits = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()
        self.like = tensor.dtype, tensor.shape, tensor.device.type

    def tensor(self) -> Tensor:
        dtype, shape, device = self.like
        return torch.from_numpy(self.bits).view(dtype).view(shape).to(device)


class ModuleState:
    """The buffers of modules, and their attributes: numbers, tensors, generators, lists of them.

    Modules, functions and objects of other classes in attributes remain the same.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        every = itertools.chain(*(each.modules() for each in modules))
        owners = list(dict.fromkeys(every))
        self.own = [vars(each) for each in owners]
        self.buffers = [each._buffers for each in owners]

    def taken(self) -> list[Space]:
        return [attributes(each) for each in self.own + self.buffers]

    def put(self, taken: list[Space]) -> None:
        """Give the modules what `taken` has returned."""
        for space, values in zip(self.own + self.buffers, taken, strict=True):
            for key in attributes(space).keys() - values.keys():
                del space[key]
            space.update(values)

    def give_all(self, counts: Iterable[int] = ()) -> list[int]:
        """Give all processes what rank 0 has; return the sums of their `counts`.

        All have to call it. As long as attributes do not differ it takes one collective besides
        that of the buffers.
        """
        if distributed.world_size() == 1:
            return list(counts)
        every = itertools.chain(*(each.values() for each in self.buffers))
        tensors = [each.detach() for each in every if each is not None]
        if tensors:  # as DistributedDataParallel does
            dist._broadcast_coalesced(_get_default_group(), tensors, 2**25, 0)
        mine = self._packed()
        own = [zlib.crc32(pickle.dumps(mine)), *counts]
        of_ranks = distributed.gather_objects(own)
        checksums, *others = zip(*of_ranks, strict=True)
        if len(set(checksums)) > 1:
            theirs = distributed.from_rank_zero(lambda: mine)
            for space, before, values in zip(self.own, mine, theirs, strict=True):
                for key in before.keys() - values.keys():
                    del space[key]
                space.update(mapped(unpack, values))
        return [sum(each) for each in others]

    def _packed(self) -> list[Space]:
        """Return the attributes as they can be sent."""
        return [
            {
                key: mapped(pack, each)
                for key, each in attributes(own).items()
                if is_plain(each) or all(map(is_state, tree_leaves(each)))
            }
            for own in self.own
        ]


def attributes(space: Space) -> Space:
    return {key: each for key, each in space.items() if key not in OF_TORCH}


def is_plain(value: object) -> bool:
    """Return whether it is a number or text, or some of them that do not change."""
    if type(value) is tuple:
        return all(type(each) in PLAIN for each in value)
    return type(value) in PLAIN


def mapped(function: Callable, value: Any) -> Any:
    """Return a value with `function` of its leaves, which is slow for the many that are plain."""
    if isinstance(value, Tensor):
        return function(value)
    return value if is_plain(value) else tree_map(function, value)


def is_state(leaf: object) -> bool:
    return type(leaf) in PLAIN or isinstance(leaf, CHANGING) or is_tensor(leaf)


def is_tensor(leaf: object) -> bool:
    """Return whether it is a tensor, no weight, and no part of a graph."""
    return isinstance(leaf, Tensor) and not leaf.requires_grad


def pack(leaf: Any) -> Any:
    return Sent(leaf) if is_tensor(leaf) else leaf


def unpack(leaf: Any) -> Any:
    return leaf.tensor() if isinstance(leaf, Sent) else leaf


def copied(taken: list[Space]) -> list[Space]:
    """Return what `ModuleState.taken` has, with tensors, lists and generators of its own."""
    known: dict[int, Any] = {}  # what several have in common they have in common

    def copy_leaf(leaf: Any) -> Any:
        if is_tensor(leaf):
            return known.setdefault(id(leaf), leaf.clone())
        if isinstance(leaf, CHANGING):
            return copy.deepcopy(leaf, known)
        return leaf

    return [
        {key: mapped(copy_leaf, each) for key, each in space.items()} for space in taken
    ]
