"""The line on waiting for images, and what fits into the memory of a device; none is needed."""

import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ddpkit.errors import UserError
from ddpkit.ranks import failures
from ddpkit.run import reporting

GPU, CPU = torch.device("cuda"), torch.device("cpu")


OUT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.2 GiB"
NCCL = "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.27.3\nLast error:\n"
PIN = "Caught {} in pin memory thread for device 0.\nTraceback ...\n"


@pytest.mark.parametrize(
    ("error", "lacking"),
    [
        (torch.OutOfMemoryError(OUT), "GPU memory (asked for 2.00 GiB)"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), "GPU memory"),
        (RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB. GPU 0"), "20.00 MiB)"),
        (RuntimeError("XPU out of memory. Tried to allocate 4.66 GiB. GPU 0"), "4.66 GiB)"),
        (
            RuntimeError(
                "MPS backend out of memory (MPS allocated: 8.05 GB, other allocations: 2.31 GB, max"
                " allowed: 9.07 GB). Tried to allocate 256 bytes on shared pool."
            ),
            "GPU memory (asked for 256 bytes)",
        ),
        (RuntimeError(f"{NCCL}Cuda failure 2 'out of memory'"), "GPU memory"),
        (MemoryError("Unable to allocate 3.0 GiB for an array"), "memory (asked for 3.0 GiB)"),
        (RuntimeError(PIN + "CUDA error: out of memory"), "memory"),
        (
            RuntimeError("alloc_cpu.cpp:127 can't allocate memory: you tried to allocate 9 bytes"),
            "memory (asked for 9 bytes)",
        ),
    ],
)
def test_errors_for_want_of_memory(error: Exception, lacking: str) -> None:
    """Each is a mistake of the user's, which no restart repeats, with the batch size if known."""
    found = failures.out_of_memory(error)
    assert found.endswith(lacking)
    line = failures._of_memory(error)
    assert isinstance(line, UserError)
    assert str(line).startswith(f"rank 0 is out of {found}: lower --batch-size")
    failures.note_batch_size(32)
    try:
        assert f"is out of {found} with --batch-size 32: lower" in str(failures._of_memory(error))
    finally:
        failures.note_batch_size(None)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a text about CUDA out of memory"),
        RuntimeError(f"{NCCL}Cuda failure 217 'peer access is not supported'"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError(PIN + "the pictures differ in size"),
    ],
)
def test_other_errors(error: Exception) -> None:
    assert failures.out_of_memory(error) is None
    assert failures._of_memory(error) is None


class Device:
    """A module as torch.cuda is one, of a GPU of 80 GiB."""

    def max_memory_allocated(self, device: object = None) -> int:
        return 50 * 2**30

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, device: int) -> "Device":
        return self

    total_memory = 80 * 2**30


def test_what_torch_says_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _=None: device)
    assert failures.out_of_memory(torch.OutOfMemoryError(OUT)) == (
        "GPU memory (asked for 2.00 GiB, peak 50 of 80 GiB)"
    )
    assert failures.peak(GPU) == 50 * 2**30
    monkeypatch.setattr(torch, "get_device_module", lambda _=None: torch.cpu)  # it says nothing
    assert failures.out_of_memory(torch.OutOfMemoryError(OUT)) == "GPU memory (asked for 2.00 GiB)"
    assert math.isnan(failures.peak(CPU))
    failures.reset_peak(CPU)


def test_what_counts_as_waiting(tmp_path: Path) -> None:
    """The time until a batch comes, not that of the step."""
    report = reporting.Reporter(tmp_path, CPU, 1, 0, is_complete=True)
    began = time.monotonic()

    def batches() -> Iterator[int]:
        for i in range(3):
            time.sleep(0.05)
            yield i

    for _ in report.progress(batches(), 3, 0):
        time.sleep(0.1)
    assert 0.15 <= report.waited <= time.monotonic() - began - 0.3


@pytest.mark.parametrize(("wait", "seconds"), [(0.09, 100), (0.5, 1.9), (0.5, 40)])
def test_the_line_on_waiting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wait: float, seconds: float
) -> None:
    """If it is much of the time, and more than a second."""
    report = reporting.Reporter(tmp_path, CPU, 1, 0, is_complete=False)
    report.began, report.record = 0, lambda *_: None
    report.end_epoch([{"epoch": 1, "data_wait": wait, "train_seconds": seconds}], is_best=False)
    said = "input-bound: 50% of 40 s were spent waiting" in capsys.readouterr().out
    assert said == (seconds == 40)
