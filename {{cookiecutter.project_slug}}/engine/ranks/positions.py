"""Where all ranks are, asked through the store, which works while they wait in a collective.

protocol.py says with which keys. answering.py has the thread that answers.
"""

import itertools
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from engine.ranks import distributed, environment, lockstep, names, process, protocol
from engine.ranks.lockstep import Collective

ANSWER_SECONDS = 3  # for all ranks to say where they are
POLL_SECONDS = 0.05


@dataclass
class Mine:
    """What the threads of this rank share."""

    where: Callable[[], str] = str  # such as "epoch 1, step 3"
    thread: int = threading.main_thread().ident or 0  # that trains
    error: BaseException | None = None  # that ends it
    answered: int = 0  # how often this rank has said where it is
    reached: int = -1  # how many collectives it had started then, if that was printed by a rank
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while it says so


mine = Mine()


class Position(NamedTuple):
    """Where a rank is.

    where: such as "epoch 1, step 3". place: the line of its main thread, outside the machinery.
    stack: of the main thread, without most lines of libraries. reached: how many collectives it has
    started. started: the last ones of them. waits: the number of the one it waits in; 0 if in none;
    None if that is not known. node: "" if all ranks are on the same one.
    """

    rank: int
    where: str
    place: str
    stack: str
    reached: int
    started: list[Collective]
    waits: int | None
    node: str = ""


def here() -> Position:
    """Return where this rank's main thread is, or where it was when it failed."""
    if mine.error:
        frames = traceback.extract_tb(mine.error.__traceback__)
    else:
        frame: FrameType | None = sys._current_frames()[mine.thread]
        frames = traceback.extract_stack(frame)
    places = [lockstep.place(frame.filename, frame.lineno) for frame in frames]
    own = [place for place in places if place]
    outside = [place for place in own if not lockstep.is_machinery(place)] or own
    first = places.index(outside[0]) if own else 0  # before it there are only launchers
    shown = [each for each in frames[first:-1] if lockstep.place(each.filename, each.lineno)]
    started, unfinished = lockstep.read()
    # gloo's own number counts what is sent to a single rank, too
    reached = started[-1].number if started else distributed.collectives()
    waits = unfinished.number if unfinished else reached if mine.error else 0
    return Position(
        distributed.rank(),
        mine.where(),
        outside[-1] if outside else "",
        "".join(traceback.format_list([*shown, frames[-1]])).rstrip(),
        reached,
        started[-lockstep.WINDOW :],
        waits if started else None,
        environment.node() if names.has_other_nodes() else "",
    )


def is_told() -> bool:
    """Return whether a rank has printed where this one is, which has started no collective since.

    What a person was told does not count: the run's own output lacks it.
    """
    return mine.reached == distributed.collectives()


def answer() -> bool:
    """Say where this rank is if another rank has asked; return whether one has."""
    before = mine.answered
    with mine.lock:
        while distributed.store().check([protocol.explain(mine.answered + 1)]):
            _say(mine.answered + 1)
    return mine.answered > before


def ask(seconds: float, by_person: bool = False) -> dict[int, Position | str] | None:
    """Return where all ranks are, after at most `seconds`; None if another rank is asking already.

    A rank that does not answer has a string that tells why.
    """
    me, store = protocol.PERSON if by_person else str(distributed.rank()), distributed.store()
    with mine.lock:
        if not by_person and is_told():  # perhaps while this waited for the lock
            return None
        for turn in itertools.count(mine.answered + 1):
            asker = store.compare_set(protocol.explain(turn), "", me).decode()
            is_first, is_over = asker == me, store.check([protocol.explained(turn)])
            if is_first or not (is_over or asker == protocol.PERSON):
                break
            _say(turn)
        _say(turn)
    if not is_first:
        return None
    deadline = time.monotonic() + seconds
    left = set(range(distributed.world_size()))
    found: dict[int, Position | str] = {}
    while left:
        for rank in sorted(left):
            if store.check([key := protocol.explain(turn, rank)]):
                found[rank] = _decode(store.get(key))
                store.delete_key(key)  # an answer takes kilobytes
            elif time.monotonic() > deadline or "ended" in state_of(rank):
                found[rank] = state_of(rank)
        left -= found.keys()
        time.sleep(POLL_SECONDS)
    return dict(sorted(found.items()))


def tell_explained() -> None:
    """Tell the other ranks that what `ask` returned has been printed."""
    distributed.store().set(protocol.explained(mine.answered), "")


def await_explained() -> None:
    """Wait until that has been printed for which this rank has said where it is."""
    await_keys(protocol.explained(mine.answered))


def await_keys(*keys: str, seconds: float = ANSWER_SECONDS) -> bool:
    """Return whether the store gets all `keys` in time; meanwhile other threads can use it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if distributed.store().check(list(keys)):
            return True
        time.sleep(POLL_SECONDS)
    return False


def all_arrive(name: str, seconds: float) -> bool:
    """Return whether all ranks call this, with the same `name`, within `seconds`."""
    distributed.store().set(f"{name}/{distributed.rank()}", "")
    ranks = range(distributed.world_size())
    return await_keys(*(f"{name}/{rank}" for rank in ranks), seconds=seconds)


def _say(turn: int) -> None:
    reached, position, store = distributed.collectives(), here(), distributed.store()
    mine.answered = turn
    if store.get(protocol.explain(turn)) != protocol.PERSON.encode():
        mine.reached = reached
    store.set(protocol.explain(turn, position.rank), _encode(position))


def _encode(position: Position) -> str:
    """Return JSON, with each of the collectives, most of which recur at every step, only once."""
    table: dict[tuple, int] = {}
    started = [(each.number, table.setdefault(each[1:], len(table))) for each in position.started]
    return json.dumps([list(table), started, position._replace(started=[])])


def _decode(text: bytes) -> Position:
    table, started, values = json.loads(text)
    entries = [Collective(number, table[i][0], tuple(table[i][1])) for number, i in started]
    return Position(*values)._replace(started=entries)


def state_of(rank: int) -> str:
    """Return why a rank does not answer, as far as it can be seen from here."""
    node, pid = process_of(rank)
    if node == environment.node() and (state := _state_of_process(pid)):
        return f"{state} (process {pid})"
    if node and node != environment.node():
        return f"does not answer (process {pid} on {node})"
    return "does not answer"


def _state_of_process(pid: int) -> str:
    """Return "has ended" or "is held by SIGSTOP" of a process of this machine; "" of others."""
    if not process.is_running(pid):
        return "has ended"
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:  # not on Linux
        return ""
    return {"Z": "has ended", "X": "has ended", "T": "is held by SIGSTOP"}.get(state, "")


def process_of(rank: int) -> tuple[str, int]:
    """Return the node and the process id of `rank`; ("", 0) if it has not come that far."""
    store, key = distributed.store(), protocol.process_of(rank)
    node, pid = store.get(key).decode().rsplit(" ", 1) if store.check([key]) else ("", 0)
    return node, int(pid)
