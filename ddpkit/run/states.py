"""The state of the parts of a run: taken for a checkpoint, loaded from one.

An optimizer's state goes by the names of weights. torch.distributed.checkpoint.state_dict does so,
too, but takes a step with an optimizer that has no state yet, refuses weights of no network, and
loads moments of other shapes, beyond which fused kernels write.
"""

import contextlib
import copy
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils._pytree import tree_leaves, tree_map_only

from ddpkit.errors import UserError, reason_of, shorten
from ddpkit.ranks import distributed, replicas
from ddpkit.ranks.replicas import weights_of
from ddpkit.ranks.virtual import VirtualRanks

State = dict[str, Any]  # what a checkpoint holds, by name
Names = Mapping[Tensor, str]
Parts = Mapping[str, Any]  # what has a state_dict, by name

CONTAINERS = {dict, OrderedDict, list, tuple}
PLAIN = {type(None), bool, int, float, str, bytes}
TAKEN = {*PLAIN, Counter, torch.Size, torch.dtype, torch.device}  # by weights_only=True
# What kernels of torch take for as large as the weight, without a look.
MOMENTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum"}
OF_THE_RUN = {
    "params",
    "fused",
    "foreach",
}  # settings of an optimizer that are never loaded
MISFITS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
ALIKE = (dict, (list, tuple), str, Tensor, (bool, int, float))
OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# what has to be the same on all ranks
ON_ALL = (Optimizer, LRScheduler, torch.amp.GradScaler)
COMPILED = "_orig_mod."  # in names of weights, by torch.compile
WITHIN = "within"  # an optimizer's state: those of the optimizers that it has
ON_HOST = ("cpu", "meta")  # kinds of device whose tensors are saved as they are


def take_states(parts: Parts) -> State:
    """Return the state of each part for a checkpoint; names are those without torch.compile."""
    names = names_of(parts)
    states = {}
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            state = uncompiled_names(part.state_dict())
        elif isinstance(part, Optimizer):
            state = by_name(part, names)
        else:
            state = part.state_dict()
        if not isinstance(part, nn.Module):  # such as a rate from np.cos
            state = tree_map_only(np.generic, lambda number: number.item(), state)
        for leaf in leaves_of(state):
            if not isinstance(leaf, Tensor) and type(leaf) not in TAKEN:
                kind = f"{type(leaf).__name__}, which torch.load(weights_only=True) refuses"
                raise UserError(f"{name}: its state_dict has a {kind}")
        states[name] = state
    return to_host(states)


def leaves_of(state: object) -> list[Any]:
    return tree_leaves(state, is_leaf=lambda x: type(x) not in CONTAINERS)


def uncompiled_names(state: State) -> State:
    """Return a network's state with the names it has without torch.compile."""
    if not any(COMPILED in name for name in state):
        return state  # with what torch notes beside it, such as versions
    return {name.replace(COMPILED, ""): value for name, value in state.items()}


def load_module(module: nn.Module, saved: State) -> None:
    """Load the weights of a network; it and what was saved may each be compiled or not."""
    current = module.state_dict()
    saved = uncompiled_names(saved)
    if any(COMPILED in name for name in current):
        own = {name.replace(COMPILED, ""): name for name in current}
        saved = {own.get(name, name): value for name, value in saved.items()}
    # What torch would load in silence: whole numbers, or NaN.
    check_alike("its state", current, saved)
    for name, _ in module.named_parameters():
        if name in saved and saved[name].isnan().any():
            raise ValueError(f"{name} has NaN")
    module.load_state_dict(saved)


def load_buffers(module: nn.Module, saved: State) -> None:
    """Load what a network has besides weights."""
    load_module(module, {**uncompiled_names(module.state_dict()), **saved})


