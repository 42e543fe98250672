"""What this process and others are; and how this one ends.

This module imports neither torch nor debugpy.
"""

import atexit
import contextlib
import ctypes
import functools
import importlib
import importlib.util
import multiprocessing
import os
import shutil
import signal
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NoReturn

from ddpkit.errors import UserError, drop_unprinted
from ddpkit.files import keep_open
from ddpkit.ranks.protocol import (
    DEBUGGED_LAUNCHER,
    KILL,
    LAUNCHER,
    STOP_SIGNALS,
    STORE,
)

LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
PR_SET_PDEATHSIG = 1  # in Linux' <sys/prctl.h>
# After a fork in another thread that one is the main thread, with another ident.
MAIN_THREAD = threading.main_thread().ident
# By process id, as forks inherit this: where the sockets of loader workers lie
_folders: dict[int, str] = {}


class End:
    """What the threads of this process know of its end."""

    status = 1  # with which this rank ends if it has to be ended; 0 once all is done
    is_leaving = False  # this rank ends itself; from then on its workers may end
    error: BaseException | None = None  # for which its main thread does


@functools.cache  # to look for it takes 0.1 ms, and is asked for each imported module
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


@functools.cache
def repository(folder: Path) -> Path:
    """Return the nearest folder around a script's that is a project of Python's, or of git's."""
    for each in (folder, *folder.parents):
        if (each / "pyproject.toml").exists() or (each / ".git").exists():
            return each
    return folder


@functools.cache
def within(root: Path, file: str) -> str:
    """Return the path of a file of the project in `root`, within it; of others nothing."""
    path = Path(os.path.realpath(file))
    # An environment may lie in the project.
    if str(path).startswith(LIBRARIES) or not path.is_file():
        return ""
    return str(path.relative_to(root)) if path.is_relative_to(root) else ""


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


def launcher() -> int:
    """Return the process id of the launcher: torchrun does not say its own; it is the parent."""
    return int(os.environ.get(LAUNCHER, os.getppid()))


def is_script() -> bool:
    return hasattr(sys.modules["__main__"], "__file__")  # a notebook has none


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


def end_with(signum: int, parent: int) -> bool:
    """Have the kernel send `signum` to this process when its parent ends, if it can.

    It can on Linux, for what the main thread has started: otherwise that thread's end would count.
    """
    if sys.platform != "linux" or threading.get_ident() != MAIN_THREAD:
        return False
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)
    if not is_running(parent):  # it ended before that call
        os.kill(os.getpid(), signum)
    return os.getppid() == parent


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
    End.is_leaving = True
    # By SIGKILL: torchrun would first wait for ranks that a debugger holds.
    if os.environ.get(DEBUGGED_LAUNCHER) == str(os.getppid()):
        os.kill(os.getppid(), KILL)
    for child in multiprocessing.active_children():
        # one that hangs, or holds SIGTERM back; what a person has started may clean up
        child.kill() if child.daemon else child.terminate()
    remove_folders()
    # Not sys.exit: it ends this thread alone, and exit handlers, destructors of C++ and
    # threads of nccl would wait for ranks that are not there any more.
    os._exit(status)


def make_socket_folder(rank: Any) -> None:
    """Have a folder for the sockets of its workers, which are killed and leave them.

    It lies in that of launch.sh, which removes both if this rank is killed. Workers inherit a
    short name of it: with a long TMPDIR the names of their sockets would be too long.
    """
    pid = os.getpid()
    if pid not in _folders:
        around = os.path.dirname(os.environ.get(STORE, ""))
        _folders[pid] = folder = tempfile.mkdtemp(prefix="ddp-", dir=around or None)
        rank._config["tempdir"] = keep_open(folder, os.O_RDONLY)
        atexit.register(remove_folders)


def remove_folders() -> None:
    """Remove that of this rank; the last rank of a launch.sh that was killed its folder, too."""
    shutil.rmtree(_folders.pop(os.getpid(), ""), ignore_errors=True)
    store = os.environ.get(STORE)
    if store and not is_running(launcher()):
        with contextlib.suppress(OSError):
            Path(store).unlink(missing_ok=True)
            os.rmdir(os.path.dirname(store))  # empty, or another rank is there
