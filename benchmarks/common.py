"""What the benchmarks share: a project, drawn images, turns, tables."""

import argparse
import contextlib
import csv
import math
import multiprocessing
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))

from foreground import restore_signals  # noqa: E402

TEMPLATE = ROOT / "{{cookiecutter.project_slug}}"
TASKS = ("classification", "segmentation")
CLASSES = 4
VOID = 255
DISTINCT = 1000  # images that are drawn at most; further ones are links to these
PEERS = ("simplejpeg", "torchcodec", "timm", "accelerate", "lightning")
TIMEOUT = 600  # seconds, of any process that is started here
BEGAN = time.monotonic()


def parser(
    description: str | None, tasks: Sequence[str] = TASKS
) -> argparse.ArgumentParser:
    """Return an argparse parser with the flags that all benchmarks have.

    From here on SIGTERM ends a benchmark as Ctrl-C does, with all that it started.
    """
    restore_signals()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--repeats", type=int, default=5, help="turns of each case; default: 5"
    )
    made.add_argument(
        "--seconds", type=float, default=math.inf, help="after these, no new turn"
    )
    made.add_argument(
        "--task", choices=tasks, default=tasks[0], help=f"default: {tasks[0]}"
    )
    return made


@contextlib.contextmanager
def generated(task: str) -> Iterator[Path]:
    """Yield a temporary folder that holds `project`, one of `task`, whose modules can be imported.

    Laid out as the template's post_gen hook does; files whose names cookiecutter fills in are not
    needed to run it.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        project = Path(name, "project")
        skip = shutil.ignore_patterns("tasks", "__pycache__", ".*_cache")
        shutil.copytree(TEMPLATE, project, ignore=skip)
        shutil.copytree(
            TEMPLATE / "tasks" / task, project, ignore=skip, dirs_exist_ok=True
        )
        sys.path.insert(0, str(project))
        yield Path(name)


def draw_photos(
    folder: Path,
    task: str,
    count: int,
    side: tuple[int, int] = (500, 375),
    seed: int = 0,
) -> Path:
    """Draw `count` training images and 8 for validation, as a project of `task` expects them.

    side: (width, height). Spectrum 1/f, as photographs have it, with deviations of 50 in luma and
    15 in chroma: about 100 KB each at 500 x 375. Beyond DISTINCT they are links.
    """
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [
            pool.submit(_draw, folder, task, part, number, side, seed)
            for part, total in (("train", min(count, DISTINCT)), ("val", 8))
            for number in range(total)
        ]
        drawn = [job.result() for job in jobs]
    for number in range(DISTINCT, count):
        for path in drawn[number % DISTINCT]:
            os.link(path, path.with_stem(f"{number:06d}"))
    if task == "segmentation":
        names = "\n".join(f"class{number}" for number in range(CLASSES))
        (folder / "classes.txt").write_text(names + "\n")
    return folder


def _draw(
    folder: Path, task: str, part: str, number: int, side: tuple[int, int], seed: int
) -> list[Path]:
    rng = np.random.default_rng((seed, part == "val", number))
    width, height = side
    distance = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    distance[0, 0] = np.inf  # no constant part
    noise = np.fft.rfft2(rng.standard_normal((3, height, width)))
    planes = np.fft.irfft2(noise / distance, (height, width))
    planes *= np.array([50, 15, 15])[:, None, None] / planes.std((1, 2), keepdims=True)
    pixels = (128 + planes).clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
    image = Image.fromarray(np.ascontiguousarray(pixels), "YCbCr").convert("RGB")
    below = f"class{number % CLASSES}" if task == "classification" else "images"
    paths = [folder / part / below / f"{number:06d}.jpg"]
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    image.save(paths[0], quality=(80, 90)[number // CLASSES % 2])
    if task == "segmentation":
        paths.append(folder / part / "masks" / f"{number:06d}.png")
        paths[1].parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(rng.random((6, 8), np.float32))
        smooth = np.array(coarse.resize(side, Image.Resampling.BICUBIC))
        smooth = CLASSES * smooth.clip(0, 0.999)
        # void where one begins
        blobs = np.where(smooth % 1 < 0.05, VOID, smooth.astype(np.uint8))
        Image.fromarray(blobs.astype(np.uint8)).save(paths[1])
    return paths


def image_decoders() -> Any:
    """Return torchcodec's decoders, for which torchvision 0.29 deprecates its own, or those."""
    # RuntimeError: of another torch
    with contextlib.suppress(ImportError, RuntimeError):
        from torchcodec import decoders

        if hasattr(decoders, "decode_jpeg"):  # since 0.16
            return decoders
    from torchvision import io

    return io


def on_device(batches: Iterable[Any], device: Any) -> Iterator[tuple]:
    """Yield `batches` on `device`, normalised, as the project's loop gets them."""
    from ddpkit.data import normalizing
    from ddpkit.vision.images import DEFAULT_FORMAT

    for batch in batches:
        yield normalizing.move(batch, device, DEFAULT_FORMAT)


