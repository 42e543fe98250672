"""Files and folders that appear whole or not at all; disks are tried again."""

import contextlib
import csv
import errno
import os
import re
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

from ddpkit.errors import DiskError, LineError, UserError, reason_of

T = TypeVar("T")

# Errors that pass. Not every system has all of them.
NAMES = """EIO ESTALE ETIMEDOUT EREMOTEIO ENOTCONN ESHUTDOWN EHOSTDOWN EHOSTUNREACH ENETDOWN
    ENETUNREACH ECONNRESET ECONNREFUSED ENOLINK"""
OF_NETWORK_DISKS = {getattr(errno, name, -1) for name in NAMES.split()}
# Errors after which the file may be whole.
WANTS = """EMFILE ENFILE ENOMEM ENOBUFS EINTR EAGAIN EBUSY ETXTBSY EDEADLK ENOLCK"""
OF_THIS_MOMENT = {getattr(errno, name, -1) for name in WANTS.split()}
WAITS = (1, 4)  # seconds between tries
# The most bytes of an image, an array or JSON; of lists and other texts, whose lines take time.
OF_DATA = 8 << 30
OF_TEXT = 256 << 20
# Letters and values, each as often as it is referred to.
MOST_VALUES = 1 << 25
MOST_BITS = 1000  # of an integer: larger ones are no floats
# The place before what a spreadsheet would compute, also after the ; in some tables.
FORMULA = re.compile(r"(?:^|(?<=;))(?='*[=+\-@\t\r])")
# The handle of each lock that this process holds, by its file's device and inode.
_locks: dict[tuple[int, int], int] = {}


def failure(path: Path | str, error: OSError, verb: str = "written") -> LineError:
    """Return what to raise: a DiskError if it may pass."""
    reason = error.strerror
    if error.errno in OF_NETWORK_DISKS:
        return DiskError(f"{path}: the disk does not respond ({reason})")
    if error.errno in OF_THIS_MOMENT:
        return DiskError(f"{path}: cannot be {verb} right now ({reason})")
    return UserError(f"{path}: cannot be {verb} ({reason})")


def retried(path: Path | str, function: Callable[..., T], *args: object) -> T:
    """Return `function(*args)`; if a network disk still does not answer, raise a DiskError."""
    tries = 0
    while True:
        try:
            return function(*args)
        except OSError as error:
            if error.errno not in OF_NETWORK_DISKS:
                raise
            if tries == len(WAITS):
                raise failure(path, error) from None
        time.sleep(WAITS[tries])
        tries += 1


def open_file(path: Path | str, most: int = OF_DATA, is_own: bool = False) -> BinaryIO:
    """Open a regular file to read: all that others may have made is opened here.

    Raises an OSError of a pipe, a device or a socket, which may not end, and of more than `most`
    bytes. is_own: also of a link, or of a file with other names, by which another user of the
    folder could have put a file of this user's there.
    """
    follow = getattr(os, "O_NOFOLLOW", 0) if is_own else 0

    def open_at_once(path: str, flags: int) -> int:  # also a pipe without a writer
        return os.open(path, flags | follow | getattr(os, "O_NONBLOCK", 0))

    file = open(path, "rb", opener=open_at_once)  # noqa: SIM115
    status = os.fstat(file.fileno())
    reason = ""
    if not stat.S_ISREG(status.st_mode):
        reason = "not a regular file"
    elif status.st_size > most:
        reason = f"{status.st_size:,} bytes, more than {most:,}: split it"
    elif is_own and status.st_nlink > 1:
        reason = "a file with other names (hard links)"
    if reason:
        file.close()
        raise OSError(None, reason)
    return file


def read_file(path: Path | str, most: int = OF_DATA) -> bytes:
    """Return the content of a regular file; raises an OSError as `open_file` does."""

    def read_once() -> bytes:
        with open_file(path, most) as file:
            return file.read()

    return retried(path, read_once)


