"""SLURM with preemption, elastic torchrun, ranks that crash and folders that go: a run goes on."""

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import configurations
import torch
from digest import digest
from generated import SMALL, Command, after_step, die, wait_for
from interrupts import compare
from ports import free_port
from setting import Setting
from slurm import Job, NoSlurmError, Slurm, running

# Steps take time, so that there is something to interrupt.
SLOW = "\nimport time\ntime.sleep(0.3)\n"


def case(chance: random.Random, folder: Path, setting: Setting) -> str:
    kinds = [batch_jobs, elastic_torchrun, crashed_ranks, crashed_ranks, removed_folder]
    act = chance.choice(kinds)
    print(act.__name__)
    return act(chance, folder, setting)


def batch_jobs(chance: random.Random, folder: Path, setting: Setting) -> str:
    """Preempted, requeued, cancelled and submitted again, stopped as at the time limit."""
    project = setting.projects["classification"]
    more = ["--image-size", 32, "--epochs", 6, "--save-every", 1]
    flags = [SMALL["classification"], more, "--data", setting.data["classification"]]
    project.run(flags, "--output-dir", folder / "whole").ok()
    slow = project.planted(folder / "project", SLOW).folder
    try:
        with running() as slurm:
            return f"SLURM: {interrupt_job(chance, slurm, slow, flags, folder)}"
    except NoSlurmError as error:
        return f"no SLURM: {error}"


def interrupt_job(
    chance: random.Random,
    slurm: Slurm,
    folder: Path,
    flags: list,
    whole: Path,
) -> str:
    """Submit it; interrupt it twice; wait for its end."""
    common = {"PYTHON": sys.executable, "NPROC": "1"}
    job = Job(slurm, folder, flags, "--job-name", "job", **common)
    told = []
    for _ in range(2):
        wait_for_epoch(job)
        time.sleep(chance.uniform(0, 3))
        if job.is_over():
            break
        act = chance.choice([preempt, preempt, requeue, stop_in_time, cancel])
        told.append(act.__name__)
        if act(slurm, job) == "CANCELLED":
            job = Job(slurm, folder, flags, "--job-name", "job", **common)
        else:
            wait_for_start(job)
    wait_for(job.is_over, 180)
    assert job["JobState"] == "COMPLETED", job.log
    assert digest(folder / "runs/job") == digest(whole / "whole"), job.log
    return ", ".join(told) or "not interrupted"


def wait_for_epoch(job: Job) -> None:
    before = job.log.count("epoch ")
    wait_for(lambda: job.log.count("epoch ") > before or job.is_over())


def wait_for_start(job: Job) -> None:
    wait_for(lambda: job["JobState"] == "RUNNING" or job.is_over())


def preempt(slurm: Slurm, job: Job) -> str:
    """Another job, of a partition that goes first, takes both nodes for a moment."""
    restarts = job["Restarts"]
    command = ["sbatch", "--parsable", "--partition", "urgent", "--exclusive"]
    slurm(command, "--nodes", 2, "--output", "/dev/null", "--wrap", "sleep 1")
    wait_for(lambda: job["Restarts"] != restarts or job.is_over())
    return "PREEMPTED"


def requeue(slurm: Slurm, job: Job) -> str:
    restarts = job["Restarts"]
    slurm("scontrol", "requeue", job.number)
    wait_for(lambda: job["Restarts"] != restarts or job.is_over())
    return "REQUEUED"


def stop_in_time(slurm: Slurm, job: Job) -> str:
    restarts = job["Restarts"]
    slurm("scancel", "--signal", "USR1", job.number)
    wait_for(lambda: job["Restarts"] != restarts or job.is_over())
    return "REQUEUED"


def cancel(slurm: Slurm, job: Job) -> str:
    slurm("scancel", job.number)
    wait_for(job.is_over)
    return job["JobState"]


