"""Why the ranks wait for each other: their positions, compared and put into words."""

import itertools
import sys
from collections.abc import Callable, Collection, Hashable, Mapping

import torch
from torch import Tensor

from engine.errors import UserError, shorten
from engine.ranks import distributed, positions, process, requeue
from engine.ranks.lockstep import Checksum, Collective
from engine.ranks.positions import Position

Known = Mapping[int, Position]  # by rank
Groups = list[tuple[Hashable, list[int]]]  # what ranks have in common, and the ranks

LAST = 3  # collectives that an answer to a person lists
# Where it usually comes from
NOT_ALL = "usually a collective that not all ranks reach: under `if rank == 0`, or after a break"
SHAPES = "shapes and dtypes have to be the same on all ranks"
ORDER = "all ranks have to start the same collectives in the same order"
INPUT = "usually slow or stuck input: storage, or a loader worker"
ALONE = "usually work of one rank alone, such as evaluate() or a print of a reduced number"
RECORDING = "torch records which collectives these are, unless TORCH_FR_BUFFER_SIZE=0"
NETWORK = "usually the network between the ranks, or a process that is stuck"
WORK = "no rank waits for another: slow work, or code that is stuck, at the end of the stack"


def show(title: str, seconds: float = positions.ANSWER_SECONDS, *, is_end: bool = True) -> None:
    """Print where all ranks are, and why they wait; unless another rank is about to, or has.

    seconds: how long to wait for the others to say where they are. is_end: whether the run ends; if
    not, and nobody reads the output, nothing is printed.
    """
    if found := positions.ask(seconds):
        if is_end:
            process.drop_unread()
        if is_end or process.is_read(2):
            print(block(title, found), file=sys.stderr, flush=True)
        for absent in (rank for rank, each in found.items() if is_end and isinstance(each, str)):
            requeue.note_failure(1, positions.process_of(absent)[0])
        positions.tell_explained()


def gather(tensor: Tensor, checksum: Checksum) -> Tensor:
    """Return the ranks' `tensor`s, float64 (n,), stacked: (ranks, n).

    Raises a UserError on all ranks if they have started different collectives since last time. Both
    take a single collective.
    """
    rows = distributed.gather(torch.cat((tensor, tensor.new_tensor([checksum.compute()]))))
    checksums = set(rows[:, -1].tolist())
    if len(checksums) > 1 and 0 not in checksums:  # 0: not known
        raise UserError(f"the ranks differ since the last save: {explain_difference()}")
    return rows[:, :-1]


def explain_difference() -> str:
    """Return a line on where the ranks' collectives differ; every rank has to call this."""
    found = distributed.gather_objects(positions.here())
    return "; ".join(filter(None, compare({each.rank: each for each in found})))


def block(title: str, found: Mapping[int, Position | str]) -> str:
    """Return lines: which ranks do not answer, how the others differ, and a stack of each group.

    title: the first line; if it is empty, nothing may be wrong, and the lines do not guess.
    """
    known = {rank: each for rank, each in found.items() if isinstance(each, Position)}
    absent = _group(found.keys() - known.keys(), lambda rank: found[rank])
    lines = [*filter(None, [title]), *(f"{name(ranks)} {why}" for why, ranks in absent)]
    if known:
        what, hint = compare(known)
        if {each.waits for each in known.values()} == {0}:
            hint = hint or WORK
        lines += [what, hint] if hint and title and not absent else [what]
    at = {rank: (each.place, each.waits or each.reached) for rank, each in known.items()}
    for _, ranks in _group(at, at.__getitem__):
        first = known[ranks[0]]
        when = f", {first.where}" if first.where else ""
        nodes = shorten(sorted({known[rank].node for rank in ranks} - {""}))
        lines += [f"stack of {name(ranks)}{nodes and f' on {nodes}'}{when}:", first.stack]
        if not title:
            last = (f"{each.number} {each}" for each in first.started[-LAST:])
            lines.append(f"  last collectives: {'; '.join(last)}")
    return "\n".join(lines)


def compare(known: Known) -> tuple[str, str]:
    """Return how the ranks' collectives differ, and in half a line where that comes from, or ""."""
    recorded = [{each.number: each for each in at.started} for at in known.values() if at.started]
    first = max((min(each) for each in recorded), default=1)
    last = max((max(each) for each in recorded), default=0)
    for number in range(first, last + 1):
        if len({each[number].key for each in recorded if number in each}) > 1:
            line, hint = _mismatch(number, known)
            return (f"before or at {line}" if number == first > 1 else line), hint
    reached = {at.reached for at in known.values()}
    if not recorded:
        at = _group(known, lambda rank: (known[rank].place, known[rank].reached))
        parts = (f"{_places(ranks, known)} ({known[ranks[0]].reached})" for _, ranks in at)
        return f"{', '.join(parts)}; in brackets: the collectives started", RECORDING
    if len(reached) > 1:
        return _laggards(min(reached) + 1, known)
    number, waits = max(reached), {at.waits for at in known.values()}
    if waits != {0} and None not in waits:
        what = _what(number, known, [*known])
        return f"collective {number}: {_verb([*known], 'wait', 'waits')} in {what}", NETWORK
    done = "done" if waits == {0} else "started"
    return f"{number} collectives {done} on each rank: {_places(known, known)}", ""


