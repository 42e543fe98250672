"""What only a machine with a GPU can tell, one part at a time. benchmarks/gpu.sh runs all of them.

input         images per second of the project's loader to the device, by the number of its workers
nvjpeg        JPEGs per second that torchcodec (or torchvision) decodes on the GPU, alone and while
              the network trains: a batch in each step, which is thrown away
memory        peak of the memory that torch has allocated on the GPU, in some training steps; each
              case in a process of its own
checkpoint    how long a save takes, and a training step with a save every 10 steps
determinism   two runs with --deterministic, and two without: do they end with the same bits?
resume        a run that is stopped in its last epoch and started again, and one that is not

Without a GPU the same happens on the CPU, which proves no more than that it runs.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import common

SECONDS = 3.0  # that a rate is measured for, at least


def measured(name: str, folder: Path, *words: object) -> Any:
    """Return what the function `name` of this file returns, called in a process of its own."""
    command = [sys.executable, __file__, "--measure", name, folder, *words]
    return json.loads(common.run(command).splitlines()[-1])


def rate(count: int, work: Callable[[], object], device: Any) -> float:
    """Return how many of what `work` does `count` of are done in a second."""
    import torch

    def synchronize() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize()

    work()
    synchronize()
    began = time.perf_counter()
    done = 0
    while time.perf_counter() - began < SECONDS:
        work()
        synchronize()
        done += count
    return done / (time.perf_counter() - began)


def load(folder: str, data: str, side: str, workers: str) -> float:
    """Return images per second from files to the device."""
    import torch
    from input import ours

    loader = ours(int(side), Path(data), 10**9, workers=int(workers))
    device = torch.device("cpu")
    if loader.pin_memory:
        device = torch.accelerator.current_accelerator()

    def epoch() -> None:
        loader.sampler.set_epoch(0)
        for _ in common.on_device(loader, device):
            pass

    return rate(len(loader) * loader.batch_size, epoch, device)


def compare_input(flags: Namespace, folder: Path) -> None:
    from flags import parse_args

    side = flags.side or parse_args(["--data", "x"]).image_size
    data = common.draw_photos(folder / "data", flags.task, flags.images)
    cases = {
        f"{workers} workers": partial(measured, "load", folder, data, side, workers)
        for workers in flags.workers
    }
    figures = common.interleave(cases, flags.repeats, flags.seconds)
    common.table(figures, "images/s", next(iter(cases)), is_rate=True)


def decode_and_train(folder: str, data: str, words: str) -> list[float]:
    """Return images per second: trained on, decoded, and both in turn beside each other."""
    import step
    import torch

    bench = step.Bench(Path(folder), words)
    count = bench.args.batch_size
    paths = sorted(Path(data).rglob("*.jpg"))
    picked = (paths[number % len(paths)].read_bytes() for number in range(count))
    files = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in picked]
    decode_jpeg = common.image_decoders().decode_jpeg
    pool = ThreadPoolExecutor(1)
    stream = torch.cuda.Stream() if bench.device.type == "cuda" else None

    def decode() -> None:
        with torch.cuda.stream(stream):  # beside the training's
            decode_jpeg(files, mode="RGB", device=bench.device)
        if stream:
            stream.synchronize()

    class Decoding(step.Feed):
        def __iter__(self) -> Iterator[tuple]:
            for batch in super().__iter__():
                following = pool.submit(decode)
                yield batch
                following.result()

    batch = bench.batch()
    loop = step.Ours(bench)
    steps = max(2, int(SECONDS / step.Feed(batch, 2).time(loop)))
    alone = rate(count, decode, bench.device)
    trained = count / step.Feed(batch, steps).time(loop)
    both = count / Decoding(batch, steps).time(loop)
    return [trained, alone, both]


def compare_nvjpeg(flags: Namespace, folder: Path) -> None:
    data = common.draw_photos(folder / "data", flags.task, flags.images)
    names = ("training alone", "decoding alone", "training and decoding")
    figures: dict[str, list[float]] = {name: [] for name in names}

    def turn() -> float:
        found = measured("decode_and_train", folder, data, flags.flags[0])
        for name, figure in zip(names, found, strict=True):
            figures[name].append(figure)
        return found[-1]

    common.interleave({"training and decoding": turn}, flags.repeats, flags.seconds)
    common.table(figures, "images/s", names[0], is_rate=True)


def peak(folder: str, words: str, case: str) -> float:
    """Return the peak of memory in bytes; without a GPU that of the process."""
    import step
    import torch

    bench = step.Bench(Path(folder), words)
    build = bench.loops()[case]
    step.Feed(bench.batch(), 3).time(build())
    if bench.device.type != "cpu":
        return torch.get_device_module(bench.device).max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def compare_memory(flags: Namespace, folder: Path) -> None:
    rows = [("case", "peak, MiB", "of the bare loop's")]
    for words in flags.flags:
        peaks = {}
        for case in ("bare loop", "bare DDP loop", "ours"):
            peaks[case] = measured("peak", folder, words, case)
            share = f"{peaks[case] / peaks['bare loop']:.2f}"
            rows.append((f"{case}, `{words}`", f"{peaks[case] / 2**20:.0f}", share))
    common.markdown(rows)


def save(folder: str, words: str) -> list[float]:
    """Return MiB; seconds of a save of last.pt, of both; of a step without and with saves."""
    import step
    import torch

    bench = step.Bench(Path(folder), words)
    ours = step.Ours(bench)
    feed = step.Feed(bench.batch(), 30)
    found = [feed.time(ours)]

    def seconds(run: Any, is_best: bool) -> float:
        if bench.device.type != "cpu":
            torch.accelerator.synchronize()
        began = time.perf_counter()
        run._write(is_best)
        return time.perf_counter() - began

    with ours.run(feed) as run:
        for is_best in (True, False):
            seconds(run, is_best)  # the first is read back
            turns = [seconds(run, is_best) for _ in range(3)]
            found.insert(0, statistics.median(turns))
        size = (run.folder.path / "last.pt").stat().st_size
    found.append(feed.time(partial(ours, save_every=10)))
    return [size / 2**20, *found]


def compare_checkpoint(flags: Namespace, folder: Path) -> None:
    times = ("save last.pt, s", "last.pt and best.pt, s", "held up by a save, s")
    rows = [("network", "MiB", *times)]
    for words in flags.flags:
        size, last, both, step, with_saves = measured("save", folder, words)
        held_up = f"{10 * (with_saves - step):.3f}"
        rows.append(
            (f"`{words}`", f"{size:.0f}", f"{last:.3f}", f"{both:.3f}", held_up)
        )
    common.markdown(rows)


def train(
    project: Path, output: Path, words: list, stop_when: Path | None = None
) -> None:
    """Train with the project's launch.sh; once `stop_when` exists, stop it with SIGTERM."""
    command = ["bash", project / "launch.sh", "--output-dir", output]
    command += ["--weights", "none", *words]
    command = list(map(str, command))
    process = subprocess.Popen(
        command,
        env={**os.environ, "NPROC": "1", "PYTHON": sys.executable},
        stdout=sys.stderr,
        start_new_session=True,
    )
    until = time.monotonic() + common.TIMEOUT
    try:
        while process.poll() is None and time.monotonic() < until:
            if stop_when and stop_when.exists():
                process.terminate()
                break
            time.sleep(0.05)
        status = process.wait(until - time.monotonic())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if status != (75 if stop_when else 0):
        sys.exit(f"{' '.join(command)}: ended with {status}")


