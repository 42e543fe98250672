"""Launchers of several nodes on this host, with a function in the place of torchrun."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist
from forked import fork, run, wait
from ports import free_port

from engine.errors import UserError
from engine.ranks import agreeing, joining, launcher, protocol, reaching
from engine.ranks.environment import Nodes


class Launchers:
    """Launchers, started by `start`, whose torchrun ends as `act(node, which start)` says."""

    def __init__(self, folder: str, name: str, count: int, act: Callable[[int, int], int]) -> None:
        self.folder, self.name, self.count, self.act = folder, name, count, act
        self.port = free_port()
        reaching.NOTICE_SECONDS = joining.ROLL_SECONDS = 1
        joining.LOOK_SECONDS, agreeing.END_SECONDS = 0.1, 20

    def start(self, node: int, restarts: int = 2, limit: int = 30, launch_id: str = "") -> int:
        def begin() -> None:
            os.environ.update({"JOIN_TIMEOUT": str(limit), protocol.LAUNCH_ID: launch_id})
            if not launch_id:
                del os.environ[protocol.LAUNCH_ID]
            left, begun = [restarts], 0
            launcher.restart = lambda _, restarts: left.append(restarts)

            def torchrun(nodes: Nodes, agreement: agreeing.Agreement, _: object) -> int:
                line = f"start {begun}, id {agreement.launch_id[:4]}, {agreement.restarts} left"
                print(line, flush=True)
                return self.act(node, begun)

            launcher.launch = torchrun
            while len(left) > begun:  # as execv would
                of = Nodes(self.count, node, 1, "127.0.0.1", self.port)
                status, begun = launcher.run(of, left[-1]), begun + 1
            sys.exit(status)

        return fork(begin, f"{self.folder}/{self.name} {node}")

    def read(self, node: int, end: str) -> str:
        path = Path(f"{self.folder}/{self.name} {node}.{end}")
        return path.read_text() if path.exists() else ""

    def until(self, node: int, word: str, end: str = "err") -> None:
        deadline = time.monotonic() + 30
        while word not in self.read(node, end):
            assert time.monotonic() < deadline, (word, self.read(node, end))
            time.sleep(0.05)

    def end(self, *pids: int) -> list:
        """Return the statuses, and what each node has said: a pair for each."""
        statuses = wait(list(pids), 60)
        said = [[self.read(node, end) for end in ("out", "err")] for node in range(self.count)]
        return [statuses, *said]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def counters_diverge(folder: str) -> list:
    """Node 0 was here before; node 1 is new; the first start fails on both."""
    both = Launchers(folder, "diverge", 2, lambda _, begun: 1 - begun)
    return both.end(both.start(0, restarts=2, launch_id="abcdef"), both.start(1, restarts=5))


def one_ends_for_good(folder: str, status: int, other: int) -> list:
    both = Launchers(folder, f"for good {status}", 2, lambda node, _: other if node else status)
    began = time.monotonic()
    return [*both.end(*(both.start(node) for node in range(2))), time.monotonic() - began]


def dies_while_it_waits(folder: str) -> list:
    """A launcher of node 1 is killed and not replaced until all others are there."""
    three = Launchers(folder, "dies", 3, lambda *_: 0)
    pids = [three.start(node) for node in (0, 1)]
    three.until(0, "here: 0-1 (")
    kill(pids.pop())
    pids.append(three.start(2))
    three.until(0, "for node 1 of 3")
    return three.end(*pids, three.start(1))


def late(folder: str) -> list:
    """Another launcher of node 1, while the first runs; that is killed then."""

    def act(node: int, begun: int) -> int:
        is_first = not Path(folder, "dead").exists()
        while not Path(folder, "dead").exists():
            time.sleep(0.05)
        return int(is_first)

    two = Launchers(folder, "late", 2, act)
    pids = [two.start(node) for node in range(2)]
    two.until(0, "start", "out")
    two.until(1, "start", "out")
    refused = two.start(1, restarts=0)
    assert wait([refused]) == [2]
    pids.append(two.start(1, restarts=3))
    two.until(1, "for the next start")
    kill(pids.pop(1))
    Path(folder, "dead").touch()
    return two.end(*pids)


def absent(folder: str) -> dict:
    """What is said of nodes that do not come, or of node 0."""
    five = Launchers(folder, "absent", 5, lambda *_: 0)
    alone = Launchers(folder, "alone", 2, lambda *_: 0)
    pids = [five.start(node, limit=3) for node in (0, 1, 4)]
    return {"alone": alone.end(alone.start(1, limit=2)), "absent": five.end(*pids)}


def crowd(count: int, absent: int) -> list[str]:
    """What the ranks of a crowd, in threads, say of one that does not come."""
    store, begin = dist.HashStore(), threading.Barrier(count - 1)

    def come(rank: int) -> str:
        begin.wait()
        try:
            joining.Meeting(store, "rank", rank, count, reaching.Clock(3), False).join()
        except UserError as error:
            return str(error)
        return "joined"

    with ThreadPoolExecutor(count) as threads:
        return [*threads.map(come, (rank for rank in range(count) if rank != absent))]


def nobody_opens() -> str:
    """What a rank says whose number 0 does not come to the store that torchrun holds."""
    meeting = joining.Meeting(dist.HashStore(), "rank", 3, 8, reaching.Clock(0.2), True, True)
    try:
        meeting.join()
    except UserError as error:
        return str(error)
    return "joined"


def unreachable(folder: str) -> list:
    """Ranks of two hosts whose own names resolve to loopback addresses."""

    def patch() -> None:
        socket.gethostname = lambda: f"host{os.environ['RANK']}"
        socket.gethostbyname = lambda _: "127.0.1.1"

    statuses = run(2, "--dist-timeout", 20, patch=patch, output=f"{folder}/unreachable")
    return [statuses, Path(f"{folder}/unreachable.err").read_text()]
