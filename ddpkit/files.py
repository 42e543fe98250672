"""Files and folders that appear whole or not at all; disks are tried again."""

import contextlib
import csv
import errno
import os
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from ddpkit.errors import DiskError, LineError, UserError

T = TypeVar("T")

NAMES = """EIO ESTALE ETIMEDOUT EREMOTEIO ENOTCONN ESHUTDOWN EHOSTDOWN EHOSTUNREACH ENETDOWN
    ENETUNREACH ECONNRESET ECONNREFUSED ENOLINK"""
OF_NETWORK_DISKS = {getattr(errno, name, -1) for name in NAMES.split()}  # errors that pass
WAITS = (1, 4)  # seconds between tries


def failure(path: Path | str, error: OSError, verb: str = "written") -> LineError:
    """Return what to raise: a DiskError if it may pass."""
    if error.errno in OF_NETWORK_DISKS:
        return DiskError(f"{path}: the disk does not answer ({error.strerror})")
    return UserError(f"{path}: cannot be {verb} ({error.strerror})")


def retried(path: Path | str, function: Callable[..., T], *args: object) -> T:
    """Return `function(*args)`; if a network disk still does not answer, raise a DiskError."""
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
        if not stat.S_ISREG(os.stat(path).st_mode):  # to open a pipe waits for a writer
            raise OSError(None, "not a regular file")
        with open(path, "rb", buffering=0) as file:
            return file.read()

    return retried(path, attempt)


@contextlib.contextmanager
def writing(path: Path, parents: bool = False) -> Iterator[Path]:
    """Give the block a path next to `path` to write to, then rename it: the old file or the new."""
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
    """Give the block a function that writes a row of a CSV file; until its end it is `.partial`."""
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


def lock(path: Path) -> bool:
    """Return whether this process got the lock; True where there are none, as on Windows."""
    try:
        import fcntl
    except ImportError:
        return True
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    for _ in range(50):  # a run that was just killed may need a moment
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # forked workers inherit flock's
            return True
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return True
        time.sleep(0.1)
    return False


@contextlib.contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """Give the block an empty folder to fill, then rename it to `folder`, unless there is one."""
    partial = folder.with_name(f"{folder.name}.partial-{socket.gethostname()}-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(folder)
    except OSError as error:
        if not folder.is_dir():
            raise failure(folder, error) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
