"""Checkpoints and weights, as ddpkit/run writes, keeps and reads them; files that are damaged."""

import copy
import errno
import functools
import io
import math
import os
import random
import re
import shutil
import time
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from generated import refusal
from ranks import fork, on_ranks, setup, wait
from safetensors.torch import save_file
from torch import nn
from torch.optim.lr_scheduler import (
    CyclicLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)

import ddpkit
from ddpkit import files
from ddpkit.data.format import MEAN, STD, Format
from ddpkit.errors import DiskError, LineError, UserError
from ddpkit.ranks import distributed, protocol
from ddpkit.run import checkpoint, states
from ddpkit.run.checkpoint import EXAMPLES, KEYS
from ddpkit.run.folder import RunFolder
from ddpkit.vision import pretrained


def whole(**entries: object) -> dict:
    """What a checkpoint has to hold, but empty."""
    return {name: EXAMPLES[name] for name in KEYS} | {"seed": 0, "best": 0.0} | entries


def save(folder: Path, epoch: int, is_best: bool = False) -> None:
    state = whole(model={"w": torch.full((999,), epoch)}, epoch=epoch)
    RunFolder(folder).add(state, is_best)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_kept(tmp_path: Path) -> None:
    """The last two, the best, and what is the user's own."""
    (tmp_path / "last-2024-05-01.pt").touch()
    found = []
    for epoch in range(5):
        save(tmp_path, epoch, is_best=epoch == 1)
        saves = RunFolder(tmp_path).saves()
        found.append([checkpoint.read(path)["epoch"] for path in saves])
    assert found == [[0], [1, 0], [2, 1], [3, 2], [4, 3]]
    assert checkpoint.read(tmp_path / "best.pt")["epoch"] == 1
    assert set(contents(tmp_path)) == {
        "best.pt",
        "last-1.pt",
        "last-2024-05-01.pt",
        "last.pt",
    }


def test_a_folder_of_another_run(tmp_path: Path) -> None:
    """It is refused, whatever is to be resumed."""
    other = tmp_path / "other.pt"
    other.touch()
    assert files.lock(tmp_path / ".lock")

    @on_ranks(1)
    def begin() -> None:
        files.time.sleep = lambda _: None
        for resume in "auto", "never", str(other):
            with refusal("folder.lock", tmp_path, "another run"):
                RunFolder(tmp_path, resume).find_checkpoint()

    begin()


def test_disks_of_their_own(tmp_path: Path) -> None:
    """All ranks go on from the newest checkpoint, whichever rank's disk has it."""
    for epochs in (2, 1), (1, 2), (None, 2):
        folder = tmp_path / str(epochs)
        for rank, epoch in enumerate(epochs):
            path = folder / str(rank)
            path.mkdir(parents=True)
            if epoch:
                RunFolder(path).add(whole(epoch=epoch, step=epoch), is_best=False)

        @on_ranks(2)
        def find(folder: Path = folder) -> None:
            found = RunFolder(folder / str(distributed.rank())).find_checkpoint()
            assert found
            assert found["epoch"] == 2

        find()


@on_ranks(2, group=False)
def test_a_save_that_takes_longer_than_collectives(tmp_path: Path) -> None:
    """The other ranks wait for it, whatever their time-out."""
    setup(timeout=2)
    write = checkpoint.write_file

    def write_slowly(path: Path, state: dict) -> None:
        time.sleep(3)
        write(path, state)

    checkpoint.write_file = write_slowly
    save(tmp_path, 1, is_best=True)
    assert distributed.reduce_tensor(torch.ones(1)) == 2
    assert {"best.pt", "last.pt"} <= set(contents(tmp_path))


@on_ranks(1)
def test_a_best_of_before(tmp_path: Path) -> None:
    """It is not of a run that starts from scratch, by either door, and is kept."""
    save(tmp_path, 1, is_best=True)
    (tmp_path / "last.pt").unlink()
    folder = RunFolder(tmp_path)
    assert folder.find_checkpoint() is None
    folder.open_for_training([])
    assert set(contents(tmp_path)) == {".lock", "best-1.pt"}


