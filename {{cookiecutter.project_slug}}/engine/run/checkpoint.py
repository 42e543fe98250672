"""Checkpoints: plain types in `last.pt` and `best.pt`, written by rank 0, read by all.

`last-1.pt` is the save before `last.pt`, `last-2.pt` the one before that, up to --keep of them.
Each file ends with a checksum of all of it, as the comment of the zip archive that torch.save
writes: torch.load checks nothing, and the checksums within an archive do not cover its directory.
"""

import argparse
import contextlib
import itertools
import math
import os
import pickle
import re
import stat
import zipfile
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from engine.errors import UserError, shorten
from engine.ranks import distributed, process, protocol
from engine.run import files

# What a run writes into its folder beside last.pt and its like; removed by `--resume never`.
OWN_FILES = (
    "*.pt.corrupt*",
    "best.pt",
    "best-*.pt",
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
    *("model", "optimizer", "scheduler", "layout", "epoch", "step", "seen", "totals", "pictures"),
    *("global_batch", "best", "best_of", "history", "classes", "args"),
)
SEAL = b"crc32:"  # and eight digits
REMEDY = "choose another --output-dir, or --resume never to start afresh"
READ_ERRORS = (
    *(OSError, RuntimeError, EOFError, LookupError, ValueError),
    *(pickle.UnpicklingError, zipfile.BadZipFile, zlib.error),
)


class Damaged(UserError):
    """A file that is no longer what was written, so that the one before it is to be used."""

    def __init__(self, path: Path | str, reason: str) -> None:
        self.reason = f"{path}: not a readable checkpoint ({reason})"
        super().__init__(f"{self.reason}; use a copy of it, or another checkpoint")


