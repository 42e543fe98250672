"""Launched runs that are stopped or killed: what is left, and what the next start makes of it.

The signals are real, at moments that a printed seed decides.
"""

import contextlib
import os
import random
import re
import shutil
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
    planted,
    processes,
    rows,
    start,
    wait_for,
)

pytestmark = SAME_FOR_BOTH

EPOCHS = 20
SLOW = """
import os, pathlib, time
pathlib.Path(__file__).with_name("stepped").touch()
if rank == 1 and run.step == 2 and (hangs := os.environ.get("HANGS")):
    open(hangs, "w").close()
    time.sleep(600)
time.sleep(0.1)  # or the chain would come to its end too soon
"""


class Chain:
    """One run that is stopped and started again, until it has come to its end."""

    def __init__(self, project: Project, words: list, out: Path, chance: random.Random) -> None:
        self.out = out
        self.changed = out / "last.pt", project.folder / "stepped"
        self.chance = chance
        self.command = [project.folder / "launch.sh", *words, "--save-every", 4]
        self.command += ["--output-dir", out]

    def start(self, *more: object, before: tuple = (), **env: str) -> None:
        self.mark = uuid.uuid4().hex
        self.process = start([*before, *self.command, *more], self.mark, **env)
        self.wait_for_training()

    def wait_for_training(self, but: set[int] = frozenset()) -> None:
        """Wait until all ranks, none of `but`, have saved and taken a step; then a random while."""
        wait_for(lambda: len(pids := self.pids()) == 2 and not but & {*pids}, self.process)
        began = time.time()

        def is_new(path: Path) -> bool:
            return path.exists() and path.stat().st_mtime > began

        wait_for(lambda: all(map(is_new, self.changed)), self.process)
        time.sleep(self.chance.uniform(0, 0.5))

    def ranks(self) -> dict[int, int]:
        """The ranks' process ids."""
        return {rank: pid for pid, rank in processes(self.mark)}

    def pids(self) -> list[int]:
        return list(self.ranks().values())

    def kill(self, pid: int, signum: int) -> None:
        """Send a rank what makes the launcher start all again; wait for that."""
        before = set(self.pids())
        os.kill(pid, signum)
        self.wait_for_training(but=before)

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
    words = flags(data, whole, *NET, "--epochs", EPOCHS)
    project.fork(*words, draws=False).ok()
    slow = planted(project, tmp_path / "slow", SLOW)
    run = Chain(slow, words, shutil.copytree(whole, tmp_path / "run"), chance)

    def to_launcher(signum: int) -> None:
        run.process.send_signal(signum)

    def to_one_rank(signum: int) -> None:
        os.kill(chance.choice(run.pids()), signum)

    def to_all(signum: int) -> None:  # as a terminal or SLURM does, loader workers included
        for pid in marked(run.mark):
            os.kill(pid, signum)

    # --resume never holds for the launch, not for what MAX_RESTARTS starts again. When no restart
    # is left, the last line names the rank, the status the signal. The terminal of nohup closes.
    run.start("--resume", "never", before=("nohup",), MAX_RESTARTS="1")
    for _ in range(2):
        to_launcher(signal.SIGHUP)
        time.sleep(0.5)
    assert run.process.poll() is None
    run.kill(run.ranks()[0], signal.SIGKILL)
    os.kill(run.ranks()[1], signal.SIGSEGV)
    done = run.end()
    assert done.status == 128 + signal.SIGSEGV
    assert done.out.count("--resume never: removing") == 1
    assert done.out.count(f"of {EPOCHS} epochs done") == 1
    assert re.findall(r"was ended by (\w+)", done.err) == ["SIGKILL", "SIGSEGV"]
    assert "MAX_RESTARTS is 0 now" in done.err
    assert "Traceback" not in done.err
    last = r"error: rank 1 \(process \d+\) was ended by SIGSEGV"
    assert re.fullmatch(last, done.err.splitlines()[-1])

    # Signals, and the seconds between them. However many come: batch systems repeat them. Before
    # the second ones SIGSTOP holds a rank and its store; a signal to the launcher lets it go on.
    stops = [
        (to_launcher, ["USR1", *4 * [0.4, "TERM"]]),
        (to_launcher, ["INT", 0.05, "USR1", 0.05, "HUP", 1.2, "TERM"]),
        (to_one_rank, ["USR1"]),
        (to_all, ["INT", 0.7, "TERM"]),
        (to_all, ["TERM", 0.05, "INT", 0.05, "HUP"]),
    ]
    for number, (send, signals) in enumerate(stops):
        run.start()
        if number == 1:
            os.kill(run.ranks()[0], signal.SIGSTOP)
            time.sleep(1)
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
        assert done.err == ""
        assert time.monotonic() - began < 30

    run.start()
    to_launcher(signal.SIGKILL)
    done = run.end()
    assert "stopped and saved at epoch" in done.out
    assert done.err == ""

    run.start()
    to_all(signal.SIGKILL)
    run.end()

    # The ranks tell where one that is held has stopped; torchrun gives it up after 30 seconds.
    run.start("--dist-timeout", 8, MAX_RESTARTS="2")
    run.kill(run.ranks()[0], signal.SIGSTOP)
    run.kill(chance.choice(run.pids()), signal.SIGABRT)
    # After the last epoch all is saved: a signal leaves nothing to be done again.
    table = run.out / "metrics.csv"
    wait_for(lambda: table.exists() and len(rows(run.out)) == EPOCHS, run.process)
    to_launcher(signal.SIGTERM)
    done = run.end()
    assert done.status == 0, done.err
    assert "done: best" in done.out
    assert "no progress for 4 s:\nrank 0 is held by SIGSTOP (process " in done.err
    last = "error: rank 1 timed out after 8 s (--dist-timeout) waiting for another rank\n"
    assert f"{last}restarting; MAX_RESTARTS is 1 now\n" in done.err
    assert re.findall(r"was ended by (\w+)", done.err) == ["SIGABRT"]
    assert "MAX_RESTARTS is 0 now" in done.err
    assert "Traceback" not in done.err

    assert digest(whole) == digest(run.out)


