"""Random numbers that depend on what they are for, not on which process draws them, or when."""

import contextlib
import os
import random
from collections.abc import Iterator

import numpy as np
import torch


def number(*key: int) -> int:
    """Return 64 bits that look random and depend on `key`, numbers of 0 or more, alone."""
    # With the length, because SeedSequence takes (1, 2) and (1, 2, 0) for the same.
    return int(np.random.SeedSequence((len(key), *key)).generate_state(1, np.uint64)[0])


def seed(*key: int) -> None:
    """Seed the generators of Python, NumPy and torch, on CPU and GPU, with `key`."""
    value = number(*key)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.default_generator.manual_seed(value)  # torch.manual_seed takes a hundred times as long
    if torch.cuda.is_initialized():  # not in loader workers
        torch.cuda.manual_seed(value)


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
