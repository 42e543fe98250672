"""Faults that strike at one place in the code, on ranks that are forks made to fail just there."""

import copy
import faulthandler
import functools
import math
import os
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from digest import digest
from generated import NET, Done, after_step, rows, wait_for
from ranks import Patch

from ddpkit.data.format import Format
from ddpkit.data.loading import Collate
from ddpkit.ranks import (
    children,
    distributed,
    explaining,
    process,
    protocol,
    stopping,
    values,
)
from ddpkit.run.criterion import Criterion
from ddpkit.run.folder import RunFolder
from ddpkit.run.loop import Run
from ddpkit.vision import folders
from ddpkit.vision.reporting import Reporter


def send(signum: int, rank: int | None = None) -> None:
    if rank in (None, int(os.environ["RANK"])):
        os.kill(os.getpid(), signum)


terminate = functools.partial(send, signal.SIGTERM)
die = functools.partial(send, signal.SIGKILL)
hang = functools.partial(time.sleep, 600)


def bug() -> None:
    raise ValueError("a bug")


def nan_on_one_rank() -> None:
    forward = Criterion.forward

    def patched(self: Criterion, outputs: Any, targets: Any) -> torch.Tensor:
        loss = forward(self, outputs, targets)
        return loss * float("nan") if distributed.rank() == 1 else loss

    Criterion.forward = patched


def infinite_weight() -> None:
    write = Run._write

    def patched(self: Run, *args: bool) -> None:
        with torch.no_grad():
            next(self.parts["model"].parameters())[0] = float("inf")
        write(self, *args)

    Run._write = patched


def fill_the_disk() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))


@pytest.mark.parametrize(
    ("patch", "code", "text"),
    [
        (nan_on_one_rank, "finite.not_finite", "the loss became NaN or inf"),
        (infinite_weight, "finite.not_finite", "weight"),
        (
            fill_the_disk,
            "files.failure",
            "out/last.pt: cannot be written (File too large)",
        ),
    ],
)
def test_what_is_not_saved(project, data, trained, tmp_path, patch, code, text):
    """Losses and weights that are no numbers, a full disk: the checkpoint is from before."""
    out = shutil.copytree(trained, tmp_path / "out")
    before = digest(out)
    done = project.train(data, out, "--epochs", 2, "--save-every", 2, patch=patch)
    done.refused(code, text)
    assert digest(out) == before
    assert not list(out.glob("*.part"))


@pytest.mark.parametrize(
    ("rank", "act", "state", "hint"),
    [
        (0, distributed.barrier, r"in collective \d+, barrier", explaining.NOT_ALL),
        (1, hang, r"after collective \d+, all_reduce \(", explaining.LATE),
    ],
)
def test_ranks_that_wait(project, data, tmp_path, rank, act, state, hint):
    """One block: where each group of ranks is, with its stack, and what that usually means."""
    text = (project.folder / "main.py").read_text()
    line = text[: text.index("run.steps(train_loader, ddp_model)")].count("\n") + 1

    def patch() -> None:
        process.project = lambda: project.folder
        after_step(3, act, rank)()

    done = project.train(data, tmp_path, "--dist-timeout", 3, on=3, patch=patch)
    assert 0 not in done.statuses
    assert 1 in done.statuses
    assert not done.left
    err = done.err
    others = ", ".join(str(each) for each in range(3) if each != rank)
    assert err.count("no progress for 1.5 s:\n") == 1
    at = rf"^rank {rank}, epoch 1, step 3, at main.py:{line}: {state}"
    assert re.search(at, err, re.M), err
    at = rf"^ranks {others}, epoch 1, step [34], at (?:main|ddp).py:\d+: in collective "
    at += r"\d+, all_reduce \("
    stacks = err[re.search(at, err, re.M).end() :].split("\nrank ")[0]
    assert "in train_one_epoch" in stacks
    assert err.count(hint) == 1
    last = r"^error: rank \d timed out after 3 s \(--dist-timeout\)"
    assert re.search(last, err, re.M)
    assert "Fatal Python error" not in err


def test_a_question_and_two_interrupts(project, data, tmp_path):
    """A person who asks is answered and the run goes on; a second Ctrl-C ends all at once."""
    held = tmp_path / "held"
    free = tmp_path / "free"
    hung = tmp_path / "hung"
    question = tmp_path / ".where"

    def hold() -> None:
        held.touch()
        wait_for(free.exists)

    def hang_there() -> None:
        hung.touch()
        hang()

    def patch() -> None:
        process.project = lambda: project.folder
        after_step(3, hold, 1)()
        after_step(4, hang_there, 1)()

    def is_answered() -> bool:
        err = started.said()[1]
        answers = err.count("\nrank 1, ")
        return not question.exists() and answers == err.count("as requested:")

    started = project.start(project.flags(data, tmp_path), patch=patch)
    wait_for(held.exists)
    # rank 0 may still be on its way there
    while "in collective" not in started.said()[1]:
        question.touch()
        wait_for(is_answered)
    free.touch()
    wait_for(hung.exists)
    began = time.monotonic()
    started.kill(signal.SIGINT)
    wait_for(lambda: "stop requested" in started.said()[0])
    # what comes sooner counts as the same Ctrl-C
    time.sleep(protocol.DUPLICATE_SECONDS)
    started.kill(signal.SIGINT)
    done = started.end()
    assert done.statuses == [130, 130]
    assert time.monotonic() - began < protocol.ANSWER_SECONDS
    assert done.err.startswith("where all ranks are, as requested:\n")
    assert re.search(r"^rank 0, .*: in collective \d+, all_reduce", done.err, re.M)
    assert "\nrank 1, epoch 1, step 3, at " in done.err
    assert "usually" not in done.err


