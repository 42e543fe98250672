"""The decorator that runs a test on ranks."""

import pytest
import torch
from ranks import on_ranks

from ddpkit.ranks import distributed


@on_ranks(1, 2, 3)
def test_a_sum_over_ranks() -> None:
    ranks = distributed.world_size()
    found = distributed.reduce_tensor(torch.tensor(distributed.rank()))
    assert found == ranks * (ranks - 1) // 2


def test_a_failure_on_one_rank() -> None:
    @on_ranks(2)
    def fails() -> None:
        assert distributed.rank() == 0, "not rank 0"

    with pytest.raises(
        pytest.fail.Exception, match=r"rank 1 of 2, status 1:(.|\n)*not rank 0"
    ):
        fails()
