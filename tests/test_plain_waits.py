"""How long a device waits for images, and what fits into its memory; no device is needed."""

import copy
import io
import math
from collections import OrderedDict
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from engine.errors import UserError
from engine.ranks import memory
from engine.run import machine, transfer, waiting
from engine.run.waiting import Waiting

GPU, CPU = torch.device("cuda"), torch.device("cpu")


class Machine:
    """A host, and a device that does what it queues; by the clock of both, in seconds."""

    def __init__(self, launch: float, compute: float) -> None:
        """launch: what the host needs to queue a step. compute: what the device needs for it."""
        self.launch, self.compute = launch, compute
        self.now = self.free = 0.0  # at which the device has done what is queued
        self.host_waited = self.idle = 0.0
        machine = self

        class Event:
            def __init__(self, device: torch.device, enable_timing: bool) -> None:
                assert device == GPU
                assert enable_timing

            def record(self) -> None:
                self.at = max(machine.now, machine.free)

            def query(self) -> bool:
                return self.at <= machine.now

            def synchronize(self) -> None:
                machine.now = max(machine.now, self.at)

            def elapsed_time(self, end: "Event") -> float:
                assert self.query()
                assert end.query()
                return 1000 * (end.at - self.at)

        self.Event = Event

    def batches(self, every: float, steps: int) -> Iterator[int]:
        """Yield batches, of which one is ready in each `every` seconds."""
        for step in range(1, steps + 1):
            asked, self.now = self.now, max(self.now, every * step)
            self.host_waited += self.now - asked
            if step > 1:
                self.idle += max(0, self.now - max(asked, self.free))
            yield step

    def train(self, every: float, device: torch.device, steps: int = 200) -> Waiting:
        waits = Waiting(device)
        for _ in waits.timed(self.batches(every, steps)):
            self.now += self.launch
            self.free = max(self.now, self.free) + self.compute
            self.now = max(self.now, self.free - 4 * self.compute)  # its queue is full
            assert len(waits.others) <= 6
            assert waits.so_far() < self.idle + every + 1e-6
        return waits


