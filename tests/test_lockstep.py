"""Ranks that start different collectives or wait for each other: one block says which and where."""

import re
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from running import NET, SAME_FOR_BOTH, Project, flags, run

from engine.ranks import distributed, explaining, lockstep, positions, protocol
from engine.ranks.lockstep import Collective
from engine.ranks.positions import Position

END = "            run.end_step()  #"
Planted = Callable[..., tuple[int, str, int]]


@pytest.fixture
def planted(project: Project, data: Path, tmp_path: Path) -> Iterator[Planted]:
    """Run main.py with a line of code before the end of a step; return status, stderr, line."""
    name = f"runs/planted_{uuid.uuid4().hex}.py"  # which other tests' copies leave out
    path = project.folder / name
    path.parent.mkdir(exist_ok=True)

    def start(code: str, ranks: int, *more: object) -> tuple[int, str, int]:
        text = (project.folder / "main.py").read_text()
        assert text.count(END) == 1
        lines = textwrap.indent(code, " " * 12)
        path.write_text(text.replace(END, f"{lines}\n{END}"))
        line = text[: text.index(END)].count("\n") + 1
        given = flags(data, tmp_path / "out", "--dist-timeout", 5, *more)
        done = project.fork(*given, ranks=ranks, script=name, draws=False)
        assert not done.left
        return done.status, done.err.replace(name, "main.py"), line

    yield start
    path.unlink(missing_ok=True)


@SAME_FOR_BOTH
def test_a_collective_on_one_rank(planted: Planted) -> None:
    """As gloo has it, ranks wait or are aborted: the same block, with the line that is to blame."""
    code = "run.step == 2 and rank == 0 and engine.reduce_tensor(torch.ones(7))"
    status, err, line = planted(code, 3)
    assert status == 1
    assert re.search(
        rf"^collective \d+: rank 0 is in all_reduce \(7,\) float32 at main.py:{line}, "
        r"ranks 1, 2 (are|were) in DDP's gradients \(\d+,\) float32 at main.py:\d+; "
        rf"ranks 1, 2 never came to main.py:{line}$",
        err,
        re.MULTILINE,
    )
    assert err.count("usually a collective that not all ranks reach") == 1
    assert err.count("stack of rank 0") == 1
    assert err.splitlines()[-1].startswith("error: rank ")
    assert "Fatal Python error" not in err


@SAME_FOR_BOTH
def test_one_rank_is_late(planted: Planted) -> None:
    began = time.monotonic()
    code = "run.step == 2 and rank == 1 and __import__('time').sleep(9)"
    status, err, line = planted(code, 3)
    assert status == 1
    assert time.monotonic() - began < 20
    assert err.startswith("no progress for 2.5 s:\n")
    assert re.search(
        r"^collective \d+: ranks 0, 2 wait in DDP's gradients \(\d+,\) float32 at main.py:\d+; "
        rf"rank 1 has not come to it: rank 1 is at main.py:{line}, after DDP's gradients",
        err,
        re.MULTILINE,
    )
    assert "stack of ranks 0, 2, epoch 1, step 3:" in err
    assert "stack of rank 1, epoch 1, step 2:" in err


@SAME_FOR_BOTH
def test_another_order(planted: Planted) -> None:
    """Nothing waits, but the sums are wrong: the next save says so, and the run ends there."""
    code = """if run.step == 2:
    for i in (0, 1) if rank else (1, 0):
        if i:
            engine.reduce_tensor(torch.ones(3))
        else:
            engine.reduce_tensor(torch.zeros(3))"""
    status, err, line = planted(code, 2)
    assert status == 2
    assert err.count("\n") == 1
    assert re.match(
        rf"error: .*collective \d+: rank 0 was in all_reduce \(3,\) float32 at main.py:{line + 3}, "
        rf"rank 1 was in all_reduce \(3,\) float32 at main.py:{line + 5}",
        err,
    )
    assert explaining.ORDER in err


@SAME_FOR_BOTH
def test_what_ranks_may_do_differently(planted: Planted) -> None:
    """Barriers and broadcasts on the lines of an if and its else; a send between two of three."""
    code = """if run.step == 2:
    if rank:
        torch.distributed.barrier()
        torch.distributed.broadcast(torch.zeros(3), 0)
    else:
        torch.distributed.barrier()
        torch.distributed.broadcast(torch.ones(3), 0)
    if rank == 0:
        torch.distributed.send(torch.ones(3), 1)
    elif rank == 1:
        torch.distributed.recv(torch.ones(3), 0)"""
    assert planted(code, 3, "--dist-timeout", 60)[:2] == (0, "")


@pytest.fixture
def fault(project: Project, data: Path, tmp_path: Path) -> Callable[[str], Any]:
    words = [*flags(data, tmp_path)[:-2], *NET]
    words = [str(word) for word in words if word not in ("--data", data)]
    return lambda name: project.call(f"lockstep.{name}", data, tmp_path, *words)


