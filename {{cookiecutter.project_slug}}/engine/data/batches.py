"""Batches: what loader workers make of samples, and the memory in which they hand them over."""

import math
import mmap
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

SMALL = 2**16  # bytes


class Packed(Sequence):
    """The tuples `samples` in one piece of memory, unpacked one at a time.

    A forked worker shares its rank's memory until either writes to it, and merely to look at an
    object counts references in it: of a list, each worker would come to have a copy of its own.
    """

    def __init__(self, samples: Sequence[tuple]) -> None:
        pieces = [pickle.dumps(sample) for sample in samples]
        self.ends = np.cumsum([0, *map(len, pieces)])
        self.data = b"".join(pieces)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: Any) -> tuple:
        index = range(len(self))[index]
        return pickle.loads(self.data[self.ends[index] : self.ends[index + 1]])


def collate(samples: Sequence[tuple]) -> list:
    """Return a batch, in which the channels of pictures are last in memory, as they were read."""
    images = default_collate([sample[0].movedim(0, -1) for sample in samples]).movedim(-1, 1)
    return [images, *default_collate([sample[1:] for sample in samples])]


def collate_by_size(samples: Sequence[tuple]) -> list:
    """Return one batch for each size of picture, so that none is padded for another's sake."""
    groups: dict[torch.Size, list] = {}
    for sample in samples:
        groups.setdefault(sample[0].shape, []).append(sample)
    return [collate(group) for group in groups.values()]


class Memory:
    """Memory that forked workers share with their rank, for pictures, used again and again.

    torch would take fresh memory for each batch, whose pages the kernel has to find and to clear:
    that can take as long as reading prepared pictures.
    """

    in_use: ClassVar[list["Memory"]] = []

    def __init__(self, workers: int, per_worker: int, size: int) -> None:
        """Reserve for each of `workers` room for `per_worker` batches of `size` bytes."""
        self.number = len(self.in_use)
        self.in_use.append(self)
        self.per_worker = per_worker
        count = workers * per_worker
        self.taken = torch.frombuffer(mmap.mmap(-1, count), dtype=torch.uint8)
        self.room = torch.frombuffer(mmap.mmap(-1, count * size), dtype=torch.uint8)
        self.room = self.room.view(count, size)

    def collate(self, samples: Sequence[tuple]) -> Any:
        """As the function `collate`, with the pictures in this memory if there is room for them."""
        images = [sample[0].movedim(0, -1) for sample in samples]
        first, size = images[0], len(images) * images[0].numel()
        worker = get_worker_info().id  # type: ignore[union-attr]
        mine = range(worker * self.per_worker, (worker + 1) * self.per_worker)
        place = next((i for i in mine if not self.taken[i]), None)
        fits = first.dtype == torch.uint8 and size <= self.room.shape[1]
        if place is None or not fits or any(image.shape != first.shape for image in images):
            return collate(samples)
        self.taken[place] = 1
        shape = (len(images), *first.shape)
        torch.stack(images, out=self.room[place, :size].view(shape))
        rest = default_collate([sample[1:] for sample in samples])
        # Small tensors are faster sent as bytes than by way of shared memory of their own.
        sent = [x.numpy() if isinstance(x, Tensor) and x.nbytes <= SMALL else x for x in rest]
        return Lent(self.number, place, shape, sent)


@dataclass
class Lent:
    """A batch whose pictures are in a Memory, until they are copied from there."""

    number: int
    place: int
    shape: tuple[int, ...]
    rest: list

    def pin_memory(self) -> list:
        """As `copy`, to pinned memory: what DataLoader calls in its thread."""
        return self.copy(pin=True)

    def copy(self, pin: bool = False) -> list:
        memory = Memory.in_use[self.number]
        images = memory.room[self.place, : math.prod(self.shape)].view(self.shape)
        images = images.pin_memory() if pin else images.clone()
        memory.taken[self.place] = 0
        rest = [torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in self.rest]
        if pin:
            rest = [x.pin_memory() if isinstance(x, Tensor) else x for x in rest]
        return [images.movedim(-1, 1), *rest]
