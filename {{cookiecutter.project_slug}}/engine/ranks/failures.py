"""Errors: the first rank that fails prints its error, and all ranks exit with its status."""

import atexit
import contextlib
import errno
import io
import math
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from engine import files
from engine.errors import DiskError, UserError, print_error, shorten
from engine.ranks import distributed, environment, process, protocol, replicas
from engine.ranks.process import watch
from engine.ranks.protocol import ANSWER_SECONDS, END_SECONDS, ERROR, MISTAKE, POLL_SECONDS

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
BROKEN = re.compile(r"Broken pipe|Connection \w+|remote process exited|time(d )?out", re.I)
GIB = 2**30
# What torch says of common mistakes, and what to do
REMEDIES = {
    "</torch_.*No space left": (
        "/dev/shm is too small for the batches of loader workers (see df -h /dev/shm): docker run "
        "--ipc=host or --shm-size=8g; else lower --workers"
    ),
    "SyncBatchNorm (expected input tensor to be on|layers only work with GPU)": (
        "--sync-bn: torch has it on GPUs only; omit the flag"
    ),
    "of the same param in process 0|DDP expects same model": (
        "this rank has built another network than rank 0: are flags, data and code the same?"
    ),
    "No inf checks were recorded": (  # by GradScaler, in fp16
        "the optimizer's step found no gradient: call zero_grad() after it, not before"
    ),
}
_known: list[int] = []  # the status of the rank that failed, once this one has read it
_batch_size: list[int] = []  # of training, which has begun
_samples: list[Callable[[], list[str]]] = []  # the names of those that are evaluated


