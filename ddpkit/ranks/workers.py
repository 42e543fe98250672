"""Loader workers on Linux, forks of their rank: it reports what they lack, and why they ended.

What they ask of the system (threads, files, shared memory) mostly fails in threads of torch and of
multiprocessing, whose errors nobody sees: the rank would wait for a batch that does not come.
"""

import copy
import errno
import functools
import mmap
import multiprocessing
import os
import re
import signal
import sys
import traceback
from multiprocessing import queues
from multiprocessing.context import BaseContext
from typing import Any

from torch.utils.data._utils import signal_handling

from ddpkit.errors import LineError, UserError
from ddpkit.ranks import ending, process, protocol

FORKS: Any = multiprocessing.get_context("fork" if hasattr(os, "fork") else None)
HINTS = {
    "SIGKILL": ": out of memory? Use fewer loader workers (see dmesg)",
    "SIGBUS": ": /dev/shm full?",
}
# By the error, the files that it passed, and its text: what a rank or its worker lacks
LACKING = {
    "start new thread|: Resource temporarily unavailable$|EAGAIN in .*popen_fork": (
        "no more processes or threads can be started: raise the limit (ulimit -u, docker run "
        "--pids-limit), or use fewer loader workers"
    ),
    "^EMFILE|Too many open files|items of ancdata": (
        "too many files are open: raise the limit (ulimit -n) or use fewer loader workers"
    ),
    "^MemoryError|^ENOMEM in .*(popen_fork|multiprocessing.(heap|synchronize)|shm)": (
        "not enough memory for loader workers: use fewer, or smaller batches"
    ),
    "^ENOENT in .*resource_sharer": (
        "the sockets of loader workers were deleted from TMPDIR: start again"
    ),
    r"^E\w+ in .*(multiprocessing.(heap|synchronize)|shm)": (
        "/dev/shm is too small for the batches of loader workers ({}; see df -h /dev/shm): docker "
        "run --ipc=host or --shm-size=8g, or use fewer workers (0 needs none)"
    ),
}
OVER = b"over"  # the note of a worker that has done all

# torch's handler would raise an error anywhere in the main thread, also where one is reported; the
# watch thread, and torch itself while it waits for a batch, ask instead.
signal_handling._SIGCHLD_handler_set = True

running: list["Worker"] = []  # of this rank, and those that have died


class Worker(FORKS.Process):
    """A process of torch's DataLoader, with a note that its rank can read when it has ended."""

    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        self.note = mmap.mmap(-1, mmap.PAGESIZE)  # the fork shares it

    def start(self) -> None:
        # Those that are over go: this closes their handles.
        running[:] = [each for each in running if not each.is_over()]
        super().start()
        running.append(self)

    def run(self) -> None:
        # Called by multiprocessing's thread
        sys.excepthook = lambda _, error, __: fail(error)
        try:
            super().run()
        except Exception as error:
            if lacking(error):
                fail(error)
            raise
        self.note[: len(OVER)] = OVER

    def is_over(self) -> bool:
        return self.note[: len(OVER)] == OVER

    def has_died(self) -> bool:
        """Return whether it has ended though its rank did not ask it to; do not reap it."""
        # in this order: until it has ended it may write its note
        return not process.is_running(self.pid) and not self.is_over()

    def end(self) -> str:
        """Return how it has died."""
        self.join(1)  # other threads than its first may take longer
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
    process.make_socket_folder(multiprocessing.current_process())
    context = copy.copy(FORKS)
    context.Process = Worker
    context.Queue = functools.partial(Queue, ctx=context)
    return context


def fail(error: BaseException) -> None:
    """End this worker, and let its rank report why; or report it and end this rank."""
    if isinstance(error, EOFError | ConnectionError):
        return  # the other side has ended: why, is what matters
    line = lacking(error)
    if not line:
        what = f"{type(error).__name__}: {error}"
        line = UserError(
            f"a loader worker cannot send a batch to its rank ({what}): samples and their keys "
            "must be tensors, arrays, numbers or strings"
        )
    worker = multiprocessing.current_process()
    if not isinstance(worker, Worker):
        ending.report_and_exit(str(line), protocol.MISTAKE)
    text = f"{line.code} {line.line}".encode()[: mmap.PAGESIZE]
    worker.note[: len(text)] = text
    os._exit(1)


def find_fault() -> Exception | None:
    """Return what has ended a worker, if something has."""
    for worker in running.copy():
        if not worker.has_died():
            continue
        note = worker.note[:].rstrip(b"\0").decode(errors="replace")
        if not note:
            return RuntimeError(f"DataLoader worker (pid {worker.pid}) has ended")
        code, _, line = note.partition(" ")
        return UserError(line, code)
    return None


def lacking(error: BaseException) -> UserError | None:
    """Return a line on what the system did not give to a worker, or to a rank for its workers."""
    if isinstance(error, LineError):
        return None
    text = str(error)
    trace = "".join(traceback.format_tb(error.__traceback__))
    # torch's C++ names a file in /dev/shm so, with the number of the error.
    of_torch = re.search(r"</torch_.* \((\d+)\)", text)
    number = int(of_torch[1]) if of_torch else getattr(error, "errno", None) or 0
    code = errno.errorcode.get(number, type(error).__name__)
    files = " ".join(re.findall(r"(\w+.\w+)\.py", trace))
    told = f"{code} in {'shm' if of_torch else files}: {text}"
    for pattern, line in LACKING.items():
        if re.search(pattern, told):
            return UserError(line.format(os.strerror(number)))
    return None
