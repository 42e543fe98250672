"""Checkpoints: files of plain types that `torch.load(path, weights_only=True)` reads.

An optimizer's state goes by the names of weights.
"""

import contextlib
import copy
import errno
import gc
import math
import os
import pickle
import re
import stat
import zipfile
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves, tree_map_only

from ddpkit import files
from ddpkit.data.format import Format
from ddpkit.errors import DiskError, LineError, UserError, shorten
from ddpkit.ranks import distributed
from ddpkit.ranks.replicas import uncompiled, weights_of

if TYPE_CHECKING:
    from ddpkit.data.masks import Classes

State = dict[str, Any]  # what a checkpoint holds, by name
Names = Mapping[Tensor, str]
Parts = Mapping[str, Any]  # what has a state_dict, by name
ParseArgs = Callable[[Sequence[str], dict[str, Any]], Namespace]

OTHER_RUN = "choose another --output-dir, or use --resume never to start over"
# As torch says it
NO_MEMORY = re.compile("bad_?alloc|alloc_cpu|can't allocate memory|out of memory", re.I)
CONTAINERS = {dict, OrderedDict, list, tuple}
PLAIN = {type(None), bool, int, float, str, bytes}
KINDS: dict[str, Any] = {  # of what a checkpoint holds; integers are not negative
    "model": dict,
    "optimizer": dict,
    "scheduler": dict,
    "kinds": dict,
    "args": dict,
    "format": dict,
    "classes": list,
    "history": list,
    "totals": list,
    "epoch": int,
    "step": int,
    "seen": int,
    "images": int,
    "global_batch": int,
    "channels": int,
    "seed": (int, float, str),
    "best": (int, float),
    "best_of": str,
    "resumed_from": str,
}
# what a checkpoint has to contain, besides what a training loader adds
KEYS = tuple(KINDS)
# The kind of what they consist of.
OF_ROWS = {"args": str, "classes": str, "history": dict, "totals": list}
# What kernels of torch take for as large as the weight, without a look.
MOMENTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum"}
MISFITS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
ALIKE = (dict, (list, tuple), str, Tensor, (bool, int, float))
# to others lies the way of other libraries
STORED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COMPILED = "_orig_mod."  # in names of weights, by torch.compile
ON_HOST = ("cpu", "meta")  # kinds of device whose tensors are saved as they are
TAKEN = {*PLAIN, Counter, torch.Size, torch.dtype, torch.device}  # by weights_only=True


class Damaged(UserError):
    """The file is not as it was written; an earlier one may be used."""


class Foreign(UserError):
    """The file is as it was written, but no checkpoint of this project."""


def write(path: Path, state: State) -> None:
    """Write `state` to `path`, and wait until the disk has it."""
    try:
        with open(path, "wb") as new:
            torch.save(state, new)
    except RuntimeError as error:  # which hides what the disk has said
        raise (
            error.__context__ if isinstance(error.__context__, OSError) else error
        ) from None
    files.sync(path)  # a disk may say only now that it is full


def check_archive(file: BinaryIO) -> bool:
    """Return whether it is an archive, and raise if that is damaged: torch.load does not look."""
    if file.read(4) != b"PK\3\4":  # by which torch.load takes a file for an archive
        if zipfile.is_zipfile(file):  # which looks at the end
            raise zipfile.BadZipFile("something is before its beginning")
        return False
    try:
        archive = zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:  # also for what the disk has said
        raise (
            error.__context__ if isinstance(error.__context__, OSError) else error
        ) from None
    entries = archive.infolist()
    if any(entry.compress_type not in STORED for entry in entries):
        raise zipfile.BadZipFile("compressed in a way that torch.save does not use")
    has_folder = any(entry.external_attr & 0x10 for entry in entries)
    if archive.testzip() or has_folder:  # for torch that is an empty tensor
        raise zipfile.BadZipFile("a checksum is wrong")
    return True


