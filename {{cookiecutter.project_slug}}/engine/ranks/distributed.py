"""The process group of all ranks, and its collectives, which work in a group of one, too."""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from engine.errors import escape
from engine.ranks import devices, environment, joining, process, protocol, reaching

T = TypeVar("T")
Pending = dist.Work  # a collective that has begun
OPERATIONS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


@dataclass
class Group:
    store: dist.Store | None = None  # works while ranks hang in a collective
    timeout: timedelta = timedelta()
    is_debugged: bool = False
    is_own: bool = True  # else who made it leaves it


_group = Group()
_runs = itertools.count()  # in a group that somebody else has made
_turns = itertools.count()  # calls of await_rank_zero


def setup(
    local_rank: int | None = None,
    timeout: float = 600,
    debugged: bool = False,
    alone: bool = False,
) -> torch.device:
    """Join the process group that the launcher describes, or a group of one; return the device.

    With GPUs: nccl, or what torch has for their kind, and one GPU per rank. Without: gloo. A group
    that exists, as in a train function of Ray's, is used with its own timeout and device.
    local_rank: used only if the launcher does not set LOCAL_RANK.
    timeout: seconds after which a collective fails; a week if a rank may be at a breakpoint.
    debugged: whether another rank may have a debugger.
    alone: whether a group of one will do even in a job of several nodes, on the CPU.
    """
    _group.is_debugged = debugged or process.is_debugged()
    _group.timeout = timedelta(days=7) if _group.is_debugged else timedelta(seconds=timeout)
    _group.is_own = not dist.is_initialized()
    if not _group.is_own:
        return _take_up()
    environment.adopt(alone)
    if local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(local_rank))
    device, note = devices.pick(on_cpu=alone)
    if "RANK" in os.environ:
        _group.store, group_rank, size = reaching.open_store(_group.timeout)
        fault = joining.unreachable() if device.type == "cpu" else ""
        met = joining.join_ranks(
            *(_group.store, group_rank, size, _group.timeout), {**note, "fault": fault}
        )
        _group.store, notes = met
        device = devices.check(notes, device, _group.is_debugged)
    else:
        _group.store, group_rank, size = dist.HashStore(), 0, 1
        devices.check([{**note, "host": ""}], device, _group.is_debugged)
    _group.store.set(protocol.process_of(group_rank), f"{environment.node()} {os.getpid()}")
    if device.index is not None:
        torch.accelerator.set_device_index(device)
    dist.init_process_group(
        devices.backend(device),
        store=_group.store,
        rank=group_rank,
        world_size=size,
        device_id=device if device.index is not None else None,
        timeout=_group.timeout,
    )
    return device


def _take_up() -> torch.device:
    store = distributed_c10d._get_default_store()
    _group.timeout = cast(Any, store).timeout  # missing in torch's stubs
    _group.store = dist.PrefixStore(f"run {next(_runs)}", store)  # apart from former runs' errors
    _group.store.set(protocol.process_of(rank()), f"{environment.node()} {os.getpid()}")
    return devices.current(dist.get_backend())


def teardown() -> None:
    """Leave the process group once all ranks have come this far; `start` does it.

    For a notebook, or a test that calls `setup` itself:

        device = engine.setup(0)
        engine.teardown()
    """
    dist.barrier()
    if _group.is_own:
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
    """Return this rank's number, from 0, among those of all nodes.

    Before `setup` the one that the launcher has given it.

        if engine.rank() == 0:
            print("once")
    """
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
    """Print `line` on rank 0; do nothing if the terminal or pipe is closed.

    line: control characters in it are escaped.

        engine.say(f"teacher: {path}")
    """
    if is_rank_zero():
        with contextlib.suppress(OSError):
            print(escape(line), flush=True)


def reduce_tensor(tensor: Tensor, op: str = "sum") -> Tensor:
    """Return `tensor` combined over all ranks; every rank has to call it and gets the result.

    tensor: any shape and numeric dtype, the same on every rank; it is not modified.
    op: "sum", "min", "max", or "mean" of the ranks' values (floating dtypes only). For a mean over
        samples, reduce their sum and their count and divide once: a mean of the ranks' means is
        wrong as soon as ranks hold different numbers of samples.

        loss_sum, count = engine.reduce_tensor(totals).tolist()
    """
    result = tensor.detach().clone()
    dist.all_reduce(devices.carried(result), OPERATIONS["sum" if op == "mean" else op])
    return result / world_size() if op == "mean" else result


def start_sum(tensor: Tensor) -> Pending | None:
    """Begin to replace `tensor` by its sum over all ranks, which is there after `wait()`.

    Collectives that follow, such as those of backward(), run meanwhile. None if it is there at
    once, as in a group of one.
    """
    if world_size() == 1:
        return None
    return dist.all_reduce(devices.carried(tensor), async_op=True)


def broadcast(tensor: Tensor) -> None:
    """Overwrite `tensor` with rank 0's."""
    dist.broadcast(devices.carried(tensor), src=0)


def gather(tensor: Tensor) -> Tensor:
    """Return the ranks' `tensor`s, of the same shape and dtype on each, stacked: (ranks, ...)."""
    if not devices.has_collectives(tensor.device):  # in a group of one
        return tensor[None]
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


def collectives() -> int:
    """Return how many collectives this rank has started, with DDP's own; 0 if nothing counts."""
    with contextlib.suppress(RuntimeError):  # a backend that does not count
        return dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
    return 0


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
    does it again only if it does not share rank 0's disk. Every rank has to reach it.

        with engine.rank_zero_first():
            dataset = torchvision.datasets.CIFAR10("data", download=True)
    """
    turn = 0 if is_rank_zero() else 1 if local_rank() == 0 else 2
    for _ in range(turn):  # lockstep: ok
        dist.barrier()
    yield
    for _ in range(2 - turn):  # lockstep: ok
        dist.barrier()
