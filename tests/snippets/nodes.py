"""Ranks that meet, or wait for others, without a launcher."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist

from ddpkit.errors import UserError
from ddpkit.ranks import meeting


def come(store: dist.Store, rank: int, count: int, seconds: float) -> str:
    try:
        meeting.join(store, rank, count, timedelta(seconds=seconds), {})
    except UserError as error:
        return str(error)
    return "joined"


def crowd(count: int, absent: int) -> list[str]:
    """What the ranks of a crowd, in threads, say of one that does not come."""
    store, begin = dist.HashStore(), threading.Barrier(count - 1)

    def act(rank: int) -> str:
        begin.wait()
        return come(store, rank, count, 3)

    with ThreadPoolExecutor(count) as threads:
        return [*threads.map(act, (rank for rank in range(count) if rank != absent))]


def nobody_opens() -> str:
    """What a rank says whose number 0 does not come to the store that torchrun holds."""
    return come(dist.HashStore(), 3, 8, 0.2)


def a_stray() -> list[str]:
    """What a rank is told that comes to a meeting that is over, and what is in the store then."""
    store = dist.HashStore()
    first = come(store, 0, 1, 3)
    said = [come(store, rank, size, 3) for rank, size in ((0, 1), (1, 2), (1, 1))]
    return [first, *said, come(store, 0, 1, 3)]


def nowhere() -> str:
    try:
        meeting._reach("nowhere.invalid", 1, timedelta(seconds=0.4))
    except UserError as error:
        return str(error)
    return "reached"
