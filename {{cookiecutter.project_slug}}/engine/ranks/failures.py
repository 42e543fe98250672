"""Errors: the first rank that fails prints its error, and all ranks exit with its status."""

import atexit
import contextlib
import errno
import gc
import io
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from engine import files
from engine.errors import DiskError, UserError, print_error, shorten
from engine.ranks import (
    answering,
    debugging,
    distributed,
    environment,
    explaining,
    memory,
    names,
    positions,
    process,
    requeue,
)
from engine.ranks.protocol import ERROR, MISTAKE, SEEN, STOP

TIMED_OUT_SECONDS = 0.3  # for a rank that has timed out, and so left, to say it first
GONE_SECONDS = 15  # after which the store no longer answers, though its connection stands
ALONE_SECONDS = 5  # for torchrun to end a rank because the first one of its node has failed
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
SEEN_SECONDS = 2  # for the other ranks to see that one has failed
BROKEN = re.compile(r"Broken pipe|Connection \w+|remote process exited|time(d )?out", re.I)

_known: list[int] = []  # the status of the rank that failed, once this one has read it


class OutOfMemory(UserError):
    """What a block in `naming` raises that runs out of memory."""


@contextlib.contextmanager
def naming(
    name: Callable[[int], str],
    indices: Iterable,
    remedy: str = "lower --batch-size, --image-size or, for segmentation, --tile",
) -> Iterator[None]:
    """Name the samples `indices`, and the remedy, if the block runs out of memory for them."""
    try:
        yield
    except Exception as error:
        if not (lacking := memory.lacking(error)):
            raise
        samples = [name(int(index)) for index in indices]
        size = f" in a batch of {len(samples)}" if len(samples) > 1 else ""
        raise OutOfMemory(f"{shorten(samples)}: out of {lacking}{size}; {remedy}") from None


@contextlib.contextmanager
def one_line_errors(
    *explainers: Callable[[Exception], str | Exception | None],
) -> Iterator[None]:
    """Print an error in the block on one rank only, and end all ranks with its status.

    A UserError is one line, with status MISTAKE, a DiskError one with status 1. So is an error for
    which one of `explainers` returns a UserError, or a string; if it returns another exception, the
    line is followed by the traceback. Errors without a line print their traceback.
    Ranks that do not notice the error are ended by the launcher, or by their watcher thread.
    A debugger stops where the error was raised, as if nothing caught it.
    """
    gc.enable()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if isinstance(sys.stdout, io.TextIOWrapper):  # some file names are not valid text
        sys.stdout.reconfigure(errors="backslashreplace")
    answering.start(report, status_of_failure)
    try:
        yield
    except KeyboardInterrupt:
        process.exit_now(128 + signal.SIGINT)
    except UserError as error:
        debugging.hold(error)
        if distributed.is_set_up():
            # Often all find the same mistake: let rank 0 print it, whose output people read.
            time.sleep(min(distributed.rank(), 1))
        requeue.note_failure(MISTAKE)
        report(str(error), MISTAKE)
    except Exception as error:
        for explain in (_of_disk, memory.explain, *explainers, _lost_rank):
            if line := explain(error):
                debugging.hold(error)
                is_mistake = isinstance(line, UserError)
                is_bug = isinstance(line, Exception) and not is_mistake
                status = MISTAKE if is_mistake else 1
                if explain is not _lost_rank:
                    requeue.note_failure(status)
                report(str(line), status, error if is_bug else None)
        if (reported := _reported_status(1)) is not None:
            _leave(reported)  # collectives broke here because another rank has left
        requeue.note_failure(1)
        if names.has_other_nodes():
            print_error(f"{names.own_rank()}:")
        atexit.register(_leave, 1)  # after the traceback
        raise


def report(line: str, status: int, error: Exception | None = None) -> NoReturn:
    """Print `line` as an error, unless another rank has reported one; exit with that `status`.

    If there are other nodes, the line begins with this rank and its node.
    error: its traceback follows.
    """
    reported = _reported_status(status)
    if reported is None:
        has_other_nodes, who = names.has_other_nodes(), names.own_rank()
        if has_other_nodes and not line.startswith(f"{who} "):
            line = f"{who}: {line}"
        print_error(line)
        if error:
            traceback.print_exception(error)
    _leave(reported or status)


