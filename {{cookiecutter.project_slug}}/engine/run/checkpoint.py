"""Checkpoints: files of plain types that `torch.load(path, weights_only=True)` reads.

A checksum covers the whole file and is the comment of the zip archive that torch.save writes:
torch.load checks nothing, and the checksums within an archive do not cover its directory.
An optimizer's state goes by the names of weights.
"""

import copy
import functools
import io
import os
import pickle
import re
import stat
import zipfile
import zlib
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils._pytree import tree_leaves, tree_map_only

from engine import files
from engine.data.images import Format
from engine.errors import UserError, shorten
from engine.ranks import distributed
from engine.run.pictures import Classes

State = dict[str, Any]  # what a checkpoint holds, by name
Names = Mapping[Tensor, str]
Parts = Mapping[str, Any]  # what has a state_dict, by name
ParseArgs = Callable[[Sequence[str], dict[str, Any]], Namespace]

CHECKSUM = b"crc32:"  # and eight digits
OTHER_RUN = "choose another --output-dir, or use --resume never to start over"
READ_ERRORS = (
    *(OSError, RuntimeError, EOFError, LookupError, ValueError),
    *(pickle.UnpicklingError, zipfile.BadZipFile, zlib.error),
)
CONTAINERS = {dict, OrderedDict, list, tuple}


class Damaged(UserError):
    """The content of the file has changed since it was written; an earlier file may be used."""

    def __init__(self, path: Path | str, reason: str) -> None:
        self.reason = f"{path}: not a readable checkpoint ({reason})"
        super().__init__(f"{self.reason}; use a copy of it, or another checkpoint")


def write(path: Path, state: State) -> None:
    """Write `state` and its checksum to `path`, and wait until the disk has them."""
    try:
        with open(path, "wb") as new:
            torch.save(state, new)
    except RuntimeError as error:  # which hides what the disk has said
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None
    with open(path, "r+b") as file:
        file.seek(-2, os.SEEK_END)  # the length of the archive's comment
        file.write((len(CHECKSUM) + 8).to_bytes(2, "little") + CHECKSUM)
        file.write(compute_checksum(file, file.tell()))
    files.sync(path)  # a disk may say only now that it is full


def compute_checksum(file: BinaryIO, length: int) -> bytes:
    """Return the CRC-32 of the first `length` bytes of `file` as eight digits."""
    file.seek(0)
    total = 0
    while piece := file.read(min(length, 2**20)):
        total = zlib.crc32(piece, total)
        length -= len(piece)
    return b"%08x" % total


def has_checksum(path: Path | str) -> bool:
    """Return whether the file has a checksum; raise a BadZipFile if it is wrong."""
    with open(path, "rb") as file:
        length = file.seek(0, os.SEEK_END) - 8
        file.seek(max(length - len(CHECKSUM), 0))
        end = file.read()
        if not end.startswith(CHECKSUM) or len(end) != len(CHECKSUM) + 8:
            return False
        if compute_checksum(file, length) != end[len(CHECKSUM) :]:
            raise zipfile.BadZipFile("its checksum is wrong")
    return True


def read(path: Path | str, keys: Iterable[str] = ("model", "classes", "args", "format")) -> State:
    """Return the checkpoint at `path`, tensors on the CPU; a UserError if an entry is missing."""
    state = read_file(path)
    if missing := sorted(set(keys) - state.keys()):
        raise UserError(f"{path}: not a checkpoint of this project ({', '.join(missing)} missing)")
    return {**state, "path": str(path)}


def read_file(path: Path | str) -> State:
    """Return the dict in any .pt file, tensors on the CPU; raise a UserError if it is unusable."""
    load = functools.partial(torch.load, map_location="cpu", weights_only=True)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(None, "not a regular file")
        files.retried(path, has_checksum, path)
        state = files.retried(path, load, path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such checkpoint file") from None
    except PermissionError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); make it readable") from None
    except READ_ERRORS as error:
        if isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(path):
            raise UserError(
                f"{path}: not a readable checkpoint (more than plain types); "
                "torch.load cannot read it with weights_only=True"
            ) from None
        reason = getattr(error, "strerror", None) or re.split(r"\n|\. ", str(error).strip())[0]
        raise Damaged(path, reason[:120]) from None
    if not isinstance(state, dict):
        raise UserError(f"{path}: not a checkpoint but a {type(state).__name__}")
    return state


def check_classes(path: Path | str, known: Sequence[str], classes: Sequence[str]) -> None:
    """Raise a UserError unless the checkpoint's classes are those of the data."""
    if list(known) != list(classes):
        there, here = (
            shorten(sorted({*a} - {*b})) or "none" for a, b in ((known, classes), (classes, known))
        )
        raise UserError(
            f"{path} has {len(known)} classes, the data has {len(classes)} (only the checkpoint: "
            f"{there}; only the data: {here}), or in another order: {OTHER_RUN}"
        )


