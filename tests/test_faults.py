"""Runs that are killed, stopped or hung: what is left, and what the next start makes of it.

The launcher's runs take real signals at moments that a printed seed decides; the others, whose
fault has to strike at one place in the code, are forks that are made to fail just there.
"""

import contextlib
import json
import os
import random
import re
import signal
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Done, Project, finish, marked, processes, rows, run, start
from test_runs import SAME_FOR_BOTH, flags, wait_for, with_bug

pytestmark = SAME_FOR_BOTH

# With BatchNorm, dropout, loader workers and a schedule: whatever can go astray.
NET = ["--arch", "mobilenet_v3_small", "--image-size", 32, "--workers", 1, "--batch-size", 4]
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
    project.fork(*flags(data, whole, *NET), "--epochs", EPOCHS).ok()
    run = Chain(project, data, tmp_path / "run", chance)

    def to_launcher(signum: int) -> None:
        run.process.send_signal(signum)

    def to_one_rank(signum: int) -> None:
        os.kill(chance.choice(run.pids()), signum)

    def to_all(signum: int) -> None:  # as a terminal or SLURM does, loader workers included
        for pid in marked(run.mark):
            os.kill(pid, signum)

    # Signals, and the seconds between them. However many come: batch systems repeat them.
    stops = [
        (to_launcher, ["TERM", *4 * [0.4, "TERM"]]),
        (to_launcher, ["USR1", 0.05, "INT", 0.05, "HUP"]),
        (to_launcher, ["INT", 1.2, "TERM"]),
        (to_one_rank, ["USR1"]),
        (to_all, ["INT", 0.7, "TERM"]),
        (to_all, ["TERM", 0.05, "INT", 0.05, "HUP"]),
    ]
    for send, signals in stops:
        run.start()
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
    assert "stopped and saved at epoch" in run.end().out

    run.start()
    to_all(signal.SIGKILL)
    run.end()

    # A terminal that closes: not for nohup.
    run.start("nohup")
    for _ in range(2):
        run.process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
    assert run.process.poll() is None
    to_launcher(signal.SIGTERM)
    assert run.end().status == 75

    run.start(MAX_RESTARTS="3")
    names = []
    for signum in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT):
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

    same = "from forked import *; print(digest(sys.argv[1]), digest(sys.argv[2]))"
    first, second = project.python(same, whole, run.out).split()
    assert first == second


def test_a_launcher_gives_up(project: Project) -> None:
    """Of ranks that do not end it says so, and kills them; here of one that ignores signals."""
    code = """
import os, signal, subprocess, time
from types import SimpleNamespace
from engine.ranks import launcher
launcher.STOP_SECONDS = 1
signals = launcher.Signals()
signals.start_ranks = lambda ranks: None
deaf = subprocess.Popen(["sh", "-c", "trap '' TERM; echo; while :; do sleep 1; done"],
                        start_new_session=True, stdout=subprocess.PIPE)
deaf.stdout.readline()
signals.start(SimpleNamespace(pids=lambda: {0: deaf.pid}))
for _ in range(2):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.4)
assert deaf.poll() is None
assert deaf.wait(10) == -9
assert {signal.SIGTERM, signal.SIGKILL} == signals.sent
"""
    done = run([sys.executable, "-c", code], cwd=project.folder).ok()
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
    for _ in range(2):
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
    run.start()
    run.process.send_signal(signal.SIGTERM)
    assert "the same command without --resume never goes on" in run.end().out


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
    assert "rank 0 has made no progress for 4 s: epoch" in done.err
    last = "error: rank 0 timed out after 5 s (--dist-timeout) waiting for another rank"
    assert done.err.splitlines()[-1] == last


def test_a_mistake_is_not_repeated(project: Project, own_data: Path, tmp_path: Path) -> None:
    sorted(own_data.glob("train/*/*"))[0].write_bytes(b"")
    done = project.launch(*flags(own_data, tmp_path / "out"), MAX_RESTARTS="3")
    done.refused("train/", "cannot be read")
    assert done.status == 2


def test_which_rank_counts(project: Project) -> None:
    """A crash before those that it draws with it; but a mistake before what nccl makes of it."""
    code = """
from types import SimpleNamespace as Fake
from engine.ranks.launcher import root_cause
for statuses in ((2, -6), (1, -6), (1, -15), (1, 2)):
    failures = {i: Fake(exitcode=status, timestamp=i) for i, status in enumerate(statuses)}
    error = Fake(failures=failures, get_first_failure=lambda: (0, failures[0]))
    print(root_cause(error)[1].exitcode)
"""
    assert project.python(code).split() == ["2", "-6", "1", "1"]