def test_values_that_two_ranks_may_have() -> None:
    """What differs is named, of any kind of object; what is the same but for addresses is not."""

    def differs(*both: object) -> list[str]:
        sums = []
        for value in both:
            parts = values.divide(value, "it")
            sums.append({name: values.compared(part) for name, part in parts.items()})
        return [name for name in sums[0] if sums[0][name] != sums[1].get(name)]

    def descent(rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.ones(2, requires_grad=True)], rate)

    assert not differs(descent(0.1), descent(0.1))
    assert differs(descent(0.1), descent(0.5)) == ["param_groups"]
    for one, other in (Path("a"), Path("b")), ({1}, {2}), (None, False), (b"a", b"b"):
        assert differs(one, other) == ["it"]
        assert not differs(one, copy.copy(one))
    assert not differs(object(), object())
    assert differs(torch.device("cpu"), torch.device("cuda:1")) == ["it"]
    said = values.describe(torch.tensor([math.nan, 1, math.inf]))
    assert said == "(3,) float32 cpu, 2 NaN or inf, mean 1, norm 1, 1 to 1"
    assert values.describe(torch.full((2,), math.nan)).endswith("cpu, 2 NaN or inf")
    rows = explaining.on_all_ranks(torch.ones(2))  # type: ignore[arg-type]
    assert str(rows) == 'error: put the expression in quotes: on_all_ranks("loss")'


def test_a_value_of_every_rank(project, data, tmp_path):
    """One rank asks, one runs, one has died: a row each, without a collective."""

    def ask() -> None:
        time.sleep(1)  # for the others to be there
        print(explaining.on_all_ranks("[step, 'x']"))

    def patch() -> None:
        process.project = lambda: project.folder
        explaining.ANSWER_SECONDS = 1.5
        after_step(3, ask, 0)()
        after_step(3, hang, 1)()
        after_step(3, die, 2)()

    started = project.start(project.flags(data, tmp_path), on=3, patch=patch)
    wait_for(lambda: "\nrank 2: " in started.said()[0])
    started.kill(signal.SIGKILL, 0, 1)  # which no launcher ends
    done = started.end()
    assert not done.left
    assert re.search(r"^rank 0: \[3, 'x'\]; epoch 1, ", done.out, re.M), done.out
    assert re.search(
        r"^rank 1: epoch 1, step \d, at main.py:\d+: after", done.out, re.M
    )
    assert re.search(r"^rank 2: has ended \(process \d+\)$", done.out, re.M)


@pytest.mark.parametrize("is_held", [False, True])
def test_a_rank_that_does_not_answer(project, data, tmp_path, is_held):
    """Held by SIGSTOP, of which the launcher does not know: it is named, and waited for."""

    def patch() -> None:
        stopping.ANSWER_SECONDS = 1
        protocol.GRACE_SECONDS = 4
        after_step(3, functools.partial(send, signal.SIGSTOP), 1)()

    started = project.start(project.flags(data, tmp_path), patch=patch)
    wait_for(lambda: process.state(started.pids[1]) == "T")
    started.kill(signal.SIGTERM, 0)
    wait_for(lambda: "for an answer" in started.said()[1])
    if is_held:
        wait_for(lambda: "error: " in started.said()[1])
    started.kill(signal.SIGKILL if is_held else signal.SIGCONT, 1)
    done = started.end()
    who = rf"rank 1 is held by SIGSTOP \(process {started.pids[1]}\)"
    assert re.match(f"waiting up to 4 s for an answer: {who}\n", done.err)
    if is_held:
        assert done.statuses[0] == 143
        last = done.err.splitlines()[-1]
        assert re.match(f"error: not saved: no answer for 4 s: {who}", last)
    else:
        assert done.statuses == [75, 75]
        assert "SIGTERM: stopped and saved at epoch 1" in done.out


def test_a_signal_after_training(project, few, tmp_path):
    """All is saved: it ends as without the signal."""

    def patch() -> None:
        Reporter.print_results = lambda *_: terminate()

    done = project.train(few, tmp_path, patch=patch)
    assert done.err == ""
    assert done.statuses == [0, 0]
    assert done.left == []


def test_a_folder_that_goes_away(project, few, tmp_path):
    """The output folder is removed: one line names the file."""
    out = tmp_path / "out"
    gone = after_step(2, lambda: shutil.rmtree(out), 1)
    done = project.train(few, out, "--save-every", 3, patch=gone)
    done.refused("files.failure", "out/last.pt", "No such file")
    assert not out.exists()


