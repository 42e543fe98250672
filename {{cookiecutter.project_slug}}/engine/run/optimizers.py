"""Optimizers and learning-rate schedules in checkpoints: what has to match, and how they resume."""

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from engine.errors import UserError, shorten
from engine.ranks import distributed
from engine.run import sharded
from engine.run.checkpoint import State, to_plain

NOT_SETTINGS = {"params", "lr", "initial_lr", "fused", "foreach", "capturable"}
Layout = dict[str, list]
T = TypeVar("T", bound=Optimizer)


class Stateful(Protocol):
    """What a checkpoint can hold: a network, an optimizer, a scheduler, a GradScaler, ..."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


def layout(parts: Mapping[str, Stateful]) -> Layout:
    """Return {name: [class]} of each scheduler and {name: [class, groups]} of each optimizer.

    groups: the names of the weights in each parameter group, because optimizers save their state
    by position alone.
    """
    names = {
        weight: key if name == "model" else f"{name}.{key}"
        for name, part in parts.items()
        if isinstance(part, nn.Module)
        for key, weight in part.named_parameters()
    }
    found: Layout = {}
    for name, part in parts.items():
        if isinstance(part, LRScheduler):
            found[name] = [type(part).__name__]
        elif isinstance(part, Optimizer):
            groups = [group["params"] for group in part.param_groups]
            kinds = [kind for kind in ("amsgrad", "centered") if part.defaults.get(kind)]
            found[name] = [
                " ".join([type(part).__name__, *kinds]),
                [[names.get(weight, str(tuple(weight.shape))) for weight in g] for g in groups],
            ]
    return found


def check_layout(path: str, then: Layout, now: Layout) -> None:
    """Raise a UserError unless the optimizers and schedulers are those of the checkpoint."""
    for name in then.keys() & now.keys():
        if then[name] != now[name]:
            raise UserError(
                f"{path}: {_difference(name, then[name], now[name])}; undo that to resume, "
                f"or keep only its weights: --weights {path} --output-dir ANOTHER"
            )


def _difference(name: str, then: list, now: list) -> str:
    if then[0] != now[0]:
        return f"the {name} was {then[0]} and is {now[0]}"
    sizes_then, sizes = (" + ".join(str(len(g)) for g in groups) for groups in (then[1], now[1]))
    if sizes_then != sizes:
        return f"the {name}'s parameter groups had {sizes_then} weights and have {sizes}"
    old, new = next(
        pair
        for groups in zip(then[1], now[1], strict=True)
        for pair in zip(*groups, strict=True)
        if pair[0] != pair[1]
    )
    return f"the {name}'s parameter groups have {new} where {old} was"


def load_states(
    state: State, parts: Mapping[str, Stateful], schedule_step: int, last_step: int
) -> None:
    """Load `state`, a checkpoint of the same layout, into all `parts` but the model.

    With a LambdaLR the learning rates and other settings are those of the flags, at `schedule_step`
    of the schedule; rates that were set without it stay as they were. Any other scheduler resumes
    as it was saved, with the optimizer's settings.
    """
    path, scheduler, optimizer = state["path"], parts["scheduler"], parts["optimizer"]
    check_layout(path, state["layout"], layout(parts))
    by_flags: dict[str, State] = {}
    if type(scheduler) is LambdaLR and isinstance(optimizer, Optimizer):
        by_flags = _settings(state, optimizer, scheduler, schedule_step)
    else:
        total = state["scheduler"].get("total_steps")  # of a OneCycleLR
        if total and total < last_step:
            raise UserError(
                f"{path}: its {type(scheduler).__name__} has {total} steps, but --epochs now "
                f"takes {last_step}; leave --epochs unchanged"
            )
        distributed.say(
            f"{type(scheduler).__name__} resumes as saved: changed flags do not affect its rates "
            "and length, nor the optimizer's other settings"
        )
    for name, part in parts.items():
        if name == "model":
            continue
        if state.get(name):  # a GradScaler that is off has an empty one
            try:
                saved = {**state[name], **by_flags.get(name, {})}
                if isinstance(part, Optimizer):
                    saved = sharded.distribute(_with_kernels(saved, part), part)
                part.load_state_dict(saved)
            except (LookupError, RuntimeError, TypeError, ValueError) as error:
                reason = " ".join(str(error).split())[:200]
                raise UserError(f"{path}: does not fit {name} ({reason})") from None
        elif name not in state:
            distributed.say(f"{path} has no {name}: it starts from its initial state")
        if isinstance(part, Optimizer):
            _match_strides(part)
            fill_momenta(part)


def fill_momenta(optimizer: T) -> T:
    """Give each weight of a fused SGD a momentum, of 0, and return the optimizer.

    torch would begin with what is in memory if GradScaler skips the first step, and fail if only
    some weights have one, as after --freeze-backbone.
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and group["fused"] and group["momentum"]:
            for weight in group["params"]:
                if optimizer.state[weight].get("momentum_buffer") is None:
                    optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return optimizer


def _settings(
    state: State, optimizer: Optimizer, scheduler: LambdaLR, step: int
) -> dict[str, State]:
    """Return the entries of both states that follow from the flags, at `step` of the schedule."""
    factors = [factor(step) for factor in scheduler.lr_lambdas]
    lrs = [lr * factor for lr, factor in zip(scheduler.base_lrs, factors, strict=True)]
    groups = optimizer.state_dict()["param_groups"]
    saved = state["optimizer"]["param_groups"]
    _say_changes(saved, groups)
    rates = [group["lr"] for group in saved]
    if [*map(float, rates)] == [*map(float, state["scheduler"]["_last_lr"])]:
        rates = lrs
    else:
        distributed.say("learning rates that were set without the scheduler resume as saved")
    return {
        "optimizer": {
            "param_groups": [  # some optimizers count their steps in the groups
                {**then, **now, "lr": lr}
                for then, now, lr in zip(saved, groups, rates, strict=True)
            ]
        },
        "scheduler": {
            "base_lrs": scheduler.base_lrs,
            "last_epoch": step,
            "lr_lambdas": [None] * len(lrs),
            "_last_lr": lrs,
        },
    }


def _say_changes(saved: list[State], groups: list[State]) -> None:
    """Print which settings differ from those of the checkpoint; they may have been set by hand."""
    changed = {
        f"{name} {now[name]} (was {then[name]})"
        for then, now in zip(saved, groups, strict=True)
        for name in then.keys() & now.keys() - NOT_SETTINGS
        if to_plain(then[name]) != to_plain(now[name])
    }
    if changed:
        distributed.say(f"the optimizer goes on with {shorten(sorted(changed))}")


def _with_kernels(saved: State, optimizer: Optimizer) -> State:
    """Return an optimizer's state with the kernels of `optimizer`; another device has others."""
    kernels = [
        {name: group[name] for name in ("fused", "foreach") if name in group}
        for group in optimizer.param_groups
    ]
    pairs = zip(saved["param_groups"], kernels, strict=True)
    return {**saved, "param_groups": [{**group, **own} for group, own in pairs]}


def _match_strides(optimizer: Optimizer) -> None:
    """Give the moments the memory layout of their weights: fused kernels rely on it."""
    for weight, values in optimizer.state.items():
        for name, value in values.items():
            is_moment = isinstance(value, Tensor) and value.shape == weight.shape
            if is_moment and value.stride() != weight.stride():
                values[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)
