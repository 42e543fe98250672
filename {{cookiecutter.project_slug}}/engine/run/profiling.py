"""--profile: a trace of some training steps, which shows where their time goes."""

import contextlib
import itertools
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function
from tqdm import tqdm

from engine import files
from engine.data.loading import Loader
from engine.ranks import distributed

WARM_UP = 5  # steps before those that are traced: the first ones start workers and pick algorithms
NAME = "rank0.pt.trace.json"  # what TensorBoard's plugin looks for
OPEN = "open it in ui.perfetto.dev, or with TensorBoard and its plugin torch-tb-profiler"
SHOWN = 5  # operations
NOTHING = contextlib.nullcontext()
_is_tracing = False
stopwatches: dict[str, contextlib.AbstractContextManager[object]] = {}  # by name of a mark


def mark(name: str) -> contextlib.AbstractContextManager[object]:
    """Return a context that a trace shows as a bar of that name, and that else a stopwatch times.

    torch itself marks the wait for a batch (`enumerate(DataLoader)`), DDP and the optimizer's step.
    """
    if _is_tracing:
        return record_function(name)
    return stopwatches.get(name, NOTHING)


def traced(
    loader: Loader, steps: int, folder: Path, device: torch.device
) -> Iterator[list[Tensor]]:
    """Yield `loader`'s batches; write a trace of `steps` optimizer steps to `folder`.

    A step lasts from the wait for its first batch to the request for that of the next one. If the
    loop is left before its end, as after a signal, nothing is written.
    """
    global _is_tracing
    passes = loader.sampler.global_batch // loader.images_per_pass
    left = len(loader) // passes
    warm_up = min(WARM_UP, max(left - steps, 1), left - 1)
    count = min(steps, left - warm_up)

    of_device = getattr(ProfilerActivity, device.type.upper(), ProfilerActivity.CPU)
    on_gpu = of_device != ProfilerActivity.CPU

    def finish(profiler: torch.profiler.profile) -> None:
        if profiler.step_num == warm_up + count:
            with files.writing(folder / NAME, parents=True) as tmp_path:
                profiler.export_chrome_trace(str(tmp_path))
            few = f" (not {steps}: the epoch has no more)" if count < steps else ""
            line = f"--profile: {count} steps{few} in {os.path.relpath(folder / NAME)}; {OPEN}"
            with tqdm.external_write_mode():  # above the progress bar
                for each in (line, *longest(profiler, on_gpu)):
                    distributed.say(each)

    activities = {ProfilerActivity.CPU, of_device}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Profiler won't be using warmup")  # in a single step
        schedule = torch.profiler.schedule(
            wait=max(warm_up - 1, 0), warmup=min(warm_up, 1), active=count, repeat=1
        )
    batches = iter(loader)
    with torch.profiler.profile(
        activities=activities, schedule=schedule, on_trace_ready=finish, record_shapes=True
    ) as profiler:
        _is_tracing = True
        try:
            number = (warm_up + count) * passes
            for i, batch in enumerate(itertools.islice(batches, number), start=1):
                yield batch
                if i % passes == 0:
                    profiler.step()
        finally:
            _is_tracing = False
    yield from batches


def longest(profiler: torch.profiler.profile, on_gpu: bool) -> list[str]:
    """Return a line for each of the operations that took most of the time of the GPU, or CPU."""
    name = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    # Kernels would count the same time twice.
    events = [event for event in profiler.key_averages() if event.device_type == DeviceType.CPU]
    times = {event.key: getattr(event, name) for event in events}  # microseconds
    if not (total := sum(times.values())):
        return ["  it has no times of the GPU: the driver may let only administrators profile"]
    return [
        f"  {times[key] / total:4.0%} of {'GPU' if on_gpu else 'CPU'} time: {key[:80]}"
        for key in sorted(times, key=lambda key: -times[key])[:SHOWN]
    ]
