"""Whether all ranks have the same data, code and versions."""

import functools
import os
import sys
import zlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from ddpkit import files
from ddpkit.data import samples
from ddpkit.data.loading import Loader
from ddpkit.errors import UserError
from ddpkit.ranks import distributed, environment, process
from ddpkit.version import FOLDER, __version__


def check_alike(classes: Sequence[str], **loaders: Any) -> None:
    """Raise a UserError, on all ranks, unless they have the same data, code and versions.

    Of a loader of one's own each rank may have its share, which has no list of samples.
    """
    # What this rank has; of what differs, a line tells the first.
    mine = {f"class {n}": f"class {n} {name}" for n, name in enumerate(classes)}
    mine["classes"] = f"{len(classes)} classes"
    mine["version"] = f"ddpkit {__version__}"
    mine["torch"] = f"torch {torch.__version__}"
    for use, loader in loaders.items():
        data = samples.dataset_of(loader)
        is_ours = isinstance(loader, Loader)
        if is_ours or samples.listed(data):
            mine[use] = f"{samples.fingerprint(data)} for {use}"  # how many, and which
        # Without a list of files, the first sample tells whether the data are the same.
        is_listed = any(samples.listed(each) for each, _ in samples.places(data, 0))
        if is_ours and not is_listed and len(data) and not distributed.any_debugged():
            for part, checksum in samples.first_checksums(loader).items():
                told = f"a first {part} for {use} with checksum {checksum:08x}"
                mine[f"{part} for {use}"] = told
    for name, checksum in code().items():
        mine[name] = f"{name} with checksum {checksum:08x}"
    ranks = distributed.gather_objects((environment.own_rank(), mine))
    first, expected = ranks[0]
    for rank, its in ranks:
        for name, here in expected.items():
            there = its.get(name, here)  # of files those that both have imported
            if there != here:
                line = f"{rank} has {there}, {first} has {here}"
                raise UserError(
                    f"{line}; all ranks need the same data, code and versions"
                )


def code() -> dict[str, int]:
    """Return a checksum of each file that is imported of the project, and one of ddpkit."""
    sums = {}
    for name, module in modules().items():
        sums[name] = checksum(str(module.__file__))
    library = sorted(FOLDER.rglob("*.py"))
    sums["ddpkit"] = zlib.crc32(b"".join(path.read_bytes() for path in library))
    return sums


@functools.cache
def checksum(file: str) -> int:
    """Return that of a file as it was when it was first asked for, near its import."""
    return zlib.crc32(files.read_file(file))


def modules() -> dict[str, ModuleType]:
    """Return the modules that are imported of its repository, by path, but for ddpkit's."""
    found = {}
    for module in list(sys.modules.values()):
        path = own_path(getattr(module, "__file__", None))
        if path:
            found[path] = module
    return found


def own_path(file: str | None) -> str:
    """Return the path of a file of the project, in its repository; of ddpkit's, none."""
    path = process.within(process.repository(process.project()), file or "")
    return "" if "ddpkit" in path.split(os.sep) else path
