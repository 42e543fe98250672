"""Where all ranks are: the block that a hang prints, or `touch OUTPUT_DIR/.where` asks for.

They ask and answer through the store, which works while they wait in a collective, or are held by
a debugger; torch's flight recorder knows in which collective.
"""

import contextlib
import json
import operator
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from ddpkit.errors import print_line, shorten
from ddpkit.ranks import devices, distributed, environment, process, values
from ddpkit.ranks.protocol import ANSWER, ANSWER_SECONDS, ASKED

# Where a rank is, is not said by these files, but by what calls them.
BELOW = (f"ddpkit{os.sep}", "ddp.py")
# Where a hang usually comes from
NOT_ALL = "usually a collective that not all ranks reach: under `if rank == 0`, or after a break"
LATE = (
    "usually slow or stuck data loading, or work on one rank only, such as evaluate()"
)
STUCK = "slow work, a stuck process, or the network between the ranks: see the end of the stacks"


class Asking:
    """What the threads of this rank share, so that it can be asked where it is."""

    question: Path | None = None  # on rank 0: the file by which a person asks
    position: Callable[[], str] = str  # such as "epoch 1, step 3"
    answered = 0  # questions that this rank has answered


class Position(NamedTuple):
    """Where a rank is: at FILE:LINE, outside the machinery, in a collective or after one."""

    text: str  # such as "epoch 1, step 3, at main.py:179: in collective 43, barrier"
    stack: str
    waits_in: str = ""  # such as "collective 43, barrier"
    node: str = ""  # if there are several
    value: values.Look | None = None  # if one is asked for, and this rank is held


class Collective(NamedTuple):
    """One of all ranks that torch has recorded."""

    text: str  # such as "collective 43, barrier"
    is_over: bool
    backend: str


def collectives() -> list[Collective]:
    """Return those that torch has recorded, in their order."""
    has_gpus = devices.is_mixed()
    records = _dump("_dump_fr_trace")
    if has_gpus:  # from torch 2.15 on "nccl" records as "nccl2"
        records += _dump("_dump_nccl_trace")
        records += _dump("_dump_fr_trace", backend="nccl2")
        records += _dump("_dump_xccl_trace")
    recorded = []
    for each in sorted(records, key=operator.itemgetter("time_created_ns")):
        if each["process_group"][1] != "default_pg" or each["is_p2p"]:
            continue
        is_over = each["retired"] or each["state"] == "completed"
        backend, _, name = each["profiling_name"].rpartition(":")
        # Those of GPUs and those of CPUs have numbers of their own.
        kind = " of the CPUs" if has_gpus and backend == "gloo" else ""
        shape = f" {tuple(each['input_sizes'][0])}" if each["input_sizes"] else ""
        text = f"collective {each['collective_seq_id']}{kind}, {name}{shape}"
        recorded.append(Collective(text, is_over, backend))
    return recorded


def _dump(function: str, **options: str) -> list[dict]:
    """Return the entries of one of torch's private functions; none if this torch lacks it."""
    with contextlib.suppress(AttributeError, KeyError, TypeError):
        private = getattr(torch._C._distributed_c10d, function)
        # Stacks, which nothing here reads, take torch seconds: too long for an answer.
        dump = private(includeStackTraces=False, **options)
        return pickle.loads(dump)["entries"]  # our own
    return []


def find_waiting(recorded: Iterable[Collective]) -> str:
    """Return the first that is not over; of each backend they end in their order."""
    first: dict[str, str] = {}
    for each in recorded:
        if each.is_over:  # then so are those before it, whatever their records say
            first.pop(each.backend, None)
        else:
            first.setdefault(each.backend, each.text)
    return next(iter(first.values()), "")


def _own(file: str) -> str:
    """Return the path of a file of this project, within it; of others nothing."""
    return process.within(process.project(), file)


def here(expression: str = "") -> Position:
    """Return where this rank's main thread is, and what `expression` is there."""
    main = threading.main_thread()
    frames = traceback.extract_stack(sys._current_frames()[main.ident or 0])
    if process.End.error:  # it is handled elsewhere than where it was raised
        frames = traceback.extract_tb(process.End.error.__traceback__)
    shown = [each for each in frames if _own(each.filename)]
    edited = [each for each in shown if not _own(each.filename).startswith(BELOW)]
    words = [main.name * main.name.startswith("virtual"), Asking.position()]
    for frame in (edited or shown)[-1:]:
        words.append(f"at {_own(frame.filename)}:{frame.lineno}")
    if shown[-1:] != frames[-1:]:  # what the last of our own has called
        shown.append(frames[-1])
    text = ", ".join(filter(None, words))
    recorded = collectives()
    waits_in = find_waiting(recorded)
    if waits_in:
        text += f": in {waits_in}"
    elif recorded:
        text += f": after {recorded[-1].text}"
    stack = "".join(traceback.format_list(shown)).rstrip()
    node = environment.node() if environment.has_other_nodes() else ""
    value = values.look(expression) if expression else None
    return Position(text, stack, waits_in, node, value)


