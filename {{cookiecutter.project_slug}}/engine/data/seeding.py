"""Random numbers that depend on what they are for, not on which process draws them, or when."""

import contextlib
import os
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import get_worker_info

BITS = 2**64 - 1


def number(*key: int) -> int:
    """Return 64 bits that look random and depend on `key`, integers, alone.

    Each integer passes through the mixer of SplitMix64 (Steele et al. 2014, doi
    10.1145/2660193.2660195). Libraries take longer: in a step their code has left the CPU's caches.
    """
    value = 0
    for part in key:
        value = (value + int(part) + 0x9E3779B97F4A7C15) & BITS
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & BITS
        value = (value ^ value >> 27) * 0x94D049BB133111EB & BITS
        value ^= value >> 31
    return value


def seed(*key: int) -> None:
    """Seed the generators of Python, NumPy and torch, on CPU and GPU, with `key`."""
    value = number(*key)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.default_generator.manual_seed(value)  # torch.manual_seed takes a hundred times as long
    device = torch.get_device_module()
    is_in_use = getattr(device, "is_initialized", _is_rank)  # Apple's does not say
    if device is not torch.cpu and is_in_use():
        device.manual_seed(value)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Give the generators of Python, NumPy and torch's CPU back their state after the block."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _is_rank() -> bool:
    """Return whether this process may use a GPU; a loader worker leaves it alone."""
    return get_worker_info() is None


def be_deterministic() -> None:
    """Have GPUs compute the same bits each time; a warning names an operation that cannot."""
    from torchmetrics import Metric

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling what torch.empty returns takes time, and nothing here reads it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    wrap = Metric._wrap_update
    Metric._wrap_update = lambda self, update: _in_any_order()(wrap(self, update))  # type: ignore


@contextlib.contextmanager
def _in_any_order() -> Iterator[None]:
    """Turn deterministic algorithms off within the block, for metrics: counts are exact anyway.

    With them, torchmetrics needs memory of pixels x classes^2 to count pixels.
    """
    forced = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(forced, warn_only=True)
