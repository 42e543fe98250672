"""What loader workers need from the system, made to fail in each of its places; how they end."""

import ctypes
import errno
import multiprocessing
import os
import platform
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import connection, queues, reduction, synchronize
from pathlib import Path

import pytest
import torch
from generated import Done, die, left, wait_for
from ranks import fork, said, wait
from torch.utils.data import DataLoader
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from ddpkit.data import loading
from ddpkit.data.samples import Key, Seeded
from ddpkit.ranks import failures, handlers, process, workers

FILES = "too many files are open: raise the limit (ulimit -n)"
PROCESSES = "no more processes or threads can be started: raise the limit (ulimit -u"
MEMORY = "not enough memory for loader workers"
SHM = "/dev/shm is too small for the batches of loader workers ({}; see df -h /dev/shm)"
EXCHANGE = "a loader worker cannot send a batch to its rank (TypeError: cannot pickle"
Patch = Callable[[], object]


def refuse(error: Exception | int, place: object, name: str) -> Patch:
    """A patch: this function of the system fails."""

    def refused(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error)) if isinstance(error, int) else error

    return lambda: setattr(place, name, refused)


def no_thread(name: str) -> Patch:
    """A patch: no thread starts that calls a function of this name."""
    start = threading.Thread.start

    def limited(self: threading.Thread) -> None:
        if name in str(vars(self)["_target"]):
            raise RuntimeError("can't start new thread")
        start(self)

    return lambda: setattr(threading.Thread, "start", limited)


def no_file() -> None:
    """As many files as are open, and no number below is free."""
    torch.empty(()).random_()  # reads /proc/cpuinfo, once
    last = 0
    while last < 64:
        last = os.open(os.devnull, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, last + 1))


def end_of(act: Callable[[], object], tmp_path: Path) -> Done:
    """What becomes of a fork that calls `act`."""
    statuses = wait([fork(act, tmp_path / "said")], 30)
    out, err = said(tmp_path / "said")
    return Done(statuses, out, err, left())


