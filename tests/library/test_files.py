"""Files and folders that appear whole or not at all; what checkpoints hold of optimizers."""

import ast
import contextlib
import csv
import json
import os
import re
import signal
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from generated import ROOT, die, refusal
from ranks import on_ranks

from ddpkit import files
from ddpkit.run import checkpoint, states


def test_writing(tmp_path):
    path = tmp_path / "new" / "file"
    with files.writing(path, parents=True) as part:
        part.write_text("one")
        assert not path.exists()
    with pytest.raises(ZeroDivisionError), files.writing(path) as part:
        part.write_text("two")
        raise ZeroDivisionError
    with refusal("files.failure", path, "No space"), files.writing(path) as part:
        part.write_text("three")
        raise OSError(28, "No space left on device")
    assert path.read_text() == "one"
    assert os.listdir(path.parent) == ["file"]


def test_a_table(tmp_path):
    path = tmp_path / "table.csv"
    partial = tmp_path / "table.csv.partial"
    with files.table(path, ["file"]):
        pass
    assert not list(tmp_path.iterdir())
    with pytest.raises(ZeroDivisionError), files.table(path, ["file"]) as write:
        write(["\udcff"])
        raise ZeroDivisionError
    assert partial.read_bytes() == b"file\n\xff\n"
    with files.table(path, ["file"]) as write:
        write(["a"])
    assert path.read_text() == "file\na\n"
    assert not partial.exists()


@pytest.mark.parametrize("write", ["writing", "table", "checkpoint", "swapped"])
def test_links_are_not_followed(write, tmp_path, monkeypatch):
    """That somebody else has put into a shared folder, before or during a write."""
    theirs = tmp_path / "secret"
    path = tmp_path / "file"
    theirs.write_text("mine")
    for name in ".file.part", "file.partial":
        (tmp_path / name).symlink_to(theirs)
    if write == "table":
        with files.table(path, ["a"]) as row:
            row([1])
    elif write == "checkpoint":
        with files.writing(path) as part:
            checkpoint.write_file(part, {"a": 1})
    elif write == "writing":
        with files.writing(path) as part:
            part.write_text("new")
    else:
        with refusal("files.failure", path, "replaced"), files.writing(path) as part:
            (tmp_path / ".file.part").unlink()
            (tmp_path / ".file.part").symlink_to(theirs)
            part.write_text("new")
    assert theirs.read_text() == "mine"
    assert not path.is_symlink()
    assert path.exists() == (write != "swapped")


def test_formulas(tmp_path):
    """A spreadsheet computes no name; numbers stay, and names can be read back."""
    names = ["=cmd|calc", "@SUM(1)", "-1+2", "+x", "'=x", "'x", "a;=b", "a-b", "\tx"]
    numbers = [-1, -0.5, "-1e-3", "+3", float("nan")]
    with files.table(tmp_path / "a.csv", names + list("abcde")) as write:
        write(names + numbers)
        with refusal("files.write_row", "9 values for 14 columns"):
            write(names)
    with open(tmp_path / "a.csv", newline="") as file:
        header, row = csv.reader(file)
    header = header[: len(names)]
    assert row[len(names) :] == ["-1", "-0.5", "-1e-3", "+3", "nan"]
    assert header == row[: len(names)]
    assert header[:4] == ["'=cmd|calc", "'@SUM(1)", "'-1+2", "'+x"]
    assert [re.sub(r"(^|;)'(?='*[-=+@\t\r])", r"\1", cell) for cell in header] == names


def odd_files(folder: Path) -> dict[str, Path]:
    """What is no file to read, by what is said of it: it blocks, has no end, or is not there."""
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
    (folder / "device").symlink_to("/dev/zero")
    (folder / "dangling").symlink_to("none")
    (folder / "loop").symlink_to("loop")
    (folder / "large").touch()
    os.truncate(folder / "large", files.OF_DATA + 1)
    return {
        "(not a regular file)": folder / "pipe",
        "(No such device or address)": folder / "socket",
        "(not a regular file) ": folder / "device",
        "(No such file or directory)": folder / "dangling",
        "(Too many levels of symbolic links)": folder / "loop",
        "(Is a directory)": folder,
        f"({files.OF_DATA + 1:,} bytes, more than ": folder / "large",
    }