def bits(output: Path) -> dict[str, Any]:
    import torch

    state = torch.load(output / "last.pt", map_location="cpu", weights_only=True)
    return {name: state[name] for name in ("step", "model", "optimizer", "sums")}


def are_equal(one: Any, other: Any) -> bool:
    import torch
    from torch.utils._pytree import tree_flatten

    values, form = tree_flatten(one)
    others, form_of_other = tree_flatten(other)
    return form == form_of_other and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(values, others, strict=True)
    )


def speed(output: Path) -> float:
    """Return images per second of the last epoch."""
    return float(common.rows(output)[-1]["img_per_s"])


def compare_determinism(flags: Namespace, folder: Path) -> None:
    data = common.draw_photos(folder / "data", flags.task, flags.images)
    words = ["--data", data, "--epochs", 2, *flags.flags[0].split()]
    rows = [("", "images/s", "the same bits twice")]
    for name in ("without", "--deterministic"):
        if name != "without":
            words.append(name)
        outputs = [folder / f"{name}-{turn}" for turn in (1, 2)]
        for output in outputs:
            train(folder / "project", output, words)
        same = "yes" if are_equal(*map(bits, outputs)) else "no"
        rows.append((name, f"{statistics.mean(map(speed, outputs)):.4g}", same))
    common.markdown(rows)


def compare_resume(flags: Namespace, folder: Path) -> None:
    project = folder / "project"
    whole = folder / "whole"
    stopped = folder / "stopped"
    data = common.draw_photos(folder / "data", flags.task, flags.images)
    words = ["--data", data, "--epochs", 3, "--deterministic"]
    words += ["--save-every", 2, *flags.flags[0].split()]
    train(project, whole, words)
    train(project, stopped, words, stop_when=stopped / "last-1.pt")
    at = bits(stopped)["step"]
    train(project, stopped, words)
    of_whole = bits(whole)
    of_stopped = bits(stopped)
    same = "yes" if are_equal(of_whole, of_stopped) else "no"
    head = ("stopped after step", "of", "the same bits as without a stop")
    common.markdown([head, (str(at), str(of_whole["step"]), same)])
    if same == "no":
        sys.exit("a resumed run does not end with the bits of one that was not stopped")


PARTS: dict[str, Callable[[Namespace, Path], None]] = {
    "input": compare_input,
    "nvjpeg": compare_nvjpeg,
    "memory": compare_memory,
    "checkpoint": compare_checkpoint,
    "determinism": compare_determinism,
    "resume": compare_resume,
}


def measure(name: str, folder: str, *words: str) -> None:
    sys.path.insert(0, str(Path(folder, "project")))
    print(f"\n{json.dumps(globals()[name](folder, *words))}")
    sys.stdout.flush()
    os._exit(0)  # threads of a peer may be waiting


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("part", choices=PARTS)
    add("--flags", nargs="+", default=[""], help="of main.py, each case in quotes")
    add("--images", type=int, default=1000, help="that are drawn; default: 1000")
    add("--side", type=int, help="of the crops; default: the project's own")
    workers = [2, 4, 8, 16]
    add("--workers", type=int, nargs="+", default=workers, help="default: 2 4 8 16")
    flags = parser.parse_args(argv)
    with common.generated(flags.task) as folder:
        common.say_machine(flags)
        PARTS[flags.part](flags, folder)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(*sys.argv[2:])
    else:
        main()