def changes(then: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Return the flags that have changed since a checkpoint, such as "--lr 0.1 (was 0.2)"."""
    return ", ".join(
        f"--{name.replace('_', '-')} {value} (was {then[name]})"
        for name, value in to_plain(dict(now)).items()
        if name in then and then[name] != value and name not in ("resume", "eval_only")
    )


def load_weights(model: nn.Module, state: State) -> None:
    """Copy the checkpoint's weights into `model`, or raise a UserError if they do not fit."""
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        reason = " ".join(str(error).split("\n")[1].split())[:200]
        raise UserError(f"{state['path']} does not fit what model.py builds ({reason})") from None


def open_model(
    path: Path | str,
    build_model: Callable[[Namespace, Sequence[str], int], nn.Module],
    parse_args: ParseArgs,
    device: torch.device,
) -> tuple[nn.Module, Classes, Namespace, Format]:
    """Return the network of a checkpoint, ready to predict, its classes, flags and image format.

    build_model, parse_args: of model.py and flags.py; flags that are newer than the checkpoint have
        their defaults.

    Raises a UserError if the file cannot be read, or holds other weights than `build_model` makes.

        model, classes, args, format = engine.open_model("best.pt", build_model, parse_args, device)
    """
    state = read(path)
    args, format = parse_args([], state["args"]), Format(**state["format"])
    model = build_model(args, state["classes"], state["channels"])
    load_weights(model, state)
    model = model.eval().to(device).to(memory_format=torch.channels_last)
    return model, Classes(state["classes"], state.get("colors")), args, format


def to_plain(value: object) -> Any:
    """Return `value` as types that torch.load takes with weights_only=True.

    Numbers of NumPy and torch become Python numbers; values of other types become text.
    """
    if isinstance(value, dict):
        return {to_plain(key): to_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(to_plain, value))
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        value = value.item()
    is_plain = value is None or type(value) in (bool, int, float, str, bytes)
    return value if is_plain else str(value)


def take_states(parts: Parts) -> State:
    """Return the state of each part for a checkpoint, on rank 0; all ranks have to call it.

    Raises a UserError if torch.load could not read one of them.
    """
    states, names = {}, names_of(parts)
    for name, part in parts.items():
        state = by_name(part, names) if isinstance(part, Optimizer) else part.state_dict()
        if not isinstance(part, nn.Module):  # such as a rate from np.cos
            state = tree_map_only(np.generic, lambda x: x.item(), state)
        check_types(name, state)
        states[name] = state
    return to_host(states)


def check_types(name: str, state: State) -> None:
    """Raise a UserError unless torch.load(weights_only=True) takes the types of all values."""
    leaves = tree_leaves(state, is_leaf=lambda x: type(x) not in CONTAINERS)
    file = io.BytesIO()
    try:
        torch.save([leaf for leaf in leaves if not isinstance(leaf, Tensor)], file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (AttributeError, TypeError, pickle.PickleError):
        raise UserError(
            f"{name}: its state_dict cannot be read from a checkpoint; "
            "it may contain only tensors, numbers, strings, lists and dicts"
        ) from None


def is_part(value: object) -> bool:
    """Return whether `value` is a DTensor, as with --fsdp; to import that takes a second."""
    return hasattr(value, "full_tensor")


def to_host(state: State) -> State:
    """Return `state` with tensors on the CPU, those of --fsdp whole; on other ranks than 0 empty.

    Strides stay, and so does what a network's state has besides: the versions of its modules.
    """
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    if all(not is_part(t) and t.device.type in ("cpu", "meta") for t in tensors):
        return state
    new = {}
    for tensor in tensors:
        whole = getattr(tensor, "full_tensor", tensor.detach)()
        new[id(tensor)] = whole.cpu() if distributed.is_rank_zero() else whole.new_empty(0)
    return copy.deepcopy(state, new)


def names_of(parts: Parts) -> dict[Tensor, str]:
    """Return the name of each weight of the networks in `parts`: "fc.bias", "trained.fc.bias"."""
    return {
        weight: key if name == "model" else f"{name}.{key}"
        for name, part in parts.items()
        if isinstance(part, nn.Module)
        for key, weight in part.named_parameters()
    }


def by_name(optimizer: Optimizer, names: Names) -> State:
    """Return an optimizer's state_dict() with the names of weights in place of their numbers."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    known = [names.get(w, f"{i} {tuple(w.shape)}") for i, w in enumerate(weights)]
    state = optimizer.state_dict()
    moments = {known[i]: values for i, values in sorted(state["state"].items())}
    groups = [{**g, "params": [known[i] for i in g["params"]]} for g in state["param_groups"]]
    return {**state, "state": moments, "param_groups": groups}


def kinds(parts: Parts) -> dict[str, str]:
    """Return the class of each optimizer and scheduler, and what changes the former's state."""
    return {
        name: " ".join([type(part).__name__, *filter(defaults.get, ("amsgrad", "centered"))])
        for name, part in parts.items()
        if isinstance(part, Optimizer | LRScheduler)
        for defaults in [getattr(part, "defaults", {})]
    }


def load_states(state: State, parts: Parts, step: int, last_step: int) -> None:
    """Load `state`, a checkpoint, into all `parts` but the model.

    With a LambdaLR the optimizer's rates and other settings are those of the flags, at `step` of
    the schedule; rates that were set without it stay as they were. Any other scheduler resumes as
    it was saved, with the optimizer's settings.

    Raises a UserError if an optimizer or a scheduler is another, or has other weights.
    """
    path, scheduler, names = state["path"], parts["scheduler"], names_of(parts)
    undo = f"undo that to resume, or keep only its weights: --weights {path} --output-dir ANOTHER"
    for name, kind in kinds(parts).items():
        if (then := state["kinds"].get(name, kind)) != kind:
            raise UserError(f"{path}: the {name} was {then} and is {kind}; {undo}")
    by_flags = type(scheduler) is LambdaLR
    if not by_flags:
        kind, total = type(scheduler).__name__, state["scheduler"].get("total_steps")
        if total and total < last_step:
            line = f"{path}: its {kind} has {total} steps, but --epochs now takes {last_step}"
            raise UserError(f"{line}; leave --epochs unchanged")
        distributed.say(f"{kind} and the optimizer's settings resume as saved, not as flags say")
    for name, part in parts.items():
        if name not in state:
            distributed.say(f"{path} has no {name}: it starts from its initial state")
        elif name != "model" and state[name]:  # a GradScaler that is off has an empty one
            saved = state[name]
            try:
                if isinstance(part, Optimizer):
                    if line := difference(saved, by_name(part, names)):
                        raise UserError(f"{path}: the {name}'s parameter {line}; {undo}")
                    saved = as_made(saved, part, names, by_flags and name == "optimizer")
                if part is not scheduler or not by_flags:
                    part.load_state_dict(saved)
            except (LookupError, RuntimeError, TypeError, ValueError) as error:
                reason = " ".join(str(error).split())[:200]
                raise UserError(f"{path}: does not fit {name} ({reason})") from None
    if by_flags:
        follow(scheduler, parts["optimizer"], state, step)


def difference(saved: State, made: State) -> str:
    """Return how the weights in the groups of two optimizers' states, by name, differ, if so."""
    then, now = ([{*g["params"]} for g in state["param_groups"]] for state in (saved, made))
    if then == now:
        return ""
    had, have = (" + ".join(str(len(group)) for group in each) for each in (then, now))
    others = sorted(set().union(*(a ^ b for a, b in zip(then, now, strict=False))))
    return f"groups had {had} weights and have {have}, not the same: {shorten(others)}"


def as_made(saved: State, optimizer: Optimizer, names: Names, by_flags: bool) -> State:
    """Return the `saved` state of an optimizer, by name, as its load_state_dict() takes it.

    by_flags: whether settings are as they are now, not as saved. What is saved in groups besides,
    such as a count of steps, is kept in any case.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    known = [
        each for group in by_name(optimizer, names)["param_groups"] for each in group["params"]
    ]
    moments = {
        i: {key: like(value, weights[i]) for key, value in saved["state"][name].items()}
        for i, name in enumerate(known)
        if name in saved["state"]
    }
    now = [
        {k: v for k, v in group.items() if by_flags or k in ("params", "fused", "foreach")}
        for group in optimizer.state_dict()["param_groups"]
    ]
    pairs = zip(saved["param_groups"], now, strict=True)
    return {**saved, "state": moments, "param_groups": [{**then, **own} for then, own in pairs]}


def like(value: Any, weight: Tensor) -> Any:
    """Return a saved moment in the memory layout of its weight, on which fused kernels rely.

    With --fsdp it is shared out like the weight.
    """
    if not isinstance(value, Tensor) or value.shape != weight.shape or not value.ndim:
        return value
    if is_part(weight):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(weight, DTensor)
        value = value.to(weight.device, memory_format=torch.contiguous_format)
        return distribute_tensor(value, weight.device_mesh, weight.placements)
    return torch.empty_like(weight, dtype=value.dtype).copy_(value)


def follow(scheduler: LambdaLR, optimizer: Optimizer, state: State, step: int) -> None:
    """Set a schedule to `step`, and the learning rates, unless those were set by hand."""
    saved = state["scheduler"]
    factors = [factor(step) for factor in scheduler.lr_lambdas]
    rates = [float(lr * factor) for lr, factor in zip(scheduler.base_lrs, factors, strict=True)]
    more = {"base_lrs": scheduler.base_lrs, "last_epoch": step, "_last_lr": rates}
    scheduler.load_state_dict({**saved, **more, "lr_lambdas": [None] * len(rates)})
    then = [float(group["lr"]) for group in state["optimizer"]["param_groups"]]
    if then != [*map(float, saved["_last_lr"])]:
        distributed.say("learning rates that were set without the scheduler resume as saved")
        rates = then
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def fill_momenta(optimizer: Optimizer) -> None:
    """Give each weight of a fused SGD a momentum, of 0.

    torch would begin with what is in memory if GradScaler skips the first step, and fail if only
    some weights have one, as after --freeze-backbone.
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and group["fused"] and group["momentum"]:
            for weight in group["params"]:
                if optimizer.state[weight].get("momentum_buffer") is None:
                    optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