def test_only_regular_files_are_read(tmp_path):
    """Each at once, in one line that says what it is; and so is what a parser cannot read."""
    for words, path in odd_files(tmp_path).items():
        with refusal("files.failure", path, "cannot be read", words.strip()):
            files.read_text(path)
    path = tmp_path / "file"
    for content in b"\xff", b"[" * 100_000, b"1" * 5_000, b"{":
        path.write_bytes(content)
        with refusal("files.parse", path, "not JSON (", "; repair or remove it"):
            files.parse(path, json.loads, "JSON")
    path.write_bytes(b"\xff")
    with refusal("files.parse", path, "not UTF-8 text", "; save it as UTF-8"):
        files.read_text(path)
    assert files.read_text(path, "replace") == "\ufffd"
    with refusal("files.failure", path, "1 bytes, more than 0"):
        files.read_text(path, most=0)


OPENS = re.compile(
    r"((io|os)\.)?open|(np|torch|json|yaml)\.load|(Image|zipfile|tarfile)\.open|shutil\.copy(file|tree|2)?|"
    r"(?!files\.).*\.(read_text|read_bytes|TiffFile|ZipFile|load_file|safe_open|imread|fromfile|"
    r"memmap)|loadmat|whosmat|ElementTree\.(parse|iterparse)|(path|file|source)\.open"
)
# What a run and this machine have by themselves, and what is told apart by the argument.
OWN = {
    "files.py": {"open", "os.open"},
    "errors.py": {"os.open"},
    "__main__.py": {"shutil.copytree"},
    "agreement.py": {"path.read_bytes"},  # the code that runs
    "__init__.py": {"Path(__file__).read_text"},  # itself
    # read as data everywhere else
    "folders.py": {"open"},
    "check.py": {"open"},
    "masks.py": {"path.read_text"},
}


def test_one_door():
    """What others may have made is opened by files.py alone; elsewhere only what it has opened."""
    library = ROOT / "ddpkit"
    found = {}
    for path in library.rglob("*.py"):
        if path.parent.name == "ranks":  # the kernel's files, and sockets
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            given = [ast.unparse(each) for each in node.args]
            is_opened = given and re.match(
                r"file$|new$|io\.BytesIO\(|content", given[0]
            )
            is_written = any(re.fullmatch("'[wx]b?'", each) for each in given)
            is_own = is_opened or is_written or name in OWN.get(path.name, ())
            if OPENS.fullmatch(name) and not is_own:
                found.setdefault(path.name, []).append((name, node.lineno))
    assert found == {}


