"""Forks of this process that are ranks: of a test function (`on_ranks`) or of a project's script.

This process has imported torch, so that a run takes a second or two; a launcher whose ranks import
torch takes eight. A fork's streams, warnings and modules are those of a new process.
"""

import builtins
import contextlib
import ctypes
import functools
import gc
import logging
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ports import free_port

# One thread a process, which does not spin where there are more; main.py's log level;
# no download, no GPU.
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
# before pytest began
os.environ.setdefault("OWN_PROXY", os.environ.get("https_proxy", ""))
os.environ |= {"https_proxy": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
if "FAKE_GPUS" not in os.environ:  # gpus.py has started this
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import segmentation_models_pytorch  # noqa: F401  what projects import, once for all forks
import timm  # noqa: F401
import torch
import torch.distributed as dist
import torch.utils.tensorboard
from lean.sitecustomize import hidden

with hidden():
    import torchmetrics  # noqa: F401

from ddpkit.ranks import distributed, process
from ddpkit.run import resuming
from ddpkit.vision import mistakes, pictures, reporting

Patch = Callable[[], object]
OWNED = ["main", "flags", "recipe", "ddp"]
OWNED += ["dataset", "model", "losses", "predict"]

# a fork of a process with OpenMP's threads would wait for them
torch.set_num_threads(1)
if sys.platform == "linux":
    # PR_SET_CHILD_SUBREAPER: orphans are this process's
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


@functools.cache
def installed() -> frozenset[str]:
    """The files of modules that this process has imported from packages."""
    files = {str(getattr(each, "__file__", "")) for each in list(sys.modules.values())}
    there = tuple(map(os.path.realpath, process.LIBRARIES))
    return frozenset(name for name in files if os.path.realpath(name).startswith(there))


def know_packages() -> None:
    """A run looks for its own files among those of some thousand modules.

    In a short one that would take a third of the time.
    """
    known = installed()
    look = process.within

    def within(root: Path, file: str) -> str:
        return "" if file in known else look(root, file)

    process.within = within


def fork(
    act: Callable[[], object], output: str | Path, folder: Path | None = None
) -> int:
    """Have a fork call `act` in `folder`, which ends as a script would; return its process id.

    What it prints goes to `output`.out and .err. The project in `folder` is what it imports.
    """
    installed()
    pid = os.fork()
    if pid:
        return pid
    # Before threads of torch do: it aborts where two at once replace their parent's pool.
    torch.set_num_threads(1)
    gc.freeze()  # collections of garbage need not look at what is imported
    status = 1
    try:
        for number, end in (1, "out"), (2, "err"):
            how = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            os.dup2(os.open(f"{output}.{end}", how), number)
        sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.excepthook = sys.__excepthook__
        sys.unraisablehook = sys.__unraisablehook__
        threading.excepthook = threading.__excepthook__
        logging.getLogger().handlers.clear()
        warnings.resetwarnings()
        for kind in "Deprecation", "PendingDeprecation", "Import", "Resource":
            warnings.simplefilter("ignore", getattr(builtins, f"{kind}Warning"))
        warnings.showwarning = lambda *what: sys.stderr.write(
            warnings.formatwarning(*what[:4])
        )
        if folder:
            os.chdir(folder)
            sys.path.insert(0, str(folder))
            for name in OWNED:
                sys.modules.pop(name, None)
        know_packages()
        process.project.cache_clear()
        act()
        status = 0
    except SystemExit as error:
        code = error.code
        status = code if isinstance(code, int) else int(code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def join(rank: int, ranks: int, port: int) -> None:
    """Set what torchrun would tell this rank; alone it is started as `python main.py` is."""
    if ranks > 1:
        names = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
        for same, value in zip(names, (rank, ranks), strict=True):
            os.environ.update(dict.fromkeys(same, str(value)))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def wait(pids: list[int], seconds: float = 120) -> list[int]:
    """Return the statuses of forks; those that are left after `seconds` are killed."""
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while len(statuses) < len(pids):
        for pid in set(pids) - statuses.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [statuses[pid] for pid in pids]


def said(output: Path) -> tuple[str, str]:
    """Return what forks have printed on stdout and on stderr."""
    return Path(f"{output}.out").read_text(), Path(f"{output}.err").read_text()


def draw_nothing() -> None:
    """Images of what was learnt take more than half of the time of a short run."""
    pictures.draw_curves = mistakes.Mistakes.write_files = lambda *_, **__: None
    reporting.Reporter.write_images = reporting.Reporter.try_drawing = lambda *_: None


def start(
    ranks: int,
    script: str,
    words: list[str],
    output: Path,
    folder: Path,
    patch: Patch,
) -> list[int]:
    """Start `script`, or a command such as "ddpkit check", on forks; return their process ids."""
    port = free_port()
    is_command = script.startswith("ddpkit ")

    def begin(rank: int) -> None:
        join(rank, ranks, port)
        sys.argv = (script.split() if is_command else [script]) + words
        patch()
        if is_command:
            sys.modules.pop("ddpkit.__main__", None)  # as a test may have imported it
            runpy.run_module("ddpkit.__main__", run_name="__main__")
        else:
            runpy.run_path(script, run_name="__main__")

    return [
        fork(functools.partial(begin, rank), output, folder) for rank in range(ranks)
    ]


def at_turn(turn: int, signum: int, *which: int) -> Patch:
    """Have these ranks send themselves a signal between turn `turn` of a loop and the next one."""

    def patch() -> None:
        end_turn = resuming.Checkpoints._end_turn
        count = 0

        def patched(self: resuming.Checkpoints, **words: bool) -> None:
            nonlocal count
            end_turn(self, **words)
            count += 1
            if count == turn and int(os.environ["RANK"]) in which:
                os.kill(os.getpid(), signum)
                time.sleep(0.5)  # for the other thread, before the steps are over

        resuming.Checkpoints._end_turn = patched

    return patch


def setup(**options: float) -> torch.device:
    """Join the group of those that `rendezvous`, with these `options`, finds; return the device."""
    here = distributed.rendezvous(**options)
    own = None if here.device.type == "cpu" else here.device
    if own:
        torch.accelerator.set_device_index(own)
    dist.init_process_group(
        here.backend,
        store=here.store,
        rank=here.rank,
        world_size=here.world_size,
        device_id=own,
        timeout=here.timeout,
    )
    return here.device


def on_ranks(*counts: int, group: bool = True) -> Callable[[Callable], Callable]:
    """Run the test function itself on each of so many ranks: `@on_ranks(2)` or `@on_ranks(1, 3)`.

    Each rank is a fork, and nothing that it changes is seen outside. It is in a gloo group of all
    ranks, unless `group` is False. With the fixture `project`, that project's modules are what it
    imports, and its folder is where it runs. The test fails with the traceback of each rank that
    raises. Fixtures are made once, before the forks.
    """

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def wrapper(*of_class: Any, **fixtures: Any) -> None:
            project = fixtures.get("project")
            for ranks in counts:
                port = free_port()

                def act(rank: int, ranks: int = ranks, port: int = port) -> None:
                    join(rank, ranks, port)
                    if group:
                        setup()
                    test(*of_class, **fixtures)
                    if distributed.is_joined():
                        # of a rank that has failed
                        with contextlib.suppress(RuntimeError):
                            distributed.teardown()

                with tempfile.TemporaryDirectory() as folder:
                    paths = [
                        Path(folder, f"rank {rank} of {ranks}") for rank in range(ranks)
                    ]
                    place = project and project.folder
                    pids = [
                        fork(functools.partial(act, rank), path, place)
                        for rank, path in enumerate(paths)
                    ]
                    told = [
                        f"{path.name}, status {status}:\n" + "".join(said(path))
                        for path, status in zip(paths, wait(pids), strict=True)
                        if status
                    ]
                if told:
                    pytest.fail("\n".join(told), pytrace=False)

        return wrapper

    return decorate