def answer() -> None:
    """Report where this rank is if another has asked."""
    store = distributed.store()
    while store.check([ASKED.format(Asking.answered + 1)]):
        Asking.answered += 1
        _, expression = json.loads(store.get(ASKED.format(Asking.answered)))
        key = ANSWER.format(Asking.answered, distributed.rank())
        store.set(key, json.dumps(here(expression)))


def answer_person() -> None:
    """Print where all ranks are if a person asks, on the rank that knows where they do."""
    question = Asking.question
    if question and question.exists():
        question.unlink(missing_ok=True)
        show("where all ranks are, as requested:")


def show(title: str, seconds: float = ANSWER_SECONDS, is_hang: bool = False) -> None:
    """Print where all ranks are, after at most `seconds`; unless another rank is about to."""
    turn = Asking.answered + 1
    is_mine = ask(turn)
    answer()
    if not is_mine:
        return
    known, absent = await_answers(turn, seconds)
    lines = distributed.states(absent) + block(known, is_hang and not absent)
    print_line("\n".join([title, *lines]), sys.stderr)


def ask(turn: int, expression: str = "") -> bool:
    """Ask all ranks where they are; return whether no other rank was first with this question."""
    mine = json.dumps([distributed.rank(), expression])
    asked = distributed.store().compare_set(ASKED.format(turn), "", mine)
    return asked.decode() == mine


def await_answers(turn: int, seconds: float) -> tuple[dict[int, Position], list[int]]:
    """Return the answers to a question, by rank, and who has not answered within `seconds`."""
    store = distributed.store()
    keys = [ANSWER.format(turn, rank) for rank in range(distributed.world_size())]
    distributed.await_keys(keys, seconds)
    known = {}
    absent = []
    for rank, key in enumerate(keys):
        if store.check([key]):
            known[rank] = Position(*json.loads(store.get(key)))
        else:
            absent.append(rank)
    return known, absent


class Rows(dict[str, str]):
    """By name of a rank what is known of it, shown in a row each."""

    def __repr__(self) -> str:
        return "\n".join(f"{rank}: {line}" for rank, line in self.items())


def on_all_ranks(expression: str) -> Rows:
    """Return a row for each rank: where it is held, what `expression` is there, what differs first.

    For the debug console, or as a watch, of any rank that is held. A tensor is shown by its shape,
    dtype, device, mean, norm and range; a network by its weights. A rank that runs, waits in a
    collective or has ended only says so. It is no collective: the others need not call it.

        ddpkit.on_all_ranks("images.mean()")
    """
    if not isinstance(expression, str):
        return Rows(error='put the expression in quotes: on_all_ranks("loss")')
    turn = Asking.answered + 1
    while not ask(turn, expression):
        turn += 1
    known, absent = await_answers(turn, ANSWER_SECONDS)
    rows = Rows()
    first = ""
    expected: dict[str, int] = {}
    for number, at in known.items():
        rank = f"rank {number}"
        rows[rank] = at.text
        if not at.value:
            continue
        line, sums = at.value
        first = first or rank
        expected = expected or sums
        for part in {**expected, **sums}:
            if expected.get(part) != sums.get(part):
                line += f"; differs from {first} in {part}"
                break
        rows[rank] = f"{line}; {at.text}"
    for number, state in zip(absent, distributed.states(absent), strict=True):
        rows[f"rank {number}"] = state.removeprefix(f"rank {number} ")
    return rows


def block(known: dict[int, Position], is_hang: bool) -> list[str]:
    """Return lines: where each group of ranks is, its stack, and what that usually comes from."""
    groups: dict[str, list[int]] = {}
    for rank, at in sorted(known.items()):
        groups.setdefault(at.text, []).append(rank)
    lines = []
    for text, ranks in groups.items():
        who = "ranks" if len(ranks) > 1 else "rank"
        who += f" {shorten(list(map(str, ranks)))}"
        nodes = shorten(sorted({known[rank].node for rank in ranks} - {""}))
        if nodes:
            who += f" on {nodes}"
        lines += [f"{who}, {text}", known[ranks[0]].stack]
    waits = {at.waits_in for at in known.values()}
    if is_hang and len(waits) == 1:
        lines.append(STUCK)
    elif is_hang:
        lines.append(LATE if "" in waits else NOT_ALL)
    return lines