def test_a_launcher_gives_up(project: Project) -> None:
    """Of ranks that do not end it says so, and kills them; here of one that ignores signals."""
    done = project.alone(script=SCRIPTS / "deaf_ranks.py").ok()
    assert done.err == "error: the ranks had not ended 1 s after SIGTERM and were killed\n"


def test_a_second_interrupt(project: Project, data: Path, tmp_path: Path) -> None:
    """Of the launcher, while a rank hangs outside any collective: all end at once."""
    slow = planted(project, tmp_path / "slow", SLOW)
    mark, hangs = uuid.uuid4().hex, str(tmp_path / "hangs")
    process = start([slow.folder / "launch.sh", *flags(data, tmp_path / "out")], mark, HANGS=hangs)
    wait_for(Path(hangs).exists, process)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    done = finish(process, mark)
    assert done.status == 128 + signal.SIGINT
    assert not done.left
    assert not done.err
    assert time.monotonic() - began < 8  # before the ranks give up waiting for answers


def test_a_torchrun_that_is_killed(project: Project, data: Path, tmp_path: Path) -> None:
    """On one node its ranks save: their store is a file in its folder, not its own."""
    slow, out, mark = planted(project, tmp_path / "slow", SLOW), tmp_path / "out", uuid.uuid4().hex
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    process = start([sys.executable, *launcher, slow.folder / "main.py", *flags(data, out)], mark)
    wait_for((slow.folder / "stepped").exists, process)
    process.kill()
    done = finish(process, mark)
    assert "stopped and saved at epoch 1, step " in done.out
    assert (out / "last.pt").exists() and not done.left


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
