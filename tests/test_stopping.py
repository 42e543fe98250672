"""Launched runs that are stopped or killed: what is left, and what the next start makes of it.

The signals are real, at moments that a printed seed decides.
"""

import contextlib
import os
import random
import re
import signal
import sys
import time
import uuid
from pathlib import Path

from digest import digest
from running import (
    NET,
    SAME_FOR_BOTH,
    SCRIPTS,
    Done,
    Project,
    finish,
    flags,
    marked,
    processes,
    rows,
    run,
    start,
    wait_for,
    with_bug,
)

pytestmark = SAME_FOR_BOTH

EPOCHS = 30


class Chain:
    """One run that is stopped and started again, until it has come to its end."""

    def __init__(self, project: Project, data: Path, out: Path, chance: random.Random) -> None:
        self.out = out
        self.chance = chance
        self.command = [project.folder / "launch.sh", *flags(data, out, *NET)]
        self.command += ["--epochs", EPOCHS, "--save-every", 4]

    def start(self, *before: str, **env: str) -> None:
        self.mark = uuid.uuid4().hex
        self.process = start([*before, *self.command], self.mark, **env)
        self.wait_for_training()

    def wait_for_training(self, but: set[int] = frozenset()) -> None:
        """Wait until all ranks, none of them of `but`, have saved once; then for a random while."""
        wait_for(lambda: len(self.ranks().keys()) == 2 and not but & {*self.pids()}, self.process)
        began = time.time()
        last = self.out / "last.pt"
        wait_for(lambda: last.exists() and last.stat().st_mtime > began, self.process)
        time.sleep(self.chance.uniform(0, 0.5))

    def ranks(self) -> dict[int, int]:
        """The ranks' process ids."""
        return {rank: pid for pid, rank in processes(self.mark)}

    def pids(self) -> list[int]:
        return list(self.ranks().values())

    def end(self) -> Done:
        done = finish(self.process, self.mark, timeout=120)
        assert not done.left
        return done


def test_stopped_and_killed_again_and_again(project: Project, data: Path, tmp_path: Path) -> None:
    """Its end is that of the run that nobody touched, to the bit."""
    seed = int(os.environ.get("TEST_SEED", time.time_ns() % 10**6))
    print(f"TEST_SEED={seed}")
    chance = random.Random(seed)
    whole = tmp_path / "whole"
    project.fork(*flags(data, whole, *NET), "--epochs", EPOCHS, draws=False).ok()
    run = Chain(project, data, tmp_path / "run", chance)

    def to_launcher(signum: int) -> None:
        run.process.send_signal(signum)

    def to_one_rank(signum: int) -> None:
        os.kill(chance.choice(run.pids()), signum)

    def to_all(signum: int) -> None:  # as a terminal or SLURM does, loader workers included
        for pid in marked(run.mark):
            os.kill(pid, signum)

    # Signals, and the seconds between them. However many come: batch systems repeat them. The first
    # run is started by nohup, and its terminal closes before.
    stops = [
        (to_launcher, ["USR1", *4 * [0.4, "TERM"]]),
        (to_launcher, ["INT", 0.05, "USR1", 0.05, "HUP", 1.2, "TERM"]),
        (to_one_rank, ["USR1"]),
        (to_all, ["INT", 0.7, "TERM"]),
        (to_all, ["TERM", 0.05, "INT", 0.05, "HUP"]),
    ]
    for number, (send, signals) in enumerate(stops):
        if number:
            run.start()
        else:
            run.start("nohup")
            for _ in range(2):
                run.process.send_signal(signal.SIGHUP)
                time.sleep(0.5)
            assert run.process.poll() is None
        began = time.monotonic()
        for each in signals:
            if isinstance(each, float):
                time.sleep(each)
            else:
                with contextlib.suppress(ProcessLookupError):
                    send(signal.Signals[f"SIG{each}"])
        done = run.end()
        assert done.status == 75, (send.__name__, signals, done.out, done.err)
        assert f"SIG{signals[0]}: stopped and saved at epoch" in done.out
        assert done.err.removeprefix("nohup: ignoring input\n") == ""
        assert time.monotonic() - began < 30

    run.start()
    to_launcher(signal.SIGKILL)
    assert "stopped and saved at epoch" in run.end().out

    run.start()
    to_all(signal.SIGKILL)
    run.end()

    run.start(MAX_RESTARTS="2")
    names = []
    for signum in (signal.SIGKILL, signal.SIGABRT):
        before = set(run.pids())
        to_one_rank(signum)
        names.append(signum.name)
        run.wait_for_training(but=before)
    done = run.end()
    assert done.status == 0, done.err
    assert "done: best" in done.out
    told = re.findall(r"was ended by (\w+)", done.err)
    assert told == names
    assert "MAX_RESTARTS is 0 now" in done.err

    assert digest(whole) == digest(run.out)


