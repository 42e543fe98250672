"""How a process ends: with its launcher, its debugger or its rank; and the thread that sees to it.

This module imports neither torch nor debugpy.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import multiprocessing
import multiprocessing.util  # registers its exit handler before install_handlers does
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ddpkit.errors import (
    UserError,
    drop_unprinted,
    guard_streams,
    no_torch,
    print_error,
    print_line,
)
from ddpkit.ranks import protocol
from ddpkit.ranks.protocol import DEBUGGED_LAUNCHER, KILL, LAUNCHER, STOP_SIGNALS

PR_SET_PDEATHSIG = 1  # in Linux' <sys/prctl.h>
# After a fork in another thread that one is the main thread, with another ident.
MAIN_THREAD = threading.main_thread().ident
Duty = Callable[[list[int]], object]  # is given the signals that have come


class Watch(threading.Thread):
    """The one thread beside the main one; it does its duties every POLL_SECONDS, or at a signal.

    Signals reach it by a socket: handlers do not run while the main thread is in a collective.
    """

    pydev_do_not_trace = True  # it runs while the debugger holds the others

    def __init__(self) -> None:
        super().__init__(name="watch", daemon=True)
        self.duties: list[Duty] = []
        self.lock = threading.Lock()  # held while it does them
        self.is_over = False
        # What else it and the main thread share:
        self.is_leaving = False  # the main thread ends this rank
        # The file that launch.sh finds if this rank ends without a word
        self.silent: Path | None = None

    def _begin(self) -> None:
        # Not made before: forks would share it.
        self.socket, self.wakeup = socket.socketpair()
        self.wakeup.setblocking(False)
        atexit.register(self.stop)
        self.start()

    def run(self) -> None:
        while not self.is_over:
            signals = self.wait_for_signals(protocol.POLL_SECONDS)
            with self.lock:
                try:
                    for duty in self.duties.copy():
                        duty(signals)
                except Exception:  # without it nobody could stop this rank
                    print_line(traceback.format_exc(), sys.stderr)
                    exit_now(1)

    def wait_for_signals(self, seconds: float) -> list[int]:
        """Return the signals that come within `seconds`; at once if one comes."""
        self.socket.settimeout(seconds)
        with contextlib.suppress(TimeoutError):
            return list(self.socket.recv(64))
        return []

    def add_duty(self, duty: Duty) -> None:
        if duty not in self.duties:
            self.duties.append(duty)
        if not self.ident:
            self._begin()

    def remove_duty(self, duty: Duty) -> None:
        if self.lock.acquire(timeout=2 * protocol.ANSWER_SECONDS):
            if duty in self.duties:  # a child that was forked has none
                self.duties.remove(duty)
            self.lock.release()

    def stop(self) -> None:
        self.is_over = True
        self.wakeup.send(b"\0")
        self.join(1)


watch = Watch()
# By process id of a rank: the folder for its loader workers' sockets
_sockets: dict[int, str] = {}
_iterators: weakref.WeakSet[Any] = weakref.WeakSet()  # of this process's loaders
_masks = threading.local()  # signals that a thread has held back before it forks


def note_iterator(iterator: object) -> None:
    """Have a child that is forked leave the workers of a loader's iterator to this process."""
    _iterators.add(iterator)
    end_workers_at_exit()


def hand_over(*_: object) -> None:
    """Leave a signal to the watch thread: without any handler the socket gets nothing."""


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
    if watch.ident:
        signal.set_wakeup_fd(-1)
    Watch.__init__(watch)  # the thread is not here, and may have held the lock
    for signum in STOP_SIGNALS:
        handler = signal.getsignal(signum)
        if getattr(handler, "__module__", "").startswith("ddpkit."):
            is_end = signum == signal.SIGTERM
            signal.signal(signum, signal.SIG_DFL if is_end else hand_over)
    # Else to drop its copy would end the workers of the parent.
    for iterator in _iterators:
        iterator._shutdown = True
    # The workers are not the child's own.
    for at_exit in (watch.stop, _kill_at_exit, ignore_signals):
        atexit.unregister(at_exit)
    _after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child
    )