def parse(
    path: Path | str,
    function: Callable[[bytes], T],
    what: str,
    remedy: str = "repair or remove it",
    most: int = OF_DATA,
) -> T:
    """Return what `function`, such as json.loads, makes of a regular file's content.

    Raises a UserError for whatever is wrong with it. what: such as "JSON".
    """
    try:
        return function(read_file(path, most))
    except LineError:
        raise
    except OSError as error:
        raise failure(path, error, "read") from None
    # Parsers have no common one: also of nesting, and of numbers of 400 digits.
    except Exception as error:
        reason = reason_of(error, 160)
        raise UserError(f"{path}: not {what} ({reason}); {remedy}") from None


def read_text(path: Path | str, errors: str = "strict", most: int = OF_TEXT) -> str:
    """Return the text of a regular file in UTF-8, or raise a UserError."""

    def decode(content: bytes) -> str:
        return content.decode("utf-8-sig", errors)

    return parse(path, decode, "UTF-8 text", "save it as UTF-8", most)


def check_size(path: Path | str, content: object) -> None:
    """Raise a UserError if a few bytes stand for more than can be compared or printed.

    Lists of references to one list, for instance, double in length at each level.
    """
    sizes: dict[int, int] = {}

    def size_of(value: object) -> int:
        if isinstance(value, str | bytes):
            return len(value)
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            return MOST_VALUES
        parts: list[object] = []
        if isinstance(value, dict):
            parts = [*value, *value.values()]
        elif isinstance(value, list | tuple | set):
            parts = [*value]
        if parts and id(value) not in sizes:
            sizes[id(value)] = sum(map(size_of, parts))
        return 1 + sizes.get(id(value), 0)

    try:
        is_usual = size_of(content) < MOST_VALUES
    except RecursionError:  # it is in itself, for instance
        is_usual = False
    if not is_usual:
        raise UserError(f"{path}: contains implausibly large numbers or lists")


@contextlib.contextmanager
def writing(path: Path, parents: bool = False) -> Iterator[Path]:
    """Give the block a path next to `path` to write to, then rename it: the old file or the new."""
    partial = path.with_name(f".{path.name}.part")
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        # what a killed run has left, or a link, which "x" does not follow
        partial.unlink(missing_ok=True)
        with partial.open("xb") as file:
            # In a folder of a group somebody may put a link to another file of this
            # user's in its place: what is written is the open file.
            yield name_of(file.fileno(), partial)
            # before the rename, or a crash could leave a name without the content
            os.fsync(file.fileno())
            # nobody can on Windows
            is_own = sys.platform == "win32" or os.path.samestat(
                os.fstat(file.fileno()), os.lstat(partial)
            )
            if not is_own:
                raise OSError(None, f"another process has replaced {partial.name}")
        move(partial, path)
    except OSError as error:
        raise failure(path, error) from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def name_of(handle: int, path: Path) -> Path:
    """Return a name of the open file itself, if the system has one; else `path`.

    It remains when the file is renamed, replaced or removed, until this process closes it.
    """
    own = Path(f"/proc/{os.getpid()}/fd/{handle}")
    return own if own.exists() else path


def keep_open(path: str, flags: int) -> str:
    """Open a file or folder until this process ends, and return a name of it as it is open."""
    return str(name_of(os.open(path, flags, 0o600), Path(path)))


def save_text(path: Path, text: str) -> None:
    with writing(path, parents=True) as tmp_path:
        tmp_path.write_text(text, "utf-8")


