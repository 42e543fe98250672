"""Checkpoints as engine/run/checkpoint.py writes, keeps and reads them."""

import argparse
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch.optim.swa_utils import AveragedModel

from engine.errors import UserError
from engine.ranks import distributed
from engine.run import checkpoint
from engine.run.progress import Run


def save(folder: Path, epoch: int, keep: int = 2, is_best: bool = False) -> None:
    state = {**dict.fromkeys(checkpoint.KEYS, 0), "model": {"w": torch.full((999,), epoch)}}
    state["epoch"] = epoch
    checkpoint.save(folder, state, is_best, keep)


def epochs(folder: Path) -> list[int]:
    return [checkpoint.load(path)["epoch"] for path in checkpoint.saves(folder)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def kept(where: str) -> dict:
    """The epochs of what is kept after each of 15 saves, and what there is in the end."""
    folder = Path(where)
    (folder / "last-2024-05-01.pt").touch()  # the user's own
    found = []
    for epoch, keep in enumerate((12,) * 13 + (3, 1)):
        save(folder, epoch, keep, is_best=epoch == 1)
        found.append(epochs(folder))
    best = checkpoint.load(folder / "best.pt")["epoch"]
    return {"epochs": found, "best": best, "files": sorted(p.name for p in folder.iterdir())}


def die_at(call: int) -> None:
    """End this process in a save's call of that number, from 0 up."""
    left = call

    def dying(function: Callable) -> Callable:
        def called(*args: object, **kwargs: object) -> object:
            nonlocal left
            if not left:
                os._exit(7)
            left -= 1
            return function(*args, **kwargs)

        return called

    calls = (os, "replace"), (os, "fsync"), (Path, "replace"), (torch, "save")
    for owner, name in calls:
        setattr(owner, name, dying(getattr(owner, name)))


def killed_within_a_save(where: str) -> dict:
    """A save that dies in its first call, in its second, and so on until it gets through."""
    folder = Path(where)
    reached = set()
    for call in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        save(folder, 1)
        save(folder, 2, is_best=True)
        if not (child := os.fork()):
            die_at(call)
            save(folder, 3, is_best=True)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        best, last = checkpoint.load(folder / "best.pt"), checkpoint.find(folder, "auto")
        assert best["epoch"] >= last["epoch"]
        reached.add((status, last["epoch"]))
        if status == 0:
            break
    return {"calls": call, "reached": sorted(reached)}


def full_disk(where: str) -> str:
    """What a save says whose disk is full; it leaves all as it was."""
    folder = Path(where)
    save(folder, 1)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    before = contents(folder)
    os.fsync = full
    try:
        save(folder, 2)
    except UserError as error:
        assert before == contents(folder)
        return str(error)
    return "saved"


def damaged(where: str) -> dict:
    """A bit turned over in each byte in turn, a file cut short anywhere: what is read of it.

    True: the right numbers; False: wrong ones; None: refused.
    """
    folder, chance = Path(where), random.Random(0)
    save(folder, 1)
    path, good = folder / "last.pt", (folder / "last.pt").read_bytes()
    right = torch.load(path, weights_only=True)["model"]["w"]

    def read(content: bytes) -> bool | None:
        path.write_bytes(content)
        try:
            return torch.equal(checkpoint.load(path)["model"]["w"], right)
        except checkpoint.Damaged:
            return None

    def flipped(index: int, bit: int) -> bytes:
        return good[:index] + bytes([good[index] ^ bit]) + good[index + 1 :]

    seal = len(good) - 14
    found: dict = {
        "flipped": [read(flipped(index, 1 << chance.randrange(8))) for index in range(len(good))],
        "cut": [read(good[:length]) for length in range(0, seal, 37)],
    }
    found["within"] = found["flipped"][:seal]
    # The bit of "external attributes" that makes a directory of a tensor.
    entry = good.index(b"PK\x01\x02", good.rindex(b"data/0") - 60)
    found["attribute"] = read(flipped(entry + 38, 0x10))
    checkpoint.is_sealed = lambda path: False
    checkpoint.zipfile.ZipFile.testzip = lambda self: None
    tensor = good.index(right.numpy().tobytes())
    unsealed = [flipped(entry + 38, 0x10), flipped(tensor + 99, 1)]
    found["unsealed"] = [read(content) for content in unsealed]
    return found


def more_parts(where: str) -> list:
    """Whether an average of the weights, and a scaler, come back as they were."""
    distributed.setup()
    args = argparse.Namespace(batch_size=1, accumulate=1, save_every=0, keep=2, seed=0, epochs=1)
    args.output_dir = Path(where)

    def made() -> Run:
        net = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1)
        more = {"ema": AveragedModel(net), "scaler": torch.amp.GradScaler("cpu", init_scale=64.0)}
        device = torch.device("cpu")
        return Run(args, ["a"], 9, device, "top1", "", net, optimizer, scheduler, **more)

    first, second = made(), made()
    for part in first.parts["ema"].parameters():
        part.data += 1
    first.parts["scaler"].scale(torch.ones(1))
    first.parts["scaler"].update(32.0)
    first.save()
    second.restore(checkpoint.find(args.output_dir, "auto"))
    averages = [run.parts["ema"].parameters() for run in (first, second)]
    same = all(torch.equal(*pair) for pair in zip(*averages, strict=True))
    return [same, second.parts["scaler"].get_scale()]


def found_by_the_next_attempt(where: str, path: str) -> list:
    """What --resume PATH and --resume never find where this launch's first attempt has begun."""
    folder = Path(where)
    os.environ["LAUNCH_ID"] = "1"
    checkpoint.begin(folder)
    return [str(checkpoint.find(folder, path)["path"]), checkpoint.find(folder, "never")]