def test_killed_within_a_save(tmp_path: Path) -> None:
    """Whichever call it dies in, the newest checkpoint is the former one or the new one."""

    def save_and_die(call: int) -> None:
        left = iter(range(call))

        def dying(function: Callable) -> Callable:
            def called(*args: object, **kwargs: object) -> object:
                if next(left, None) is None:
                    os._exit(7)
                return function(*args, **kwargs)

            return called

        for owner, name in (
            (os, "replace"),
            (os, "fsync"),
            (Path, "replace"),
            (torch, "save"),
        ):
            setattr(owner, name, dying(getattr(owner, name)))
        save(folder, 3, is_best=True)

    folder = tmp_path / "run"
    reached = set()
    for call in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        save(folder, 1)
        save(folder, 2, is_best=True)
        pid = fork(functools.partial(save_and_die, call), tmp_path / "said")
        status = wait([pid])[0]
        last = RunFolder(folder)._search()
        assert checkpoint.read(folder / "best.pt")["epoch"] >= last["epoch"]
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
    chance = random.Random(0)
    path = tmp_path / "last.pt"
    good = path.read_bytes()
    right = torch.load(path)["model"]["w"]
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
    """All ranks take it for damage: a bit turned over, a folder, a pipe, a link to nowhere."""
    os.environ[protocol.LAUNCH_ID] = "1"

    def turn(path: Path) -> None:
        content = bytearray(written)
        content[content.index(torch.full((99,), 2).numpy().tobytes()) + 500] ^= 1
        path.write_bytes(content)

    def dangle(path: Path) -> None:
        path.symlink_to("none")

    def loop(path: Path) -> None:
        path.symlink_to(path)

    def endless(path: Path) -> None:
        path.symlink_to("/dev/zero")

    for spoil in turn, Path.mkdir, os.mkfifo, Path.touch, dangle, loop, endless:
        folder = tmp_path / spoil.__name__
        with ddpkit.rank_zero_first():
            folder.mkdir(exist_ok=True)
        save(folder, 1)
        save(folder, 2)
        if distributed.is_rank_zero():
            written = (folder / "last.pt").read_bytes()
            (folder / "last.pt").unlink()
            spoil(folder / "last.pt")
            (folder / ".begun").write_bytes(b"\xff\xfe")  # is no reason to stop
        found = RunFolder(folder).find_checkpoint()
        assert found["epoch"] == 1
        assert found["path"] == str(folder / "last-1.pt")
        assert os.path.lexists(folder / "last.pt.corrupt")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "no"),
        OSError(errno.ENOMEM, "no"),
        OSError(errno.EINTR, "no"),
        PermissionError(errno.EACCES, "no"),
        OSError(errno.EIO, "no"),
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory"
        ),
    ],
)
@pytest.mark.parametrize(
    ("owner", "name"), [(checkpoint, "check_archive"), (torch, "load")]
)
def test_what_is_no_damage(
    error: Exception,
    owner: ModuleType,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files stay, and a restart may read them; only the user can mend a permission."""
    monkeypatch.setattr(files, "WAITS", ())
    save(tmp_path, 1, is_best=True)
    save(tmp_path, 2)
    before = contents(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(owner, name, fail)
    kind = UserError if isinstance(error, PermissionError) else DiskError
    for read in (
        RunFolder(tmp_path)._search,
        lambda: RunFolder(tmp_path).best_score(""),
    ):
        with pytest.raises(kind, match=str(tmp_path)) as caught:
            read()
        assert "never" not in str(caught.value)
        assert type(caught.value) is kind
    assert contents(tmp_path) == before


def test_damage_of_other_kinds(tmp_path: Path) -> None:
    """Bytes before an archive, another compression: the previous one is used."""
    for count, spoil in enumerate((lambda x: b"\xef\xbb\xbf" + x, compressed, legacy)):
        folder = tmp_path / str(count)
        folder.mkdir()
        save(folder, 1, is_best=True)
        save(folder, 2)
        for name in "last.pt", "best.pt":
            path = folder / name
            path.write_bytes(spoil(path.read_bytes()))
        assert RunFolder(folder)._search()["epoch"] == 1
        found = RunFolder(folder)
        found.best_score("")
        found._clear_best()
        assert {"last.pt.corrupt", "best.pt.corrupt"} < set(contents(folder))
    content = legacy(b"", cut=0)
    path = tmp_path / "file.pt"
    for length in range(0, len(content), 3):
        path.write_bytes(content[:length])
        with refusal("checkpoint.unreadable", path):
            pretrained.read_tensors(str(path))
    with refusal("checkpoint.unreadable", "none.pt: no such file"):
        checkpoint.read(tmp_path / "none.pt")


def compressed(content: bytes) -> bytes:
    """With a damaged byte, by which the tensor would be compressed by LZMA, with wrong settings."""
    at = [found.start() for found in re.finditer(b"PK\1\2", content)][4] + 10
    return content[:at] + bytes([14]) + content[at + 1 :]


def legacy(_: bytes, cut: int = 60) -> bytes:
    """A file of an older torch.save, cut short."""
    buffer = io.BytesIO()
    torch.save(
        {"model": {"w": torch.ones(9)}}, buffer, _use_new_zipfile_serialization=False
    )
    return buffer.getvalue()[: -cut or None]


def test_what_no_run_writes(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    torch.save(whole(format={"other": 1}), path)
    with refusal("checkpoint.read", path, "format"):
        RunFolder(tmp_path)._search()
    state = whole()
    del state["history"]
    torch.save(state, path)
    with refusal("checkpoint.check_entries", path, "no history"):
        RunFolder(tmp_path)._search()


@pytest.mark.parametrize("name", sorted(checkpoint.EXAMPLES))
def test_entries_of_another_kind(name: str, tmp_path: Path) -> None:
    """As a stranger's file may have them; they are told before anything uses them."""
    values = [None, "x", [1], [["a"], {}], {"a": 1}, -1, 10**30, math.nan, True, 0]
    kinds = set()
    for value in values:
        if checkpoint.is_like(value, EXAMPLES[name]):
            kinds.add(type(value))
            continue
        torch.save(whole(**{name: value}), tmp_path / "best.pt")
        for read in (
            RunFolder(tmp_path).best,
            lambda: RunFolder(tmp_path).best_score("x"),
        ):
            found = None
            try:
                found = read()
            except checkpoint.Foreign as error:
                assert (
                    f"best.pt: not a checkpoint of this project (wrong type of {name})"
                    in error.line
                )
            assert found is None
    assert len(kinds) < 5


def test_entries_that_cannot_be_meant(tmp_path: Path) -> None:
    """Of the right kind, but not of this script: a line, not a traceback."""
    model = nn.Linear(2, 2)
    ddpkit.Checkpoints(tmp_path, model=model).save()
    path = tmp_path / "last.pt"
    good = torch.load(path, weights_only=True)
    for entry in {"parts": {"model": 3}}, {"of_ranks": {"model": {}, "x": 3}}:
        torch.save(good | entry, path)
        with refusal("states.fitting", path, "does not match"):
            ddpkit.Checkpoints(tmp_path, model=nn.Linear(2, 2))


def test_whose_flags_an_evaluation_has(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A line names the file before a flag in it may be refused."""
    torch.save(whole(), tmp_path / "best.pt")
    RunFolder(tmp_path).best()
    line = f"flags that are not given here are those of {tmp_path / 'best.pt'}\n"
    assert capsys.readouterr().out == line


def test_formats_of_another_kind(tmp_path: Path) -> None:
    for name, value in {
        **{"channels": -1, "mean": "x", "std": [0, 0, 0], "value_range": [1]},
        **{"max_megapixels": math.nan, "other": 1},
    }.items():
        torch.save(whole(format={name: value}), tmp_path / "best.pt")
        with refusal(
            "checkpoint.read", "best.pt", "written by an incompatible ddpkit (format: "
        ):
            RunFolder(tmp_path).best()


def states_of(parts: dict) -> dict:
    """What a checkpoint holds of `parts`."""
    return states.take_states(parts) | {"kinds": states.kinds(parts), "path": "last.pt"}


def load(state: dict, parts: dict) -> None:
    """As a run does, at its first step, whose flags are those of then."""
    states.load_states(state, parts, state, "undo that", 1)


@on_ranks(1)
def test_states_that_do_not_fit() -> None:
    """An optimizer's state of another shape would be read and written beyond its end."""
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters(), 0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    parts = {"model": net, "optimizer": optimizer, "scheduler": scheduler}
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    state = states_of(parts)
    load(copy.deepcopy(state), parts)
    good = copy.deepcopy(optimizer.state_dict())
    for value in torch.ones(7), torch.ones(1):
        other = copy.deepcopy(state)
        other["optimizer"]["state"]["weight"]["exp_avg"] = value
        with refusal(
            "states.fitting", "last.pt does not match the optimizer", "exp_avg"
        ):
            load(other, parts)
        assert str(optimizer.state_dict()) == str(good)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: MultiStepLR(optimizer, [2, 4]),
        lambda optimizer: SequentialLR(
            optimizer, [LinearLR(optimizer), MultiStepLR(optimizer, [3])], [2]
        ),
        lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=9),
        lambda optimizer: CyclicLR(
            optimizer, 0.1, 0.2, scale_fn=lambda step: 0.9**step
        ),
    ],
)
@on_ranks(1)
def test_schedulers_of_torch(tmp_path: Path, schedule: Callable) -> None:
    """Whatever they keep is saved, read and continued."""

    def build() -> dict:
        net = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9)
        return {"model": net, "optimizer": optimizer, "scheduler": schedule(optimizer)}

    def step(parts: dict) -> list[float]:
        parts["optimizer"].step()
        parts["scheduler"].step()
        return parts["scheduler"].get_last_lr()

    first = build()
    second = build()
    step(first)
    torch.save(states_of(first), tmp_path / "file.pt")
    load(checkpoint.read_file(tmp_path / "file.pt"), second)
    assert [step(first) for _ in range(6)] == [step(second) for _ in range(6)]


