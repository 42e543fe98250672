"""How ranks, and the launchers of several nodes, meet at a store: who is missing, or there twice.

Number 0 opens a meeting, under a new name that precedes all its keys: the store may hold those of
an earlier one. The others leave a note each. Once there is a note of each number, number 0 calls
the roll: a process that has died meanwhile does not answer, and is waited for again. Then all go.
"""

import contextlib
import itertools
import json
import os
import socket
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from engine.errors import UserError, shorten
from engine.ranks import environment
from engine.ranks.reaching import Clock, by_agent, say

ROLL_SECONDS = 10  # for all to answer
LATER_SECONDS = 2  # the others give up than number 0: each would look who is missing
LOOK_SECONDS = 0.5  # between two looks at what else has happened
Note = dict[str, Any]  # what one of them tells the others
VARIABLES = {"rank": ("RANK", "WORLD_SIZE"), "node": ("NODE_RANK", "NNODES")}


def join_ranks(
    store: dist.Store, rank: int, size: int, timeout: timedelta, note: Note
) -> tuple[dist.Store, list[Note]]:
    """Return once all ranks have called this: the part of `store` for what follows, and all notes.

    note: as of `Meeting.join`. Raises a UserError, the same in all, if they do not fit or are not
    there within `timeout`.
    """
    is_old = by_agent()  # then it may hold what ranks that torchrun started before have left
    clock = Clock(timeout.total_seconds())
    meeting = Meeting(store, "rank", rank, size, clock, is_old, is_old)
    notes = meeting.join(**note)
    return dist.PrefixStore("joined", meeting.store), notes  # apart from the errors of others


def unreachable() -> str:
    """Return a line if gloo would listen where other nodes cannot reach it; otherwise ""."""
    host, address = socket.gethostname(), "nothing"
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(host)
    if "GLOO_SOCKET_IFNAME" in os.environ or not address.startswith(("127.", "nothing")):
        return ""
    return (
        f"the name of {host} resolves there to {address}, where gloo cannot be reached from other "
        "nodes: set GLOO_SOCKET_IFNAME to its network interface (ip addr), or mend /etc/hosts"
    )


