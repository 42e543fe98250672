"""Everything that knows of ranks: the process group, its collectives, and errors told once.

Each function is harmless in a group of one, so no caller asks how many processes there are.
"""

import atexit
import contextlib
import errno
import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import UserError
from engine.ranks import process

T = TypeVar("T")
OPERATIONS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # what disks say
ERROR = "error"  # the store's key for "<rank> <exit status>" of the first rank to fail
_store: Any = None  # the group's key-value store: it works while a peer hangs in a collective
_timeout = timedelta()
_debugged = False


def setup(
    local_rank: int | None = None, timeout: float = 600, debugged: bool = False
) -> torch.device:
    """Join the group that the launcher describes, or a group of one; return this rank's device.

    torchrun, torch.distributed.launch and launch.sh set RANK, WORLD_SIZE, LOCAL_RANK and so on;
    srun sets variables of its own. `local_rank` counts only where LOCAL_RANK is not set.
    With GPUs: nccl, one GPU a rank. Without: gloo.

    A collective that takes longer than `timeout` seconds fails. With a debugger here, or with
    `debugged`, which says that some rank may have one, it may take days: people look around.
    """
    global _store, _timeout, _debugged
    _debugged = debugged or process.is_debugged()
    _timeout = timedelta(days=7) if _debugged else timedelta(seconds=timeout)
    by_srun = _adopt_slurm_step()
    if "LOCAL_RANK" not in os.environ and local_rank is not None:
        os.environ["LOCAL_RANK"] = str(local_rank)
    device = _pick_device(by_srun)
    if "RANK" in os.environ:
        wait_for_name(os.environ["MASTER_ADDR"])
        _store, group_rank, group_size = next(dist.rendezvous("env://", timeout=_timeout))
        _store.set_timeout(_timeout)
    else:
        _store, group_rank, group_size = dist.HashStore(), 0, 1
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=_store,
        rank=group_rank,
        world_size=group_size,
        device_id=device if device.type == "cuda" else None,
        timeout=_timeout,
    )
    return device


def wait_for_name(host: str, seconds: float = 60) -> None:
    """Return once `host` has an address; where nodes are still starting it may lack one at first.

    Raises a UserError after so many seconds.
    """
    deadline, told = time.monotonic() + seconds, False
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            line = f"MASTER_ADDR={host} cannot be resolved ({error.strerror})"
        if time.monotonic() > deadline:
            raise UserError(f"{line}: check the name, or use an IP address")
        if not told and local_rank() == 0:
            print(f"{line}; trying for {seconds:g} s", file=sys.stderr, flush=True)
        told = True
        time.sleep(1)


def teardown() -> None:
    """Leave the group, after all ranks have come this far."""
    dist.barrier()
    dist.destroy_process_group()


def store() -> Any:
    """Return the group's key-value store."""
    return _store


def timeout() -> float:
    """Return how many seconds a collective may take."""
    return _timeout.total_seconds()


def is_debugged() -> bool:
    """Whether some rank has a debugger, or may have one."""
    return _debugged


