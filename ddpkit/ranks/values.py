"""What an expression is where this rank is held, in a form that can be compared with others."""

import math
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

# pydevd's function in which a thread is held, and ours that asks
HOLDERS = ("do_wait_suspend", "on_all_ranks")
MOST_PARTS = 1000  # of a tensor, that are told apart


def look(expression: str) -> tuple[str, dict[str, int]] | None:
    """Return a line on its value and a checksum of each part; None if this rank is not held.

    The line and the checksums of an expression that fails are those of its error.
    """
    value: object = None
    for frame in held_frames():
        names = {**frame.f_globals, **frame.f_locals}
        try:
            with torch.no_grad():
                value = eval(expression, names)
                return describe(value), checksums(value, expression)
        except NameError as error:  # the frame that called it may know the name
            value = value or error
        except Exception as error:
            value = error
            break
    return (repr(value), {expression: 0}) if value else None


def held_frames() -> Iterator[FrameType]:
    """Yield the frames in which the main thread is held, the innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    held = None
    while frame:
        if frame.f_code.co_name in HOLDERS:
            held = frame.f_back
        frame = frame.f_back
    while held:
        if "pydevd" not in held.f_globals.get("__name__", ""):
            yield held
        held = held.f_back


def describe(value: object) -> str:
    """Return shape, dtype, device, mean, norm and range of a tensor, or of all in a value."""
    tensors = [each for each in tree_leaves(plain(value)) if isinstance(each, Tensor)]
    if not tensors:
        return repr(value)[:200]
    what = f"{type(value).__name__} of {len(tensors)} tensors"
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        what = f"{tuple(value.shape)} {kind} {value.device}"
    count = 0
    total = 0.0
    squares = 0.0
    ends = []
    for tensor in tensors:
        if tensor.numel() and not tensor.is_complex():
            numbers = tensor.detach().cpu().double()
            count += numbers.numel()
            total += numbers.sum().item()
            squares += numbers.square().sum().item()
            ends += [numbers.min().item(), numbers.max().item()]
    if not count:
        return what
    if count == 1:
        return f"{what}, {total:.9g}"
    norm = math.sqrt(squares)
    low = min(ends)
    high = max(ends)
    return f"{what}, mean {total / count:.6g}, norm {norm:.6g}, {low:.6g} to {high:.6g}"


def checksums(value: Any, name: str) -> dict[str, int]:
    """Return one of each row, weight or element of a value, which has this name; in their order."""
    value = plain(value)
    parts: dict[str, object] = {name: value}
    if isinstance(value, Tensor) and value.dim():
        size = max(1, math.ceil(len(value) / MOST_PARTS))
        starts = range(0, len(value), size)
        end = f":+{size}" if size > 1 else ""
        parts = {f"{name}[{n}{end}]": value[n : n + size] for n in starts}
    elif isinstance(value, Mapping):
        parts = {str(key): part for key, part in value.items()}
    elif isinstance(value, list | tuple):
        parts = {f"{name}[{n}]": part for n, part in enumerate(value)}
    sums = {}
    for key, part in parts.items():
        sums[key] = 0
        for leaf in tree_leaves(part):
            data = repr(leaf).encode()
            if isinstance(leaf, Tensor):
                bits = leaf.detach().cpu().flatten().contiguous().view(torch.uint8)
                data = f"{leaf.shape}".encode() + bits.numpy().tobytes()
            sums[key] = zlib.crc32(data, sums[key])
    return sums


def plain(value: Any) -> Any:
    """Return the weights of a network by name; all else as it is."""
    # BatchNorm's statistics are each rank's own until an epoch ends.
    return dict(value.named_parameters()) if isinstance(value, nn.Module) else value


def find_unlike(sums: Mapping[str, int], others: Mapping[str, int]) -> str:
    """Return the name of the first part that differs; nothing if all are the same."""
    for name in {**sums, **others}:
        if sums.get(name) != others.get(name):
            return name
    return ""
