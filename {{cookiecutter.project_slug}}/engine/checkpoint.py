"""Checkpoints: plain types in `last.pt` and `best.pt`, written by rank 0, read by all.

`last-1.pt` is the save before `last.pt`, `last-2.pt` the one before that, up to --keep of them.
"""

import contextlib
import math
import os
import pickle
import re
import zipfile
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from engine import distributed, files, process
from engine.distributed import UserError

# What a run writes into its folder beside last.pt and its like; --resume never removes these.
OWN_FILES = (
    "last*.pt.corrupt",
    "best.pt",
    "metrics.csv",
    "args.json",
    "curves.png",
    "examples.png",
    "events.out.tfevents.*",
)
# Flags that do not change what is learnt: no need to tell that they are others now.
MAY_DIFFER = (
    "debug_port",
    "debug_rank",
    "dist_timeout",
    "keep",
    "local_rank",
    "output_dir",
    "resume",
    "save_every",
    "workers",
    "prefetch",
    "pin_memory",
)
KEYS = (  # what a run goes on from
    *("model", "optimizer", "scheduler", "epoch", "step", "seen", "totals", "pictures", "best"),
    *("history", "classes", "args"),
)
BEGUN = ".begun"  # holds the LAUNCH_ID of the last launch that began to train here
REMEDY = "choose another --output-dir, or --resume never to start afresh"


READ_ERRORS = (
    *(RuntimeError, EOFError, ValueError, KeyError),
    *(pickle.UnpicklingError, zipfile.BadZipFile, zlib.error),
)


class Damaged(UserError):
    """A file that is no longer what was written, so that the one before it is to be used."""


def open_run(
    args: Namespace, classes: Sequence[str], network_flags: Sequence[str]
) -> dict[str, Any] | None:
    """Prepare the output folder; return the checkpoint to go on from, None to start afresh.

    Raises a UserError if the folder cannot be written, or if the checkpoint cannot be read, is of
    another network (one of `network_flags` differs), of another optimizer or of other classes.
    """
    state = find_furthest(args)
    if state is None:
        return None
    path, old, new = state["path"], state["args"], plain(args)
    for name in (*network_flags, "optimizer"):
        if old.get(name) != new[name]:
            raise UserError(f"{path} was trained with {flag(name, old)}, not {new[name]}: {REMEDY}")
    check_classes(path, state["classes"], classes)
    distributed.say(describe(state, new))
    if not (args.output_dir / "best.pt").exists():
        state["best"] = -math.inf  # of another folder: what is best here is yet to come
    return state


def find_furthest(args: Namespace) -> dict[str, Any] | None:
    """Return the checkpoint that has got furthest, on all ranks; None if there is none.

    If the nodes do not share a disk, the first rank of each has a look at its own.
    """
    with distributed.rank_zero_first():
        if distributed.is_rank_zero():
            prepare(args.output_dir, args.resume)
        is_first = distributed.local_rank() == 0  # of its node
        state = find(args.output_dir, args.resume) if is_first else None
    step, path = (state["step"], state["path"]) if state else (-1, "")
    reached = distributed.gather_objects((step, path, is_first))
    furthest = max(reached)[0]
    if furthest == -1:
        return None
    if any(step != furthest for step, _, is_first in reached if is_first):
        source = [step for step, _, _ in reached].index(furthest)
        return distributed.from_rank(source, lambda: state)
    if state is None:
        path = next(path for _, path, _ in reversed(reached[: distributed.rank()]) if path)
        state = load(path, KEYS)
    return state


def describe(state: dict[str, Any], new: dict[str, Any]) -> str:
    """Return a line: how far the checkpoint has got, and what the flags `new` change."""
    old = state["args"]
    line = f"{state['path']}: {state['epoch']} of {new['epochs']} epochs done"
    if state["epoch"]:
        line += f", best {state['best']:.4f}"
    ranks_then, ranks = len(state["totals"]), distributed.world_size()
    batch_then = old["batch_size"] * old["accumulate"] * ranks_then
    batch = new["batch_size"] * new["accumulate"] * ranks
    if state["seen"]:
        line += f" and {state['seen'] // batch_then} steps of the next"
    if ranks_then != ranks:
        line += (
            f"; {ranks_then} rank(s) then, {ranks} now: the same pictures in the same order, but "
            "BatchNorm, dropout and rounding differ"
        )
    if batch_then != batch:
        line += (
            f"; global batch (--batch-size x ranks x --accumulate) {batch_then} then, {batch} now"
        )
    if changed := [n for n in new if n in old and old[n] != new[n] and n not in MAY_DIFFER]:
        line += f"; from now on {', '.join(f'{flag(n, new)} (was {old[n]})' for n in changed)}"
    return line