def make_folder(path: Path) -> None:
    """Make a folder, unless it is there; the group of the one around it can write both."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        return
    path.mkdir()
    if sys.platform == "win32":
        return
    handle = os.open(path, os.O_DIRECTORY | os.O_NOFOLLOW)
    with contextlib.suppress(OSError):  # the group is not this user's
        around = path.parent.stat()
        os.fchown(handle, -1, around.st_gid)
        mode = os.fstat(handle).st_mode | around.st_mode & 0o2070
        os.fchmod(handle, stat.S_IMODE(mode))
    os.close(handle)


def move(source: Path, target: Path) -> None:
    """Rename a file, in place of another one; on Windows once nobody has either of them open."""
    for _ in range(50 if sys.platform == "win32" else 0):
        with contextlib.suppress(PermissionError):
            return os.replace(source, target)
        time.sleep(0.1)
    os.replace(source, target)


@contextlib.contextmanager
def table(path: Path, columns: Sequence[str]) -> Iterator[Callable[[Sequence], object]]:
    """Give the block a function that writes a row of a CSV file; until its end it is `.partial`.

    Texts that a spreadsheet would compute get a ' in front, see `as_text`.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)  # as above
        # 1: by lines
        with partial.open("x", 1, "utf-8", "surrogateescape", "") as file:
            writer = csv.writer(file, lineterminator="\n")

            def write_row(row: Sequence) -> None:
                if len(row) != len(columns):
                    raise UserError(
                        f"{path}: a row has {len(row)} values for {len(columns)} columns: write "
                        "one for each"
                    )
                writer.writerow(map(as_text, row))

            write_row(columns)
            header = file.tell()
            yield write_row
            is_empty = file.tell() == header
        if is_empty:
            partial.unlink()
        else:
            sync(partial)
            move(partial, path)
    except OSError as error:
        raise failure(path, error) from None


def as_text(cell: object) -> object:
    """Return `cell` as a spreadsheet shows it: =1+2, which it would compute, as '=1+2.

    Numbers stay. To read it back, remove a ' before any of these: = + - @ tab, or another '.
    """
    if not isinstance(cell, str):
        return cell
    with contextlib.suppress(ValueError):
        float(cell)
        return cell  # such as "-1"
    return FORMULA.sub("'", cell)


def sync(path: Path) -> None:
    """Wait until the disk holds the content of a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock(path: Path) -> bool:
    """Return whether this process got the lock `path`, until it ends; True where there are none.

    By flock: what lockf locks is free once the process closes any handle of the file.

    Raises an OSError if another user has made the file, and keeps it closed.
    """
    handle = _open_lock(path)
    status = os.fstat(handle)
    key = status.st_dev, status.st_ino
    if key in _locks:  # of another run in this process
        os.close(handle)
        return True
    for _ in range(50):  # a run that was just killed may need a moment
        try:
            if sys.platform == "win32":
                import msvcrt

                msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
            else:
                import fcntl

                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _locks[key] = handle
            return True
        except OSError as error:
            # EBADF: on NFS, a file that can only be read.
            if error.errno not in (errno.EACCES, errno.EAGAIN, errno.EBADF):
                return True
        time.sleep(0.1)
    os.close(handle)
    return False


def _open_lock(path: Path) -> int:
    """Open a lock file for those, and only those, who can write its folder.

    Whoever can open it can lock it, even to read: others could keep every run from its folder. But
    a group that shares the folder takes turns.
    """
    if path.is_symlink():
        path.unlink()
    if sys.platform == "win32":
        return os.open(path, os.O_RDWR | os.O_CREAT)
    safely = os.O_NOFOLLOW | os.O_NONBLOCK  # not a link, nor a pipe that waits
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | safely, 0o600)
    except PermissionError:
        if not path.exists():
            raise
        # of a colleague with a umask of 022; flock needs no more
        return os.open(path, os.O_RDONLY | safely)
    folder = path.parent.stat()
    mode = 0o600 | 3 * (folder.st_mode & 0o022)  # "rw" for those that have "w" there
    # it is another user's, or the group is not this user's
    with contextlib.suppress(OSError):
        os.chown(handle, -1 if os.geteuid() else folder.st_uid, folder.st_gid)
        os.fchmod(handle, mode)
    return handle


def _leave_locks() -> None:
    """Close the locks in a forked child, which would hold them for as long as it lives."""
    for handle in _locks.values():
        os.close(handle)
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_locks)


@contextlib.contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """Give the block an empty folder to fill, then rename it to `folder`, unless there is one."""
    # Of each process its own, because several may begin at once.
    here = f"{socket.gethostname()}-{os.getpid()}"
    partial = folder.with_name(f"{folder.name}.partial-{here}")
    try:
        partial.mkdir(parents=True)
        yield partial
        move(partial, folder)
    except OSError as error:
        if not folder.is_dir():  # else another process was first
            raise failure(folder, error) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
