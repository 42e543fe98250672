"""Batches of images for predict.py, without those that cannot be read or are too large."""

import contextlib
import sys
from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from tqdm import tqdm

from engine.data.samples import MapDataset
from engine.errors import UserError, print_error
from engine.ranks import distributed, failures, process
from engine.run import machine


class Readable:
    """Iterates over (indices, batch) of the samples of `dataset` that can be read, in order."""

    def __init__(self, dataset: MapDataset, batch_size: int) -> None:
        self.total = len(dataset)
        workers = machine.default_workers()
        self.loader = DataLoader(
            Tolerant(dataset),
            batch_size,
            num_workers=workers,
            multiprocessing_context=process.worker_context(workers),
            worker_init_fn=process.start_worker,
            collate_fn=collate,
        )
        self.broken: list[str] = []

    def __iter__(self) -> Iterator[tuple[list[int], list[Tensor]]]:
        with tqdm(total=self.total, unit="img", disable=None) as bar:
            for indices, batch, broken in self.loader:
                if indices:
                    yield indices, batch
                self.broken += broken
                bar.update(len(indices) + len(broken))

    @contextlib.contextmanager
    def skipping(self, name: str, remedy: str) -> Iterator[None]:
        """Leave the block if it runs out of memory; the image `name` then counts as unreadable."""
        try:
            with failures.naming(lambda _: name, [0], remedy):
                yield
        except failures.OutOfMemory as error:
            self.broken.append(str(error))

    def finish(self, where: object) -> None:
        """Print the number of images; list the unreadable ones and exit with status 1 if any."""
        count = self.total - len(self.broken)
        where = where if count else "no file written"
        distributed.say(f"{count} of {self.total} images predicted: {where}")
        for line in self.broken:
            print_error(line)
        if self.broken:
            sys.exit(1)


class Tolerant(Dataset):
    """`dataset`, with a UserError's line for a sample that raises one: (index, sample or line)."""

    def __init__(self, dataset: MapDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, tuple | str]:
        try:
            return index, self.dataset[index]
        except UserError as error:
            return index, str(error)


def collate(
    samples: Sequence[tuple[int, tuple | str]],
) -> tuple[list[int], list[Tensor] | None, list[str]]:
    """Return the indices of the samples that could be read, their batch, and the others' lines."""
    whole = [(index, sample) for index, sample in samples if not isinstance(sample, str)]
    broken = [sample for _, sample in samples if isinstance(sample, str)]
    batch = default_collate([sample for _, sample in whole]) if whole else None
    return [index for index, _ in whole], batch, broken
