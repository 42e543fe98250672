"""The table of preflight.py: what the ranks of a job have in common, and what differs.

Values travel through the process group's store: a rank that hangs is named, and a network that is
broken does not keep the rest of the table from being printed.
"""

import contextlib
import json
import os
import platform
import re
import secrets
import shutil
import statistics
import sys
import time
import zlib
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from engine.data import folders, images
from engine.errors import UserError, shorten
from engine.ranks import distributed, environment, meeting, protocol

T = TypeVar("T")

LIMIT = 60  # seconds that a rank may take for a step
CLOCK_SECONDS = 1.0  # by which clocks may differ
SEEN_SECONDS = 3.0  # until a network disk shows a new file
SIZED = 20_000  # files, at most, whose sizes are compared: each may take a network disk 1 ms
TEXTS = (".csv", ".txt", ".json")  # whose contents are compared
FLOATS = 2**23  # that are reduced at a time: 32 MiB
RECORDED = re.compile("NCCL_|GLOO_|TORCH_(?!CPP)|OMP_NUM_THREADS")  # environment variables
MOST = 4  # differences that are printed


def check(root: Path, data: Path, output: Path, device: torch.device) -> int:
    """Print the table; return the exit status. All ranks have to call this.

    root: whose code is compared.
    """
    table = Table()
    table.compare("versions", versions())
    table.compare("code", checksums(root), "files")
    own = {f"{name}:": os.environ[name] for name in sorted(os.environ) if RECORDED.match(name)}
    table.compare("environment", own, is_fault=False)
    table.compare("device", hardware(device), is_fault=False)
    table.check_clocks()
    table.compare("data", {"": list_data(data)} if distributed.local_rank() == 0 else None)
    table.check_output(output.absolute())
    table.check_all_reduce(device)
    return table.verdict()


def gather(step: str, value: T) -> list[T]:
    """Return the ranks' `value`s, which JSON can hold; a UserError names ranks that do not come."""
    store, ranks = distributed.store(), range(distributed.world_size())
    keys = [f"check/{step}/{rank}" for rank in ranks]
    store.set(keys[distributed.rank()], json.dumps(value))
    for _ in range(LIMIT if distributed.is_rank_zero() else 2 * LIMIT):
        if meeting.has(store, keys, 1):  # between the waits Python hears signals
            return [json.loads(text) for text in store.multi_get(keys)]
    missing = [rank for rank in ranks if not store.check([keys[rank]])]
    at = [store.get(protocol.PROCESS.format(rank)).decode().split()[0] for rank in missing]
    who = f"rank {shorten([*map(str, missing)])} on {shorten([*dict.fromkeys(at)])}"
    raise UserError(f"not ready: {who}: not done with this step after {LIMIT} s: {step}")


