"""The store at MASTER_ADDR: whether somebody answers there, or who has taken its port."""

import contextlib
import itertools
import os
import re
import socket
import sys
import tempfile
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
NAME_SECONDS = 60  # for a host's name to resolve
OWN_SECONDS = 30  # for an address that is not this machine's to lead here
LOOPBACK = "127.0.0.1"
BUSY_SECONDS = 5  # for the process that held the port before to end


class Clock:
    """How long something may take, and when to say that it does."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.end = seconds, time.monotonic() + seconds
        self.notice = min(NOTICE_SECONDS, seconds / 2)

    def left(self) -> float:
        return self.end - time.monotonic()

    def is_due(self) -> bool:
        """Return whether it is time for another line."""
        is_due = self.seconds - self.left() >= self.notice
        self.notice *= 3 if is_due else 1
        return is_due


def say(line: str) -> None:
    with contextlib.suppress(OSError):  # a closed terminal
        print(line, file=sys.stderr, flush=True)


def reach(
    connect: Callable[[timedelta], Store], where: tuple[str, int], clock: Clock, holds: bool
) -> Store:
    """Return what `connect` returns, once somebody answers at `where`; say it if nobody does.

    holds: whether `connect` makes the store itself.
    """
    host, port = where
    wait_for_name(host, min(NAME_SECONDS, clock.left()))
    if holds:
        check_own(host, port, min(OWN_SECONDS, clock.left()))
    begun = clock.left()
    while True:
        try:
            if not holds:  # torch would print a stack in C++ for nobody
                socket.create_connection(where, max(1, min(5, clock.left()))).close()
            return connect(timedelta(seconds=max(1, clock.left())))
        except dist.DistError as error:
            line = explain(error, host, port)
            is_busy = "is in use" in str(line)
            if not (is_busy and begun - clock.left() < BUSY_SECONDS):
                raise line or error from None
        except OSError:
            line = nobody(host, port)
            if clock.left() <= 0:
                raise line from None
            if clock.is_due() and int(os.environ.get("LOCAL_RANK", 0)) == 0:
                say(f"{line} Trying for {clock.seconds:g} s")
        time.sleep(0.2)


def wait_for_name(host: str, seconds: float = NAME_SECONDS) -> None:
    """Return once `host` resolves, which may take a while after its node has started.

    Raises a UserError after `seconds`.
    """
    deadline = time.monotonic() + seconds
    for attempt in itertools.count():
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            line = f"MASTER_ADDR={host} cannot be resolved ({error.strerror})"
        if time.monotonic() > deadline:
            raise UserError(f"{line}: check the name, or use an IP address")
        if attempt == 0 and int(os.environ.get("LOCAL_RANK", 0)) == 0:
            say(f"{line}; trying for {seconds:.3g} s")
        time.sleep(1)


def check_own(host: str, port: int, seconds: float) -> None:
    """Raise a UserError if others would not find at `host` what this process is to hold.

    An address that is not this machine's may lead here all the same, as that of a service does.
    """
    family, *_, (address, *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with contextlib.suppress(OSError):
        return socket.create_server((address, 0), family=family).close()
    deadline = time.monotonic() + seconds
    with contextlib.suppress(OSError), socket.create_server(("", port), family=family):
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(OSError):
                return socket.create_connection((host, port), min(5, left)).close()
            time.sleep(0.2)
        raise UserError(
            f"MASTER_ADDR={host} does not lead to {environment.node()}, where rank 0 is: set it "
            "to that node's address on all nodes, and NODE_RANK=0 there"
        )


def open_store(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return the store at the address that the launcher gives, and this rank's number, of how many.

    It is not known yet whether the others are there. The ranks that torchrun starts on one node
    have a file that only their owner can open; others a TCPStore, which obeys whoever reaches it.
    """
    host, port, rank, size = environment.read_group()
    if path := private_file():
        store: dist.Store = dist.FileStore(str(path))
        store.set_timeout(timeout)
        return store, rank, size
    holds = rank == 0 and not by_agent()
    is_local = os.environ.get("LOCAL_WORLD_SIZE") == str(size) and not by_agent()
    host = LOOPBACK if is_local else host

    def connect(limit: timedelta) -> dist.Store:
        if is_local:
            return open_locally(port, holds, limit)
        # of 1, so that rank 0 does not wait in here: `join` does, and tells for whom
        return next(dist.rendezvous("env://", world_size=1, timeout=limit))[0]

    store = reach(connect, (host, port), Clock(timeout.total_seconds()), holds)
    store.set_timeout(timeout)
    return store, rank, size


def private_file() -> Path | None:
    """Return the file of the ranks' store: in a folder that torchrun made, closed to other users.

    None for ranks on several nodes, or started by something else.
    """
    note = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "/"))  # FOLDER/attempt_N/RANK/error.json
    if os.environ.get("GROUP_WORLD_SIZE") != "1" or not note.is_relative_to(tempfile.gettempdir()):
        return None
    is_private = note.parents[2].stat().st_mode & 0o077 == 0
    return note.parents[1] / "store" if is_private else None


def open_locally(port: int, holds: bool, limit: timedelta) -> dist.TCPStore:
    """Return a store that other machines cannot reach; torch's own listens at all addresses."""
    if not holds:
        return dist.TCPStore(LOOPBACK, port, 1, False, limit)
    try:
        listener = socket.create_server((LOOPBACK, port))
    except OSError as error:
        raise dist.DistNetworkError(str(error)) from None
    fd = listener.detach()
    return dist.TCPStore(LOOPBACK, port, 1, True, limit, multi_tenant=True, master_listen_fd=fd)


def by_agent() -> bool:
    """Return whether torchrun holds the ranks' store, for as long as it starts ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not private_file()


def explain(error: dist.DistError, host: str, port: int) -> UserError | None:
    """Return a line for an error of the store that rank 0, or node 0, holds at `host`."""
    text = str(error)
    if re.search("EADDRINUSE|address already in use", text, re.IGNORECASE):
        return UserError(
            f"MASTER_PORT={port} is in use{_holder(port)}: end that, or use another port "
            f"(MASTER_PORT={port + 1}, the same on all nodes)"
        )
    if re.search("client socket has timed out|timed out after", text):
        return nobody(host, port)
    return None


def nobody(host: str, port: int) -> UserError:
    """Return a line for a store that cannot be reached."""
    where = f"MASTER_ADDR={host}, MASTER_PORT={port}"
    with contextlib.suppress(OSError):
        if socket.gethostbyname(host).startswith("127."):
            where += f", which is {environment.node()} itself"
    return UserError(
        f"nobody answers at {where}: is rank 0 running there, does a firewall let the port through?"
    )


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
