"""What a network returns: a tensor, or a tuple, dict or dataclass of them."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from ddpkit.errors import UserError

Outputs = Any  # of a network


def to_logits(outputs: Outputs) -> Tensor:
    """Return the logits of what a network returns, float32.

    outputs: a tensor, or a tuple, dict or dataclass: there "logits", "out", or else the first.

    Raises a UserError if there is none.

        logits = ddpkit.to_logits(model(images))
    """
    parts = outputs
    while not isinstance(parts, Tensor):
        if is_record(parts):
            # not by asdict, which copies the tensors
            names = [field.name for field in dataclasses.fields(parts)]
            parts = {name: getattr(parts, name) for name in names}
        if isinstance(parts, Mapping):
            found = [parts.get("logits"), parts.get("out"), *parts.values()]
            parts = [part for part in found if part is not None]
        if not isinstance(parts, (tuple, list)) or not parts:
            raise UserError(
                f"the model returns a {type(outputs).__name__} without logits: return a tensor, or "
                "a tuple, dict or dataclass with the logits first"
            )
        parts = parts[0]
    return parts.float()


def is_record(outputs: Outputs) -> bool:
    return dataclasses.is_dataclass(outputs) and not isinstance(outputs, type | Mapping)


def map_tensors(change: Callable[[Tensor], Tensor], outputs: Outputs) -> Outputs:
    """Return what a network returns with each tensor changed."""
    if isinstance(outputs, Tensor):  # to search a tree takes longer
        return change(outputs)
    if is_record(outputs):
        names = [field.name for field in dataclasses.fields(outputs) if field.init]
        parts = {name: map_tensors(change, getattr(outputs, name)) for name in names}
        return dataclasses.replace(outputs, **parts)
    if isinstance(outputs, MutableMapping):  # of any class, which a tree may not know
        changed = copy.copy(outputs)
        for name, part in outputs.items():
            changed[name] = map_tensors(change, part)
        return changed
    return tree_map_only(Tensor, change, outputs)


def to_float32(outputs: Outputs) -> Outputs:
    def change(part: Tensor) -> Tensor:
        return part.float() if part.is_floating_point() else part

    return map_tensors(change, outputs)
