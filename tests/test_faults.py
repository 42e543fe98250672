"""Faults that strike at one place in the code, on ranks that are forks made to fail just there."""

import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import (
    NET,
    SAME_FOR_BOTH,
    Project,
    flags,
)

pytestmark = SAME_FOR_BOTH


@pytest.fixture
def fault(project: Project, data: Path, tmp_path: Path) -> Callable[[str], Any]:
    """Call a function of snippets/faults.py; most return, of each run, statuses, out and err."""
    words = [*flags(data, tmp_path)[:-2], *NET]
    words = [str(word) for word in words if word not in ("--data", data)]
    return lambda name: project.call(f"faults.{name}", data, tmp_path, *words)


def one_line(err: str, *words: str) -> None:
    assert len(err.splitlines()) == 1, err
    assert err.startswith("error: ")
    for word in words:
        assert word in err, err


def test_losses_that_are_no_numbers(fault: Callable, tmp_path: Path) -> None:
    """On all ranks, on one, and weights alone: the checkpoint from before is kept."""
    good, *bad = fault("no_numbers")
    assert good[0] == [0, 0]
    for (statuses, _, err), words in zip(bad, ["loss", "loss", "weight"], strict=True):
        assert 2 in statuses and 0 not in statuses
        one_line(err, words, "became NaN or inf", "--lr")
    assert not (tmp_path / "one" / "last.pt").exists()


def test_disks(fault: Callable, tmp_path: Path) -> None:
    """Full, or the folder gone: one line, all ranks end, and what was there stays whole."""
    good, full, gone = fault("disks")
    assert good[0] == [0, 0]
    assert full[0][0] == gone[0][0] == 2
    assert full[0][1] and gone[0][1]
    one_line(full[2], "full/last.pt", "cannot be written", "File too large")
    one_line(gone[2], "gone/last.pt", "cannot be written", "No such file")
    assert not (tmp_path / "gone").exists()


def test_hangs(fault: Callable) -> None:
    """A block tells where each rank is; a second Ctrl-C ends them at once."""
    statuses, _, err = fault("a_hang")
    assert statuses[0] == 1
    assert statuses[1] != 0
    assert err.count("no progress for 2.5 s:\n") == 1
    assert "usually slow or stuck input" in err
    for rank, step, where in ((0, 3, "train_one_epoch"), (1, 3, "in hang")):
        stack = err.split(f"\nrank {rank}, epoch 1, step {step}, at ")[1]
        assert where in stack.split("\nrank ")[0]
    assert "error: rank 0 timed out after 5 s (--dist-timeout) waiting for another rank" in err
    twice = fault("interrupted_twice")
    assert twice["statuses"] == [130, 130]
    assert twice["seconds"] < 5


def test_a_rank_that_does_not_answer(fault: Callable) -> None:
    """Held by SIGSTOP, of which the launcher does not know: it is named, and waited for."""
    found = fault("no_answer")
    for name in found:
        first = found[name][3].splitlines()[0]
        held = r"rank 1 is held by SIGSTOP \(process \d+\)"
        assert re.fullmatch(f"waiting up to 8 s for an answer: {held}", first)
    assert found["late"][0] == 75
    assert "SIGTERM: stopped and saved at epoch 1" in found["late"][2]
    status, seconds, _, err = found["dead"]
    assert status in (1, 128 + signal.SIGTERM)
    assert err.splitlines()[-1].startswith("error: ")
    assert seconds < 13
    status, seconds, _, err = found["held"]
    assert status == 128 + signal.SIGTERM
    assert re.fullmatch(f"error: not saved, after 8 s for an answer: {held}", err.splitlines()[-1])
    assert 8 <= seconds < 16  # 5 of them for rank 1 to see that it has failed


def test_a_watcher_in_trouble(fault: Callable) -> None:
    """More than 1,023 open files, and a stderr that is no file, are none; of a bug it tells."""
    found = fault("watchers")
    statuses, out, _ = found["many files"]
    assert statuses == [75, 75]
    assert "SIGTERM: stopped and saved at epoch 1, step " in out
    statuses, _, err = found["bug"]
    assert {*statuses} <= {1, 128 + signal.SIGTERM}  # or the store has gone
    assert "ValueError: a bug\n" in err


