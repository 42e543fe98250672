"""On a real SLURM: the ways to start, and slurm/train.sbatch."""

import re
import sys
from collections.abc import Iterator

import pytest
import torch
from digest import digest
from generated import SMALL, wait_for
from slurm import Job, NoSlurmError, Slurm, running

from ddpkit.data import samples

# SLOW: each step of a job's first start sleeps. KILL: each start dies in its second
# step.
PLANTED = """
import os, time
if "SLOW" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:
    time.sleep(1)
if "KILL" in os.environ and run.step == 1 + globals().setdefault("first step", run.step):
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    try:
        with running() as slurm:
            yield slurm
    except NoSlurmError as error:
        pytest.skip(f"no SLURM: {error}")


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_stopped_and_requeued(slurm, project, few, tmp_path):
    """It saves and goes on at that step; srun with a task per rank ends with the same bits.

    A job that fails is started again, and goes on, but not for ever.
    """
    flags = list(SMALL["classification"])
    flags += ["--image-size", 32, "--epochs", 4, "--data", few]
    flags += ["--save-every", 1, "--resume", "never"]  # which is for the first start
    project.run(flags, "--output-dir", tmp_path / "whole").ok()
    folder = project.planted(tmp_path / "the project", PLANTED).folder
    script = folder / "slurm/train.sbatch"
    text = script.read_text()
    script.write_text(text.replace("\nmax_failures=3 ", "\nmax_failures=1 "))
    common = {"PYTHON": sys.executable, "NPROC": "1"}

    def submit(name: str, *options: str, **env: str) -> Job:
        return Job(slurm, folder, flags, "--job-name", name, *options, **common, **env)

    stopped = submit("stopped", SLOW="")
    requeued = submit("requeued", "--array", "0", SLOW="")
    killed = submit("killed", "--nodes", "1", KILL="")
    wait_for(lambda: "epoch 1/" in stopped.log)
    slurm("scancel", "--signal", "USR1", stopped.number)  # as at the time limit
    wait_for(lambda: "epoch 1/" in requeued.log)
    slurm("scontrol", "requeue", requeued.number)

    command = ["srun", "--kill-on-bad-exit=1", "--nodes", 2, "--ntasks-per-node", 1]
    command += [sys.executable, "main.py", "--output-dir", "runs/plain"]
    command += flags
    assert "\n2 rank(s) on CPU" in slurm(*command, cwd=folder)

    for signum, job in ("SIGUSR1", stopped), ("SIGTERM", requeued):
        log = job.end("COMPLETED", restarts=1)
        assert f"{signum}: stopped and saved at epoch" in log
    assert "/last.pt: " in stopped.log
    assert "/last.pt: " in requeued.log
    names = ("runs/stopped", "runs/requeued-0", "runs/plain")
    assert {digest(folder / name) for name in names} == {digest(tmp_path / "whole")}

    log = killed.end("FAILED", restarts=1)
    assert re.findall(r"failure (\d) .*: status 137 on n\d\n", log) == ["1", "2"]
    assert killed["ExitCode"] == "137:0"
    assert killed.log.count("/last.pt: 0 of 4 epochs done") == 1


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_fewer_nodes(slurm, project, few, tmp_path):
    """Virtual ranks: stopped on two nodes, it goes on on one, and ends as an undisturbed run."""
    flags = list(SMALL["classification"])
    flags += ["--image-size", 32, "--epochs", 3, "--data", few, "--save-every", 1]
    flags += ["--virtual-ranks", 4, "--batch-size", 2]
    project.run(flags, "--output-dir", tmp_path / "whole", on=1).ok()
    folder = project.planted(tmp_path / "the project", PLANTED).folder
    how = {"PYTHON": sys.executable, "NPROC": "1"}
    name = "--job-name", "fewer"
    job = Job(slurm, folder, flags, *name, "--nodes", "2", SLOW="", **how)
    wait_for(lambda: "epoch 1/" in job.log)
    slurm("scancel", job.number)
    wait_for(job.is_over)
    job = Job(slurm, folder, flags, *name, "--nodes", "1", **how)
    assert "/last.pt: " in job.end("COMPLETED", restarts=0)
    ends = [
        torch.load(run / "last.pt", weights_only=True)
        for run in (folder / "runs/fewer", tmp_path / "whole")
    ]
    first, second = (
        samples.checksum([each["model"], each["optimizer"]]) for each in ends
    )
    assert first == second
