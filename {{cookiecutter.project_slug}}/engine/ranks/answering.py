"""Says where this rank is: to other ranks, to a person who asks, and when C++ aborts it.

gloo ends a process from a thread of its own if what another rank sends does not fit; nccl does if
a collective takes too long. Their main threads know nothing of it.
"""

import atexit
import contextlib
import ctypes
import os
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import files
from engine.errors import LineError, UserError
from engine.ranks import debugging, distributed, explaining, names, positions, process, protocol

POLL_SECONDS = 0.5

Report = Callable[[str, int], object]


class Answering(threading.Thread):
    """The thread that answers."""

    pydev_do_not_trace = True  # it runs on while a debugger holds the others

    def __init__(self, look: Callable[[], object]) -> None:
        super().__init__(name="answering", daemon=True)
        self.look = look
        self.folder: Path | None = None  # in which a person asks
        self.is_over = threading.Event()

    def run(self) -> None:
        # RuntimeError: the store has gone, with the rank or launcher that held it.
        # AttributeError: the main thread is leaving the group.
        with contextlib.suppress(RuntimeError, AttributeError):
            while not self.is_over.wait(POLL_SECONDS):
                if not distributed.is_joined():
                    continue
                self.look()
                if positions.answer() and self.folder:
                    listen_if_asked(self.folder)
                if self.folder and distributed.is_rank_zero():
                    answer_person(self.folder)

    def stop(self) -> None:
        self.is_over.set()
        self.join(1)


_thread: Answering | None = None
_kept: list[Any] = []  # what C++ has a pointer to


def start(report: Report, look: Callable[[], object]) -> None:
    """Answer until this process ends, and `look` for failures; `report` an abort as an error."""
    global _thread
    if _thread:
        return
    _thread = Answering(look)
    _thread.start()
    atexit.register(_thread.stop)
    explain_aborts(report)


def listen(folder: Path) -> None:
    """Answer those who ask in the output folder `folder`, with where.py."""
    if distributed.is_rank_zero():
        for name in protocol.ASKED, protocol.ATTACH:
            for path in folder.glob(f"{name}-*"):  # left by what was killed
                with contextlib.suppress(OSError):
                    path.unlink()
    if _thread:
        _thread.folder = folder


def answer_person(folder: Path) -> None:
    """If there are files ASKED-NAME, write where all ranks are into ASKED-NAME.txt."""
    with contextlib.suppress(OSError, ValueError, LineError):
        asked = [path for path in folder.glob(f"{protocol.ASKED}-*") if not path.suffix]
        if asked and (found := positions.ask(positions.ANSWER_SECONDS, by_person=True)):
            lines = [explaining.block("", found)]
            listen_if_asked(folder)  # this rank
            names = {path.name.rpartition("-")[2] for path in folder.glob(f"{protocol.ATTACH}-*")}
            lines += [await_listener(int(name)) for name in sorted(names) if name.isdecimal()]
            for path in asked:
                path.unlink(missing_ok=True)
                with files.writing(path.with_suffix(".txt")) as tmp_path:
                    tmp_path.write_text("\n".join(lines), errors="surrogateescape")
            positions.tell_explained()


def check_attach(folder: Path) -> bool:
    """Return whether the owner of this process, and nobody else, asks in `folder` to attach to it.

    Through a debugger anything can be run: a key in the store, which others may reach, is no proof,
    and in a folder that others can write to, a file may be one that the owner made for another end.
    Raises a UserError there.
    """
    path = folder / f"{protocol.ATTACH}-{distributed.rank()}"
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (AttributeError, OSError):  # on Windows, which lacks both; no such file, or a link
        return False
    file, place = os.fstat(handle), os.stat(folder)
    os.close(handle)
    if not stat.S_ISREG(file.st_mode) or file.st_uid != os.geteuid() or file.st_nlink > 1:
        raise UserError(f"{path}: not a file of this run's owner, with that name alone")
    if place.st_uid != os.geteuid() or place.st_mode & 0o022:
        raise UserError(f"{folder}: others may write there; chmod go-w it, then ask again")
    return True


def listen_if_asked(folder: Path) -> None:
    """Have a debugger attach to this rank, if its owner has asked for it in `folder`."""
    rank = distributed.rank()
    try:
        if not check_attach(folder):
            return
        line = f"rank {rank} listens on {debugging.listen()}"
    except UserError as error:
        line = f"error: {error}"
    distributed.store().set(protocol.listens(rank), line)


def await_listener(rank: int) -> str:
    """Return how a debugger attaches to `rank`, once it listens, or why it cannot."""
    store, key = distributed.store(), protocol.listens(rank)
    if not positions.await_keys(key):
        return f"error: rank {rank} does not listen for a debugger"
    line = store.get(key).decode()
    store.delete_key(key)
    return line


def explain_aborts(report: Report) -> None:
    """Before C++ ends this process print where all ranks are; if gloo does, `report` it instead."""
    if sys.platform != "linux":
        return
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        set_terminate = library._ZSt13set_terminatePFvvE  # std::set_terminate
        current_type = library.__cxa_current_exception_type
    except (OSError, AttributeError):
        return
    set_terminate.argtypes = [ctypes.c_void_p]
    set_terminate.restype = current_type.restype = ctypes.c_void_p
    handler, pid = ctypes.CFUNCTYPE(None), os.getpid()

    def on_terminate() -> None:
        set_terminate(before)
        if pid == os.getpid() and distributed.is_joined() and not distributed.is_debugged():
            by_gloo = b"gloo" in name_of(current_type())
            with contextlib.suppress(Exception):
                end_aborted(by_gloo, report)
            if by_gloo:  # the store has gone, with the rank that reported the error
                process.exit_now(1)
        handler(before)()

    _kept.append(handler(on_terminate))
    before = set_terminate(ctypes.cast(_kept[0], ctypes.c_void_p))
    atexit.register(set_terminate, before)  # after that there is no Python to call


def name_of(type_info: int | None) -> bytes:
    """Return the second member of a std::type_info, or b"" without one."""
    if not type_info:
        return b""
    return ctypes.c_char_p.from_address(type_info + ctypes.sizeof(ctypes.c_void_p)).value or b""


def end_aborted(by_gloo: bool, report: Report) -> None:
    what = "got from another rank what does not fit its collective" if by_gloo else "is aborted"
    line = f"{names.own_rank()} {what}"
    explaining.show(f"{line}:")
    positions.await_explained()
    if by_gloo:
        report(line, 1)
