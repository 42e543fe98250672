"""What torch's record of collectives costs a step.

Two ranks over gloo, one thread each, with that record (TORCH_FR_BUFFER_SIZE) and without: sums of
one number, and steps of DDP with a small network.
"""

import statistics
import sys
import time

import common

REDUCTIONS, STEPS = 4000, 100


def measure(project: str) -> None:
    """Print seconds per reduction and per step; on rank 0."""
    sys.path.insert(0, project)
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from ddpkit.ranks import distributed

    torch.set_num_threads(1)
    distributed.setup()
    convolutions = [
        nn.Conv2d(3, 64, 3, 2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, 2),
        nn.ReLU(),
    ]
    ddp_model = DistributedDataParallel(
        nn.Sequential(*convolutions), gradient_as_bucket_view=True
    )
    images, number = torch.randn(8, 3, 64, 64), torch.ones(1)
    steps = []
    for _ in range(STEPS):
        began = time.perf_counter()
        ddp_model(images).sum().backward()
        steps.append(time.perf_counter() - began)
    began = time.perf_counter()
    for _ in range(REDUCTIONS):
        distributed.reduce_tensor(number)
    seconds = [(time.perf_counter() - began) / REDUCTIONS, statistics.median(steps)]
    distributed.say(" ".join(map(str, seconds)))
    distributed.teardown()


def main() -> None:
    flags = common.parser(__doc__).parse_args()
    common.say_machine(flags)
    launcher = [
        sys.executable,
        *["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    ]
    sizes = {"without a record": 0, "with it": 2000}
    found: dict[str, list[list[float]]] = {name: [] for name in sizes}
    with common.generated(flags.task) as folder:
        command = [*launcher, __file__, "--measure", str(folder / "project")]

        def case(name: str) -> float:
            env = {"TORCH_FR_BUFFER_SIZE": sizes[name], "OMP_NUM_THREADS": 1}
            found[name].append(
                [float(word) for word in common.run(command, **env).split()]
            )
            return found[name][-1][0]

        common.interleave(
            {name: lambda name=name: case(name) for name in sizes}, flags.repeats
        )
    for place, what in enumerate(("a reduction", "a step")):
        print(f"\n{what}:", end="")
        figures = {
            name: [turn[place] for turn in turns] for name, turns in found.items()
        }
        common.table(figures, "us", "without a record", scale=10**6)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2])
    else:
        main()
