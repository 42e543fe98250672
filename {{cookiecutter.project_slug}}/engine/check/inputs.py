"""Whether each node has the same data, and how fast its ranks read and decode it."""

import contextlib
import itertools
import os
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from engine.check.nodes import size
from engine.check.preflight import Table, attempt, gather
from engine.data import prepared
from engine.data.images import Format, open_image
from engine.errors import shorten
from engine.ranks import distributed

SIZED = 20_000  # files, at most, whose sizes are compared: each may take a network disk 1 ms
NAMED = 100_000  # lines of the list in which the first difference is looked for
PICKED = 256  # images that the ranks of a node read and decode
SECONDS = 2.0  # for reading, and for decoding
FindSamples = Callable[[Path], tuple[Sequence[tuple], Sequence[tuple], Sequence[str]]]


def check_data(table: Table, data: Path, find_samples: FindSamples) -> list[str]:
    """Compare what the nodes have in `data`; return the paths of some images, none after a fault.

    find_samples: of dataset.py.
    """
    lines: list[str] = []

    def look() -> tuple[str, list[str]]:
        found, picks = list_data(data, find_samples)
        lines.extend(found)
        checksum = zlib.crc32("\n".join(found).encode(errors="surrogateescape"))
        return f"{len(found) - 1} samples (checksum {checksum:08x})", picks

    found = table.on_nodes("data", look)
    text = table.spread([error or value[0] for value, error in found])
    fault = text if any(error for _, error in found) else ""
    if not fault and len({value[0] for value, _ in found}) > 1:
        fault = f"{text}; {find_difference(table, lines)}"
    table.row("data", f"{data}: {text}" if not fault else "", fault)
    return [] if fault else found[0][0][1]


def list_data(data: Path, find_samples: FindSamples) -> tuple[list[str], list[str]]:
    """Return a line for the classes and for each sample, and the paths of some images."""
    if prepared.is_store(data):
        paths = [data / name for name in ("index.json", "pixels.bin", "rows.bin")]
        index = f"index {zlib.crc32(paths[0].read_bytes()):08x}"
        return [index, *(f"{path.name} ({path.stat().st_size} bytes)" for path in paths)], []
    with contextlib.redirect_stdout(None):  # training says it
        *parts, classes = find_samples(data)
    every = 1 << (sum(map(len, parts)) // SIZED).bit_length()
    lines = [f"classes {', '.join(classes)}"]
    for name, samples in zip(("train", "val"), parts, strict=True):
        for number, sample in enumerate(samples):
            words = [str(part).removeprefix(f"{data}{os.sep}") for part in sample]
            for place, part in enumerate(sample if number % every == 0 else ()):
                if isinstance(part, str):
                    words[place] += f" ({os.path.getsize(part)} bytes)"
            lines.append(f"{name}: {', '.join(words)}")
    first = parts[0]
    return lines, [str(sample[0]) for sample in first[:: max(1, len(first) // PICKED)]][:PICKED]


def find_difference(table: Table, lines: list[str]) -> str:
    """Return which line one of the nodes has, and node 0 has not, or the other way round."""
    mine, store = sorted(lines)[:NAMED], distributed.store()
    if distributed.is_rank_zero():
        text = "\n".join(mine).encode(errors="surrogateescape")
        store.set("check/lines", zlib.compress(text))  # type: ignore[arg-type]

    def compare() -> str:
        others = zlib.decompress(store.get("check/lines")).decode(errors="surrogateescape")
        pairs = itertools.zip_longest(mine, others.split("\n"), fillvalue=chr(sys.maxunicode))
        here, there = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
        number = table.node_of[distributed.rank()] if here < there else 0
        return f"; only {table.nodes[number]} has {min(here, there)!r}" if here else ""

    return next((text for text, _ in table.on_nodes("difference", compare) if text), "")


def check_reading(
    table: Table, paths: list[str], workers: int, image_size: int, format: Format
) -> None:
    """Measure how fast each rank reads and decodes the images `paths`."""
    own = paths[distributed.local_rank() :: distributed.local_world_size()] or paths
    torch.set_num_threads(1)  # as in a loader worker

    def read(path: str) -> int:
        return len(Path(path).read_bytes())

    def decode(path: str) -> int:
        open_image(path, format).read(size=(image_size, image_size))
        return 1

    (speed, unread), (rate, damage) = (
        attempt(per_second, read, own),
        attempt(per_second, decode, own),
    )
    found = gather("reading", (speed or 0.0, rate or 0.0, unread or damage))
    speeds, rates, errors = zip(*found, strict=True)
    if any(errors):
        return table.row("reading", "", table.spread(errors))
    text = table.numbers(speeds, lambda speed: f"{size(speed)}/s")
    table.row("reading", f"{text} by one rank (maybe from memory, not from the disk)")
    least, count = table.least(rates), max(workers, 1)
    slow = [n for n, rate in enumerate(least) if rate < statistics.median(least) / 2]
    note = f"slow on {shorten([table.nodes[number] for number in slow])}" if slow else ""
    text = f"{table.numbers(rates, '{:.0f}'.format)} images/s by one loader worker"
    table.row(
        "decoding", f"{text}; by the {count} of a rank at best {count * min(least):.0f}", note=note
    )


def per_second(measure: Callable[[str], int], paths: list[str]) -> float:
    """Return the sum of `measure` over some of `paths`, per second."""
    total, start = 0, time.perf_counter()
    for path in paths:
        total += measure(path)
        if time.perf_counter() > start + SECONDS:
            break
    return total / (time.perf_counter() - start)
