"""Whether losses and weights are numbers, before they are saved."""

import math
from collections.abc import Sequence

from torch.nn.utils import get_total_norm

from ddpkit.errors import UserError
from ddpkit.ranks import replicas
from ddpkit.run.progress import LOSS, Rows
from ddpkit.run.states import Names


def check_weights(names: Names, where: str) -> None:
    """Raise a UserError unless all weights that are trained are finite; one device read."""
    trained = replicas.plain(
        (name, each) for each, name in names.items() if each.requires_grad
    )
    # in a tenth of the time that a look at each takes; the norm may be beyond its type
    if get_total_norm(trained.values()).isfinite():
        return
    for name, weight in trained.items():
        if not weight.isfinite().all():
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
