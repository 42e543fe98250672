"""Prepares a data set and reads it with loader workers that are not forked, as on Python 3.14."""

import multiprocessing
import sys


def main(source: str, store: str) -> None:
    multiprocessing.set_start_method("forkserver")
    import torch
    from torch.utils.data import DataLoader

    import dataset
    import ddpkit
    import distributed
    from ddpkit.ranks import process
    from ddpkit.tools import prepare
    from flags import parse_args

    process.worker_context = lambda workers: None  # Python's default, on Linux too
    prepare.main(["--data", source, "--output", store, "--short-side", "0", "--workers", "1"])
    device = distributed.setup(3)
    train, _, classes = dataset.build_datasets(parse_args(["--data", store, "--image-size", "32"]))
    found = []
    for workers in 0, 1:
        options = {"collate_fn": ddpkit.Collate(), **ddpkit.workers(workers, device)}
        sampler = ddpkit.TrainSampler(train, 4, accumulate=1, seed=3)
        seeded = ddpkit.Seeded(train, classes, seed=3)
        found.append(list(DataLoader(seeded, 4, sampler=sampler, **options)))
    for one, other in zip(*found, strict=True):
        assert all(map(torch.equal, one, other))


if __name__ == "__main__":
    main(*sys.argv[1:])