@on_ranks(1)
def test_a_state_that_is_missing() -> None:
    """Of one weight: it starts anew there, and a line says so."""
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    parts = {"model": net, "optimizer": optimizer, "scheduler": scheduler}
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    state = states_of(parts)
    del state["optimizer"]["state"]["bias"]
    said: list[str] = []
    distributed.print0 = said.append
    load(state, parts)
    assert len(said) == 1
    assert "no state for bias" in said[0]


def test_weights_that_would_be_cut(tmp_path: Path) -> None:
    """To whole numbers."""
    net = nn.Linear(2, 2)
    torch.save({"weight": torch.ones(2, 2, dtype=torch.int32)}, tmp_path / "file.pt")
    with refusal("pretrained.copy_matching", "begins with weight"):
        pretrained.copy_matching(net, pretrained.read_tensors(f"{tmp_path}/file.pt"))


def test_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    for content, code, word in [
        ({"weights": 1}, "checkpoint.check_entries", "args"),
        ([1], "checkpoint.read_file", "list"),
        ({"path": Path()}, "checkpoint.unreadable", "plain types"),
    ]:
        torch.save(content, path)
        with refusal(code, path, word):
            checkpoint.read(path)
    path.write_bytes(path.read_bytes()[:500])
    with refusal("checkpoint.unreadable", path):
        checkpoint.read(path)
    with refusal("folder.best", "best.pt", "train first"):
        RunFolder(tmp_path).best()
    for open_it in RunFolder._lock, RunFolder.best:
        with refusal("folder.check_file", tmp_path, "is a folder; give a file in it"):
            open_it(RunFolder(tmp_path / "out", str(tmp_path)))
    with refusal("folder.check_file", tmp_path / "none.pt"):
        RunFolder(tmp_path / "out", str(tmp_path / "none.pt"))._lock()
    with refusal("folder.best", path / "best.pt", "train first"):
        RunFolder(path).best()
    (tmp_path / "last.pt").write_bytes(b"PK")
    (tmp_path / "last-1.pt").write_bytes(b"")
    before = contents(tmp_path)
    with refusal("folder.read_newest", "last.pt", "last-1.pt", "--resume never"):
        RunFolder(tmp_path)._search()
    assert contents(tmp_path) == before


