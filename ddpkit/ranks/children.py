"""What this process starts ends with it: loader workers, and others' forks, which leave it its own.

This module does not import torch.
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import threading
import weakref
from multiprocessing import util
from typing import Any

from ddpkit.ranks import process, watch
from ddpkit.ranks.protocol import DEBUGGED_LAUNCHER, KILL, STOP_SIGNALS

_iterators: weakref.WeakSet[Any] = weakref.WeakSet()  # of this process's loaders
_masks = threading.local()  # signals that a thread has held back before it forks


def note_iterator(iterator: object) -> None:
    """Have a child that is forked leave the workers of a loader's iterator to this process."""
    _iterators.add(iterator)
    end_workers_at_exit()


def _before_fork() -> None:
    # Until _in_child is done a signal to the child would go into this process's socket.
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _in_child() -> None:
    """Leave to the parent what is its alone, in a child that anybody forks, such as a Pool's.

    SIGTERM ends the child, as who sends it expects. The other signals often reach all processes at
    once and ask for a stop of the run, which may need this child until the end of the step.
    """
    process.End.is_leaving = False
    process.End.error = None
    for signum in STOP_SIGNALS:
        handler = signal.getsignal(signum)
        if getattr(handler, "__module__", "").startswith("ddpkit."):
            is_end = signum == signal.SIGTERM
            signal.signal(signum, signal.SIG_DFL if is_end else watch.hand_over)
    # Else to drop its copy would end the workers of the parent.
    for iterator in _iterators:
        iterator._shutdown = True
    # The workers are not the child's own.
    for at_exit in (_kill_at_exit, process.ignore_signals):
        atexit.unregister(at_exit)
    _after_fork()


def _follow_parent(_: object) -> None:
    """Have a daemon, such as any loader's worker, end with its parent, also while it hangs."""
    if multiprocessing.current_process().daemon:
        process.end_with(KILL, os.getppid())


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child
    )
    util.register_after_fork(_follow_parent, _follow_parent)


def end_workers_at_exit() -> None:
    """Have this process kill its loader workers when it exits.

    They outlive SIGTERM, which multiprocessing's own exit handler sends before it waits for them.
    """
    atexit.unregister(_kill_at_exit)
    atexit.register(_kill_at_exit)  # runs before that handler


def _kill_at_exit() -> None:
    process.End.is_leaving = True
    for child in multiprocessing.active_children():
        if child.daemon:  # Python waits for others, which a person has started
            child.kill()


def start_worker(number: int) -> None:
    """Set up a loader worker, as its `worker_init_fn`: it ends with its rank, however that ends."""
    parent = multiprocessing.parent_process()
    assert parent and parent.pid
    rank = parent.pid
    # The rank needs its workers until the end of the step. Programs that they start
    # would inherit SIG_IGN, and that signals are held back; not a handler.
    for signum in STOP_SIGNALS:
        signal.signal(signum, watch.hand_over)
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        for signum in STOP_SIGNALS:
            signal.siginterrupt(signum, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def interrupt_rank() -> None:
        """Interrupt the rank once the debugger has left this worker of it."""
        if not process.is_debugged() and threading.main_thread().is_alive():
            with contextlib.suppress(ProcessLookupError):  # the rank has ended
                os.kill(rank, signal.SIGINT)

    watch.end_with(KILL, rank)
    if process.is_debugged():
        name = f"rank {os.environ.get('RANK', 0)}, worker {number}"
        threading.main_thread().name = name
        if DEBUGGED_LAUNCHER in os.environ:
            watch.thread.add_duty(interrupt_rank)