# What the scripts below begin with: main.py on two ranks that fail as told.
FAULT = """
from forked import *
data, folder, *words = sys.argv[1:]
base = ["--data", data, *words]

def after_step(step, act, rank=None, before=False):
    '''Have the ranks (or one) call `act` when they have taken `step` steps, once.'''
    def patch():
        from engine.run.progress import Run
        end_step = Run.end_step
        def patched(self):
            is_here = rank in (None, int(os.environ["RANK"]))
            if before and is_here and self.step + 1 == step:
                act()
            end_step(self)
            if not before and is_here and self.step == step:
                act()
        Run.end_step = patched
    return patch

def train(name, *more, ranks=2, **options):
    out = f"{folder}/{name}"
    where = f"{folder}/{name}.said"
    statuses = run(ranks, *base, "--output-dir", out, *more, output=where, **options)
    said = [Path(f"{where}.{end}").read_text() for end in ("out", "err")]
    print(json.dumps([statuses, *said]))
"""


@pytest.fixture
def fault(project: Project, data: Path, tmp_path: Path) -> Callable[..., list[list]]:
    """Run FAULT and `code`; return what each call of `train` came to: statuses, out, err."""

    def fault(code: str) -> list[list]:
        words = [*flags(data, tmp_path)[:-2], *NET]
        words = [str(word) for word in words if word not in ("--data", data)]
        out = project.python(FAULT + code, data, tmp_path, *words)
        return [json.loads(line) for line in out.splitlines()]

    return fault


def one_line(err: str, *words: str) -> None:
    assert len(err.splitlines()) == 1, err
    assert err.startswith("error: ")
    for word in words:
        assert word in err, err


def test_losses_that_are_no_numbers(fault: Callable, tmp_path: Path) -> None:
    """On all ranks, on one, and weights alone: the checkpoint from before is kept."""
    code = """
import torch
train("all", "--epochs", 1)
before = digest(f"{folder}/all")
train("all", "--epochs", 2, "--lr", 1e30, "--optimizer", "adamw")
assert digest(f"{folder}/all") == before
def one_rank():
    import model
    build = model.build_criterion
    def bad(args):
        criterion = build(args)
        def one(outputs, targets):
            loss, count = criterion(outputs, targets)
            return loss * (float("nan") if os.environ["RANK"] == "1" else 1), count
        return one
    model.build_criterion = bad
train("one", "--epochs", 1, patch=one_rank)
def weights():
    from engine.run.progress import Run
    save = Run.save
    def patched(self, is_best=False):
        with torch.no_grad():
            next(self.parts["model"].parameters())[0] = float("inf")
        save(self, is_best)
    Run.save = patched
train("weights", "--epochs", 1, patch=weights)
"""
    good, *bad = fault(code)
    assert good[0] == [0, 0]
    for (statuses, _, err), words in zip(bad, ["loss", "loss", "weight"], strict=True):
        assert 2 in statuses and 0 not in statuses
        one_line(err, "not finite", words, "--lr")
    assert not (tmp_path / "one" / "last.pt").exists()


def test_disks(fault: Callable, tmp_path: Path) -> None:
    """Full, or the folder gone: one line, all ranks end, and what was there stays whole."""
    code = """
import resource, shutil
train("full", "--epochs", 1)
before = {path.name: path.read_bytes() for path in Path(f"{folder}/full").glob("*.pt")}
def full():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
train("full", "--epochs", 2, "--save-every", 2, patch=full)
after = {path.name: path.read_bytes() for path in Path(f"{folder}/full").glob("*.pt")}
assert before == after, (before.keys(), after.keys())
assert not list(Path(f"{folder}/full").glob("*.part"))
gone = after_step(3, lambda: shutil.rmtree(f"{folder}/gone"), rank=1)
train("gone", "--epochs", 2, "--save-every", 4, patch=gone)
"""
    good, full, gone = fault(code)
    assert good[0] == [0, 0]
    assert full[0][0] == gone[0][0] == 2
    assert full[0][1] and gone[0][1]
    one_line(full[2], "full/last.pt", "cannot be written", "disk is full")
    one_line(gone[2], "gone/last.pt", "cannot be written", "does not exist")
    assert not (tmp_path / "gone").exists()