def check_classes(path: Path | str, known: Sequence[str], classes: Sequence[str]) -> None:
    """Raise a UserError unless the checkpoint's classes are those of the data."""
    if list(known) != list(classes):
        raise UserError(
            f"{path} knows {len(known)} classes ({shorten(known)}), the data has {len(classes)} "
            f"({shorten(classes)}): {REMEDY}"
        )


def flag(name: str, flags: dict[str, Any]) -> str:
    return f"--{name.replace('_', '-')} {flags.get(name)}"


def prepare(folder: Path, resume: str) -> None:
    """Make and lock the output folder, or raise a UserError; on rank 0."""
    if resume not in ("auto", "never") and not Path(resume).is_file():
        raise UserError(f"--resume {resume}: no such file; say auto, never or a checkpoint's path")
    probe = folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
        is_free = files.lock(folder / ".lock")
    except OSError as error:
        raise UserError(f"--output-dir {folder}: cannot be written ({error.strerror})") from None
    if not is_free:
        raise UserError(
            f"--output-dir {folder}: another run is at work there: choose another folder, "
            "or remove .lock in it if that run's machine is lost"
        )


def find(folder: Path, resume: str) -> dict[str, Any] | None:
    """Return the checkpoint that `resume` ("auto", "never" or a path) means, if there is one.

    A path counts for the first start: if the run has got on since then, its own last.pt is taken.
    """
    begun = folder / BEGUN
    if begun.is_file() and begun.read_text() == os.environ.get(process.LAUNCH_ID):
        resume = "auto"  # one of MAX_RESTARTS
    if resume == "never":
        return None
    found = saves(folder)
    if resume == "auto" or (found and Path(resume).resolve().parent != folder.resolve()):
        return load_newest(found) if found else None
    return load(resume, KEYS)


def saves(folder: Path) -> list[Path]:
    """Return last.pt, last-1.pt and so on, as far as they are there: newest first."""
    older = {path.stem[5:]: path for path in folder.glob("last-*.pt")}
    ages = sorted(int(age) for age in older if age.isdecimal())  # others are the user's
    return [*folder.glob("last.pt"), *(older[str(age)] for age in ages)]


