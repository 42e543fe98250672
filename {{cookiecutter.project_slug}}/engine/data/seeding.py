"""Random numbers that depend on what they are for, not on which process draws them, or when."""

import contextlib
import hashlib
import os
import random
from collections.abc import Iterator

import numpy as np
import torch


def number(*key: int) -> int:
    """Return 64 bits that look random and depend on `key`, integers, alone."""
    # In a step, NumPy's SeedSequence takes ten times as long: its code has left the CPU's caches.
    text = repr([*map(int, key)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def seed(*key: int) -> None:
    """Seed the generators of Python, NumPy and torch, on CPU and GPU, with `key`."""
    value = number(*key)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.default_generator.manual_seed(value)  # torch.manual_seed takes a hundred times as long
    device = torch.get_device_module()
    is_in_use = getattr(device, "is_initialized", device.is_available)  # not in loader workers
    if device is not torch.cpu and is_in_use():
        device.manual_seed(value)


def be_deterministic() -> None:
    """Have GPUs compute the same bits each time; a warning names an operation that cannot."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling what torch.empty returns takes time, and nothing here reads it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextlib.contextmanager
def in_any_order() -> Iterator[None]:
    """Turn deterministic algorithms off within the block, for counts, which are exact in any order.

    With them, torchmetrics needs memory of pixels x classes^2 to count pixels.
    """
    forced = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(forced, warn_only=True)
