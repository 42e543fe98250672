"""Files and folders that appear whole or not at all."""

import contextlib
import csv
import errno
import glob
import os
import shutil
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from engine.errors import DiskError, LineError, UserError
from engine.ranks import process

T = TypeVar("T")

OF_NETWORK_DISKS = {  # errors that pass; not every system has all
    getattr(errno, name, None)
    for name in (
        *("EIO", "ESTALE", "ETIMEDOUT", "EREMOTEIO", "ENOTCONN", "ESHUTDOWN", "EHOSTDOWN"),
        *("EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "ECONNRESET", "ECONNREFUSED", "ENOLINK"),
    )
} - {None}
WAITS = (1, 4)  # seconds between tries


def failure(path: Path | str, error: OSError, verb: str = "written") -> LineError:
    """Return what to raise for an `error` at `path`: a DiskError if it may pass."""
    if error.errno in OF_NETWORK_DISKS:
        return DiskError(f"{path}: the disk does not answer ({error.strerror})")
    return UserError(f"{path}: cannot be {verb} ({error.strerror})")


def retried(path: Path | str, function: Callable[..., T], *args: object) -> T:
    """Return `function(*args)`, tried again if a network disk does not answer.

    Raises a DiskError, which names `path`, if it still does not.
    """
    for seconds in (*WAITS, None):
        try:
            return function(*args)
        except OSError as error:
            if error.errno not in OF_NETWORK_DISKS:
                raise
            if seconds is None:
                raise failure(path, error) from None
        time.sleep(seconds)
    raise AssertionError


def read(path: Path | str) -> bytes:
    """Return the content of a regular file. A pipe or a device, which may not end, is no file."""

    def attempt() -> bytes:
        with open(path, "rb", buffering=0, opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(None, "not a regular file")
            return file.read()

    return retried(path, attempt)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe would wait for a writer


@contextlib.contextmanager
def writing(path: Path, parents: bool = False) -> Iterator[Path]:
    """Give the block a temporary path next to `path` to write to, then rename it to `path`.

    Whatever interrupts the block, `path` is the old file or the new one, never a part of it. With
    `parents` its folder is created. Raises what `failure` returns if it cannot be written.
    """
    tmp_path = path.with_name(f".{path.name}.part")
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        yield tmp_path
        sync(tmp_path)
        os.replace(tmp_path, path)
    except OSError as error:
        raise failure(path, error) from None
    finally:
        with contextlib.suppress(OSError):
            tmp_path.unlink(missing_ok=True)


@contextlib.contextmanager
def table(path: Path, columns: Sequence[str]) -> Iterator[Callable[[Sequence], object]]:
    """Give the block a function that writes a row of the CSV file `path`, which appears at its end.

    If the block is interrupted, even by SIGKILL, the rows so far are in `path`.partial. If it
    writes no row, there is no file. File names that are not UTF-8 are written as their own bytes.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "w", 1, "utf-8", "surrogateescape", newline="") as file:  # 1: by lines
            write = csv.writer(file, lineterminator="\n").writerow
            write(columns)
            header = file.tell()
            yield write
            is_empty = file.tell() == header
        if is_empty:
            return partial.unlink()
        sync(partial)
        os.replace(partial, path)
    except OSError as error:
        raise failure(path, error) from None


def sync(path: Path) -> None:
    """Wait until the disk holds the content of a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock(path: Path, seconds: float = 5) -> bool:
    """Lock `path` until this process ends; return whether that was possible within `seconds`.

    Always True where files cannot be locked, as on Windows and some network disks.
    """
    try:
        import fcntl
    except ImportError:
        return True
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    deadline = time.monotonic() + seconds  # a run that was just killed may need a moment
    while True:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # forked workers inherit flock's
            return True
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return True
            if time.monotonic() > deadline:
                return False
        time.sleep(0.1)


@contextlib.contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """Give the block an empty folder to fill, then rename it to `folder`.

    An interrupted block leaves no `folder`; SIGTERM ends the process. What SIGKILL leaves behind is
    removed by the next call on this machine. If another process was faster, its folder stays.

    Raises a UserError if the folder cannot be written.

        with engine.filling(Path("data/demo")) as partial:
            image.save(partial / "0001.jpg")
    """

    def end(signum: int, _: object) -> None:
        # Not sys.exit: Python drops an exception that is raised during a callback of an import.
        shutil.rmtree(partial, ignore_errors=True)
        os._exit(128 + signum)

    name = f"{folder.name}.partial-{socket.gethostname()}-"
    partial = folder.with_name(f"{name}{os.getpid()}")
    for left in folder.parent.glob(f"{glob.escape(name)}*"):
        pid = left.name.removeprefix(name)
        if pid.isdecimal() and not process.is_running(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    is_main = threading.current_thread() is threading.main_thread()  # not in Ray's worker
    before = signal.signal(signal.SIGTERM, end) if is_main else None
    try:
        partial.mkdir(parents=True)
        yield partial
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    except OSError as error:
        raise failure(folder, error) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if is_main:
            signal.signal(signal.SIGTERM, before)
