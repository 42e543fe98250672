"""Whether losses and weights are numbers, before they are saved."""

import math
from collections.abc import Sequence

import torch

from ddpkit.errors import UserError
from ddpkit.ranks import replicas
from ddpkit.run.progress import LOSS, Rows
from ddpkit.run.states import Names


def check_weights(names: Names, where: str) -> None:
    """Raise a UserError unless all weights that are trained are finite; one device read."""
    named = ((name, each) for each, name in names.items() if each.requires_grad)
    trained = replicas.plain(named)
    # faster than isfinite, and as exact: what is not finite is NaN then, all else 0
    sums = [(weight * 0).sum().abs().float() for weight in trained.values()]
    if not sums:
        return
    values = torch.stack([each.to(sums[0].device) for each in sums]).tolist()
    for name, value in zip(trained, values, strict=True):
        if value != 0:
            raise not_finite(name, where)


def check_losses(of_ranks: Sequence[Rows], where: str) -> None:
    """Raise a UserError unless the sums of losses are finite, of all ranks, or of this one."""
    finite = [math.isfinite(rows[LOSS][2]) for rows in of_ranks]
    if all(finite):
        return
    what = "the loss"
    if any(finite):
        what = f"the loss of rank {finite.index(False)}"
    raise not_finite(what, where)


def not_finite(what: str, where: str) -> UserError:
    return UserError(
        f"{what} became NaN or inf at {where}; the checkpoints are from before: try a lower "
        "learning rate, a longer warmup or gradient clipping, and check the data"
    )
