"""How a process ends: with its launcher, its debugger or its rank, and never with a hang.

This module imports neither torch nor debugpy, and starts no thread unless there is a debugger.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import multiprocessing.util  # registers its exit handler before install_handlers does
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from engine.errors import need_torch
from engine.ranks.protocol import DEBUGGED_LAUNCHER, KILL, LAUNCHER_PID, STOP_SIGNALS

PR_SET_PDEATHSIG = 1  # in Linux' <sys/prctl.h>
WAKE = getattr(signal, "SIGURG", 0)  # interrupts a system call; 0 on Windows
READ_SECONDS = 2  # for whoever reads the output to make room


def install_handlers() -> None:
    """Exit silently on Ctrl-C, and exit with torchrun or the debugger; print a stack on a crash."""
    need_torch()
    be_quiet()
    gc.disable()  # until one_line_errors: in what the imports make it finds little, and takes 0.5 s
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115  None if it is closed
    faulthandler.enable(sys.__stderr__ or sys.stderr)
    # Runs before multiprocessing's own exit handler, which would wait forever for a stuck worker.
    atexit.register(_kill_workers)
    atexit.register(ignore_signals)
    if WAKE:
        signal.signal(WAKE, lambda *_: None)
    if by_torchrun():
        _follow_parent(signal.SIGTERM, int(os.environ.get(LAUNCHER_PID, os.getppid())))
    if by_plain_torchrun() and os.environ["RANK"] == "0" and "--help" not in sys.argv:
        with contextlib.suppress(OSError):  # a closed pipe
            print(f"starting {os.environ['WORLD_SIZE']} rank(s) ...", flush=True)
    if is_debugged():
        _follow_debugger()


def be_quiet() -> None:
    """Print nothing on Ctrl-C, nor 40 lines of C++ when the rank that held the store has died."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch.profiler's; read when torch is imported
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else the shell ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def by_torchrun() -> bool:
    """Return whether torchrun, torch.distributed.launch or launch.sh started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def by_plain_torchrun() -> bool:
    """Return whether torchrun or torch.distributed.launch did, without launch.sh."""
    return by_torchrun() and LAUNCHER_PID not in os.environ


def is_debugged() -> bool:
    """Return whether a debugger is connected."""
    pydevd = sys.modules.get("pydevd")  # sys.gettrace() is None from Python 3.12 on
    return pydevd is not None and getattr(pydevd, "_is_attached", lambda: True)()


def is_running(pid: int) -> bool:
    """Return whether this machine has such a process; always True on Windows."""
    if sys.platform != "win32":
        try:
            with contextlib.suppress(PermissionError):  # another user's
                os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


def ignore_signals() -> None:
    """Ignore the signals that request a stop."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


@contextlib.contextmanager
def holding_signals() -> Iterator[None]:
    """Hold back the signals that request a stop; a process forked in the block never gets them.

    For loader workers, which SIGTERM would end until they have called `start_worker`.
    """
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def exit_now(status: int) -> NoReturn:
    """Exit without cleaning up, which could wait forever for other ranks and loader workers.

    With F5 it kills torchrun first, which would print a traceback; the other ranks end with it.
    """
    drop_unread()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed terminal
            stream.flush()
    _kill_workers()
    if os.environ.get(DEBUGGED_LAUNCHER) == str(os.getppid()):
        os.kill(os.getppid(), KILL)
    os._exit(status)


def drop_unread() -> None:
    """Redirect stdout and stderr to nowhere if nobody reads them: a full pipe, or Ctrl-S.

    A main thread that is blocked in a print continues.
    """
    for stream in (1, 2):
        if is_read(stream):
            continue
        with contextlib.suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream)
            os.close(null)
            # Interrupted, a blocked write starts again, to the new place.
            signal.pthread_kill(threading.main_thread().ident or 0, WAKE)


def is_read(stream: int) -> bool:
    """Return whether stdout, 1, or stderr, 2, can be written to."""
    with contextlib.suppress(OSError, ValueError):  # closed, or Windows: select needs sockets
        return bool(select.select([], [stream], [], READ_SECONDS)[1])
    return True


