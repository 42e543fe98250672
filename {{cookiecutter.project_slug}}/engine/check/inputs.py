"""Whether each node has the same data, and how fast its ranks read and decode it."""

import itertools
import os
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from engine.check.nodes import size
from engine.check.preflight import Table, attempt, gather, pack, unpack
from engine.data import listing, prepared
from engine.data.format import NAME, Format
from engine.data.images import open_image
from engine.errors import UserError, shorten
from engine.ranks import distributed

SIZED = 20_000  # files, at most, whose sizes are compared: each may take a network disk 1 ms
NAMED = 100_000  # lines of the list in which the first difference is looked for
PICKED = 256  # images that the ranks of a node read and decode
SECONDS = 1.0  # for reading, and for decoding
TEXTS = ("train.csv", "val.csv", "classes.txt", NAME)  # whose contents are compared


def check_data(table: Table, data: Path) -> list[str]:
    """Compare what the nodes have in `data`; return the paths of some images, or none."""
    lines: list[str] = []

    def look() -> tuple[str, list[str]]:
        kind, found, paths = list_data(data)
        lines.extend(found)
        checksum = zlib.crc32("\n".join(found).encode(errors="surrogateescape"))
        return f"{kind} (checksum {checksum:08x})", paths

    found = table.on_nodes("data", look)
    fault = text = table.spread([error or value[0] for value, error in found])
    if not any(error for _, error in found):
        is_alike = len({value[0] for value, _ in found}) == 1
        fault = "" if is_alike else f"{text}; {find_difference(table, lines)}"
    table.row("data", "" if fault else f"{data}: {text}", fault)
    return [] if fault else found[0][0][1]


def list_data(data: Path) -> tuple[str, list[str], list[str]]:
    """Return what `data` is, a line for each file in it, and the paths of some images."""
    if prepared.is_store(data):
        paths = [data / name for name in ("index.json", "pixels.bin", "rows.bin")]
        lines = [f"{path.name} ({path.stat().st_size} bytes)" for path in paths]
        return "prepared", [*lines, f"{zlib.crc32(paths[0].read_bytes()):08x}"], []
    if not data.is_dir():
        raise UserError(f"{data}: no such folder")
    files = [
        os.path.join(parent, name)
        for parent, _, names in listing.walk(data)
        for name in sorted(names)
        if listing.is_image(name) or name in TEXTS
    ]
    every = 1 << (len(files) // SIZED).bit_length()
    lines = [describe(path, data, number % every == 0) for number, path in enumerate(files)]
    images = [path for path in files if is_picture(path)]
    return f"{len(files)} files", lines, images[:: max(1, len(images) // PICKED)][:PICKED]


def is_picture(path: str) -> bool:
    """Return whether a file is an image, and no mask by its folder."""
    folder, name = os.path.split(path)
    return listing.is_image(name) and os.path.basename(folder) != "masks"


def describe(path: str, data: Path, has_size: bool) -> str:
    """Return a path below `data`, with the file's size, or a checksum of one of TEXTS."""
    text = os.path.relpath(path, data)
    if os.path.basename(path) in TEXTS:
        return f"{text} ({zlib.crc32(Path(path).read_bytes()):08x})"
    return f"{text} ({os.path.getsize(path)} bytes)" if has_size else text


def find_difference(table: Table, lines: list[str]) -> str:
    """Return which line one of the nodes has, and node 0 has not, or the other way round."""
    mine, store = sorted(lines)[:NAMED], distributed.store()
    if distributed.is_rank_zero():
        store.set("check/lines", pack("\n".join(mine)))

    def compare() -> str:
        others = unpack(store.get("check/lines")).split("\n")
        pairs = itertools.zip_longest(mine, others, fillvalue=chr(sys.maxunicode))
        here, there = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
        number = table.node_of[distributed.rank()] if here < there else 0
        return f"only {table.nodes[number]} has {min(here, there)!r}" if here else ""

    texts = (text for text, _ in table.on_nodes("difference", compare) if text)
    return next(texts, "in another order")


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

    def measure() -> tuple[float, float]:
        return per_second(read, own), per_second(decode, itertools.cycle(own))

    found = gather("reading", attempt(measure))
    if any(error for _, error in found):
        errors = table.spread([error or "no error" for _, error in found])
        return table.row("reading", "", note=f"not measured: {errors}")
    speeds, rates = zip(*(value for value, _ in found), strict=True)
    text = table.numbers(speeds, lambda speed: f"{size(speed)}/s")
    table.row("reading", f"{text} by one rank (maybe from memory, not from the disk)")
    least, count = table.least(rates), max(workers, 1)
    slow = [n for n, rate in enumerate(least) if rate < statistics.median(least) / 2]
    note = f"slow on {shorten([table.nodes[number] for number in slow])}" if slow else ""
    text = f"{table.numbers(rates, '{:.0f}'.format)} images/s by one loader worker; by the "
    text += f"{count} of a rank at best {count * min(least):.0f}"
    table.row("decoding", text, note=note)


def per_second(measure: Callable[[str], int], paths: Iterable[str]) -> float:
    """Return the sum of `measure` over those of `paths` that there is time for, per second."""
    total, start = 0, time.perf_counter()
    for path in paths:
        total += measure(path)
        if time.perf_counter() > start + SECONDS:
            break
    return total / (time.perf_counter() - start)
