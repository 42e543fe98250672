"""The process group of all ranks, and its collectives, which work in a group of one, too."""

import contextlib
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    _get_default_group,
    _get_default_store,
)

from ddpkit.errors import escape, print_line
from ddpkit.ranks import devices, environment, meeting, process, protocol

T = TypeVar("T")


class Group:
    store: dist.Store | None = None  # works while ranks hang in a collective
    timeout = timedelta(minutes=10)  # torch's own, of gloo
    is_debugged = False
    has_met = False  # from `rendezvous` or `adopt_group` to `teardown`
    has_met_itself = False  # by `rendezvous`


_met: dict[int, "Rank"] = {}  # where those of a launcher meet, by process id
ALONE = dist.HashStore()  # of a process without a group
_turns = itertools.count()  # calls of await_rank_zero and rank_zero_first


class Rank(NamedTuple):
    """What torch.distributed.init_process_group needs to know."""

    device: torch.device  # the GPU that is this rank's, or the CPU
    # what carries collectives, of GPUs and of CPUs: "cpu:gloo,cuda:nccl", or "gloo"
    backend: str
    store: dist.Store
    rank: int
    world_size: int
    timeout: timedelta  # after which torch ends a collective


def rendezvous(
    local_rank: int = 0, timeout: float = 600, debugged: bool = False
) -> Rank:
    """Find the other ranks that the launcher describes; without a launcher be a group of one.

    Returns what torch.distributed.init_process_group needs. In a process that has called it before
    they have met: its group goes on, or a new one finds the others in the same place.

    local_rank: the number of this process on its node, if the launcher does not set LOCAL_RANK.
    timeout: of collectives, and of this call, in seconds; a week if a rank is `debugged`.

    Raises a UserError if the ranks do not find each other in time, or if two want the same GPU.

        here = ddpkit.rendezvous(local_rank)
    """
    before = _met.get(os.getpid())
    if before:  # main() again, as for k folds, or in a notebook
        Group.has_met = True
        own = f"group {next(_turns)}"  # not what is left of a group that has gone
        return before._replace(store=dist.PrefixStore(own, before.store))
    Group.is_debugged = debugged or process.is_debugged()
    Group.timeout = timedelta(days=7)
    if not Group.is_debugged:
        Group.timeout = timedelta(seconds=timeout)
    environment.adopt()
    device, note = devices.pick()
    notes = [note]
    number = 0
    if "RANK" in os.environ:
        os.environ.setdefault("LOCAL_RANK", str(local_rank))
        has_others = environment.has_other_nodes()
        if sys.platform == "linux" and not has_others:
            os.environ.setdefault(devices.NETWORK, "lo")  # nobody else can reach it
        host = os.environ.get("MASTER_ADDR", "")
        note["address"] = devices.address(host) if has_others else ""
        # Kept at once: by it ranks agree who reports a failure, also one in `join`.
        Group.store, number, size = meeting.open_store(Group.timeout)
        Group.store, notes = meeting.join(
            Group.store, number, size, Group.timeout, note
        )
        if has_others:
            devices.choose_network(notes)
    else:
        Group.store = dist.HashStore()
    device = devices.check(notes, device, Group.is_debugged)
    _note_process(Group.store, number)
    # From here on a rank that fails ends the others, too, though none is in the group.
    Group.has_met = Group.has_met_itself = True
    # With a connection of its own: torch waits at it for the others, and ours has to
    # hear meanwhile that one of them has failed.
    torchs = Group.store.clone()
    torchs.set_timeout(Group.timeout)
    ends_after = Group.timeout
    if device.type != "cpu":
        # torch would end the rank with SIGABRT; failures.Lateness comes first.
        ends_after += timedelta(seconds=protocol.LATE_SECONDS)
    backend = devices.backend(device)
    here = Rank(device, backend, torchs, number, len(notes), ends_after)
    _met[os.getpid()] = here
    return here


def _note_process(store: dist.Store, number: int) -> None:
    own = f"{environment.node()} {environment.process_space()} {os.getpid()}"
    store.set(protocol.PROCESS.format(number), own)


def adopt_group() -> None:
    """Use the group that a script has made by torch.distributed.init_process_group, if any.

    All ranks have to call it.
    """
    if dist.is_initialized() and not Group.has_met_itself:
        has_met()
        Group.is_debugged = any(gather_objects(process.is_debugged()))


def _adopt() -> None:
    # With a connection of its own, which torch's waiting does not hold.
    store = dist.PrefixStore("ddpkit", _get_default_store().clone())
    # Private; on the way to a new torch, its own default.
    with contextlib.suppress(AttributeError, RuntimeError):
        backend = _get_default_group()._get_backend(devices.of_group())
        Group.timeout = backend.options._timeout
    store.set_timeout(Group.timeout)
    _note_process(store, rank())
    Group.store = store
    Group.has_met = True


def teardown() -> None:
    """Leave the process group once all ranks have come this far, however long one needs."""
    wait_for_all()
    Group.has_met = False
    dist.destroy_process_group()


is_joined = dist.is_initialized


