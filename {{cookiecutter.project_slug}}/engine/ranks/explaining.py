"""Where all ranks are, and why they wait for each other: the block that a hang prints.

They ask and answer through the store, which works while they wait in a collective, and know from
torch's flight recorder which ones they have started.
"""

import contextlib
import functools
import itertools
import json
import os
import pickle
import re
import sys
import sysconfig
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Collection, Hashable, Mapping
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch._C import _distributed_c10d

from engine import files
from engine.errors import LineError, shorten
from engine.ranks import distributed, environment, process, protocol
from engine.ranks.process import watch
from engine.ranks.protocol import ANSWER_SECONDS, ASKED, PERSON, PLACE, SHOWN

ROOT = str(Path(__file__).resolve().parents[2])
WINDOW = 1500  # collectives that are compared; those of other groups fill the recorder, too
FIELDS = {"collective_seq_id", "input_dtypes", "input_sizes", "is_p2p", "process_group"}
FIELDS |= {"profiling_name", "retired", "state"}  # of a record, in the versions of torch known here
UNEVEN = ("alltoall", "all_to_all", "scatter", "gather")  # shapes may differ between ranks
LIBRARIES = tuple(  # where packages are; not "data", which is /usr for the system's Python
    os.path.join(os.path.realpath(sysconfig.get_path(name)), "")
    for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
)
APART = re.compile(r"\S*barrier|(broadcast|reduce|scatter|gather)\b")  # in an if and its else
# Where it usually comes from
NOT_ALL = "usually a collective that not all ranks reach: under `if rank == 0`, or after a break"
ORDER = "all ranks have to start the same collectives, of the same shapes, in the same order"
LATE = "usually slow or stuck input, or work of one rank alone, such as evaluate()"
RECORDING = "torch records which collectives these are, unless TORCH_FR_BUFFER_SIZE=0"
STUCK = "slow work, a stuck process, or the network between the ranks: see the end of the stacks"


class Collective(NamedTuple):
    """One that a rank has started: its number, what it does, and the lines that led to it.

    own: "FILE:LINE" in the files that people edit, the innermost last; none if it was started in
    C++, as DDP does on GPUs.
    """

    number: int
    what: str
    own: tuple[str, ...]

    @property
    def key(self) -> tuple:
        """Return what has to be the same on all ranks; not the lines of what has a sender."""
        return self.what, () if APART.match(self.what) else self.own

    def __str__(self) -> str:
        return f"{self.what} at {self.own[-1]}" if self.own else self.what


class Position(NamedTuple):
    """Where a rank is.

    when: such as "epoch 1, step 3". place: the line of its main thread, outside the machinery.
    stack: of the main thread, without most lines of libraries. started: its last collectives.
    waits: the number of the one it waits in; 0 if in none. node: "" if all are on the same one.
    """

    rank: int
    when: str
    place: str
    stack: str
    started: list[Collective]
    waits: int = 0
    node: str = ""

    @property
    def reached(self) -> int:
        """Return how many collectives it has started; 0 if torch records none."""
        return self.started[-1].number if self.started else 0


Known = Mapping[int, Position]  # by rank
_lock = threading.Lock()  # held while this rank says where it is
_shown = [-1]  # how many collectives this rank had started when that was last printed by a rank


def records() -> list[dict]:
    """Return what torch's flight recorder has of the group of all ranks; [] if it is unknown."""
    private, calls = vars(_distributed_c10d), [("_dump_fr_trace", "gloo")]
    if torch.distributed.get_backend() == "nccl":  # "nccl2" from torch 2.15 on
        calls = [("_dump_nccl_trace", ""), ("_dump_fr_trace", "nccl2")]
    found: list[dict] = []
    with contextlib.suppress(AttributeError, KeyError, TypeError):  # another version of torch
        for name, backend in calls:
            more = {"backend": backend} if backend == "nccl2" else {}
            found = found or pickle.loads(private[name](**more)).get("entries", [])  # our own
    known = (each for each in found if each.keys() >= FIELDS)
    return [e for e in known if e["process_group"][1] == "default_pg" and not e["is_p2p"]]


def described(record: Mapping) -> Collective:
    frames, what = record.get("frames", ()), record["profiling_name"].split(":")[-1]
    places = [_place(frame["filename"], frame["line"]) for frame in frames]
    own = next((i for i, place in enumerate(places) if place), len(places))
    by = " ".join(frame["filename"] for frame in frames[:own])
    has_shape = what not in UNEVEN and record["input_sizes"]
    if what == "all_reduce" and ("autograd" in by or not frames):
        what = "DDP's gradients"
    elif os.path.join("nn", "parallel", "distributed.py") in by:
        what = f"DDP's {what}"
    if has_shape:
        what += f" {tuple(record['input_sizes'][0])} {record['input_dtypes'][0].lower()}"
    edited = [place for place in reversed(places) if place and not _is_machinery(place)]
    return Collective(record["collective_seq_id"], what, tuple(edited))


