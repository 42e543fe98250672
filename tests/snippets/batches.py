"""What the loaders make of a data set, and what becomes of a batch on the device."""

import random
import zlib
from pathlib import Path

import numpy as np
import torch
from torchvision.transforms.v2 import functional as F

import dataset
from engine.data import loading, seeding
from engine.errors import UserError
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


def checksums(data: str) -> dict:
    """For each epoch and each global batch of 8 a checksum for each sample, for several shapes."""
    distributed.setup()
    train_set, _, classes = dataset.build_dataset(Path(data), 32)

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


def numbers() -> list[int]:
    return [seeding.number(*key) for key in ((1, 2), (1, 2), (1, 2, 0), (2, 1))]


def normalized() -> str:
    """A batch is what ToTensor and Normalize make of it; return what a float one is told."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (4, 20, 30, 3), dtype=torch.uint8, generator=generator)
    samples = [(image.movedim(-1, 0), number) for number, image in enumerate(images)]
    ((found, targets),) = loading.to_device([loading.collate(samples)], torch.device("cpu"))
    for (image, number), one, target in zip(samples, found, targets, strict=True):
        scaled = F.to_dtype(image, torch.float32, scale=True)
        expected = F.normalize(scaled, loading.MEAN, loading.STD)
        assert (one - expected).abs().max() < 1e-6
        assert target == number
    assert found.is_contiguous(memory_format=torch.channels_last)
    try:
        loading.normalize(found)
    except UserError as error:
        return str(error)
    return "taken"