@pytest.mark.parametrize(
    ("every", "launch", "compute", "host", "share"),
    [
        (0.0455, 0.0118, 0.045, 0.74, 0.01),  # the host waits, the device has work
        (0.1, 0.0118, 0.045, 0.88, 0.55 - 0.0118 / 0.1),  # input-bound
        (0.01, 0.002, 0.045, 0.0, 0.0),  # compute-bound: the host waits for the queue
        (0.0, 0.012, 0.005, 0.0, 0.0),  # bound by the host: the device waits, but not for images
    ],
)
def test_the_share_of_waiting_for_images(
    every: float,
    launch: float,
    compute: float,
    host: float,
    share: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a GPU: the time for which it has nothing to do. Of a CPU: for which the host waits."""
    gpu, cpu = Machine(launch, compute), Machine(launch, 0)
    monkeypatch.setattr(torch, "Event", gpu.Event)
    monkeypatch.setattr("time.perf_counter", lambda: cpu.now)
    waits = gpu.train(every, GPU)
    before = waits.so_far()
    total = waits.total()
    assert before <= total == pytest.approx(gpu.idle + every, abs=1e-9)  # and for the first batch
    assert total / gpu.now == pytest.approx(share, abs=0.01)
    assert gpu.host_waited / gpu.now == pytest.approx(host, abs=0.02)
    assert cpu.train(every, CPU).total() == pytest.approx(cpu.host_waited)


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
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "GPU memory"),
        (
            RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
            "GPU memory",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
            "GPU memory",
        ),
        (RuntimeError("level_zero: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"), "GPU memory"),
        (RuntimeError(f"{NCCL}Cuda failure 2 'out of memory'"), "GPU memory"),
        (
            RuntimeError(f"{NCCL}Failed to CUDA calloc 6291456 bytes"),
            "GPU memory (asked for 6291456 bytes)",
        ),
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
    found = memory.lacking(error)
    assert found.endswith(lacking)
    line = memory.explain(error)
    assert isinstance(line, UserError)
    assert str(line).startswith(f"rank 0 is out of {found}: lower --batch-size")
    memory.note_batch_size(32)
    try:
        assert f"is out of {found} with --batch-size 32: lower" in str(memory.explain(error))
    finally:
        memory.note_batch_size(None)


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
    assert memory.lacking(error) is None
    assert memory.explain(error) is None


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
    assert memory.lacking(torch.OutOfMemoryError(OUT)) == (
        "GPU memory (asked for 2.00 GiB, peak 50 of 80 GiB)"
    )
    assert memory.peak(GPU) == 50 * 2**30
    monkeypatch.setattr(torch, "get_device_module", lambda _=None: torch.cpu)  # it says nothing
    assert memory.lacking(torch.OutOfMemoryError(OUT)) == "GPU memory (asked for 2.00 GiB)"
    assert math.isnan(memory.peak(CPU))
    memory.reset_peak(CPU)


@pytest.mark.filterwarnings("ignore:Validating sparse tensor")
def test_the_copy_of_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is the same, byte for byte, as of the tensors themselves; one wait, for all."""
    waits: list[object] = []
    monkeypatch.setattr(transfer, "is_away", lambda tensor: tensor.device.type == "cpu")
    monkeypatch.setattr(torch.accelerator, "synchronize", waits.append)
    base = torch.arange(100.0)
    weights = OrderedDict(part=base[10:20], turned=base.view(10, 10).t(), empty=torch.empty(0, 3))
    weights["image"] = torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last)
    weights._metadata = {"": {"version": 7}}  # type: ignore[attr-defined]
    tied = nn.Parameter(torch.ones(5))
    dtypes = torch.bool, torch.int16, torch.bfloat16, torch.float8_e4m3fn, torch.complex128
    state = {
        "model": weights,
        "tied": [tied, tied, tied.detach()],
        "others": {str(dtype): torch.ones(3).to(dtype) for dtype in dtypes},
        "odd": [torch.ones(2, dtype=torch.cfloat).conj(), torch.eye(3).to_sparse()],
        "number": (torch.tensor(3.0), 1, "a", None, 2.5),
    }
    assert transfer.to_host({"epoch": 1, "name": "a"}) == {"epoch": 1, "name": "a"}
    copied = transfer.to_host(state)
    assert waits == [CPU]
    before = saved(copied)
    same = saved(state)
    assert before == same
    base.zero_()  # what training goes on to do
    tied.data.zero_()
    assert saved(copied) == before
    assert saved(copied) != saved(state)
    read = torch.load(io.BytesIO(before), weights_only=True)
    assert read["model"]["part"].tolist() == [*range(10, 20)]
    assert read["model"]._metadata == {"": {"version": 7}}
    assert read["model"]["image"].stride() == weights["image"].stride()
    assert read["tied"][0] is read["tied"][1]
    assert type(read["tied"][0]) is nn.Parameter
    pointers = {each.untyped_storage().data_ptr() for each in read["tied"]}
    assert len(pointers) == 1
    assert [each.dtype for each in read["others"].values()] == [*dtypes]
    assert read["odd"][1].is_sparse


def saved(state: object) -> bytes:
    file = io.BytesIO()
    torch.save(copy.copy(state), file)
    return file.getvalue()


def test_how_much_memory_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """None if much of what is free would be; and none where it is refused."""
    asked, empty = [], torch.empty

    def refuse(size: int, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
        asked.append(pin_memory)
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", refuse)
    monkeypatch.setattr(machine, "free_memory", lambda: 8000)
    assert len(transfer.allocate(900)) == 900
    assert asked == [True, False]
    assert len(transfer.allocate(1100)) == 1100
    assert asked == [True, False, False]


def test_the_line_on_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_share", lambda: 8)
    assert waiting.explain(0.09, 100, 4) is None
    assert waiting.explain(0.5, 1.9, 4) is None  # too short to say
    assert "50% of 40 s" in waiting.explain(0.5, 40, 4)
    assert "--workers 8" in waiting.explain(0.5, 40, 4)
    assert "--workers" not in waiting.explain(0.5, 40, 8)
