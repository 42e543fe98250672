"""Launched runs that are stopped or killed: what is left, and what the next start makes of it."""

import contextlib
import itertools
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from digest import digest
from generated import NET, Command, Done, Project, children, rows, wait_for
from launcher import Launch
from ranks import draw_nothing, fork, on_ranks, said, wait

from ddpkit import launch
from ddpkit.ranks import protocol, stopping
from ddpkit.ranks.environment import Nodes
from ddpkit.run.loop import Run
from ddpkit.run.resuming import Checkpoints

EPOCHS = 5
SLOW = """
import pathlib, time
pathlib.Path(__file__).with_name("stepped").touch()
time.sleep(0.1)
"""


class Chain:
    """One run that is stopped and started again, until it has come to its end."""

    def __init__(
        self,
        project: Project,
        words: list,
        out: Path,
        chance: random.Random,
    ) -> None:
        self.folder = project.folder
        self.out = out
        self.chance = chance
        self.stepped = out.with_name("stepped")
        self.words = list(words)
        self.words += ["--save-every", 2, "--output-dir", out]
        self.short = tempfile.TemporaryDirectory()  # a path in which sockets have room
        self.tmp = Path(self.short.name)
        self.numbers = itertools.count()

    def start(self, *more: object, **how: Any) -> None:
        """Start a launcher, in forks: launching itself is what is the same."""
        output = self.out.with_name(f"start {next(self.numbers)}")
        how |= {"NPROC": "2", "TMPDIR": str(self.tmp)}
        words = self.words + list(more)
        self.run = Launch(self.folder, words, output, self.slow, **how)
        self.wait_for_training()

    def slow(self) -> None:
        """A patch: each step takes a while, or the chain would come to its end too soon."""
        draw_nothing()
        end_step = Run.end_step

        def patched(run: Run, *numbers: Any) -> None:
            self.stepped.touch()
            time.sleep(0.4)
            end_step(run, *numbers)

        Run.end_step = patched

    def wait_for_training(self, but: Collection[int] = ()) -> None:
        """Wait until all ranks, none of `but`, have saved and taken a step; then a random while."""

        def are_there() -> bool:
            pids = set(self.run.ranks())
            return len(pids) == 2 and pids.isdisjoint(but)

        wait_for(are_there)
        began = time.time()

        def is_new(path: Path) -> bool:
            return path.exists() and path.stat().st_mtime > began

        wait_for(lambda: is_new(self.out / "last.pt") and is_new(self.stepped))
        time.sleep(self.chance.uniform(0, 0.5))

    def end(self) -> Done:
        done = self.run.end(120)
        assert not done.left
        assert not list(self.tmp.iterdir())
        return done


@pytest.mark.soak
def test_stopped_and_killed_again_and_again(project, data, tmp_path, chance):
    """Its end is that of the run that nobody touched, to the bit."""
    whole = tmp_path / "whole"
    words = project.flags(data, whole, NET, "--epochs", EPOCHS)
    project.run(words).ok()
    run = Chain(project, words, shutil.copytree(whole, tmp_path / "run"), chance)

    def to_launcher(signum: int) -> None:
        run.run.kill(signum)

    # as a terminal or SLURM does, loader workers included
    def to_all(signum: int) -> None:
        for pid in children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    # --resume never holds for the launch, not for what MAX_RESTARTS starts again. When
    # no restart is left, the last line names the rank, the status the signal. The
    # terminal of nohup closes.
    run.start("--resume", "never", ignored=[signal.SIGHUP], MAX_RESTARTS="1")
    to_launcher(signal.SIGHUP)
    killed = run.run.ranks()
    run.run.kill(signal.SIGKILL, 0)
    run.wait_for_training(but=killed)
    run.run.kill(signal.SIGSEGV, 1)
    done = run.end()
    assert done.status == 128 + signal.SIGSEGV
    assert done.out.count("--resume never: removing") == 1
    assert done.out.count(f"of {EPOCHS} epochs done") == 1
    assert re.findall(r"was killed by (\w+)", done.err) == ["SIGKILL", "SIGSEGV"]
    assert "MAX_RESTARTS is now 0" in done.err
    assert "Traceback" not in done.err
    last = r"error: rank 1 \(process \d+\) was killed by SIGSEGV"
    assert re.fullmatch(last, done.err.splitlines()[-1])

    # Signals, and the seconds between them. However many come: batch systems repeat
    # them. Before the first ones SIGSTOP holds a rank and its store; a signal to the
    # launcher lets it go on.
    stops = [
        (to_launcher, ["USR1", 0.05, "INT", 0.05, "HUP", 1.2, "TERM"]),
        (to_all, ["INT", 0.7, "TERM"]),
    ]
    for send, signals in stops:
        run.start()
        if send == to_launcher:
            run.run.kill(signal.SIGSTOP, 0)
            time.sleep(1)
        began = time.monotonic()
        for each in signals:
            if isinstance(each, float):
                time.sleep(each)
            else:
                send(signal.Signals[f"SIG{each}"])
        done = run.end()
        assert (done.status, done.err) == (75, ""), (send, signals, done.out, done.err)
        assert f"SIG{signals[0]}: stopped and saved at epoch" in done.out
        assert time.monotonic() - began < 30

    run.start()
    to_launcher(signal.SIGKILL)
    done = run.end()
    assert "stopped and saved at epoch" in done.out
    assert not done.err

    project.run(words, "--output-dir", run.out).ok()
    assert digest(whole) == digest(run.out)