def _kill_workers() -> None:
    """Kill the loader workers, which otherwise take seconds to notice that their rank has gone."""
    if threading.current_thread() is not threading.main_thread():
        return  # torch would raise in the main thread; _follow_parent ends them soon enough
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in multiprocessing.active_children():
        worker.kill()


def _follow_parent(signum: int, ancestor: int) -> None:
    """Have the kernel send `signum` to this process when its parent ends; on Linux only.

    ancestor: the process id of the parent, or of a process further up, that should still be there.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)
        if ancestor not in _ancestors():  # it ended before the call of prctl
            os.kill(os.getpid(), signum)


def _ancestors() -> Iterator[int]:
    pid = os.getppid()
    with contextlib.suppress(OSError):  # it has ended, or we may not see it
        while pid:
            yield pid
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def worker_context(workers: int) -> str | None:
    """Return how that many loader workers start: on Linux by fork, elsewhere by Python's default.

    On Linux the default of Python 3.14 is a helper process, which imports torch first, does not
    survive a SIGTERM to all processes, and may outlive its parent by seconds.
    """
    return "fork" if workers and sys.platform == "linux" else None


def start_worker(number: int) -> None:
    """Set up a loader worker, as its `worker_init_fn`: it ends with its rank, however that ends."""
    rank = multiprocessing.parent_process()
    assert rank and rank.pid
    if rank.pid == os.getppid():
        _follow_parent(KILL, rank.pid)
    else:  # Python's fork server is the parent
        _Watch(_end_with, rank).start()
    signal.set_wakeup_fd(-1)
    ignore_signals()  # the rank needs its workers until the end of the step
    if is_debugged():
        threading.main_thread().name = f"rank {os.environ.get('RANK', 0)}, worker {number}"
        if DEBUGGED_LAUNCHER in os.environ:
            _Watch(_interrupt_rank, rank.pid).start()


def _follow_debugger() -> None:
    """Name this rank in the call stack, and end all ranks with its debugger or on Ctrl-C.

    VS Code's Stop ends or detaches only the process in focus. Signal handlers run in the main
    thread only, which may be at a breakpoint or in a collective; hence the socket and the thread.
    """
    os.environ[DEBUGGED_LAUNCHER] = str(os.getppid()) if by_torchrun() else ""
    sys.breakpointhook = stop_in_debugger
    threading.main_thread().name = f"rank {os.environ.get('RANK', 0)}"
    signal_socket, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    signal.set_wakeup_fd(wakeup.detach(), warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, lambda *_: None)  # without a handler the socket gets nothing
    _Watch(_end_with_debugger, signal_socket, os.getppid()).start()


def stop_in_debugger() -> None:
    """Stop in the calling frame; debugpy's own hook does not in a process that torchrun started."""
    if is_debugged():
        pydevd = sys.modules["pydevd"]
        pydevd.settrace(trace_only_current_thread=True, stop_at_frame=sys._getframe(1))


class _Watch(threading.Thread):
    """A second thread, so that VS Code names the first; runs while the debugger holds others."""

    pydev_do_not_trace = True

    def __init__(self, function: Callable[..., None], *args: object) -> None:
        super().__init__(target=function, args=args, name="watch", daemon=True)


def _end_with_debugger(signal_socket: socket.socket, parent: int) -> None:
    signals = b""
    while is_debugged() and os.getppid() == parent and signal.SIGINT not in signals:
        signal_socket.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            signals = signal_socket.recv(64)
    if threading.main_thread().is_alive():  # else pydevd ends as the program does
        exit_now(128 + signal.SIGINT)


def _end_with(rank: BaseProcess) -> None:
    rank.join()
    os.kill(os.getpid(), KILL)


def _interrupt_rank(pid: int) -> None:
    """Interrupt the rank once the debugger has left this worker."""
    while is_debugged():
        time.sleep(0.5)
    if threading.main_thread().is_alive():
        with contextlib.suppress(ProcessLookupError):  # the rank has ended
            os.kill(pid, signal.SIGINT)
