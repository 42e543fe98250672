"""Says where this rank is: to other ranks, to a person who asks, and when C++ aborts it.

gloo ends a process from a thread of its own if what another rank sends does not fit; nccl does if
a collective takes too long. Their main threads know nothing of it.
"""

import atexit
import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import files
from engine.errors import UserError
from engine.ranks import distributed, explaining, positions, process, protocol

POLL_SECONDS = 0.5
ANSWER_SECONDS = 3  # for all ranks to say where they are

Report = Callable[[str, int], object]


class Answering(threading.Thread):
    """The thread that answers; it idles if there is a debugger, which may hold ranks."""

    def __init__(self) -> None:
        super().__init__(name="answering", daemon=True)
        self.folder: Path | None = None  # in which rank 0 looks for a person's question
        self.is_over = threading.Event()

    def run(self) -> None:
        # RuntimeError: the store has gone, with the rank or launcher that held it.
        # AttributeError: the main thread is leaving the group.
        with contextlib.suppress(RuntimeError, AttributeError):
            while not self.is_over.wait(POLL_SECONDS):
                if not distributed.is_joined() or distributed.is_debugged():
                    continue
                positions.answer()
                if self.folder:
                    answer_person(self.folder)

    def stop(self) -> None:
        self.is_over.set()
        self.join(1)


_thread: Answering | None = None
_kept: list[Any] = []  # what C++ has a pointer to


def start(report: Report) -> None:
    """Answer until this process ends; `report` an abort as an error."""
    global _thread
    if _thread or process.is_debugged():
        return
    _thread = Answering()
    _thread.start()
    atexit.register(_thread.stop)
    explain_aborts(report)


def listen(folder: Path) -> None:
    """Have rank 0 answer those who ask in the output folder `folder`, with where.py."""
    if _thread and distributed.is_rank_zero():
        with contextlib.suppress(OSError):
            for path in folder.glob(f"{protocol.ASKED}*"):  # left by what was killed
                path.unlink()
        _thread.folder = folder


def answer_person(folder: Path) -> None:
    """If there are files ASKED-NAME, write where all ranks are into ASKED-NAME.txt."""
    with contextlib.suppress(OSError, UserError):
        asked = [path for path in folder.glob(f"{protocol.ASKED}-*") if not path.suffix]
        if asked and (found := positions.ask(ANSWER_SECONDS, by_person=True)):
            for path in asked:
                path.unlink(missing_ok=True)
                with files.writing(path.with_suffix(".txt")) as tmp_path:
                    tmp_path.write_text(explaining.block("", found), errors="surrogateescape")
            positions.tell_explained()


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


def name_of(type_info: int | None) -> bytes:
    """Return the second member of a std::type_info, or b"" without one."""
    if not type_info:
        return b""
    return ctypes.c_char_p.from_address(type_info + ctypes.sizeof(ctypes.c_void_p)).value or b""


def end_aborted(by_gloo: bool, report: Report) -> None:
    what = "got from another rank what does not fit its collective" if by_gloo else "is aborted"
    line = f"rank {distributed.rank()} {what}"
    explaining.show(f"{line}:", ANSWER_SECONDS)
    positions.await_explained(ANSWER_SECONDS)
    if by_gloo:
        report(line, 1)
