"""Processes that a person starts within a run: what is the rank's alone does not reach them."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from generated import ROOT, Command, wait_for
from generated import children as living
from ranks import fork, on_ranks, wait
from torch.utils.data import DataLoader

from ddpkit.data import loading
from ddpkit.ranks import (
    children,
    distributed,
    failures,
    process,
    protocol,
    stopping,
    watch,
    workers,
)
from ddpkit.vision import reporting

context = multiprocessing.get_context("fork")


def forked(act: Callable[[], object]) -> int:
    """Return the process id of a fork that is no multiprocessing.Process; it exits as a script."""
    pid = os.fork()
    if not pid:
        act()
        sys.exit(0)
    return pid


def status_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def sleep() -> None:
    time.sleep(60)


def no_stop() -> bool:
    time.sleep(2.5 * protocol.POLL_SECONDS)  # for the thread to see a signal
    return not distributed.store().check([protocol.STOP])


@on_ranks(2)
def test_signals_to_children():
    """SIGTERM ends a child, however it is forked; of others neither it nor the run takes notice."""
    with stopping.on_signals(str):
        for _ in range(3):
            with context.Pool(2) as pool:
                assert pool.map(abs, [1, -2]) == [1, 2]
        with ProcessPoolExecutor(2, context) as executor:
            assert list(executor.map(abs, [1, -2])) == [1, 2]
        child = context.Process(target=sleep)
        child.start()
        for signum in signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM:
            assert child.is_alive()
            os.kill(child.pid, signum)
        child.join(10)
        assert child.exitcode == -signal.SIGTERM
        pid = forked(sleep)
        os.kill(pid, signal.SIGTERM)
        assert status_of(pid) == -signal.SIGTERM
        program = subprocess.Popen(["sleep", "60"], preexec_fn=os.getpid)
        program.send_signal(signal.SIGINT)
        assert program.wait(10) == -signal.SIGINT
        assert no_stop()


@on_ranks(1)
def test_what_a_loader_worker_starts():
    """The worker outlives a request to stop, but a program that it starts ends as any other."""

    def work(results: multiprocessing.Queue) -> None:
        children.start_worker(0)
        os.kill(os.getpid(), signal.SIGTERM)
        program = subprocess.Popen(["sleep", "60"])
        program.terminate()
        results.put(program.wait(10))

    results = context.Queue()
    with stopping.on_signals(str):
        with process.holding_signals():
            worker = context.Process(target=work, args=(results,))
            worker.start()
        assert results.get(timeout=20) == -signal.SIGTERM
        worker.join()


@on_ranks(1)
def test_a_child_that_fails(tmp_path):
    """Or that exits as a script does: the run, its other children and its lock are not touched."""

    def bug() -> None:
        raise ValueError("a bug of the child")

    def use_lock() -> None:
        assert watch.thread.lock.acquire(timeout=5)
        watch.thread.lock.release()

    report = reporting.Reporter(tmp_path, epochs=2)
    report.log_epoch({})  # which starts TensorBoard's thread
    closing = contextlib.closing(report)
    with failures.one_line_errors(), stopping.on_signals(str), closing:
        other = context.Process(target=sleep, daemon=True)
        other.start()
        with watch.thread.lock:  # as if the thread were at work
            assert status_of(forked(use_lock)) == 0
        assert status_of(forked(bug)) == 1
        assert not distributed.store().check([protocol.ERROR])
        assert other.is_alive()
        assert no_stop()
        other.kill()


@on_ranks(1)
def test_a_child_that_drops_an_iterator():
    """The loader workers of its parent work on."""
    context = workers.worker_context(1)
    loader = DataLoader(range(8), 1, num_workers=1, multiprocessing_context=context)
    found = loading.started(loader)

    def drop() -> None:
        nonlocal found
        del found

    first = next(found)
    assert status_of(forked(drop)) == 0
    assert torch.cat([first, *found]).tolist() == list(range(8))


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_a_foreign_worker_that_hangs(tmp_path, end):
    """It does not outlive its rank, whichever way that ends."""
    path = tmp_path / "pid"

    class Hanging(list):
        def __getitem__(self, index: int) -> None:
            path.write_text(str(os.getpid()))
            time.sleep(600)

    def act() -> None:
        loader = DataLoader(
            Hanging("ab"), num_workers=1, multiprocessing_context="fork"
        )
        with failures.one_line_errors():
            if end == "exit":
                watch.thread.add_duty(lambda: path.exists() and process.exit_now(9))
            next(loading.started(loader))

    pid = fork(act, tmp_path / "said")
    wait_for(lambda: path.exists() and path.read_text())
    if end == "kill":
        os.kill(pid, signal.SIGKILL)
    assert wait([pid]) == [9 if end == "exit" else -9]
    wait_for(lambda: not process.is_running(int(path.read_text())))


POOL = """
    import multiprocessing, time
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(time.sleep, [0.3, 0.3])
"""


def test_a_pool_in_evaluation(project, few, tmp_path):
    """Its processes outlive a signal to all; then the run is saved, and nobody stays."""
    reset = "    metrics.reset()\n"
    pooled = project.copy(tmp_path / "pooled", (reset, POOL + reset))
    started = pooled.start(project.flags(few, tmp_path / "out", "--epochs", 9))
    wait_for((tmp_path / "out" / "last.pt").exists)
    wait_for(lambda: len(living()) == 6)
    for pid in living():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
    done = started.end()
    assert done.err == ""
    assert done.statuses == [75, 75]
    assert done.left == []
    assert "SIGINT: stopped and saved at epoch" in done.out


LEAVES = """
import multiprocessing, os
multiprocessing.set_start_method("forkserver")  # as Python 3.14 has it by default
from {module} import tqdm
tqdm(total=2).update()
os._exit(75)
"""


def test_progress_bars_leave_no_semaphore(tmp_path: Path) -> None:
    """A rank that is stopped exits at once: Python's resource tracker has nothing to warn of."""
    said = {}
    for module in "tqdm", "ddpkit.vision.bars":
        command = [sys.executable, "-c", LEAVES.format(module=module)]
        done = Command(command, tmp_path, PYTHONPATH=str(ROOT)).end()
        assert done.status == 75
        said[module] = done.err
    assert "leaked semaphore" in said["tqdm"]
    assert "leaked semaphore" not in said["ddpkit.vision.bars"]
