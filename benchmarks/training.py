"""From images to weights: a whole short training of ours against torchvision's reference way.

Real runs of two epochs on the same drawn JPEGs of 500 x 375 pixels, classification, of which the
second is reported: images per second of all ranks, without validation. Network, batch, ranks,
threads, loader workers, precision and optimizer (SGD) are the same; reference.py says what the
other side does. How long the training waited for images is reported as its share of that epoch, the
median of all turns.
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import common

REFERENCE = "torchvision's reference way"


def main() -> None:
    parser = common.parser(__doc__, ("classification",))
    parser.add_argument("--arch", default="resnet18", help="default: resnet18")
    parser.add_argument(
        "--images", type=int, default=160, help="in an epoch; default: 160"
    )
    parser.add_argument("--image-size", type=int, default=224, help="default: 224")
    parser.add_argument(
        "--batch-size", type=int, default=16, help="of each rank; default: 16"
    )
    parser.add_argument("--ranks", type=int, default=1, help="default: 1")
    parser.add_argument(
        "--workers", type=int, help="of each rank; default: CPUs / ranks"
    )
    parser.add_argument("--amp", choices=("off", "bf16", "fp16"), default="off")
    flags = parser.parse_args()
    share = max(1, common.cpus() // flags.ranks)
    flags.workers = share if flags.workers is None else flags.workers
    common.say_machine(flags)
    names = ("arch", "image_size", "batch_size", "workers", "amp")
    same: list[object] = ["--epochs", 2]
    for name in names:
        same += [f"--{name.replace('_', '-')}", getattr(flags, name)]
    waits: dict[str, list[float]] = {}

    with common.generated(flags.task) as folder:
        project = folder / "project"
        data = common.draw_photos(folder / "data", flags.task, flags.images)

        def reference() -> dict[str, float]:
            script = Path(__file__).with_name("reference.py")
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", flags.ranks, script]
            command += ["--data", data, "--threads", share, *same]
            output = common.run(command, OMP_NUM_THREADS=share)
            return json.loads(output.splitlines()[-1])

        def ours() -> dict[str, float]:
            own = ["--data", data, "--optimizer", "sgd", *same]
            return common.launch(project, flags.ranks, share, own)

        def case(
            name: str, train: Callable[[], dict[str, float]]
        ) -> Callable[[], float]:
            def rate() -> float:
                result = train()
                waits.setdefault(name, []).append(result["data_wait"])
                return result["img_per_s"]

            return rate

        trainings = {REFERENCE: reference, "ours": ours}
        cases = {name: case(name, train) for name, train in trainings.items()}
        figures = common.interleave(cases, flags.repeats, flags.seconds)
    common.table(figures, "images/s", REFERENCE, is_rate=True)
    for name, shares in waits.items():
        print(f"waiting for images, {name}: {statistics.median(shares):.1%}")


if __name__ == "__main__":
    main()
