"""Files that are damaged, missing or half written: what a start makes of them."""

import os
import re
import shutil
import uuid
import zipfile
from pathlib import Path

from conftest import Project, finish, rows, start
from test_runs import SAME_FOR_BOTH, flags

SAVE = """
import sys, torch
from pathlib import Path
from engine.ranks import distributed
from engine.run import checkpoint
def save(folder, epoch, keep=2, is_best=False):
    state = {**dict.fromkeys(checkpoint.KEYS, 0), "model": {"w": torch.full((999,), epoch)}}
    state["epoch"] = epoch
    checkpoint.save(Path(folder), state, is_best, keep)
def epochs(folder):
    return [checkpoint.load(path)["epoch"] for path in checkpoint.saves(Path(folder))]
folder = Path(sys.argv[1])
folder.mkdir(exist_ok=True)
"""


def damage(path: Path) -> None:
    """Turn over one bit of a tensor."""
    with zipfile.ZipFile(path) as archive:
        entry = max(archive.infolist(), key=lambda entry: entry.file_size)
    content = bytearray(path.read_bytes())
    content[entry.header_offset + 200 + entry.file_size // 2] ^= 1
    path.write_bytes(content)


@SAME_FOR_BOTH
def test_as_many_are_kept_as_asked_for(project: Project, tmp_path: Path) -> None:
    code = """
(folder / "last-2024-05-01.pt").touch()  # the user's own
for epoch, keep in enumerate((12,) * 13 + (3, 1)):
    save(folder, epoch, keep, is_best=epoch == 1)
    print(*epochs(folder))
print(checkpoint.load(folder / "best.pt")["epoch"], *sorted(p.name for p in folder.iterdir()))
"""
    found = project.python(SAVE + code, tmp_path).splitlines()
    assert found[2] == "2 1 0"
    assert found[12:15] == ["12 11 10 9 8 7 6 5 4 3 2 1", "13 12 11", "14"]
    assert found[15] == "1 best.pt last-2024-05-01.pt last.pt"


@SAME_FOR_BOTH
def test_killed_within_a_save(project: Project, tmp_path: Path) -> None:
    """Whichever call it dies in, the newest checkpoint is the former one or the new one."""
    code = """
import os, shutil
calls = [(os, "replace"), (os, "fsync"), (Path, "replace"), (torch, "save")]
reached = set()
for dies_at in range(20):
    shutil.rmtree(folder)
    folder.mkdir()
    save(folder, 1)
    save(folder, 2, is_best=True)
    if not (child := os.fork()):
        left = [dies_at]
        def dying(function):
            def call(*args, **kwargs):
                if not left[0]:
                    os._exit(7)
                left[0] -= 1
                return function(*args, **kwargs)
            return call
        for owner, name in calls:
            setattr(owner, name, dying(getattr(owner, name)))
        save(folder, 3, is_best=True)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    newest = [checkpoint.load(folder / "best.pt"), checkpoint.find(folder, "auto")]
    best, last = (state["epoch"] for state in newest)
    assert best >= last
    reached.add((status, last))
    if status == 0:
        break
print(dies_at, sorted(reached))

def full(handle):
    raise OSError(28, "No space left on device")
before = {path.name: path.read_bytes() for path in folder.iterdir()}
os.fsync = full
try: save(folder, 4)
except checkpoint.UserError as error: print(error)
assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
"""
    found, full = project.python(SAVE + code, tmp_path / "run").splitlines()
    calls, reached = found.split(" ", 1)
    assert int(calls) >= 8
    assert reached == "[(0, 3), (7, 2), (7, 3)]"
    assert full.endswith("last.pt: cannot be written (No space left on device)")


@SAME_FOR_BOTH
def test_damaged_checkpoints(project: Project, data: Path, tmp_path: Path) -> None:
    """The one before is taken; with none before it nothing is begun and nothing changed."""
    out = tmp_path / "out"
    project.alone(*flags(data, out, "--epochs", 2)).ok()
    damage(out / "last.pt")
    whole = shutil.copytree(out, tmp_path / "copy")
    done = project.fork(*flags(data, out, "--epochs", 3)).ok()
    assert "last.pt: not a readable checkpoint" in done.out
    assert "set aside as last.pt.corrupt, going on from last-1.pt" in done.out
    assert "last-1.pt: 1 of 3 epochs done" in done.out
    assert [row["epoch"] for row in rows(out)] == ["1", "2", "3"]
    assert (out / "last.pt.corrupt").read_bytes() == (whole / "last.pt").read_bytes()

    (whole / "last-1.pt").write_bytes(b"")
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    project.fork(*flags(data, whole)).refused("last.pt", "last-1.pt", "--resume never")
    assert before == {path.name: path.read_bytes() for path in whole.iterdir()}


@SAME_FOR_BOTH
def test_any_damage_is_seen(project: Project, tmp_path: Path) -> None:
    """A bit turned over in each byte in turn, the archive's directory included; cut short anywhere.

    Without the checksum of the whole file some of these load, and are wrong.
    """
    code = """
import random, shutil
chance = random.Random(0)
save(folder, 1)
path, good = folder / "last.pt", (folder / "last.pt").read_bytes()
right = torch.load(path, weights_only=True)["model"]["w"]

def read(content):
    path.write_bytes(content)
    try: return torch.equal(checkpoint.load(path)["model"]["w"], right)
    except checkpoint.Damaged: return None

def flipped(index, bit):
    return good[:index] + bytes([good[index] ^ bit]) + good[index + 1:]

found = [read(flipped(index, 1 << chance.randrange(8))) for index in range(len(good))]
cut = [read(good[:length]) for length in range(0, len(good) - 14, 37)]
seal = len(good) - 14
print(found.count(False), {*found[:seal]}, cut.count(False), cut.count(True))

# The bit of "external attributes" that makes a directory of a tensor.
entry = good.index(b"PK\\x01\\x02", good.rindex(b"data/0") - 60)
print(read(flipped(entry + 38, 0x10)))
checkpoint.is_sealed = lambda path: False
checkpoint.zipfile.ZipFile.testzip = lambda self: None
tensor = good.index(right.numpy().tobytes())
print(read(flipped(entry + 38, 0x10)), read(flipped(tensor + 99, 1)))
"""
    code = code.replace("\\\\", "\\")
    flips, attribute, without = project.python(SAVE + code, tmp_path).splitlines()
    assert flips == "0 {None} 0 0"
    assert attribute == "None"
    assert without == "False False"


@SAME_FOR_BOTH
def test_what_is_no_file(project: Project, data: Path, tmp_path: Path) -> None:
    """A folder, or a pipe that nobody writes to, called last.pt; a .begun that is no text."""
    out = tmp_path / "out"
    project.alone(*flags(data, out, "--epochs", 2)).ok()
    (out / "last.pt").unlink()
    for make in (Path.mkdir, os.mkfifo):
        make(out / "last.pt")
        (out / ".begun").write_bytes(b"\xff\xfe")
        done = project.alone(*flags(data, out, "--epochs", 3)).ok()
        assert "last.pt: not a readable checkpoint (not a regular file); set aside as" in done.out
        assert re.search(r"last-1.pt: [12] of 3 epochs done", done.out)
        for name in ("last.pt", "best.pt"):
            (out / name).unlink()
    aside = {path.name for path in out.glob("*.corrupt*")}
    assert aside == {"last.pt.corrupt", "last.pt.corrupt-1"}


@SAME_FOR_BOTH
def test_two_runs_in_one_folder(project: Project, data: Path, tmp_path: Path) -> None:
    """The second is refused; once the first has been killed, it may begin at once."""
    mark, out = uuid.uuid4().hex, tmp_path / "out"
    first = start([project.folder / "launch.sh", *flags(data, out, "--epochs", 999)], mark)
    try:
        assert "starting 2 rank(s)" in first.stdout.readline()
        assert "steps per epoch" in first.stdout.readline()
        project.alone(*flags(data, out)).refused(str(out), "another run", ".lock")
    finally:
        first.kill()
    project.alone(*flags(data, out)).ok()
    assert not finish(first, mark).left


@SAME_FOR_BOTH
def test_whatever_has_a_state_is_saved(project: Project, tmp_path: Path) -> None:
    """An average of the weights and a scaler, as an owner may add them to `Run(...)`."""
    code = """
import argparse, sys
from pathlib import Path
import torch
from torch.optim.swa_utils import AveragedModel
from engine.ranks import distributed
from engine.run import checkpoint
from engine.run.progress import Run
distributed.setup()
args = argparse.Namespace(batch_size=1, accumulate=1, save_every=0, keep=2, seed=0, epochs=1)
args.output_dir = Path(sys.argv[1])

def made():
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1)
    more = {"ema": AveragedModel(net), "scaler": torch.amp.GradScaler("cpu", init_scale=64.0)}
    return Run(args, ["a"], 9, torch.device("cpu"), "top1", "", net, optimizer, scheduler, **more)

first, second = made(), made()
for part in first.parts["ema"].parameters():
    part.data += 1
first.parts["scaler"].scale(torch.ones(1))
first.parts["scaler"].update(32.0)
first.save()
second.restore(checkpoint.find(args.output_dir, "auto"))
same = [torch.equal(*pair) for pair in zip(*(r.parts["ema"].parameters() for r in (first, second)))]
print(all(same), second.parts["scaler"].get_scale())
"""
    assert project.python(code, tmp_path) == "True 32.0\n"
