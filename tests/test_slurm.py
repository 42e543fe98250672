"""On a real SLURM of three virtual nodes (slurm.py): the ways to start, and slurm/train.sbatch.

Jobs run side by side wherever they can: most of the time SLURM waits, for a requeue or a limit.
"""

import contextlib
import re
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from digest import digest
from running import NETS, SAME_FOR_BOTH, Done, Project, planted
from slurm import NODES, Slurm, running, wait_until

pytestmark = SAME_FOR_BOTH

EPOCHS = 4  # of six steps for one rank, three for two
# SLOW_0 is how long each step of a job's first start sleeps; faults are in a start's second step.
PLANTED = """
import os, time
start, node = os.environ.get("SLURM_RESTART_COUNT", "0"), os.environ.get("SLURMD_NODENAME")
is_second = run.step == 1 + globals().setdefault("first step", run.step)
time.sleep(float(os.environ.get(f"SLOW_{start}", 0)))
if "KILL" in os.environ and is_second:
    os.kill(os.getpid(), 9)
if os.environ.get("RAISE") == f"{start} {rank}" and is_second:
    raise RuntimeError(f"uncorrectable ECC error on {node}")
"""
MAX_FAILURES = 2
ENDS = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with running() as slurm:
        yield slurm


class Lab:
    """A copy of the project with what is planted, on the disk that all nodes share."""

    def __init__(self, slurm: Slurm, project: Project, folder: Path) -> None:
        self.slurm, self.project = slurm, project
        self.folder = planted(project, folder / "the project", PLANTED).folder
        self.data = project.draw(folder / "data", 24, 8)
        script = self.folder / "slurm/train.sbatch"
        text = script.read_text()
        assert text.count("\nmax_failures=3 ") == 1
        script.write_text(text.replace("max_failures=3 ", f"max_failures={MAX_FAILURES} "))
        small = ("--image-size", 32, "--batch-size", 4, "--workers", 0)
        self.flags = [*small, *NETS["classification"], "--weights", "none", "--epochs", EPOCHS]
        self.env = {"PYTHON": sys.executable, "NPROC": "1"}

    def whole(self, ranks: int, *more: str) -> str:
        """Return the digest of a run that nothing disturbs."""
        out = self.folder / "runs" / f"whole of {ranks}"
        flags = ("--data", self.data, *self.flags, "--output-dir", out, *more)
        self.project.fork(*flags, ranks=ranks, draws=False).ok()
        return digest(out)

    def step(self, words: tuple) -> Done:
        """Run srun, without a batch script; return what it said, without srun's own lines."""
        command = ("srun", "--kill-on-bad-exit=1", "--nodes", 2, *words, *self.flags)
        done = self.slurm.run(*command, cwd=self.folder, **self.env)
        own = [line for line in done.err.splitlines() if not line.startswith(("srun:", "slurmst"))]
        return Done(done.status, done.out, "\n".join(own), [])

    def submit(self, name: str, *options: object, flags: tuple = (), **env: str) -> "Job":
        """Submit slurm/train.sbatch with `options` in place of its header's."""
        cpu = ("--gpus-per-node", 0, "--cpus-per-task", 1)
        command = ("sbatch", "--parsable", "--job-name", name, *cpu, *options, "slurm/train.sbatch")
        words = [*command, "--data", self.data, *self.flags, *flags]
        number = self.slurm(*words, cwd=self.folder, **{**self.env, **env})
        return Job(self, number, self.folder / "runs" / name)


class Job:
    def __init__(self, lab: Lab, number: str, out: Path) -> None:
        self.lab, self.number, self.out = lab, number, out

    def __getitem__(self, name: str) -> str:
        """Return what scontrol says of it, such as JobState."""
        return self.lab.slurm.job(self.number)[name]

    @property
    def nodes(self) -> list[str]:
        return self.lab.slurm("scontrol", "show", "hostnames", self["NodeList"]).split()

    @property
    def log(self) -> str:
        path = self.lab.folder / f"slurm-{self.number}.out"
        return path.read_text() if path.exists() else ""

    def wait_for(self, text: str, starts: int = 1) -> None:
        """Wait until the latest of so many starts has said `text`."""
        begun = "starting "

        def is_said() -> bool:
            if self.log.count(begun) >= starts and text in self.log.rsplit(begun, 1)[1]:
                return True
            assert self["JobState"] not in ENDS, self.log
            return False

        wait_until(is_said, f"{text!r} of job {self.number}", 120)

    def end(self, state: str = "COMPLETED", restarts: int = 0) -> None:
        wait_until(lambda: self["JobState"] in ENDS, f"the end of job {self.number}", 180)
        assert (self["JobState"], self["Restarts"]) == (state, str(restarts)), self.log


@contextlib.contextmanager
def drained(slurm: Slurm, node: str) -> Iterator[None]:
    """Have `node` take no more jobs."""
    update = "scontrol", "update", f"NodeName={node}"
    slurm(*update, "State=DRAIN", "Reason=test")
    try:
        yield
    finally:
        slurm(*update, "State=RESUME")


@pytest.fixture
def lab(slurm: Slurm, project: Project, tmp_path: Path) -> Lab:
    return Lab(slurm, project, tmp_path)


