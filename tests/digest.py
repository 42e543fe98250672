"""A checksum of what a run has come to."""

import hashlib
from pathlib import Path

import torch

SPEED = {"img_per_s", "train_seconds", "data_wait", "peak_memory"}
IGNORED = SPEED | {"args", "variables"}


def digest(folder: str | Path) -> str:
    """Return a checksum of all that a run has come to, but for flags, speed and variables."""
    sums = hashlib.sha256()

    def add(value: object) -> None:
        if isinstance(value, torch.Tensor):
            value = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        if isinstance(value, dict):
            value = [pair for pair in value.items() if pair[0] not in IGNORED]
        if isinstance(value, list | tuple):
            for part in value:
                add(part)
        else:
            sums.update(value if isinstance(value, bytes) else repr(value).encode())

    add(torch.load(Path(folder) / "last.pt", weights_only=True))
    return sums.hexdigest()