def test_flags_that_have_changed() -> None:
    """What was not given is said so."""
    then = {"data": "set", "arch": "a", "fold": None, "lr": 0.1}
    assert checkpoint.changes(then, {**then, "data": Path("set")}) == ""
    now = {"data": Path("other"), "arch": "b", "fold": (1, 5), "lr": 0.2}
    assert checkpoint.changes(then, now) == (
        "--data other (was set), --arch b (was a), --fold (1, 5) (was not given), "
        "--lr 0.2 (was 0.1)"
    )


def test_what_is_cut_ends_with_a_word(tmp_path: Path) -> None:
    net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(99)])
    state = {"path": str(tmp_path / "last.pt"), "model": {}}
    with refusal("states.fitting", '"7.weight", ...)'):
        checkpoint.load_weights(net, state)

    def fail() -> None:
        raise OSError("cannot find the host " * 20)

    line = pretrained.try_to_fetch("imagenet", fail)
    assert re.search(r" (cannot|find|the|host) \.\.\.\)$", line), line


def test_data_of_another_run(tmp_path: Path) -> None:
    (tmp_path / "best.pt").touch()
    with refusal(
        *("checkpoint.check_classes", "last.pt has 2 classes (a, b)"),
        f"--weights {tmp_path / 'best.pt'} --output-dir ANOTHER",
    ) as caught:
        checkpoint.check_classes(tmp_path / "last.pt", ["a", "b"], ["b", "c"])
    assert "never" not in str(caught.value)
    for theirs in ["a", "b", "c"], ["b", "a"]:
        with refusal("checkpoint.check_classes", "last.pt", "2 classes"):
            checkpoint.check_classes("last.pt", ["a", "b"], theirs)
    state = {"path": "best.pt", "format": {"channels": 3, "max_megapixels": 9}}
    checkpoint.check_format(state, Format(channels=3))
    checkpoint.check_format(state, Format(channels=3).or_else(MEAN, STD))
    with refusal("checkpoint.check_format", "best.pt", "channels 3", "not 4"):
        checkpoint.check_format(state, Format(channels=4))
    with refusal(
        "checkpoint.check_format", "best.pt", MEAN, "(0.5, 0.5, 0.5)", "dataset.py"
    ):
        checkpoint.check_format(state, Format(channels=3).or_else((0.5, 0.5, 0.5), STD))