class Images:
    """Reading the first one in a worker calls `act`."""

    def __init__(self, act: Patch) -> None:
        self.act = act
        self.samples = [(f"{number}.jpg", 0) for number in range(32)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple:
        if index == 0 and multiprocessing.parent_process():
            self.act()
        return torch.zeros(3, 4, 4, dtype=torch.uint8), 0


def load(tmp_path: Path, in_worker: Patch = int, in_rank: Patch = int) -> Done:
    """Read images by two workers of a rank, which is a fork; its TMPDIR is `tmp_path`."""

    def act() -> None:
        tempfile.tempdir = str(tmp_path)
        handlers.install_handlers()
        with failures.one_line_errors():
            options = loading.workers(2, torch.device("cpu"))
            images = Seeded(Images(in_worker), 1, seed=0)
            loader = DataLoader(
                images, 4, sampler=[Key(0, n) for n in range(32)], **options
            )
            in_rank()
            for _ in loading.started(loader):
                pass

    began = time.monotonic()
    done = end_of(act, tmp_path)
    assert time.monotonic() - began < 20
    return done


IN_RANK = {
    "fork": (refuse(errno.EAGAIN, os, "fork"), PROCESSES),
    "memory": (refuse(errno.ENOMEM, os, "fork"), MEMORY),
    "files": (no_file, FILES),
    "semaphores": (
        refuse(errno.EROFS, synchronize._multiprocessing, "SemLock"),
        SHM.format(os.strerror(errno.EROFS)),
    ),
    "threads": (no_thread("_feed"), PROCESSES),
    "handles": (
        refuse(RuntimeError("received 0 items of ancdata"), reduction, "recvfds"),
        FILES,
    ),
}


@pytest.mark.parametrize("what", IN_RANK)
def test_what_a_rank_cannot_get_for_its_workers(tmp_path, what):
    patch, line = IN_RANK[what]
    load(tmp_path, in_rank=patch).refused("workers.lacking", line)


NO_SPACE = (
    "unable to allocate shared memory(shm) for file </torch_9_1_0>: "
    "No space left on device (28)"
)
IN_WORKER = {
    "files": (no_file, FILES),
    "threads": (no_thread("_feed"), PROCESSES),
    "other threads": (no_thread("_serve"), PROCESSES),
    "connections": (refuse(errno.EMFILE, connection.Listener, "accept"), FILES),
    "handles": (refuse(errno.EMFILE, reduction, "send_handle"), FILES),
    "memory": (refuse(MemoryError(), queues._ForkingPickler, "dumps"), MEMORY),
    "shared memory": (
        refuse(RuntimeError(NO_SPACE), torch.UntypedStorage, "_share_fd_cpu_"),
        SHM.format(os.strerror(errno.ENOSPC)),
    ),
    "sockets": (
        lambda: shutil.rmtree(
            os.readlink(multiprocessing.current_process()._config["tempdir"]), True
        ),
        "the sockets of loader workers were deleted from TMPDIR",
    ),
    "pickle": (
        lambda: setattr(_MapDatasetFetcher, "fetch", lambda *_: threading.Lock()),
        EXCHANGE,
    ),
}


@pytest.mark.parametrize("what", IN_WORKER)
def test_what_a_worker_cannot_get(tmp_path, what):
    """Most of it fails in threads of torch and Python, for which a rank would wait in vain."""
    patch, line = IN_WORKER[what]
    code = "workers.fail" if what == "pickle" else "workers.lacking"
    load(tmp_path, in_worker=patch).refused(code, line)


ENDS = {
    "sys.exit": (lambda: sys.exit(0), "status 0"),
    "os._exit": (lambda: os._exit(0), "status 0"),
    "SIGKILL": (die, "SIGKILL: out of memory?"),
}


@pytest.mark.parametrize("how", ENDS)
def test_workers_that_end(tmp_path, how):
    act, words = ENDS[how]
    done = load(tmp_path, in_worker=act)
    done.failed("", "at sample 0, 0.jpg has ended with ", words)
    assert {path.name for path in tmp_path.iterdir()} == {"said.out", "said.err"}


def test_workers_of_a_loader_of_ones_own_that_end(tmp_path):
    """torch asks for them while it waits; its handler, which raises anywhere, is not there."""

    def act() -> None:
        with failures.one_line_errors():
            loader = DataLoader(Images(die), 4, num_workers=1)
            batches = iter(loader)
            assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
            list(batches)

    end_of(act, tmp_path).failed("", "DataLoader worker", "exited unexpectedly")


def test_a_worker_that_ends_as_its_rank_looks(monkeypatch):
    """It has done all, just before it is found to have ended: that is no fault."""
    worker = workers.Worker(target=int)
    worker.start()
    worker.join()
    assert workers.find_fault() is None
    assert worker.note[:4] == workers.OVER
    worker.note[:4] = bytes(4)

    def ends(_: int) -> bool:
        worker.note[:4] = workers.OVER
        return False

    monkeypatch.setattr(process, "is_running", ends)
    assert workers.find_fault() is None


def test_a_worker_whose_threads_take_longer(monkeypatch):
    """Its first thread has ended: the system says that it is over, and its status later."""

    def leave() -> None:
        threading.Timer(0.3, die).start()
        number = {"x86_64": 60, "aarch64": 93}[platform.machine()]  # exit, of a thread
        ctypes.CDLL(None).syscall(number, 0)

    monkeypatch.setattr(workers, "running", [])  # not for later tests
    worker = workers.Worker(target=leave)
    worker.start()
    wait_for(lambda: not process.is_running(worker.pid))
    assert worker.has_died()
    assert worker.exitcode is None
    assert "SIGKILL" in worker.end()


def test_a_long_folder_for_temporary_files(tmp_path):
    """A cluster may name one for each job; a socket's name has at most 107 characters."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    load(long).ok()


def test_what_is_left_of_workers(tmp_path):
    """Those of an epoch that is over, of a loader that starts new ones, hold no handles."""

    def again() -> None:
        make = loading.started
        held = []

        def started(loader: DataLoader) -> object:
            loader = DataLoader(loader.dataset, 4, sampler=loader.sampler, **options)
            for _ in range(6):
                for _ in make(loader):
                    pass
                held.append(len(os.listdir("/proc/self/fd")))
            assert held[5] < held[1] + 4  # two more each time, if they were kept
            return []

        options = {
            **loading.workers(1, torch.device("cpu")),
            "persistent_workers": False,
        }
        loading.started = started

    load(tmp_path, in_rank=again).ok()


def test_an_iterator_of_a_thread_that_ends(tmp_path):
    """Its workers live on, and end with their rank."""

    def in_thread() -> None:
        make = loading.started

        def started(loader: DataLoader) -> object:
            found: list = []
            thread = threading.Thread(target=lambda: found.append(make(loader)))
            thread.start()
            thread.join()
            time.sleep(0.2)  # for the kernel to tell them
            return found[0]

        loading.started = started

    def die() -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    load(tmp_path, in_rank=in_thread).ok()
    done = load(tmp_path, in_worker=die, in_rank=in_thread)
    assert done.status == -signal.SIGKILL
    assert done.left == []