def test_hangs(fault: Callable) -> None:
    """Each rank tells where it is; a second Ctrl-C ends them at once."""
    code = """
hang = after_step(3, lambda: time.sleep(600), rank=1)
train("timeout", "--dist-timeout", 5, patch=hang)
twice = f"{folder}/twice"
pids = start(2, *base, "--output-dir", twice, patch=hang, output=f"{twice}.said")
while not Path(f"{folder}/twice/args.json").exists():
    time.sleep(0.1)
time.sleep(3)
began = time.monotonic()
for pid in pids: os.kill(pid, signal.SIGINT)
time.sleep(2)
for pid in pids: os.kill(pid, signal.SIGINT)
print(json.dumps([wait(pids), time.monotonic() - began]))
"""
    *_, hang, twice = fault(code)
    statuses, _, err = hang
    assert statuses[0] == 1
    assert statuses[1] != 0
    for rank, step, where in ((0, 3, "train_one_epoch"), (1, 3, "in <lambda>")):
        stack = err.split(f"rank {rank} has made no progress for 4 s: epoch 1, step {step}")[1]
        assert where in stack.split("has made no progress")[0]
    assert "error: rank 0 timed out after 5 s (--dist-timeout) waiting for another rank" in err
    assert twice[0] == [130, 130]
    assert twice[1] < 5


def test_output_that_nobody_reads(fault: Callable, tmp_path: Path) -> None:
    """A full pipe holds up rank 0 in a print; a signal lets it go on, to be saved."""
    code = """
reader, writer = os.pipe()
os.set_blocking(writer, False)
for size in (4096, 1):
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(size))
os.set_blocking(writer, True)
def hold():
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    Path(f"{folder}/held").touch()
    print("a line of the owner's")
    sys.stdout.flush()
pids = start(2, *base, "--output-dir", f"{folder}/out", patch=after_step(3, hold, rank=0),
             output=f"{folder}/said")
while not Path(f"{folder}/held").exists():
    time.sleep(0.1)
time.sleep(1)
began = time.monotonic()
for pid in pids: os.kill(pid, signal.SIGTERM)
print(json.dumps([wait(pids, 30), time.monotonic() - began]))
"""
    ((statuses, seconds),) = fault("import contextlib\n" + code)
    assert statuses == [75, 75]
    assert seconds < 15
    assert torch.load(tmp_path / "out/last.pt", weights_only=True)["step"] in (3, 4)


def test_a_rank_that_does_not_answer(fault: Callable) -> None:
    """Held by SIGSTOP, of which the launcher does not know: nothing can be saved."""
    code = """
from engine.ranks import stopping
stopping.ANSWER_SECONDS = 2
stop = after_step(3, lambda: os.kill(os.getpid(), signal.SIGSTOP), rank=1)
pids = start(2, *base, "--output-dir", f"{folder}/out", patch=stop, output=f"{folder}/said")
while not Path(f"/proc/{pids[1]}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T":
    time.sleep(0.1)
began = time.monotonic()
os.kill(pids[0], signal.SIGTERM)
status = wait(pids[:1], 30)
seconds = time.monotonic() - began
os.kill(pids[1], signal.SIGKILL)
wait(pids[1:])
print(json.dumps([status, seconds, Path(f"{folder}/said.err").read_text()]))
"""
    ((status, seconds, err),) = fault(code)
    assert status == [128 + signal.SIGTERM]
    assert seconds < 10
    one_line(err, "timed out after 2 s waiting for rank 1 to answer", "not saved")


def test_signals_after_training(fault: Callable) -> None:
    """All is saved: it ends as if nothing had come, or with 75 if it has more to do than that."""
    code = """
def at_the_end(seconds):
    def patch():
        from engine.run.reporting import Reporter
        def finish(self, *_):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(seconds)
        Reporter.finish = finish
    return patch
train("soon", "--epochs", 1, patch=at_the_end(0))
train("late", "--epochs", 1, patch=at_the_end(60))
"""
    soon, late = fault(code)
    assert (soon[0], soon[2]) == ([0, 0], "")
    assert (late[0], late[2]) == ([75, 75], "")


def test_a_collective_on_one_rank_only(fault: Callable) -> None:
    """gloo aborts: the stack tells where."""
    code = """
import torch
from engine.ranks import distributed
train("one", patch=after_step(3, lambda: distributed.reduce_tensor(torch.ones(7)), rank=0))
"""
    ((statuses, _, err),) = fault(code)
    assert -signal.SIGABRT in statuses
    stack = err[err.index("Fatal Python error: Aborted") :]
    for name in ("reduce_tensor", "train_one_epoch"):
        assert f"in {name}" in stack


