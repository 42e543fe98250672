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
    flags.flags, flags.images = flags.flags or defaults, flags.images or images
    common.say_machine(flags)
    with common.generated(flags.task) as folder:
        project = folder / "project"
        data = common.draw_photos(folder / "data", flags.task, flags.images, (96, 72))

        def case(ranks: int, passes: int) -> Callable[[], float]:
            own = ("--data", data, "--epochs", 2, "--workers", flags.workers)
            own = (*own, "--accumulate", passes, *flags.flags.split())
            return lambda: common.launch(project, ranks, flags.threads, *own)[
                "img_per_s"
            ]

        names = {
            (ranks, passes): f"{ranks} rank(s)"
            + (f", --accumulate {passes}" * (passes > 1))
            for passes in (1, 4)
            for ranks in (1, flags.ranks)
        }
        cases = {name: case(*key) for key, name in names.items()}
        figures = common.interleave(cases, flags.repeats)
    for passes in (1, 4):
        one, many = names[1, passes], names[flags.ranks, passes]
        both = {name: figures[name] for name in (one, many)}
        common.table(both, "images/s", one, is_rate=True)
        ratios = [
            several / single for single, several in zip(*both.values(), strict=True)
        ]
        print(f"share of linear: {statistics.median(ratios) / flags.ranks:.2f}")


if __name__ == "__main__":
    main()