@dataclass
class Meeting:
    """One of `size` ranks or nodes that meet."""

    all: dist.Store  # of this meeting and those before
    kind: str  # "rank" or "node"
    number: int  # this one's
    size: int
    clock: Clock  # how long to wait for the others
    waits: bool  # for the next meeting, if this one is over
    may_be_old: bool = False  # the store, from before number 0 came

    def __post_init__(self) -> None:
        self.id = self.name = uuid.uuid4().hex  # the name is the id of number 0
        self.store: dist.Store = dist.PrefixStore(self.name, self.all)  # of this meeting

    def join(self, **note: Any) -> list[Note]:
        """Return the notes of all, in their order, once all have called this.

        note: what to tell the others, as JSON; "fault": a line if they must be on the same host.
        Raises a UserError, the same in all, if they do not fit or are not all there in time.
        """
        here = {"id": self.id, "place": environment.node(), "host": socket.gethostname()}
        words = json.dumps({**note, **here})
        if self.number == 0:
            return self._open(words)
        while True:
            while not has(self.all, [self.kind]):
                self._look()
            name, size = self.all.get(self.kind).decode().split()
            self.name, self.store = name, dist.PrefixStore(name, self.all)
            if not self.store.check(["go"]):
                self._check_size(int(size))
                self.store.set(str(self.number), words)
                if notes := self._answer(words):
                    return notes
            if self.all.get(self.kind).decode().split()[0] == name:
                self._wait_for_next()

    def _open(self, words: str) -> list[Note]:
        """Open a meeting as number 0; return the notes of all."""
        self.store.set("0", words)
        mine = f"{self.name} {self.size}"
        if self.may_be_old:
            self.all.set(self.kind, mine)
        found = self.all.compare_set(self.kind, "", mine).decode()
        if found != mine:
            self.store = dist.PrefixStore(found.split()[0], self.all)
            self._fail(self._twice(json.loads(self.store.get("0"))["place"]))
        return self._call_roll()

    def _check_size(self, size: int) -> None:
        own, total = VARIABLES[self.kind]
        if size != self.size:
            here = f"{self.size} for {self.kind} {self.number}"
            self._fail(f"{total} is {here}, {size} for another: give all the same")
        if self.number >= size:
            here = f"{own}={self.number} with {total}={size}"
            self._fail(f"{here}: the last {self.kind} is {size - 1}")

    def _call_roll(self) -> list[Note]:
        everybody = [str(number) for number in range(self.size)]
        for turn in itertools.count():
            while not has(self.store, everybody):
                self._look()
            notes = [*map(json.loads, self.store.multi_get(everybody))]
            faults = [note["fault"] for note in notes if note.get("fault")]
            if faults and len({note["host"] for note in notes}) > 1:
                self._fail(faults[0])
            self.store.set(f"call {turn}", "")
            answers = [f"here {turn} {note['id']}" for note in notes[1:]]
            if not answers or has(self.store, answers, ROLL_SECONDS):
                said = self.store.compare_set("go", "", json.dumps(notes)).decode()
                return self._read(said)
            for number, answer in zip(everybody[1:], answers, strict=True):
                if not self.store.check([answer]):  # it has died, or another has its number
                    self.store.delete_key(number)
        raise AssertionError

    def _answer(self, words: str) -> list[Note] | None:
        """Return the notes of all; None if they have gone without this one, or number 0 is anew."""
        turn, mine = 0, str(self.number)
        while not (has(self.store, ["go"] if turn else ["call 0"]) and self.store.check(["go"])):
            if self.store.check([f"call {turn}"]):
                self.store.set(f"here {turn} {self.id}", "")
                turn += 1
                continue
            self._look()
            if self.all.get(self.kind).decode().split()[0] != self.name:
                return None
            found = self.store.compare_set(mine, "", words).decode()  # it may have been slow
            if json.loads(found)["id"] != self.id:
                self._fail(self._twice(json.loads(found)["place"]))
        notes = self._read(self.store.get("go").decode())
        return notes if notes[self.number]["id"] == self.id else None

    def _wait_for_next(self) -> None:
        """Return once there is another meeting; this one is over, for another of this number."""
        place = self._read(self.store.get("go").decode())[self.number]["place"]
        name, seconds = VARIABLES[self.kind][0], f"{self.clock.seconds:g} s"
        line = f"{name}={self.number} is running already, on {place}"
        if self.waits and not self.may_be_old:
            say(f"{line}; waiting up to {seconds} for the next start")
        self.store.compare_set(f"end {self.number}", "", "")  # the one on `place` may have died
        while self.waits and self.clock.left() > 0:
            if has(self.store, ["over"]):
                raise UserError(f"{line}; {self.store.get('over').decode()}")
            if self.all.get(self.kind).decode().split()[0] != self.name:
                return
        if self.waits:
            raise UserError(f"waited {seconds}: {line}")
        raise UserError(self._twice(place))

    def _twice(self, place: str) -> str:
        what = f"{VARIABLES[self.kind][0]}={self.number} is there twice"
        places = sorted({place, environment.node()})
        return f"{what} ({', '.join(places)}): give each its own, and each run a MASTER_PORT"

    def _look(self) -> None:
        """Raise a UserError if another has found a fault, or it is too late; say who is missing."""
        if self.store.check(["go"]):
            self._read(self.store.get("go").decode())
        is_due = self.clock.is_due()
        is_over = self.clock.left() <= (-LATER_SECONDS if self.number else 0)
        if not (is_over or (is_due and self.number == 0)):
            return
        places, missing = {}, []
        is_open = self.number == 0 or self.name != self.id
        for number in range(self.size if is_open else 1):
            if self.store.check([str(number)]):
                places[number] = json.loads(self.store.get(str(number)))["place"]
            else:
                missing.append(number)
        seconds = f"{self.clock.seconds:g} s"
        who, total = f"{self.kind} {ranges(missing)}", VARIABLES[self.kind][1]
        line = f"{who} of {self.size} ({total}={self.size})"
        line += f"; here: {ranges(places, places)}" if places else ""
        if not is_over:
            return say(f"waiting up to {seconds} for {line}")
        self._fail(
            f"waited {seconds} for {line}: start as many, with the same MASTER_ADDR and MASTER_PORT"
        )

    def _fail(self, fault: str) -> NoReturn:
        """Raise a UserError in all who have not gone yet."""
        # Another run's rank that comes here by mistake must not end those that have begun.
        self._read(self.store.compare_set("go", "", json.dumps(fault)).decode())
        raise UserError(fault)

    def _read(self, words: str) -> list[Note]:
        """Return the notes that "go" has, or raise a UserError if it has a fault."""
        found = json.loads(words)
        if isinstance(found, str):
            if self.number == 0:  # here is the store: let the others read it first
                time.sleep(1)
            raise UserError(found)
        return found


def has(store: dist.Store, keys: Sequence[str], seconds: float = LOOK_SECONDS) -> bool:
    """Return whether all `keys` are in `store`, within `seconds`."""
    try:
        store.wait(list(keys), timedelta(seconds=seconds))
    except RuntimeError as error:  # a FileStore's time-out is no DistError
        if isinstance(error, dist.DistError) and not isinstance(error, dist.DistStoreError):
            raise
        return False
    return True


def ranges(numbers: Iterable[int], places: Mapping[int, str] | None = None) -> str:
    """Return "0-7 (a), 8-15 (b)" for numbers in rising order, with the name of each one's place."""
    groups: list[tuple[list[int], str]] = []
    for number in numbers:
        place = places[number] if places else ""
        if groups and groups[-1][0][-1] == number - 1 and groups[-1][1] == place:
            groups[-1][0].append(number)
        else:
            groups.append(([number], place))
    texts = []
    for group, place in groups:
        text = str(group[0]) + (f"-{group[-1]}" if len(group) > 1 else "")
        texts.append(f"{text} ({place})" if place else text)
    return shorten(texts)
