"""What the loaders make of a data set, and what becomes of a batch on the device."""

import random
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import dataset
from engine.data import loading, seeding
from engine.ranks import distributed


class Noisy(torch.utils.data.Dataset):
    """What an owner may write: random numbers from three sources with each sample."""

    def __init__(self, data: torch.utils.data.Dataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple:
        noise = [random.random(), np.random.rand(), torch.rand(1).item()]
        return (*self.data[index], torch.tensor(noise, dtype=torch.float64))


def checksums(data: str, names: Sequence[str] = ()) -> dict:
    """For each epoch and each global batch of 8 a checksum for each sample, for several shapes.

    names: of --augment.
    """
    distributed.setup()
    train_set, _, classes = dataset.build_dataset(Path(data), 32, augment=names)

    def sums(ranks: int, batch_size: int, accumulate: int, workers: int) -> list:
        options = loading.Options(workers, prefetch=2, pin_memory=False, seed=3)
        distributed.world_size = lambda: ranks
        found: list[dict] = [{}, {}]
        for rank in range(ranks):
            distributed.rank = lambda rank=rank: rank
            loader = loading.build_train_loader(
                Noisy(train_set), len(classes), batch_size, accumulate, options
            )
            for epoch in range(2):
                loader.sampler.set_epoch(epoch)
                for i, batch in enumerate(loader):
                    step = found[epoch].setdefault(i // accumulate, [])
                    for sample in zip(*batch, strict=True):
                        parts = [part.numpy().tobytes() for part in sample]
                        step.append(zlib.crc32(b"".join(parts)))
        return [[sorted(step) for step in epoch.values()] for epoch in found]

    shapes = (1, 8, 1, 0), (2, 4, 1, 1), (4, 1, 2, 0), (1, 2, 4, 3)
    keyed = [sums(*shape) for shape in shapes]
    seeding.seed = lambda *key: None
    return {"keyed": keyed, "unkeyed": sums(1, 8, 1, 0)}
