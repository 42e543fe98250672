"""Where ranks meet: one store with a note of each. Reports who is missing, or there twice.

Ranks of one node have a file that only its owner can open, and that outlives a launcher. Of several
nodes rank 0 holds a store at MASTER_ADDR:MASTER_PORT, which obeys whoever reaches it; torchrun may
hold it for them. Each leaves a note. What comes first under "met" counts for all: the notes of all,
from rank 0, or a fault that one of them has found.
"""

import json
import os
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ddpkit import files
from ddpkit.errors import UserError, print_line, shorten
from ddpkit.ranks import environment, protocol

LOOPBACK = "127.0.0.1"
LIBUV = sys.platform != "win32"  # torch is built without it there


def ticks(seconds: float) -> Iterator[bool]:
    """Yield, again and again for so long, whether it is time to report what it waits for."""
    start = time.monotonic()
    notice = min(protocol.NOTICE_SECONDS, seconds / 2)
    waited = 0.0
    while waited < seconds:
        is_due = waited >= notice
        if is_due:
            notice *= 3
        yield is_due
        time.sleep(0.1)
        waited = time.monotonic() - start


def say_on_node(line: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print_line(line, sys.stderr)


def open_store(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return the store, and this rank's number, of how many; the others may not be there yet."""
    host, port, rank, size = environment.read_group()
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun
    is_local = os.environ.get("LOCAL_WORLD_SIZE") == str(size) and not by_agent
    path = os.environ.get(protocol.STORE) or _torchruns_file()
    if path:
        if sys.platform != "win32":  # which removes no file that is in use
            # They meet in it also when a program has cleaned TMPDIR of what is days old.
            path = files.keep_open(path, os.O_RDWR | os.O_CREAT)
        store: dist.Store = dist.FileStore(path)
    elif rank == 0 and not by_agent:
        store = _hold(port, is_local, timeout)
    else:
        store = _reach(LOOPBACK if is_local else host, port, timeout)
    if by_agent and not path:  # it may hold what ranks before a restart have left
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT")
        store = dist.PrefixStore(f"start {start}", store)
    store.set_timeout(timeout)
    return store, rank, size


def _torchruns_file() -> str:
    """Return a file in the folder that torchrun has made for its ranks, if all are on this node."""
    # torchrun's is .../FOLDER/ATTEMPT/RANK/error.json
    folders = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "/")).parents
    if os.environ.get("GROUP_WORLD_SIZE") != "1" or len(folders) < 4:
        return ""
    is_temporary = folders[2].is_relative_to(tempfile.gettempdir())
    # that of Windows is each user's own
    is_closed = sys.platform == "win32" or folders[2].stat().st_mode & 0o077 == 0
    if is_temporary and is_closed:
        return str(folders[1] / "store")
    return ""


def _hold(port: int, is_local: bool, timeout: timedelta) -> dist.Store:
    """Return a store of this process's; if it is local, other machines cannot reach it."""
    six = socket.has_dualstack_ipv6() and not is_local
    family = socket.AF_INET6 if six else socket.AF_INET
    address = LOOPBACK if is_local else "", port
    try:
        server = socket.create_server(address, family=family, dualstack_ipv6=six)
    except OSError as error:
        raise UserError(
            f"MASTER_PORT={port} is in use or closed ({error.strerror}): use another one "
            f"(MASTER_PORT={port + 1}, the same on all nodes)"
        ) from None
    return dist.TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        timeout=timeout,
        multi_tenant=True,
        master_listen_fd=server.detach(),
        use_libuv=LIBUV,
    )


def _reach(host: str, port: int, timeout: timedelta) -> dist.Store:
    """Return the store of another process, once somebody answers there; report if nobody does."""
    seconds = timeout.total_seconds()
    line = ""
    for is_due in ticks(seconds):
        try:
            # To a port that is closed torch would print a stack in C++.
            socket.create_connection((host, port), 5).close()
            return dist.TCPStore(host, port, timeout=timeout, use_libuv=LIBUV)
        except (OSError, dist.DistError) as error:
            line = f"no answer from MASTER_ADDR={host}, MASTER_PORT={port}"
            if isinstance(error, socket.gaierror):
                line = f"MASTER_ADDR={host} cannot be resolved ({error.strerror})"
        if is_due:
            say_on_node(f"{line}; retrying for {seconds:g} s")
    raise UserError(
        f"{line}: is rank 0 running there, and does the firewall open the port?"
    )


def join(
    store: dist.Store, rank: int, size: int, timeout: timedelta, note: dict
) -> tuple[dist.Store, list[dict]]:
    """Return once all ranks have called this: the part of `store` for what follows, and all notes.

    Raises a UserError, the same in all, if they do not fit or are not there within `timeout`.
    """
    note = {"id": uuid.uuid4().hex, "node": environment.node(), **note}
    keys = [f"rank {number}" for number in range(size)]
    fault = _leave_note(store, rank, size, note) or _await_notes(
        store, rank, keys, timeout.total_seconds()
    )
    if fault:
        store.compare_set("met", "", json.dumps({"fault": fault}))
    elif rank == 0 and store.check(keys):
        notes = [json.loads(each) for each in store.multi_get(keys)]
        store.compare_set("met", "", json.dumps({"notes": notes}))
    met = json.loads(store.get("met"))
    if fault or "fault" in met:
        if rank == 0:  # here may be the store: let the others read it first
            time.sleep(1)
        raise UserError(met.get("fault", fault))
    # Later errors, of those who do not fit, stay out of this part.
    return dist.PrefixStore("joined", store), met["notes"]


def _leave_note(store: dist.Store, rank: int, size: int, note: dict) -> str:
    """Leave this rank's note in the store; return why it fits none, or nothing."""
    if rank >= size:
        return f"RANK={rank} with WORLD_SIZE={size}: the last rank is {size - 1}"
    mine = f"{size} for rank {rank}"
    first = store.compare_set("size", "", mine).decode()
    if first.split()[0] != str(size):
        return (
            f"WORLD_SIZE is {mine}, {first}: start the same number of ranks on each node, such as "
            "2 (NPROC=2 ./launch.sh), with the same NNODES"
        )
    kept = json.loads(store.compare_set(f"rank {rank}", "", json.dumps(note)))
    if kept["id"] == note["id"]:
        return ""
    nodes = ", ".join(sorted({kept["node"], note["node"]}))
    return f"two processes have RANK={rank} ({nodes}): give each its own, and each run its port"


def _await_notes(store: dist.Store, rank: int, keys: list[str], seconds: float) -> str:
    """Wait for the notes of all, and on other ranks for rank 0; return who is missing."""
    # Rank 0 gives up first: it reports who is missing, if it is not rank 0.
    for is_due in ticks(seconds if rank == 0 else seconds + 2):
        if store.check(["met"]) or (rank == 0 and store.check(keys)):
            return ""
        if is_due and rank == 0:
            say_on_node(f"waiting up to {seconds:g} s for {_missing(store, keys)}")
    who = f"timed out after {seconds:g} s waiting for {_missing(store, keys)}"
    return f"{who}: start all of them, with the same MASTER_ADDR and MASTER_PORT"


def _missing(store: dist.Store, keys: list[str]) -> str:
    """Return which ranks have left no note, and on which nodes the others are."""
    there = [key for key in keys if store.check([key])]
    missing = shorten([key.split()[1] for key in keys if key not in there])
    nodes = dict.fromkeys(json.loads(store.get(key))["node"] for key in there)
    here = f"; here: {shorten(list(nodes))}" if nodes else ""
    return f"rank {missing} of {len(keys)} (WORLD_SIZE={len(keys)}){here}"