@contextlib.contextmanager
def one_line_errors(
    *explainers: Callable[[Exception], str | Exception | None],
) -> Iterator[None]:
    """Print an error in the block on one rank only, and end all ranks with its status.

    A UserError is one line, with status MISTAKE, a DiskError one with status 1. So is an error for
    which one of `explainers` returns a UserError, or a string; if it returns another exception, the
    line is followed by the traceback. Errors without a line print their traceback.
    Ranks that do not notice the error are ended by the launcher, or by their thread.
    A debugger stops where the error was raised, as if nothing caught it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if isinstance(sys.stdout, io.TextIOWrapper):  # some file names are not valid text
        sys.stdout.reconfigure(errors="backslashreplace")
    follow_others()
    try:
        yield
    except KeyboardInterrupt:
        process.exit_now(128 + signal.SIGINT)
    except Exception as error:
        watch.is_leaving = True
        for explain in (_of_disk, _of_memory, _of_torch, *explainers, _lost_rank):
            if line := explain(error):
                process.hold(error)
                is_mistake = isinstance(line, UserError)
                is_bug = isinstance(line, Exception) and not is_mistake
                if is_mistake and distributed.is_set_up():
                    # Often all find the same: let rank 0 print it, whose output people read.
                    time.sleep(min(distributed.rank(), 1))
                report(str(line), MISTAKE if is_mistake else 1, error if is_bug else None)
        if (reported := _reported_status(1)) is not None:
            _leave(reported)  # collectives broke here because another rank has left
        if environment.has_other_nodes():
            print_error(f"{environment.own_rank()}:")
        atexit.register(_leave, 1)  # after the traceback
        raise


def report(line: str, status: int, error: Exception | None = None) -> NoReturn:
    """Print `line` as an error, unless another rank has reported one; exit with that `status`.

    If there are other nodes, the line begins with this rank and its node.
    error: its traceback follows.
    """
    if status == MISTAKE:
        environment.note_mistake()
    if (reported := _reported_status(status)) is None:
        who = f"{environment.own_rank()} " if environment.has_other_nodes() else ""
        print_error(line if line.startswith(who) else f"{who.strip()}: {line}")
        if error:
            traceback.print_exception(error)
    _leave(reported or status)


def _leave(status: int) -> NoReturn:
    """Exit with `status`; rank 0, which may hold the store, once the others know of the failure."""
    is_awaited = environment.has_other_nodes() or not process.by_torchrun()
    if is_awaited and distributed.is_set_up() and distributed.is_rank_zero():
        deadline = time.monotonic() + END_SECONDS
        ranks = int(os.environ.get("WORLD_SIZE") or distributed.world_size())  # not joined yet: 1
        with contextlib.suppress(dist.DistError):
            while distributed.store().add(protocol.SEEN, 0) < ranks and time.monotonic() < deadline:
                time.sleep(0.05)
    process.exit_now(status)


def follow_others() -> None:
    """Have the thread end this rank once another has failed, and answer where it is."""
    watch.add(_look, lambda error: print_error(f"this rank no longer hears of others ({error!r})"))


def _look(_: list[int]) -> None:
    if not distributed.is_joined():
        return
    try:
        status, is_held = status_of_failure(), distributed.is_debugged() or watch.is_leaving
        if status is not None and not is_held:  # nccl does not notice it
            time.sleep(2 * POLL_SECONDS)  # let that rank print its error first
            process.exit_now(status)
        is_asked = distributed.store().check([protocol.ASKED.format(watch.questions + 1)])
        is_person = watch.folder and os.path.exists(watch.folder / protocol.QUESTION)
        if is_asked or (is_person and distributed.is_rank_zero()):
            from engine.ranks import explaining  # only now: training does without

            explaining.answer()
    except (dist.DistError, ValueError, AttributeError) as error:
        # Without the store, or when the main thread is leaving the group, there is nobody to hear.
        if distributed.is_joined() and not isinstance(error, dist.DistError):
            raise
        watch.duties.pop(_look)


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
            environment.adopt()  # srun says otherwise which rank it is
        is_first = distributed.local_rank() == 0 or process.is_debugged()  # or is continued
        return None if is_first or _has_peer_gone() else status
    mine = f"{distributed.rank()} {status} {os.getpid()} {environment.node()}"
    try:
        first = distributed.store().compare_set(ERROR, "", mine).decode()
    except dist.DistError:  # the store has gone: with torchrun, or with rank 0, perhaps killed
        return _known[0] if _known else status if process.by_torchrun() else None
    reported = _read(first)
    return None if first == mine else reported


def _has_peer_gone() -> bool:
    """Return whether the first rank of this node has not failed, too, but only after a while.

    If it has, torchrun ends this one. Without torchrun, a store at MASTER_ADDR says it has not.
    """
    process.be_quiet()  # on Ctrl-C
    if process.by_torchrun():
        time.sleep(END_SECONDS + distributed.local_rank())  # the others go on waiting
        return True
    time.sleep(1)
    with contextlib.suppress(OSError, UserError):  # nobody answers; no address is set
        host, port, _, _ = environment.read_group()
        socket.create_connection((host, port), 1).close()
        return True
    return False


def _read(first: str) -> int:
    """Return the status in the value of ERROR; say it once on each other node."""
    rank, status, _, node = first.split()
    if not _known:
        _known.append(int(status))
        with contextlib.suppress(dist.DistError):  # rank 0 waits for this, but not for long
            distributed.store().add(protocol.SEEN, 1)
        if node != environment.node() and distributed.local_rank() == 0:
            print_error(f"rank {rank} on {node} has failed")
    return int(status)


def _lost_rank(error: Exception) -> str | None:
    """Return a line if a collective failed because another rank died or hangs."""
    text = str(error)
    found = BROKEN.search(text)
    by_gloo = "gloo/transport" in text or "caused pair closure" in text
    by_group = by_gloo or isinstance(error, dist.DistError)
    if not (found and by_group and distributed.is_set_up()):
        return None
    if found[0].lower().startswith("time"):
        seconds = f"{distributed.timeout():g} s (--dist-timeout)"
        line = f"{environment.own_rank()} timed out after {seconds} waiting for another rank"
    else:
        time.sleep(POLL_SECONDS)  # for a rank that has timed out, and so left, to say it first
        line = f"{environment.own_rank()} lost another rank"
    timer = threading.Timer(3 * END_SECONDS, _give_up, [line])  # the store may not answer
    timer.daemon = True
    timer.start()  # until it has: a debugger may hold the error for longer
    try:
        if status_of_failure() is None and not distributed.store().check([protocol.STOP]):
            from engine.ranks import explaining

            watch.error = error
            explaining.show(f"{line}:")
            shown = protocol.SHOWN.format(watch.questions)  # by this rank or another
            distributed.await_keys([shown], ANSWER_SECONDS)
    except dist.DistError:
        line = lost_store()
    timer.cancel()
    return line


def lost_store() -> str:
    return f"{environment.own_rank()} lost rank 0, at MASTER_ADDR={os.environ.get('MASTER_ADDR')}"


def _give_up(line: str) -> NoReturn:
    print_error(f"{line}; the store, held by rank 0 or its launcher, does not answer")
    process.exit_now(1)


def _of_disk(error: Exception) -> UserError | str | None:
    if isinstance(error, OSError):
        is_passing = error.errno in files.OF_NETWORK_DISKS and error.filename  # of a file
        if is_passing or error.errno in DISK_ERRORS:
            error = files.failure(error.filename or "a file", error)
    if isinstance(error, DiskError):
        return str(error)
    return error if isinstance(error, UserError) else None


def _of_torch(error: Exception) -> UserError | str | None:
    """Return a line for a mistake that torch explains badly."""
    text = str(error)
    if "Expected to have finished reduction in the prior iteration" in text:
        return _unused(error, text)
    is_known = isinstance(error, RuntimeError | ValueError | AssertionError)
    found = (line for pattern, line in REMEDIES.items() if is_known and re.search(pattern, text))
    return f"rank {distributed.rank()}: {line}" if (line := next(found, "")) else None


def _unused(error: Exception, text: str) -> UserError:
    """Name the weights to which the last backward pass has brought no gradient."""
    callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    networks = [each for each in callers if isinstance(each, DistributedDataParallel)]
    found = re.search(r"indices which did not receive grad for rank \d+: ([\d ]+)", text)
    trained = replicas.trained_weights(networks[-1]) if networks else []
    numbers = [int(number) for number in found[1].split()] if found else []
    unused = [trained[number] for number in numbers if number < len(trained)] or ["some weights"]
    return UserError(
        f"{shorten(unused)}: no gradient, because the loss does not depend on it; use it, remove "
        "it, or freeze it (requires_grad_(False)) before engine.wrap; if other steps use it, "
        "pass find_unused_parameters=True to engine.wrap"
    )


def gather(tensor: Tensor) -> Tensor:
    """Return the ranks' `tensor`s, float64 (n,), stacked: (ranks, n), by a single collective.

    Raises a UserError on all ranks if they have started different collectives since last time.
    """
    from engine.ranks import explaining

    own = tensor.new_tensor([explaining.checksum.compute()])
    rows = distributed.gather(torch.cat((tensor, own)))
    checksums = set(rows[:, -1].tolist())
    if len(checksums) > 1 and 0 not in checksums:  # 0: not known
        found = distributed.gather_objects(explaining.here())
        line = "; ".join(explaining.compare({each.rank: each for each in found}))
        raise UserError(f"the ranks differ since the last save: {line}")
    return rows[:, :-1]


def note_batch_size(size: int | None) -> None:
    """Note the batch size of training, which begins, for out-of-memory errors."""
    _batch_size[:] = [size] if size else []
    note_samples()  # evaluation may have been left early


def note_samples(name: Callable[[int], str] | None = None, indices: Iterable[int] = ()) -> None:
    """Note which samples are evaluated, for errors; none without arguments."""
    _samples[:] = [lambda: [name(int(index)) for index in indices]] if name else []


def _of_memory(error: Exception) -> UserError | None:
    if not (what := out_of_memory(error)):
        return None
    if _samples:
        samples = _samples[0]()
        size = f" in a batch of {len(samples)}" if len(samples) > 1 else ""
        remedy = "lower --batch-size, --image-size or, for segmentation, --tile"
        return UserError(f"{shorten(samples)}: out of {what}{size}; {remedy}")
    size = f" with --batch-size {_batch_size[0]}" if _batch_size else ""
    return UserError(
        f"{environment.own_rank()} is out of {what}{size}: lower --batch-size (--accumulate keeps "
        "the global batch), or --image-size"
    )


def out_of_memory(error: Exception) -> str | None:
    """Return the kind of memory, and what is known of it, if `error` is an out-of-memory error.

    Such as "GPU memory (asked for 2.00 GiB, peak 75.3 of 79.2 GiB)".
    """
    text = str(error)
    on_host = isinstance(error, MemoryError) or "alloc_cpu" in text or "in pin memory" in text
    is_said = isinstance(error, RuntimeError) and re.search("out of memory|alloc_cpu", text)
    if not (is_said or isinstance(error, MemoryError | torch.OutOfMemoryError)):
        return None
    asked = re.search(r"(?:[tT]ried|Unable) to allocate ([\d.]+ ?\w+)", text)
    known = [f"asked for {asked[1]}"] if asked else []
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if not on_host and (most := peak(device)) > 0:
        module = torch.get_device_module(device)
        total = module.get_device_properties(module.current_device()).total_memory
        known.append(f"peak {most / GIB:.3g} of {total / GIB:.3g} GiB")
    kind = "memory" if on_host else "GPU memory"
    return f"{kind} ({', '.join(known)})" if known else kind


def peak(device: torch.device) -> float:
    """Return the most bytes that tensors have taken since reset_peak(); NaN if nothing counts."""
    count = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return float(count(device)) if count else math.nan


def reset_peak(device: torch.device) -> None:
    reset = getattr(torch.get_device_module(device), "reset_peak_memory_stats", None)
    if reset:
        reset(device)