class Table:
    """Prints rows on rank 0. All ranks call each method, and come to the same verdict."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.notes: list[str] = []
        self.names = gather("nodes", environment.node())  # of each rank's node
        counts = Counter(self.names)
        self.ready = f"ready: {len(self.names)} rank(s) on {len(counts)} node(s)"
        ranks = "/".join(map(str, sorted({*counts.values()})))
        self.row("nodes", f"{len(counts)}: {shorten([*counts])}; {ranks} rank(s) on each")
        if len(counts) == 1:
            self.names = [f"rank {rank}" for rank in range(len(self.names))]

    def row(self, name: str, text: str, wrong: str = "", is_fault: bool = False) -> None:
        """Print a row. wrong: what keeps the job from running well, if a fault, or may be meant."""
        mark = "FAULT" if wrong and is_fault else "note" if wrong else "ok"
        distributed.say(f"{mark:<7}{name:<13}{'; '.join(filter(None, [wrong, text]))}")
        if wrong:
            (self.faults if is_fault else self.notes).append(f"{name}: {wrong}")

    def verdict(self) -> int:
        """Print the last line; return the exit status."""
        line = self.ready
        if found := self.faults or self.notes:
            more = f"; and {len(found) - 1} more above" if len(found) > 1 else ""
            line = f"{'not ready:' if self.faults else f'{line}, but'} {found[0]}{more}"
        distributed.say(line)
        return protocol.MISTAKE if self.faults else 0

    def compare(
        self, name: str, facts: Mapping[str, str] | None, what: str = "", is_fault: bool = True
    ) -> None:
        """Print whether all ranks have the same `facts`; `what` they are, if too many to print.

        facts: None on a rank for which the first one of its node speaks.
        """
        pairs = zip(self.names, gather(name, facts), strict=True)
        found = {name: each for name, each in pairs if each is not None}
        alike, unlike = [], []
        for key in dict.fromkeys(key for each in found.values() for key in each):
            groups: dict[str, list[str]] = {}
            for node, each in found.items():
                groups.setdefault(each.get(key, "none"), []).append(node)
            if len(groups) == 1:
                alike.append(f"{key} {next(iter(groups))}".strip())
                continue
            ordered = sorted(groups.items(), key=lambda item: len(item[1]))  # the fewest first
            texts = [f"{shorten(nodes)}: {text}" for text, nodes in ordered]
            unlike.append(f"{key} {'; '.join(texts[:MOST])}".strip())
        wrong = "; ".join(unlike[:MOST] + ["..."] * (len(unlike) > MOST))
        self.row(name, f"{len(alike)} {what}" if what else ", ".join(alike), wrong, is_fault)

    def check_clocks(self) -> None:
        gather("before the clocks", None)  # which all leave at the same time
        found = gather("clocks", time.time())
        off = {name: at - found[0] for name, at in zip(self.names, found, strict=True)}
        texts = [f"{name} by {s:+.1f} s" for name, s in off.items() if abs(s) > CLOCK_SECONDS]
        self.row("clocks", f"within {max(map(abs, off.values())):.2g} s", shorten(texts))

    def check_output(self, folder: Path) -> None:
        """Look whether rank 0 can write there and others see it; leave nothing, make no folder."""
        here = next(path for path in (folder, *folder.parents) if path.exists())
        probe = here / gather("name", f".check-{secrets.token_hex(8)}")[0]
        try:
            if distributed.is_rank_zero():
                probe.touch()
            gather("written", None)
            deadline = time.monotonic() + SEEN_SECONDS
            while not probe.exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            seen = gather("output", probe.exists())
        except OSError as error:
            what = f"--output-dir {folder}: cannot be written ({error.strerror})"
            raise UserError(what) from None
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()  # whoever is the first
        blind = {name: None for name, sees in zip(self.names, seen, strict=True) if not sees}
        apart = f"not shared: {shorten([*blind])} cannot see what rank 0 writes" if blind else ""
        free = gather("disk", shutil.disk_usage(here).free)[0] / 1e9
        self.row("output", f"{folder}: {free:.3g} GB free", apart)

    def check_all_reduce(self, device: torch.device) -> None:
        own = [_time(torch.zeros(count, device=device)) for count in (1, FLOATS)]
        small, large = (max(each) for each in zip(*gather("all-reduce", own), strict=True))
        text = f"{small * 1e3:.2g} ms for one number, {4 * FLOATS / large / 1e9:.2g} GB/s"
        self.row("all-reduce", text)


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "torchvision", "numpy")},
        "CUDA": torch.version.cuda or torch.version.hip or "none",
        "cuDNN": str(torch.backends.cudnn.version() or "none"),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else "none",
        "JPEGs by": images.decoder(),
    }


def checksums(root: Path) -> dict[str, str]:
    """Return a checksum of each file below `root` that this program has imported."""
    files = (getattr(module, "__file__", None) for module in [*sys.modules.values()])
    paths = sorted({Path(file).resolve() for file in files if file})
    own = [path for path in paths if path.is_relative_to(root) and path.is_file()]
    own = [path for path in own if "site-packages" not in path.parts]  # of a .venv
    return {str(path.relative_to(root)): _checksum(path) for path in own}


def _checksum(path: Path) -> str:
    return f"{zlib.crc32(path.read_bytes()):08x}"


def hardware(device: torch.device) -> dict[str, str]:
    module = torch.get_device_module(device)
    if device.type == "cpu" or not hasattr(module, "get_device_properties"):
        return {"kind": device.type}
    found = module.get_device_properties(device)
    return {"GPU": f"{found.name}, {found.total_memory / 2**30:.0f} GiB"}


def list_data(data: Path) -> str:
    """Return how many files are in `data`, and a checksum of their names and sizes."""
    if not data.is_dir():
        raise UserError(f"{data}: no such folder")
    paths = [Path(parent, name) for parent, _, names in folders.walk(data) for name in names]
    lines = []
    for number, path in enumerate(sorted(paths)):
        size = path.stat().st_size if number < SIZED else ""
        text = _checksum(path) if path.suffix in TEXTS else ""
        lines.append(f"{path.relative_to(data)} {size} {text}")
    checksum = zlib.crc32("\n".join(lines).encode(errors="surrogateescape"))
    return f"{data}: {len(lines)} files (checksum {checksum:08x})"


def _time(tensor: torch.Tensor, times: int = 5) -> float:
    """Return how many seconds an all-reduce of `tensor` takes: the median of some."""
    found = []
    for _ in range(times + 1):
        start = time.perf_counter()
        dist.all_reduce(tensor)
        if tensor.device.type != "cpu":
            torch.accelerator.synchronize(tensor.device)
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])