def run(
    command: Sequence[object],
    timeout: float = TIMEOUT,
    cwd: Path | None = None,
    **env: Any,
) -> str:
    """Run `command` in the folder `cwd`, with `env` added to the environment; return its stdout.

    It ends, with all that it started, before this returns; a failure ends the benchmark.
    """
    words = [str(word) for word in command]
    process = subprocess.Popen(
        words,
        cwd=cwd,
        env=os.environ | {name: str(value) for name, value in env.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        ended = f"{' '.join(words)}\nended with {process.returncode}"
        sys.exit(f"{ended}:\n{output}\n{errors}")
    return output


def launch(
    project: Path, ranks: int, threads: int, flags: Sequence[object]
) -> dict[str, float]:
    """Train with the project's launch.sh; return the last row of its metrics.csv."""
    env = {"NPROC": ranks, "PYTHON": sys.executable, "OMP_NUM_THREADS": threads}
    with tempfile.TemporaryDirectory(prefix="benchmark-run-") as output:
        command = ["bash", project / "launch.sh", "--output-dir", output]
        command += ["--weights", "none", *flags]
        run(command, **env)
        last = rows(Path(output))[-1]
    return {name: float(value) for name, value in last.items()}


def rows(output: Path) -> list[dict[str, str]]:
    """Return the rows of a run's metrics.csv."""
    with open(output / "metrics.csv") as file:
        return list(csv.DictReader(file))


def in_child(function: Callable[..., float], *args: Any, **options: Any) -> float:
    """Return `function(*args, **options)`, called in a process forked for it."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=lambda: send.send(function(*args, **options)))
    child.start()
    send.close()
    try:
        if not receive.poll(TIMEOUT):
            sys.exit(f"{function.__name__}: no answer within {TIMEOUT} s")
        return receive.recv()
    except EOFError:
        sys.exit(f"{function.__name__}: failed, see above")
    finally:
        child.join(10)
        child.kill()


Cases = dict[str, Callable[[], float] | None]


def interleave(
    cases: Cases, repeats: int, seconds: float = math.inf
) -> dict[str, list[float]]:
    """Call each case once per repeat, in turn, so that what slows the machine slows all alike.

    No repeat but the first begins later than `seconds` after the benchmark.
    Return {case: its figures}; of a case that is None, for what is not installed, no figures.
    """
    figures: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(repeats):
        if repeat and time.monotonic() - BEGAN > seconds:
            break
        for name, case in cases.items():
            if case:
                figures[name].append(case())
                turn = f"{repeat + 1}/{repeats}  {name}"
                print(f"{turn}: {figures[name][-1]:.4g}", file=sys.stderr)
    return figures


def table(
    figures: dict[str, list[float]],
    unit: str,
    baseline: str,
    is_rate: bool = False,
    scale: int = 1,
) -> None:
    """Print medians, times `scale`, and how many times as fast as `baseline` each case is.

    That is the median of the ratios within each repeat, with the least and the greatest of them.
    is_rate: whether a figure counts work per time, else it is time.
    """
    rows = [("case", f"median, {unit}", "speed", "min..max")]
    for name, found in figures.items():
        if not found:
            rows.append((name, "not installed", "", ""))
            continue
        pairs = list(zip(found, figures[baseline], strict=True))
        ratios = [mine / base if is_rate else base / mine for mine, base in pairs]
        spread = f"{min(ratios):.2f}..{max(ratios):.2f}"
        median = f"{scale * statistics.median(found):.4g}"
        rows.append((name, median, f"{statistics.median(ratios):.2f}", spread))
    print(f"\nspeed: {baseline} = 1\n")
    markdown(rows)


def markdown(rows: Sequence[tuple[str, ...]]) -> None:
    """Print a table, the first row of which is its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = list(rows)
    lines.insert(1, tuple("-" * width for width in widths))
    for row in lines:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(f"| {' | '.join(cells)} |")
    print(flush=True)


def cpus() -> int:
    """Return how many CPUs this process may use."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1


def say_machine(settings: argparse.Namespace) -> None:
    """Print what it runs on, and with which flags."""
    print(machine())
    flags = vars(settings).items()
    words = (f"--{name.replace('_', '-')} {value}" for name, value in flags)
    print(" ".join(words), flush=True)


def machine() -> str:
    """Return a line about this machine: CPU, GPUs, driver, versions."""
    import torch
    import torchvision

    model = platform.processor()
    if sys.platform == "linux":
        text = Path("/proc/cpuinfo").read_text()
        found = re.search("^model name.*?: (.*)$", text, re.M)
        model = found[1] if found else model
    parts = [f"{model}, {cpus()} CPUs"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        of_kind = torch.get_device_module(kind)
        name = getattr(of_kind, "get_device_name", lambda i: f"{kind}:{i}")
        parts += [name(i) for i in range(torch.accelerator.device_count())]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            query = ["nvidia-smi", "--query-gpu=driver_version"]
            query.append("--format=csv,noheader")
            versions = subprocess.check_output(query, text=True, timeout=30).split("\n")
            parts += [f"driver {each}" for each in sorted(set(versions) - {""})]
        cuda = torch.version.cuda
        cudnn = torch.backends.cudnn.version()
        parts += [f"CUDA {cuda}", f"cuDNN {cudnn}"] if cuda else [kind]
    parts[-1] += f"; torch {torch.__version__}, torchvision {torchvision.__version__}"
    for name in PEERS:
        try:
            parts.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            parts.append(f"no {name}")
    return f"{', '.join(parts)}, Python {platform.python_version()}"
