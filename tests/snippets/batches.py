"""What the loaders make of a data set, and what becomes of a batch on the device."""

import random
import zlib
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader

import dataset
import ddpkit
import main
from ddpkit.data import samples
from ddpkit.ranks import distributed


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
    device = main.distributed.setup(seed=0)
    args = Namespace(data=Path(data), image_size=32, augment=",".join(names))
    train_set, _, classes = dataset.build_datasets(args)

    def sums(ranks: int, batch_size: int, accumulate: int, workers: int) -> list:
        distributed.world_size = lambda: ranks
        found: list[dict] = [{}, {}]
        for rank in range(ranks):
            distributed.rank = lambda rank=rank: rank
            sampler = ddpkit.TrainSampler(train_set, batch_size, accumulate, seed=3)
            loader = DataLoader(
                ddpkit.Seeded(Noisy(train_set), classes, seed=3),
                batch_size,
                sampler=sampler,
                collate_fn=ddpkit.Collate(),
                **ddpkit.workers(workers, device),
            )
            for epoch in range(2):
                sampler.set_epoch(epoch)
                for i, batch in enumerate(loader):
                    step = found[epoch].setdefault(i // accumulate, [])
                    for sample in zip(*batch, strict=True):
                        parts = [part.numpy().tobytes() for part in sample]
                        step.append(zlib.crc32(b"".join(parts)))
        return [[sorted(step) for step in epoch.values()] for epoch in found]

    shapes = (1, 8, 1, 0), (2, 4, 1, 1), (4, 1, 2, 0), (1, 2, 4, 3)
    keyed = [sums(*shape) for shape in shapes]
    samples.seed = lambda *key: None
    return {"keyed": keyed, "unkeyed": sums(1, 8, 1, 0)}