def named(prefix: str, weights: dict) -> dict:
    return {f"{prefix}{name}": value for name, value in weights.items()}


def like_others(weights: dict, other: dict) -> dict[str, tuple[str, object]]:
    """What programs write, by the names of their files: the prefix in it, and the content."""
    beside = {"optimizer": {"state": {0: {"step": torch.ones(())}}}, "epoch": 3}
    flags = Namespace(lr=0.1)
    queries = named("module.encoder_q.", weights) | named("module.encoder_k.", other)
    return {
        "plain": ("", weights),
        "ddp.pt": ("", named("module._orig_mod.", weights)),
        "own.pt": ("model.", {"model": weights, **beside}),
        "nested.pth": ("model.state_dict.", {"model": {"state_dict": weights}}),
        "timm.pth.tar": ("state_dict.", {"state_dict": weights, "args": flags}),
        "average.tar": ("model.", {"model_ema": other, "model": weights, **beside}),
        "lightning.ckpt": ("state_dict.own.", {"state_dict": named("own.", weights)}),
        "segmentation.pth": (
            "state_dict.backbone.",
            {"state_dict": {**named("backbone.", weights), "head.w": torch.ones(2)}},
        ),
        "moco.pth.tar": ("state_dict.encoder_q.", {"state_dict": queries}),
        "dino.PTH": (
            "teacher.backbone.",
            {
                "student": named("module.backbone.", other),
                "teacher": named("backbone.", weights),
            },
        ),
        "transformers.bin": ("timm_model.", named("timm_model.", weights)),
        "weights.safetensors": ("", weights),
        "safe.bin": ("backbone.", named("backbone.", weights)),
    }


