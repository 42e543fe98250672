"""Ranks find each other by whatever a launcher says, or a line tells who is missing."""

from datetime import timedelta

import torch.distributed as dist
from generated import refusal

from ddpkit.errors import UserError
from ddpkit.ranks import meeting


def come(store: dist.Store, rank: int, count: int, seconds: float) -> str:
    try:
        meeting.join(store, rank, count, timedelta(seconds=seconds), {})
    except UserError as error:
        return str(error)
    return "joined"


def test_who_is_missing():
    """Also rank 0, where torchrun holds the store."""
    said = come(dist.HashStore(), 3, 8, 0.2)
    assert said.startswith("waited 0.2 s for rank 0, 1, 2, 4, ... of 8 (WORLD_SIZE=8); here: ")


def test_a_stray():
    """It is told why it is one; those who have met do not hear of it."""
    store = dist.HashStore()
    assert come(store, 0, 1, 3) == "joined"
    for rank, size, line in (
        (0, 1, "RANK=0 is there twice ("),
        (1, 2, "WORLD_SIZE is 2 for rank 1, 1 for rank 0"),
        (1, 1, "RANK=1 with WORLD_SIZE=1: the last rank is 0"),
        (0, 1, "RANK=0 is there twice ("),
    ):
        assert come(store, rank, size, 3).startswith(line)


def test_a_name_that_does_not_resolve():
    with refusal("meeting.reach", "MASTER_ADDR=nowhere.invalid cannot be resolved"):
        meeting._reach("nowhere.invalid", 1, timedelta(seconds=0.4))