def _mismatch(number: int, known: Known) -> tuple[str, str]:
    """Return the words for ranks whose collectives of that number differ."""
    at = {rank: each for rank in known for each in known[rank].started if each.number == number}
    groups = _group(at, lambda rank: at[rank].key)
    parts = []
    for (_, ranks), what in zip(groups, _tell_apart([at[r[0]] for _, r in groups]), strict=True):
        is_there = all(known[rank].waits == number for rank in ranks)
        verbs = ("are", "is") if is_there else ("were", "was")
        parts.append(f"{_verb(ranks, *verbs)} in {what}")
    if behind := known.keys() - at.keys():
        parts.append(_places(behind, known))
    line = f"collective {number}: {', '.join(parts)}"
    if all(_comes_later(number, at[ranks[0]], known) for _, ranks in groups):
        return line, ORDER
    if not behind and len({each.own for each in at.values()}) == 1:
        return line, SHAPES
    # The collective that did not follow in the steps before is the one that ranks have missed.
    history = [each for each in known[min(at)].started if each.number < number]
    pairs = [(a.key, b.key) for a, b in itertools.pairwise(history)]
    seen = [pairs.count((history[-1].key, at[r[0]].key)) if pairs else 0 for _, r in groups]
    if len(set(seen)) == 1 and len({each.what for each in at.values()}) == 1:
        return line, ORDER  # the same kind on all ranks, on other lines
    ranks = groups[seen.index(min(seen))][1]
    others = at.keys() - set(ranks)
    taken = {line for rank in others for each in known[rank].started for line in each.own}
    place = next((line for line in at[ranks[0]].own if line not in taken), "")
    if seen.count(min(seen)) == 1 and place and not _comes_later(number, at[ranks[0]], known):
        line += f"; {name(others)} never came to {place}"
    return line, NOT_ALL


def _comes_later(number: int, each: Collective, known: Known) -> bool:
    later = (other for at in known.values() for other in at.started if other.number > number)
    return any(other.key == each.key for other in later)


def _laggards(number: int, known: Known) -> tuple[str, str]:
    """Return the words for ranks that wait in a collective that others have not started."""
    ahead = [rank for rank, at in known.items() if at.reached >= number]
    behind = [rank for rank, at in known.items() if at.reached < number]
    what = _what(number, known, ahead)
    line = f"collective {number}: {_verb(ahead, 'wait', 'waits')} in {what}"
    line += f"; {_verb(behind, 'have', 'has')} not come to it: {_places(behind, known)}"
    last = known[behind[0]]
    if last.started:
        line += f", after {last.started[-1]}"
    is_input = any(word in last.stack for word in ("dataset.py", "dataloader.py", "loading.py"))
    return line, INPUT if is_input else ALONE


def _what(number: int, known: Known, ranks: list[int]) -> str:
    found = (each for rank in ranks for each in known[rank].started if each.number == number)
    return str(next(found, "what torch has not recorded"))


def _tell_apart(different: list[Collective]) -> list[str]:
    """Return a text for each; where the innermost lines are the same, with the one that differs."""
    if len({each.place for each in different}) == 1:
        for depth in range(2, max(len(each.own) for each in different) + 1):
            calls = [each.own[-depth] if len(each.own) >= depth else "" for each in different]
            if len(set(calls)) > 1:
                return [
                    f"{each}, called at {at}" for each, at in zip(different, calls, strict=True)
                ]
    return [str(each) for each in different]


def _places(ranks: Collection[int], known: Known) -> str:
    """Return such as "rank 0 is at main.py:180, ranks 1-3 are at dataset.py:88"."""
    groups = _group(ranks, lambda rank: known[rank].place)
    return ", ".join(f"{_verb(same, 'are', 'is')} at {place}" for place, same in groups)


def _group(ranks: Collection[int], key: Callable[[int], Hashable]) -> Groups:
    """Return the ranks that have the same key together, in the order of the lowest ones."""
    groups: dict[Hashable, list[int]] = {}
    for rank in sorted(ranks):
        groups.setdefault(key(rank), []).append(rank)
    return [*groups.items()]


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
