"""Where all ranks are: the block that a hang prints, or `touch OUTPUT_DIR/.where` asks for.

They ask and answer through the store, which works while they wait in a collective; torch's flight
recorder knows in which.
"""

import contextlib
import json
import os
import pickle
import sys
import sysconfig
import threading
import traceback
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from ddpkit.errors import print_line, shorten
from ddpkit.ranks import devices, distributed, environment, process
from ddpkit.ranks.process import watch
from ddpkit.ranks.protocol import ASKED, PLACE, PROCESS

LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
# what the place of a rank is not in, but its callers
BELOW = (f"ddpkit{os.sep}", "distributed.py")
# Where a hang usually comes from
NOT_ALL = "usually a collective that not all ranks reach: under `if rank == 0`, or after a break"
LATE = "usually slow or stuck input, or work of one rank alone, such as evaluate()"
STUCK = "slow work, a stuck process, or the network between the ranks: see the end of the stacks"


class Position(NamedTuple):
    """Where a rank is: at FILE:LINE, outside the machinery, in a collective or after one."""

    text: str  # such as "epoch 1, step 3, at main.py:179: in collective 43, barrier"
    stack: str
    waits_in: str = ""  # such as "collective 43, barrier"
    node: str = ""  # if there are several


class Collective(NamedTuple):
    """One of all ranks that torch has recorded."""

    text: str  # such as "collective 43, barrier"
    is_over: bool
    backend: str


def collectives() -> list[Collective]:
    """Return those that torch has recorded, in their order."""
    private = vars(getattr(torch._C, "_distributed_c10d", None) or torch)
    calls: list[tuple[str, dict[str, str]]] = [("_dump_fr_trace", {})]
    has_gpus = devices.is_mixed()
    if has_gpus:  # from torch 2.15 on "nccl" records as "nccl2"
        calls += [("_dump_nccl_trace", {}), ("_dump_fr_trace", {"backend": "nccl2"})]
        calls += [("_dump_xccl_trace", {})]
    records: list[dict] = []
    for name, more in calls:
        with contextlib.suppress(AttributeError, KeyError, TypeError):  # another torch
            # Stacks, which nothing here reads, take torch seconds: too long for an
            # answer.
            dump = private[name](includeStackTraces=False, **more)
            records += pickle.loads(dump).get("entries", [])  # our own
    found = []
    for each in sorted(records, key=lambda each: each["time_created_ns"]):
        if each["process_group"][1] == "default_pg" and not each["is_p2p"]:
            is_over = each["retired"] or each["state"] == "completed"
            backend, _, name = each["profiling_name"].rpartition(":")
            # Those of GPUs and those of CPUs have numbers of their own.
            kind = " of the CPUs" if has_gpus and backend == "gloo" else ""
            shape = f" {tuple(each['input_sizes'][0])}" if each["input_sizes"] else ""
            text = f"collective {each['collective_seq_id']}{kind}, {name}{shape}"
            found.append(Collective(text, is_over, backend))
    return found


def find_waiting(found: Iterable[Collective]) -> str:
    """Return the first that is not over; of each backend they end in their order."""
    first: dict[str, str] = {}
    for each in found:
        if each.is_over:  # then so are those before it, whatever their records say
            first.pop(each.backend, None)
        else:
            first.setdefault(each.backend, each.text)
    return next(iter(first.values()), "")


def _own(file: str) -> str:
    """Return the path of a file of this project, within it; of others nothing."""
    path = Path(os.path.realpath(file))
    root = process.project()
    is_own = (
        path.is_relative_to(root)
        and not str(path).startswith(LIBRARIES)
        and path.is_file()
    )
    return str(path.relative_to(root)) if is_own else ""


def here() -> Position:
    """Return where this rank's main thread is."""
    main = threading.main_thread().ident or 0
    *outer, last = traceback.extract_stack(sys._current_frames()[main])
    own = [(path, frame) for frame in (*outer, last) if (path := _own(frame.filename))]
    edited = [each for each in own if not each[0].startswith(BELOW)] or own
    place = f"at {edited[-1][0]}:{edited[-1][1].lineno}" if own else ""
    shown = [frame for frame in outer if _own(frame.filename)]
    found = collectives()
    waits_in = find_waiting(found)
    text = ", ".join(filter(None, [watch.position(), place]))
    if found:
        text += f": in {waits_in}" if waits_in else f": after {found[-1].text}"
    stack = "".join(traceback.format_list([*shown, last])).rstrip()
    node = environment.node() if environment.has_other_nodes() else ""
    return Position(text, stack, waits_in, node)


def answer() -> None:
    """Say where this rank is if another has asked."""
    store, rank = distributed.store(), distributed.rank()
    while store.check([ASKED.format(watch.questions + 1)]):
        watch.questions += 1
        store.set(PLACE.format(watch.questions, rank), json.dumps(here()))


def show(title: str, seconds: float, is_hang: bool = True) -> None:
    """Print where all ranks are, after at most `seconds`; unless another rank is about to."""
    store, turn, me = distributed.store(), watch.questions + 1, str(distributed.rank())
    asker = store.compare_set(ASKED.format(turn), "", me).decode()
    answer()
    if asker != me:
        return
    keys = {rank: PLACE.format(turn, rank) for rank in range(distributed.world_size())}
    distributed.await_keys([*keys.values()], seconds)
    there = {rank: key for rank, key in keys.items() if store.check([key])}
    known = {rank: Position(*json.loads(store.get(key))) for rank, key in there.items()}
    absent = states(keys.keys() - known.keys())
    lines = [title, *absent, *block(known, is_hang and not absent)]
    print_line("\n".join(lines), sys.stderr)


def states(ranks: Iterable[int]) -> list[str]:
    """Return such as "rank 1 has ended (process 4711)" of ranks that do not answer."""
    found = []
    for rank in sorted(ranks):
        store, key = distributed.store(), PROCESS.format(rank)
        known = store.get(key).decode() if store.check([key]) else "  0"
        node, space, pid = known.rsplit(" ", 2)
        state, at = "does not answer", f"process {pid}"
        if node != environment.node():
            at += f" on {node}"
        # here the number is another process's
        elif space != environment.process_space():
            at += f" in another container on {node}"
        elif not process.is_running(int(pid)):
            state = "has ended"
        elif process.state(int(pid)) == "T":
            state = "is held by SIGSTOP"
        found.append(f"rank {rank} {state} ({at})")
    return found


def block(known: dict[int, Position], is_hang: bool) -> list[str]:
    """Return lines: where each group of ranks is, its stack, and what that usually comes from."""
    groups: dict[str, list[int]] = {}
    for rank, at in sorted(known.items()):
        groups.setdefault(at.text, []).append(rank)
    lines = []
    for text, ranks in groups.items():
        nodes = shorten(sorted({known[rank].node for rank in ranks} - {""}))
        where = f" on {nodes}" if nodes else ""
        lines += [f"{name(ranks)}{where}, {text}", known[ranks[0]].stack]
    waits = {at.waits_in for at in known.values()}
    hint = STUCK if len(waits) == 1 else LATE if "" in waits else NOT_ALL
    return [*lines, hint] if is_hang else lines


def name(ranks: Collection[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {shorten([*map(str, ranks)])}"