def checksums(values: Mapping[Any, Any]) -> dict[Any, int]:
    """Return for each of the `values`, such as states, a number; it reads the device once."""
    sums: list[Tensor] = []
    owners: list = []  # of these
    others: dict[Any, list] = {name: [] for name in values}
    for name, value in values.items():
        for leaf in leaves_of(value):
            if not isinstance(leaf, Tensor):
                others[name].append(leaf)
                continue
            # as integers of the size of its numbers, which are few
            kind = OF_BYTES.get(leaf.element_size(), torch.uint8)
            flat = leaf.detach().resolve_conj().flatten()
            sums.append(flat.view(kind).sum(dtype=torch.int64))
            owners.append(name)
    if sums:  # read from the device at once
        read = torch.stack([each.to(sums[0].device) for each in sums]).tolist()
        for name, total in zip(owners, read, strict=True):
            others[name].append(total)
    return {name: zlib.crc32(repr(each).encode()) for name, each in others.items()}


def compare_ranks(
    parts: Parts, taken: State, virtual: Sequence[VirtualRanks] = ()
) -> dict[str, list[State]]:
    """Return the states of all ranks of those parts of which they differ; all have to call it.

    Of a network that is what it has besides weights. taken: what `take_states` has returned.
    virtual: networks, each with buffers of all virtual ranks, which are kept.

    Raises a UserError if that is a part that has to be the same on all ranks.
    """
    if distributed.world_size() == 1 and not virtual:
        return {}
    others = dict(taken)
    weights = {}
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            weights[name, "weights"] = replicas.plain(part.named_parameters())
            known = {key.replace(COMPILED, "") for key in weights[name, "weights"]}
            others[name] = {
                key: each for key, each in taken[name].items() if key not in known
            }
    ranks = distributed.gather_objects(checksums({**others, **weights}))
    differ = {
        key for key in ranks[0] if any(each[key] != ranks[0][key] for each in ranks)
    }
    for key in differ & weights.keys():
        replicas.check_same(weights[key])
    own = {}
    networks = {id(each.module): each for each in virtual}
    for name, part in parts.items():
        if id(part) in networks:
            mine = networks[id(part)].buffers_of_ranks()
            own[name] = list(chain(*distributed.gather_objects(mine)))
            continue
        if name not in differ:
            continue
        if isinstance(part, ON_ALL):
            raise UserError(
                f"the {name} differs between ranks: change it in the same way on all ranks, such "
                "as by a number that is reduced"
            )
        mine = tree_map_only(Tensor, lambda tensor: tensor.cpu(), others[name])
        own[name] = distributed.gather_objects(mine)
    return own


def to_host(state: State) -> State:
    """Return `state` with tensors on the CPU; on rank 0, others have no use for it."""
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    are_there = all(tensor.device.type in ON_HOST for tensor in tensors)
    if are_there or not distributed.is_rank_zero():
        return state
    # What deepcopy takes for their copies, so that a tensor in two places stays one.
    copies = {id(tensor): tensor.detach().cpu() for tensor in tensors}
    return copy.deepcopy(state, copies)


def names_of(parts: Parts) -> dict[Tensor, str]:
    """Return the name of each weight of the networks in `parts`: "fc.bias", "trained.fc.bias"."""
    found: dict[Tensor, str] = {}
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            for key, weight in part.named_parameters():
                full = key if name == "model" else f"{name}.{key}"
                found[weight] = full.replace(COMPILED, "")
    return found


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