def read(
    path: Path | str, keys: Iterable[str] = ("model", "classes", "args", "format")
) -> State:
    """Return the checkpoint at `path`, tensors on the CPU."""
    state = read_file(path)
    if missing := sorted({*keys, "channels"} - state.keys()):
        raise Foreign(
            f"{path}: not a checkpoint of this project ({', '.join(missing)} missing): use "
            "last.pt, best.pt, or a copy of one of them"
        )
    for name in sorted(KINDS.keys() & state.keys()):
        kind = KINDS[name]
        value = state[name]
        least = name == "global_batch"
        is_right = isinstance(value, kind) and (kind is not int or value >= least)
        if is_right and name in OF_ROWS:
            is_right = all(isinstance(row, OF_ROWS[name]) for row in value)
        if not is_right:
            raise Foreign(
                f"{path}: not a checkpoint of this project ({name} is {value!r:.60})"
            )
    if state.get("seen", 0) > state.get("images", math.inf):
        line = f"{state['seen']} images seen of {state['images']}"
        raise Foreign(f"{path}: not a checkpoint of this project ({line})")
    if unknown := state["format"].keys() - Format.__dataclass_fields__.keys():
        raise Foreign(
            f"{path}: of another ddpkit (format has {shorten([*map(str, unknown)])})"
        )
    return {**state, "path": str(path)}


def read_file(path: Path | str) -> State:
    """Return the dict in any .pt file, tensors on the CPU."""
    is_whole = False

    def attempt() -> Any:
        nonlocal is_whole
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(None, "not a regular file")
        with open(path, "rb") as file:
            is_whole = check_archive(file)
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)

    try:
        state = files.retried(path, attempt)
    except LineError:
        raise
    except Exception as error:  # zipfile, pickle and torch have no common one
        raise unreadable(path, error, is_whole) from None
    if not isinstance(state, dict):
        raise Foreign(f"{path}: not a checkpoint but a {type(state).__name__}")
    return state


def unreadable(path: Path | str, error: Exception, is_whole: bool) -> LineError:
    """Return what to raise: Damaged only if the file says so, not a want of memory or handles.

    is_whole: an archive whose checksums are right.
    """
    # EINVAL: a place before the beginning, as an archive may name that is cut short.
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
        return files.failure(path, error, "read")
    reason = (
        getattr(error, "strerror", None) or re.split(r"\n|\. ", str(error).strip())[0]
    )
    reason = reason[:120] or type(error).__name__
    if isinstance(error, MemoryError) or NO_MEMORY.search(str(error)):
        return DiskError(f"{path}: there is too little memory to read it ({reason})")
    if isinstance(error, pickle.UnpicklingError) and is_whole:
        reason = (
            "more than plain types: torch.load cannot read it with weights_only=True"
        )
    line = f"{path}: not a readable checkpoint ({reason})"
    # Torch's reader of archives looks at more than zipfile does.
    if is_whole and isinstance(error, pickle.UnpicklingError):
        return Foreign(line)
    return Damaged(f"{line}: another one is needed")


def check_classes(
    path: Path | str, known: Sequence[str], classes: Sequence[str]
) -> None:
    """Raise a UserError unless the checkpoint's classes are those of the data."""
    if list(known) != list(classes):
        then, now = (
            f"{len(names)} classes ({shorten(names)})" for names in (known, classes)
        )
        line = f"{path} has {then}, the data has {now}: others, or in another order"
        raise UserError(f"{line}; {OTHER_RUN}")


def check_format(state: State, format: Format) -> None:
    """Raise a UserError unless images are read and normalised as those of the checkpoint were."""
    if "format" not in state:
        return
    then = Format(**state["format"])
    for name in "channels", "value_range":
        before, now = to_plain(getattr(then, name)), to_plain(getattr(format, name))
        if before != now:
            line = f"{state['path']} was trained with {name} {before} in data.json, not {now}"
            raise UserError(f"{line}: use the same data.json, or train anew with it")
    if then.statistics != format.statistics:
        raise UserError(
            f"{state['path']} was trained with mean and std {then.statistics}, not "
            f"{format.statistics}: correct data.json, or MEAN and STD in dataset.py, or train anew "
            "with them"
        )


