"""What torch, DDP and a device without memory say comes as one line that tells the remedy."""

import contextlib
import os

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, said, start, wait
from torch import Tensor, nn

from ddpkit.errors import UserError
from ddpkit.ranks import failures, process, replicas
from ddpkit.run import reporting

LATE = """
import time
import ddpkit
from ddpkit.ranks import distributed
with ddpkit.explaining():
    distributed.setup(timeout=3)
    if ddpkit.rank() == 0:
        distributed.barrier()
    time.sleep(60)
"""

OUT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.2 GiB"
NCCL = "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.27.3\nLast error:\n"
PIN = "Caught {} in pin memory thread for device 0.\nTraceback ...\n"
HOST = "alloc_cpu.cpp:127 can't allocate memory: you tried to allocate 9 bytes"


@pytest.mark.parametrize(
    ("error", "lacking"),
    [
        (torch.OutOfMemoryError(OUT), "GPU memory (asked for 2.00 GiB)"),
        (
            RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"),
            "GPU memory",
        ),
        (
            RuntimeError("XPU out of memory. Tried to allocate 4.66 GiB. GPU 0"),
            "4.66 GiB)",
        ),
        (RuntimeError(f"{NCCL}Cuda failure 2 'out of memory'"), "GPU memory"),
        (
            MemoryError("Unable to allocate 3.0 GiB for an array"),
            "memory (asked for 3.0 GiB)",
        ),
        (RuntimeError(PIN + "CUDA error: out of memory"), " memory"),
        (RuntimeError(HOST), "memory (asked for 9 bytes)"),
        (RuntimeError(f"{NCCL}Cuda failure 217 'peer access is not supported'"), ""),
        (RuntimeError(PIN + "the images differ in size"), ""),
    ],
)
def test_errors_for_want_of_memory(error, lacking):
    """A mistake of the user's, which no restart repeats."""
    line = str(failures._of_memory(error) or "")
    assert (f"{lacking}: lower --batch-size" in line) if lacking else not line


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
    """The names are right with several networks, outputs and passes, and in debug mode."""
    for debug, passes in (
        (False, 1),
        (False, 2),
        (True, 1),
    ):
        if debug:
            dist.set_debug_level(dist.DebugLevel.INFO)
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
        assert line.startswith("second.weight, second.bias: no gradient"), line


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
    assert "rank 0, at late.py:8: " in err
    assert "rank 1, at late.py:9" in err
