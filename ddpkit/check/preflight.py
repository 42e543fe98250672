"""The table of preflight.py: what the ranks of a job have in common, and what differs."""

import os
import platform
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import torch

from ddpkit.data import folders, images
from ddpkit.errors import UserError, shorten
from ddpkit.ranks import distributed, environment, protocol

LIMIT = 60  # seconds that a rank may take for a step
TEXTS = (".csv", ".txt", ".json")  # whose contents are compared
FLOATS = 2**23  # that are reduced: 32 MiB


def check(root: Path, data: Path, device: torch.device) -> int:
    """Print the table; return the exit status. All ranks have to call this."""
    own = {"code": checksum_code(root), **find_versions(), "device": device.type}
    if device.index is not None:
        own["device"] = torch.get_device_module(device).get_device_properties(device).name
    if distributed.local_rank() == 0:  # it speaks for its node
        own["data"] = list_data(data)
    own["all-reduce"] = reduce(device)
    found = distributed.gather_objects((environment.node(), own))
    nodes = [*dict.fromkeys(node for node, _ in found)]
    ready = f"ready: {len(found)} rank(s) on {len(nodes)} node(s)"
    is_one = len(nodes) == 1
    facts = [(f"rank {i}" if is_one else node, each) for i, (node, each) in enumerate(found)]
    row("ok", "nodes", shorten(nodes))
    differ = [name for name in own if not compare(name, facts)]
    distributed.say(f"not ready: see {', '.join(differ)}" if differ else ready)
    return protocol.MISTAKE if differ else 0


def row(mark: str, name: str, text: str) -> None:
    distributed.say(f"{mark:<7}{name:<13}{text}")


def compare(name: str, facts: Sequence[tuple[str, Mapping[str, str]]]) -> bool:
    """Print whether all have the same fact of that name; return False if they must, and do not."""
    groups: dict[str, dict[str, None]] = {}
    for who, each in facts:
        if name in each:
            groups.setdefault(each[name], {})[who] = None
    fewest_first = sorted(groups.items(), key=lambda item: len(item[1]))
    texts = [f"{shorten([*who])}: {text}" for text, who in fewest_first]
    is_same, is_needed = len(groups) == 1, name != "device"
    mark = "ok" if is_same else "FAULT" if is_needed else "note"
    row(mark, name, next(iter(groups)) if is_same else "; ".join(texts[:4]))
    return is_same or not is_needed


def find_versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "torchvision", "numpy")},
        "CUDA": torch.version.cuda or torch.version.hip or "none",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else "none",
        "JPEGs by": images.decoder(),
    }


def checksum_code(root: Path) -> str:
    """Return a checksum of the files below `root` that this program has imported."""
    files = {getattr(module, "__file__", None) or "/" for module in [*sys.modules.values()]}
    paths = sorted(path for path in map(Path.resolve, map(Path, files)) if path.is_file())
    paths = [path for path in paths if path.is_relative_to(root)]
    own = [path for path in paths if "site-packages" not in path.parts]  # of a .venv
    return f"{len(own)} files (checksum {zlib.crc32(b''.join(map(Path.read_bytes, own))):08x})"


def list_data(data: Path) -> str:
    """Return how many files are in `data`, and a checksum of their names and of what texts say."""
    if not data.is_dir():
        raise UserError(f"{data}: no such folder")
    paths = [Path(parent, name) for parent, _, names in folders.walk(data) for name in names]
    checksum = 0
    for path in sorted(paths):
        checksum = zlib.crc32(os.fsencode(path.relative_to(data)), checksum)
        checksum = zlib.crc32(path.read_bytes() if path.suffix in TEXTS else b"", checksum)
    return f"{data}: {len(paths)} files (checksum {checksum:08x})"


def reduce(device: torch.device) -> str:
    """Return whether a sum over all ranks is right, and how fast it is on rank 0."""
    ones, size = torch.ones(FLOATS, device=device), distributed.world_size()
    for _ in range(2):  # the first time they connect
        start = time.perf_counter()
        is_right = bool((distributed.reduce_tensor(ones) == size).all())
        seconds = distributed.from_rank_zero(lambda start=start: time.perf_counter() - start)
    speed = f"{4 * FLOATS / seconds / 1e9:.2g} GB/s"
    return f"right, {speed}" if is_right else f"wrong on {environment.own_rank()}"
