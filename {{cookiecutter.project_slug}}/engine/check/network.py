"""How fast ranks reach each other: clocks, all-reduce, pairs of nodes, nccl's interface."""

import contextlib
import itertools
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from engine.check.preflight import MOST, Table, gather
from engine.errors import shorten
from engine.ranks import distributed, gpus

CLOCK_SECONDS = 1.0  # by which clocks may differ
FLOATS, PAIR_FLOATS = 2**23, 2**21  # that are sent at a time: 32 and 8 MiB
SMALL_TIMES, LARGE_TIMES = 20, 3
ROUNDS = 15  # of pairs, at most: with more nodes than that each meets some of the others


def check_clocks(table: Table) -> None:
    """Compare each node's clock with node 0's; half of the way there and back is subtracted."""
    store, rank, offset = distributed.store(), distributed.rank(), 0.0
    for other in table.firsts[1:]:
        turn, ping, pong = (f"check/{word}/{other}" for word in ("turn", "ping", "pong"))
        if rank == 0:
            store.set(turn, "")
            store.wait([ping])
            store.set(pong, repr(time.time()))
        elif rank == other:
            store.wait([turn])
            start = time.time()
            store.set(ping, "")
            answer = float(store.get(pong))
            offset = (start + time.time()) / 2 - answer
    found = gather("clocks", offset)
    offsets = [found[rank] for rank in table.firsts]
    most = max(map(abs, offsets))
    off = [
        f"{name} is {abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} {table.nodes[0]}"
        for name, seconds in zip(table.nodes, offsets, strict=True)
        if abs(seconds) > CLOCK_SECONDS
    ]
    text = f"within {most:.2g} s of each other" if len(offsets) > 1 else "one node"
    table.row("clocks", "" if off else text, note=shorten(off))


def check_all_reduce(table: Table, device: torch.device, gradients: float) -> None:
    """Measure all-reduce over all ranks. gradients: bytes that a training step reduces."""
    if len(table.node_of) == 1:
        return table.row("all-reduce", "one rank: nothing to reduce")
    small, large = torch.zeros(1, device=device), torch.zeros(FLOATS, device=device)
    latency = seconds(lambda: dist.all_reduce(small), device, SMALL_TIMES)
    speed = 4 * FLOATS / seconds(lambda: dist.all_reduce(large), device, LARGE_TIMES)
    found = gather("all-reduce", (latency, speed))
    latency, speed = max(pair[0] for pair in found), min(pair[1] for pair in found)
    text = f"{latency * 1e3:.2g} ms for one number, {speed / 1e9:.2g} GB/s for 32 MiB"
    each = f": {gradients / speed * 1e3:.0f} ms for {gradients / 1e6:.0f} MB of gradients"
    table.row("all-reduce", text + (each if gradients else ""))


def seconds(function: Callable[[], object], device: torch.device, times: int) -> float:
    """Return how long `function` takes on `device`, in seconds: the median of so many calls."""
    function()
    found = []
    for _ in range(times):
        wait(device)
        start = time.perf_counter()
        function()
        wait(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield pairs of `count` nodes: in each round a node is in one pair; after all it met each."""
    places: list[int] = [*range(count + count % 2)]  # with an odd count, one has nobody
    half = len(places) // 2
    for _ in places[1:]:
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < count]
        places.insert(1, places.pop())


def check_pairs(table: Table, device: torch.device) -> None:
    """Measure the way between the first ranks of each two nodes, of disjoint pairs at a time."""
    count, own = len(table.nodes), []
    if count == 1:
        return
    for pair in itertools.chain(*itertools.islice(rounds(count), ROUNDS)):
        ends = [table.firsts[node] for node in pair]
        if distributed.rank() in ends:
            own.append((*pair, *measure(ends, device)))
    rows = [row for found in gather("pairs", own) for row in found]
    text, slow = judge({(a, b): (latency, speed) for a, b, latency, speed in rows}, table.nodes)
    table.row("node pairs", text, note=slow)


def measure(ranks: list[int], device: torch.device) -> tuple[float, float]:
    """Return seconds for one number, one way, and bytes per second between this rank and another.

    ranks: both of them.
    """
    is_first = distributed.rank() == ranks[0]
    other = ranks[1] if is_first else ranks[0]

    def there_and_back(tensor: Tensor) -> None:
        for is_sender in (is_first, not is_first):
            (dist.send if is_sender else dist.recv)(tensor, other)

    small, large = torch.zeros(1, device=device), torch.zeros(PAIR_FLOATS, device=device)
    latency = seconds(lambda: there_and_back(small), device, SMALL_TIMES) / 2
    return latency, 8 * PAIR_FLOATS / seconds(lambda: there_and_back(large), device, LARGE_TIMES)


def judge(found: dict[tuple[int, int], tuple[float, float]], names: list[str]) -> tuple[str, str]:
    """Return a text on what `measure` has found of each pair of nodes, and which are slow.

    A node is as fast as the fastest of its pairs: it is slow at less than half of what nodes
    usually reach, and a pair at less than half of what both of its nodes do.
    """
    nodes, speeds, texts = range(len(names)), {}, {}
    for pair, (latency, speed) in found.items():
        speeds[pair] = speed
        ends = " to ".join(names[node] for node in pair)
        texts[pair] = f"{ends} {speed / 1e9:.2g} GB/s, {latency * 1e3:.2g} ms"
    best = [max(speed for pair, speed in speeds.items() if node in pair) for node in nodes]
    slow = [f"{names[n]} is slow" for n in nodes if best[n] < statistics.median(best) / 2]
    ordered = sorted(speeds, key=speeds.__getitem__)
    weak = [pair for pair in ordered if speeds[pair] < min(best[node] for node in pair) / 2]
    slow += [f"slow: {texts[pair]}" for pair in weak]
    is_many = len(ordered) > MOST
    some = (ordered[0], ordered[-1]) if is_many else sorted(ordered)
    start = f"{len(ordered)}, slowest and fastest: " if is_many else ""
    return start + "; ".join(texts[pair] for pair in some), shorten(slow)


def record_nccl() -> Path | None:
    """Have nccl write what it does to a file; call it before the process group is set up."""
    if not gpus.count() or "NCCL_DEBUG" in os.environ:
        return None
    handle, name = tempfile.mkstemp(prefix="nccl-")
    os.close(handle)
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=name)
    return Path(name)


def check_nccl(table: Table, record: Path | None) -> None:
    """Print which interfaces nccl has chosen, from the file of `record_nccl`."""
    if dist.get_backend() != "nccl":
        return
    text = "unset NCCL_DEBUG to see here which interfaces it uses"
    if record:
        text = ", ".join(interfaces(record.read_text(errors="replace"))) or "its log names none"
        with contextlib.suppress(OSError):
            record.unlink()
    table.row("nccl", table.spread(gather("nccl", text)))


def interfaces(text: str) -> list[str]:
    """Return what nccl's log, at NCCL_DEBUG=INFO, says of its choice of network."""
    found = re.findall(r"NCCL INFO (NET/\w+ ?: Using [^<\n]*|Using network \w+)", text)
    return [*dict.fromkeys(found)]
