"""What predict.py goes through: pictures in batches, those that cannot be read left out."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset, default_collate
from tqdm import tqdm

from engine.errors import UserError
from engine.ranks import distributed
from engine.run import machine


class Readable:
    """Iterates over (indices, batch) of the samples of `dataset` that can be read, in order."""

    def __init__(self, dataset: Dataset, batch_size: int) -> None:
        self.total = len(dataset)  # type: ignore[arg-type]
        self.loader: DataLoader = DataLoader(
            Tolerant(dataset), batch_size, num_workers=machine.workers(), collate_fn=collate
        )
        self.broken: list[str] = []

    def __iter__(self) -> Iterator[tuple[list[int], Any]]:
        with tqdm(total=self.total, unit="img", disable=None) as bar:
            for indices, batch, broken in self.loader:
                if indices:
                    yield indices, batch
                self.broken += broken
                bar.update(len(indices) + len(broken))

    def finish(self, where: object) -> None:
        """Say how many there were; name those that could not be read and exit with status 1."""
        count = self.total - len(self.broken)
        distributed.say(f"{count} of {self.total} pictures: {where if count else 'no file'}")
        for line in self.broken:
            print(f"error: {line}", file=sys.stderr)
        if self.broken:
            sys.exit(1)


class Tolerant(Dataset):
    """`dataset`, with a UserError's line for a sample that raises one: (index, sample or line)."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[int, Any]:
        try:
            return index, self.dataset[index]
        except UserError as error:
            return index, str(error)


def collate(samples: Sequence[tuple[int, Any]]) -> tuple[list[int], Any, list[str]]:
    """Return the indices of the samples that could be read, their batch, and the others' lines."""
    whole = [(index, sample) for index, sample in samples if not isinstance(sample, str)]
    broken = [sample for _, sample in samples if isinstance(sample, str)]
    batch = default_collate([sample for _, sample in whole]) if whole else None
    return [index for index, _ in whole], batch, broken