@functools.cache
def _place(file: str, line: int | None) -> str:
    """Return "FILE:LINE" in this project; "" for other files."""
    path = os.path.realpath(file)
    is_own = path.startswith(os.path.join(ROOT, "")) and not path.startswith(LIBRARIES)
    return f"{os.path.relpath(path, ROOT)}:{line}" if is_own and not file.startswith("<") else ""


def _is_machinery(place: str) -> bool:
    return place.startswith(os.path.join("engine", ""))  # which people do not edit


class Checksum:
    """Of the collectives since the last time: the same on all ranks if these are."""

    until = 0  # the number of the last that was counted

    def compute(self) -> int:
        """Return it, below 2**52; 0 if they are not known. At most the last WINDOW count."""
        found = records()
        now = found[-1]["collective_seq_id"] if found else self.until
        first, self.until = max(self.until + 1, now - WINDOW), now
        recent = [record for record in found if record["collective_seq_id"] >= first]
        if not recent or recent[0]["collective_seq_id"] != first:
            return 0
        return zlib.crc32(repr([described(record).key for record in recent]).encode()) or 1


checksum = Checksum()


def here() -> Position:
    """Return where this rank's main thread is, or where it was when it failed."""
    if watch.error:
        frames = traceback.extract_tb(watch.error.__traceback__)
    else:
        frame: FrameType | None = sys._current_frames()[threading.main_thread().ident or 0]
        frames = traceback.extract_stack(frame)
    places = [_place(frame.filename, frame.lineno) for frame in frames]
    own = [place for place in places if place]
    outside = [place for place in own if not _is_machinery(place)] or own
    first = places.index(outside[0]) if own else 0  # before it there are only launchers
    shown = [each for each, place in zip(frames[first:-1], places[first:-1], strict=True) if place]
    found = records()
    started = [described(record) for record in found[-WINDOW:]]
    waits = [e for e in found if not (e["retired"] or e["state"] == "completed")]
    waits = waits or (found[-1:] if watch.error else [])
    return Position(
        distributed.rank(),
        watch.position(),
        outside[-1] if outside else "",
        "".join(traceback.format_list([*shown, frames[-1]])).rstrip(),
        started,
        waits[0]["collective_seq_id"] if waits else 0,
        environment.node() if environment.has_other_nodes() else "",
    )


def answer() -> None:
    """Say where this rank is if another has asked; answer a person who asks in the folder."""
    with _lock:
        while distributed.store().check([ASKED.format(watch.questions + 1)]):
            _say(watch.questions + 1)
    if watch.folder and distributed.is_rank_zero():
        with contextlib.suppress(OSError, LineError):
            question = watch.folder / protocol.QUESTION
            if question.exists() and (found := ask(ANSWER_SECONDS, PERSON)):
                question.unlink(missing_ok=True)
                with files.writing(watch.folder / protocol.REPLY) as tmp_path:
                    tmp_path.write_text(block("", found), errors="surrogateescape")


def _say(turn: int) -> None:
    position, store = here(), distributed.store()
    watch.questions = turn
    if store.get(ASKED.format(turn)) != PERSON.encode():
        _shown[0] = position.reached
    store.set(PLACE.format(turn, position.rank), json.dumps(position))


def _decode(data: bytes) -> Position:
    position = Position(*json.loads(data))
    started = [Collective(number, what, tuple(own)) for number, what, own in position.started]
    return position._replace(started=started)


def ask(seconds: float, who: str = "") -> dict[int, Position | str] | None:
    """Return where all ranks are, after at most `seconds`; None if another rank is asking already.

    A rank that does not answer has a string that tells why. who: PERSON, or this rank.
    """
    me, store = who or str(distributed.rank()), distributed.store()
    with _lock:
        if not who and _shown[0] == here().reached:  # perhaps while this waited for the lock
            return None
        for turn in itertools.count(watch.questions + 1):
            asker = store.compare_set(ASKED.format(turn), "", me).decode()
            is_over = store.check([SHOWN.format(turn)])
            if asker == me or not (is_over or asker == PERSON):
                break
            _say(turn)
        _say(turn)
    if asker != me:
        return None
    deadline = time.monotonic() + seconds
    left = set(range(distributed.world_size()))
    found: dict[int, Position | str] = {}
    while left:
        for rank in sorted(left):
            if store.check([key := PLACE.format(turn, rank)]):
                found[rank] = _decode(store.get(key))
                store.delete_key(key)  # it takes kilobytes
            elif time.monotonic() > deadline or "ended" in state_of(rank):
                found[rank] = state_of(rank)
        left -= found.keys()
        time.sleep(0.05)
    return dict(sorted(found.items()))


def show(title: str, seconds: float = ANSWER_SECONDS) -> None:
    """Print where all ranks are, and why they wait; unless another rank is about to, or has."""
    if found := ask(seconds):
        print(block(title, found), file=sys.stderr, flush=True)
        distributed.store().set(SHOWN.format(watch.questions), "")


