"""Runs a project's scripts on ranks that are forks of this process, which has imported torch.

A run takes a second or two in this way; a launcher, and torch imported by each rank, take eight.
The ranks run main.py as a script, in a process group of their own, and end as it says. Started in
the project's folder, by a function that imports this, or alone: then it obeys lines on stdin, which
may name a function of snippets/ to call instead.
"""

import functools
import gc
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

sys.path.insert(0, os.getcwd())
import matplotlib.figure  # noqa: F401
import torch
import torch.utils.tensorboard
from calling import call
from ports import free_port

import main  # noqa: F401  with all that it imports, and what rank 0 imports late
from ddpkit.run import pictures, reporting

torch.set_num_threads(1)
gc.freeze()  # the forks' garbage collections need not look at all that is imported
Patch = Callable[[], object]


def nothing() -> None:
    pass


def leave_out_drawings() -> None:
    """They take more than half of the time of a short run."""
    pictures.draw_curves = reporting.Reporter.images = reporting.report = Mock()
    reporting.are_drawn = lambda *_: True


def start(
    ranks: int,
    *flags: object,
    script: str = "main.py",
    patch: Patch = nothing,
    output: str | None = None,
    draws: bool = True,
) -> list[int]:
    """Start `script` on `ranks` ranks, each after a call of `patch`; return their process ids.

    script: a file, or a command such as "ddpkit check".

    One rank is started as `python main.py` is. What they print goes to `output`.out and .err.
    Without `draws` they make no images of what they have done.
    """
    port = free_port()

    def begin(rank: int) -> None:
        if ranks > 1:
            names = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
            for same, value in zip(names, (rank, ranks), strict=True):
                os.environ.update(dict.fromkeys(same, str(value)))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        sys.argv = [script, *map(str, flags)]
        if not draws:
            leave_out_drawings()
        patch()
        if script.startswith("ddpkit "):  # a command: python -m ddpkit NAME
            sys.argv = [*script.split(), *map(str, flags)]
            runpy.run_module("ddpkit.__main__", run_name="__main__")
        else:
            runpy.run_path(script, run_name="__main__")

    return [fork(functools.partial(begin, rank), output) for rank in range(ranks)]


def fork(act: Callable[[], object], output: str | None) -> int:
    """Have a fork call `act`, which ends as a script would; return its process id."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        for stream, end in ((1, "out"), (2, "err")) if output else ():
            how = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            os.dup2(os.open(f"{output}.{end}", how), stream)
        act()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait(pids: list[int], seconds: float = 120) -> list[int]:
    """Return the statuses of the ranks; those that are left after `seconds` are killed."""
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


def run(ranks: int, *flags: object, **options: Any) -> list[int]:
    return wait(start(ranks, *flags, **options))


if __name__ == "__main__":
    for line in sys.stdin:
        order = json.loads(line)
        output = order["output"]
        if "call" in order:
            act = functools.partial(call, order["call"], order["args"], f"{output}.value")
            pids = [fork(act, output)]
        else:
            options = {name: order[name] for name in ("script", "draws", "output")}
            pids = start(order["ranks"], *order["flags"], **options)
        print(json.dumps(wait(pids, 240)), flush=True)
    os._exit(0)  # the interpreter's own way takes a second
