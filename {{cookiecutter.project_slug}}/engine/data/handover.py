"""Batches: made of samples, and handed from loader workers to their rank in memory used again.

torch itself takes new shared memory for each batch, of which the kernel finds, clears and frees
every page, and opens a socket for each tensor. For prepared images that is half of the time.
"""

import itertools
import math
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

ALIGNMENT = 64  # bytes: tensors begin at multiples of it
SMALL = 2**16  # bytes: what a pipe holds
PREFETCH = 2  # batches that each worker reads ahead
BLOCKS_PER_WORKER = PREFETCH + 2  # the rank may have taken two: this batch and the next
LOADERS = itertools.count()
BLOCKS: dict[tuple[int, ...], Tensor] = {}  # in a rank: by loader, worker and the block's number


class Groups(list):
    """The batches of a DataLoader's batch, one for each size of image."""


def stack(samples: Sequence[tuple]) -> list:
    """Return a batch whose images are channels last in memory, as they were read."""
    images = default_collate([sample[0].movedim(0, -1) for sample in samples]).movedim(-1, 1)
    return [images, *default_collate([sample[1:] for sample in samples])]


class Place(NamedTuple):
    """Where a tensor is in a block: the byte at which it begins, shape and type."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def of(self, block: Tensor) -> Tensor:
        return block[self.start : self.end].view(self.dtype).view(self.shape)


class Collate:
    """A `collate_fn`: stacks samples to a batch [images, targets, ...]; in evaluation by size.

    Samples whose images differ in size become several batches, so that none needs padding.

    A loader worker hands images and masks to its rank in one of a few blocks, each shared memory,
    uint8 (bytes,). It is used again once the rank has dropped all tensors in it: its first byte is
    0 then. While the rank keeps all blocks, batches get new memory.

        DataLoader(..., collate_fn=engine.Collate())
    """

    def __init__(self, most: int = BLOCKS_PER_WORKER) -> None:
        self.most = most
        self.loader = next(LOADERS)
        self.blocks: list[Tensor] = []  # of this worker
        weakref.finalize(self, _drop, self.loader).atexit = False

    def __call__(self, samples: Sequence[tuple]) -> "list | Sent":
        groups: dict[torch.Size, list] = {}
        for sample in samples:
            groups.setdefault(sample[0].shape, []).append(sample)
        if len(groups) > 1:
            return Groups(map(stack, groups.values()))
        if (worker := get_worker_info()) is None:
            return stack(samples)
        columns: list = list(zip(*samples, strict=True))
        columns[0] = tuple(image.movedim(0, -1) for image in columns[0])
        parts: list = []
        end = ALIGNMENT
        for column in columns:
            first = column[0]
            if not isinstance(first, Tensor):
                part = default_collate(column)
                is_small = isinstance(part, Tensor) and part.nbytes <= SMALL
                parts.append(part.numpy() if is_small else part)  # a tensor would need a socket
                continue
            if any(tensor.dtype != first.dtype for tensor in column):
                return stack(samples)
            parts.append(Place(end, (len(column), *first.shape), first.dtype))
            end = -(-parts[-1].end // ALIGNMENT) * ALIGNMENT
        if (number := self._take(end)) is None:
            return stack(samples)
        for column, part in zip(columns, parts, strict=True):
            if isinstance(part, Place):
                torch.stack(column, out=part.of(self.blocks[number]))
        return Sent((self.loader, worker.id, number), self.blocks[number], parts)

    def _take(self, size: int) -> int | None:
        """Return the number of a block of at least `size` bytes that is free, from now on not."""
        free = (n for n, block in enumerate(self.blocks) if not block[0] and len(block) >= size)
        number = next(free, None)
        if number is None and len(self.blocks) < self.most:
            number = len(self.blocks)
            with torch.inference_mode(False):  # in which `evaluate` may have started this worker
                self.blocks.append(torch.zeros(size, dtype=torch.uint8).share_memory_())
        if number is not None:
            self.blocks[number][0] = 1
        return number


@dataclass
class Sent:
    """A batch in a block, on its way: the rank unpickles it as `collate` returns it.

    The block itself goes once; its second byte is 1 from then on.
    """

    key: tuple[int, ...]
    block: Tensor
    parts: list

    def __reduce__(self) -> tuple:
        block = None if self.block[1] else self.block
        self.block[1] = 1
        return _receive, (self.key, block, self.parts)


def _receive(key: tuple[int, ...], block: Tensor | None, parts: list) -> list:
    block = BLOCKS[key] = BLOCKS[key] if block is None else block
    flags = block.numpy()
    array = flags[:]  # an object of its own, which all tensors of the batch keep alive
    weakref.finalize(array, _free, flags, os.getpid()).atexit = False
    memory = torch.from_numpy(array)
    batch = []
    for part in parts:
        if isinstance(part, Place):
            part = part.of(memory)
        batch.append(torch.from_numpy(part) if isinstance(part, np.ndarray) else part)
    return [batch[0].movedim(-1, 1), *batch[1:]]


def _drop(loader: int) -> None:
    """Give back what a rank holds of a loader that is gone."""
    for key in [key for key in BLOCKS if key[0] == loader]:
        del BLOCKS[key]


def _free(flags: np.ndarray, owner: int) -> None:
    if os.getpid() == owner:  # not in a process that has been forked from the rank
        flags[0] = 0
