"""Where all ranks are, asked through the store, which works while they wait in a collective.

protocol.py says with which keys. A rank answers from its watcher thread, or from the main thread
once a collective has failed there.
"""

import itertools
import json
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

from engine.ranks import distributed, lockstep, process, protocol
from engine.ranks.lockstep import Collective

POLL_SECONDS = 0.05
_lock = threading.Lock()
_answered = 0  # how often this rank has said where it is
_reached = -1  # how many collectives it had started then


class Position(NamedTuple):
    """Where a rank is.

    where: such as "epoch 1, step 3". place: the line of its main thread, outside the machinery.
    stack: of the main thread. reached: how many collectives it has started. started: the last ones
    of them. waits: the number of the one it waits in; 0 if in none; None if that is not known.
    """

    rank: int
    where: str
    place: str
    stack: str
    reached: int
    started: list[Collective]
    waits: int | None


def here(where: str = "", error: BaseException | None = None) -> Position:
    """Return where this rank's main thread is, or where it was when it raised `error`."""
    if error:
        frames = traceback.extract_tb(error.__traceback__)
    else:
        frame: FrameType | None = sys._current_frames()[threading.main_thread().ident or 0]
        frames = traceback.extract_stack(frame)
    places = [lockstep.place(frame.filename, frame.lineno) for frame in frames]
    own = [place for place in places if place]
    outside = [place for place in own if not lockstep.is_machinery(place)]
    first = places.index(own[0]) if own else 0  # before it there are only launchers
    started, unfinished = lockstep.started(), lockstep.unfinished()
    return Position(
        distributed.rank(),
        where,
        (outside or own or [""])[-1],
        "".join(traceback.format_list(frames[first:])).rstrip(),
        distributed.collectives(),
        started[-lockstep.WINDOW :],
        (unfinished.number if unfinished else 0) if started else None,
    )


def is_told() -> bool:
    """Return whether this rank has said where it is and has started no collective since."""
    return _reached == distributed.collectives()


def answer(find: Callable[[], Position]) -> None:
    """Say where this rank is if another rank has asked."""
    store = distributed.store()
    while store.check([protocol.explain(_answered + 1)]):
        with _lock:
            _say(_answered + 1, find())


def ask(find: Callable[[], Position], seconds: float) -> dict[int, Position | str] | None:
    """Return where all ranks are, after at most `seconds`; None if another rank has asked already.

    A rank that does not answer has a string that tells why.
    """
    rank, store = distributed.rank(), distributed.store()
    with _lock:
        for turn in itertools.count(_answered + 1):
            is_first = store.compare_set(protocol.explain(turn), "", str(rank)) == b"%d" % rank
            if is_first or not store.check([protocol.explained(turn)]):
                break
        _say(turn, find())
    deadline = time.monotonic() + seconds
    if not is_first:
        while time.monotonic() < deadline and not store.check([protocol.explained(turn)]):
            time.sleep(POLL_SECONDS)
        return None
    left = set(range(distributed.world_size()))
    found: dict[int, Position | str] = {}
    while left:
        for rank in sorted(left):
            if store.check([key := protocol.explain(turn, rank)]):
                found[rank] = _decode(store.get(key))
            elif time.monotonic() > deadline or "ended" in _state_of(rank):
                found[rank] = _state_of(rank)
        left -= found.keys()
        time.sleep(POLL_SECONDS)
    return dict(sorted(found.items()))


def tell_explained() -> None:
    """Tell the other ranks that what `ask` returned has been printed."""
    distributed.store().set(protocol.explained(_answered), "")


def _say(turn: int, position: Position) -> None:
    global _answered, _reached
    _answered, _reached = turn, position.reached
    key = protocol.explain(turn, distributed.rank())
    distributed.store().set(key, _encode(position))


def _encode(position: Position) -> str:
    """Return JSON, with each of the collectives, most of which recur at every step, only once."""
    table: dict[tuple, int] = {}
    started = [(each.number, table.setdefault(each[1:], len(table))) for each in position.started]
    return json.dumps([list(table), started, position._replace(started=[])])


def _decode(text: bytes) -> Position:
    table, started, values = json.loads(text)
    entries = [Collective(number, table[i][0], tuple(table[i][1])) for number, i in started]
    return Position(*values)._replace(started=entries)


def _state_of(rank: int) -> str:
    """Return why a rank does not answer, as far as it can be seen from here."""
    store, key = distributed.store(), protocol.process_of(rank)
    if store.check([key]):
        node, pid = store.get(key).decode().rsplit(" ", 1)
        if node == socket.gethostname() and (state := process.state_of(int(pid))):
            return f"{state} (process {pid})"
    return "does not answer"
