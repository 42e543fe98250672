"""What torch's record of collectives costs a step.

Two ranks over gloo, one thread each, with that record (TORCH_FR_BUFFER_SIZE) and without: sums of
one number, and steps of DDP with a small network.
"""

import functools
import statistics
import sys
import time

import common

REDUCTIONS = 40  # for a step


def measure(project: str, count: int) -> None:
    """Print seconds per reduction and per step, of `count` of these; on rank 0."""
    sys.path.insert(0, project)
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from ddpkit.ranks import distributed

    torch.set_num_threads(1)
    here = distributed.rendezvous()
    torch.distributed.init_process_group(
        here.backend, None, here.timeout, here.world_size, here.rank, here.store
    )
    convolutions = nn.Sequential(
        nn.Conv2d(3, 64, 3, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 2), nn.ReLU()
    )
    ddp_model = DistributedDataParallel(convolutions, gradient_as_bucket_view=True)
    images = torch.randn(8, 3, 64, 64)
    number = torch.ones(1)
    steps = []
    for _ in range(count):
        began = time.perf_counter()
        ddp_model(images).sum().backward()
        steps.append(time.perf_counter() - began)
    began = time.perf_counter()
    for _ in range(REDUCTIONS * count):
        distributed.reduce_tensor(number)
    seconds = [
        (time.perf_counter() - began) / REDUCTIONS / count,
        statistics.median(steps),
    ]
    distributed.print0(" ".join(map(str, seconds)))
    distributed.teardown()


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=100, help="default: 100")
    flags = parser.parse_args()
    common.say_machine(flags)
    sizes = {"without a record": 0, "with it": 2000}
    found: dict[str, list[list[float]]] = {name: [] for name in sizes}
    with common.generated(flags.task) as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", 2, __file__, "--measure", folder / "project"]
        command.append(flags.steps)

        def case(name: str) -> float:
            env = {"TORCH_FR_BUFFER_SIZE": sizes[name], "OMP_NUM_THREADS": 1}
            figures = list(map(float, common.run(command, **env).split()))
            found[name].append(figures)
            return figures[0]

        cases = {name: functools.partial(case, name) for name in sizes}
        common.interleave(cases, flags.repeats)
    for place, what in enumerate(("a reduction", "a step")):
        print(f"\n{what}:", end="")
        figures = {}
        for name, turns in found.items():
            figures[name] = [turn[place] for turn in turns]
        common.table(figures, "us", "without a record", scale=10**6)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2], int(sys.argv[3]))
    else:
        main()