def _leave(status: int) -> NoReturn:
    """Exit with `status`; rank 0, which may hold the store, once the others know of the failure."""
    is_awaited = names.has_other_nodes() or not process.by_torchrun()
    if is_awaited and distributed.is_set_up() and distributed.is_rank_zero():
        deadline = time.monotonic() + SEEN_SECONDS
        ranks = int(os.environ.get("WORLD_SIZE") or distributed.world_size())  # not joined yet: 1
        with contextlib.suppress(dist.DistError):
            while distributed.store().add(SEEN, 0) < ranks:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
    process.exit_now(status)


def status_of_failure() -> int | None:
    """Return the exit status of the first rank that failed; None if none has reported an error."""
    if _known:  # rank 0 may have left since, with the store
        return _known[0]
    store = distributed.store()
    return _read(store.get(ERROR).decode()) if store.check([ERROR]) else None


def _reported_status(status: int) -> int | None:
    """Return the status of the rank that reported an error; None if it is this one's turn, now."""
    if not distributed.is_set_up():  # not in a group yet: the first rank of each node reports,
        with contextlib.suppress(UserError):
            environment.adopt()  # srun and mpirun say otherwise which rank it is
        is_first = distributed.local_rank() == 0 or process.is_debugged()  # or is continued
        return None if is_first or _is_alone() else status
    mine = f"{distributed.rank()} {status} {os.getpid()} {environment.node()}"
    try:
        first = distributed.store().compare_set(ERROR, "", mine).decode()
    except dist.DistError:  # the store has gone: with torchrun, or with rank 0, perhaps killed
        return _known[0] if _known else status if process.by_torchrun() else None
    reported = _read(first)
    return None if first == mine else reported


def _is_alone() -> bool:
    """Return whether the first rank of this node has not failed, too, but only after a while.

    If it has, torchrun ends this one. Without torchrun, a store at MASTER_ADDR says it has not.
    """
    process.be_quiet()  # on Ctrl-C
    if process.by_torchrun():
        time.sleep(ALONE_SECONDS + distributed.local_rank())  # the others go on waiting
        return True
    time.sleep(1)
    with contextlib.suppress(OSError, UserError):  # nobody answers; no address is set
        host, port, _, _ = environment.read_group()
        socket.create_connection((host, port), 1).close()
        return True
    return False


def _read(first: str) -> int:
    """Return the status in the value of ERROR; torchrun gives the launcher a note whose it is."""
    rank, status, _, node = first.split()
    if not _known:
        _known.append(int(status))
        with contextlib.suppress(dist.DistError):  # rank 0 waits for this, but not for long
            distributed.store().add(SEEN, 1)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and names.has_other_nodes():
        note = {"message": f"rank {rank} on {node}", "timestamp": int(time.time())}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(note))
    return int(status)


def _of_disk(error: Exception) -> UserError | str | None:
    if isinstance(error, OSError):
        is_passing = error.errno in files.OF_NETWORK_DISKS and error.filename  # of a file
        if is_passing or error.errno in DISK_ERRORS:
            error = files.failure(error.filename or "a file", error)
    if isinstance(error, DiskError):
        return str(error)
    return error if isinstance(error, UserError) else None


def _lost_rank(error: Exception) -> str | None:
    """Return a line if a collective failed because another rank died or hangs."""
    text = str(error)
    by_gloo = "gloo/transport" in text or "caused pair closure" in text
    found = BROKEN.search(text)
    by_group = by_gloo or isinstance(error, dist.DistError)
    if not (found and by_group and distributed.is_set_up()):
        return None
    if found[0].lower().startswith("time"):
        seconds = f"{distributed.timeout():g} s (--dist-timeout)"
        line = f"{names.own_rank()} timed out after {seconds} waiting for another rank"
    else:
        time.sleep(TIMED_OUT_SECONDS)
        line = f"{names.own_rank()} lost another rank"
    timer = threading.Timer(GONE_SECONDS, _give_up, [line])
    timer.daemon = True
    timer.start()  # until the store has answered: a debugger may hold the error for longer
    try:
        if status_of_failure() is None and not distributed.store().check([STOP]):
            positions.mine.error = error
            explaining.show(f"{line}:")
            positions.await_explained()
    except dist.DistError:
        line = lost_store()
    timer.cancel()
    return line


def lost_store() -> str:
    """Return a line for a rank whose store has gone: without torchrun rank 0 holds it."""
    return f"{names.own_rank()} lost rank 0, at MASTER_ADDR={os.environ.get('MASTER_ADDR')}"


def _give_up(line: str) -> NoReturn:
    print_error(f"{line}; the store, held by rank 0 or its launcher, does not answer")
    process.exit_now(1)
