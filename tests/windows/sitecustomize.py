"""Shows Windows to ddpkit, and to the project: what only POSIX has is hidden from their imports.

Names that Windows alone has are stand-ins, by what this system has. The standard library, torch
and others see the system as it is. Started by PYTHONPATH in each Python; see
library/test_windows.py, which is as much as can be shown without a Windows.
"""

import builtins
import enum
import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

OWN = {"ddpkit", "__main__", "__mp_main__", "main", "flags", "recipe", "ddp"}
OWN |= {"dataset", "model", "losses", "predict", "script"}
ABSENT = {"fcntl", "resource", "termios", "tty", "pwd", "grp", "syslog"}
# for what Windows does not have a signal of the system is taken that nobody sends here
BREAK = signal.SIGUSR2
# what a signal leaves as status: of the console, raised
BROKEN, RAISED, KILLED = 0xC000013A, 3, 1
NEW_GROUP = 0x200
NUMBERS = {
    "CTRL_C_EVENT": 0,
    "CTRL_BREAK_EVENT": 1,
    "SIGINT": 2,
    "SIGILL": 4,
    "SIGABRT": 6,
    "SIGFPE": 8,
    "SIGSEGV": 11,
    "SIGTERM": 15,
    "SIGBREAK": int(BREAK),
}
Signals = enum.IntEnum("Signals", NUMBERS)  # type: ignore[misc]
POSIX = """O_NOFOLLOW O_NONBLOCK O_CLOEXEC chown fchmod fchown fork forkpty getegid geteuid getgid
    getloadavg getpgid getpgrp getpriority getsid getuid kill killpg lchown mkfifo nice openpty
    posix_spawn pread pwrite register_at_fork sched_getaffinity sched_yield setpgid setsid setuid
    statvfs sync sysconf umask uname wait wait3 wait4 waitstatus_to_exitcode WNOHANG"""


def kill(pid: int, signum: int) -> None:
    """Of Windows: whatever the number is, but for two, it ends the process, also for 0."""
    if signum == Signals.CTRL_BREAK_EVENT:
        os.killpg(pid, BREAK)
    elif signum == Signals.CTRL_C_EVENT:
        raise OSError(errno.EINVAL, "not to a group of its own")
    else:
        os.kill(pid, signal.SIGKILL)


class Popen(subprocess.Popen):
    """Of Windows."""

    def __init__(self, *words: Any, creationflags: int = 0, **options: Any) -> None:
        options["start_new_session"] = creationflags == NEW_GROUP
        super().__init__(*words, **options)

    def poll(self) -> int | None:
        status = super().poll()
        if status is None or status >= 0:
            return status
        return {-BREAK: BROKEN, -9: KILLED}.get(status, RAISED)

    def send_signal(self, signum: int) -> None:
        if self.poll() is not None:
            return
        if signum == Signals.SIGTERM:
            self.terminate()
        elif signum in (Signals.CTRL_C_EVENT, Signals.CTRL_BREAK_EVENT):
            kill(self.pid, signum)
        else:
            raise ValueError(f"Unsupported signal: {signum}")

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    kill = terminate


def locking(handle: int, mode: int, size: int) -> None:
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def open_process(access: int, inherits: bool, pid: int) -> int:
    os.kill(pid, 0)
    return pid


def wait_for_object(pid: int, milliseconds: int) -> int:
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        return 0 if file.read().rsplit(")", 1)[1].split()[0] == "Z" else 258


class Seen(ModuleType):
    """A module as ddpkit sees it. What is set is set in the real one."""

    def __init__(self, real: ModuleType, hidden: set[str], **made: object) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(made, _real=real, _hidden=hidden)

    def __getattr__(self, name: str) -> Any:
        if name in self._hidden:
            raise AttributeError(f"Windows has no {self.__name__}.{name}")
        return getattr(self._real, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._real, name, value)


def signals() -> Seen:
    made = {name: Signals[name] for name in NUMBERS}
    names = {name for name in dir(signal) if name.startswith("SIG") and name[3] != "_"}
    names |= {"pthread_kill", "pthread_sigmask", "siginterrupt", "alarm", "setitimer"}
    names |= {"sigwait", "sigpending", "pause"}
    return Seen(signal, names - made.keys(), Signals=Signals, **made)


SEEN = {
    "os": Seen(os, set(POSIX.split()) - {"kill"}, name="nt", kill=kill),
    "signal": signals(),
    "sys": Seen(sys, set(), platform="win32"),
    "subprocess": Seen(
        subprocess, set(), Popen=Popen, CREATE_NEW_PROCESS_GROUP=NEW_GROUP
    ),
    "socket": Seen(__import__("socket"), {"AF_UNIX", "CMSG_LEN", "SCM_RIGHTS"}),
    "msvcrt": SimpleNamespace(locking=locking, LK_NBLCK=2),
    "_winapi": SimpleNamespace(
        OpenProcess=open_process,
        WaitForSingleObject=wait_for_object,
        CloseHandle=lambda handle: None,
        SYNCHRONIZE=0x100000,
        WAIT_OBJECT_0=0,
    ),
}
find = builtins.__import__


def import_as_on_windows(
    name: str,
    globals: Any = None,
    locals: Any = None,
    fromlist: Any = (),
    level: int = 0,
) -> Any:
    by = str((globals or {}).get("__name__")).split(".")[0]
    if level == 0 and by in OWN:
        if name in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name in SEEN:
            return SEEN[name]
    return find(name, globals, locals, fromlist, level)


builtins.__import__ = import_as_on_windows
multiprocessing.set_start_method("spawn")
