"""Checkpoints that are damaged anyhow: never loaded wrong, never a traceback; the one before is
taken if it is good. Weights of other programs: read, or refused in a line.
"""

import functools
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch
from interrupts import differences
from setting import Setting

from ddpkit.errors import UserError
from ddpkit.ranks import distributed
from ddpkit.run import checkpoint
from ddpkit.run.folder import KEYS, RunFolder
from ddpkit.run.states import State
from ddpkit.vision import pretrained

SECONDS = 20  # of a case
HEADERS = b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\7\x08"  # of a zip


def case(chance: random.Random, folder: Path, setting: Setting) -> str:
    distributed.print0 = lambda *_: None  # a line for each
    (folder / "run").mkdir()
    old = state(chance)
    new = state(chance)
    run = RunFolder(folder / "run")
    run.add(old, is_best=True)
    run.add(new, is_best=True)
    whole = {path.name: path.read_bytes() for path in run.path.iterdir()}
    over = time.monotonic() + SECONDS
    counts = dict.fromkeys(TRIALS, 0)
    while time.monotonic() < over:
        trial = chance.choice(TRIALS)
        kind = chance.choice(DAMAGES)
        again = chance.getrandbits(64)
        damage = functools.partial(repeatable, kind, again)
        try:
            trial(damage, run.path, whole, old, new)
        except Exception as error:
            kept = {path.name: path for path in run.path.iterdir()}
            what = f"{trial.__name__}, {kind.__name__} with random.Random({again})"
            raise AssertionError(f"{what}: {error!r}; see {sorted(kept)}") from error
        counts[trial] += 1
    return ", ".join(f"{n} times {trial.__name__}" for trial, n in counts.items())


def repeatable(
    kind: Callable[[bytes, random.Random], bytes], seed: int, data: bytes
) -> bytes:
    return kind(data, random.Random(seed))


def state(chance: random.Random) -> State:
    """A small checkpoint: tensors of several types and sizes, and a real one's plain values."""
    draws = torch.Generator().manual_seed(chance.getrandbits(32))
    model = {
        f"layer.{n}": torch.randn(chance.randrange(1, 300), generator=draws)
        for n in range(4)
    }
    model["half"] = model["layer.0"].half()
    model["steps"] = torch.tensor(chance.randrange(99))
    moments = {
        name: {"exp_avg": weight.float() / 3, "step": 7}
        for name, weight in model.items()
    }
    row = {"epoch": 1, "train_loss": chance.random()}
    row["name"] = "é" * chance.randrange(9)
    plain = {}
    for name in KEYS:
        example = checkpoint.EXAMPLES[name]
        plain[name] = example[0] if isinstance(example, tuple) else example
    return plain | {
        "format": {},
        "epoch": 1,
        "step": chance.randrange(1000),
        "classes": ["a", "b"],
        "history": [row],
        "global_batch": 8,
        "images": 80,
        "model": model,
        "optimizer": {"state": moments},
    }


# A trial: damage(bytes) -> bytes, the run's folder, its whole files, what they hold.
Damage = Callable[[bytes], bytes]


def newest(damage: Damage, folder: Path, whole: dict, old: dict, new: dict) -> None:
    """last.pt is damaged: it is read right, or last-1.pt is taken."""
    restore(folder, whole)
    (folder / "last.pt").write_bytes(damage(whole["last.pt"]))
    found = RunFolder(folder)._search()
    assert found, "no checkpoint"
    right = old if found["path"].endswith("last-1.pt") else new
    assert not differences(right, {name: found[name] for name in right}), "read wrong"


def both(damage: Damage, folder: Path, whole: dict, old: dict, new: dict) -> None:
    """Both are damaged: either is read right, or they are refused, and nothing is renamed."""
    restore(folder, whole)
    for name in "last.pt", "last-1.pt":
        (folder / name).write_bytes(damage(whole[name]))
    before = sorted(path.name for path in folder.iterdir())
    try:
        found = RunFolder(folder)._search()
    except UserError as error:
        one_line(error, "last.pt")
        assert before == sorted(path.name for path in folder.iterdir())
        return
    right = old if found["path"].endswith("last-1.pt") else new
    assert not differences(right, {name: found[name] for name in right}), "read wrong"


