"""What torch, DDP and a device without memory say comes as one line that tells the remedy."""

import ast
import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from generated import ROOT
from ranks import on_ranks, said, start, wait
from torch import Tensor, nn

from ddpkit.errors import UserError
from ddpkit.ranks import failures, process, replicas
from ddpkit.vision import reporting

LATE = """
import time
import torch
import ddpkit
from ddpkit.ranks import distributed
def main():
    here = distributed.rendezvous(timeout=3)
    torch.distributed.init_process_group(
        here.backend, None, here.timeout, here.world_size, here.rank, here.store
    )
    if torch.distributed.get_rank() == 0:
        distributed.barrier()
    time.sleep(60)
ddpkit.run_main(main)
"""

OUT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.2 GiB"
NCCL = "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.27.3\nLast error:\n"
PIN = "Caught {} in pin memory thread for device 0.\nTraceback ...\n"
HOST = "alloc_cpu.cpp:127 can't allocate memory: you tried to allocate 9 bytes"


@pytest.mark.parametrize(
    ("error", "lacking"),
    [
        (torch.OutOfMemoryError(OUT), OUT),
        (
            RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"),
            "CUDA error: out of memory",
        ),
        (
            RuntimeError("XPU out of memory. Tried to allocate 4.66 GiB. GPU 0"),
            "XPU out of memory. Tried to allocate 4.66 GiB. GPU 0",
        ),
        (
            RuntimeError(f"{NCCL}Cuda failure 2 'out of memory'"),
            "Cuda failure 2 'out of memory'",
        ),
        (
            MemoryError("Unable to allocate 3.0 GiB for an array"),
            "Unable to allocate 3.0 GiB for an array",
        ),
        (MemoryError(), "MemoryError"),
        (
            RuntimeError(PIN + "CUDA error: out of memory"),
            "CUDA error: out of memory",
        ),
        (RuntimeError(HOST), HOST),
        (RuntimeError(f"{NCCL}Cuda failure 217 'peer access is not supported'"), ""),
        (RuntimeError(PIN + "the images differ in size"), ""),
    ],
)
def test_errors_for_want_of_memory(error, lacking):
    """A mistake of the user's, which no restart repeats."""
    line = str(failures._of_memory(error) or "")
    assert (f"memory ({lacking}): use smaller batches" in line) if lacking else not line


@pytest.mark.parametrize("found", ["address for: lo", "interface for: [127.0.0.1]"])
def test_no_loopback(found):
    """As torch says it with RANK, and without."""
    line = failures._of_torch(
        RuntimeError(f"device.cc:84] ifa != nullptr. Unable to find {found}")
    )
    assert isinstance(line, UserError)
    assert "GLOO_SOCKET_IFNAME" in str(line)


class Heads(nn.Module):
    """Two outputs; layers with numbers for names, one of them frozen, precede the second."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
        )
        self.first = nn.Linear(3, 2)
        self.second = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return self.first(x), self.second(x)


@on_ranks(1)
def test_weights_without_a_gradient():
    """The names are right with several networks, outputs and passes."""
    with failures.one_line_errors():
        assert dist.get_debug_level() == dist.DebugLevel.INFO
    for passes in 1, 2:
        networks = [nn.parallel.DistributedDataParallel(Heads()) for _ in range(2)]
        for ddp_model in networks:
            replicas.prepare_network(ddp_model)
        # after the start, which DDP ignores
        networks[1].module.body[1].requires_grad_()
        with pytest.raises(RuntimeError) as error:
            for step in range(4):
                is_last = (step + 1) % passes == 0
                for ddp_model in networks:
                    with contextlib.nullcontext() if is_last else ddp_model.no_sync():
                        first, second = ddp_model(torch.ones(2, 3))
                        loss = first.sum()
                        if ddp_model is networks[0]:
                            loss = loss + second.sum()
                        loss.backward()
        line = str(failures._of_torch(error.value))
        assert line.startswith("second.bias, second.weight: no gradient"), line


def test_debug_mode_that_crashes(project, few, tmp_path):
    def patch() -> None:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        dist.set_debug_level_from_env()

    done = project.train(few, tmp_path, patch=patch).ok()
    assert done.err.count("\n") == 1
    assert "DETAIL crashes DDP with gloo: using INFO" in done.err


@pytest.mark.parametrize(
    ("wait", "seconds"),
    [
        (0.09, 100),
        (0.5, 1.9),
        (0.5, 40),
    ],
)
def test_the_line_on_waiting(wait, seconds, tmp_path, capsys):
    """If it is much of the time, and more than a second."""
    report = reporting.Reporter(tmp_path, epochs=1)
    report.began = 0
    report.record = lambda *_: None
    report.log_epoch({"data_wait": wait, "train_seconds": seconds})
    said = "input-bound: 50% of 40 s" in capsys.readouterr().out
    assert said == (seconds == 40)


# flags and files of the project, which another script has not; not those of docker and srun
OF_THE_PROJECT = re.compile(
    r"--(?!help|ipc|shm|pids|ntasks)[a-z]|run\.\w|(model|dataset|predict)\.py"
)


def test_words_for_any_script():
    """What ranks say is for `Checkpoints` in a script of one's own, too."""
    found = []
    for path in Path(failures.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        docs = [
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        ]
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and id(node) not in docs:
                found.append(str(node.value))
    of_flags = ("--dist-timeout", "--debug")  # that the project's door has read
    assert not [
        text
        for text in found
        if OF_THE_PROJECT.search(text) and not text.startswith(of_flags)
    ]


@pytest.mark.parametrize(
    ("left", "is_done", "what"),
    [
        ("threading.Thread(target=time.sleep, args=(60,), name='mine')", True, "mine"),
        ("atexit.register(time.sleep, 60)", False, "an exit handler"),
    ],
)
def test_a_rank_that_does_not_end(tmp_path, left, is_done, what):
    """Though its script has: it is named, and then ended; with status 0 if all was done."""
    script = f"""
import atexit, sys, threading, time
from ddpkit.ranks import failures, handlers, process
handlers.install_handlers()
with failures.one_line_errors():
    failures.distributed.Group.timeout = failures.distributed.timedelta(seconds=4)
    left = {left}
    if {is_done}:
        left.start()
    else:
        sys.exit("no")
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=env,
        timeout=50,
    )
    assert done.returncode == (0 if is_done else 1)
    line = (
        rf"rank 0 \(process \d+\) has not exited .*: {what} still runs, for at most 4 s"
    )
    assert re.search(f"^{line}$", done.stderr, re.MULTILINE)


def test_where_a_rank_has_timed_out(tmp_path):
    """At the line of its collective, not where the error is handled."""
    script = tmp_path / "late.py"
    script.write_text(LATE)

    def patch() -> None:
        process.project = lambda: tmp_path

    output = tmp_path / "said"
    pids = start(2, str(script), [], output, tmp_path, patch)
    assert wait(pids) == [1, 1]
    err = said(output)[1]
    assert "rank 0, at late.py:12: " in err
    assert "rank 1, at late.py:13" in err
