"""How a process of this project ends: with its launcher, its debugger, its loader workers.

It imports neither torch nor debugpy, and does nothing in the background unless debugged.
"""

import atexit
import contextlib
import ctypes
import faulthandler
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
from pathlib import Path
from typing import Any, NoReturn

from engine.ranks.protocol import KILL, LAUNCHER_PID, STOP_SIGNALS

PR_SET_PDEATHSIG = 1  # of Linux' <sys/prctl.h>
WAKE = getattr(signal, "SIGURG", 0)  # interrupts a system call; 0 on Windows
READ = 2  # seconds for whoever reads the output to make room
follows_debugger = False  # whether this process ends with its debugger
_debugged_launcher: int | None = None  # the process id of a torchrun that runs under a debugger


def install_handlers() -> None:
    """Exit silently on Ctrl-C, and exit with torchrun or the debugger; print a stack on a crash."""
    be_quiet()
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115  None if it is closed
    faulthandler.enable(sys.__stderr__ or sys.stderr)
    # To run before multiprocessing's own handler, which would wait for a stuck worker for ever.
    atexit.register(_end_workers)
    atexit.register(ignore_signals)
    if WAKE:
        signal.signal(WAKE, lambda *_: None)
    if by_torchrun():
        follow_parent(signal.SIGTERM, int(os.environ.get(LAUNCHER_PID, os.getppid())))
    if by_plain_torchrun() and os.environ["RANK"] == "0" and "--help" not in sys.argv:
        with contextlib.suppress(OSError):  # of a pipe that is closed
            print(f"starting {os.environ['WORLD_SIZE']} rank(s) ...", flush=True)
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


def by_plain_torchrun() -> bool:
    """Whether torchrun or torch.distributed.launch did, without launch.sh."""
    return by_torchrun() and LAUNCHER_PID not in os.environ


def is_debugged() -> bool:
    """Whether a debugger is connected."""
    pydevd = sys.modules.get("pydevd")  # sys.gettrace() is None from Python 3.12 on
    return pydevd is not None and getattr(pydevd, "_is_attached", lambda: True)()


def follow_parent(signum: int, ancestor: int) -> None:
    """Have the kernel send `signum` to this process once its parent has gone.

    ancestor: the process id of that parent, or of one further up. On Linux only; elsewhere nothing
    is done.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)
        if ancestor not in _ancestors():  # it went before the kernel knew
            os.kill(os.getpid(), signum)


def _ancestors() -> Iterator[int]:
    pid = os.getppid()
    with contextlib.suppress(OSError):  # that one has gone, or is not ours to see
        while pid:
            yield pid
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def start_worker(rank_follows_debugger: bool, number: int) -> None:
    """Begin a loader worker (a `worker_init_fn`), which ends with its rank, however that ends."""
    rank = multiprocessing.parent_process()
    if rank and rank.pid == os.getppid():
        follow_parent(KILL, rank.pid)
    else:  # Python's fork server started it
        _start_watch(_end_with, rank)
    signal.set_wakeup_fd(-1)
    ignore_signals()  # its rank needs it until the end of the step
    if is_debugged():
        threading.main_thread().name = f"rank {os.environ.get('RANK', 0)}, worker {number}"
        if rank_follows_debugger:
            _start_watch(_watch_worker)


def ignore_signals() -> None:
    """Ignore the signals that ask for a stop."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def is_running(pid: int) -> bool:
    """Whether there is such a process on this machine; on Windows that is taken for granted."""
    if sys.platform != "win32":
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's
            pass
    return True


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


def drop_unread() -> None:
    """Send stdout or stderr nowhere if nobody reads it: a full pipe, a terminal under Ctrl-S.

    A main thread that was held up in a print goes on.
    """
    for stream in (1, 2):
        with contextlib.suppress(OSError, ValueError):  # closed; on Windows only sockets are asked
            if select.select([], [stream], [], READ)[1]:
                continue
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream)
            os.close(null)
            # A write that is held up begins again, to the new place.
            signal.pthread_kill(threading.main_thread().ident or 0, WAKE)


def exit_now(status: int) -> NoReturn:
    """Exit now: a tidy exit would wait for peers and loader workers that may never answer.

    Under a debugger the launcher goes first, and the other ranks with it: torchrun would end with
    a traceback of its own.
    """
    drop_unread()
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
        exit_now(128 + signal.SIGINT)


def _end_with(rank: Any) -> None:
    rank.join()
    os.kill(os.getpid(), KILL)


def _watch_worker() -> None:
    main, rank = threading.main_thread(), multiprocessing.parent_process()
    while is_debugged():
        time.sleep(0.5)
    if main.is_alive() and rank and rank.is_alive():
        os.kill(rank.pid, signal.SIGINT)  # type: ignore[arg-type]
