"""What modules have besides weights, and how each virtual rank has buffers of its own."""

import itertools
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ddpkit.ranks import replicas

Space = dict[str, Any]  # attributes of a module by name
Buffers = list[dict[str, Tensor | None]]  # of each module by name

# What torch itself keeps in a module, beside which it has attributes of its own.
OF_TORCH = vars(nn.Module()).keys()
PLAIN = {type(None), bool, int, float, complex, str, bytes}


class ModuleState:
    """The buffers of modules, such as BatchNorm's statistics."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        every = itertools.chain(*(each.modules() for each in modules))
        self.buffers = [each._buffers for each in dict.fromkeys(every)]

    def taken(self) -> Buffers:
        return [dict(each) for each in self.buffers]

    def put(self, taken: Buffers) -> None:
        """Give the modules what `taken` has returned."""
        for buffers, values in zip(self.buffers, taken, strict=True):
            buffers.update(values)

    def give_all(self) -> None:
        """Give all processes what rank 0 has; all have to call it."""
        every = itertools.chain(*(each.values() for each in self.buffers))
        replicas.give([each.detach() for each in every if each is not None])


def copied(taken: Buffers) -> Buffers:
    """Return what `ModuleState.taken` has, in tensors of its own."""
    known: dict[int, Tensor] = {}  # what several have in common they have in common

    def copy_buffer(buffer: Tensor | None) -> Tensor | None:
        if buffer is None:
            return None
        return known.setdefault(id(buffer), buffer.clone())

    return [{key: copy_buffer(each) for key, each in space.items()} for space in taken]


def attributes(space: Space) -> Space:
    return {key: each for key, each in space.items() if key not in OF_TORCH}
