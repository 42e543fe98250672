"""Whether losses and weights are numbers, before they are saved."""

import math
import shlex
from collections.abc import Sequence

import torch
from torch import nn

from ddpkit.errors import UserError
from ddpkit.ranks import distributed
from ddpkit.run.progress import LOSS, Rows
from ddpkit.run.resuming import Checkpoints


def check_weights(model: nn.Module, run: Checkpoints) -> None:
    """Raise a UserError unless all weights are finite; one device read."""
    # but for float8, with which nothing is trained
    weights = {
        name: each.detach()
        for name, each in model.named_parameters()
        if each.element_size() > 1
    }
    device = next(model.parameters()).device
    # faster than isfinite, and as exact: what is not finite is NaN then, all else 0
    is_zero = [((each * 0).sum() == 0).to(device) for each in weights.values()]
    for name, is_finite in zip(weights, torch.stack(is_zero).tolist(), strict=True):
        if not is_finite:
            raise not_finite(name, distributed.rank(), run)


def check_losses(of_ranks: Sequence[Rows], run: Checkpoints) -> None:
    """Raise a UserError unless the sums of losses are finite, of all ranks, or of this one."""
    finite = [math.isfinite(rows[LOSS][2]) for rows in of_ranks]
    if all(finite):
        return
    what = "the loss"
    rank = distributed.rank()
    if len(finite) > 1:
        rank = finite.index(False)
        if any(finite):
            what = f"the loss of rank {rank}"
    raise not_finite(what, rank, run)


def not_finite(what: str, rank: int, run: Checkpoints) -> UserError:
    epoch = run.epoch + 1
    step = run.done or 1
    folder = run.folder.path
    again = f"--resume {shlex.quote(str(folder / 'last.pt'))} --output-dir ANOTHER"
    return UserError(
        f"{what} became NaN or inf at epoch {epoch}, step {step}: try a lower --lr or more "
        f"--warmup-epochs, and check the input images; the checkpoints in {folder} are from "
        f"before; to debug it: {again} --debug-rank {rank}, with a breakpoint in train_one_epoch "
        "on the condition: not loss.isfinite()"
    )