def abort() -> None:
    faulthandler.disable()  # its stack is not what this is about
    os.abort()


def bug_while_others_hang() -> None:
    """As with nccl, where a collective does not raise when a rank has gone."""
    after_step(3, hang, 0)()
    after_step(3, bug, 1)()


LOST = r"error: rank 0 lost another rank: rank 1 has ended \(process \d+\)"
LEAVE = {
    "exits": (after_step(3, lambda: os._exit(0), 1), [1, 0], LOST),
    "aborts": (after_step(3, abort, 1), [1, -signal.SIGABRT], LOST),  # as C++ does
    "raises": (bug_while_others_hang, [1, 1], "ValueError: a bug"),
}


@pytest.mark.parametrize("how", LEAVE)
def test_ranks_that_leave(project, data, tmp_path, how):
    """One that raises tells of it, alone; one that just ends takes all along."""
    patch, statuses, last = LEAVE[how]

    done = project.train(data, tmp_path, patch=patch)
    lines = done.err.splitlines()
    assert done.statuses == statuses
    assert done.left == []
    assert re.fullmatch(last, lines[-1]), done.err
    assert done.err.count("Traceback") == (len(lines) > 1)


def at(path: str, act: Callable[[], object]) -> Callable[[], None]:
    """A patch: a worker that opens `path` calls `act`."""

    def patch() -> None:
        read = folders.open_image

        def patched(name: str, format: Format) -> object:
            if name.endswith(path):
                act()
            return read(name, format)

        folders.open_image = patched

    return patch


SAMPLES = {
    "raises": (
        at("train/dots/0002.jpg", bug),
        "while reading sample .*train/dots/0002.jpg",
    ),
    "dies": (
        at("train/dots/0002.jpg", die),
        "error: loader worker .*train/dots/0002.jpg has ended with SIGKILL: out of memory?",
    ),
    "hangs": (
        at("val/dots/0002.jpg", hang),
        "error: .*val/dots/0002.jpg.*timed out after",
    ),
}


@pytest.mark.parametrize("how", SAMPLES)
def test_samples_that_break_their_worker(project, data, tmp_path, how):
    """It raises, dies or hangs: the image is named, once."""
    patch, line = SAMPLES[how]
    flags = project.flags(data, tmp_path, "--save-every", 1, "--dist-timeout", 4)
    done = project.run(flags, "--workers", 1, patch=patch)
    assert done.statuses == [1, 1]
    assert done.left == []
    assert len(re.findall(line, done.err)) == 1, done.err
    assert ("ValueError: a bug" in done.err) == (how == "raises")


def test_a_worker_that_starts_as_its_rank_dies(project, few, tmp_path):
    """It ends, too: torch looks only whether the parent that it has then is still the same."""
    start = children.start_worker

    def dying(number: int) -> None:
        rank = os.getppid()
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: os.getppid() != rank)
        start(number)

    def patch() -> None:
        children.start_worker = dying

    done = project.train(few, tmp_path, "--workers", 1, on=1, patch=patch)
    assert done.status == -9
    assert done.left == []


def ask_in_evaluation() -> None:
    means = Run.means
    collate = Collate.__call__

    def slow(self: Collate, samples: list) -> object:
        if len(samples[0]) > 2:  # with indices: for evaluation
            time.sleep(0.5)
        return collate(self, samples)

    def asked(self: Run) -> object:
        send(signal.SIGUSR1, 1)
        return means(self)

    Run.means = asked
    Collate.__call__ = slow


def ask_in_a_save() -> None:
    add = RunFolder.add

    def asked(*args: object, **more: object) -> None:
        send(signal.SIGUSR1, 0)
        add(*args, **more)

    RunFolder.add = asked


def test_stopped_and_killed_at_awkward_moments(project, few, tmp_path):
    """In evaluation, in a save; and then one of two nodes that share no disk has the checkpoint."""

    def train(out: Path, *more: object, patch: Patch | None = None) -> Done:
        return project.train(few, out, "--epochs", 3, NET, more, patch=patch)

    def train_often(patch: Patch) -> Done:
        return train(tmp_path / "node1", "--save-every", 3, patch=patch)

    train(tmp_path / "whole").ok()
    done = train_often(ask_in_evaluation)
    assert done.statuses == [75, 75]
    assert "SIGUSR1: stopped and saved at epoch 1, step 3;" in done.out
    done = train_often(ask_in_a_save)
    assert "0 of 3 epochs done and 3 steps of the next" in done.out
    assert done.statuses == [75, 75]
    assert "SIGUSR1: stopped and saved at epoch" in done.out
    assert train_often(after_step(8, die)).statuses == [-9, -9]

    def node() -> None:
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        sys.argv += ["--output-dir", f"{tmp_path}/node{os.environ['RANK']}"]

    done = train(tmp_path, patch=node).ok()
    assert "node1/last.pt: 2 of 3 epochs done" in done.out
    assert digest(tmp_path / "whole") == digest(tmp_path / "node0")
    assert [row["epoch"] for row in rows(tmp_path / "node0")] == ["1", "2", "3"]