def inner(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizers that are attributes of another one, by name, as SAM has one."""
    found = vars(optimizer).items()
    return {key: each for key, each in found if isinstance(each, Optimizer)}


def kinds(parts: Parts) -> dict[str, str]:
    """Return the class of each optimizer and scheduler."""
    found = {}
    for name, part in parts.items():
        if isinstance(part, Optimizer | LRScheduler):
            found[name] = type(part).__name__
    return found


def load_states(state: State, parts: Parts, step: int) -> None:
    """Load `state`, a checkpoint, into all `parts` but the model.

    With a LambdaLR settings and rates are those of the flags, at `step`; else they are as saved.
    """
    path = state["path"]
    scheduler = parts.get("scheduler")
    names = names_of(parts)
    by_flags = type(scheduler) is LambdaLR
    if not by_flags and scheduler is not None:
        kind = type(scheduler).__name__
        distributed.print0(
            f"{kind} and the optimizer's settings resume as saved, not as flags say"
        )
    remedy = (
        "undo that to resume, or keep only its weights: "
        f"--weights {path} --output-dir ANOTHER"
    )
    for name, part in parts.items():
        if name == "model" or is_missing(name, state, path):
            continue
        then = state["kinds"].get(name)
        with fitting(path, name, remedy):
            if by_flags and part is scheduler:
                check_kind(name, part, then, state[name])
                follow(scheduler, parts["optimizer"], state[name], step)
            else:
                keeps_settings = by_flags and name == "optimizer"
                load_part(name, part, state[name], then, names, keeps_settings)


def is_missing(name: str, states: State, path: str) -> bool:
    """Return whether a part is not among the states of the checkpoint at `path`, and say so."""
    if name in states:
        return False
    distributed.print0(f"{path} has no {name}: it starts from its initial state")
    return True


@contextlib.contextmanager
def fitting(path: str, name: str, remedy: str) -> Iterator[None]:
    """Say in one line that a part of a checkpoint does not fit."""
    try:
        yield
    except MISFITS as error:
        reason = reason_of(error, 200)
        raise UserError(
            f"{path} does not fit the {name} ({reason}); {remedy}"
        ) from None


def check_kind(name: str, part: Any, then: str | None, saved: State) -> None:
    """Raise a ValueError unless a part is of the class that it was `then`."""
    now = type(part).__name__
    if then not in (None, now):
        raise ValueError(f"it was {then} and is {now}")
    if isinstance(part, LRScheduler | torch.amp.GradScaler):
        check_alike(name, part.state_dict(), saved)


def load_part(
    name: str,
    part: Any,
    saved: State,
    then: str | None,
    names: Names,
    keeps_settings: bool = False,
) -> None:
    """Give a part its saved state; it was of the class `then`.

    keeps_settings: of an optimizer, such as its weight decay.
    """
    if not saved:  # of a GradScaler that was off
        return
    check_kind(name, part, then, saved)
    if isinstance(part, nn.Module):
        load_module(part, saved)
    elif isinstance(part, Optimizer):
        load_optimizer(part, saved, names, keeps_settings)
    else:
        part.load_state_dict(saved)


def load_optimizer(
    optimizer: Optimizer, saved: State, names: Names, keeps_settings: bool
) -> None:
    """Give an optimizer, and those within it, what `by_name` has returned."""
    within = inner(optimizer)
    first = optimizer.param_groups[0]
    shared = [each for each in within.values() if each.param_groups[0] is first]
    optimizer.load_state_dict(by_number(saved, optimizer, names, keeps_settings))
    for key, state in saved.get(WITHIN, {}).items():
        if key in within:
            load_optimizer(within[key], state, names, keeps_settings)
    for each in shared:  # a scheduler of one changes the rates of both, as before
        each.param_groups = optimizer.param_groups


def by_number(
    saved: State, optimizer: Optimizer, names: Names, keeps_settings: bool
) -> State:
    """Return the `saved` state of an optimizer, by name, as its load_state_dict() takes it."""
    then = [group["params"] for group in saved["param_groups"]]
    now = [group["params"] for group in by_name(optimizer, names)["param_groups"]]
    if list(map(set, then)) != list(map(set, now)):
        had = " + ".join(str(len(group)) for group in then)
        have = " + ".join(str(len(group)) for group in now)
        raise ValueError(f"groups had {had} weights and have {have}, or others")
    moments: dict[int, State] = {}
    without: list[str] = []
    known = [name for group in now for name in group]
    for number, weight in enumerate(weights_of(optimizer)):
        name = known[number]
        if name in saved["state"]:
            values = saved["state"][name]
            moments[number] = fitted_moments(name, values, weight, optimizer)
        elif weight.requires_grad:
            without.append(name)
    if moments and without:
        line = f"the saved optimizer has no state of {shorten(without)}, as of frozen weights"
        distributed.print0(f"{line}: it starts there anew")
    groups = []
    current = optimizer.state_dict()["param_groups"]
    for old, group in zip(saved["param_groups"], current, strict=True):
        check_alike("param_groups", {**group, "params": None}, old)
        kept = group.keys() if keeps_settings else group.keys() & OF_THE_RUN
        groups.append(old | {key: group[key] for key in kept})
    return {**saved, "state": moments, "param_groups": groups}


def fitted_moments(
    name: str, values: State, weight: Tensor, optimizer: Optimizer
) -> State:
    """Return the saved moments of a weight, by name, on which its kernel relies.

    Raises a ValueError if one is missing, NaN, or of another kind or shape.
    """
    is_fused = "fused" in optimizer.defaults
    if is_fused and "betas" in optimizer.defaults:  # Adam and AdamW; SGD begins without
        for key in ("exp_avg", "exp_avg_sq"):
            if values.get(key) is None:
                raise ValueError(f"{name} has no {key}")
    found = {}
    for key, value in values.items():
        is_sized = is_fused and key in MOMENTS
        if is_sized:
            check_alike(key, weight, value)
        if isinstance(value, Tensor):
            value = fitted_moment(key, value, weight, is_sized)
        found[key] = value
    return found


def fitted_moment(key: str, value: Tensor, weight: Tensor, is_sized: bool) -> Tensor:
    """Return a saved moment in its weight's layout, on which fused kernels rely.

    is_sized: it has to be as large as the weight: these kernels would read and write beyond it.
    """
    if value.isnan().any():
        raise ValueError(f"{key} is NaN")
    if key == "step" and (value.numel() != 1 or value < 0):
        raise ValueError(f"step is {value!s:.60}")
    if value.shape == weight.shape and value.ndim:
        return torch.empty_like(weight, dtype=value.dtype).copy_(value)
    if is_sized and value.shape != weight.shape:
        raise ValueError(
            f"{key} has shape {tuple(value.shape)}, its weight {tuple(weight.shape)}"
        )
    return value


def check_alike(name: str, now: Any, then: Any) -> None:
    """Raise a ValueError if a saved value is of another kind than the one of now; None is any."""
    if now is None or then is None:
        return
    now = value_of(now)
    then = value_of(then)
    for kind in ALIKE:
        if isinstance(now, kind) != isinstance(then, kind):
            raise ValueError(f"{name} is {then!r:.60}")
    if isinstance(now, Tensor) and kind_of(now) != kind_of(then):
        raise ValueError(f"{name} is {then.dtype}, not {now.dtype}")
    if isinstance(now, dict):
        for key in now.keys() & then.keys():
            check_alike(f"{name}: {key}", now[key], then[key])
    if isinstance(now, list | tuple):
        for one, other in zip(now, then, strict=False):
            check_alike(name, one, other)


def value_of(value: Any) -> Any:
    """Return the number in a tensor without dimensions; anything else as it is."""
    return value.item() if isinstance(value, Tensor) and not value.ndim else value


def kind_of(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()


def follow(scheduler: LambdaLR, optimizer: Optimizer, saved: State, step: int) -> None:
    """Set a schedule, and the learning rates, to `step`."""
    if step < 0:
        raise ValueError(f"last_epoch is {step}")
    rates = []
    for lr, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        rates.append(float(lr * factor(step)))
    now = {
        "base_lrs": scheduler.base_lrs,
        "last_epoch": step,
        "_last_lr": rates,
        "lr_lambdas": [None] * len(rates),
    }
    scheduler.load_state_dict(saved | now)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


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
