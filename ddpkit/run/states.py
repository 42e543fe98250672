"""The state of the parts of a run: taken for a checkpoint, loaded from one.

An optimizer's state goes by the names of weights. torch.distributed.checkpoint.state_dict does so,
too, but takes a step with an optimizer that has no state yet, refuses weights of no network, and
loads moments of other shapes, beyond which fused kernels write.
"""

import contextlib
import copy
import warnings
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils._pytree import tree_map_only

from ddpkit.errors import UserError, clip, reason_of, shorten
from ddpkit.ranks import distributed, replicas
from ddpkit.ranks.module_state import PLAIN
from ddpkit.ranks.replicas import weights_of

State = dict[str, Any]  # what a checkpoint holds, by name
Names = Mapping[Tensor, str]
Parts = Mapping[str, Any]  # what has a state_dict, by name

TAKEN = {*PLAIN, torch.Size, torch.dtype, torch.device}  # by weights_only=True
# What kernels of torch take for as large as the weight, without a look.
MOMENTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum"}
# settings of an optimizer that are never loaded
OF_THE_RUN = {"params", "fused", "foreach"}
# What is raised for a state that does not fit
MISFITS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
# what has to be the same on all ranks
ON_ALL = (Optimizer, LRScheduler, torch.amp.GradScaler)
COMPILED = "_orig_mod."  # in names of weights, by torch.compile
WITHIN = "within"  # an optimizer's state: those of the optimizers that it has


# Of the parts, as a checkpoint holds them.


def take_states(parts: Parts) -> State:
    """Return the state of each part for a checkpoint; names are those without torch.compile.

    On rank 0 that is a copy on the CPU.
    """
    names = names_of(parts)
    states = {}
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            state = uncompiled_names(part.state_dict())
        else:
            state = (
                by_name(part, names)
                if isinstance(part, Optimizer)
                else part.state_dict()
            )
            # such as a rate from np.cos
            state = tree_map_only(np.generic, lambda number: number.item(), state)
        states[name] = state
    is_saved = distributed.is_rank_zero()  # others have no use for copies
    # What deepcopy takes for them, so that a tensor in two places stays one.
    copies = {}
    for name, state in states.items():
        for leaf in leaves_of(state):
            if not isinstance(leaf, Tensor):
                if type(leaf) not in TAKEN:
                    raise UserError(
                        f"{name}: its state_dict has a {type(leaf).__name__}, which "
                        "torch.load(weights_only=True) rejects: use numbers, strings, tensors, "
                        "lists and dicts; pass an object with a state_dict under its own name"
                    )
            elif is_saved and not leaf.is_meta:
                copies[id(leaf)] = leaf.detach().cpu()
    return copy.deepcopy(states, copies) if is_saved else states


def is_metric(part: object) -> bool:
    """Return whether it is torchmetrics', a module without a state unless it is persistent."""
    return hasattr(part, "persistent")


def leaves_of(state: Any) -> list:
    """Return what is in containers, and the keys of dicts."""
    if type(state) in (dict, OrderedDict, Counter):
        state = [*state, *state.values()]
    elif type(state) not in (list, tuple):
        return [state]
    return [leaf for each in state for leaf in leaves_of(each)]


def uncompiled_names(state: State) -> State:
    """Return a network's state with the names it has without torch.compile."""
    if not any(COMPILED in name for name in state):
        return state  # with what torch notes beside it, such as versions
    return {name.replace(COMPILED, ""): value for name, value in state.items()}


def names_of(parts: Parts) -> dict[Tensor, str]:
    """Return the name of each weight of the networks in `parts`: "fc.bias", "trained.fc.bias"."""
    weights: dict[str, Tensor] = {}
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            prefix = "" if name == "model" else name
            for full, weight in part.named_parameters(prefix):
                full = full.replace(COMPILED, "")
                # a head may be beside a model that has one
                if weights.setdefault(full, weight) is not weight:
                    weights[f"{full} of {name}"] = weight
    return {weight: full for full, weight in weights.items()}


def by_name(optimizer: Optimizer, names: Names) -> State:
    """Return an optimizer's state_dict() with the names of weights in place of their numbers.

    Also of those within it, such as SAM's, which have settings of their own or the same ones.
    """
    known = []
    for number, weight in enumerate(weights_of(optimizer)):
        known.append(names.get(weight, f"{number} {tuple(weight.shape)}"))
    state = optimizer.state_dict()
    moments = {known[i]: values for i, values in sorted(state["state"].items())}
    groups = []
    for group in state["param_groups"]:
        groups.append({**group, "params": [known[i] for i in group["params"]]})
    within = {key: by_name(each, names) for key, each in inner(optimizer).items()}
    return {**state, "state": moments, "param_groups": groups, WITHIN: within}


def settings(optimizer: Optimizer) -> list[State]:
    """Return the plain settings of each group, such as weight decay, but for the weights."""
    groups = []
    for group in optimizer.param_groups:
        own = {}
        for key, each in group.items():
            if key != "params" and {*map(type, leaves_of(each))} <= PLAIN:
                own[key] = each
        groups.append(own)
    return groups


