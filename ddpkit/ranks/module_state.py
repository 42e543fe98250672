"""What modules have besides weights, and how each virtual rank has buffers of its own."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

Space = dict[str, Any]  # attributes of a module by name
Buffers = list[dict[str, Tensor | None]]  # of each module by name

# What torch itself keeps in a module, beside which it has attributes of its own.
OF_TORCH = vars(nn.Module()).keys()
PLAIN = {type(None), bool, int, float, complex, str, bytes}


def attributes(space: Space) -> Space:
    return {key: each for key, each in space.items() if key not in OF_TORCH}


def buffers_of(modules: Iterable[nn.Module]) -> Buffers:
    """Return the buffers of modules, such as BatchNorm's statistics: to change one changes them."""
    return [inner._buffers for module in modules for inner in module.modules()]


def copied(buffers: Buffers) -> Buffers:
    """Return them in tensors of their own."""
    known: dict[int, Tensor] = {}  # what several have in common they have in common

    def copy_buffer(buffer: Tensor | None) -> Tensor | None:
        if buffer is None:
            return None
        return known.setdefault(id(buffer), buffer.clone())

    return [{key: copy_buffer(each) for key, each in of.items()} for of in buffers]


def put(buffers: Buffers, taken: Buffers) -> None:
    """Give modules the buffers that they, or copies of theirs, had."""
    for present, before in zip(buffers, taken, strict=True):
        present.update(before)
