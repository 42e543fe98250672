"""How a rank ends with an error: the first prints its own, and all exit with its status."""

import os
import threading
import time
from typing import NoReturn

import torch.distributed as dist

from ddpkit.errors import print_error
from ddpkit.ranks import distributed, environment, process
from ddpkit.ranks.protocol import END_SECONDS, ERROR, MISTAKE, POLL_SECONDS

_reporting = threading.Lock()
_first_status = 0  # of the rank that failed first; 0 as long as none is known


def report_and_exit(line: str, status: int) -> NoReturn:
    """Print `line` as an error and exit with `status`, or as the rank that has reported one."""
    _reporting.acquire()  # for good: of two threads of this rank one ends it
    if status == MISTAKE:
        environment.note_mistake()
    if is_first(status):
        own = environment.own_rank()
        if environment.has_other_nodes() and not line.startswith(f"{own} "):
            line = f"{own}: {line}"
        print_error(line)
    exit_as_first(status)


def exit_as_first(status: int) -> NoReturn:
    """Exit as the rank that failed first; with `status` if that is this one.

    Rank 0, which may hold the store, exits once the others know of the failure.
    """
    is_awaited = environment.has_other_nodes() or not process.by_torchrun()
    is_alone = os.environ.get("WORLD_SIZE") == "1"
    if is_awaited and os.environ.get("RANK") == "0" and not is_alone:
        time.sleep(4 * POLL_SECONDS)
    process.exit_now(_first_status or status)


def status_of_failure() -> int:
    """Return the exit status of the first rank that failed; 0 if none has reported an error."""
    if not _first_status and distributed.store().check([ERROR]):
        _note_first(distributed.store().get(ERROR).decode())
    return _first_status


def is_first(status: int) -> bool:
    """Return whether this rank has to report its error: no other one has."""
    number = distributed.local_rank()
    if not distributed.is_set_up():
        # Without a store the first rank of each node reports, and then the launcher
        # ends the others.
        if number and process.by_torchrun() and not process.is_debugged():
            process.be_quiet()  # on Ctrl-C
            time.sleep(END_SECONDS + number)
        return True
    mine = f"{distributed.rank()} {status} {os.getpid()} {environment.node()}"
    try:
        first = distributed.store().compare_set(ERROR, "", mine).decode()
    except dist.DistError:
        # The store has gone: with torchrun, or with rank 0, which may have been killed.
        return not _first_status and not process.by_torchrun()
    _note_first(first)
    return first == mine


def _note_first(first: str) -> None:
    """Take the status from the value of ERROR; report it once on each other node."""
    global _first_status
    rank, status, _, node = first.split()
    is_news = not _first_status and node != environment.node()
    if is_news and distributed.local_rank() == 0:
        print_error(f"rank {rank} on {node} has failed")
    _first_status = int(status)