def is_set_up() -> bool:
    return Group.store is not None


def has_met() -> bool:
    if not Group.store and dist.is_initialized():
        _adopt()
    return Group.has_met


def store() -> dist.Store:
    has_met()
    return Group.store or ALONE


def timeout() -> float:
    return Group.timeout.total_seconds()  # after which a collective fails


def any_debugged() -> bool:
    return Group.is_debugged  # some rank has a debugger, or may get one


def rank() -> int:
    """Return this rank's number, from 0, among those of all nodes.

    Before there is a group the one that the launcher has given it.

        if ddpkit.rank() == 0:
            print("once")
    """
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def ranks_of_node() -> range:
    first = rank() - local_rank()
    count = os.environ.get("LOCAL_WORLD_SIZE", local_rank() + 1)
    return range(first, first + int(count))


def is_rank_zero() -> bool:
    return rank() == 0  # which writes and prints


def print0(line: str) -> None:
    """Print `line` on rank 0, control characters escaped; nothing if the terminal is closed."""
    if is_rank_zero():
        print_line(escape(line), sys.stdout)


def reduce_tensor(tensor: Tensor) -> Tensor:
    """Return the sum of the ranks' `tensor`s, of the same shape and dtype on each."""
    # A copy; of bools, whose sum would be a bool, as integers
    result = tensor.detach() + 0
    if dist.is_initialized():
        dist.all_reduce(result)
    return result


def gather_objects(value: T) -> list[T]:
    values = [value] * world_size()
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def from_rank(source: int, function: Callable[..., T], *args: object) -> T:
    """Call `function(*args)` on rank `source`; return its result, which has to pickle, on all."""
    box = [function(*args) if rank() == source else None]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=source)
    return cast(T, box[0])


def from_rank_zero(function: Callable[..., T], *args: object) -> T:
    return from_rank(0, function, *args)


def await_rank_zero(function: Callable[..., T], *args: object) -> T:
    """As from_rank_zero, for a function that may take longer than --dist-timeout."""
    box = [function(*args)] if is_rank_zero() else []
    all_arrive(f"done/{next(_turns)}", math.inf)
    return from_rank_zero(box.pop)


def wait_for_all() -> None:
    """As `barrier`, but a rank may come later than --dist-timeout after the others."""
    await_rank_zero(int)


def states(ranks: Iterable[int]) -> list[str]:
    """Return such as "rank 1 has ended (process 4711)" of ranks that do not answer."""
    lines = []
    here = [environment.node(), environment.process_space()]
    for rank in ranks:
        key = protocol.PROCESS.format(rank)
        known = store().get(key).decode() if store().check([key]) else "  0"
        node, space, pid = known.rsplit(" ", 2)
        state = "does not answer"
        at = f"process {pid}"
        # In a container of this node `pid` is another process.
        if [node, space] != here:
            at += f" on {node}"
        elif not process.is_running(int(pid)):
            state = "has ended"
        elif process.state(int(pid)) == "T":
            state = "is held by SIGSTOP"
        lines.append(f"rank {rank} {state} ({at})")
    return lines


def ended(ranks: Iterable[int]) -> list[str]:
    """Return such of those among `ranks` whose process is known to have gone."""
    return [state for state in states(ranks) if "has ended" in state]


def await_keys(keys: list[str], seconds: float) -> bool:
    """Return whether the store gets all `keys` in time; meanwhile the other thread can use it."""
    deadline = time.monotonic() + seconds
    while not store().check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def all_arrive(name: str, seconds: float) -> bool:
    """Return whether all ranks call this, with the same `name`, within `seconds`."""
    count = store().add(protocol.ARRIVED.format(name), 1)
    last = [protocol.ALL_ARRIVED.format(name)]
    if count == world_size():
        store().set(last[0], "")  # one key to wait for, however many ranks there are
    while not await_keys(last, min(seconds, protocol.ANSWER_SECONDS)):
        seconds -= protocol.ANSWER_SECONDS
        if seconds <= 0:
            return False
        # No time-out ends this wait for a rank that has left, and not every launcher.
        gone = ended({0, *ranks_of_node()})
        if gone and not store().check(last):
            raise dist.DistNetworkError(f"Connection lost: {', '.join(gone)}")
    return True


@contextlib.contextmanager
def rank_zero_first() -> Iterator[None]:
    """Run the block on rank 0, then on the first rank of each other node, then on the rest.

    For work that others find done, such as a download, of any length; another node does it again
    only if it does not share rank 0's disk. Every rank has to reach it.

        with ddpkit.rank_zero_first():
            dataset = torchvision.datasets.CIFAR10("data", download=True)
    """
    turn = 2
    if is_rank_zero():
        turn = 0
    elif local_rank() == 0:
        turn = 1
    number = next(_turns)

    def end_turns(first: int, last: int) -> None:
        # Through the store: a collective would fail after --dist-timeout.
        for ended in range(first, last):
            all_arrive(f"turn/{number}/{ended}", math.inf)

    end_turns(0, turn)
    yield
    end_turns(turn, 3)  # all leave together: a collective may follow
