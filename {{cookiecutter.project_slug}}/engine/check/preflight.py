"""The table that `./launch.sh --check` prints: what the ranks have found, and a line of verdict.

Values travel through the process group's store: a rank that hangs is named, and a network that is
broken does not keep the rest of the table from being printed.
"""

import base64
import contextlib
import json
import os
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from engine.errors import LineError, UserError, shorten
from engine.ranks import distributed, environment, explaining, failures, process, protocol

T = TypeVar("T")

LIMIT = 60  # seconds that a rank may take for a step
GONE_SECONDS = 10  # for this rank to notice by itself that the store has gone
MOST = 4  # nodes, or groups of ranks, that are printed one by one


def end_with_others() -> None:
    """Have a thread end this process after another rank's error, even if this rank hangs."""
    threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    status, seconds = 1, GONE_SECONDS
    with contextlib.suppress(RuntimeError):  # the store has gone, with rank 0
        while (found := failures.status_of_failure()) is None:
            time.sleep(1)
        status, seconds = found, 1  # for that rank to print its error first
    time.sleep(seconds)
    process.exit_now(status)


def pack(text: str) -> str:
    """Return `text` in fewer characters: a value in the store has at most 8 MiB."""
    return base64.b85encode(zlib.compress(text.encode(errors="surrogateescape"))).decode()


def unpack(value: bytes) -> str:
    return zlib.decompress(base64.b85decode(value)).decode(errors="surrogateescape")


def gather(step: str, value: T) -> list[T]:
    """Return the ranks' `value`s, which JSON can hold; a UserError names ranks that do not come."""
    store, ranks = distributed.store(), range(distributed.world_size())
    keys, done = [f"check/{step}/{rank}" for rank in ranks], f"check/{step}"
    store.set(keys[distributed.rank()], json.dumps(value))
    if distributed.is_rank_zero():
        for _ in range(LIMIT):  # between the waits Python hears signals
            with contextlib.suppress(dist.DistError):
                store.wait(keys, timedelta(seconds=1))
                break
        missing = [rank for rank in ranks if not store.check([keys[rank]])]
        texts = [] if missing else [text.decode() for text in store.multi_get(keys)]
        store.set(done, pack(json.dumps([missing, texts])))
    missing, texts = [0], []
    with contextlib.suppress(dist.DistError):
        store.wait([done], timedelta(seconds=2 * LIMIT))
        missing, texts = json.loads(unpack(store.get(done)))
    if missing:
        at = [store.get(protocol.process_of(rank)).decode().split()[0] for rank in missing[:MOST]]
        who = f"{explaining.name(missing)} on {', '.join(dict.fromkeys(at))}"
        raise UserError(f"not ready: {who}: not done with this step after {LIMIT} s: {step}")
    return [json.loads(text) for text in texts]


def attempt(function: Callable[..., T], *args: object) -> tuple[T | None, str]:
    """Return what `function(*args)` returns and ""; or None and what is wrong."""
    try:
        return function(*args), ""
    except LineError as error:
        return None, str(error)
    except OSError as error:
        return None, f"{error.filename}: {error.strerror}" if error.filename else str(error)


