"""The memory of this rank's device: its peak, and errors for want of it, whoever raises them."""

import math
import re
from collections.abc import Callable, Iterable

import torch

from engine.errors import UserError, shorten
from engine.ranks import names

GIB = 2**30
# Of CUDA, HIP, XPU and MPS; of cuDNN, cuBLAS and their like; of CUDA's driver, of XPU's; of nccl
ON_DEVICE = re.compile(
    r"\b(CUDA|HIP|XPU|MPS)\b.{0,20}out of memory|_ALLOC(ATION)?_FAILED|"
    r"CUDA_ERROR_OUT_OF_MEMORY|UR_RESULT_ERROR_OUT_OF_(DEVICE_MEMORY|RESOURCES)|"
    r"NCCL error(?s:.*)('out of memory'|Failed to CUDA \w+ \d+ bytes)"
)
ON_HOST = re.compile(r"alloc_cpu|(?s:in pin memory thread.*out of memory)")
ASKED = re.compile(r"(?:[tT]ried|Unable) to allocate ([\d.]+ ?\w+)|Failed to CUDA \w+ (\d+ bytes)")

_batch_size: list[int] = []
_reading: list[Callable[[], list[str]]] = []  # the names of the samples that are evaluated


def note_batch_size(size: int | None) -> None:
    """Note the batch size of training, which begins, for errors."""
    _batch_size[:] = [size] if size else []
    note_samples()  # evaluation may have been left early


def note_samples(name: Callable[[int], str] | None = None, indices: Iterable[int] = ()) -> None:
    """Note which samples are evaluated, for errors; none without arguments."""
    _reading[:] = [lambda: [name(int(index)) for index in indices]] if name else []


def peak(device: torch.device) -> float:
    """Return the most bytes that tensors have taken since the last reset_peak().

    NaN on a CPU, and where torch does not count them.
    """
    count = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return float(count(device)) if count else math.nan


def reset_peak(device: torch.device) -> None:
    reset = getattr(torch.get_device_module(device), "reset_peak_memory_stats", None)
    if reset:
        reset(device)


def explain(error: Exception) -> UserError | None:
    """Return a line if `error` is for want of memory."""
    if not (found := lacking(error)):
        return None
    if _reading:
        samples = _reading[0]()
        size = f" in a batch of {len(samples)}" if len(samples) > 1 else ""
        remedy = "lower --batch-size, --image-size or, for segmentation, --tile"
        return UserError(f"{shorten(samples)}: out of {found}{size}; {remedy}")
    size = f" with --batch-size {_batch_size[0]}" if _batch_size else ""
    remedy = "--image-size or --workers, or use smaller images"
    if found.startswith("GPU"):
        remedy = "or --image-size"
    return UserError(
        f"{names.own_rank()} is out of {found}{size}: lower --batch-size (--accumulate keeps the "
        f"global batch), {remedy}"
    )


def lacking(error: Exception) -> str | None:
    """Return the kind of memory, and what is known of it, if `error` is for want of memory.

    Such as "GPU memory (asked for 2.00 GiB, peak 75.3 of 79.2 GiB)".
    """
    text = str(error)
    on_host = isinstance(error, MemoryError) or ON_HOST.search(text)
    on_device = isinstance(error, RuntimeError) and ON_DEVICE.search(text)
    if not (on_host or on_device or isinstance(error, torch.OutOfMemoryError)):
        return None
    asked = ASKED.search(text)
    known = [f"asked for {asked[1] or asked[2]}"] if asked else []
    if not on_host:
        known += _usage()
    kind = "memory" if on_host else "GPU memory"
    return f"{kind} ({', '.join(known)})" if known else kind


def _usage() -> list[str]:
    """Return such as ["peak 75.3 of 79.2 GiB"], of this rank's GPU; [] if that is not known."""
    module = torch.get_device_module()
    if not (count := getattr(module, "max_memory_allocated", None)) or not (most := count()):
        return []
    total = module.get_device_properties(module.current_device()).total_memory
    return [f"peak {most / GIB:.3g} of {total / GIB:.3g} GiB"]
