"""The store at MASTER_ADDR: whether somebody answers there, or who has taken its port."""

import contextlib
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from engine.errors import UserError
from engine.ranks import environment

Store = TypeVar("Store", bound=dist.Store)
NOTICE_SECONDS = 30  # after which a line says for whom one waits; another at three times that, ...
BUSY_SECONDS = 5  # for the process that held the port before to end


class Clock:
    """How long something may take, and when to say that it does."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.end = seconds, time.monotonic() + seconds
        self.notice = min(NOTICE_SECONDS, seconds / 2)

    def left(self) -> float:
        return self.end - time.monotonic()

    def until_due(self) -> float:
        return self.notice - (self.seconds - self.left())

    def is_due(self) -> bool:
        """Return whether it is time for another line."""
        is_due = self.until_due() <= 0
        self.notice *= 3 if is_due else 1
        return is_due


def say(line: str) -> None:
    with contextlib.suppress(OSError):  # a closed terminal
        print(line, file=sys.stderr, flush=True)


def find(
    connect: Callable[[timedelta], Store], host: str, port: int, clock: Clock, speaks: bool = True
) -> Store:
    """Return what `connect` returns once somebody answers at `host`; if it `speaks`, say who."""
    begun = clock.left()
    while True:
        try:
            return connect(timedelta(seconds=max(1, min(clock.left(), clock.until_due()))))
        except dist.DistError as error:
            line = explain(error, host, port)
            if not line:
                raise
            is_busy = "is in use" in str(line)
            if clock.left() <= 1 or (is_busy and begun - clock.left() > BUSY_SECONDS):
                raise line from None
            if clock.is_due() and speaks and not is_busy:
                say(f"{line} Trying for {clock.seconds:g} s")
            time.sleep(0.2)


def open_store(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return the store at the address that the launcher gives, and this rank's number, of how many.

    It is not known yet whether the others are there.
    """
    host, port, rank, size = environment.read_group()
    environment.wait_for_name(host)

    def connect(limit: timedelta) -> dist.Store:
        # of 1, so that rank 0 does not wait in here: `join` does, and tells for whom
        return next(dist.rendezvous("env://", world_size=1, timeout=limit))[0]

    clock, speaks = Clock(timeout.total_seconds()), int(os.environ.get("LOCAL_RANK", 0)) == 0
    store = find(connect, host, port, clock, speaks)
    store.set_timeout(timeout)
    return store, rank, size


def explain(error: dist.DistError, host: str, port: int) -> UserError | None:
    """Return a line for an error of the store that rank 0, or node 0, holds at `host`."""
    text = str(error)
    if re.search("EADDRINUSE|address already in use", text, re.IGNORECASE):
        return UserError(
            f"MASTER_PORT={port} is in use{_holder(port)}: end that, or use another port "
            f"(MASTER_PORT={port + 1}, the same on all nodes)"
        )
    if re.search("client socket has timed out|timed out after", text):
        where = f"MASTER_ADDR={host}, MASTER_PORT={port}"
        with contextlib.suppress(OSError):
            if socket.gethostbyname(host).startswith("127."):
                where += f" (a name of {environment.node()} itself)"
        return UserError(
            f"nobody answers at {where}: is rank 0 running there, "
            "does a firewall let this port through?"
        )
    return None


def _holder(port: int) -> str:
    """Return which process listens at `port`, as far as Linux tells this user."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
        rows = [line.split() for line in lines.splitlines() if f":{port:04X} " in line]
        inodes = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}  # it listens
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            with contextlib.suppress(OSError):  # another user's, or it has ended
                if str(link.readlink()) in inodes:
                    words = (link.parents[1] / "cmdline").read_text().replace("\0", " ").split()
                    return f" by process {link.parts[2]} ({' '.join(words)[:80]})"
    return ""
