"""How ranks meet, wait for each other, and need to be alike; and which one's failure counts."""

import functools
import importlib
import itertools
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from generated import Ranks, after_step, die, refusal
from ports import free_port
from ranks import Patch, fork, join, on_ranks, said, setup, wait

from ddpkit import launch
from ddpkit.errors import UserError
from ddpkit.ranks import (
    devices,
    distributed,
    ending,
    environment,
    explaining,
    failures,
    meeting,
    process,
    protocol,
)
from ddpkit.run import agreement


def with_variables(wrong: list[dict[str, str]]) -> Patch:
    """A patch: each rank has other variables of torchrun."""

    def patch() -> None:
        os.environ.update(wrong[int(os.environ["RANK"])])

    return patch


def test_ranks_that_disagree(project, few, tmp_path):
    """They say how, and all exit; nobody waits long unless a rank is missing."""
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    busy = [{"MASTER_PORT": str(port)}, {"RANK": "x", "LOCAL_RANK": "0"}]
    next_port = f"MASTER_PORT={port + 1}"
    node = environment.node()

    def start(wrong: list[dict[str, str]], timeout: int) -> Ranks:
        flags = project.flags(few, tmp_path / "out", "--dist-timeout", timeout)
        return project.start(flags, on=len(wrong), patch=with_variables(wrong))

    # what each run's two lines say
    absent = (
        ["waiting", "3 s for rank 2 of 3", node],
        ["[meeting.join]", "rank 2", "PORT"],
    )
    mixed = ["[environment.read_group]", "RANK=x"], ["[meeting.hold]", next_port]
    runs = [
        (start([{"WORLD_SIZE": "3"}] * 2, timeout=3), absent),
        (start(busy, timeout=20), mixed),
    ]
    for run, lines in runs:
        done = run.end()
        assert set(done.statuses) == {2}
        said = {re.sub(r"rank \d on \S+: ", "", line) for line in done.err.splitlines()}
        assert len(said) == len(lines), done.err
        for words in lines:
            assert any(all(word in line for word in words) for line in said), done.err
    server.close()


def test_rank_zero_is_lost(project, few, tmp_path):
    """It holds the store, by which the others would agree on who speaks: each does."""
    killed = after_step(2, die, 0)
    done = project.train(few, tmp_path, on=3, patch=killed)
    assert done.statuses == [-signal.SIGKILL, 1, 1]
    for rank in 1, 2:
        assert f"error: rank {rank} lost rank 0, at MASTER_ADDR=127.0.0.1" in done.err
    assert done.err.count("error: ") == 2
    assert not done.left


@pytest.mark.parametrize(
    ("statuses", "rank"),
    [
        ((2, -6), 0),
        ((1, -6), 1),
        ((1, -15), 0),
        ((None, 2), 1),
    ],
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
    # what is imported here goes with the test
    monkeypatch.setitem(sys.modules, "main", None)
    sys.modules.pop("main")
    importlib.import_module("main")
    monkeypatch.setattr(process, "project", lambda: tmp_path)

    def gathered(mine: tuple[str, dict]) -> list:
        return [mine, ("rank 1", {**mine[1], name: OTHERS[name]})]

    monkeypatch.setattr(distributed, "gather_objects", gathered)
    if name == "of one rank.py":
        agreement.check_alike(["a", "b"], training=[1, 2])
    else:
        with refusal("agreement.check_alike", "rank 1 has", "rank 0", OTHERS[name]):
            agreement.check_alike(["a", "b"], training=[1, 2])


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
        (0, 1, "two processes have RANK=0 ("),
        (
            1,
            2,
            "WORLD_SIZE is 2 for rank 1, 1 for rank 0: start the same number of ranks on each "
            "node, such as 2 (NPROC=2 ",
        ),
        (1, 1, "RANK=1 with WORLD_SIZE=1: the last rank is 0"),
    ):
        assert come(store, rank, size, 3).startswith(line)


def test_a_name_that_does_not_resolve():
    with refusal("meeting.reach", "MASTER_ADDR=nowhere.invalid cannot be resolved"):
        meeting._reach("nowhere.invalid", 1, timedelta(seconds=0.4))


@on_ranks(3, group=False)
def test_turns_may_take_longer_than_collectives(tmp_path):
    """Rank 0, then the first rank of another node, then the others; all leave together."""
    rank = int(os.environ["RANK"])
    log = tmp_path / "log"
    os.environ["LOCAL_RANK"] = "0" if rank == 1 else "2"
    setup(timeout=1)
    for _ in range(2):
        with distributed.rank_zero_first(), log.open("a") as file:
            time.sleep(1.3)
            file.write(f"{rank}")
        assert len(log.read_text()) % 3 == 0
        distributed.barrier()
    assert log.read_text() == "012012"


def end_of(act: Callable[[], object], folder: Path) -> tuple[list[int], list[str]]:
    """Statuses of two nodes of one rank, and what each says, when rank 1 fails in `act`."""
    port = free_port()
    began = time.monotonic()

    def begin(rank: int) -> None:
        join(rank, 2, port)
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        environment.node = lambda: f"node{rank}"
        with failures.one_line_errors():
            act()

    outputs = [folder / f"node{rank}" for rank in range(2)]
    pids = [
        fork(functools.partial(begin, rank), path) for rank, path in enumerate(outputs)
    ]
    statuses = wait(pids, 30)
    assert time.monotonic() - began < 15
    return statuses, [said(path)[1] for path in outputs]