def open_run(
    args: Namespace,
    classes: Sequence[str],
    network_flags: Sequence[str],
    add_arguments: Callable[..., None],
) -> dict[str, Any] | None:
    """Prepare the output folder; return the checkpoint to go on from, None to start afresh.

    Raises a UserError if the folder cannot be written, or if the checkpoint cannot be read, is of
    another network (one of `network_flags` differs), of another optimizer or of other classes.
    """
    state = find_furthest(args)
    if state is None:
        return None
    state["args"] = plain(vars(known_flags(state, add_arguments)))
    path, old, new = state["path"], state["args"], plain(vars(args))
    for name in (*network_flags, "optimizer"):
        if old.get(name) != new[name]:
            raise UserError(f"{path} was trained with {flag(name, old)}, not {new[name]}: {REMEDY}")
    check_classes(path, state["classes"], classes)
    distributed.say(describe(state, new))
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
        there, here = sorted({*known} - {*classes}), sorted({*classes} - {*known})
        raise UserError(
            f"{path} has {len(known)} classes, the data has {len(classes)} (only the checkpoint: "
            f"{shorten(there) or 'none'}; only the data: {shorten(here) or 'none'}): {REMEDY}"
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
    begun, launch = folder / protocol.BEGUN, os.environ.get(protocol.LAUNCH_ID)
    if resume == "never" and launch and begun.is_file() and begun.read_bytes() == launch.encode():
        resume = "auto"  # one of MAX_RESTARTS
    if resume == "never":
        return None
    found = saves(folder)
    if resume == "auto":
        return load_newest(found) if found else None
    if found and not is_in(folder, resume):
        return load_newest(found)
    for path in found:  # back to a checkpoint of this folder, unless last.pt has come of that
        with contextlib.suppress(Damaged):
            if load(path, KEYS)["args"]["resume"] == resume:
                return load_newest(found)
            break
    return load(resume, KEYS)


def is_in(folder: Path, path: Path | str) -> bool:
    return Path(path).parent.resolve() == folder.resolve()


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
            reasons.append(error.reason)
            continue
        for bad, reason in zip(paths, reasons, strict=False):
            if distributed.is_rank_zero():
                aside = set_aside(bad)
                distributed.say(f"{reason}; set aside as {aside.name}, going on from {path.name}")
        return state
    raise UserError(f"{'; '.join(reasons)}: {REMEDY}")


def set_aside(path: Path) -> Path:
    """Rename `path` to PATH.corrupt, or PATH.corrupt-1 and so on; return that."""
    aside, number = Path(f"{path}.corrupt"), 0
    while os.path.lexists(aside):
        number += 1
        aside = Path(f"{path}.corrupt-{number}")
    return path.rename(aside)


def read_best(folder: Path, best_of: str | None, until: float) -> float:
    """Return the score of best.pt, -inf if there is none; on rank 0.

    best_of: what the score has to be of; None, if a best.pt is not of this run. until: the epoch
    after which it does not count. A best.pt that is not meant is kept as best-1.pt, best-2.pt and
    so on, and is taken again where it is.
    """
    best = folder / "best.pt"
    kept = sorted(folder.glob("best-*.pt"), key=lambda path: path.stat().st_mtime, reverse=True)
    reason = ""
    for path in (best, *kept) if best_of else (best,):
        if not os.path.lexists(path):
            continue
        try:
            state = load(path, KEYS)
        except Damaged as error:
            if path == best:
                aside = set_aside(path)
                distributed.say(f"{error.reason}; set aside as {aside.name}")
            continue
        except UserError as error:
            reason = reason or str(error)
            continue
        if state["best_of"] == best_of and state["epoch"] <= until:
            if path != best:
                keep_best(best, reason)
                path.rename(best)
                distributed.say(f"{path}: has the best {best_of}; taken again as best.pt")
            return state["best"]
        reason = reason or f"{path}: has the best {state['best_of']} of epoch {state['epoch']}"
    keep_best(best, reason)
    return -math.inf


def keep_best(best: Path, reason: str) -> None:
    """Rename best.pt, if it is there, to a name that is free, and say so."""
    if os.path.lexists(best):
        numbers = (best.with_name(f"best-{number}.pt") for number in itertools.count(1))
        kept = best.rename(next(path for path in numbers if not os.path.lexists(path)))
        distributed.say(f"{reason}; kept as {kept.name}")


def begin(folder: Path) -> None:
    """Note that this launch began here: restarted, it resumes despite --resume never; on rank 0."""
    if distributed.is_rank_zero() and (launch := os.environ.get(protocol.LAUNCH_ID)):
        with files.writing(folder / protocol.BEGUN) as beside:
            beside.write_bytes(launch.encode())


def clear(folder: Path) -> None:
    """Remove what a former run left in `folder`, and only that; on rank 0."""
    old = sorted({*saves(folder), *(path for name in OWN_FILES for path in folder.glob(name))})
    if old and distributed.is_rank_zero():
        if folders := [path for path in old if path.is_dir()]:
            raise UserError(f"{folders[0]}: a folder where a file is to be; remove or rename it")
        names = ", ".join(path.name for path in old)
        distributed.say(f"--resume never: removing {names} from {folder}")
        with process.holding_signals():  # not half of it
            for path in old:
                path.unlink()


def known_flags(state: dict[str, Any], add_arguments: Callable[..., None]) -> Namespace:
    """Return a checkpoint's flags, and those of `add_arguments` that are newer, by default."""
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_argument_group())
    parser.set_defaults(**state["args"])  # text is converted to the flag's type
    return parser.parse_args([])


def load_network(model: nn.Module, state: dict[str, Any]) -> None:
    """Load the checkpoint's weights into `model`, or raise a UserError if they do not fit."""
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        reason = " ".join(str(error).split("\n")[1].split())
        raise UserError(f"{state['path']} does not fit what model.py builds ({reason})") from None


def load_model(
    path: Path | str,
    build_model: Callable[..., nn.Module],
    add_arguments: Callable[..., None],
    device: torch.device,
) -> tuple[nn.Module, list[str], Namespace]:
    """Return the network of a checkpoint, ready to predict, its class names and its flags."""
    state = load(path)
    flags = known_flags(state, add_arguments)
    model = build_model(flags, state["classes"])
    load_network(model, state)
    model = model.eval().to(device).to(memory_format=torch.channels_last)
    return model, state["classes"], flags


def plain(value: Any) -> Any:
    """Return `value` as types that torch.load takes with weights_only=True.

    Numbers of NumPy and torch become Python's; what is no number, text, list or dict, its text.
    """
    if isinstance(value, dict):
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        value = value.item()
    is_plain = value is None or type(value) in (bool, int, float, str, bytes)
    return value if is_plain else str(value)