def load_newest(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the first of `paths` that can be read; rank 0 sets those before it aside, by name.

    If there is none, a UserError leaves all as they are: to start afresh is for the user to say.
    """
    reasons = []
    for path in paths:
        try:
            state = load(path, KEYS)
        except Damaged as error:
            reasons.append(str(error))
            continue
        for bad, reason in zip(paths, reasons, strict=False):
            distributed.say(f"{reason}; set aside as {bad.name}.corrupt, going on from {path.name}")
            if distributed.is_rank_zero():
                bad.replace(f"{bad}.corrupt")
        return state
    raise UserError(f"{'; '.join(reasons)}: {REMEDY}")


def begin(folder: Path) -> None:
    """Note that this launch has begun here, so that --resume counts no more; on rank 0."""
    if distributed.is_rank_zero() and (launch := os.environ.get(process.LAUNCH_ID)):
        with files.writing(folder / BEGUN) as beside:
            beside.write_text(launch)


def clear(folder: Path) -> None:
    """Remove what a former run left in `folder`, and only that; on rank 0."""
    old = sorted({*saves(folder), *(path for name in OWN_FILES for path in folder.glob(name))})
    if old and distributed.is_rank_zero():
        print(f"--resume never: removing {', '.join(p.name for p in old)} from {folder}")
        with process.holding_signals():  # not half of it
            for path in old:
                path.unlink()


def restore(
    state: dict[str, Any], optimizer: Optimizer, scheduler: LambdaLR, schedule_step: int
) -> None:
    """Load the optimizer's state; put the schedule at `schedule_step`.

    Rates and other settings are those of the flags, and the schedule goes by epochs, so both may
    have changed, and the number of ranks too.
    """
    settings = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({**state["optimizer"], "param_groups": settings})
    for weight, values in optimizer.state.items():
        for name, value in values.items():
            if value.shape == weight.shape and value.stride() != weight.stride():
                # As another memory format left it: fused kernels take it for granted.
                values[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)
    base_lrs = scheduler.base_lrs
    scheduler.load_state_dict(
        {**state["scheduler"], "base_lrs": base_lrs, "last_epoch": schedule_step}
    )
    factor = scheduler.lr_lambdas[0](schedule_step)
    for group, lr in zip(optimizer.param_groups, base_lrs, strict=True):
        group["lr"] = lr * factor


def load_network(model: nn.Module, state: dict[str, Any]) -> None:
    """Load the checkpoint's weights into `model`, or raise a UserError if they do not fit."""
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        reason = " ".join(str(error).split("\n")[1].split())
        raise UserError(f"{state['path']} does not fit what model.py builds ({reason})") from None


def load_model(
    path: Path | str, build_model: Callable[..., nn.Module], device: torch.device
) -> tuple[nn.Module, list[str], Namespace]:
    """Return the network of a checkpoint, ready to predict, its class names and its flags."""
    state = load(path)
    flags = Namespace(**state["args"])
    model = build_model(flags, state["classes"])
    load_network(model, state)
    model = model.eval().to(device).to(memory_format=torch.channels_last)
    return model, state["classes"], flags


def plain(args: Namespace) -> dict[str, Any]:
    """Return the flags as types that torch.load takes with weights_only=True."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}


def save(folder: Path, state: dict[str, Any], is_best: bool, keep: int) -> None:
    """Write `state` as last.pt, and as best.pt if it is the best so far; on rank 0.

    Of the former ones, `keep` - 1 stay.
    """
    if not distributed.is_rank_zero():
        return
    # last.pt comes second: once it tells of a new best, that one is in best.pt.
    if is_best:
        with files.writing(folder / "best.pt") as beside:
            torch.save(state, beside)
    with files.writing(folder / "last.pt") as beside:
        torch.save(state, beside)
        files.sync(beside)  # a disk may say only now that it is full
        for age in range(keep - 1, 0, -1):
            newer = folder / (f"last-{age - 1}.pt" if age > 1 else "last.pt")
            with contextlib.suppress(FileNotFoundError):
                newer.replace(folder / f"last-{age}.pt")
    with contextlib.suppress(OSError):  # not every disk can do that
        files.sync(folder)
    age = keep
    while (path := folder / f"last-{age}.pt").exists():  # of a run that kept more
        path.unlink(missing_ok=True)
        age += 1


def load(path: Path | str, keys: Iterable[str] = ("model", "classes", "args")) -> dict[str, Any]:
    """Return the checkpoint at `path`, tensors on the CPU; a UserError if it cannot be used."""
    state = load_file(path)
    if missing := sorted(set(keys) - state.keys()):
        raise UserError(f"{path}: no checkpoint of this project ({', '.join(missing)} missing)")
    return {**state, "path": str(path)}


def load_file(path: Path | str) -> dict[str, Any]:
    is_whole = False
    try:
        if zipfile.is_zipfile(path):  # what torch.save writes; weights may be older
            with zipfile.ZipFile(path) as archive:
                if damaged := archive.testzip():  # torch.load checks no checksum
                    raise zipfile.BadZipFile(f"a checksum in it is wrong, of {damaged}")
            is_whole = True
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such checkpoint file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except READ_ERRORS as error:
        what = UserError if is_whole else Damaged
        types = is_whole and isinstance(error, pickle.UnpicklingError)
        reason = (
            "more than plain types" if types else re.split(r"\n|\. ", str(error).strip())[0][:120]
        )
        raise what(f"{path}: not a readable checkpoint ({reason})") from None
    if not isinstance(state, dict):
        raise UserError(f"{path}: not a checkpoint but a {type(state).__name__}")
    return state


def shorten(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
