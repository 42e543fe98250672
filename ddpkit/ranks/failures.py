"""Errors: the first rank that fails prints its error, and all ranks exit with its status."""

import atexit
import contextlib
import errno
import faulthandler
import io
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from ddpkit import files
from ddpkit.errors import (
    DiskError,
    UserError,
    clip,
    print_error,
    print_line,
    shorten,
)
from ddpkit.ranks import (
    devices,
    distributed,
    ending,
    environment,
    explaining,
    process,
    protocol,
    watch,
    workers,
)
from ddpkit.ranks.protocol import (
    END_SECONDS,
    MISTAKE,
    NOTICE_SECONDS,
    POLL_SECONDS,
)

BROKEN = re.compile(
    r"Broken pipe|Connection \w+|remote process exited|time(d )?out", re.I
)
# What torch says of common mistakes, and what to do
NO_NETWORK = (
    "one has exited, or this node's host name resolves to the wrong address: set "
    "GLOO_SOCKET_IFNAME on each node to its interface to the others, such as eth0 (ip addr)"
)
REMEDIES = {
    "Unable to find (address|interface) for": (
        "gloo finds no network interface: bring up the loopback (ip link set lo up), missing in "
        "some sandboxes, or set GLOO_SOCKET_IFNAME"
    ),
    r"scalar type Byte|ByteTensor|got Byte|unsigned char": (
        "images are uint8, as your own loader returns them: read them with ddpkit.train_loader or "
        "val_loader with classes=, which normalise, or with ddpkit.eval_batches(loader, model)"
    ),
    "object has no attribute 'count'": (
        "criterion is a loss that does not count labels: wrap it in ddpkit.Criterion(loss, classes)"
    ),
    "object has no attribute 'channels'": (
        "a validation loader of your own does not say the number of channels: give build_model in "
        "main.py that number, such as 3, in place of val_loader.channels"
    ),
    r"Target \d+ is out of bounds": (
        "a target is not a valid class number; if it is 255 (void), pass ignore_index=255 to "
        "torch's loss"
    ),
    "ignore_index is not supported for floating point target": (
        "mixing images makes their targets class probabilities: drop ignore_index from the loss, "
        "or do not mix images"
    ),
    r"Expected more than 1 (value per channel|spatial element) when training": (
        "a normalisation layer got one value per channel: use larger batches or images; your own "
        "loader needs drop_last=True if its last batch may have one image"
    ),
    r"Tried to step \d+ times. The (specified number of total|total number of) steps is \d+": (
        "the scheduler was built or saved for fewer steps than this run has: it resumes as saved; "
        "keep the number of epochs, or start over without resuming"
    ),
    r"expected input\[.*\] to have \d+ channels, but got \d+ channels": (
        "the images do not have the number of channels that the model's first layer expects: read "
        "them everywhere as in training, or build the model for them"
    ),
    "_scale is None|No inf checks were recorded": (
        "fp16 needs a scaled loss: scaler.scale(loss).backward()"
    ),
}
Explainer = Callable[[Exception], str | UserError | None]
# Of the modules that are imported: each adds its own.
explainers: list[Explainer] = []
_over: dict[str, float] = {}  # since when the script is, and when that was said


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Print an error in the block on one rank only, and end all ranks with its status.

    It is one line if it is a UserError (MISTAKE), a DiskError, or what an explainer makes of it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Some file names are not valid text.
        sys.stdout.reconfigure(errors="backslashreplace")
    if dist.get_debug_level() == dist.DebugLevel.OFF:
        dist.set_debug_level(dist.DebugLevel.INFO)  # DDP then names weights
    own_pid = os.getpid()
    try:
        # In a thread: an error of another rank, or of a worker, has to end this one also
        # while the main thread waits in a collective, where no Python runs.
        watch.thread.add_duty(follow_others)
        watch.thread.add_duty(_follow_workers)
        watch.thread.add_duty(_follow_end)
        yield
        process.End.status = 0
    except BaseException as error:
        if os.getpid() != own_pid:  # in a child that the block has forked
            raise
        if isinstance(error, KeyboardInterrupt) and process.is_script():
            process.exit_now(128 + signal.SIGINT)
        if not isinstance(error, Exception):
            raise  # of sys.exit
        process.End.is_leaving = True
        process.End.error = error
        _end_if_known(error)
        # else collectives broke here because another rank has left
        # unless a debugger holds this one, too
        if not ending.is_first(1) and not process.is_debugged():
            ending.exit_as_first(1)
        if environment.has_other_nodes():
            print_error(f"{environment.own_rank()}:")
        # After Python has printed the traceback: its own exit could wait for others.
        atexit.register(ending.exit_as_first, 1)
        raise