def save(
    folder: Path,
    state: dict[str, Any],
    is_best: bool,
    keep: int,
    replace: bool = False,
    prove: bool = False,
) -> None:
    """Write `state` as last.pt, and as best.pt if it is the best so far; on rank 0.

    Of the former ones, `keep` - 1 stay; with `replace` last.pt is not one of them. With `prove`
    the file is read back before it takes that name.
    """
    if not distributed.is_rank_zero():
        return
    # last.pt comes second: once it tells of a new best, that one is in best.pt.
    if is_best:
        with files.writing(folder / "best.pt") as beside:
            write(beside, state, prove)
    with files.writing(folder / "last.pt") as beside:
        write(beside, state, prove)
        files.sync(beside)  # a disk may say only now that it is full
        for age in range(0 if replace else keep - 1, 0, -1):
            newer = folder / (f"last-{age - 1}.pt" if age > 1 else "last.pt")
            with contextlib.suppress(FileNotFoundError):
                newer.replace(folder / f"last-{age}.pt")
    with contextlib.suppress(OSError):  # not every disk can do that
        files.sync(folder)
    age = keep
    while (path := folder / f"last-{age}.pt").exists():  # of a run that kept more
        path.unlink(missing_ok=True)
        age += 1


def write(path: Path, state: dict[str, Any], prove: bool) -> None:
    """Write `state` and its checksum to `path`; with `prove`, see whether it can be loaded."""
    torch.save(state, path)
    with open(path, "r+b") as file:
        file.seek(-2, os.SEEK_END)  # the length of the archive's comment
        file.write((len(SEAL) + 8).to_bytes(2, "little") + SEAL)
        file.write(checksum(file, file.tell()))
    if not prove:
        return
    try:
        load_file(path)
    except UserError:
        raise UserError(
            f"{culprit(state, path)}: its state_dict cannot be loaded from a checkpoint; "
            "it has to hold tensors, numbers, strings, lists and dicts alone"
        ) from None


def culprit(state: dict[str, Any], path: Path) -> str:
    """Return the name of the first entry of `state` that cannot be loaded from a file."""
    for name, value in state.items():
        torch.save({name: value}, path)
        try:
            load_file(path)
        except UserError:
            return name
    return "the checkpoint"


def checksum(file: BinaryIO, length: int) -> bytes:
    """Return the CRC-32 of the first `length` bytes of `file` as eight digits."""
    file.seek(0)
    total = 0
    while piece := file.read(min(length, 2**20)):
        total = zlib.crc32(piece, total)
        length -= len(piece)
    return b"%08x" % total


def is_sealed(path: Path | str) -> bool:
    """Return whether the file has a checksum; raise a BadZipFile if it is wrong."""
    with open(path, "rb") as file:
        length = file.seek(0, os.SEEK_END) - 8
        file.seek(max(length - len(SEAL), 0))
        end = file.read()
        if not end.startswith(SEAL) or len(end) != len(SEAL) + 8:
            return False
        if checksum(file, length) != end[len(SEAL) :]:
            raise zipfile.BadZipFile("its checksum is wrong")
    return True


def load(path: Path | str, keys: Iterable[str] = ("model", "classes", "args")) -> dict[str, Any]:
    """Return the checkpoint at `path`, tensors on the CPU; a UserError if it cannot be used."""
    state = load_file(path)
    if missing := sorted(set(keys) - state.keys()):
        raise UserError(f"{path}: no checkpoint of this project ({', '.join(missing)} missing)")
    return {**state, "path": str(path)}


def load_file(path: Path | str) -> dict[str, Any]:
    is_whole = False
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(None, "not a regular file")
        is_whole = is_sealed(path)
        if not is_whole and zipfile.is_zipfile(path):  # of another program
            with zipfile.ZipFile(path) as archive:
                if damaged := archive.testzip():
                    raise zipfile.BadZipFile(f"a checksum in it is wrong, of {damaged}")
            is_whole = True
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such checkpoint file") from None
    except PermissionError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); make it readable") from None
    except READ_ERRORS as error:
        if is_whole and isinstance(error, pickle.UnpicklingError):
            raise UserError(
                f"{path}: not a readable checkpoint (more than plain types); "
                "weights_only=True has to be able to load it"
            ) from None
        reason = getattr(error, "strerror", None) or re.split(r"\n|\. ", str(error).strip())[0]
        raise Damaged(path, reason[:120]) from None
    if not isinstance(state, dict):
        raise UserError(f"{path}: not a checkpoint but a {type(state).__name__}")
    return state
