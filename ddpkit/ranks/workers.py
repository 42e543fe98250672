"""Loader workers on Linux, forks of their rank, which says why one has ended.

What they ask of the system (files, shared memory) mostly fails in threads of torch and of
multiprocessing, whose errors nobody sees: the rank would wait for a batch that does not come.
"""

import copy
import functools
import mmap
import multiprocessing
import os
import signal
import sys
from multiprocessing import queues, util
from multiprocessing.context import BaseContext
from typing import Any

from ddpkit.errors import UserError
from ddpkit.ranks import ending, protocol

FORKS: Any = multiprocessing.get_context("fork" if hasattr(os, "fork") else None)
HINTS = {
    "SIGKILL": ": out of memory? Use fewer loader workers (see dmesg)",
    "SIGBUS": ": /dev/shm full?",
}
running: list["Worker"] = []  # of this rank, and those that have died


class Worker(FORKS.Process):
    """A process of torch's DataLoader, with a note that its rank can read when it has ended."""

    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        self.note = mmap.mmap(-1, mmap.PAGESIZE)  # the fork shares it

    def start(self) -> None:
        # Those that are over go: this closes their handles.
        running[:] = [each for each in running if each.exitcode != 0]
        super().start()
        running.append(self)

    def run(self) -> None:
        # called by multiprocessing's thread
        sys.excepthook = lambda _, error, __: fail(error)
        super().run()

    def has_died(self) -> bool:
        """Return whether it has ended by an error or a signal."""
        return bool(self.exitcode)

    def end(self) -> str:
        """Return how it has died."""
        status = self.exitcode or 0
        how = f"status {status}" if status >= 0 else signal.Signals(-status).name
        return f"has ended with {how}{HINTS.get(how, '')}"


class Queue(queues.Queue):
    """One between a rank and its workers. What its thread cannot send, somebody waits for."""

    @staticmethod
    def _on_queue_feeder_error(error: Exception, _: object) -> None:
        fail(error)


def worker_context(count: int) -> BaseContext | None:
    """Return how `count` loader workers start: Python 3.14's helper process may outlive its parent.

    None is Python's own way.
    """
    if not count or sys.platform != "linux":
        return None
    util.get_temp_dir()  # of this rank, for the sockets of all: they are killed, and leave theirs
    context = copy.copy(FORKS)
    context.Process = Worker
    context.Queue = functools.partial(Queue, ctx=context)
    return context


def fail(error: BaseException) -> None:
    """End this worker, and let its rank say why; or say it and end this rank."""
    if isinstance(error, EOFError | ConnectionError):
        return  # the other side has ended: why, is what matters
    what = f"{type(error).__name__}: {error}"
    worker = multiprocessing.current_process()
    if not isinstance(worker, Worker):
        ending.report_and_exit(str(cannot_exchange(what)), protocol.MISTAKE)
    note = what.encode()[: mmap.PAGESIZE]
    worker.note[: len(note)] = note
    os._exit(1)


def cannot_exchange(what: str) -> UserError:
    return UserError(
        f"a loader worker and its rank cannot exchange a batch ({what}): use fewer loader workers "
        "(0 need none); in a container start it with --ipc=host or --shm-size=8g (df -h /dev/shm); "
        "see ulimit -n, -u; or let samples be tensors, arrays, numbers and strings"
    )


def find_fault() -> Exception | None:
    """Return what has ended a worker, if something has."""
    for worker in running.copy():
        if not worker.has_died():
            continue
        note = worker.note[:].rstrip(b"\0").decode(errors="replace")
        if note:
            return cannot_exchange(note)
        return RuntimeError(f"DataLoader worker (pid {worker.pid}) has ended")
    return None