def project() -> Path:
    """Return the folder of the main.py that is imported as `main`; without one of the script.

    ddpkit may lie in it or elsewhere, so its own place says nothing.
    """
    spec = None
    with contextlib.suppress(ValueError):  # a test may have made a `main` without one
        spec = importlib.util.find_spec("main")
    if spec and spec.origin:
        return Path(spec.origin).resolve().parent
    script = getattr(sys.modules["__main__"], "__file__", None)
    is_tool = script and Path(script).resolve().is_relative_to(
        Path(__file__).parents[1]
    )
    return Path.cwd() if is_tool or not script else Path(script).resolve().parent


def own(name: str) -> Any:
    """Return a module of the project, such as "dataset"."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise UserError(
            f"no {name}.py in {project()}: run this in the project's folder"
        ) from None


def install_handlers() -> None:
    """Exit silently on Ctrl-C, and exit with torchrun or the debugger; print a stack on a crash."""
    guard_streams()
    line = no_torch()
    if line:
        print_error(line)
        sys.exit(protocol.MISTAKE)
    be_quiet()
    if not sys.stderr:  # it is closed
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    faulthandler.enable(sys.__stderr__ or sys.stderr)
    end_workers_at_exit()
    atexit.register(ignore_signals)
    if by_torchrun():
        launcher = int(os.environ.get(LAUNCHER, os.getppid()))
        if not _follow_parent(signal.SIGTERM, launcher) and sys.platform != "linux":
            _look_after(launcher)
    if by_plain_torchrun() and os.environ["RANK"] == "0" and "--help" not in sys.argv:
        print_line(f"starting {os.environ['WORLD_SIZE']} rank(s) ...", sys.stdout)
    if is_debugged():
        follow_debugger()


def be_quiet() -> None:
    """Print nothing on Ctrl-C, nor 40 lines of C++ when the rank that held the store has died."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # What the debugger says in each rank
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    # What torch.profiler says; read when torch is imported
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # Not if the shell has it ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):  # the launcher holds it back until now
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def by_torchrun() -> bool:  # or by launch.sh
    return "TORCHELASTIC_RUN_ID" in os.environ or LAUNCHER in os.environ


def by_plain_torchrun() -> bool:  # without launch.sh
    return by_torchrun() and LAUNCHER not in os.environ


def is_debugged() -> bool:
    pydevd = sys.modules.get("pydevd")  # sys.gettrace() is None from Python 3.12 on
    return pydevd is not None and getattr(pydevd, "_is_attached", lambda: True)()


def is_running(pid: int) -> bool:
    """Return whether this machine has such a process."""
    if sys.platform == "win32":  # where os.kill would end it
        import _winapi

        try:
            handle = _winapi.OpenProcess(_winapi.SYNCHRONIZE, False, pid)
        except OSError as error:
            return isinstance(error, PermissionError)
        is_over = _winapi.WaitForSingleObject(handle, 0) == _winapi.WAIT_OBJECT_0
        _winapi.CloseHandle(handle)
        return not is_over
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # another user's
    return state(pid) != "Z"  # it has ended, but its parent has not asked yet


def state(pid: int) -> str:
    """Return the letter of a process's state, such as "T" if SIGSTOP holds it; on Linux only."""
    with contextlib.suppress(OSError):
        said = Path(f"/proc/{pid}/stat").read_bytes()
        return said.rsplit(b")", 1)[1].split()[0].decode()
    return ""


def ignore_signals() -> None:
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


@contextlib.contextmanager
def holding_signals(signals: Collection[int] = STOP_SIGNALS) -> Iterator[None]:
    """Hold back the signals that request a stop; a process forked in the block never gets them."""
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def exit_now(status: int) -> NoReturn:
    """Exit without cleaning up, which could wait forever; with F5, end torchrun and all ranks."""
    drop_unprinted()
    note_exit()
    _kill_workers()
    remove_sockets()
    if os.environ.get(DEBUGGED_LAUNCHER) == str(os.getppid()):
        os.kill(os.getppid(), KILL)
    os._exit(status)


def note_start() -> None:
    """Have launch.sh say so if this rank, without a word, exits with a status other than 0."""
    path = os.environ.pop(protocol.SILENT, "")  # which is not for what this rank starts
    if path:
        watch.silent = Path(path)
        with contextlib.suppress(OSError):
            watch.silent.touch()
        atexit.register(_note_traceback)
        if sys.platform == "win32":
            watch.add_duty(_take_request)


