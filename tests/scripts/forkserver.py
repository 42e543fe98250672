"""Prepares a data set and reads it with loader workers that are not forked, as on Python 3.14."""

import multiprocessing
import sys
from pathlib import Path


def main(source: str, store: str) -> None:
    multiprocessing.set_start_method("forkserver")
    import torch

    import dataset
    import prepare_data
    from engine.data import loading
    from engine.ranks import process

    process.worker_context = lambda workers: None  # Python's default, on Linux too
    prepare_data.main(["--data", source, "--output", store, "--short-side", "0", "--workers", "1"])
    loading.distributed.setup()
    train, _, classes = dataset.build_dataset(Path(store), 32)
    found = []
    for workers in 0, 1:
        options = loading.Options(workers, prefetch=2, pin_memory=False, seed=3)
        found.append(list(loading.build_train_loader(train, len(classes), 4, 1, options)))
    for one, other in zip(*found, strict=True):
        assert all(map(torch.equal, one, other))


if __name__ == "__main__":
    main(*sys.argv[1:])
