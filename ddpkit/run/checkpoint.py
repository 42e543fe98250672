"""Checkpoints: files of plain types that `torch.load(path, weights_only=True)` reads."""

import contextlib
import errno
import math
import os
import pickle
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from ddpkit import files
from ddpkit.data.format import Format, parse_keys
from ddpkit.errors import DiskError, LineError, UserError, reason_of, shorten
from ddpkit.run import states
from ddpkit.run.flags import OF_A_START
from ddpkit.run.states import PLAIN, State

ANOTHER = "use the model.py and flags of that run"
OTHER_RUN = "choose another --output-dir, or use --resume never to start over"
# As torch says it
NO_MEMORY = re.compile("bad_?alloc|alloc_cpu|can't allocate memory|out of memory", re.I)
# What a checkpoint has to contain, besides what a training loader adds
NEEDED = """model optimizer scheduler kinds args format classes history epoch step seen
    images global_batch channels seed best best_of resumed_from"""
KEYS = NEEDED.split()
# Of which kind each entry is, by an example; see `is_like`.
BY_KIND: tuple[tuple[object, str], ...] = (
    ({}, "model trained optimizer scheduler criterion args format kinds parts"),
    ({}, "variables sums of_ranks"),
    (0, "epoch step done seen images global_batch channels ranks length"),
    (0, "virtual_ranks"),
    ("", "best_of resumed_from sampler training_set path"),
    (True, "draws_by_rank is_inside"),
    ((None, 0.0), "seed best"),
    ((None, [[0]]), "colors"),
    ([("", True, None)], "best_by"),
    ([""], "classes"),
    ([{}], "history settings"),
    ([[0.0]], "totals"),
)
EXAMPLES = {name: kind for kind, names in BY_KIND for name in names.split()}


class Damaged(UserError):
    """The file is not as it was written; an earlier one may be used."""


class Foreign(UserError):
    """The file is as it was written, but no checkpoint of this project."""


def write_file(path: Path, state: State) -> None:
    """Write `state` to `path`, and wait until the disk has it."""
    try:
        with open(path, "wb") as new:
            torch.save(state, new)
    except RuntimeError as error:
        raise said_by_disk(error) from None
    files.sync(path)  # a disk may say only now that it is full


@contextlib.contextmanager
def writing(path: Path, state: State) -> Iterator[None]:
    """Save `state` as `path`, whole or not at all; the block comes before it has that name."""
    with files.writing(path) as tmp_path:
        files.retried(path, write_file, tmp_path, state)
        yield


def said_by_disk(error: Exception) -> BaseException:
    """Return the OSError that an error of another library hides, if it does."""
    inner = error.__context__
    return inner if isinstance(inner, OSError) else error


def check_archive(file: BinaryIO) -> bool:
    """Return whether it is an archive, and raise if that is damaged: torch.load does not look."""
    if file.read(4) != b"PK\3\4":  # by which torch.load takes a file for an archive
        if zipfile.is_zipfile(file):  # which looks at the end
            raise zipfile.BadZipFile("unexpected data before its start")
        return False
    try:
        archive = zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        raise said_by_disk(error) from None
    entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise zipfile.BadZipFile("compressed, which torch.save does not do")
    # parts that overlap would be read again and again
    if sum(entry.file_size for entry in entries) > os.fstat(file.fileno()).st_size:
        raise zipfile.BadZipFile("its entries are larger than the file")
    has_folder = any(entry.external_attr & 0x10 for entry in entries)
    if archive.testzip() or has_folder:  # for torch that is an empty tensor
        raise zipfile.BadZipFile("checksum mismatch")
    return True


def read(
    path: Path | str, keys: Iterable[str] = ("model", "classes", "args", "format")
) -> State:
    """Return the checkpoint at `path`, tensors on the CPU."""
    state = read_file(path)
    check_entries(path, state, {*keys, "channels"})
    try:
        parse_keys({**state["format"]})
    except states.MISFITS as error:
        reason = reason_of(error, 120)
        raise Foreign(
            f"{path}: written by an incompatible ddpkit (format: {reason})"
        ) from None
    # flags of that start, not of the run
    for name in OF_A_START:
        state["args"].pop(name, None)
    return {**state, "path": str(path)}


def check_entries(
    path: Path | str, state: State, needed: Iterable[str], whose: str = "this project"
) -> None:
    """Raise Foreign unless a checkpoint has what is `needed`, and all is of its kind."""
    wrong = [f"no {name}" for name in sorted({*needed} - state.keys())]
    for name in EXAMPLES.keys() & state.keys():
        if not is_like(state[name], EXAMPLES[name]):
            wrong.append(f"wrong type of {name}")
    if wrong:
        raise Foreign(
            f"{path}: not a checkpoint of {whose} ({shorten(wrong)}): use last.pt, best.pt, or a "
            "copy of one of them"
        )