class Table:
    """Prints rows on rank 0. All ranks call each method, and come to the same verdict.

    nodes: their names. node_of: the number of each rank's node. firsts: the first rank of each.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.notes: list[str] = []
        name = environment.node()
        key = os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or name
        found = gather("nodes", (key, name))
        keys = [key for key, _ in found]
        known = [*dict.fromkeys(keys)]
        self.node_of = [known.index(key) for key in keys]
        self.firsts = [keys.index(key) for key in known]
        self.is_first = distributed.rank() in self.firsts
        self.nodes = [found[rank][1] for rank in self.firsts]
        if len(set(self.nodes)) < len(self.nodes):
            self.nodes = [f"{name} ({number})" for number, name in enumerate(self.nodes)]
        counts = Counter(self.node_of)
        unequal = "the nodes have unequal numbers of ranks" if len({*counts.values()}) > 1 else ""
        ranks = self.spread([f"{counts[number]} rank(s)" for number in self.node_of])
        self.row("nodes", f"{len(known)}: {shorten(self.nodes)}; {ranks} on each", note=unequal)

    def row(self, name: str, text: str, fault: str = "", note: str = "") -> None:
        """Print a row. fault: what keeps the job from running well. note: what may be meant so."""
        mark = "FAULT" if fault else "note" if note else "ok"
        line = "; ".join(filter(None, [fault or note, text]))
        distributed.say(f"{mark:<7}{name:<13}{line}")
        self.faults += [f"{name}: {fault}"] if fault else []
        self.notes += [f"{name}: {note}"] if note else []

    def verdict(self) -> int:
        """Print the last line; return the exit status."""
        found = self.faults or self.notes
        more = f"; and {len(found) - 1} more above" if len(found) > 1 else ""
        if self.faults:
            line = f"not ready: {found[0]}{more}"
        else:
            line = f"ready: {len(self.node_of)} rank(s) on {len(self.nodes)} node(s)"
            line += f", but {found[0]}{more}" if found else ""
        distributed.say(line)
        return protocol.MISTAKE if self.faults else 0

    def on_nodes(self, step: str, function: Callable[..., T], *args: object) -> list:
        """Call `function(*args)` on the first rank of each node; return for each rank its node's.

        That is a pair, as of `attempt`.
        """
        found = gather(step, attempt(function, *args) if self.is_first else None)
        return [found[self.firsts[number]] for number in self.node_of]

    def who(self, ranks: Sequence[int]) -> str:
        """Return such as "n1, n2", "rank 3 on n2" or, with one node, "ranks 0, 1"."""
        nodes = sorted({self.node_of[rank] for rank in ranks})
        names = shorten([self.nodes[number] for number in nodes])
        is_whole = len(ranks) == sum(number in nodes for number in self.node_of)
        if is_whole and len(self.nodes) > 1:
            return names
        return explaining.name(ranks) + (f" on {names}" if len(self.nodes) > 1 else "")

    def spread(self, texts: Sequence[str]) -> str:
        """Return what the ranks have in common, or who has what: the fewest first."""
        groups: dict[str, list[int]] = {}
        for rank, text in enumerate(texts):
            groups.setdefault(text, []).append(rank)
        if len(groups) == 1:
            return texts[0]
        ordered = sorted(groups.items(), key=lambda item: len(item[1]))
        parts = [f"{self.who(ranks)}: {text}" for text, ranks in ordered]
        if 2 * len(ordered[-1][1]) > len(texts) and len(self.nodes) > 2:
            parts[-1] = f"all others: {ordered[-1][0]}"
        if len(parts) > MOST + 1:
            parts[MOST:-1] = [f"{len(parts) - MOST - 1} more kinds"]
        return "; ".join(parts)

    def numbers(self, values: Sequence[float], form: Callable[[float], str]) -> str:
        """Return the least of each node's ranks; of many nodes the range, with the extremes."""
        least = self.least(values)
        if len({form(value) for value in least}) == 1:
            return form(least[0])
        pairs = sorted(zip(least, self.nodes, strict=True))
        if len(pairs) <= MOST:
            return ", ".join(f"{name} {form(n)}" for n, name in zip(least, self.nodes, strict=True))
        (low, first), (high, last) = pairs[0], pairs[-1]
        return f"{form(low)} ({first}) to {form(high)} ({last})"

    def least(self, values: Sequence[float]) -> list[float]:
        """Return the least value of each node."""
        ranks = range(len(values))
        return [
            min(values[rank] for rank in ranks if self.node_of[rank] == number)
            for number in range(len(self.nodes))
        ]

    def compare(
        self, name: str, facts: Mapping[str, str], summary: str = "", is_fault: bool = True
    ) -> None:
        """Print whether all ranks have the same `facts`.

        summary: printed for what is alike; by default all of it.
        """
        found = gather(name, facts)
        keys = dict.fromkeys(key for each in found for key in each)
        texts = {key: [each.get(key, "none") for each in found] for key in keys}
        alike = [f"{key} {values[0]}" for key, values in texts.items() if len({*values}) == 1]
        differing = [f"{key} {self.spread(texts[key])}" for key in keys if len({*texts[key]}) > 1]
        text = "; ".join(differing[:MOST])
        if len(differing) > MOST:
            text += f"; and {len(differing) - MOST} more"
        problem = (text, "") if is_fault else ("", text)
        self.row(name, summary or ", ".join(alike) or "none", *problem)