def test_signals_after_training(fault: Callable) -> None:
    """All is saved: it ends as if nothing had come, or with 75 if it has more to do than that."""
    soon, late = fault("signals_after_training")
    assert (soon[0], soon[2]) == ([0, 0], "")
    assert (late[0], late[2]) == ([75, 75], "")


def test_a_collective_on_one_rank_only(fault: Callable) -> None:
    """The stacks tell where each rank is."""
    statuses, _, err = fault("a_collective_on_one_rank")
    assert statuses == [1, 1]
    for rank, name in (0, "barrier"), (1, "train_one_epoch"):
        assert f"in {name}" in err.split(f"\nrank {rank}, ")[1].split("\nrank ")[0]


def test_ranks_that_leave(fault: Callable) -> None:
    """One that raises tells of it, alone; one that ends as if all were done takes all along."""
    found = fault("ranks_that_leave")
    raises, leaves = found["raises"], found["leaves"]
    for (statuses, _, err), status, last in zip(
        found["unnoticed"],
        (1, 2, 2),
        (
            "ValueError: a bug",
            "error: a mistake",
            f"error: rank 0 on {socket.gethostname()}: a mistake",
        ),
        strict=True,
    ):
        assert statuses == [status] * 2
        assert err.rstrip().splitlines()[-1] == last
    assert raises[0] == [1, 1]
    assert raises[2].count("Traceback") == 1
    assert raises[2].rstrip().endswith("ValueError: a bug")
    assert leaves[0] == [1, 0]
    one_line(leaves[2], "error: rank 0 lost another rank: rank 1 has ended (process ")


def test_samples_that_break_their_worker(fault: Callable) -> None:
    """It raises, dies or hangs: the picture is named."""
    raises, dies, hangs, in_a_save = fault("samples_that_break_their_worker")
    for statuses, *_ in (raises, dies, hangs, in_a_save):
        assert statuses == [1, 1]
    one_line(in_a_save[2], "/train/", ".jpg: DataLoader worker", "killed by signal")
    assert raises[2].count("while reading sample") == 1
    assert re.search("while reading sample .*train/dots/0002.jpg", raises[2])
    assert "ValueError: a bug" in raises[2]
    one_line(dies[2], "train/dots/0002.jpg")
    assert re.search("killed by signal|exited unexpectedly", dies[2])  # torch says either
    (line,) = [line for line in hangs[2].splitlines() if line.startswith("error: ")]
    one_line(line, "val/dots/0002.jpg", "timed out after")


def test_signals_at_awkward_moments(fault: Callable) -> None:
    """In evaluation and in a save: saved, and alike afterwards."""
    found = fault("signals_at_awkward_moments")
    whole, evaluation, rest, save, more, digests = found.values()
    assert whole[0] == rest[0] == more[0] == [0, 0]
    assert evaluation[0] == save[0] == [75, 75]
    assert "SIGUSR1: stopped and saved at epoch 1, step 6;" in evaluation[1]
    assert "0 of 2 epochs done and 6 steps of the next" in rest[1]
    assert "SIGUSR1: stopped and saved at epoch 1, step" in save[1]
    assert len(set(digests)) == 1


def test_nodes_that_share_no_disk(fault: Callable, tmp_path: Path) -> None:
    """The second node alone has the checkpoint; the first goes on from it all the same."""
    found = fault("nodes_that_share_no_disk")
    assert found["killed"][0] == [-9, -9]
    assert "node1/last.pt: 1 of 2 epochs done" in found["rest"][1]
    assert len(set(found["digests"])) == 1
    epochs = [line.split(",")[0] for line in (tmp_path / "node0/metrics.csv").open()]
    assert epochs == ["epoch", "1", "2"]


def test_stopped_without_resuming(fault: Callable) -> None:
    """It says how to go on: not by --resume never."""
    stopped = fault("stopped_without_resuming")
    assert stopped[0] == [75, 75]
    assert "the same command without --resume never to continue" in stopped[1]
