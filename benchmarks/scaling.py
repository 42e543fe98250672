"""One process and several: images per second of real runs through launch.sh.

The batch of a rank, its one thread and its network are the same whatever their number.
Images are drawn small (96 x 72 pixels), and each rank reads its own (--workers 0),
so that no loader worker takes a core from a rank in one case and not in the other. The figure is
that of the second epoch in metrics.csv. `--accumulate 4` sums gradients once in four passes.
The share of linear is the speed divided by the number of ranks.
"""

import os
import statistics
from collections.abc import Callable

import common
import torch

SETTINGS = {  # flags of main.py, and images in an epoch
    "segmentation": ("--encoder resnet18 --image-size 96 --batch-size 8", 128),
    "classification": ("--arch resnet18 --image-size 96 --batch-size 16", 256),
}


def main() -> None:
    parser = common.parser(__doc__, tuple(SETTINGS))
    gpus = torch.accelerator.device_count()
    parser.add_argument(
        "--device", choices=("cpu", "gpu"), default="gpu" if gpus else "cpu"
    )
    parser.add_argument(
        "--ranks", type=int, default=max(2, gpus), help="default: all GPUs, or 2"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="of each rank; default: 1"
    )
    parser.add_argument(
        "--workers", type=int, default=0, help="of each rank; default: 0"
    )
    parser.add_argument("--images", type=int, help="in an epoch; default: by task")
    parser.add_argument("--flags", help="of main.py, in quotes; default: by task")
    flags = parser.parse_args()
    if flags.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    defaults, images = SETTINGS[flags.task]
    flags.flags = flags.flags or defaults
    flags.images = flags.images or images
    common.say_machine(flags)
    with common.generated(flags.task) as folder:
        project = folder / "project"
        data = common.draw_photos(folder / "data", flags.task, flags.images, (96, 72))

        def case(ranks: int, passes: int) -> Callable[[], float]:
            own = ["--data", data, "--epochs", 2, "--workers", flags.workers]
            own += ["--accumulate", passes, *flags.flags.split()]

            def train() -> float:
                row = common.launch(project, ranks, flags.threads, own)
                return row["img_per_s"]

            return train

        names = {}
        cases: common.Cases = {}
        for passes in (1, 4):
            for ranks in (1, flags.ranks):
                more = f", --accumulate {passes}" if passes > 1 else ""
                name = f"{ranks} rank(s){more}"
                names[ranks, passes] = name
                cases[name] = case(ranks, passes)
        figures = common.interleave(cases, flags.repeats)
    for passes in (1, 4):
        one = names[1, passes]
        many = names[flags.ranks, passes]
        both = {name: figures[name] for name in (one, many)}
        common.table(both, "images/s", one, is_rate=True)
        pairs = zip(figures[one], figures[many], strict=True)
        ratios = [several / single for single, several in pairs]
        print(f"share of linear: {statistics.median(ratios) / flags.ranks:.2f}")


if __name__ == "__main__":
    main()