def state_of(rank: int) -> str:
    """Return why a rank does not answer, as far as it can be seen from here."""
    node, pid = distributed.process_of(rank)
    if node and node != environment.node():
        return f"does not answer (process {pid} on {node})"
    letter = "" if process.is_running(pid) else "X"
    with contextlib.suppress(OSError):  # not on Linux
        letter = letter or Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    ended = "has ended"
    state = {"Z": ended, "X": ended, "T": "is held by SIGSTOP"}.get(letter if node else "")
    return f"{state} (process {pid})" if state else "does not answer"


def block(title: str, found: Mapping[int, Position | str]) -> str:
    """Return lines: which ranks do not answer, how the others differ, and a stack of each group.

    title: the first line; if it is empty, nothing may be wrong, and the lines do not guess.
    """
    known = {rank: each for rank, each in found.items() if isinstance(each, Position)}
    absent = _group(found.keys() - known.keys(), lambda rank: found[rank])
    lines = [*filter(None, [title]), *(f"{name(ranks)} {found[ranks[0]]}" for ranks in absent)]
    if known:
        what, hint = compare(known)
        lines += [what, hint] if title and not absent else [what]
    for ranks in _group(
        known, lambda rank: (known[rank].place, known[rank].waits or known[rank].reached)
    ):
        first = known[ranks[0]]
        when = f", {first.when}" if first.when else ""
        nodes = shorten(sorted({known[rank].node for rank in ranks} - {""}))
        lines += [f"stack of {name(ranks)}{nodes and f' on {nodes}'}{when}:", first.stack]
    return "\n".join(lines)


def compare(known: Known) -> tuple[str, str]:
    """Return how the ranks' collectives differ, and half a line on where that comes from."""
    recorded = [{each.number: each for each in at.started} for at in known.values() if at.started]
    if not recorded:
        return _places(known, known), RECORDING
    first = max(min(each) for each in recorded)
    for number in range(first, max(max(each) for each in recorded) + 1):
        if len({number in each and each[number].key for each in recorded}) > 1:
            line, hint = _difference(number, known)
            return (f"before or at {line}" if number == first > 1 else line), hint
    number = max(at.reached for at in known.values())
    last = next(each[number] for each in recorded if number in each)
    if all(at.waits for at in known.values()):
        return f"collective {number}: {_verb(known, 'wait', 'waits')} in {last}", STUCK
    return f"{number} collectives done on each rank: {_places(known, known)}", STUCK


def _difference(number: int, known: Known) -> tuple[str, str]:
    """Return the words for ranks whose collectives of that number differ, or are not all there."""
    at = {rank: each for rank in known for each in known[rank].started if each.number == number}
    groups, parts, missed = _group(at, lambda rank: at[rank].key), [], []
    for ranks in groups:
        each, others = at[ranks[0]], at.keys() - set(ranks)
        waits = all(known[rank].waits == number for rank in ranks)
        apart = (line for line in reversed(each.own) if any(line not in at[r].own for r in others))
        called = next(apart, "")
        by = f", called at {called}" if called not in ("", *each.own[-1:]) else ""
        verbs = ("wait", "waits") if waits else ("were", "was")
        parts.append(f"{_verb(ranks, *verbs)} in {each}{by}")
        taken = {line for rank in others for other in known[rank].started for line in other.own}
        if others and (line := next((line for line in each.own if line not in taken), "")):
            missed.append(f"; {name(others)} never came to {line}")
    line = f"collective {number}: {', '.join(parts)}"
    if behind := sorted(known.keys() - at.keys()):
        line += f"; {_verb(behind, 'have', 'has')} not come to it: {_places(behind, known)}"
        before = known[behind[0]].started
        line += f", after {before[-1]}" if before else ""
    if len(missed) == 1:  # only one group has been where the others have not
        return line + missed[0], NOT_ALL
    return line, LATE if len(groups) == 1 else ORDER


def _places(ranks: Collection[int], known: Known) -> str:
    groups = _group(ranks, lambda rank: known[rank].place)
    return ", ".join(f"{_verb(same, 'are', 'is')} at {known[same[0]].place}" for same in groups)


def _group(ranks: Collection[int], key: Callable[[int], Hashable]) -> list[list[int]]:
    """Return the ranks that have the same key together, in the order of the lowest ones."""
    groups: dict[Hashable, list[int]] = {}
    for rank in sorted(ranks):
        groups.setdefault(key(rank), []).append(rank)
    return [*groups.values()]


def _verb(ranks: Collection[int], of_many: str, of_one: str) -> str:
    return f"{name(ranks)} {of_one if len(ranks) == 1 else of_many}"


def name(ranks: Collection[int]) -> str:
    """Return such as "rank 0", "ranks 0, 2" or "ranks 1-7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(texts)}"