def test_srun_and_a_lost_node(lab: Lab) -> None:
    """A task per node and a task per rank end with the same bits; so does a run without SLURM.

    So does a job that has lost a node: SLURM itself finds out, and starts it again on others.
    """
    lost = lab.submit("lost", "--nodes", 2, flags=("--save-every", 1), SLOW_0="1")
    lost.wait_for("epoch 1/")
    node = lost.nodes[1]
    lab.slurm.lose(node)
    left = sorted({*NODES} - {node})
    local = lab.slurm.local / "data"  # on one of the nodes only
    shutil.copytree(lab.data, lab.slurm.disk(left[0]) / "data")
    where = ("--nodelist", ",".join(left), "--ntasks-per-node", 1)
    starts = {"launched": ("./launch.sh",), "plain": (sys.executable, "main.py")}
    tasks = [
        (*where, *starts[start], "--output-dir", f"runs/{name}", "--data", data)
        for name, start, data in (
            ("launched", "launched", lab.data),
            ("plain", "plain", lab.data),
            ("absent", "launched", local),
        )
    ]
    with ThreadPoolExecutor() as pool:
        *done, absent = pool.map(lab.step, tasks)
    lost.end(restarts=1)
    lab.slurm.start_node(node)
    for each in done:
        assert "\n2 rank(s) on CPU" in each.ok().out
    # Of both statuses, 2 and that of the task that srun killed, it has the higher one.
    first, *others = absent.err.splitlines()
    assert first.startswith(f"error: rank 1 on {left[1]}: {local}"), absent.err
    assert others in ([], [f"error: rank 1 on {left[1]} has failed"])
    assert absent.status
    assert lost.nodes == left
    assert "/last.pt: 1 of 4 epochs done" in lost.log
    names = ("launched", "plain", "lost")
    assert {digest(lab.folder / f"runs/{name}") for name in names} == {lab.whole(2)}, lost.log


def test_stopped_and_requeued(lab: Lab) -> None:
    """By whatever stops a job: it saves, and goes on at that step; but not after scancel.

    After a failure it is started again, too.
    """
    slurm = lab.slurm
    one, never = ("--nodes", 1, "--nodelist"), ("--resume", "never")  # for the first start
    array = lab.submit("array", *one, "n1", "--array", "0-1", flags=never, SLOW_0="1")
    tasks = [Job(lab, f"{array.number}_{i}", array.out.with_name(f"array-{i}")) for i in range(2)]
    cancelled = lab.submit("cancelled", *one, "n2", SLOW_0="1")
    preempted = lab.submit("preempted", *one, "n3", flags=never, SLOW_0="1")

    tasks[0].wait_for("epoch 1/")
    slurm("scontrol", "requeue", tasks[0].number)
    tasks[1].wait_for("epoch 1/")
    slurm("scancel", "--signal", "USR1", tasks[1].number)
    preempted.wait_for("epoch 1/")
    other = ("--partition", "high", "--exclusive", "--output", "/dev/null", "--wrap", "sleep 2")
    slurm("sbatch", *one, "n3", *other)
    cancelled.wait_for("epoch 1/")
    asked_at = time.time()
    slurm("scancel", cancelled.number)
    preempted.wait_for("JPEG", starts=2)

    with drained(slurm, "n3"):
        more = {"flags": ("--save-every", 1), "SLOW_0": "5", "RAISE": "1 1"}
        limited = lab.submit("limited", "--nodes", 2, "--time", 60, **more)
        limited.wait_for("JPEG")
        # SLURM sends the signal within 30 s, as the header has --signal USR1@300.
        minutes = int(limited["RunTime"].split(":")[1]) + 5
        slurm("scontrol", "update", f"JobId={limited.number}", f"TimeLimit={minutes}")
        limited.wait_for("SIGUSR1: stopped and saved")
        slurm("scontrol", "update", f"JobId={limited.number}", "TimeLimit=60")
        limited.end(restarts=2)
    assert limited.log.count("RuntimeError: uncorrectable ECC error on n") == 1
    assert re.findall(
        r"failure (\d) \(max_failures=2\): status \d+ on n\[1-2\]\n", limited.log
    ) == ["1"]
    first, second = re.findall("/last.pt: (.*)", limited.log)
    assert first != second
    assert digest(limited.out) == lab.whole(2)

    cancelled.end("CANCELLED")
    assert (cancelled.out / "last.pt").stat().st_mtime > asked_at
    for job, name in ((tasks[0], "TERM"), (tasks[1], "USR1"), (preempted, "TERM")):
        job.end(restarts=1)
        assert f"SIG{name}: stopped and saved at epoch" in job.log, job.log
        assert "/last.pt: " in job.log, job.log
    assert {digest(job.out) for job in (*tasks, preempted)} == {lab.whole(1, *never)}


def test_failures(lab: Lab) -> None:
    """Each is followed by another start, a bounded number of times; but not a mistake."""
    slurm = lab.slurm
    killed = lab.submit("killed", "--nodes", 1, KILL="")
    out = slurm.local / "out"  # not shared
    apart = lab.submit("apart", "--nodes", 1, flags=("--output-dir", out), SLOW_0="0.7")
    apart.wait_for("epoch 1/")
    first = apart.nodes[0]
    slurm("scontrol", "requeue", apart.number)
    slurm("scontrol", "update", f"JobId={apart.number}", f"ExcNodeList={first}")

    apart.end("FAILED", restarts=1)
    assert apart["ExitCode"] == "2:0"
    refusals = [line for line in apart.log.splitlines() if line.startswith("error:")]
    assert len(refusals) == 1, apart.log
    assert f"this job has saved there on {first}, but there is no checkpoint" in refusals[0]
    assert not list(slurm.disk(apart.nodes[0]).glob("out/*.pt"))

    killed.end("FAILED", restarts=MAX_FAILURES)  # it begins anew, as it has nothing to lose
    assert killed["ExitCode"] == "137:0"
    found = re.findall(r"failure (\d) .*: status 137 on n\d\n", killed.log)
    assert found == ["1", "2", "3"], killed.log
