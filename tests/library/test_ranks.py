"""How ranks meet, wait for each other, and need to be alike; and which one's failure counts."""

import importlib
import os
import re
import signal
import socket
import sys
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from generated import after_step, refusal, wait_for
from ranks import Patch, on_ranks

from ddpkit import launch
from ddpkit.ranks import distributed, environment, protocol
from ddpkit.run import machine


def with_variables(*wrong: dict[str, str]) -> Patch:
    """A patch: each rank has other variables of torchrun; an empty value unsets."""

    def patch() -> None:
        for name, value in wrong[int(os.environ["RANK"])].items():
            os.environ[name] = value
            if not value:
                del os.environ[name]

    return patch


def test_ranks_that_disagree(project, few, tmp_path):
    """They say how, and all exit; nobody waits long unless a rank is missing."""
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    busy = {"MASTER_PORT": str(port)}, {"RANK": "x", "LOCAL_RANK": "0"}
    next_port = f"MASTER_PORT={port + 1}"
    node, three = environment.node(), {"WORLD_SIZE": "3"}
    unset = {"WORLD_SIZE": ""}
    cases = (
        ([("", "3 s for rank 2 of 3", node), ("meeting.fail", "rank 2", "PORT")], three, three),
        ([("environment.read_group", "RANK", "WORLD_SIZE")], unset, unset),
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


@on_ranks(1, group=False)
def test_waiting_leaves_the_store_to_others():
    """TCPStore.wait would hold it, and a thread that is asked to stop could not answer."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=9), wait_for_workers=False)
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(distributed.all_arrive("end", 60)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "store", lambda: store)
        patch.setattr(distributed, "world_size", lambda: 2)
        waiting.start()
        wait_for(lambda: store.check([protocol.ARRIVED.format("end", 0)]))
        store.set(protocol.ARRIVED.format("end", 1), "")  # the other rank's
        waiting.join(9)
        assert found == [True]
        assert not distributed.all_arrive("none", 0.2)


@pytest.mark.parametrize(
    ("statuses", "rank"),
    [((2, -6), 0), ((1, -6), 1), ((1, -15), 0), ((None, 2), 1), ((0, None), 0)],
)
def test_which_rank_counts(statuses, rank):
    """A crash before those that it draws with it; but a mistake before what nccl makes of it."""
    assert launch.find_first(statuses) == (rank, statuses[rank])


@pytest.mark.parametrize(
    "other",
    [
        *({}, {"of one rank.py": "of one rank.py with checksum 1"}),
        *({"torch": "torch 1.0"}, {"version": "ddpkit 0.9"}, {"classes": "3 classes"}),
        *({name: f"{name} with checksum 1"} for name in ("ddpkit", "main.py")),
    ],
)
def test_what_ranks_need_alike(other, monkeypatch, tmp_path):
    """Versions and code as well as data; a file that only one rank has imported may differ."""
    (tmp_path / "main.py").write_text("imported = True")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "main", raising=False)
    importlib.import_module("main")

    def gathered(mine: tuple[str, dict]) -> list:
        return [mine, ("rank 1", {**mine[1], **other})]

    monkeypatch.setattr(distributed, "gather_objects", gathered)
    if not other or "of one rank.py" in other:
        machine.check_alike(["a", "b"], training=[1, 2])
    else:
        with refusal("machine.check_alike", "rank 1 has", "rank 0", *other.values()):
            machine.check_alike(["a", "b"], training=[1, 2])