def others_get(path: Path) -> bool:
    """Whether a process that is forked gets the lock."""
    pid = os.fork()
    if pid == 0:
        files.time.sleep = lambda _: None
        try:
            is_free = files.lock(path)
        finally:
            os._exit(is_free)
    return bool(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def test_the_lock(tmp_path):
    """It stays when another handle is closed, and goes with its process, whatever that forked."""
    path = tmp_path / ".lock"
    ready = os.pipe()
    end = os.pipe()
    pid = os.fork()
    if pid == 0:
        files.lock(path)
        if os.fork():
            os.write(ready[1], b"1")
            signal.pause()
        os.read(end[0], 1)  # a worker that outlives it
        os._exit(0)
    os.read(ready[0], 1)
    path.read_bytes()
    assert not others_get(path)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert files.lock(path)
    assert files.lock(path)  # of this process again
    path.read_bytes()
    assert not others_get(path)
    os.write(end[1], b"1")
    # an orphan is this process's, once it has ended
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


@pytest.mark.parametrize(
    ("folder", "lock"),
    [
        (0o755, 0o600),
        (0o2775, 0o660),
        (0o777, 0o666),
    ],
)
def test_who_can_open_the_lock(folder, lock, tmp_path):
    """Those who can write the folder, whatever the umask; also one that is there from before."""
    tmp_path.chmod(folder)
    before = os.umask(0)
    try:
        for umask in 0o022, 0o077:
            os.umask(umask)
            for name in "new", "old":
                path = tmp_path / f"{name} {umask}"
                if name == "old":
                    path.touch(0o644)
                assert files.lock(path)
                assert path.stat().st_mode & 0o777 == lock
    finally:
        os.umask(before)


def test_the_lock_of_a_colleague(tmp_path, monkeypatch):
    """One that can only be read is taken in turns; one that is closed is an error."""
    path = tmp_path / ".lock"
    opened = os.open
    path.touch()

    def refusing(*which: int) -> None:
        def open_(name: Path, how: int, *more: int) -> int:
            if how & os.O_ACCMODE in which:
                raise PermissionError(13, "Permission denied")
            return opened(name, how, *more)

        monkeypatch.setattr(os, "open", open_)

    refusing(os.O_RDWR)
    assert files.lock(path)
    assert not others_get(path)
    refusing(os.O_RDWR, os.O_RDONLY)
    with pytest.raises(PermissionError):
        files.lock(path)


def test_two_users_of_a_group():
    """Take turns; a stranger cannot open the lock. Without root all are the same user."""
    group = 54321
    is_root = os.geteuid() == 0
    ready = os.pipe()

    def fork_as(user: int, of: int, act: Callable[[], object]) -> int:
        pid = os.fork()
        if pid:
            return pid
        status = 7
        try:
            os.umask(0o022)
            if is_root:
                os.setgroups([])
                os.setgid(of)
                os.setuid(user)
            files.time.sleep = lambda _: None
            status = int(bool(act()))
        finally:
            os._exit(status)

    def result(pid: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def hold() -> None:
        os.write(ready[1], b"1" if files.lock(path) else b"0")
        signal.pause()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / ".lock"
        os.chown(folder, -1, group if is_root else -1)
        folder.chmod(0o2775)
        for one, other in (50001, 50002), (50002, 50001):
            holder = fork_as(one, group, hold)
            assert os.read(ready[0], 1) == b"1"
            assert result(fork_as(other, group, lambda: files.lock(path))) == 0
            os.kill(holder, signal.SIGKILL)
            assert result(holder) == -signal.SIGKILL
        assert not path.stat().st_mode & 0o007
        if is_root:
            assert (
                result(fork_as(50003, 54322, lambda: not os.access(path, os.R_OK))) == 1
            )


def test_filling(tmp_path):
    """A folder appears whole or not at all; the first one stays."""
    folder = tmp_path / "folder"
    pid = os.fork()
    if pid == 0:
        with files.filling(folder) as part:
            (part / "killed").touch()
            die()
    os.waitpid(pid, 0)
    assert not folder.exists()
    with pytest.raises(ZeroDivisionError), files.filling(folder) as part:
        raise ZeroDivisionError
    (left,) = tmp_path.iterdir()  # of the one that was killed
    for name in ("first", "second"):
        with files.filling(folder) as part:
            (part / name).touch()
    assert set(tmp_path.iterdir()) == {left, folder}
    assert os.listdir(folder) == ["first"]


@on_ranks(1)
def test_groups_of_an_optimizer():
    """In another order they resume, each weight with its own moment."""
    net = torch.nn.Linear(2, 2)
    other = torch.nn.Linear(3, 1, bias=False)

    def made(*groups: list[torch.Tensor]) -> dict:
        sgd = torch.optim.SGD([{"params": group} for group in groups], 0.1, 0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(sgd, lambda _: 1.0)
        return {"model": net, "optimizer": sgd, "scheduler": scheduler}

    before = made([net.weight, net.bias, other.weight])
    net(torch.ones(2)).sum().backward()
    before["optimizer"].step()
    state = {
        **states.take_states(before),
        "kinds": states.kinds(before),
        "path": "last.pt",
    }
    named = state["optimizer"]["param_groups"][0]["params"]
    assert named == ["weight", "bias", "2 (1, 3)"]  # the last is none of the model's
    after = made([net.bias, net.weight, other.weight])
    states.load_states(state, after, state, "undo that", 1)
    for weight in net.parameters():
        moment = before["optimizer"].state[weight]["momentum_buffer"]
        loaded = after["optimizer"].state[weight]["momentum_buffer"]
        assert torch.equal(moment, loaded)


@on_ranks(1)
def test_another_memory_format():
    """A fused optimizer takes the order in memory for granted; other moments are put right."""
    last = torch.channels_last
    weight = torch.rand(4, 3, 3, 3)
    mean = torch.rand(4, 3, 3, 3)
    square = torch.rand(4, 3, 3, 3)
    grad = torch.rand(4, 3, 3, 3)
    ends = []
    for fused in (True, False):
        w = torch.nn.Parameter(weight.contiguous(memory_format=last))
        optimizer = torch.optim.AdamW([w], 0.1, fused=fused)
        parts = {
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        }
        state = {**states.take_states(parts), "path": "last.pt"}
        moments = {"exp_avg": mean.clone(), "exp_avg_sq": square.clone()}
        moments["step"] = torch.tensor(3.0)
        state["optimizer"]["state"] = {"0 (4, 3, 3, 3)": moments}
        state["kinds"] = states.kinds(parts)
        states.load_states(state, parts, state, "undo that", 3)
        w.grad = grad.contiguous(memory_format=last)
        optimizer.step()
        ends.append(w.detach())
    assert torch.allclose(ends[0], ends[1], atol=1e-6)
