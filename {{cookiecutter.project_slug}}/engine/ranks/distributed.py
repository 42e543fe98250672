"""The process group of all ranks, and its collectives.

Each function works in a group of one, too, so callers never ask how many ranks there are.
"""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import UserError
from engine.ranks import environment, joining, process, protocol, reaching

T = TypeVar("T")
Pending = dist.Work  # a collective that has begun
OPERATIONS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


@dataclass
class Group:
    store: dist.Store | None = None  # works while ranks hang in a collective
    timeout: timedelta = timedelta()
    is_debugged: bool = False


_group = Group()
_turns = itertools.count()  # calls of await_rank_zero


def setup(
    local_rank: int | None = None, timeout: float = 600, debugged: bool = False
) -> torch.device:
    """Join the process group that the launcher describes, or a group of one; return the device.

    With GPUs: nccl, one GPU per rank. Without: gloo.
    local_rank: used only if the launcher does not set LOCAL_RANK.
    timeout: seconds after which a collective fails; a week if a rank may be at a breakpoint.
    debugged: whether another rank may have a debugger.
    """
    _group.is_debugged = debugged or process.is_debugged()
    _group.timeout = timedelta(days=7) if _group.is_debugged else timedelta(seconds=timeout)
    by_srun = environment.adopt_slurm_step()
    if local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(local_rank))
    device = _pick_device(by_srun)
    backend = "nccl" if device.type == "cuda" else "gloo"
    _avoid_crash(backend)
    if "RANK" in os.environ:
        _group.store, group_rank, size = reaching.open_store(_group.timeout)
        _group.store = joining.join_ranks(_group.store, group_rank, size, _group.timeout)
    else:
        _group.store, group_rank, size = dist.HashStore(), 0, 1
    _group.store.set(protocol.process_of(group_rank), f"{environment.node()} {os.getpid()}")
    dist.init_process_group(
        backend,
        store=_group.store,
        rank=group_rank,
        world_size=size,
        device_id=device if device.type == "cuda" else None,
        timeout=_group.timeout,
    )
    return device


def _avoid_crash(backend: str) -> None:
    """Lower TORCH_DISTRIBUTED_DEBUG if DDP would crash: it takes the wrapper of DETAIL for gloo."""
    level = dist.DebugLevel.DETAIL
    if backend == "gloo" and torch.__version__ >= "2.7" and dist.get_debug_level() == level:
        say(
            f"TORCH_DISTRIBUTED_DEBUG=DETAIL crashes DDP with gloo in torch {torch.__version__}: "
            "using INFO; a hang or a mismatch is explained without it"
        )
        dist.set_debug_level(dist.DebugLevel.INFO)


def _pick_device(by_srun: bool) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpus, ranks = torch.cuda.device_count(), local_world_size()
    has_own_gpu = gpus == 1 and by_srun  # srun --gpus-per-task=1 shows each task only its own
    if ranks > gpus and not has_own_gpu:
        line = f"{ranks} ranks on this node but {gpus} GPU(s):"
        if _group.is_debugged:
            say(f"{line} debugging on the CPU")
            return torch.device("cpu")
        remedy = f"start at most {gpus} (NPROC={gpus}), or use the CPU (CUDA_VISIBLE_DEVICES=)"
        raise UserError(f"{line} {remedy}")
    device = torch.device("cuda", 0 if has_own_gpu else local_rank())
    torch.cuda.set_device(device)
    return device


def teardown() -> None:
    """Leave the process group once all ranks have come this far."""
    dist.barrier()
    dist.destroy_process_group()


def is_joined() -> bool:
    """Return whether this process is in a process group."""
    return dist.is_initialized()


def is_set_up() -> bool:
    """Return whether this process has the store of a process group."""
    return _group.store is not None


def store() -> dist.Store:
    """Return the group's key-value store."""
    assert _group.store, "call setup first"
    return _group.store


def timeout() -> float:
    """Return after how many seconds a collective fails."""
    return _group.timeout.total_seconds()


def is_debugged() -> bool:
    """Return whether some rank has a debugger, or may get one."""
    return _group.is_debugged


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def local_rank() -> int:
    """Return this process's number on its node."""
    return int(os.environ.get("LOCAL_RANK", 0))


def local_world_size() -> int:
    """Return how many ranks this node has."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def is_rank_zero() -> bool:
    """Return whether this is the rank that writes and prints."""
    return rank() == 0


def say(line: str) -> None:
    """Print `line` on rank 0; do nothing if the terminal or pipe is closed."""
    if is_rank_zero():
        with contextlib.suppress(OSError):
            print(line, flush=True)


def reduce_tensor(tensor: Tensor, op: str = "sum") -> Tensor:
    """Return `tensor` combined over all ranks; every rank has to call it and gets the result.

    tensor: any shape and numeric dtype, the same on every rank; it is not modified.
    op: "sum", "min", "max", or "mean" of the ranks' values (floating dtypes only). For a mean over
        samples, reduce their sum and their count and divide once: a mean of the ranks' means is
        wrong as soon as ranks hold different numbers of samples.
    """
    result = tensor.detach().clone()
    dist.all_reduce(result, OPERATIONS["sum" if op == "mean" else op])
    return result / world_size() if op == "mean" else result


def start_sum(tensor: Tensor) -> Pending:
    """Begin to replace `tensor` by its sum over all ranks, which is there after `wait()`.

    Collectives that follow, such as those of backward(), run meanwhile.
    """
    return dist.all_reduce(tensor, async_op=True)


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
    values = [value] * world_size()
    dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    """Return once all ranks have called this."""
    dist.barrier()


def all_arrive(name: str, seconds: float) -> bool:
    """Return whether all ranks call this, with the same `name`, within `seconds`."""
    store().set(f"{name}/{rank()}", "")
    try:
        names = [f"{name}/{other}" for other in range(world_size())]
        store().wait(names, timedelta(seconds=seconds))
    except dist.DistError:
        return False
    return True


def collectives() -> int:
    """Return how many collectives this rank has started, DDP's own included."""
    return dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]


def from_rank_zero(function: Callable[..., T], *args: object) -> T:
    """Call `function(*args)` on rank 0 and return its result, which has to pickle, on all ranks."""
    return from_rank(0, function, *args)


def await_rank_zero(function: Callable[..., T], *args: object) -> T:
    """As from_rank_zero, for a function that may take longer than --dist-timeout."""
    key, box = f"rank zero {next(_turns)}", [function(*args)] if is_rank_zero() else []
    if box:
        store().set(key, "")
    while not store().check([key]):
        time.sleep(0.2)
    return from_rank_zero(lambda: box[0])


def from_rank(source: int, function: Callable[..., T], *args: object) -> T:
    """Call `function(*args)` on rank `source` and return its result on all ranks."""
    box = [function(*args) if rank() == source else None]
    dist.broadcast_object_list(box, src=source)
    return cast(T, box[0])


@contextlib.contextmanager
def rank_zero_first() -> Iterator[None]:
    """Run the block on rank 0, then on the first rank of each other node, then on the rest.

    For work that one rank does and the others find done, such as downloading a file: another node
    does it again only if it does not share rank 0's disk.
    """
    turn = 0 if is_rank_zero() else 1 if local_rank() == 0 else 2
    for _ in range(turn):  # lockstep: ok
        dist.barrier()
    yield
    for _ in range(2 - turn):  # lockstep: ok
        dist.barrier()
