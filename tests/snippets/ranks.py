"""Launching, devices and statuses, without any process group of several ranks."""

import os
import signal
import time
from pathlib import Path
from unittest.mock import Mock

import torch.distributed as dist
from forked import fork, run, wait

import main
from ddpkit.ranks import distributed, stopping
from snippets.faulty import after_step


def local_rank(flag: str, given: str | None) -> int:
    """What `flag` comes to, of main.py, where LOCAL_RANK is `given`."""
    os.environ.pop("LOCAL_RANK", None)
    if given:
        os.environ["LOCAL_RANK"] = given
    main.parse_args([flag])
    main.distributed.setup(seed=0)
    return distributed.local_rank()


def without_store() -> list[int]:
    """Statuses of a rank that trains on without its store: a signal comes later, or none."""

    gone = dist.DistNetworkError("Broken pipe")

    def act() -> None:
        distributed.setup()
        stopping.ANSWER_SECONDS = 6
        with stopping.on_signals(str):
            stopping._stopper.store = Mock(**{"check.side_effect": gone, "set.side_effect": gone})
            time.sleep(60)

    pids = [fork(act, None) for _ in range(2)]
    time.sleep(2)  # they look every half second
    began = time.monotonic()
    os.kill(pids[0], signal.SIGTERM)
    statuses = wait(pids[:1])
    assert time.monotonic() < began + 3
    return statuses + wait(pids[1:])


def killed(data: str, folder: str, *words: object) -> dict:
    """Runs of three ranks without a launcher: statuses and what they say if one is killed."""

    def act() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def train(rank: int, step: int) -> list:
        output = f"{folder}/{rank}"
        flags = ["--data", data, *words, "--output-dir", f"{output}.out-dir"]
        statuses = run(3, *flags, patch=after_step(step, act, rank), output=output)
        return [statuses, Path(f"{output}.err").read_text()]

    return {str(rank): train(rank, 2) for rank in (0, 1)}
