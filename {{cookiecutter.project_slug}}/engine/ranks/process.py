"""How a process ends: with its launcher, its debugger or its rank; and the thread that sees to it.

This module imports neither torch nor debugpy.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import multiprocessing
import multiprocessing.util  # registers its exit handler before install_handlers does
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from engine.errors import UserError, need_torch, print_error
from engine.ranks import protocol
from engine.ranks.protocol import DEBUGGED_LAUNCHER, KILL, LAUNCHER, STOP_SIGNALS

PR_SET_PDEATHSIG = 1  # in Linux' <sys/prctl.h>
Duty = Callable[[list[int]], object]  # is given the signals that have come


class Watch(threading.Thread):
    """The one thread beside the main one; it does its duties every POLL_SECONDS, or at a signal.

    Python's own signal handlers do not run while the main thread is in a collective or held by a
    debugger. Here signals arrive through a socket.
    """

    pydev_do_not_trace = True  # it runs while the debugger holds the others

    def __init__(self) -> None:
        super().__init__(name="watch", daemon=True)
        self.duties: dict[Duty, Callable[[Exception], object]] = {}
        self.lock = threading.Lock()  # held while it does them
        self.is_over = False
        # What else it and the main thread share:
        self.folder: Path | None = None  # in which a person asks where all ranks are
        self.position: Callable[[], str] = str  # such as "epoch 1, step 3"
        self.error: BaseException | None = None  # that ends the main thread,
        self.is_leaving = False  # which ends this rank
        self.questions = 0  # that this rank has answered

    def start(self) -> None:
        self.socket, self.wakeup = socket.socketpair()  # not before: forks would share it
        self.wakeup.setblocking(False)
        atexit.register(self.stop)
        super().start()

    def run(self) -> None:
        while not self.is_over:
            signals = self.wait()
            with self.lock:
                for duty, on_error in [*self.duties.items()]:
                    try:
                        duty(signals)
                    except Exception as error:
                        del self.duties[duty]
                        on_error(error)

    def wait(self) -> list[int]:
        """Return the signals that come within POLL_SECONDS; at once if one comes."""
        self.socket.settimeout(protocol.POLL_SECONDS)
        try:
            return [*self.socket.recv(64)]
        except TimeoutError:
            return []

    def add(self, duty: Duty, on_error: Callable[[Exception], object]) -> None:
        """Have it done from now on. on_error: called with an exception that ends the duty."""
        self.duties[duty] = on_error
        if not self.ident:
            self.start()

    def remove(self, duty: Duty) -> None:
        """Have it done no more; wait for a while if it is being done."""
        if is_held := self.lock.acquire(timeout=2 * protocol.ANSWER_SECONDS):
            self.lock.release()
        self.duties.pop(duty, None) if is_held else None

    def stop(self) -> None:
        self.is_over = True
        self.wakeup.send(b"\0")
        self.join(1)

    def take_signals(self) -> int:
        """Have signals that have a Python handler come here; return where they went before."""
        return signal.set_wakeup_fd(self.wakeup.fileno(), warn_on_full_buffer=False)


watch = Watch()


def install_handlers() -> None:
    """Exit silently on Ctrl-C, and exit with torchrun or the debugger; print a stack on a crash."""
    need_torch()
    be_quiet()
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115  None if it is closed
    faulthandler.enable(sys.__stderr__ or sys.stderr)
    # Runs before multiprocessing's own exit handler, which would wait forever for a stuck worker.
    atexit.register(_kill_workers)
    atexit.register(ignore_signals)
    if by_torchrun():
        _follow_parent(signal.SIGTERM, int(os.environ.get(LAUNCHER, os.getppid())))
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
    return "TORCHELASTIC_RUN_ID" in os.environ or LAUNCHER in os.environ


def by_plain_torchrun() -> bool:
    """Return whether torchrun or torch.distributed.launch did, without launch.sh."""
    return by_torchrun() and LAUNCHER not in os.environ


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
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed terminal
            stream.flush()
    _kill_workers()
    if os.environ.get(DEBUGGED_LAUNCHER) == str(os.getppid()):
        os.kill(os.getppid(), KILL)
    os._exit(status)


def _kill_workers() -> None:
    """Kill the loader workers, which otherwise take seconds to notice that their rank has gone."""
    if threading.current_thread() is not threading.main_thread():
        return  # torch would raise in the main thread; _follow_parent ends them soon enough
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in multiprocessing.active_children():
        worker.kill()


def _follow_parent(signum: int, launcher: int) -> None:
    """Have the kernel send `signum` to this process when its parent ends; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)
        if not is_running(launcher):  # it ended before that call
            os.kill(os.getpid(), signum)


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
    if rank.pid == os.getppid():  # else Python's fork server is the parent, and torch looks
        _follow_parent(KILL, rank.pid)
    signal.set_wakeup_fd(-1)
    ignore_signals()  # the rank needs its workers until the end of the step
    if is_debugged():
        threading.main_thread().name = f"rank {os.environ.get('RANK', 0)}, worker {number}"
        if DEBUGGED_LAUNCHER in os.environ:
            Watch().add(_interrupt(rank.pid), print_error)