def is_like(value: object, example: object) -> bool:
    """Return whether `value` is of the kind of `example`, or of one of a tuple.

    Each entry of a list is of the kind of its first; an integer is a count, of 64 bits.
    """
    if isinstance(example, tuple):
        return any(is_like(value, each) for each in example)
    if isinstance(example, list):
        if not isinstance(value, list | tuple):
            return False
        return all(is_like(each, example[0]) for each in value)
    if isinstance(example, float):
        return isinstance(value, int | float)
    if type(example) is int:
        return type(value) is int and 0 <= value < 2**63
    return isinstance(value, type(example))


def read_file(path: Path | str, known: Sequence[Any] = ()) -> State:
    """Return the dict in any file of torch.save, tensors on the CPU.

    known: types, and functions, that it may hold besides plain types.
    """
    is_whole = False

    def attempt() -> Any:
        nonlocal is_whole
        with (
            files.open_file(path, sys.maxsize) as file,
            torch.serialization.safe_globals([*known]),
        ):
            is_whole = check_archive(file)
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)

    try:
        state = files.retried(path, attempt)
        files.check_size(path, state)
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
    if isinstance(error, FileNotFoundError) and not os.path.lexists(path):
        return UserError(f"{path}: no such file")
    # such as a folder, or a link that leads nowhere
    is_no_file = os.path.lexists(path) and not os.path.isfile(path)
    # EINVAL: an offset before the beginning, as an archive may have that is cut short.
    is_cut = getattr(error, "errno", None) in (None, errno.EINVAL)
    if isinstance(error, OSError) and not is_cut and not is_no_file:
        return files.failure(path, error, "read")
    said = getattr(error, "strerror", None) or str(error).strip()
    reason = re.split(r"\n|\. ", said)[0][:120] or type(error).__name__
    # torch's words for a file of another kind
    reason = reason.replace("Weights only load failed", "not a torch.save file")
    if isinstance(error, MemoryError) or NO_MEMORY.search(str(error)):
        return DiskError(f"{path}: not enough memory to read it ({reason})")
    if is_whole and isinstance(error, pickle.UnpicklingError):
        name = re.search(r"GLOBAL (\S+)|$", said)
        such = f", such as {name[1]}" if name and name[1] else ""
        return Foreign(
            f"{path}: not a readable checkpoint (torch.load with weights_only=True rejects "
            f"non-plain types{such})"
        )
    # Torch's reader of archives looks at more than zipfile does.
    return Damaged(
        f"{path}: not a readable checkpoint ({reason}); use another, such as runs/NAME/best.pt"
    )


def check_classes(
    path: Path | str, known: Sequence[str], classes: Sequence[str]
) -> None:
    """Raise a UserError unless the checkpoint's classes are those of the data."""
    if list(known) != list(classes):
        then = f"{len(known)} classes ({shorten(known)})"
        now = f"{len(classes)} classes ({shorten(classes)})"
        line = (
            f"{path} has {then}, the data has {now}: the classes or their order differ"
        )
        raise UserError(f"{line}; use that run's data, or {keep_weights(path)}")


def keep_weights(path: Path | str) -> str:
    """Return the flags that begin another run with the weights of the checkpoint at `path`."""
    best = Path(path).with_name("best.pt")
    weights = best if best.is_file() else path
    return f"load only its weights: --weights {weights} --output-dir ANOTHER"


def check_format(state: State, format: Format) -> None:
    """Raise a UserError unless images are read and normalised as those of the checkpoint were."""
    then = Format(**state["format"])
    for name in ("channels", "value_range", "statistics"):
        before = to_plain(getattr(then, name))
        now = to_plain(getattr(format, name))
        if before != now:
            raise UserError(
                f"{state['path']} was trained with {name} {before}, not {now}: fix data.json or "
                "MEAN and STD in dataset.py, or retrain with the new values"
            )


def changes(then: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Return the flags that have changed since a checkpoint, such as "--lr 0.1 (was 0.2)"."""
    changed = []
    for name, value in to_plain(dict(now)).items():
        if name not in then or then[name] == value:
            continue
        before = "not given" if then[name] is None else then[name]
        changed.append(f"--{name.replace('_', '-')} {value} (was {before})")
    return ", ".join(changed)


def to_undo(state: State, classes: Sequence[str], flags: Mapping[str, object]) -> str:
    """Return what to do if the checkpoint `state` does not fit, with the flags that have changed.

    Raises a UserError if it is of other `classes` than those of the data.
    """
    path = state["path"]
    check_classes(path, state["classes"], classes)
    changed = changes(state["args"], flags)
    such = f", such as {changed}" if changed else ""
    return f"undo the change{such}, or {keep_weights(path)}"


def load_weights(model: nn.Module, state: State, remedy: str = ANOTHER) -> None:
    """Copy the checkpoint's weights into `model`, or raise a UserError with the `remedy`."""
    with states.fitting(state["path"], "the model of model.py", remedy):
        states.load_module(model, state["model"])


def to_plain(value: object) -> Any:
    """Return `value` with numbers of NumPy and torch as those of Python, other types as text."""
    if isinstance(value, dict):
        return {to_plain(key): to_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(to_plain, value))
    if isinstance(value, Tensor | np.generic) and math.prod(value.shape) == 1:
        value = value.item()
    if isinstance(value, float):
        value = float(value)  # of a Score
    return value if type(value) in PLAIN else str(value)