def test_a_launcher_gives_up(project: Project) -> None:
    """Of ranks that do not end it says so, and kills them; here of one that ignores signals."""
    done = run([sys.executable, SCRIPTS / "deaf_ranks.py"], cwd=project.folder).ok()
    assert done.err == "error: the ranks had not ended 1 s after SIGTERM and were killed\n"


def test_a_rank_dies_for_good(project: Project, data: Path, tmp_path: Path) -> None:
    """No restarts: the launcher's last line names the rank, its status the signal."""
    run = Chain(project, data, tmp_path / "run", random.Random(1))
    run.start()
    os.kill(run.ranks()[1], signal.SIGSEGV)
    done = run.end()
    assert done.status == 128 + signal.SIGSEGV
    assert "Traceback" not in done.err
    last = done.err.splitlines()[-1]
    assert last.startswith("error: rank 1 (process ")
    assert last.endswith(") was ended by SIGSEGV")


def test_never_to_resume_but_after_a_failure(project: Project, data: Path, tmp_path: Path) -> None:
    """--resume never counts for the launch, not for what MAX_RESTARTS starts again."""
    run = Chain(project, data, tmp_path / "run", random.Random(2))
    run.command += ["--resume", "never", "--epochs", 8]
    table = tmp_path / "run" / "metrics.csv"
    project.fork(*flags(data, run.out, *NET), draws=False).ok()
    run.start(MAX_RESTARTS="1")
    before = set(run.pids())
    os.kill(run.ranks()[0], signal.SIGKILL)
    run.wait_for_training(but=before)
    # Its last epoch is over when it gets a signal: all is saved, nothing is to be done again.
    wait_for(lambda: table.exists() and len(rows(table.parent)) == 8, run.process)
    run.process.send_signal(signal.SIGTERM)
    done = run.end()
    assert (done.status, "Traceback" in done.err) == (0, False)
    assert done.out.count("of 8 epochs done") == 1
    assert done.out.count("--resume never: removing") == 1


def test_a_second_interrupt(project: Project, data: Path, tmp_path: Path) -> None:
    """Of the launcher, while a rank hangs outside any collective: all end at once."""
    line = "            scaler.step(optimizer)\n"
    bug = "            if i == 2 and rank == 1:\n                __import__('time').sleep(600)\n"
    broken = with_bug(project, tmp_path / "broken", line, bug + line)
    mark = uuid.uuid4().hex
    process = start([broken, *flags(data, tmp_path / "out")], mark)
    wait_for((tmp_path / "out" / "args.json").exists, process)
    time.sleep(3)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    done = finish(process, mark)
    assert done.status == 128 + signal.SIGINT
    assert not done.left
    assert not done.err
    assert time.monotonic() - began < 8  # before the ranks give up waiting for answers


def test_a_signal_before_training(project: Project, data: Path, tmp_path: Path) -> None:
    """Nothing is to be saved: it ends at once, with the signal's status."""
    mark = uuid.uuid4().hex
    process = start([project.folder / "launch.sh", *flags(data, tmp_path / "out")], mark)
    wait_for(lambda: len(processes(mark)) == 2, process)
    process.send_signal(signal.SIGTERM)
    done = finish(process, mark)
    assert done.status == 128 + signal.SIGTERM
    assert not done.left
    assert not done.err


def test_a_rank_is_held(project: Project, data: Path, tmp_path: Path) -> None:
    """By SIGSTOP: the other tells where it waited; torchrun takes 30 seconds to give it up.

    A signal to the launcher lets it go on, to be saved.
    """
    run = Chain(project, data, tmp_path / "run", random.Random(3))
    run.start()
    os.kill(run.ranks()[0], signal.SIGSTOP)  # which holds the store
    time.sleep(1)
    run.process.send_signal(signal.SIGTERM)
    done = run.end()
    assert (done.status, done.err) == (75, "")
    run.command += ["--dist-timeout", 5]
    run.start()
    os.kill(run.ranks()[1], signal.SIGSTOP)
    began = time.monotonic()
    done = run.end()
    assert done.status == 1
    assert 5 < time.monotonic() - began < 60
    assert "no progress for 2.5 s:\nrank 1 is held by SIGSTOP (process " in done.err
    last = "error: rank 0 timed out after 5 s (--dist-timeout) waiting for another rank"
    assert done.err.splitlines()[-1] == last


def test_a_mistake_is_not_repeated(project: Project, own_data: Path, tmp_path: Path) -> None:
    sorted(own_data.glob("train/*/*"))[0].write_bytes(b"")
    done = project.launch(*flags(own_data, tmp_path / "out"), MAX_RESTARTS="3")
    done.refused("train/", "cannot be read")
    assert done.status == 2