def _take_request(_: list[int]) -> None:
    """Raise the signal that launch.py has written, if it has."""
    request = Path(f"{watch.silent}{protocol.REQUEST}")
    # ValueError: it is at it
    with contextlib.suppress(OSError, ValueError):
        signum = int(request.read_bytes())
        request.unlink()
        signal.raise_signal(signum)


def _note_traceback() -> None:
    if hasattr(sys, "last_value"):  # Python has printed one
        note_exit()


def note_exit() -> None:
    """Tell launch.sh that this rank ends for a reason that is printed, or known to it."""
    if watch.silent:
        with contextlib.suppress(OSError):
            watch.silent.unlink()


def begin_to_leave() -> None:
    """Call it in the main thread: from here on workers may end, and torch's handler not raise."""
    watch.is_leaving = True
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _kill_workers() -> None:
    """Kill the loader workers, which otherwise take seconds to notice that their rank has gone."""
    if threading.current_thread() is not threading.main_thread():
        # For a killed loader worker torch would raise in the main thread. They ignore
        # SIGTERM, and follow their rank soon enough; it ends what else a person has
        # started.
        for child in multiprocessing.active_children():
            child.terminate()
        return
    begin_to_leave()
    for child in multiprocessing.active_children():
        child.kill()


def end_workers_at_exit() -> None:
    """Have this process kill its loader workers when it exits.

    They outlive SIGTERM, which multiprocessing's own exit handler sends before it waits for them.
    """
    atexit.unregister(_kill_at_exit)
    atexit.register(_kill_at_exit)  # runs before that handler


def _kill_at_exit() -> None:
    begin_to_leave()
    for child in multiprocessing.active_children():
        if child.daemon:  # Python waits for others, which a person has started
            child.kill()


def socket_folder() -> str:
    """Return this rank's folder for the sockets of its workers, which are killed and leave them."""
    pid = os.getpid()
    if pid not in _sockets:
        launchers = os.path.dirname(os.environ.get(protocol.STORE, ""))
        for parent in (launchers, tempfile.gettempdir(), "/dev/shm"):
            # A socket's path has at most 107 bytes; 31 are those of the names below.
            if len(os.fsencode(parent)) <= 76 and os.access(parent, os.W_OK):
                break
        _sockets[pid] = tempfile.mkdtemp(prefix="ddp-", dir=parent)
        atexit.register(remove_sockets)
    return _sockets[pid]


def remove_sockets() -> None:
    """Remove this rank's folder; the last rank also that of a launcher that was killed."""
    folder = _sockets.pop(os.getpid(), "")
    shutil.rmtree(folder, ignore_errors=True)
    launchers = os.path.dirname(os.environ.get(protocol.STORE, ""))
    is_last = folder and launchers and not any(Path(launchers).glob("ddp-*"))
    if is_last and not is_running(int(os.environ[LAUNCHER])):
        shutil.rmtree(launchers, ignore_errors=True)


def _follow_parent(signum: int, parent: int) -> bool:
    """Have the kernel send `signum` to this process when its parent ends, if it can.

    It can on Linux, for what the main thread has started: otherwise that thread's end would count.
    """
    if sys.platform != "linux" or threading.get_ident() != MAIN_THREAD:
        return False
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)
    if not is_running(parent):  # it ended before that call
        os.kill(os.getpid(), signum)
    return os.getppid() == parent


def _look_after(launcher: int) -> None:
    """Have this rank get SIGTERM once its launcher has ended: the kernel does not see to it."""

    def follow_launcher(_: list[int]) -> None:
        if not is_running(launcher):
            watch.duties.remove(follow_launcher)
            signal.raise_signal(signal.SIGTERM)

    watch.add_duty(follow_launcher)


