"""Computes on the CPU what "cuda" tensors hold: the made-up GPU's memory is the host's.

Operations on such tensors come here before torch picks a kernel. Those that only make, view or copy
tensors are left to torch, whose allocators and copies ask the made-up runtime, which counts them.
"""

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

NAMES = ["h2d", "h2d_bytes", "h2d_pageable", "d2h", "d2d", "mallocs", "pinned_mallocs"]
NAMES += ["stream_waits", "event_waits", "device_waits", "collectives", "kernels"]
NATIVE = {  # torch's own, that launch no kernel
    "empty",
    "empty_strided",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "set_",
    "detach",
    "alias",
    "lift_fresh",
    "as_strided",
    "view",
    "_unsafe_view",
    "_reshape_alias",
    "split_with_sizes",
    "unbind",
    "record_stream",
    "is_pinned",
    "pin_memory",
    "_pin_memory",
    "_local_scalar_dense",  # .item()
}
# for a size, or a value that decides what they do; what a GPU's kernels read back
WAITING = {
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "histc",
    "equal",
    "repeat_interleave",
    "multinomial",
    "_ctc_loss",
}
MULTIPLYING = {"convolution", "convolution_backward", "mm", "addmm", "bmm", "baddbmm"}
HALVES = (torch.float16, torch.bfloat16)
library = ctypes.CDLL(None)  # preloaded
hidden_waits = 0


def counts() -> dict[str, int]:
    """Return what was asked of the GPU by this process so far."""
    found = {
        name: ctypes.c_long.in_dll(library, f"count_{name}").value for name in NAMES
    }
    found["stream_waits"] += hidden_waits
    return found


def start() -> None:
    """Emulate from now on, in this thread and in those that it starts."""
    torch.backends.cudnn.enabled = False  # torch asks it before it comes here
    Emulation().__enter__()
    run = threading.Thread.run

    def run_emulated(self: threading.Thread) -> None:
        with Emulation():
            run(self)

    threading.Thread.run = run_emulated  # type: ignore[method-assign]


def for_each(value: Any, act: Callable[[Tensor], Any]) -> Any:
    """Return `value` with what `act` returns in place of each tensor."""
    if isinstance(value, Tensor):
        return act(value)
    if type(value) in (tuple, list):
        return type(value)([for_each(each, act) for each in value])
    if isinstance(value, dict):
        return {name: for_each(each, act) for name, each in value.items()}
    return value


@functools.cache
def is_composite(func: Any) -> bool:
    """Return whether an operation is made of others."""
    key = "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def host(tensor: Tensor) -> Tensor:
    """Return a CPU tensor in the same memory."""
    if not tensor.is_cuda:
        return tensor
    size = tensor.untyped_storage().nbytes()
    if size == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * size).from_address(tensor.untyped_storage().data_ptr())
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(
        storage, tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def on_gpu(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a CPU tensor in new memory of `device`."""
    like = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
    )
    if tensor.numel():
        host(like).copy_(tensor)
    return like


@contextlib.contextmanager
def random_numbers(device: torch.device) -> Iterator[None]:
    """Draw from the GPU's generator, and leave the CPU's as it is."""
    generator = torch.cuda.default_generators[device.index]
    before = torch.get_rng_state()
    seed = generator.initial_seed()
    offset = generator.get_offset()
    torch.default_generator.manual_seed(
        (seed + 0x9E3779B97F4A7C15 * (offset + 1)) % 2**63
    )
    yield
    generator.set_offset(offset + 4)
    torch.set_rng_state(before)


class Emulation(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # which imports it, for seconds
        return False

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self,
        func: Any,
        types: Any,
        args: tuple = (),
        kwargs: dict | None = None,
    ):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors: list[Tensor] = []
        for_each((args, kwargs), tensors.append)
        devices = {each.device for each in tensors if each.is_cuda}
        asked = kwargs.get("device")
        if not devices and (asked is None or torch.device(asked).type != "cuda"):
            return func(*args, **kwargs)
        if func.namespace == "c10d":  # its kernels fill what no one reads
            library.allow_kernels(1)
            try:
                return func(*args, **kwargs)
            finally:
                library.allow_kernels(0)
        if name not in NATIVE and is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        if func.is_view or name in NATIVE:
            return func(*args, **kwargs)
        if name == "_to_copy":
            with self:
                return convert(*args, **kwargs)
        if name == "copy_" and args[0].device != args[1].device:
            with self:
                return copy(func, *args, **kwargs)
        if len(devices) > 1 or any(not each.is_cuda and each.ndim for each in tensors):
            where = [(tuple(each.shape), str(each.device)) for each in tensors]
            raise RuntimeError(
                f"{func}: Expected all tensors to be on the same device: {where}"
            )
        device = next(iter(devices), None) or torch.device(asked)
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return compute(func, device, args, kwargs)


def compute(func: Any, device: torch.device, args: tuple, kwargs: dict) -> Any:
    """Return what `func` returns on the CPU, in new memory of `device` or in its arguments'."""
    global hidden_waits
    name = func.overloadpacket.__name__
    by_mask = name in ("index", "index_put_", "_index_put_impl_") and any(
        each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
    )
    hidden_waits += by_mask or name in WAITING
    library.catch_up(ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device.index)))
    known: dict[int, tuple[Tensor, Tensor]] = {}

    def alias(tensor: Tensor) -> Tensor:
        same = host(tensor)
        known[id(same)] = same, tensor
        return same

    def give_back(result: Tensor) -> Tensor:
        return known[id(result)][1] if id(result) in known else on_gpu(result, device)

    args, kwargs = for_each((args, kwargs), alias)
    halves = (
        [t.dtype for t, _ in known.values() if t.dtype in HALVES]
        if name in MULTIPLYING
        else []
    )
    if halves:  # a CPU takes its time for them
        wide = for_each(
            args, lambda tensor: tensor.float() if tensor.dtype in HALVES else tensor
        )
        return for_each(
            func(*wide, **kwargs), lambda each: on_gpu(each.to(halves[0]), device)
        )
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    if kwargs.get("generator") is not None:
        kwargs["generator"] = None
    draws = torch.Tag.nondeterministic_seeded in func.tags
    with random_numbers(device) if draws else contextlib.nullcontext():
        return for_each(func(*args, **kwargs), give_back)


def convert(
    source: Tensor, memory_format: torch.memory_format | None = None, **options: Any
) -> Tensor:
    """Return a copy, as torch makes one: new memory, and copy_."""
    non_blocking = options.pop("non_blocking", False)
    options = {name: value for name, value in options.items() if value is not None}
    like = {"memory_format": memory_format or torch.preserve_format, **options}
    return torch.empty_like(source, **like).copy_(source, non_blocking)


def copy(
    func: Any, target: Tensor, source: Tensor, non_blocking: bool = False
) -> Tensor:
    """Copy between host and device, as torch does: in one piece, of one dtype and layout."""
    is_alike = target.dtype == source.dtype and target.shape == source.shape
    if is_alike and (target.stride() == source.stride() or target.numel() < 2):
        with _disable_current_modes():
            return func(target, source, non_blocking)
    piece = source.to(target.dtype).expand(target.shape).contiguous()
    whole = torch.empty_like(piece, device=target.device)
    target.copy_(copy(func, whole, piece, non_blocking))
    return target