def test_a_failure_in_a_turn(tmp_path):
    """It ends those that wait for theirs."""

    def act() -> None:
        setup(timeout=60)
        with distributed.rank_zero_first():
            if distributed.rank() == 0:
                raise UserError("no such file")

    statuses, (first, other) = end_of(act, tmp_path)
    assert statuses == [2, 2]
    assert "no such file" in first
    assert "rank 0 on node0 has failed" in other


def test_a_failure_between_meeting_and_joining(tmp_path):
    """As in ddp.py, when all ranks are there, but have no group yet."""

    def act() -> None:
        here = distributed.rendezvous(timeout=60)
        if here.rank == 1:
            raise KeyError("a bug")
        dist.init_process_group("gloo", store=here.store, rank=0, world_size=2)

    statuses, (first, other) = end_of(act, tmp_path)
    assert statuses == [1, 1]
    assert "rank 1 on node1 has failed" in first
    assert other.endswith("KeyError: 'a bug'\n")


def test_a_rank_that_does_not_join_in_time(tmp_path):
    """The one that waits for it says so in a line."""

    def act() -> None:
        here = distributed.rendezvous(timeout=3)
        if here.rank == 1:
            time.sleep(20)
        dist.init_process_group(
            "gloo", None, here.timeout, here.world_size, here.rank, here.store
        )

    statuses, (first, other) = end_of(act, tmp_path)
    assert statuses == [1, 1]
    assert "rank 0 on node0 has failed" in other
    line = "error: rank 0 on node0 timed out after 3 s (--dist-timeout) waiting for another rank"
    assert line in first.splitlines()
    assert "Traceback" not in first


@pytest.mark.parametrize("is_late", [True, False])
@on_ranks(1)
def test_a_collective_of_gpus_that_takes_too_long(is_late):
    """It is that one that counts, not the place of a main thread that waits for each of many."""
    ends = time.monotonic() + 1.5
    reported = []
    numbers = itertools.count()

    def collectives() -> list[explaining.Collective]:
        number = 1 if is_late else next(numbers)
        return [
            explaining.Collective(f"collective {number}, all_reduce", False, "nccl")
        ]

    distributed.Group.timeout = timedelta(seconds=0.5)
    explaining.collectives = collectives
    ending.report_and_exit = lambda line, status: reported.append((line, status))
    lateness = failures.Lateness()

    def look() -> None:
        while time.monotonic() < ends and not reported:
            lateness.end_if_late()
            time.sleep(0.05)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    line = "rank 0 timed out after 0.5 s (--dist-timeout) waiting for another rank"
    assert reported == ([(line, 1)] if is_late else [])


def test_a_broken_gpu(tmp_path):
    """On one node; all say so, rather than wait for a rank that has gone."""

    def act() -> None:
        if environment.node() == "node1":
            devices._name = lambda _: 1 / 0
        setup(timeout=60)

    statuses, lines = end_of(act, tmp_path)
    assert statuses == [2, 2]
    assert "node1: cpu cannot be used (division by zero)" in lines[0]


@on_ranks(1)
def test_processes_of_a_container(monkeypatch):
    """A number means another process in a container, even if that has the host's name."""
    key = protocol.PROCESS.format(1)
    gone = 2**22 + 1  # no process can have it
    here = environment.process_space()
    for space, state in (
        (here, f"rank 1 has ended (process {gone})"),
        (
            f"{here}1",
            f"rank 1 does not answer (process {gone} on ",
        ),
        ("", f"rank 1 does not answer (process {gone} on "),
    ):
        distributed.store().set(key, f"{environment.node()} {space} {gone}")
        assert distributed.states([1])[0].startswith(state)
    monkeypatch.setattr(environment, "process_space", str)  # without /proc
    assert distributed.states([1]) == [f"rank 1 has ended (process {gone})"]


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
    import ddp

    given = torch.tensor([True, False, distributed.rank() == 0])
    for reduce_tensor in distributed.reduce_tensor, ddp.reduce_tensor:
        assert reduce_tensor(given).tolist() == [2, 0, 1]


@on_ranks(2, group=False)
def test_what_rank_zero_does_alone():
    """It takes as long as it takes; a rank that has ended is not waited for."""
    protocol.ANSWER_SECONDS = 1
    setup(timeout=2)
    if distributed.is_rank_zero():
        time.sleep(3)
    distributed.wait_for_all()
    if not distributed.is_rank_zero():
        os._exit(0)
    with pytest.raises(dist.DistNetworkError, match="rank 1 has ended"):
        distributed.teardown()


@on_ranks(2, group=False)
def test_a_store_that_is_cleaned_away(tmp_path):
    """The ranks hold the file open, and so go on."""
    folder = tmp_path / "private"
    folder.mkdir(0o700, exist_ok=True)
    os.environ[protocol.STORE] = str(folder / "store")
    with failures.one_line_errors():
        setup(timeout=30)
        distributed.store().set(f"key {distributed.rank()}", "1")
        distributed.barrier()
        if distributed.is_rank_zero():
            shutil.rmtree(folder)
            distributed.store().set("meanwhile", "1")
        distributed.barrier()
        keys = ["key 0", "key 1", "meanwhile"]
        assert distributed.await_keys(keys, 20)
        assert list(distributed.store().multi_get(keys)) == [b"1"] * 3
        assert not folder.exists()
