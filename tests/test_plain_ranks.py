"""What ranks say to each other, and to whom they listen; in this process alone."""

import ast
import importlib
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from running import ROOT, TEMPLATE_FOLDER

import ddpkit
from ddpkit.errors import UserError
from ddpkit.ranks import distributed, explaining, failures, process, protocol
from ddpkit.run import machine


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.Store]:
    """That of two ranks, of which this is number 0."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=9), wait_for_workers=False)
    monkeypatch.setattr(distributed, "store", lambda: store)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    yield store


def test_waiting_leaves_the_store_to_others(store: dist.Store) -> None:
    """TCPStore.wait would hold it, and a thread that is asked to stop could not answer."""
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(distributed.all_arrive("end", 6)))
    waiting.start()
    time.sleep(0.5)
    store.set(protocol.ARRIVED.format("end", 1), "")  # the other rank's
    waiting.join()
    assert found == [True]
    assert not distributed.all_arrive("none", 0.2)


def test_answers(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One block, of this rank and of another that answers or does not; if that asks, none."""
    at = explaining.Position("at main.py:9", "  ...")
    monkeypatch.setattr(explaining, "here", lambda: at)
    monkeypatch.setattr(explaining, "watch", process.Watch())
    store.set(protocol.PLACE.format(1, 1), explaining.json.dumps(at))
    explaining.show("title", 5, is_hang=False)
    assert capsys.readouterr().err == "title\nranks 0, 1, at main.py:9\n  ...\n"
    store.set(protocol.PROCESS.format(1), "elsewhere 7")
    explaining.show("title", 0.1)
    gone = "rank 1 does not answer (process 7 on elsewhere)"
    assert capsys.readouterr().err == f"title\n{gone}\nrank 0, at main.py:9\n  ...\n"
    store.set(protocol.ASKED.format(3), "1")
    explaining.show("title", 5)
    assert capsys.readouterr().err == ""
    assert store.check([protocol.PLACE.format(3, 0)])


def test_a_held_error_is_not_ended_from_behind(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "END_SECONDS", 0.1)
    monkeypatch.setattr(distributed, "is_set_up", lambda: True)
    monkeypatch.setattr(failures, "_known", [])
    store.set(protocol.ERROR, "1 1 1 host")
    assert failures._lost_rank(dist.DistNetworkError("Broken pipe"))
    time.sleep(0.5)  # in the debugger


def test_no_restart_after_a_quit() -> None:
    """Ctrl-\\ is a person's."""
    assert 128 + signal.SIGQUIT in protocol.FINAL


def test_seconds() -> None:
    """Few enough to be compared; who does not answer is given up before the launcher kills all."""
    names = [name for name in vars(protocol) if name.endswith("_SECONDS")]
    assert len(names) <= 8
    p = protocol
    assert 2 * p.POLL_SECONDS < p.ANSWER_SECONDS
    assert p.ANSWER_SECONDS + p.END_SECONDS < p.GRACE_TORCHRUN_SECONDS
    assert p.GRACE_TORCHRUN_SECONDS + p.ANSWER_SECONDS < 30  # after which torchrun kills all
    assert p.GRACE_SECONDS + p.ANSWER_SECONDS + p.END_SECONDS < p.STOP_SECONDS


def test_every_key_is_in_the_table() -> None:
    """No call of the store, in the files that share it, has a key that protocol.py lacks."""
    ranks = ROOT / TEMPLATE_FOLDER / "ddpkit" / "ranks"
    for name in ("distributed", "failures", "stopping", "explaining"):
        for node in ast.walk(ast.parse((ranks / f"{name}.py").read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                is_store = "store" in ast.unparse(node.func.value)
                texts = ast.JoinedStr, ast.Constant
                if is_store and node.func.attr in ("set", "get", "add", "check", "compare_set"):
                    assert not isinstance(node.args[0], texts), f"{name}.py:{node.lineno}"


class TestWatch:
    """The one thread of a rank."""

    def test_a_duty_that_fails_ends_the_rank(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(protocol, "POLL_SECONDS", 0.01)
        ended = threading.Event()
        monkeypatch.setattr(process, "exit_now", lambda status: status == 1 and ended.set())
        watch = process.Watch()
        watch.add(lambda _: 1 / 0)
        assert ended.wait(5)
        watch.stop()
        assert not watch.is_alive()
        assert "ZeroDivisionError" in capfd.readouterr().err

    def test_it_is_the_only_one(self) -> None:
        folder = ROOT / TEMPLATE_FOLDER / "ddpkit"
        found = {
            f"{path.name}: {node.attr}"
            for path in folder.rglob("*.py")
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and node.attr in ("Thread", "Timer")
        }
        assert found == {"process.py: Thread"}


ALIKE = {"torch": f"torch {torch.__version__}", "version": f"ddpkit {ddpkit.__version__}"}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({}, ""),
        ({"of one rank.py": "of one rank.py with checksum 1"}, ""),
        ({"torch": "torch 1.0"}, f"rank 1 has torch 1.0, rank 0 has {ALIKE['torch']}; all ranks"),
        ({"version": "ddpkit 0.9"}, f"has ddpkit 0.9, rank 0 has {ALIKE['version']};"),
        (
            {"ddpkit": "ddpkit with checksum 1"},
            "rank 1 has ddpkit with checksum 1, rank 0 ",
        ),
        (
            {"main.py": "main.py with checksum 1"},
            "rank 1 has main.py with checksum 1, rank 0",
        ),
        ({"classes": "3 classes"}, "rank 1 has 3 classes, rank 0 has 2 classes;"),
    ],
)
def test_what_ranks_need_alike(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: dict[str, str], words: str
) -> None:
    """Versions and code as well as data; a file that only one rank has imported may differ."""
    (tmp_path / "main.py").write_text("imported = True")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "main", raising=False)
    importlib.import_module("main")

    def gathered(mine: tuple[str, dict]) -> list:
        assert ALIKE.items() <= mine[1].items() and "main.py" in mine[1]
        return [mine, ("rank 1", {**mine[1], **other})]

    monkeypatch.setattr(distributed, "gather_objects", gathered)
    if not words:
        return machine.check_alike(["a", "b"], training=[1, 2])
    with pytest.raises(UserError, match=re.escape(words)):
        machine.check_alike(["a", "b"], training=[1, 2])
    return None