def start_worker(number: int) -> None:
    """Set up a loader worker, as its `worker_init_fn`: it ends with its rank, however that ends."""
    parent = multiprocessing.parent_process()
    assert parent and parent.pid
    rank = parent.pid
    # The rank needs its workers until the end of the step. Programs that they start
    # would inherit SIG_IGN, and that signals are held back; not a handler.
    for signum in STOP_SIGNALS:
        signal.signal(signum, hand_over)
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        for signum in STOP_SIGNALS:
            signal.siginterrupt(signum, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def follow_rank(_: list[int]) -> None:
        if not is_running(rank) or not parent.is_alive():
            os._exit(1)

    def interrupt_rank(_: list[int]) -> None:
        """Interrupt the rank once the debugger has left this worker of it."""
        if not is_debugged() and threading.main_thread().is_alive():
            with contextlib.suppress(ProcessLookupError):  # the rank has ended
                os.kill(rank, signal.SIGINT)

    if not _follow_parent(KILL, rank):  # the kernel does not see to it
        Watch().add_duty(follow_rank)
    if is_debugged():
        name = f"rank {os.environ.get('RANK', 0)}, worker {number}"
        threading.main_thread().name = name
        if DEBUGGED_LAUNCHER in os.environ:
            Watch().add_duty(interrupt_rank)


def follow_debugger() -> None:
    """End all ranks with this one's debugger (VS Code's Stop means one process) or on Ctrl-C."""
    adapt_debugger()
    os.environ[DEBUGGED_LAUNCHER] = str(os.getppid()) if by_torchrun() else ""
    sys.breakpointhook = stop_in_debugger
    # What completion in the debug console has torch say
    warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is", FutureWarning)
    threading.main_thread().name = f"rank {os.environ.get('RANK', 0)}"
    signal.signal(signal.SIGINT, hand_over)
    rank = os.getpid()
    parent = os.getppid()
    # A worker to which nobody can attach any more ends, too.
    if sys.platform == "linux":
        os.register_at_fork(after_in_child=lambda: _follow_parent(KILL, rank))

    def duty(signals: list[int]) -> None:
        is_over = not is_debugged() or os.getppid() != parent
        if not is_over and signal.SIGINT not in signals:
            return
        # Once the main thread has ended, pydevd ends as the program does.
        if threading.main_thread().is_alive():
            exit_now(128 + signal.SIGINT)

    watch.add_duty(duty)
    signal.set_wakeup_fd(watch.wakeup.fileno(), warn_on_full_buffer=False)


def adapt_debugger() -> None:
    """Have the debugger name the rank where it stops, go over ddpkit, and continue when asked.

    VS Code cuts off which process a row is of; beside it stands the description of the stop.
    """
    with contextlib.suppress(AttributeError, KeyError):  # its own names may change
        schema = sys.modules["_pydevd_bundle._debug_adapter.pydevd_schema"]
        filtering = sys.modules["_pydevd_bundle.pydevd_filtering"]
        lifecycle = sys.modules["_pydevd_bundle.pydevd_thread_lifecycle"]
        resume = lifecycle.resume_threads
        debugger = sys.modules["pydevd"].get_global_debugger()
        over_ddpkit = [filtering.ExcludeFilter("ddpkit", True, is_path=False)]
        describe = schema.StoppedEventBody.__init__
        request = project() / protocol.CONTINUE
        asked_at = _time_of(request)

        def describe_with_name(
            body: object, reason: str, description: str | None = None, **rest: object
        ) -> None:
            name = threading.main_thread().name
            describe(body, reason, f"{name}: {description or reason}", **rest)

        def follow_person(_: list[int]) -> None:
            nonlocal asked_at
            # unless justMyCode is false, or launch.json has rules of its own
            has_rules = debugger.get_require_module_for_filters()
            if debugger.get_use_libraries_filter() and not has_rules:
                debugger.set_exclude_filters(over_ddpkit)
            before = asked_at
            asked_at = _time_of(request)
            if asked_at > before:
                resume("*")

        follow_person([])
        schema.StoppedEventBody.__init__ = describe_with_name
        watch.add_duty(follow_person)


def _time_of(path: Path) -> float:
    """Return when a file was last written; 0 if it is not there."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def stop_in_debugger(frame: FrameType | None = None) -> None:
    """Stop in the calling frame; debugpy's own hook does not in a process that torchrun started."""
    if is_debugged():
        frame = frame or sys._getframe(1)
        sys.modules["pydevd"].settrace(
            trace_only_current_thread=True, stop_at_frame=frame
        )