def _pick_device(by_srun: bool) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpus, ranks = torch.cuda.device_count(), local_world_size()
    index = local_rank()
    if gpus == 1 and by_srun:
        index = 0  # srun --gpus-per-task=1 shows each task a GPU of its own
    elif ranks > gpus and process.is_debugged():
        say(f"{ranks} ranks on this node but {gpus} GPU(s): debugging on the CPU")
        return torch.device("cpu")
    elif ranks > gpus:
        raise UserError(
            f"{ranks} ranks on this node but {gpus} GPU(s): start at most {gpus} (NPROC={gpus}), "
            "or set CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _adopt_slurm_step() -> bool:
    """Name the tasks of `srun python main.py` as torchrun does; return whether there was need.

    A plain start in a batch script or in an interactive allocation is not a step of several
    tasks; it stays a group of one.
    """
    env = os.environ
    if "RANK" in env or int(env.get("SLURM_STEP_NUM_TASKS", 1)) == 1:
        return False
    per_node: list[str] = []  # "2(x3),1" means 2, 2, 2, 1
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", env["SLURM_STEP_TASKS_PER_NODE"]):
        per_node += [tasks] * int(times or 1)
    hosts = subprocess.run(
        ["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    env["RANK"] = env["SLURM_PROCID"]
    env["WORLD_SIZE"] = env["SLURM_STEP_NUM_TASKS"]
    env["LOCAL_RANK"] = env["SLURM_LOCALID"]
    env["LOCAL_WORLD_SIZE"] = per_node[int(env["SLURM_NODEID"])]
    env.setdefault("MASTER_ADDR", hosts[0])
    step = int(env["SLURM_JOB_ID"]) * 7 + int(env["SLURM_STEP_ID"])
    env.setdefault("MASTER_PORT", str(20000 + step % 10000))  # the same on all, another per step
    return True


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def local_rank() -> int:
    """This process's number on its node."""
    return int(os.environ.get("LOCAL_RANK", 0))


def local_world_size() -> int:
    """How many ranks this node has."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def is_rank_zero() -> bool:
    """Whether this rank is the one that writes and prints."""
    return rank() == 0


def say(line: str) -> None:
    """Print `line` on rank 0, if there is still somebody to read it."""
    if is_rank_zero():
        with contextlib.suppress(OSError):  # a terminal or a pipe that was closed
            print(line, flush=True)


def reduce_tensor(tensor: Tensor, op: str = "sum") -> Tensor:
    """Return `tensor` combined over all ranks; every rank gets the same result.

    Args:
        tensor: any shape, a numeric dtype, on this rank's device; the same shape and dtype on
            every rank. It is left as it is.
        op: "sum", "min", "max", or "mean" (the sum divided by the number of ranks; floating
            dtypes only).

    Every rank has to call it. For a mean over samples reduce their sum and their count and
    divide once: a mean of the ranks' means is wrong as soon as the ranks hold unequal numbers.
    """
    result = tensor.detach().clone()
    dist.all_reduce(result, OPERATIONS["sum" if op == "mean" else op])
    return result / world_size() if op == "mean" else result


def broadcast(tensor: Tensor) -> None:
    """Overwrite `tensor` with rank 0's."""
    dist.broadcast(tensor, src=0)


def gather(tensor: Tensor) -> Tensor:
    """Return the ranks' `tensor`s, of the same shape and dtype on each, stacked: (ranks, ...)."""
    parts = [torch.empty_like(tensor) for _ in range(world_size())]
    dist.all_gather(parts, tensor)
    return torch.stack(parts)


def gather_objects(value: T) -> list[T]:
    """Return the ranks' `value`s, which have to pickle."""
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    """Return once all ranks have come here."""
    dist.barrier()


def all_come(name: str, seconds: float) -> bool:
    """Return whether all ranks call this, with the same `name`, within `seconds`."""
    _store.set(f"{name}/{rank()}", "")
    try:
        names = [f"{name}/{other}" for other in range(world_size())]
        _store.wait(names, timedelta(seconds=seconds))
    except dist.DistError:
        return False
    return True


def collectives() -> int:
    """Return how many collectives this rank has begun, DDP's own included."""
    group = dist.distributed_c10d._get_default_group()
    return group._get_sequence_number_for_group()  # type: ignore[attr-defined]


def from_rank_zero(function: Callable[..., T], *args: Any) -> T:
    """Call `function(*args)` on rank 0 and return its result, which has to pickle, on all ranks."""
    return from_rank(0, function, *args)


def from_rank(source: int, function: Callable[..., T], *args: Any) -> T:
    """As `from_rank_zero`, from another rank."""
    box = [function(*args) if rank() == source else None]
    dist.broadcast_object_list(box, src=source)
    return box[0]  # type: ignore[return-value]


@contextlib.contextmanager
def rank_zero_first() -> Iterator[None]:
    """Run the block on rank 0, then on the first rank of each other node, then on the rest.

    For work that is to be done once and found done by the others, such as drawing or downloading
    a file: a second node does it again only if it does not share the first one's disk.
    """
    turn = 0 if is_rank_zero() else 1 if local_rank() == 0 else 2
    for _ in range(turn):
        dist.barrier()
    yield
    for _ in range(2 - turn):
        dist.barrier()


@contextlib.contextmanager
def one_line_errors(
    *explainers: Callable[[Exception], str | Exception | None],
) -> Iterator[None]:
    """Let one rank alone tell of an error and end them all; a UserError is one line.

    So is what one of `explainers` has a line or a UserError for. The launcher, or the connection
    that breaks, ends the ranks that do not know of it. The status is process.MISTAKE for a
    UserError, else 1.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if isinstance(sys.stdout, io.TextIOWrapper):  # some file names are not text
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
    except UserError as error:
        # Often all ranks know the same: rank 0, whose output people read, gets a second's start.
        time.sleep(min(local_rank() if _store is None else rank(), 1))
        tell(str(error), process.MISTAKE)
    except KeyboardInterrupt:
        process.leave(128 + signal.SIGINT)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL:  # of TensorBoard's, for one
            tell(
                f"{error.filename or 'a file'}: cannot be written ({error.strerror})",
                process.MISTAKE,
            )
        for explain in (*explainers, _out_of_memory, _lost_a_rank):
            if line := explain(error):
                tell(str(line), process.MISTAKE if isinstance(line, UserError) else 1)
        if (status := _status_told(1)) is not None:
            process.leave(status)  # this rank's collectives broke because the first one has left
        atexit.register(process.leave, 1)  # once the traceback is out
        raise


def _out_of_memory(error: Exception) -> UserError | None:
    """Return a line if memory was asked for that a GPU, or the machine, does not have."""
    text = str(error)
    of_gpu = isinstance(error, torch.OutOfMemoryError) or "_ALLOC_FAILED" in text  # of cuDNN
    if not (of_gpu or isinstance(error, MemoryError) or "alloc_cpu" in text):
        return None
    where = "GPU memory" if of_gpu else "memory"
    found = re.search(r"(?:[tT]ried|Unable) to allocate ([\d.]+ ?\w+)", text)
    size = f" (asked for {found[1]})" if found else ""
    return UserError(
        f"rank {rank()} is out of {where}{size}: lower --batch-size (--accumulate keeps the global "
        "batch), --image-size or --workers, or take smaller pictures"
    )


def _lost_a_rank(error: Exception) -> str | None:
    """Return a line if `error` is what a collective makes of another rank's death or hang."""
    text = str(error)
    of_gloo = "gloo/transport" in text or "caused pair closure" in text
    words = r"Broken pipe|Connection \w+|remote process exited|time(d )?out"
    found = re.search(words, text, re.IGNORECASE)
    if _store is None or not found or not (of_gloo or isinstance(error, dist.DistError)):
        return None
    is_late = found[0].lower().startswith("time")
    what = f"waited {timeout():g} s (--dist-timeout) in vain for" if is_late else "lost"
    return f"rank {rank()} {what} another rank"


def tell(line: str, status: int) -> NoReturn:
    """Print an error's `line`, unless another rank has told of one, and exit with that `status`."""
    told = _status_told(status)
    if told is None:
        print(f"error: {line}", file=sys.stderr, flush=True)
        if _store is not None and is_rank_zero() and world_size() > local_world_size():
            time.sleep(2)  # the store goes with this process: other nodes are to read it first
    process.leave(told or status)


def status_of_failure() -> int | None:
    """Return the exit status of the first rank to fail; None as long as none has told of it."""
    return int(_store.get(ERROR).split()[1]) if _store.check([ERROR]) else None


def _status_told(status: int) -> int | None:
    """Return the status of the rank that told of the error; None if this one is to, now."""
    if _store is None:  # not in a group yet: each node's first rank speaks
        return None if local_rank() == 0 else status
    mine = f"{rank()} {status}"
    try:
        first = _store.compare_set(ERROR, "", mine).decode()
    except dist.DistError:  # rank 0 held the store: it has spoken and left
        return status
    return None if first == mine else int(first.split()[1])