def _end_if_known(error: Exception) -> None:
    """Report an error in one line if one is known."""
    if isinstance(error, EOFError | ConnectionError):
        # The loader worker at the other end may not be gone yet.
        time.sleep(POLL_SECONDS)
        error = workers.find_fault() or error
    own = [_of_memory, workers.lacking, _of_disk, _of_torch]
    for explain in own + explainers + [_lost_rank]:
        line = explain(error)
        if not line:
            continue
        # Stop where it was raised, in a debugger that can (debugpy 1.8.22 on).
        debugger = sys.modules.get("debugpy")
        hold = getattr(debugger, "trigger_exception_handler", None)
        if hold:
            hold(error)
        if not isinstance(line, UserError):
            ending.report_and_exit(line, 1)
        if distributed.is_set_up():
            # Often all find the same: let rank 0 print it, whose output people read.
            time.sleep(min(distributed.rank(), 1))
        ending.report_and_exit(str(line), MISTAKE)


def _follow_workers() -> None:
    """End this rank once one of its loader workers has died.

    The main thread, which may be in a collective, sees it as late as it waits for a batch.
    """
    fault = workers.find_fault()
    if fault and not distributed.any_debugged() and not process.End.is_leaving:
        _end_if_known(fault)


def _follow_end() -> None:
    """Name this rank once its script has ended and it has not; end it after --dist-timeout."""
    if threading.main_thread().is_alive():
        return
    now = time.monotonic()
    seconds = distributed.timeout()
    waited = now - _over.setdefault("since", now)
    if waited > seconds:
        process.exit_now(process.End.status)
    if waited > min(NOTICE_SECONDS, seconds / 2) and "said" not in _over:
        _over["said"] = now
        names = [t.name for t in threading.enumerate() if t.is_alive() and not t.daemon]
        print_line(
            f"{environment.own_rank()} (process {os.getpid()}) has not exited though its script "
            f"has: {shorten(names) or 'an exit handler'} still runs, for at most {seconds:g} s",
            sys.stderr,
        )


class Lateness:
    """Ends this rank, from its thread, once a collective of a run with GPUs takes --dist-timeout.

    The main thread then waits for the GPU, where no exception reaches it, and torch's own watchdog
    would end it with SIGABRT and a page of C++. Among CPUs torch raises an exception in time.
    """

    def __init__(self) -> None:
        self.read_at = 0.0  # when torch's records are read next, which takes 0.1 s
        self.waits_in = ""  # the collective that they named last
        self.since = 0.0  # when they first did

    def end_if_late(self) -> None:
        now = time.monotonic()
        if now < self.read_at:
            return
        self.read_at = now + min(distributed.timeout(), protocol.LATE_SECONDS) / 10
        waits_in = explaining.find_waiting(explaining.collectives())
        if waits_in != self.waits_in:
            self.waits_in = waits_in
            self.since = now
        elif waits_in and now - self.since >= distributed.timeout():
            ending.report_and_exit(_of_others(is_late=True), 1)


_lateness = Lateness()


def follow_others() -> None:
    """End this rank once another has failed; report where it is if one or a person asks."""
    if not distributed.has_met():
        return
    try:
        status = ending.status_of_failure()
        is_held = distributed.any_debugged() or process.End.is_leaving
        if status and not is_held:  # nccl does not notice it
            time.sleep(2 * POLL_SECONDS)  # let that rank print its error first
            process.exit_now(status)
        if distributed.is_joined():
            if devices.is_mixed() and not is_held:
                _lateness.end_if_late()
            explaining.answer()
            explaining.answer_person()
    except (dist.DistError, ValueError, AttributeError) as error:
        # Without the store, or when the main thread is leaving the group, there is
        # nobody to hear.
        if distributed.is_joined() and not isinstance(error, dist.DistError):
            raise
        watch.thread.duties.remove(follow_others)