@SAME_FOR_BOTH
def test_where_is_it(project: Project, fault: Callable, tmp_path: Path) -> None:
    """Asked by two at once, then again, with leftovers; the run goes on and says nothing of it."""
    found = fault("asked")
    assert found["statuses"] == [0, 0]
    assert not found["err"]
    assert len(found["answers"]) == 3
    for answer in found["answers"]:
        assert "rank 0 waits in DDP's gradients" in answer
        assert "stack of rank 1, epoch 1, step 3:" in answer
        assert answer.count("last collectives: ") == 2
        assert "usually" not in answer
    status, err = found["late"]
    assert (status, err.count("\n")) == (1, 1)
    assert "no answer in 1 s" in err
    assert not found["left"]
    none = run([sys.executable, "-m", "engine.ranks.where", tmp_path / "none"], cwd=project.folder)
    none.refused("no such folder")


@SAME_FOR_BOTH
def test_where_is_it_in_a_hang(fault: Callable) -> None:
    """The answer does not replace the block on the job's own terminal."""
    found = fault("asked_in_a_hang")
    assert "rank 0 waits in DDP's gradients" in found["answer"]
    assert found["err"].startswith("no progress for 6 s:\n")
    assert found["err"].count("rank 0 waits in DDP's gradients") == 1
    assert all(found["statuses"])


@SAME_FOR_BOTH
def test_a_killed_rank(fault: Callable) -> None:
    statuses, _, err = fault("killed")
    assert statuses == [1, -9]
    first, second, third, *_ = err.splitlines()
    assert first == "rank 0 lost another rank:"
    assert second.startswith("rank 1 has ended (process ")
    assert re.match(r"collective \d+: rank 0 waits in ", third)


# What is compared


def ranks(*lists: list[Collective], waits: int | None = 0) -> dict[int, Position]:
    """Positions of ranks that have started these collectives."""
    return {
        rank: Position(rank, "", f"main.py:{90 + rank}", "", started[-1].number, started, waits)
        for rank, started in enumerate(lists)
    }


def steps(*each: tuple[str, int], first: int = 1) -> list[Collective]:
    return [
        Collective(number, what, ("main.py:9", f"main.py:{line}", "engine/ranks/distributed.py:1"))
        for number, (what, line) in enumerate(each, first)
    ]


A, B, C = ("a", 20), ("b", 30), ("c", 40)


def test_groups_of_ranks() -> None:
    line, hint = explaining.compare(
        ranks(steps(A, B, A, C, waits := ("x", 50)), *[steps(A, B, A, B, A)] * 7)
    )
    assert waits and hint == explaining.NOT_ALL
    assert line == (
        "collective 4: rank 0 was in c at main.py:40, ranks 1-7 were in b at main.py:30; "
        "ranks 1-7 never came to main.py:40"
    )


def test_no_rank_waits() -> None:
    """A slow machine, or work that never ends: nobody is named, and the block says so."""
    at = {rank: Position(rank, "", "main.py:9", "  ...", 4, [], 0) for rank in (0, 1)}
    recorded = {rank: each._replace(started=steps(A, B, A, B)) for rank, each in at.items()}
    assert explaining.block("no progress for 6 s:", recorded).splitlines()[2] == explaining.WORK
    assert explaining.WORK not in explaining.block("", recorded)  # asked by a person


def test_swapped() -> None:
    line, hint = explaining.compare(ranks(steps(A, B, C), steps(A, C, B)))
    assert hint == explaining.ORDER
    assert line.startswith("collective 2: rank 0 was in b at main.py:30, rank 1 was in c at main")
    before = steps(A, B, A, B)
    swapped = [[*before, *steps(("a", x), ("a", y), B, first=5)] for x, y in ((60, 61), (71, 72))]
    line, hint = explaining.compare(ranks(*swapped))  # in an if and its else
    assert hint == explaining.ORDER
    assert line == "collective 5: rank 0 was in a at main.py:60, rank 1 was in a at main.py:71"


def test_a_helper_that_is_called_from_two_lines() -> None:
    one, two = (
        [Collective(1, "a", (f"main.py:{line}", "helper.py:3", "engine/x.py:1"))] for line in (7, 8)
    )
    line, _ = explaining.compare(ranks(one, two))
    assert "a at helper.py:3, called at main.py:7, rank 1 was" in line
    assert "a at helper.py:3, called at main.py:8" in line
    line, _ = explaining.compare(ranks(one, [two[0]._replace(what="b")]))
    assert "a at helper.py:3, called at main.py:7, rank 1 was" in line


def test_a_difference_that_is_too_old() -> None:
    line, _ = explaining.compare(ranks(steps(A, B, first=90), steps(B, A, first=90)))
    assert line.startswith("before or at collective 90: ")


