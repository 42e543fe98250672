"""How ranks, and launchers of several nodes, meet: who is missing, or there twice, is said."""

import contextlib
import itertools
import os
import re
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from engine.errors import UserError, shorten
from engine.ranks import environment

NOTICE_SECONDS = 30  # after which one of those who wait says for whom
VARIABLES = {"rank": ("RANK", "WORLD_SIZE"), "node": ("NODE_RANK", "NNODES")}


def open_store(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return the store at the address that the launcher gives, and this rank's number, of how many.

    It is not known yet whether the others are there.
    """
    host, port, rank, size = environment.read_group()
    wait_for_name(host)
    try:  # of 1, so that rank 0 does not wait in here: `join` does, and tells for whom
        store, *_ = next(dist.rendezvous("env://", world_size=1, timeout=timeout))
    except dist.DistError as error:
        raise explain(error, host, port) or error from None
    store.set_timeout(timeout)
    # Where torchrun starts ranks again, the store may be the same.
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store), rank, size


def wait_for_name(host: str, seconds: float = 60) -> None:
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
            print(f"{line}; trying for {seconds:g} s", file=sys.stderr, flush=True)
        time.sleep(1)


def join(store: dist.Store, kind: str, number: int, size: int, seconds: float) -> None:
    """Return once all of `size` have called this; or raise a UserError, the same in all.

    kind: "rank" or "node"
    number: this one's
    seconds: how long to wait for the others
    """
    own, total = VARIABLES[kind]
    answer, known = f"all {kind}s", int(store.compare_set(f"{kind}s", "", str(size)))
    times = store.add(f"{kind} {number}", 1)
    fault = ""
    if known != size:
        fault = f"{total} is {size} for {kind} {number}, {known} for another: give all the same"
    elif number >= size:
        fault = f"{own}={number} with {total}={size}: the last {kind} is {size - 1}"
    elif times > 1:
        fault = f"{own}={number} is there twice: give each its own, and each run a MASTER_PORT"
    elif store.add(f"{kind}s here", 1) < size:
        fault = _wait(store, kind, number, size, seconds)
    # Another run's rank that comes here by mistake must not end those that have begun.
    found = store.compare_set(answer, "", fault or "here").decode()
    if fault or found != "here":
        if number == 0:  # here is the store: let the others read it first
            time.sleep(1)
        raise UserError(fault or found)


def _wait(store: dist.Store, kind: str, number: int, size: int, seconds: float) -> str:
    """Return once the others have come, or found a fault; or else who is missing."""
    notice = min(NOTICE_SECONDS, seconds / 2)  # a limit of 0 would mean none
    for limit in (notice, seconds - notice):
        with contextlib.suppress(dist.DistStoreError):
            store.wait([f"all {kind}s"], timedelta(seconds=limit))
            return ""
        missing = [str(i) for i in range(size) if not store.check([f"{kind} {i}"])]
        line = f"{kind} {shorten(missing)} of {size} ({VARIABLES[kind][1]}={size})"
        if limit == notice and number == 0:
            print(f"waiting up to {seconds:g} s for {line}", file=sys.stderr, flush=True)
    return (
        f"waited {seconds:g} s for {line}: start as many, with the same MASTER_ADDR and MASTER_PORT"
    )


def explain(error: dist.DistError, host: str, port: int) -> UserError | None:
    """Return a line for an error of the store that rank 0, or node 0, holds at `host`."""
    text = str(error)
    if re.search("EADDRINUSE|address already in use", text, re.IGNORECASE):
        return UserError(
            f"MASTER_PORT={port} is in use{_holder(port)}: end that, or use another port "
            f"(MASTER_PORT={port + 1}, the same on all nodes)"
        )
    if re.search("client socket has timed out|timed out after", text):
        return UserError(
            f"nobody answers at MASTER_ADDR={host}, MASTER_PORT={port}: is rank 0 running there, "
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