def best(damage: Damage, folder: Path, whole: dict, old: dict, new: dict) -> None:
    """best.pt, which is evaluated, predicted with and exported: read right, or refused."""
    path = folder / "best.pt"
    path.write_bytes(damage(whole["best.pt"]))
    try:
        found = checkpoint.read(path, KEYS)
    except UserError as error:
        return one_line(error, "best.pt")
    assert not differences(new, {name: found[name] for name in new}), "read wrong"


def weights(damage: Damage, folder: Path, whole: dict, old: dict, new: dict) -> None:
    """A file of another program, also of torch before 1.6, which has no checksums."""
    path = folder.parent / "weights.pth"
    for is_zip in True, False:
        torch.save(
            {"state_dict": old["model"]}, path, _use_new_zipfile_serialization=is_zip
        )
        path.write_bytes(damage(path.read_bytes()))
        try:
            found = pretrained.read_tensors(str(path))
        except UserError as error:
            one_line(error, "weights.pth")
            continue
        saved = {f"state_dict.{name}": each for name, each in old["model"].items()}
        assert not is_zip or not differences(saved, found), "read wrong"


TRIALS = newest, newest, both, best, weights


def restore(folder: Path, whole: dict[str, bytes]) -> None:
    for path in folder.iterdir():
        if path.name not in whole:
            path.unlink()
    for name, content in whole.items():
        (folder / name).write_bytes(content)


def one_line(error: UserError, name: str) -> None:
    line = str(error)
    assert "\n" not in line, line
    assert name in line, line


def place(data: bytes, chance: random.Random) -> int:
    """Somewhere; often in or near what describes the file, at its end."""
    if data and chance.random() < 0.5:
        return max(0, len(data) - 1 - chance.randrange(min(len(data), 3000)))
    return chance.randrange(len(data) or 1)


def flip(data: bytes, chance: random.Random) -> bytes:
    at = place(data, chance)
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


def set_bytes(data: bytes, chance: random.Random) -> bytes:
    at = place(data, chance)
    count = chance.choice([1, 1, 2, 8, 512, 4096])
    return data[:at] + chance.randbytes(count) + data[at + count :]


def zero(data: bytes, chance: random.Random) -> bytes:
    at = place(data, chance)
    count = chance.choice([1, 2, 8, 512, 4096, 10**6])
    count = min(count, len(data) - at)
    return data[:at] + bytes(count) + data[at + count :]


def cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.choice([0, 1, 4, chance.randrange(len(data)), len(data) - 1])]


def cut_front(data: bytes, chance: random.Random) -> bytes:
    return data[chance.choice([1, 4, chance.randrange(len(data))]) :]


def insert(data: bytes, chance: random.Random) -> bytes:
    at = chance.choice([0, place(data, chance), len(data)])
    return data[:at] + chance.randbytes(chance.choice([1, 3, 64, 4096])) + data[at:]


def swap(data: bytes, chance: random.Random) -> bytes:
    """Two blocks of a disk in each other's place."""
    size = chance.choice([16, 64, 512])
    one, other = sorted((chance.randrange(len(data)), chance.randrange(len(data))))
    other = max(other, one + size)
    return (
        data[:one]
        + data[other : other + size]
        + data[one + size : other]
        + data[one : one + size]
        + data[other + size :]
    )


def repeat(data: bytes, chance: random.Random) -> bytes:
    at = place(data, chance)
    return data[:at] + data[max(0, at - chance.choice([1, 64, 512])) :]


def header(data: bytes, chance: random.Random) -> bytes:
    """A field of one of a zip's headers is another number."""
    starts = [
        match.start()
        for each in HEADERS
        for match in re.finditer(re.escape(each), data)
    ]
    if not starts:
        return flip(data, chance)
    at = chance.choice(starts) + chance.randrange(46)
    value = chance.choice(
        [b"\0", b"\1", b"\x0e", b"\x7f", b"\xff", chance.randbytes(1)]
    )
    value *= chance.choice([1, 1, 2, 4])
    return data[:at] + value + data[at + len(value) :]


def several(data: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.randrange(2, 5)):
        data = chance.choice(SINGLE)(data or b"\0", chance)
    return data


SINGLE = [flip, set_bytes, zero, cut, cut_front, insert, swap, repeat, header]
DAMAGES = [*SINGLE, header, header, several]