def test_barriers_on_other_lines_of_the_machinery_are_the_same() -> None:
    one, two = ([Collective(1, "a", ("main.py:7", f"engine/x.py:{i}"))] for i in (1, 2))
    assert "done" in explaining.compare(ranks(one, two))[0]


def test_all_wait() -> None:
    line, hint = explaining.compare(ranks(*[steps(A, B)] * 3, waits=2))
    assert (line, hint) == ("collective 2: ranks 0-2 wait in b at main.py:30", explaining.NETWORK)


def test_nothing_is_recorded() -> None:
    """As with TORCH_FR_BUFFER_SIZE=0: the lines of the main threads are left."""
    known = {
        rank: each._replace(started=[], waits=None)
        for rank, each in ranks(steps(A, B), steps(A, B), steps(A)).items()
    }
    assert explaining.compare(known) == (
        "rank 0 is at main.py:90 (2), rank 1 is at main.py:91 (2), rank 2 is at main.py:92 (1); "
        "in brackets: the collectives started",
        explaining.RECORDING,
    )


def test_positions_travel() -> None:
    (position, *_) = ranks(steps(A, B, A, B)).values()
    assert positions._decode(positions._encode(position).encode()) == position


def test_what_nccl_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP's gradients have no Python frames there; what is not completed is waited for."""
    file = f"{lockstep.ROOT}/main.py"
    entry = {"process_group": ("0", "default_pg"), "is_p2p": False, "retired": False}
    entry |= {"input_sizes": [[20]], "input_dtypes": ["Float"], "state": "started"}
    own = [{"filename": "/x/torch.py", "line": 1}, {"filename": file, "line": 5}]
    entries = [
        {**entry, "collective_seq_id": 1, "profiling_name": "nccl:all_reduce", "frames": own}
        | {"state": "completed"},
        {**entry, "collective_seq_id": 2, "profiling_name": "nccl:all_reduce", "frames": []},
    ]
    monkeypatch.setattr(lockstep, "_entries", lambda: entries)
    (first, second), unfinished = lockstep.read()
    assert str(first) == "all_reduce (20,) float32 at main.py:5"
    assert str(second) == "DDP's gradients (20,) float32"
    assert unfinished == second


def test_other_shapes_on_the_same_line() -> None:
    one, two = (steps(A, (f"all_reduce ({n},)", 30)) for n in (5, 6))
    line, hint = explaining.compare(ranks(one, two))
    assert hint == explaining.SHAPES
    assert "never came" not in line


def test_what_a_person_was_told_is_said_again_at_the_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    (position,) = ranks(steps(A, B)).values()
    monkeypatch.setattr(positions, "mine", positions.Mine())
    monkeypatch.setattr(positions, "here", lambda: position)
    monkeypatch.setattr(distributed, "store", lambda: store)
    monkeypatch.setattr(distributed, "collectives", lambda: position.reached)
    monkeypatch.setattr(distributed, "world_size", lambda: 1)
    for _ in range(2):
        assert positions.ask(1, by_person=True) == {0: position}
        positions.tell_explained()
    assert positions.ask(1) == {0: position}
    positions.tell_explained()
    assert positions.ask(1) is None


def test_one_block_if_two_ranks_find_the_hang_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second answers the first while it waits for its lock, and has nothing to ask then."""

    class Answered:
        def __enter__(self) -> None:
            positions.mine.answered = positions.mine.reached = 7

        def __exit__(self, *_: object) -> None:
            pass

    store = dist.HashStore()
    monkeypatch.setattr(positions, "mine", positions.Mine(lock=Answered()))
    monkeypatch.setattr(distributed, "store", lambda: store)
    monkeypatch.setattr(distributed, "collectives", lambda: 7)
    assert positions.ask(1) is None
    assert not store.check([protocol.explain(8)])


def test_a_call_on_one_rank_of_what_all_ranks_call_elsewhere() -> None:
    """Such as evaluate() in the loop: not the line in it, but the one that calls it."""

    def evaluate(number: int, line: int) -> Collective:
        return Collective(number, "e", ("main.py:9", f"main.py:{line}", "main.py:99"))

    before = [evaluate(1, 70), *steps(A, B, A, B, A, first=2)]
    line, _ = explaining.compare(ranks([*before, evaluate(7, 80)], [*before, *steps(B, first=7)]))
    assert "rank 0 was in e at main.py:99" in line
    assert line.endswith("; rank 1 never came to main.py:80")


def test_ranks_whose_collective_has_failed_share_a_stack() -> None:
    """One has timed out, which has ended it on the other, too."""
    one, two = ranks(steps(A, B), steps(A, B), waits=2).values()
    found = {0: one, 1: two._replace(place=one.place, waits=0)}
    assert "stack of ranks 0, 1:" in explaining.block("title", found)
