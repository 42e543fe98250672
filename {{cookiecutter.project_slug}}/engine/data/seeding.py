"""Random numbers that depend on what they are for, not on which process draws them, or when."""

import contextlib
import itertools
import os
import random
from collections.abc import Iterator

import numpy as np
import torch

BITS = 2**32 - 1


def _constants(first: int, factor: int, count: int) -> list[tuple[int, int]]:
    powers = [first * pow(factor, n, 2**32) & BITS for n in range(count + 1)]
    return [*itertools.pairwise(powers)]


# Of NumPy's SeedSequence: how it scrambles words, stirs one into another, and scrambles the result.
INTO, OUT_OF = _constants(0x43B0D7E5, 0x931E8875, 64), _constants(0x8B51F9DD, 0x58F38DED, 2)
PAIRS = [(i, j) for i in range(16) for j in range(4) if i != j]
STIR = [(*pair, *constants) for pair, constants in zip(PAIRS, INTO[4:], strict=True)]


def number(*key: int) -> int:
    """Return 64 bits that look random and depend on `key`, numbers of 0 or more, alone.

    Those of np.random.SeedSequence((len(key), *key)), which gets the length because it takes (1, 2)
    and (1, 2, 0) for the same. Its own code has left the CPU's caches when a step comes to it; the
    interpreter's has not, and takes a fifth of the time there.
    """
    words = [len(key)]
    for value in key:
        words.append(value & BITS)
        while value := value >> 32:
            words.append(value & BITS)
    if len(words) > 16:
        return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])
    words += [0] * (4 - len(words))
    words[:4] = [_scramble(words[i], *INTO[i]) for i in range(4)]
    for i, j, mask, factor in STIR[: 4 * len(words) - 4]:
        word = (words[i] ^ mask) * factor & BITS
        word = 0xCA01F9DD * words[j] - 0x4973F715 * (word ^ word >> 16) & BITS
        words[j] = word ^ word >> 16
    low, high = (_scramble(words[i], *OUT_OF[i]) for i in range(2))
    return low | high << 32


def _scramble(word: int, mask: int, factor: int) -> int:
    word = (word ^ mask) * factor & BITS
    return word ^ word >> 16


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
