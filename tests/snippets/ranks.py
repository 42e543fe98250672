"""Launching, devices and statuses, without any process group of several ranks."""

import functools
import gc
import os
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from forked import fork, run, wait

import engine
import main
from engine.errors import UserError
from engine.ranks import distributed, failures, stopping
from snippets.faulty import after_step


def local_rank(flag: str, given: str | None) -> int:
    """What `flag` comes to, of main.py, where LOCAL_RANK is `given`."""
    os.environ.pop("LOCAL_RANK", None)
    if given:
        os.environ["LOCAL_RANK"] = given
    main.parse_args([flag])
    engine.setup(seed=0)
    return distributed.local_rank()


def collects() -> bool:
    """Whether Python's garbage collector works in a process that has imported main.py."""
    return gc.isenabled()


def without_store() -> list[int]:
    """Statuses of a rank that trains on without its store: a signal comes later, or none."""

    def gone() -> None:
        raise dist.DistNetworkError("Broken pipe")

    def act() -> None:
        distributed.setup()
        failures.status_of_failure = gone
        stopping.ANSWER_SECONDS = 6
        with stopping.on_signals(str):
            time.sleep(60)

    pids = [fork(act, None) for _ in range(2)]
    time.sleep(2)  # they look every half second
    began = time.monotonic()
    os.kill(pids[0], signal.SIGTERM)
    statuses = wait(pids[:1])
    assert time.monotonic() < began + 3
    return statuses + wait(pids[1:])


def as_ray(output: str, flags: list[str]) -> list:
    """Statuses of two processes that train twice, in a thread, in a group of their own, and say."""
    server = socket.create_server(("127.0.0.1", 0))
    address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    server.close()

    def train(rank: int) -> None:
        main.main([*flags, "--resume", "never"])
        main.main([*flags, "--resume", "never", "--dist-timeout", "9"])
        assert distributed.timeout() == 77
        dist.barrier()
        print("left as it was", rank, flush=True)
        main.main([*flags, "--epochs", "none"])

    def act(rank: int) -> None:
        names = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
        for same, value in zip(names, (rank, 2), strict=True):
            os.environ.update(dict.fromkeys(same, str(value)))
        options = {"rank": rank, "world_size": 2, "timeout": timedelta(seconds=77)}
        dist.init_process_group("gloo", init_method=address, **options)
        with ThreadPoolExecutor(1) as pool:
            error = pool.submit(train, rank).exception()
        print(error, file=sys.stderr)
        assert isinstance(error, UserError)

    statuses = wait([fork(functools.partial(act, rank), output) for rank in range(2)])
    return [statuses, *(Path(f"{output}.{end}").read_text() for end in ("out", "err"))]


def under_mpirun(output: str, rank: int, *words: str) -> list:
    """The status of one of two ranks that mpirun starts here, and what it says on stderr."""

    def patch() -> None:
        env = {"SIZE": 2, "LOCAL_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank}
        os.environ.update({f"OMPI_COMM_WORLD_{name}": str(env[name]) for name in env})

    statuses = run(1, *words, patch=patch, output=output)
    return [statuses, Path(f"{output}.err").read_text()]


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