def _lost_rank(error: Exception) -> str | None:
    """Return a line if a collective failed because another rank died or hangs."""
    broken = BROKEN.search(str(error))
    by_gloo = re.search("gloo/transport|caused pair closure", str(error))
    by_group = by_gloo or isinstance(error, dist.DistError)
    if not (broken and by_group and distributed.is_set_up()):
        return None
    is_late = broken[0].lower().startswith("time")
    if not is_late:
        # Another one may have timed out, and so left: let it say so first.
        time.sleep(POLL_SECONDS)
    return _of_others(is_late)


def _of_others(is_late: bool) -> str:
    """Return a line on the others: this rank has waited too long for one, or lost it."""
    what = "lost"
    if is_late:
        name = "timeout of the process group"
        if distributed.Group.has_met_itself:
            name = "--dist-timeout"
        what = f"timed out after {distributed.timeout():g} s ({name}) waiting for"
    line = f"{environment.own_rank()} {what} another rank"
    # The store may hang.
    faulthandler.dump_traceback_later(3 * END_SECONDS, exit=True, file=2)
    try:
        if not (
            ending.status_of_failure() or distributed.store().check([protocol.STOP])
        ):
            is_new = not explaining.Asking.answered  # before training no hang is shown
            if is_late and is_new and distributed.is_joined():
                explaining.show(f"{line}:")
            gone = distributed.ended(range(distributed.world_size()))
            line = ": ".join([line, *gone])
    except dist.DistError:
        line = lost_store()
    # Not longer: a debugger may hold the error.
    faulthandler.cancel_dump_traceback_later()
    return line


def lost_store() -> str:
    return f"{environment.own_rank()} lost rank 0, at MASTER_ADDR={os.environ.get('MASTER_ADDR')}"


def _of_disk(error: Exception) -> UserError | str | None:
    if isinstance(error, OSError):
        is_passing = error.errno in files.OF_NETWORK_DISKS and error.filename
        if is_passing or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            error = files.failure(error.filename or "a file", error)
    if isinstance(error, DiskError):
        return str(error)
    return error if isinstance(error, UserError) else None


def _of_torch(error: Exception) -> UserError | str | None:
    """Return a line for a mistake that torch explains badly."""
    text = str(error)
    if "Expected to have finished reduction in the prior iteration" in text:
        # By its names of them, thanks to DebugLevel.INFO
        said = re.search(r"did not receive grad for rank \d+: (.+)", text)
        names = shorten(said[1].split(", ")) if said else "some weights"
        return UserError(
            f"{names}: no gradient, because the loss does not depend on it, or it was frozen after "
            "DistributedDataParallel(...): use it, remove it, or freeze it and wrap the model "
            "again; if only some steps use it, also pass find_unused_parameters=True"
        )
    if "Gloo connectFullMesh failed" in text:
        return (
            f"{environment.own_rank()} cannot connect to all other ranks: {NO_NETWORK}"
        )
    kinds = IndexError | AssertionError | AttributeError | RuntimeError | ValueError
    if isinstance(error, kinds):
        for pattern, line in REMEDIES.items():
            if re.search(pattern, text):
                return UserError(line)
    return None


def _of_memory(error: Exception) -> UserError | None:
    """Return a line if this rank lacks memory."""
    text = str(error)
    of_torch = re.search(".*(out of memory|alloc_cpu).*", text)
    if of_torch and isinstance(error, RuntimeError):
        text = of_torch[0]
    elif not isinstance(error, MemoryError):
        return None
    # How much was asked for, and how much there is
    said = clip(text, 200) or "MemoryError"
    return UserError(
        f"{environment.own_rank()} is out of memory ({said}): use smaller batches (gradient "
        "accumulation keeps the global batch), images or, for segmentation, tiles; on the CPU also "
        "fewer loader workers"
    )


def peak(device: torch.device) -> float:
    """Return the most bytes that tensors have taken since reset_peak(); NaN if nothing counts."""
    count = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return float(count(device)) if count else math.nan


def reset_peak(device: torch.device) -> None:
    module = torch.get_device_module(device)
    if hasattr(module, "reset_peak_memory_stats"):
        module.reset_peak_memory_stats(device)
