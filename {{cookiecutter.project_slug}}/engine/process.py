"""How a process of this project ends: with its launcher, its debugger, its loader workers.

It imports neither torch nor debugpy, and does nothing in the background unless debugged.
"""

import atexit
import contextlib
import ctypes
import multiprocessing
import multiprocessing.util
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1  # of Linux' <sys/prctl.h>
MISTAKE = 2  # exit status: of the user's; another start ends in the same way
STOPPED = 75  # exit status: stopped by a signal and saved; in sysexits.h EX_TEMPFAIL, try again
STOPPED_MARK = "STOPPED_MARK"  # names the file in which launch.sh looks for that
LAUNCH_ID = "LAUNCH_ID"  # tells a new start of launch.sh from what MAX_RESTARTS starts again
STOP_SIGNALS = {  # Windows lacks the last two
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
    if hasattr(signal, name)
}
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has no SIGKILL
follows_debugger = False  # whether this process ends with its debugger
_debugged_launcher: int | None = None  # the process id of a torchrun that runs under a debugger


def begin() -> None:
    """From here on end without a word on Ctrl-C, and with torchrun or the debugger."""
    be_quiet()
    # To run before multiprocessing's own handler, which would wait for a stuck worker for ever.
    atexit.register(_end_workers)
    if by_torchrun():
        follow_parent(signal.SIGTERM)
    if is_debugged():
        _follow_debugger()


def be_quiet() -> None:
    """Say nothing on Ctrl-C, nor, in forty lines of C++, that a rank that died held the store."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a shell ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def by_torchrun() -> bool:
    """Whether torchrun, torch.distributed.launch or launch.sh started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_debugged() -> bool:
    """Whether a debugger is connected."""
    pydevd = sys.modules.get("pydevd")  # sys.gettrace() is None from Python 3.12 on
    return pydevd is not None and getattr(pydevd, "_is_attached", lambda: True)()


def follow_parent(signum: int, parent: int | None = None) -> None:
    """Have the kernel send `signum` to this process once the thread that started it has gone.

    parent: its process id, where that is known. On Linux only; elsewhere nothing is done.
    """
    if sys.platform == "linux":
        parent = parent or os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)
        if os.getppid() != parent:  # it went before the kernel knew
            os.kill(os.getpid(), signum)


def start_worker(rank_follows_debugger: bool, number: int) -> None:
    """Begin a loader worker (a `worker_init_fn`), which ends with its rank, however that ends."""
    rank = multiprocessing.parent_process()
    follow_parent(KILL, rank.pid if rank else None)
    signal.set_wakeup_fd(-1)
    for signum in STOP_SIGNALS:  # its rank needs it until the end of the step
        signal.signal(signum, signal.SIG_IGN)
    if is_debugged():
        threading.main_thread().name = f"rank {os.environ.get('RANK', 0)}, worker {number}"
        if rank_follows_debugger:
            _start_watch(_watch_worker)


@contextlib.contextmanager
def holding_signals() -> Iterator[None]:
    """Hold back the signals that ask for a stop; what is forked here never gets them.

    For loader workers: torch has them end on SIGTERM until `start_worker` is called.
    """
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave(status: int) -> NoReturn:
    """Exit now: a tidy exit would wait for peers and loader workers that may never answer.

    Under a debugger the launcher goes first, and the other ranks with it: torchrun would end with
    a traceback of its own.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # of a terminal that is gone
            stream.flush()
    _end_workers()
    if os.getppid() == _debugged_launcher:
        os.kill(_debugged_launcher, KILL)
    os._exit(status)


def _end_workers() -> None:
    """Kill the loader workers, which else see only after some seconds that they are alone."""
    if threading.current_thread() is not threading.main_thread():
        return  # torch raises in the main thread when one dies; the kernel ends them soon enough
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in multiprocessing.active_children():
        worker.kill()


def _follow_debugger() -> None:
    """Name this rank in the call stack, and end the whole job with its debugger or on Ctrl-C.

    VS Code's Stop ends or detaches only the process in focus; and the main thread, which alone
    runs signal handlers, may be held by the debugger or wait in a collective.
    """
    global follows_debugger, _debugged_launcher
    follows_debugger = True
    _debugged_launcher = os.getppid() if by_torchrun() else None
    threading.main_thread().name = f"rank {os.environ.get('RANK', 0)}"
    told, tell = socket.socketpair()
    tell.setblocking(False)
    signal.set_wakeup_fd(tell.detach(), warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, lambda *_: None)  # without a handler `told` would not be told
    _start_watch(_watch_rank, told)


def _start_watch(function: Callable[..., None], *args: Any) -> None:
    # VS Code shows the names of threads only where there are two.
    watch = threading.Thread(target=function, args=args, name="watch", daemon=True)
    watch.pydev_do_not_trace = True  # type: ignore[attr-defined]  # goes on while others are held
    watch.start()


def _watch_rank(told: socket.socket) -> None:
    main, parent, signals = threading.main_thread(), os.getppid(), b""
    while is_debugged() and os.getppid() == parent and signal.SIGINT not in signals:
        readable, _, _ = select.select([told], [], [], 0.5)
        signals = told.recv(64) if readable else b""
    if main.is_alive():  # else this is the end of the program, where pydevd goes first
        leave(128 + signal.SIGINT)


def _watch_worker() -> None:
    main, rank = threading.main_thread(), multiprocessing.parent_process()
    while is_debugged():
        time.sleep(0.5)
    if main.is_alive() and rank and rank.is_alive():
        os.kill(rank.pid, signal.SIGINT)  # type: ignore[arg-type]