def test_weights_of_other_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """By what a file holds, for a network as it is, in a wrapper and as a part of one.

    They have another last layer; what is new and the share are in a line.
    """
    torch.manual_seed(0)

    def build(count: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, count))

    weights = build(9).state_dict()
    for name, (prefix, content) in like_others(weights, build(9).state_dict()).items():
        path = tmp_path / name
        if name.startswith("safe") or name.endswith("safetensors"):
            save_file(content, path)
        else:
            torch.save(content, path)
        for own in "", "net.", "encoder.":
            net = build(5)
            model = nn.ModuleDict({own[:-1]: net}) if own else net
            if own == "encoder.":
                model["decoder"] = nn.Linear(1, 1)
            ddpkit.load_pretrained(model, str(path))
            for ours, theirs in zip(
                net[:2].parameters(), weights.values(), strict=False
            ):
                assert torch.equal(ours, theirs)
            said = capsys.readouterr().out
            start = f" from {prefix}*" if prefix else ""
            count = 11 if own == "encoder." else 9
            assert f": 7 of {count} tensors loaded{start}, " in said
            assert f" % of the model; new: {own}2.weight, {own}2.bias" in said


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"state_dict": {"a.weight": torch.ones(1)}}, path)
    with refusal("pretrained.copy_matching", "begins with weight", "a.weight"):
        pretrained.copy_matching(nn.Linear(2, 2), pretrained.read_tensors(str(path)))
    torch.save(nn.Linear(2, 2), path)
    with refusal(
        "checkpoint.unreadable", path, "such as torch.nn.modules.linear.Linear"
    ):
        pretrained.read_tensors(str(path))
    path.write_bytes(bytes([9, *bytes(7)]) + b"{")
    with refusal("files.parse", path, "not safetensors"):
        pretrained.read_tensors(str(path))


def nested(depth: int) -> list:
    """A list that is small in a file, and large in print."""
    value: list = [0.1] * 8
    for _ in range(depth):
        value = [value] * 8
    return value


def in_itself() -> list:
    value: list = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "value",
    [
        nested(12),
        in_itself(),
        10**400,
        [[10**5000]],
        {"a": nested(9)},
        ["x" * 2**20] * 64,
    ],
)
@pytest.mark.parametrize("name", ["best", "args", "history", "optimizer", "format"])
def test_what_would_not_end(value: object, name: str, tmp_path: Path) -> None:
    """A few bytes that stand for gigabytes are told before anything compares or prints them."""
    path = tmp_path / "last.pt"
    torch.save(whole(**{name: {"lr": value}}), path)
    start = time.monotonic()
    with pytest.raises(LineError, match=re.escape(str(path))) as caught:
        RunFolder(tmp_path)._search()
    assert time.monotonic() - start < 1
    assert not isinstance(caught.value, checkpoint.Damaged)


def test_archives_of_other_programs(tmp_path: Path) -> None:
    """Compressed, or of parts that overlap: they may be larger than memory."""
    path = tmp_path / "file.pt"
    torch.save({"model": {"w": torch.zeros(10**6)}}, path)
    packed = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w", 8) as new:
        for entry in old.namelist():
            new.writestr(entry, old.read(entry))
    path.write_bytes(packed.getvalue())
    with refusal("checkpoint.unreadable", path, "compressed"):
        checkpoint.read_file(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("file/data.pkl", bytes(1000))
        entry = archive.infolist()[0]
        for number in range(9):
            overlapping = copy.copy(entry)
            overlapping.filename = f"file/data/{number}"
            archive.filelist.append(overlapping)
    with refusal("checkpoint.unreadable", path, "larger than the file"):
        checkpoint.read_file(path)


@pytest.mark.parametrize("entry", [b"/version", b"/data.pkl", b"/data/0"])
def test_a_whole_archive_that_torch_refuses(tmp_path: Path, entry: bytes) -> None:
    """An entry has another name, which no checksum covers."""
    path = tmp_path / "last.pt"
    torch.save({"model": torch.ones(9)}, path)
    path.write_bytes(path.read_bytes().replace(entry, entry[:-1] + b"8"))
    with pytest.raises(checkpoint.Damaged, match=r"last.pt: not a readable checkpoint"):
        checkpoint.read_file(path)
