"""Checkpoints and weights, as ddpkit/run writes, keeps and reads them; files that are damaged."""

import functools
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from generated import refusal
from ranks import fork, on_ranks, wait
from torch import nn

from ddpkit.data.format import Format
from ddpkit.ranks import distributed, protocol
from ddpkit.run import checkpoint, pretrained
from ddpkit.run.folder import KEYS, Folder


def save(folder: Path, epoch: int, is_best: bool = False) -> None:
    state = {**dict.fromkeys(KEYS, 0), "model": {"w": torch.full((999,), epoch)}, "epoch": epoch}
    Folder(folder).add(state, is_best, replace=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_kept(tmp_path: Path) -> None:
    """The last two, the best, and what is the user's own."""
    (tmp_path / "last-2024-05-01.pt").touch()
    found = []
    for epoch in range(5):
        save(tmp_path, epoch, is_best=epoch == 1)
        found.append([checkpoint.read(path)["epoch"] for path in Folder(tmp_path).saves()])
    assert found == [[0], [1, 0], [2, 1], [3, 2], [4, 3]]
    assert checkpoint.read(tmp_path / "best.pt")["epoch"] == 1
    assert {*contents(tmp_path)} == {"best.pt", "last-1.pt", "last-2024-05-01.pt", "last.pt"}


def test_killed_within_a_save(tmp_path: Path) -> None:
    """Whichever call it dies in, the newest checkpoint is the former one or the new one."""

    def save_and_die(call: int) -> None:
        left = iter(range(call))

        def dying(function: Callable) -> Callable:
            def called(*args: object, **kwargs: object) -> object:
                next(left, None) is None and os._exit(7)
                return function(*args, **kwargs)

            return called

        for owner, name in (os, "replace"), (os, "fsync"), (Path, "replace"), (torch, "save"):
            setattr(owner, name, dying(getattr(owner, name)))
        save(folder, 3, is_best=True)

    reached, folder, status = set(), tmp_path / "run", 7
    for call in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        save(folder, 1)
        save(folder, 2, is_best=True)
        (status,) = wait([fork(functools.partial(save_and_die, call), tmp_path / "said")])
        best, last = checkpoint.read(folder / "best.pt"), Folder(folder)._search()
        assert best["epoch"] >= last["epoch"]
        reached.add((status, last["epoch"]))
        if status == 0:
            break
    assert call >= 8
    assert reached == {(7, 2), (7, 3), (0, 3)}


def test_any_damage_is_seen(tmp_path: Path) -> None:
    """A bit turned over in each byte in turn, the archive's directory included; cut short anywhere.

    What nobody reads, such as the time at which a part was written, may be damaged.
    """
    save(tmp_path, 1)
    chance, path = random.Random(0), tmp_path / "last.pt"
    good, right = path.read_bytes(), torch.load(path)["model"]["w"]
    tensor = good.index(right.numpy().tobytes())

    def read(content: bytes) -> bool | None:
        """Whether the numbers are right; None: refused."""
        path.write_bytes(content)
        try:
            return torch.equal(checkpoint.read(path)["model"]["w"], right)
        except checkpoint.Damaged:
            return None

    def flipped(index: int, bit: int) -> bytes:
        return good[:index] + bytes([good[index] ^ bit]) + good[index + 1 :]

    for index in range(len(good)):
        if index % 50 == 0 or not tensor + 50 < index < tensor + right.nbytes - 50:
            assert read(flipped(index, 1 << chance.randrange(8))) is not False, index
    assert {read(good[:length]) for length in range(0, len(good) - 2, 37)} == {None}
    # The bit of "external attributes" that makes a directory of a tensor.
    attribute = good.index(b"PK\x01\x02", good.rindex(b"data/0") - 60) + 38
    assert read(flipped(attribute, 0x10)) is None


@on_ranks(2)
def test_the_one_before(tmp_path: Path) -> None:
    """All ranks take it for a bit turned over, a folder, a pipe that nobody writes to."""
    os.environ[protocol.LAUNCH_ID] = "1"

    def turn(path: Path) -> None:
        content = bytearray(whole)
        content[content.index(torch.full((99,), 2).numpy().tobytes()) + 500] ^= 1
        path.write_bytes(content)

    for spoil in turn, Path.mkdir, os.mkfifo:
        folder = tmp_path / spoil.__name__
        if distributed.is_rank_zero():
            folder.mkdir()
            save(folder, 1)
            save(folder, 2)
            whole = (folder / "last.pt").read_bytes()
            (folder / "last.pt").unlink()
            spoil(folder / "last.pt")
            (folder / ".begun").write_bytes(b"\xff\xfe")  # is no reason to stop
        found = Folder(folder).find_checkpoint()
        assert (found["epoch"], found["path"]) == (1, str(folder / "last-1.pt"))
        assert (folder / "last.pt.corrupt").exists()


def test_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    for content, code, word in [
        ({"weights": 1}, "checkpoint.read", "args"),
        ([1], "checkpoint.read_file", "list"),
        ({"path": Path()}, "checkpoint.read_file", "plain types"),
    ]:
        torch.save(content, path)
        with refusal(code, path, word):
            checkpoint.read(path)
    path.write_bytes(path.read_bytes()[:500])
    with refusal("checkpoint.read_file", path):
        checkpoint.read(path)
    with refusal("files.failure", "best.pt", "No such file"):
        Folder(tmp_path).best()
    with refusal("folder.lock", tmp_path / "none.pt"):
        Folder(tmp_path / "out", str(tmp_path / "none.pt"))._lock()
    (tmp_path / "last.pt").write_bytes(b"PK")
    (tmp_path / "last-1.pt").write_bytes(b"")
    before = contents(tmp_path)
    with refusal("folder.read_newest", "last.pt", "last-1.pt", "--resume never"):
        Folder(tmp_path)._search()
    assert contents(tmp_path) == before


def test_data_of_another_run() -> None:
    for theirs in ["a", "b", "c"], ["b", "a"]:
        with refusal("checkpoint.check_classes", "last.pt", "2 classes"):
            checkpoint.check_classes("last.pt", ["a", "b"], theirs)
    state = {"path": "best.pt", "format": {"channels": 3, "max_megapixels": 9}}
    checkpoint.check_format(state, Format(channels=3))
    with refusal("checkpoint.check_format", "best.pt", "channels 3", "not 4"):
        checkpoint.check_format(state, Format(channels=4))


@pytest.mark.parametrize("wrap", ["", "module.", "_orig_mod.", "module._orig_mod.", "net."])
@pytest.mark.parametrize("keys", [[], ["model"], ["state_dict", "model"]])
def test_weights_of_other_programs(
    wrap: str, keys: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """For a network as it is and in a wrapper of ours, with another last layer."""
    torch.manual_seed(0)
    weights = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 9)).state_dict()
    state: dict = {f"{wrap}{name}": value for name, value in weights.items()}
    for key in keys:
        state = {key: state, "epoch": 3, "optimizer": {"state": {}}}
    torch.save(state, tmp_path / "file.pt")
    for prefix in "", "net.":
        net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 5))
        model = nn.ModuleDict({"net": net}) if prefix else net
        pretrained.copy_matching(model, pretrained.read(f"{tmp_path}/file.pt", list))
        assert torch.equal(net[0].weight, weights["0.weight"])
        new = f"new: {prefix}2.weight, {prefix}2.bias"
        assert capsys.readouterr().out == f"--weights: 7 of 9 tensors loaded; {new}\n"


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"state_dict": {"a.weight": torch.ones(1)}}, path)
    with refusal("pretrained.copy_matching", "begins with weight", "a.weight"):
        pretrained.copy_matching(nn.Linear(2, 2), pretrained.read(str(path), list))