def changes(then: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Return the flags that have changed since a checkpoint, such as "--lr 0.1 (was 0.2)"."""
    return ", ".join(
        f"--{name.replace('_', '-')} {value} (was {then[name]})"
        for name, value in to_plain(dict(now)).items()
        if name in then and then[name] != value and name not in ("resume", "eval_only")
    )


def load_weights(model: nn.Module, state: State, more: str = "") -> None:
    """Copy the checkpoint's weights into `model`, or raise a UserError, which ends with `more`."""
    try:
        load_module(model, state["model"])
    except MISFITS as error:
        lines = str(error).split("\n")  # after a heading of torch's
        reason = " ".join((lines[1:] or lines)[0].split())[:200]
        if {f"net.{name}" for name in model.state_dict()} == state["model"].keys():
            more = (
                "; wrap the network in version 1's class Logits (docs/migration.md), or keep only "
                f"its weights: --weights {state['path']} --output-dir ANOTHER"
            )
        line = f"{state['path']} does not fit what model.py builds ({reason}){more}"
        raise UserError(line) from None


def kind_of(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()


def open_model(
    path: Path | str,
    build_model: Callable[[Namespace, Sequence[str], int], nn.Module],
    parse_args: ParseArgs,
    device: torch.device,
) -> tuple[nn.Module, "Classes", Namespace, Format]:
    """Return the network of a checkpoint, ready to predict, its classes, flags and image format.

    build_model, parse_args: of model.py and flags.py; flags that are newer than the checkpoint have
        their defaults.

    Raises a UserError if the file cannot be read, or holds other weights than `build_model` makes.

        model, classes, args, format = ddpkit.open_model("best.pt", build_model, parse_args, device)
    """
    from ddpkit.data.masks import Classes  # of images

    state = read(path)
    args, format = parse_args([], state["args"]), Format(**state["format"])
    model = build_model(args, state["classes"], state["channels"])
    load_weights(model, state)
    model = uncompiled(model)  # a compiled one would compile for each size
    model = model.eval().to(device).to(memory_format=torch.channels_last)
    return model, Classes(state["classes"], state.get("colors")), args, format


def to_plain(value: object) -> Any:
    """Return `value` with numbers of NumPy and torch as those of Python, other types as text."""
    if isinstance(value, dict):
        return {to_plain(key): to_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(to_plain, value))
    if isinstance(value, np.generic) or (
        isinstance(value, Tensor) and value.numel() == 1
    ):
        value = value.item()
    if isinstance(value, float):
        value = float(value)  # of a Score
    return value if type(value) in PLAIN else str(value)


def take_states(parts: Parts) -> State:
    """Return the state of each part for a checkpoint; names are those without torch.compile."""
    states, names = {}, names_of(parts)
    for name, part in parts.items():
        state = (
            by_name(part, names) if isinstance(part, Optimizer) else part.state_dict()
        )
        if not isinstance(part, nn.Module):  # such as a rate from np.cos
            state = tree_map_only(np.generic, lambda x: x.item(), state)
        elif any(COMPILED in key for key in state):
            state = {key.replace(COMPILED, ""): value for key, value in state.items()}
        for leaf in tree_leaves(state, is_leaf=lambda x: type(x) not in CONTAINERS):
            if not isinstance(leaf, Tensor) and type(leaf) not in TAKEN:
                kind = f"{type(leaf).__name__}, which torch.load(weights_only=True) refuses"
                raise UserError(f"{name}: its state_dict has a {kind}")
        states[name] = state
    return to_host(states)


def load_module(module: nn.Module, saved: State) -> None:
    """Load the weights of a network; it and what was saved may each be compiled or not."""
    own = {name.replace(COMPILED, ""): name for name in module.state_dict()}
    if any(COMPILED in name for name in (*own.values(), *saved)):
        plain = {name.replace(COMPILED, ""): value for name, value in saved.items()}
        saved = {own.get(name, name): value for name, value in plain.items()}
    # What torch would load in silence: whole numbers, or NaN.
    check_alike("its state", module.state_dict(), saved)
    for name, _ in module.named_parameters():
        if name in saved and saved[name].isnan().any():
            raise ValueError(f"{name} has NaN")
    module.load_state_dict(saved)


def summary(parts: Parts) -> str:
    """Return a text that differs if the state of a part does; it reads the device once."""
    states = {name: part.state_dict() for name, part in parts.items()}
    leaves = tree_leaves(states, is_leaf=lambda x: type(x) not in CONTAINERS)
    tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
    others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    sums = []
    for each in tensors:
        # the largest, as that is faster
        kind = OF_BYTES.get(each.element_size(), torch.uint8)
        sums.append(each.flatten().view(kind).sum(dtype=torch.int64))
    found = torch.stack([each.to(sums[0].device) for each in sums])
    return f"{found.tolist()} {others}"


def to_host(state: State) -> State:
    """Return `state` with tensors on the CPU; on rank 0, others have no use for it."""
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    if not distributed.is_rank_zero() or all(t.device.type in ON_HOST for t in tensors):
        return state
    return copy.deepcopy(
        state, {id(tensor): tensor.detach().cpu() for tensor in tensors}
    )


def names_of(parts: Parts) -> dict[Tensor, str]:
    """Return the name of each weight of the networks in `parts`: "fc.bias", "trained.fc.bias"."""
    return {
        weight: (key if name == "model" else f"{name}.{key}").replace(COMPILED, "")
        for name, part in parts.items()
        if isinstance(part, nn.Module)
        for key, weight in part.named_parameters()
    }


def by_name(optimizer: Optimizer, names: Names) -> State:
    """Return an optimizer's state_dict() with the names of weights in place of their numbers."""
    weights = weights_of(optimizer)
    known = [names.get(w, f"{i} {tuple(w.shape)}") for i, w in enumerate(weights)]
    state = optimizer.state_dict()
    moments = {known[i]: values for i, values in sorted(state["state"].items())}
    groups = [
        {**g, "params": [known[i] for i in g["params"]]} for g in state["param_groups"]
    ]
    return {**state, "state": moments, "param_groups": groups}


def kinds(parts: Parts) -> dict[str, str]:
    """Return the class of each optimizer and scheduler."""
    return {
        n: type(p).__name__
        for n, p in parts.items()
        if isinstance(p, Optimizer | LRScheduler)
    }


def load_states(state: State, parts: Parts, step: int) -> None:
    """Load `state`, a checkpoint, into all `parts` but the model.

    With a LambdaLR settings and rates are those of the flags, at `step`; else they are as saved.
    """
    path, scheduler, names = state["path"], parts["scheduler"], names_of(parts)
    by_flags = type(scheduler) is LambdaLR
    if not by_flags:
        kind = type(scheduler).__name__
        distributed.print0(
            f"{kind} and the optimizer's settings resume as saved, not as flags say"
        )
    for name, part in parts.items():
        if name not in state:
            distributed.print0(
                f"{path} has no {name}: it starts from its initial state"
            )
        elif name != "model":
            remedy = (
                "undo that to resume, or keep only its weights: "
                f"--weights {path} --output-dir ANOTHER"
            )
            with fitting(path, name, remedy):
                then = state["kinds"].get(name)
                if by_flags and part is scheduler:
                    check_kind(name, part, then, state[name])
                    follow(scheduler, parts["optimizer"], state[name], step)
                else:
                    is_by_flags = by_flags and name == "optimizer"
                    load_part(name, part, state[name], then, names, is_by_flags)


@contextlib.contextmanager
def fitting(path: str, name: str, remedy: str) -> Iterator[None]:
    """Say in one line that a part of a checkpoint does not fit."""
    try:
        yield
    except MISFITS as error:
        reason = " ".join(str(error).split())[:200]
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
    by_flags: bool = False,
) -> None:
    """Give a part its saved state; it was of the class `then`.

    by_flags: an optimizer keeps its settings.
    """
    if not saved:  # of a GradScaler that was off
        return
    check_kind(name, part, then, saved)
    if isinstance(part, nn.Module):
        load_module(part, saved)
    elif isinstance(part, Optimizer):
        part.load_state_dict(as_made(saved, part, names, by_flags))
    else:
        part.load_state_dict(saved)


def as_made(saved: State, optimizer: Optimizer, names: Names, by_flags: bool) -> State:
    """Return the `saved` state of an optimizer, by name, as its load_state_dict() takes it."""
    then = [group["params"] for group in saved["param_groups"]]
    known = [group["params"] for group in by_name(optimizer, names)["param_groups"]]
    if [*map(set, then)] != [*map(set, known)]:
        had, have = (
            " + ".join(str(len(group)) for group in each) for each in (then, known)
        )
        raise ValueError(f"groups had {had} weights and have {have}, or others")
    weights = weights_of(optimizer)
    sized = MOMENTS if "fused" in optimizer.defaults else set()
    # What the kernels of Adam and AdamW ask for; SGD begins without.
    needed = (
        ("exp_avg", "exp_avg_sq") if sized and "betas" in optimizer.defaults else ()
    )
    moments: dict[int, State] = {}
    without: list[str] = []
    for i, name in enumerate(name for group in known for name in group):
        if name in saved["state"]:
            state = saved["state"][name]
            for key in needed:
                if state.get(key) is None:
                    raise ValueError(f"{name} has no {key}")
            moments[i] = {
                k: like(k, v, weights[i], k in sized) for k, v in state.items()
            }
        elif weights[i].requires_grad:
            without.append(name)
    if moments and without:
        line = f"the saved optimizer has no state of {shorten(without)}, as of frozen weights"
        distributed.print0(f"{line}: it starts there anew")
    groups = []
    current = optimizer.state_dict()["param_groups"]
    for old, group in zip(saved["param_groups"], current, strict=True):
        own = {
            k: v
            for k, v in group.items()
            if by_flags or k in ("params", "fused", "foreach")
        }
        check_alike("param_groups", {**group, "params": None}, old)
        groups.append({**old, **own})
    return {**saved, "state": moments, "param_groups": groups}


def like(key: str, value: Any, weight: Tensor, is_sized: bool) -> Any:
    """Return a saved moment in its weight's layout, on which fused kernels rely.

    Raises a ValueError if it is NaN, or if `is_sized` and not as large as the weight: these kernels
    would read and write beyond it.
    """
    if is_sized:
        check_alike(key, weight, value)
    if not isinstance(value, Tensor):
        return value
    if value.isnan().any():
        raise ValueError(f"{key} is NaN")
    if key == "step" and (value.numel() != 1 or value < 0):
        raise ValueError(f"step is {value!s:.60}")
    if is_sized and value.shape != weight.shape:
        raise ValueError(
            f"{key} has shape {tuple(value.shape)}, its weight {tuple(weight.shape)}"
        )
    if value.shape != weight.shape or not value.ndim:
        return value
    return torch.empty_like(weight, dtype=value.dtype).copy_(value)


def check_alike(name: str, now: Any, then: Any) -> None:
    """Raise a ValueError if a saved value is of another kind than the one of now; None is any."""
    if now is None or then is None:
        return
    now, then = (
        x.item() if isinstance(x, Tensor) and not x.ndim else x for x in (now, then)
    )
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


def follow(scheduler: LambdaLR, optimizer: Optimizer, saved: State, step: int) -> None:
    """Set a schedule, and the learning rates, to `step`."""
    if step < 0:
        raise ValueError(f"last_epoch is {step}")
    pairs = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    rates = [float(lr * factor(step)) for lr, factor in pairs]
    more = {"base_lrs": scheduler.base_lrs, "last_epoch": step, "_last_lr": rates}
    scheduler.load_state_dict({**saved, **more, "lr_lambdas": [None] * len(rates)})
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def fill_momenta(parts: Parts) -> None:
    """Give each weight of a fused SGD a momentum, of 0.

    torch would begin with any memory if GradScaler skips the first step, and fail if some have one.
    """
    for optimizer in parts.values():
        for group in (
            optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ()
        ):
            for weight in (
                group["params"] if group["fused"] and group["momentum"] else ()
            ):
                if optimizer.state[weight].get("momentum_buffer") is None:
                    optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(
                        weight
                    )


def weights_in(parts: Iterable[object]) -> set[Tensor]:
    """Return the weights of the networks among `parts`."""
    networks = [part for part in parts if isinstance(part, nn.Module)]
    return {weight for network in networks for weight in network.parameters()}


def strays(parts: Parts) -> int:
    """Return how many weights of the optimizers among the parts no network among them has."""
    optimizers = [part for part in parts.values() if isinstance(part, Optimizer)]
    trained = {weight for optimizer in optimizers for weight in weights_of(optimizer)}
    return len(trained - weights_in(parts.values()))


def unsaved(parts: Parts) -> list[str]:
    """Return the kinds of optimizers of these networks, of their schedulers and averages that are
    not among the parts, and so are not saved.
    """
    known = [*parts.values()]
    for part in known:  # and those within, as of a SequentialLR or a Lookahead
        if isinstance(part, Optimizer | LRScheduler):
            within = tree_leaves([*vars(part).values()])
            known += [
                each for each in within if isinstance(each, Optimizer | LRScheduler)
            ]
    saved = {id(part) for part in known}
    weights = weights_in(known)
    names = [name for name, _ in parts["model"].named_parameters()]

    def is_ours(each: Optimizer | LRScheduler | AveragedModel) -> bool:
        if isinstance(each, AveragedModel):
            return names == [name for name, _ in each.module.named_parameters()]
        optimizer = each.optimizer if isinstance(each, LRScheduler) else each
        return isinstance(optimizer, Optimizer) and not weights.isdisjoint(
            weights_of(optimizer)
        )

    kinds = Optimizer, LRScheduler, AveragedModel
    # By type: __class__ of a stand-in may be anything.
    found = [each for each in gc.get_objects() if issubclass(type(each), kinds)]
    return sorted(
        type(each).__name__ for each in found if id(each) not in saved and is_ours(each)
    )
