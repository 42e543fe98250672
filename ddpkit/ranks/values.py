"""What an expression is where this rank is held, in a form that can be compared with others."""

import pickle
import re
import sys
import threading
import traceback
import zlib
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ddpkit.errors import clip

# pydevd's function in which a thread is held, and ours that asks
HOLDERS = ("do_wait_suspend", "on_all_ranks")
MOST_ROWS = 1000  # of a tensor, that are told apart

# A line on a value, and a checksum of each of its parts
Look = tuple[str, dict[str, int]]


def look(expression: str) -> Look | None:
    """Return what `expression` is, or the error in which it ends; None if this rank is not held."""
    names: dict[str, object] = {}
    for frame in held_frames():  # what an inner one has hides what an outer one has
        names = {**frame.f_globals, **frame.f_locals, **names}
    if not names:
        return None
    try:
        with torch.no_grad():
            value = eval(expression, names)
            parts = divide(value, expression)
            return describe(value), {name: compared(parts[name]) for name in parts}
    except Exception as error:
        return repr(error), {}


def held_frames() -> Iterator[FrameType]:
    """Yield the frames in which the main thread is held, the innermost first."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    is_held = False
    for frame, _ in traceback.walk_stack(main):
        if frame.f_code.co_name in HOLDERS:
            is_held = True
        elif is_held and "pydevd" not in frame.f_globals.get("__name__", ""):
            yield frame


def describe(value: object) -> str:
    """Return shape, dtype, device, mean, norm and range of a tensor; of others a short text.

    Mean, norm and range are those of its finite numbers.
    """
    if not isinstance(value, Tensor):
        return clip(value, 200)
    kind = str(value.dtype).removeprefix("torch.")
    what = f"{tuple(value.shape)} {kind} {value.device}"
    if value.numel() < 2:
        return f"{what}, {value.tolist()}"
    every = value.cpu().float()
    numbers = every[every.isfinite()]
    others = every.numel() - numbers.numel()
    what += f", {others} NaN or inf" * bool(others)
    if not numbers.numel():
        return what
    ends = f"{numbers.min():.6g} to {numbers.max():.6g}"
    return f"{what}, mean {numbers.mean():.6g}, norm {numbers.norm():.6g}, {ends}"


def divide(value: Any, name: str) -> dict[str, Any]:
    """Return the rows, elements or weights of a value by name; itself if it has none."""
    if isinstance(value, nn.Module):
        # Buffers, as BatchNorm's, are each rank's own until an epoch ends.
        return dict(value.named_parameters())
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, dict):
        return {str(key): part for key, part in value.items()}
    has_rows = isinstance(value, Tensor) and value.dim()
    if isinstance(value, list | tuple) or (has_rows and len(value) <= MOST_ROWS):
        return {f"{name}[{n}]": part for n, part in enumerate(value)}
    return {name: value}


def compared(part: object) -> int:
    """Return a checksum of the numbers in a value; without any of its printed form."""
    # without addresses
    return checksum(part) or checksum(re.sub("0x[0-9a-f]+", "", repr(part)))


def checksum(parts: object) -> int:
    """Return a checksum of the tensors, arrays, numbers and strings in a sample or a batch."""
    total = 0
    for part in tree_leaves(parts):
        if isinstance(part, Tensor):
            part = part.detach().cpu().flatten().contiguous().view(torch.uint8).numpy()
        if isinstance(part, str | int | float | np.ndarray | np.generic):
            total = zlib.crc32(pickle.dumps(part), total)
    return total