def test_ranks_that_leave(fault: Callable) -> None:
    """One that raises tells of it, alone; one that ends as if all were done takes all along."""
    code = """
def bug():
    raise ValueError("a bug")
train("raises", patch=after_step(3, bug, rank=1))
train("leaves", patch=after_step(3, lambda: os._exit(0), rank=1))
def mistake():
    raise UserError("a mistake")
def unnoticed(act):  # as with nccl, where a collective does not raise when a rank has gone
    def patch():
        after_step(3, lambda: time.sleep(600), rank=0)()
        after_step(3, act, rank=1)()
    return patch
train("raises, unnoticed", patch=unnoticed(bug))
train("mistake, unnoticed", patch=unnoticed(mistake))
def mistake_at_rank_0():  # where the store is, which another node reads
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    after_step(3, mistake, rank=0)()
    after_step(3, lambda: time.sleep(600), rank=1)()
train("mistake on another node", patch=mistake_at_rank_0)
"""
    raises, leaves, *unnoticed = fault("from engine.errors import UserError\n" + code)
    for (statuses, _, err), status, last in zip(
        unnoticed,
        (1, 2, 2),
        ("ValueError: a bug", "error: a mistake", "error: a mistake"),
        strict=True,
    ):
        assert statuses == [status] * 2
        assert err.rstrip().splitlines()[-1] == last
    assert raises[0] == [1, 1]
    assert raises[2].count("Traceback") == 1
    assert raises[2].rstrip().endswith("ValueError: a bug")
    assert leaves[0] == [1, 0]
    one_line(leaves[2], "rank 0 lost another rank")


def test_samples_that_break_their_worker(fault: Callable) -> None:
    """It raises, dies or hangs: the picture is named."""
    code = """
import dataset
def at(path, act):
    def patch():
        read = dataset.open_picture
        def patched(name, *args):
            if name.endswith(path):
                act()
            return read(name, *args)
        dataset.open_picture = patched
    return patch
def bug():
    raise ValueError("a bug")
train("raises", patch=at("train/dots/0002.jpg", bug))
train("dies", patch=at("train/dots/0002.jpg", lambda: os.kill(os.getpid(), 9)))
train("hangs", "--dist-timeout", 4, patch=at("val/dots/0002.jpg", lambda: time.sleep(600)))
def in_a_save():
    import multiprocessing
    from engine.run import checkpoint
    write = checkpoint.write
    def patched(*args):
        os.kill(multiprocessing.active_children()[0].pid, 9)
        time.sleep(5)
        write(*args)
    checkpoint.write = patched
    at(".jpg", lambda: time.sleep(0.2))()
train("dies in a save", "--save-every", 1, patch=in_a_save)
"""
    raises, dies, hangs, in_a_save = fault(code)
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
    code = """
from engine.data import loading
from engine.run import checkpoint
whole = ("--epochs", 2, "--save-every", 3)
train("whole", *whole)
def ask(rank):
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGUSR1)
def in_evaluation():
    from engine.run.progress import Run
    mean_loss, collate = Run.mean_loss, loading.collate_by_size
    def slow(samples):
        time.sleep(0.5)
        return collate(samples)
    def patched(self):
        ask(1)
        return mean_loss(self)
    Run.mean_loss, loading.collate_by_size = patched, slow
def in_a_save():
    save = checkpoint.save
    def patched(*args, **more):
        ask(0)
        save(*args, **more)
    checkpoint.save = patched
train("evaluation", *whole, patch=in_evaluation)
train("evaluation", *whole)
train("save", *whole, patch=in_a_save)
train("save", *whole)
print(json.dumps([digest(f"{folder}/{name}") for name in ("whole", "evaluation", "save")]))
"""
    whole, evaluation, rest, save, more, digests = fault(code)
    assert whole[0] == rest[0] == more[0] == [0, 0]
    assert evaluation[0] == save[0] == [75, 75]
    assert "SIGUSR1: stopped and saved at epoch 1, step 6;" in evaluation[1]
    assert "0 of 2 epochs done and 6 steps of the next" in rest[1]
    assert "SIGUSR1: stopped and saved at epoch 1, step" in save[1]
    assert len(set(digests)) == 1


def test_nodes_that_share_no_disk(fault: Callable, tmp_path: Path) -> None:
    """The second node alone has the checkpoint; the first goes on from it all the same."""
    code = """
def node():
    rank = os.environ["RANK"]
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    sys.argv += ["--output-dir", f"{folder}/node{rank}", "--threads", "1"]
train("whole", "--epochs", 2)
killed = after_step(8, lambda: os.kill(os.getpid(), 9))
train("node1", "--epochs", 2, "--save-every", 4, patch=killed)
train("", "--epochs", 2, patch=node)
print(json.dumps([digest(f"{folder}/{name}") for name in ("whole", "node0")]))
"""
    _, killed, done, (first, second) = fault(code)
    assert killed[0] == [-9, -9]
    assert "node1/last.pt: 1 of 2 epochs done" in done[1]
    assert first == second
    epochs = [line.split(",")[0] for line in (tmp_path / "node0/metrics.csv").open()]
    assert epochs == ["epoch", "1", "2"]
