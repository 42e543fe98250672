"""Run a project's main.py on ranks that are forks of this process, which has imported torch.

Seconds faster than a launcher. A program that is started in the project's folder with this one's folder
on its path; the ranks run main.py as a script, in a real process group.
"""

import hashlib
import json
import os
import random
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, os.getcwd())
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as main.py has it
import torch

torch.set_num_threads(1)
import main  # noqa: F401  with all that it imports, and what rank 0 imports late
import matplotlib.figure  # noqa: F401
import torch.utils.tensorboard  # noqa: F401

SPEED = ("img_per_s", "train_seconds")


def start(ranks: int, *flags: object, patch: Callable[[], None] = lambda: None) -> list[int]:
    """Start main.py with `flags` on `ranks` ranks, each after a call of `patch`; return their ids."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(ranks):
        if pid := os.fork():
            pids.append(pid)
            continue
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({name: str(value) for name, value in places.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        sys.argv = ["main.py", *map(str, flags)]
        try:
            patch()
            runpy.run_path("main.py", run_name="__main__")
            status = 0
        except SystemExit as error:
            status = int(error.code or 0)
        except BaseException:
            import traceback

            traceback.print_exc()
            status = 1
        finally:
            sys.stdout.flush()
            os._exit(status)
    return pids


def wait(pids: list[int], seconds: float = 120) -> list[int]:
    """Return the statuses of the ranks; end all that are left after `seconds`, or by another's end."""
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while len(statuses) < len(pids):
        for pid in set(pids) - statuses.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for pid in set(pids) - statuses.keys():
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [statuses[pid] for pid in pids]


def run(ranks: int, *flags: object, **kwargs: Callable[[], None]) -> list[int]:
    return wait(start(ranks, *flags, **kwargs))


def digest(folder: Path) -> str:
    """Return a checksum of all that a run has come to, its speed aside."""
    state = torch.load(Path(folder) / "last.pt", weights_only=True)
    sums = hashlib.sha256()

    def add(value: object) -> None:
        if isinstance(value, torch.Tensor):
            sums.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in value:
                if key not in (*SPEED, "args"):
                    sums.update(repr(key).encode())
                    add(value[key])
        elif isinstance(value, list | tuple):
            for part in value:
                add(part)
        else:
            sums.update(repr(value).encode())

    add(state)
    return sums.hexdigest()
