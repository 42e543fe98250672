"""Which collectives each rank has started, and from which line: do all ranks do the same?

A collective returns once all ranks have started it. Ranks that start others, or the same in another
order, wait for each other or get wrong results. torch's flight recorder keeps the last ones of each
rank (TORCH_FR_BUFFER_SIZE, 2000), at no cost that could be measured.
"""

import contextlib
import functools
import os
import pickle
import re
import sysconfig
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch._C import _distributed_c10d

ROOT = str(Path(__file__).resolve().parents[2])
LIBRARIES = tuple(  # where packages are; not "data", which is /usr for the system's Python
    os.path.join(os.path.realpath(sysconfig.get_path(name)), "")
    for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
)
WINDOW = 1500  # collectives that are compared; those of other groups fill the recorder, too
KEYS = {"collective_seq_id", "frames", "input_dtypes", "input_sizes", "is_p2p", "process_group"}
KEYS |= {"profiling_name", "retired", "state"}  # of an entry, in the versions of torch known here
APART = re.compile(r"\S*barrier|(broadcast|reduce|scatter|gather)\b")  # in an if and its else
UNEVEN = ("alltoall", "all_to_all", "scatter", "gather")  # shapes may differ between ranks
DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Byte": "uint8"}
DTYPES |= {"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8"}


class Collective(NamedTuple):
    """One that a rank has started: its number, what it does, and the lines that led to it.

    lines: "FILE:LINE" in the files of this project, the innermost last; none if it was started in
    C++, as DDP does on GPUs.
    """

    number: int
    what: str
    lines: tuple[str, ...]

    @property
    def own(self) -> tuple[str, ...]:
        """Return the lines outside the machinery."""
        return tuple(line for line in self.lines if not is_machinery(line))

    @property
    def key(self) -> tuple:
        """Return what has to be the same on all ranks: what it does, and from which lines.

        Not the lines in engine/, which may differ, as in rank_zero_first; and none of those that
        ranks often write apart, such as the sender and the receivers of a broadcast.
        """
        return self.what, () if APART.match(self.what) else self.own

    @property
    def place(self) -> str:
        """Return the innermost line outside the machinery, or ""."""
        return self.own[-1] if self.own else ""

    def __str__(self) -> str:
        return f"{self.what} at {self.place}" if self.place else self.what


def read() -> tuple[list[Collective], Collective | None]:
    """Return the last collectives that this rank has started, and the one that it waits in, if any.

    Those of the group of all ranks; an empty list if torch records none.
    """
    entries = _entries()
    started = [_collective(entry) for entry in entries]
    pairs = zip(started, entries, strict=True)
    return started, next((each for each, entry in pairs if not _is_finished(entry)), None)


def _entries() -> list[dict]:
    """Return what torch has recorded of the group of all ranks, the oldest first."""
    # It looks for compiled code in torch._inductor, whose import takes a second and 40 MB.
    stub = vars(torch).setdefault("_inductor", SimpleNamespace())
    try:
        entries = _dump()
    finally:
        if isinstance(stub, SimpleNamespace) and vars(torch).get("_inductor") is stub:
            del vars(torch)["_inductor"]
    known = (each for each in entries if each.keys() >= KEYS)
    return [e for e in known if e["process_group"][1] == "default_pg" and not e["is_p2p"]]


def _dump() -> list[dict]:
    """Return what torch has recorded of all groups."""
    private = vars(_distributed_c10d)  # torch's stubs lack some of them
    if torch.distributed.get_backend() != "nccl":
        return pickle.loads(private["_dump_fr_trace"]()).get("entries", [])
    if entries := pickle.loads(private["_dump_nccl_trace"]()).get("entries"):
        return entries
    with contextlib.suppress(TypeError):  # from torch 2.15 on "nccl" is "nccl2"; before, an error
        return pickle.loads(private["_dump_fr_trace"](backend="nccl2")).get("entries", [])
    return []


def _collective(entry: Mapping) -> Collective:
    return Collective(entry["collective_seq_id"], _describe(entry), _lines(entry["frames"]))


def _is_finished(entry: Mapping) -> bool:
    return entry["retired"] or entry["state"] == "completed"


def _describe(entry: Mapping) -> str:
    name = entry["profiling_name"].split(":")[-1]
    files = [frame["filename"] for frame in entry["frames"]]
    own = next((i for i, file in enumerate(files) if _relative(file)), len(files))
    by = " ".join(files[:own])
    if name == "all_reduce" and ("autograd" in by or not files):
        name = "DDP's gradients"
    elif os.path.join("nn", "parallel", "distributed.py") in by:
        name = f"DDP's {name}"
    if name in UNEVEN or not entry["input_sizes"]:
        return name
    shape, dtype = tuple(entry["input_sizes"][0]), entry["input_dtypes"][0]
    return f"{name} {shape} {DTYPES.get(dtype, dtype.lower())}"


@functools.cache
def _relative(file: str) -> str:
    """Return the path of a file of this project, relative to it; "" for other files."""
    path = os.path.realpath(file)
    is_own = path.startswith(os.path.join(ROOT, "")) and not path.startswith(LIBRARIES)
    return os.path.relpath(path, ROOT) if is_own and not file.startswith("<") else ""


def _lines(frames: Iterable[Mapping]) -> tuple[str, ...]:
    places = (place(frame["filename"], frame["line"]) for frame in frames)
    return tuple(reversed([place for place in places if place]))


def place(file: str, line: int | None) -> str:
    """Return "FILE:LINE" of a file of this project, and "" of others."""
    return f"{name}:{line}" if (name := _relative(file)) else ""


def is_machinery(place: str) -> bool:
    """Return whether a line is of engine/, which people do not edit."""
    return place.startswith(os.path.join("engine", ""))


class Checksum:
    """Of the collectives since the last time: the same on all ranks if they are."""

    def __init__(self) -> None:
        self.until = 0  # the number of the last that was counted
        self.compute()

    def compute(self) -> int:
        """Return it, below 2**52; 0 if they are not known. At most the last WINDOW count."""
        entries = _entries()
        now = entries[-1]["collective_seq_id"] if entries else self.until
        first, self.until = max(self.until + 1, now - WINDOW), now
        recent = [entry for entry in entries if entry["collective_seq_id"] >= first]
        if not recent or recent[0]["collective_seq_id"] != first:
            return 0
        return zlib.crc32(repr([_collective(entry).key for entry in recent]).encode()) or 1