def elastic_torchrun(chance: random.Random, folder: Path, setting: Setting) -> str:
    """A node joins and leaves, a rank is killed: each round goes on where the one before was."""
    project = setting.projects["classification"]
    main = project.planted(folder / "project", SLOW).folder / "main.py"
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes=1:3", "--nproc-per-node=1", "--max-restarts=3"]
    command += ["--rdzv-backend=c10d", "--rdzv-id=x", "--local-addr", "127.0.0.1"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    command += [
        "--rdzv-conf",
        "last_call_timeout=4",
    ]  # for a third node: 30 s otherwise
    command += [main, SMALL["classification"], "--image-size", 32, "--epochs", 1000]
    data = setting.data["classification"]
    command += ["--data", data, "--output-dir", folder / "out"]

    def launch() -> Command:
        return Command(command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

    first = launch()
    until(first, 1)
    second = launch()
    joined = until(first, 2)
    assert "SIGTERM: stopped and saved at epoch" in joined, joined
    assert "saved on 1 rank(s), now 2" in joined, joined
    is_killed = chance.random() < 0.5
    if is_killed:
        first.kill(signal.SIGKILL, chance.randrange(2))
        again = until(first, 2)
        assert "/last.pt: " in again, again
        assert "then" not in again, again
    second.kill(signal.SIGTERM)
    left_alone = until(first, 1)
    assert "saved on 2 rank(s), now 1" in left_alone, left_alone
    first.kill(signal.SIGTERM)
    assert not first.end().left
    assert not second.end().left
    return f"elastic torchrun{', a rank killed' if is_killed else ''}"


def until(run: Command, ranks: int) -> str:
    """Read on until that many ranks have trained an epoch; return what was said before."""
    found = ""
    assert run.process.stdout
    for line in run.process.stdout:
        found += line
        start = found.rpartition("starting ")[2]
        if f"{ranks} rank(s) on CPU" in start and "epoch" in line[:6]:
            return found
    raise AssertionError(found + run.process.communicate()[1])


CRASHES = {  # what ends a rank that has a fault in its C++
    "SIGABRT": os.abort,
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "SIGBUS": lambda: os.kill(os.getpid(), signal.SIGBUS),
    "SIGKILL": die,
}


def crashed_ranks(chance: random.Random, folder: Path, setting: Setting) -> str:
    """A rank crashes at any step, several times: the others end, the next start goes on."""
    configuration = configurations.draw(chance)
    project = setting.projects[configuration.task]
    told = []
    whole = folder / "whole"
    out = folder / "out"
    how = {"on": configuration.ranks}
    project.run(configuration.words(setting, 1, whole), **how).ok()
    steps = torch.load(whole / "last.pt", weights_only=True)["step"]
    for step in sorted(chance.sample(range(1, steps + 1), min(steps, 3))):
        name = chance.choice(list(CRASHES))
        rank = chance.randrange(configuration.ranks)
        crash = after_step(step, CRASHES[name], rank, before=chance.random() < 0.5)
        told.append(f"{name} of rank {rank} at step {step}")
        done = project.run(configuration.words(setting, 1, out), patch=crash, **how)
        said = (told, done.statuses, done.err)
        assert not done.left, said
        assert 0 not in done.statuses, said
        assert done.statuses[rank] == -signal.Signals[name], said
    project.run(configuration.words(setting, 1, out), **how).ok()
    compare(whole, out)
    return f"{', '.join(told)} | {configuration}"


def removed_folder(chance: random.Random, folder: Path, setting: Setting) -> str:
    """The output folder is removed, renamed or unreadable: one line, status 2, all ranks end."""
    configuration = configurations.draw(chance)
    project = setting.projects[configuration.task]
    out = folder / "out"
    act = chance.choice([remove, rename, replace_by_a_file])
    rank = chance.randrange(configuration.ranks)
    step = chance.randrange(1, 4)
    words = configuration.words(setting, 1, out)
    gone = after_step(step, lambda: act(out), rank)
    done = project.run(words, on=configuration.ranks, patch=gone)
    done.refused("", "out")
    return f"{act.__name__} at step {step} | {configuration}"


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def rename(folder: Path) -> None:
    folder.rename(folder.with_name("another"))


def replace_by_a_file(folder: Path) -> None:
    rename(folder)
    folder.touch()
