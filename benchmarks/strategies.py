"""One process, DDP, and DDP with --accumulate 4: time, accuracy, memory.

All train the same network on the project's demo set, with as many images in each optimizer step:
`--batch-size` is for all ranks and passes together. A case has a new --seed in each turn, the same
as the other cases. Time is the training part of the last epoch in metrics.csv, accuracy its BEST
(top1, miou). Memory is the largest peak of any process: what torch has allocated on a GPU, without
a GPU all memory of the process, Python and torch included.
"""

import csv
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import common
import torch

FLAGS = {
    "classification": "--arch resnet18 --image-size 64 --epochs 3",
    "segmentation": "--encoder mobilenet_v2 --image-size 64 --epochs 3",
}
ONE = "one process"


def train_here(project: str, output: str, *words: str) -> None:
    """Train in this process, one of the ranks; leave its peak of memory, in MiB, in `output`."""
    sys.path.insert(0, project)
    import main

    main.main(["--output-dir", output, *words])
    if torch.accelerator.is_available():
        devices = range(torch.accelerator.device_count())
        peak = max(torch.get_device_module().max_memory_allocated(device) for device in devices)
    else:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    Path(output, f"memory{os.environ.get('RANK', 0)}").write_text(str(peak / 2**20))


def train(
    project: Path, score: str, ranks: int, threads: int, *words: object
) -> tuple[float, float, float]:
    """Train on so many ranks; return seconds per epoch, the score and the peak of memory."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    start = [sys.executable, *([*launcher, str(ranks)] if ranks > 1 else [])]
    with tempfile.TemporaryDirectory(prefix="benchmark-run-") as output:
        command = [*start, __file__, "--train-here", str(project), output, *map(str, words)]
        common.run(command, OMP_NUM_THREADS=threads)
        with open(Path(output, "metrics.csv")) as file:
            *_, last = csv.DictReader(file)
        peak = max(float(path.read_text()) for path in Path(output).glob("memory*"))
    return float(last["train_seconds"]), float(last[score]), peak


def table(found: dict[str, list[tuple[float, float, float]]], memory: str) -> None:
    """Print medians; the speed-up is the median of the ratios within each turn."""
    rows = [("case", "s per epoch", "speed-up", "min..max", "accuracy", f"peak {memory}, MiB")]
    for name, turns in found.items():
        time, score, peak = map(statistics.median, zip(*turns, strict=True))
        ratios = [one[0] / own[0] for one, own in zip(found[ONE], turns, strict=True)]
        spread = f"{min(ratios):.2f}..{max(ratios):.2f}"
        speed = f"{statistics.median(ratios):.2f}"
        rows.append((name, f"{time:.3g}", speed, spread, f"{score:.3f}", f"{peak:.0f}"))
    common.markdown(rows)


def main() -> None:
    parser = common.parser(__doc__)
    gpus = torch.accelerator.device_count()
    parser.add_argument("--device", choices=("cpu", "gpu"), default="gpu" if gpus else "cpu")
    parser.add_argument("--ranks", type=int, default=max(2, gpus), help="default: all GPUs, or 2")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step; default: 64")
    parser.add_argument("--images", type=int, default=960, help="in an epoch; default: 960")
    parser.add_argument("--workers", type=int, default=0, help="of each rank; default: 0")
    parser.add_argument("--threads", type=int, default=1, help="of each rank; default: 1")
    parser.add_argument("--flags", help="of main.py, in quotes; default: by task")
    flags = parser.parse_args()
    if flags.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    flags.flags = flags.flags or FLAGS[flags.task]
    common.say_machine(flags)
    if flags.device == "gpu" and gpus == 1:
        flags.ranks = 1
    with common.generated(flags.task) as folder:
        from dataset import draw_demo
        from model import BEST

        data = folder / "data"
        draw_demo(data, flags.images, flags.images // 4)
        found: dict[str, list[tuple[float, float, float]]] = {}

        def case(name: str, ranks: int, passes: int = 1, *words: str) -> Callable[[], float]:
            seeds = itertools.count()
            own = ("--data", data, "--workers", flags.workers, "--accumulate", passes, *words)
            own = (*own, "--batch-size", flags.batch_size // (ranks * passes))
            place, own = folder / "project", (*own, *flags.flags.split(), "--seed")

            def seconds() -> float:
                turn = train(place, BEST, ranks, flags.threads, *own, next(seeds))
                found.setdefault(name, []).append(turn)
                return turn[0]

            return seconds

        many = {
            f"DDP, {flags.ranks} ranks": (flags.ranks,),
            f"DDP, {flags.ranks} ranks, --accumulate 4": (flags.ranks, 4),
        }
        cases = {ONE: (1,), **(many if flags.ranks > 1 else {})}
        common.interleave({name: case(name, *how) for name, how in cases.items()}, flags.repeats)
    table(found, "of GPU memory" if flags.device == "gpu" else "of memory")
    if flags.ranks == 1:
        print("left out, for they need several GPUs: DDP")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train-here"]:
        train_here(*sys.argv[2:])
    else:
        main()
