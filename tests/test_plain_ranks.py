"""What ranks say to each other, and to whom they listen; in this process alone."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from engine.errors import UserError
from engine.ranks import (
    answering,
    debugging,
    distributed,
    explaining,
    failures,
    positions,
    process,
    protocol,
)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.Store]:
    """That of two ranks, of which this is number 0."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=9), wait_for_workers=False)
    monkeypatch.setattr(distributed, "store", lambda: store)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    yield store


class TestAttaching:
    """A debugger opens for the owner's file alone, whatever is in the store."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "run"
        folder.mkdir(0o755)
        return folder

    def test_by_the_owner(self, folder: Path) -> None:
        assert not answering.check_attach(folder)
        (folder / ".attach-0").touch()
        assert answering.check_attach(folder)

    def test_by_a_link(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "own").touch()
        (folder / ".attach-0").symlink_to(tmp_path / "own")
        assert not answering.check_attach(folder)

    @pytest.mark.parametrize("kind", ["pipe", "second name", "folder", "another's", "open to all"])
    def test_by_others(
        self, folder: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = folder / ".attach-0"
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.touch()
        if kind == "second name":
            os.link(path, tmp_path / "other")
        elif kind == "another's":
            monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
        elif kind == "open to all":
            folder.chmod(0o775)
        what = "chmod go-w" if kind == "open to all" else "not a file of this run's owner"
        with pytest.raises(UserError, match=what):
            answering.check_attach(folder)

    def test_not_for_a_key(
        self, folder: Path, store: dist.Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened: list[int] = []
        monkeypatch.setattr(debugging, "listen", lambda: opened.append(0) or "port 1")
        for key in "listen/0", "explain/1", "joined/listen/0":
            store.set(key, protocol.PERSON)
        answering.listen_if_asked(folder)
        assert not opened
        (folder / ".attach-0").touch()
        answering.listen_if_asked(folder)
        assert opened
        assert answering.await_listener(0) == "rank 0 listens on port 1"
        assert not store.check([protocol.listens(0)])


def test_waiting_leaves_the_store_to_others(store: dist.Store) -> None:
    """TCPStore.wait would hold it, and a thread that is asked to stop could not answer."""
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(positions.all_arrive("end", 6)))
    waiting.start()
    time.sleep(0.5)
    store.set("end/1", "")  # the other rank's
    waiting.join()
    assert found == [True]
    assert not positions.all_arrive("none", 0.2)


def test_answers_are_deleted(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    at = positions.Position(1, "", "", "", 0, [], 0)
    monkeypatch.setattr(positions, "here", lambda: at._replace(rank=0))
    monkeypatch.setattr(positions, "mine", positions.Mine())
    monkeypatch.setattr(distributed, "collectives", lambda: 0)
    key = protocol.explain(1, 1)
    store.set(key, positions._encode(at))
    assert positions.ask(5) == {0: at._replace(rank=0), 1: at}
    assert not store.check([key]) and not store.check([protocol.explain(1, 0)])


@pytest.mark.parametrize("is_end", [True, False])
def test_output_that_nobody_reads(
    is_end: bool, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given up if the run ends; one that goes on has it back once somebody reads again."""
    called: list[str] = []
    monkeypatch.setattr(process, "is_read", lambda _: called.append("look") or False)
    monkeypatch.setattr(process, "drop_unread", lambda: called.append("drop"))
    monkeypatch.setattr(positions, "ask", lambda _: {0: "does not answer"})
    monkeypatch.setattr(positions, "tell_explained", lambda: None)
    explaining.show("", is_end=is_end)
    assert called == (["drop"] if is_end else ["look"])


def test_a_held_error_is_not_ended_from_behind(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(failures, "GONE_SECONDS", 0.2)
    monkeypatch.setattr(failures, "_give_up", ended.append)
    monkeypatch.setattr(distributed, "is_set_up", lambda: True)
    store.set(protocol.ERROR, "1 1 1 host")
    with contextlib.suppress(IndexError):
        failures._known.clear()
    assert failures._lost_rank(dist.DistNetworkError("Broken pipe"))
    failures._known.clear()
    time.sleep(0.5)  # in the debugger
    assert not ended


def test_a_backend_that_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        def _get_sequence_number_for_group(self) -> int:
            raise RuntimeError("Backend fake does not yet support sequence numbers")

    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=Group()))
    assert distributed.collectives() == 0


def test_no_restart_after_a_quit() -> None:
    """Ctrl-\\ is a person's."""
    assert 128 + 3 in protocol.FINAL
