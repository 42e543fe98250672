"""Checkpoint files: plain types that `torch.load(path, weights_only=True)` reads, with a checksum.

The checksum covers the whole file and is the comment of the zip archive that torch.save writes:
torch.load checks nothing, and the checksums within an archive do not cover its directory.
"""

import functools
import os
import pickle
import re
import stat
import zipfile
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from engine import files
from engine.data.images import Format
from engine.errors import UserError, shorten
from engine.run.palette import Classes

State = dict[str, Any]  # what a checkpoint holds, by name
ParseArgs = Callable[[Sequence[str], dict[str, Any]], Namespace]

CHECKSUM = b"crc32:"  # and eight digits
OTHER_RUN = "choose another --output-dir, or use --resume never to start over"
READ_ERRORS = (
    *(OSError, RuntimeError, EOFError, LookupError, ValueError),
    *(pickle.UnpicklingError, zipfile.BadZipFile, zlib.error),
)


class Damaged(UserError):
    """The content of the file has changed since it was written; an earlier file may be used."""

    def __init__(self, path: Path | str, reason: str) -> None:
        self.reason = f"{path}: not a readable checkpoint ({reason})"
        super().__init__(f"{self.reason}; use a copy of it, or another checkpoint")


def write(path: Path, state: State, verify: bool) -> None:
    """Write `state` and its checksum to `path`; with `verify`, check that it can be read back."""
    _save(state, path)
    with open(path, "r+b") as file:
        file.seek(-2, os.SEEK_END)  # the length of the archive's comment
        file.write((len(CHECKSUM) + 8).to_bytes(2, "little") + CHECKSUM)
        file.write(compute_checksum(file, file.tell()))
    if not verify:
        return
    try:
        read_file(path)
    except UserError:
        raise UserError(
            f"{find_culprit(state, path)}: its state_dict cannot be read from a checkpoint; "
            "it may contain only tensors, numbers, strings, lists and dicts"
        ) from None


def _save(state: State, path: Path) -> None:
    try:
        with open(path, "wb") as file:
            torch.save(state, file)
    except RuntimeError as error:  # which hides what the disk has said
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def find_culprit(state: State, path: Path) -> str:
    """Return the name of the first entry of `state` that cannot be read back from a file."""
    for name, value in state.items():
        _save({name: value}, path)
        try:
            read_file(path)
        except UserError:
            return name
    return "the checkpoint"


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
    is_whole = False
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(None, "not a regular file")
        is_whole = files.retried(path, has_checksum, path)
        if not is_whole and zipfile.is_zipfile(path):  # written by another program
            with zipfile.ZipFile(path) as archive:
                if damaged := archive.testzip():
                    raise zipfile.BadZipFile(f"a checksum in it is wrong, of {damaged}")
            is_whole = True
        load = functools.partial(torch.load, map_location="cpu", weights_only=True)
        state = files.retried(path, load, path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such checkpoint file") from None
    except PermissionError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); make it readable") from None
    except READ_ERRORS as error:
        if is_whole and isinstance(error, pickle.UnpicklingError):
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
        there, here = sorted({*known} - {*classes}), sorted({*classes} - {*known})
        if not there and not here and len(known) == len(classes):
            number = next(i for i, name in enumerate(known) if name != classes[i])
            raise UserError(
                f"{path} has the classes of the data in another order (class {number} is "
                f"{known[number]} there, {classes[number]} in the data): {OTHER_RUN}"
            )
        raise UserError(
            f"{path} has {len(known)} classes, the data has {len(classes)} (only the checkpoint: "
            f"{shorten(there) or 'none'}; only the data: {shorten(here) or 'none'}): {OTHER_RUN}"
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
