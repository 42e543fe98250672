"""How ranks meet, wait for each other, and need to be alike; and which one's failure counts."""

import importlib
import os
import re
import signal
import socket
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from generated import after_step, refusal
from ranks import Patch, on_ranks

from ddpkit import launch
from ddpkit.errors import UserError
from ddpkit.ranks import distributed, environment, explaining, meeting
from ddpkit.run import machine


def with_variables(*wrong: dict[str, str]) -> Patch:
    """A patch: each rank has other variables of torchrun."""

    def patch() -> None:
        os.environ.update(wrong[int(os.environ["RANK"])])

    return patch


def test_ranks_that_disagree(project, few, tmp_path):
    """They say how, and all exit; nobody waits long unless a rank is missing."""
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    busy = {"MASTER_PORT": str(port)}, {"RANK": "x", "LOCAL_RANK": "0"}
    next_port = f"MASTER_PORT={port + 1}"
    node, three = environment.node(), {"WORLD_SIZE": "3"}
    cases = (
        ([("", "3 s for rank 2 of 3", node), ("meeting.fail", "rank 2", "PORT")], three, three),
        ([("environment.read_group", "RANK=x"), ("meeting.hold", next_port)], *busy),
    )
    runs = []
    for number, (_, *wrong) in enumerate(cases):
        flags = project.flags(few, tmp_path / "out", "--dist-timeout", 20 if number else 3)
        runs.append(project.start(*flags, on=len(wrong), patch=with_variables(*wrong)))
    for run, (lines, *_) in zip(runs, cases, strict=True):
        done = run.end()
        assert {*done.statuses} == {2}
        said = {re.sub(r"rank \d on \S+: ", "", line) for line in done.err.splitlines()}
        assert len(said) == len(lines), done.err
        for code, *words in lines:
            asked = [*words, f" [{code}]" if code else "waiting"]
            assert any(all(word in line for word in asked) for line in said), done.err
    server.close()


def test_rank_zero_is_lost(project, few, tmp_path):
    """It holds the store, by which the others would agree on who speaks: each does."""
    killed = after_step(2, lambda: os.kill(os.getpid(), signal.SIGKILL), 0)
    done = project.train(few, tmp_path, on=3, patch=killed)
    assert done.statuses == [-signal.SIGKILL, 1, 1]
    for rank in 1, 2:
        assert f"error: rank {rank} lost rank 0, at MASTER_ADDR=127.0.0.1" in done.err
    assert done.err.count("error: ") == 2 and not done.left


@pytest.mark.parametrize(
    ("statuses", "rank"), [((2, -6), 0), ((1, -6), 1), ((1, -15), 0), ((None, 2), 1)]
)
def test_which_rank_counts(statuses, rank):
    """A crash before those that it draws with it; but a mistake before what nccl makes of it."""
    assert launch.find_first(statuses) == (rank, statuses[rank])


OTHERS = {
    **{"torch": "torch 1.0", "classes": "3 classes"},
    **{name: f"{name} with checksum 1" for name in ("main.py", "of one rank.py")},
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_ranks_need_alike(name, monkeypatch, tmp_path):
    """Versions and code as well as data; a file that only one rank has imported may differ."""
    (tmp_path / "main.py").write_text("imported = True")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "main", raising=False)
    importlib.import_module("main")

    def gathered(mine: tuple[str, dict]) -> list:
        return [mine, ("rank 1", {**mine[1], name: OTHERS[name]})]

    monkeypatch.setattr(distributed, "gather_objects", gathered)
    if name == "of one rank.py":
        machine.check_alike(["a", "b"], training=[1, 2])
    else:
        with refusal("machine.check_alike", "rank 1 has", "rank 0", OTHERS[name]):
            machine.check_alike(["a", "b"], training=[1, 2])


def come(store: dist.Store, rank: int, count: int, seconds: float) -> str:
    try:
        meeting.join(store, rank, count, timedelta(seconds=seconds), {})
    except UserError as error:
        return str(error)
    return "joined"


def test_a_stray():
    """It is told why it is one; those who have met do not hear of it."""
    store = dist.HashStore()
    assert come(store, 0, 1, 3) == "joined"
    for rank, size, line in (
        (0, 1, "RANK=0 is there twice ("),
        (1, 2, "WORLD_SIZE is 2 for rank 1, 1 for rank 0"),
        (1, 1, "RANK=1 with WORLD_SIZE=1: the last rank is 0"),
    ):
        assert come(store, rank, size, 3).startswith(line)


def test_a_name_that_does_not_resolve():
    with refusal("meeting.reach", "MASTER_ADDR=nowhere.invalid cannot be resolved"):
        meeting._reach("nowhere.invalid", 1, timedelta(seconds=0.4))


def test_in_which_collective_a_rank_waits():
    """The first that is not over; those of GPUs and of CPUs end in their own order each."""

    def found(*states: tuple[str, bool]) -> str:
        return explaining.find_waiting(
            explaining.Collective(name, is_over, name[:4]) for name, is_over in states
        )

    assert found() == found(("nccl 1", True)) == ""
    assert found(("nccl 1", True), ("nccl 2", False), ("nccl 3", False)) == "nccl 2"
    assert found(("nccl 1", False), ("nccl 2", True)) == ""  # a record that is not kept
    assert found(("nccl 1", False), ("gloo 1", True)) == "nccl 1"


@on_ranks(2)
def test_sums_of_bools(project):
    import distributed as own

    given = torch.tensor([True, False, distributed.rank() == 0])
    for reduce_tensor in distributed.reduce_tensor, own.reduce_tensor:
        assert reduce_tensor(given).tolist() == [2, 0, 1]