def inner(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizers that are attributes of another one, by name, as SAM has one."""
    attributes = vars(optimizer).items()
    return {key: each for key, each in attributes if isinstance(each, Optimizer)}


def kinds(parts: Parts) -> dict[str, str]:
    """Return the class of each optimizer and scheduler."""
    return {
        name: type(part).__name__
        for name, part in parts.items()
        if isinstance(part, Optimizer | LRScheduler)
    }


# Whether they are the same on all ranks.


def compare_ranks(parts: Parts, taken: State) -> dict[str, list[State]]:
    """Return the states of all ranks of those parts of which they differ; all have to call it.

    Of a network that is what it has besides weights. taken: what `take_states` has returned.

    Raises a UserError if that is a part that has to be the same on all ranks.
    """
    if distributed.world_size() == 1:
        return {}
    weights = {name: weight for weight, name in names_of(parts).items()}
    replicas.check_same(replicas.plain(weights.items()))
    others = dict(taken)
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            known = uncompiled_names(dict(part.named_parameters()))
            others[name] = {
                key: each for key, each in taken[name].items() if key not in known
            }
    ranks = distributed.gather_objects(checksums(others))
    own = {}
    for name, part in parts.items():
        if len({each[name] for each in ranks}) == 1:
            continue
        if isinstance(part, ON_ALL):
            raise UserError(
                f"the {name} differs between ranks: change it in the same way on all ranks, such "
                "as by a reduced value"
            )
        mine = tree_map_only(Tensor, lambda each: each.detach().cpu(), others[name])
        own[name] = distributed.gather_objects(mine)
    return own


def checksums(values: Mapping[Any, object]) -> dict[Any, int]:
    """Return for each of the `values`, such as states, a number; one read of the device each."""
    sums = {}
    for name, value in values.items():
        tensors: list[Tensor] = []
        others: list[Any] = []
        for leaf in leaves_of(value):
            (tensors if isinstance(leaf, Tensor) else others).append(leaf)
        whole = [*others, *replicas.bit_sums(tensors)]
        sums[name] = zlib.crc32(repr(whole).encode())
    return sums


# Loaded from a checkpoint.


def load_states(
    saved: State,
    parts: Parts,
    checkpoint: State,
    remedy: str,
    step: int | None = None,
) -> None:
    """Give each of the parts its state, of those `saved` in a checkpoint.

    step: of a run whose optimizer and LambdaLR follow its flags: a setting that was made with
        another value then, and rates, are those of now, at this step. None, or with another
        scheduler: they are as saved.

    Raises a UserError with the `remedy` if a state is not of such a part.
    """
    path = checkpoint["path"]
    names = names_of(parts)
    scheduler = parts.get("scheduler")
    by_flags = step is not None and type(scheduler) is LambdaLR
    if step is not None and scheduler and not by_flags:
        kind = type(scheduler).__name__
        distributed.print0(
            f"{kind} and the optimizer's settings resume as saved, whatever the flags"
        )
    made: list[State] = checkpoint.get("settings", [])
    for name, part in parts.items():
        if name not in saved:
            distributed.print0(
                f"{path} has no {name}: it starts from its initial state"
            )
            continue
        state = saved[name]
        with fitting(path, f"the {name}", remedy):
            now = type(part).__name__
            then = checkpoint["kinds"].get(name, now)
            if then != now:
                raise ValueError(f"it was {then}, now {now}")
            if by_flags and name == "scheduler":
                follow(
                    part, step or 0, state, [each.get("initial_lr") for each in made]
                )
            elif isinstance(part, nn.Module):
                load_module(part, state)
            elif isinstance(part, Optimizer):
                first = None  # as saved
                if by_flags and name == "optimizer":
                    first = made
                load_optimizer(part, state, names, first)
            elif state:  # it has none of a GradScaler that was off
                part.load_state_dict(state)


@contextlib.contextmanager
def fitting(path: str, what: str, remedy: str) -> Iterator[None]:
    """Report in one line that a state in the checkpoint at `path` does not fit `what` it is for."""
    try:
        yield
    except MISFITS as error:
        said = str(error).partition(":\n")[2]  # without the heading of torch's
        reason = clip(said, 200) or reason_of(error, 200)
        line = f"{path} does not match {what} ({reason})"
        raise UserError(f"{line}; {remedy}") from None


def load_module(module: nn.Module, saved: State, **how: bool) -> None:
    """Load the weights of a network; it and what was saved may each be compiled or not."""
    module = replicas.bare(module)
    saved = uncompiled_names(saved)
    names = module.state_dict().keys()
    if any(COMPILED in name for name in names):
        own = {name.replace(COMPILED, ""): name for name in names}
        saved = {own.get(name, name): value for name, value in saved.items()}
    module.load_state_dict(saved, **how)


def follow(scheduler: LambdaLR, step: int, saved: State, made: object = None) -> None:
    """Set a schedule, and the learning rates, to `step`.

    saved: the schedule in a checkpoint, of which `made` are the first base rates, if it has them.
    What has changed these, or the rates, since then still holds, unless flags give others now.
    """
    groups = scheduler.optimizer.param_groups
    rates = [copy.deepcopy(group["lr"]) for group in groups]
    before = {"last_epoch": step - 1, "_step_count": step}
    # What is an object, not a function, resumes as it was.
    before["lr_lambdas"] = saved.get("lr_lambdas", [])
    is_same = made == scheduler.base_lrs
    if is_same:
        before["base_lrs"] = saved["base_lrs"]
    scheduler.load_state_dict({**scheduler.state_dict(), **before})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a step before the optimizer's
        scheduler.step()
    if is_same and scheduler.get_last_lr() == saved["_last_lr"]:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


def load_optimizer(
    optimizer: Optimizer, saved: State, names: Names, first: list[State] | None
) -> None:
    """Give an optimizer, and those within it, what `by_name` has returned.

    Groups that a script has added, as of weights that it unfreezes, are added again. first: as for
    `fitted`.
    """
    own = by_name(optimizer, names)["param_groups"]
    there = {name for group in own for name in group["params"]}
    weights = {name: weight for weight, name in names.items()}
    added = []
    for group in saved["param_groups"]:
        if group["params"] and there.isdisjoint(group["params"]):
            added.append(group)
    for group in added:
        members = [weights[name] for name in group["params"]]
        optimizer.add_param_group({**group, "params": members})
    if added:
        distributed.print0(
            f"{len(added)} parameter group(s), added to the optimizer before the stop, are "
            "restored: do not add them again (if len(optimizer.param_groups) == ...)"
        )
    within = inner(optimizer)
    then = {key: each.param_groups for key, each in within.items()}
    before = map(id, optimizer.param_groups)
    optimizer.load_state_dict(fitted(saved, optimizer, names, first))
    loaded = dict(zip(before, optimizer.param_groups, strict=True))
    for key, state in saved.get(WITHIN, {}).items():
        if key in within:
            of_inner: list[State] | None = None if first is None else []
            load_optimizer(within[key], state, names, of_inner)
    # Settings that they had in common they have in common: a scheduler changes both.
    for key, each in within.items():
        pairs = zip(then[key], each.param_groups, strict=True)
        each.param_groups = [loaded.get(id(old), new) for old, new in pairs]


def fitted(
    saved: State, optimizer: Optimizer, names: Names, first: list[State] | None
) -> State:
    """Return the `saved` state of an optimizer as its load_state_dict() takes it.

    That takes names in place of numbers, too, in the order of its weights.

    first: the `settings` with which the saved one was made: what is made with other values now is
        as now, and what has changed since is as saved. None: all as saved.
    """
    now = by_name(optimizer, names)["param_groups"]
    then = saved["param_groups"]
    members = [set(group["params"]) for group in now]
    if members != [set(group["params"]) for group in then]:
        raise ValueError("its parameter groups had other weights")
    groups = []
    for number, (old, group) in enumerate(zip(then, now, strict=True)):
        kept = {key: group[key] for key in group.keys() & OF_THE_RUN}
        if first is not None:
            made = first[number] if number < len(first) else {}
            for key, value in group.items():
                if key not in made or made[key] != value:
                    kept[key] = value
        groups.append(old | kept)
    moments: State = {}
    without: list[str] = []
    known = [name for group in now for name in group["params"]]
    for name, weight in zip(known, weights_of(optimizer), strict=True):
        if name in saved["state"]:
            values = saved["state"][name]
            is_fused = "fused" in optimizer.defaults
            moments[name] = fitted_moments(values, weight, is_fused)
        elif weight.requires_grad:
            without.append(name)
    if moments and without:
        line = f"the saved optimizer has no state for {shorten(without)}, as if frozen"
        distributed.print0(f"{line}: it starts fresh there")
    return {**saved, "state": moments, "param_groups": groups}


def fitted_moments(values: State, weight: Tensor, is_fused: bool) -> State:
    """Return the saved moments of a weight, in its layout, on which fused kernels rely.

    Raises a ValueError for one of another shape, beyond which these would read and write.
    """
    moments = {}
    for key, value in values.items():
        if isinstance(value, Tensor):
            # whose number of steps, of one number, too, stays where it is
            if key != "step" and value.shape == weight.shape:
                value = torch.empty_like(weight, dtype=value.dtype).copy_(value)
            elif is_fused and key in MOMENTS:
                raise ValueError(f"{key} does not have the shape of its weight")
        moments[key] = value
    return moments


def fill_momenta(parts: Parts) -> None:
    """Give each weight of a fused SGD a momentum, of 0.

    torch would begin with any memory if GradScaler skips the first step, and fail if some have one.
    """
    for part in parts.values():
        if not isinstance(part, torch.optim.SGD):
            continue
        for group in part.param_groups:
            if not (group["fused"] and group["momentum"]):
                continue
            for weight in group["params"]:
                state = part.state[weight]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(weight)
