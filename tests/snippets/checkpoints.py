"""Checkpoints as ddpkit/run/checkpoint.py writes, keeps and reads them."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import ddpkit
import distributed
from ddpkit.errors import UserError
from ddpkit.ranks import protocol
from ddpkit.run import checkpoint
from ddpkit.run.folder import KEYS, Folder


def save(folder: Path, epoch: int, is_best: bool = False) -> None:
    state = {**dict.fromkeys(KEYS, 0), "model": {"w": torch.full((999,), epoch)}}
    state["epoch"] = epoch
    Folder(folder).add(state, is_best, replace=False)


def epochs(folder: Path) -> list[int]:
    return [checkpoint.read(path)["epoch"] for path in Folder(folder).saves()]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def kept(where: str) -> dict:
    """The epochs of what is kept after each of five saves, and what there is in the end."""
    folder = Path(where)
    (folder / "last-2024-05-01.pt").touch()  # the user's own
    found = []
    for epoch in range(5):
        save(folder, epoch, is_best=epoch == 1)
        found.append(epochs(folder))
    best = checkpoint.read(folder / "best.pt")["epoch"]
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
        best, last = checkpoint.read(folder / "best.pt"), Folder(folder)._search()
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
            return torch.equal(checkpoint.read(path)["model"]["w"], right)
        except checkpoint.Damaged:
            return None

    def flipped(index: int, bit: int) -> bytes:
        return good[:index] + bytes([good[index] ^ bit]) + good[index + 1 :]

    found: dict = {
        "flipped": [read(flipped(index, 1 << chance.randrange(8))) for index in range(len(good))],
        "cut": [read(good[:length]) for length in range(0, len(good) - 2, 37)],
    }
    # The bit of "external attributes" that makes a directory of a tensor.
    entry = good.index(b"PK\x01\x02", good.rindex(b"data/0") - 60)
    found["attribute"] = read(flipped(entry + 38, 0x10))
    checkpoint.check_archive = lambda path: None
    tensor = good.index(right.numpy().tobytes())
    unsealed = [flipped(entry + 38, 0x10), flipped(tensor + 99, 1)]
    found["unsealed"] = [read(content) for content in unsealed]
    return found


def more_parts(where: str) -> list:
    """Whether an average of the weights, and a scaler, come back as they were."""
    distributed.setup(seed=0)
    samples = [(torch.zeros(3, 8, 8, dtype=torch.uint8), 0)] * 9
    seeded, folder = ddpkit.Seeded(samples, 1, seed=0), ddpkit.Folder(where)
    loaders = (
        DataLoader(seeded, 1, sampler=ddpkit.TrainSampler(samples, 1, 1, seed=0)),
        DataLoader(seeded, batch_sampler=ddpkit.ValSampler(samples, 1)),
    )

    def made() -> ddpkit.Run:
        net = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1)
        more = {"ema": AveragedModel(net), "scaler": torch.amp.GradScaler("cpu", init_scale=64.0)}
        parts = {"model": net, "optimizer": optimizer, "scheduler": scheduler, **more}
        return ddpkit.Run(folder, *loaders, ["a"], epochs=1, best="top1", **parts)

    first = made()
    for part in first.parts["ema"].parameters():
        part.data += 1
    first.parts["scaler"].scale(torch.ones(1))
    first.parts["scaler"].update(32.0)
    first.save()
    assert folder.find_checkpoint()
    second = made()
    averages = [run.parts["ema"].parameters() for run in (first, second)]
    same = all(torch.equal(*pair) for pair in zip(*averages, strict=True))
    return [same, second.parts["scaler"].get_scale()]


def found_by_the_next_attempt(where: str, path: str) -> list:
    """What --resume PATH and --resume never find where this launch's first attempt has begun."""
    os.environ[protocol.LAUNCH_ID] = "1"
    by_path, never = (Folder(where, resume) for resume in (path, "never"))
    by_path.open_for_training(is_new=False)
    return [by_path._search()["path"], never._search()]
