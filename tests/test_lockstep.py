"""Ranks that start different collectives or wait for each other: one block says which and where."""

import re
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running import NET, SAME_FOR_BOTH, Project, flags

from ddpkit.ranks import explaining
from ddpkit.ranks.explaining import Position

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
    """All ranks wait: one block, with the line that is to blame."""
    code = "run.step == 2 and rank == 0 and torch.distributed.barrier()"
    status, err, line = planted(code, 3)
    assert status == 1
    first = rf"^rank 0, epoch 1, step 2, at main.py:{line}: in collective \d+, barrier$"
    assert re.search(first, err, re.MULTILINE)
    others = r"^ranks 1, 2, epoch 1, step [23], at main.py:\d+: in collective \d+, all_reduce \("
    assert re.search(others, err, re.MULTILINE)
    assert err.count("usually a collective that not all ranks reach") == 1
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
    late = rf"^rank 1, epoch 1, step 2, at main.py:{line}: after collective \d+, all_reduce \("
    assert re.search(late, err, re.MULTILINE)
    others = r"^ranks 0, 2, epoch 1, step 3, at main.py:\d+: in collective \d+, all_reduce \("
    assert re.search(others, err, re.MULTILINE)
    assert err.count("usually slow or stuck input") == 1


@pytest.fixture
def fault(project: Project, data: Path, tmp_path: Path) -> Callable[[str], Any]:
    words = [*flags(data, tmp_path)[:-2], *NET]
    words = [str(word) for word in words if word not in ("--data", data)]
    return lambda name: project.call(f"lockstep.{name}", data, tmp_path, *words)


@SAME_FOR_BOTH
def test_where_is_it(fault: Callable) -> None:
    """A person who asks is answered in the run's own output, and the run goes on."""
    found = fault("asked")
    assert found["statuses"] == [0, 0]
    assert found["err"].startswith("asked where all ranks are:\n")
    assert re.search(r"^rank 0, .*: in collective \d+, all_reduce", found["err"], re.MULTILINE)
    assert "\nrank 1, epoch 1, step 3, at " in found["err"]
    assert "usually" not in found["err"]
    assert not found["left"]


@SAME_FOR_BOTH
def test_a_killed_rank(fault: Callable) -> None:
    statuses, _, err = fault("killed")
    assert statuses == [1, -9]
    line = r"error: rank 0 lost another rank: rank 1 has ended \(process \d+\)\n"
    assert re.fullmatch(line, err)


def ranks(*collectives: str, waits: bool = True) -> dict[int, Position]:
    """Positions of ranks that are in these collectives, or after them."""
    return {
        rank: Position(f"at main.py:{rank}: {each}", "  ...", each if waits else "")
        for rank, each in enumerate(collectives)
    }


def test_groups_of_ranks() -> None:
    found = dict.fromkeys(range(6), ranks("collective 4, c")[0])
    found[2] = Position("epoch 1, step 2, at main.py:40: in b", "  ...", "b")
    lines = explaining.block(found, is_hang=True)
    assert lines[0] == "ranks 0, 1, 3, 4, ..., at main.py:0: collective 4, c"
    assert lines[2] == "rank 2, epoch 1, step 2, at main.py:40: in b"
    assert lines[4:] == [explaining.NOT_ALL]


def test_what_it_usually_comes_from() -> None:
    all_wait, none = ranks("a", "a"), ranks("a", "a", waits=False)
    for found, hint in (
        (all_wait, explaining.STUCK),
        (none, explaining.STUCK),
        ({0: all_wait[0], 1: none[1]}, explaining.LATE),
        (ranks("a", "b"), explaining.NOT_ALL),
    ):
        assert explaining.block(found, is_hang=True)[-1] == hint
        assert hint not in explaining.block(found, is_hang=False)