@pytest.mark.soak
def test_a_torchrun_that_is_killed(project, data, tmp_path):
    """Its ranks save, as on one node their store is a file in its folder; another start goes on."""
    slow = project.planted(tmp_path / "slow", SLOW)
    out = tmp_path / "out"
    flags = project.flags(data, out, "--epochs", 3)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", 2, slow.folder / "main.py"]
    run = Command(command + flags)
    wait_for((slow.folder / "stepped").exists)
    run.kill(signal.SIGKILL)
    done = run.end()
    assert re.match(r"starting 2 rank\(s\) \.\.\.\n(.*\n)+2 rank\(s\) on CPU", done.out)
    assert "stopped and saved at epoch " in done.out
    assert not done.left
    assert f"{out}/last.pt: " in project.run(flags).ok().out
    assert rows(out)[-1]["step"] == "18"


def test_a_signal_before_training(project, data, tmp_path):
    """Nothing is to be saved: it ends at once, with the signal's status."""
    run = project.launch(project.flags(data, tmp_path / "out"))
    wait_for(lambda: len(run.ranks()) == 2)
    run.kill(signal.SIGTERM)
    done = run.end()
    assert done.err == ""
    assert done.status == 128 + signal.SIGTERM
    assert done.left == []


@on_ranks(1, group=False)
def test_a_launcher_gives_up(tmp_path):
    """Of ranks that do not end it says so, and kills them; here of one that ignores signals."""
    lines: list[str] = []
    launch.print_error = lines.append
    protocol.STOP_SECONDS = 1
    running = launch.Ranks(Nodes(1, 0, 1, "127.0.0.1", 0))
    shell = ["sh", "-c", "trap '' TERM; touch ready; while :; do sleep 1; done"]
    deaf = Command(shell, cwd=tmp_path)
    running.running = [deaf.process]
    wait_for((tmp_path / "ready").exists)
    os.kill(os.getpid(), signal.SIGTERM)
    assert running.wait() == 128 + signal.SIGTERM
    assert deaf.process.returncode == -signal.SIGKILL
    assert lines == ["the ranks did not exit within 1 s of SIGTERM and were killed"]


@on_ranks(1, group=False)
def test_how_ranks_have_ended(tmp_path):
    """A signal, or a status that no line of ours explains, is named."""
    lines: list[str] = []
    launch.print_error = lines.append
    for script, status, line in (
        ("exit 3", 3, "exited with status 3"),
        ("exit 2", 2, ""),
        ("exit 1", 1, ""),
        ("exit 0", 0, ""),
        (
            "kill -ABRT $$",
            134,
            "was killed by SIGABRT: if gloo printed an error, ranks ",
        ),
        ("kill -KILL $$", 137, "was killed by SIGKILL: out of memory?"),
    ):
        ended = launch.Ranks(Nodes(1, 0, 1, "127.0.0.1", 0))
        ended.running = [Command(["sh", "-c", script]).process]
        assert ended.wait() == status
        said = f"rank 0 (process {ended.running[0].pid}) {line}"
        assert [each[: len(said)] for each in lines] == ([said] if line else [])
        lines.clear()
    ended = launch.Ranks(Nodes(2, 1, 2, "127.0.0.1", 0))  # the second of two nodes
    for script in "exit 0", "kill -KILL $$":
        ended.running.append(Command(["sh", "-c", script]).process)
    assert ended.wait() == 137
    assert lines[0].startswith(f"rank 3 (process {ended.running[1].pid}) on ")


FAILS = """
import signal, sys, time
from pathlib import Path

signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
ready = Path(__file__).with_name("ready")
seconds = 0 if ready.exists() else 60
ready.touch()
time.sleep(seconds)
"""


def test_no_restart_after_a_signal(tmp_path):
    """Not even of a rank that fails at what it does then."""
    script = tmp_path / "script.py"
    script.write_text(FAILS)

    def act() -> None:
        os.environ.update(NPROC="1", MAX_RESTARTS="1")
        sys.argv = ["launch"]
        sys.exit(launch.main([str(script)]))

    launcher = fork(act, tmp_path / "said")
    wait_for((tmp_path / "ready").exists)
    os.kill(launcher, signal.SIGTERM)
    assert wait([launcher]) == [3]
    assert "restarting" not in said(tmp_path / "said")[1]


@on_ranks(1, group=False)
def test_an_interrupt_in_a_notebook(tmp_path):
    """It is saved, and an exception of the cell: the next one goes on."""
    vars(sys.modules["__main__"]).pop("__file__", None)
    handler = signal.getsignal(signal.SIGINT)
    network = torch.nn.Linear(1, 1)
    turns = []

    def train(interrupted: int) -> None:
        checkpoints = Checkpoints(tmp_path, network=network)
        for epoch in checkpoints.epochs(3):
            for batch in checkpoints.steps(range(4)):
                turns.append((epoch, batch))
                if len(turns) == interrupted:
                    signal.raise_signal(signal.SIGINT)
                    wait_for(lambda: stopping._stopper.answered)
                elif len(turns) == 3:  # of the next cell, which is not to stop
                    time.sleep(2 * protocol.POLL_SECONDS)

    for count in 2, 6:
        with pytest.raises(KeyboardInterrupt):
            train(count)
        assert len(turns) == count
        assert signal.getsignal(signal.SIGINT) is handler
    train(0)
    assert turns == list(itertools.product(range(3), range(4)))
