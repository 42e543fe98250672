"""How ranks meet, wait for each other, and need to be alike; and which one's failure counts."""

import importlib
import os
import re
import shutil
import signal
import socket
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist
from generated import after_step, refusal, wait_for
from ranks import Patch, on_ranks

from ddpkit import launch
from ddpkit.errors import UserError
from ddpkit.ranks import distributed, environment, explaining, failures, meeting, process, protocol
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


@on_ranks(2, group=False)
def test_a_store_that_is_cleaned_away(tmp_path):
    """The file is written anew, with what it held and what others have written meanwhile."""
    folder = tmp_path / "private"
    folder.mkdir(0o700, exist_ok=True)
    os.environ[protocol.STORE] = str(folder / "store")
    with failures.one_line_errors():
        distributed.setup(timeout=30)
        distributed.store().set(f"key {distributed.rank()}", "1")
        distributed.barrier()
        if distributed.is_rank_zero():
            wait_for(lambda: failures._store_file)
            with process.watch.lock:  # as it may come before the thread looks
                shutil.rmtree(folder)
                folder.mkdir(0o700)
                distributed.store().set("meanwhile", "1")
        distributed.barrier()
        keys = ["key 0", "key 1", "meanwhile"]
        assert distributed.await_keys(keys, 20)
        assert [*distributed.store().multi_get(keys)] == [b"1"] * 3
        assert folder.stat().st_mode & 0o077 == 0


@on_ranks(1)
def test_processes_of_a_container(monkeypatch):
    """A number means another process in a container, even if that has the host's name."""
    key = protocol.PROCESS.format(1)
    gone = 2**22 + 1  # no process can have it
    here = environment.process_space()
    for space, state in (
        (here, f"rank 1 has ended (process {gone})"),
        (f"{here}1", f"rank 1 does not answer (process {gone} in another container on "),
        ("", f"rank 1 does not answer (process {gone} in another container on "),
    ):
        distributed.store().set(key, f"{environment.node()} {space} {gone}")
        assert explaining.states([1])[0].startswith(state)
    monkeypatch.setattr(environment, "process_space", str)  # without /proc
    assert explaining.states([1]) == [f"rank 1 has ended (process {gone})"]