def _interrupt(rank: int) -> Duty:
    """Return what interrupts the rank once the debugger has left this worker of it."""

    def duty(_: list[int]) -> None:
        if not is_debugged() and threading.main_thread().is_alive():
            with contextlib.suppress(ProcessLookupError):  # the rank has ended
                os.kill(rank, signal.SIGINT)

    return duty


def _follow_debugger() -> None:
    """Name this rank in the call stack, and end all ranks with its debugger or on Ctrl-C.

    VS Code's Stop ends or detaches only the process in focus.
    """
    os.environ[DEBUGGED_LAUNCHER] = str(os.getppid()) if by_torchrun() else ""
    sys.breakpointhook = stop_in_debugger
    threading.main_thread().name = f"rank {os.environ.get('RANK', 0)}"
    signal.signal(signal.SIGINT, lambda *_: None)  # without a handler the socket gets nothing
    parent = os.getppid()

    def duty(signals: list[int]) -> None:
        is_held = is_debugged() and os.getppid() == parent and signal.SIGINT not in signals
        if not is_held and threading.main_thread().is_alive():  # else pydevd ends as the program
            exit_now(128 + signal.SIGINT)

    watch.add(duty, print_error)
    watch.take_signals()


def stop_in_debugger() -> None:
    """Stop in the calling frame; debugpy's own hook does not in a process that torchrun started."""
    if is_debugged():
        pydevd = sys.modules["pydevd"]
        pydevd.settrace(trace_only_current_thread=True, stop_at_frame=sys._getframe(1))


def listen(host: str, port: int) -> str:
    """Let a debugger attach to this process from now on; return how."""
    node = socket.gethostname()
    if is_debugged():
        raise UserError("--debug-rank: this rank already has a debugger; start it without F5")
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # a warning that is not needed
    try:
        import debugpy

        debugpy.listen((host, port))
    except ImportError:
        raise UserError("--debug-rank needs debugpy: python -m pip install debugpy") from None
    except (RuntimeError, ValueError) as error:
        line = (
            f"--debug-rank: cannot listen at {host}:{port} ({error}): choose another --debug-port"
        )
        raise UserError(line) from None
    threading.main_thread().name = f"rank {os.environ.get('RANK', 0)}"
    line = f'{node}. VS Code, "Attach to a rank": host {{}}, port {port}'
    if not host.startswith("127."):
        return line.format(node)
    return (
        f"{line.format(host)}. From another machine, first run: ssh -L {port}:{host}:{port} {node}"
    )


def hold(error: Exception) -> None:
    """If there is a debugger that stops at uncaught errors, stop where `error` was raised."""
    # A debugger has imported it; the function is there from debugpy 1.8.22 on.
    if stop := getattr(sys.modules.get("debugpy"), "trigger_exception_handler", None):
        stop(error)
