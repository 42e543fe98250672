"""What can be shown of Windows and macOS without one: no POSIX, no fork, files that are open.

`windows/sitecustomize.py` hides from ddpkit what Windows lacks.
"""

import errno
import multiprocessing
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from digest import digest
from generated import (
    NET,
    ROOT,
    TEMPLATE_FOLDER,
    Command,
    Done,
    Project,
    after_step,
    refusal,
    run,
    wait_for,
)
from ranks import Patch

import ddpkit
from ddpkit import files
from ddpkit.data import loading

WINDOWS = os.pathsep.join((str(ROOT / "tests/windows"), str(ROOT)))
SCRIPT = """
import os, sys, time
import ddpkit

def parse():
    if "--wrong" in sys.argv:
        raise ddpkit.UserError("--wrong 1: use --right")

if __name__ == "__main__":
    ddpkit.before_imports(parse)
    assert os.name == "nt" and sys.platform == "win32"
    open(f"at work {os.getpid()}", "x").close()
    if "--fail" in sys.argv and os.environ["RANK"] == "1":
        sys.exit(5)
    time.sleep(600)
"""


def start(folder: Path, *words: str) -> Command:
    """The launcher and its ranks, all of which see Windows."""
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "ddpkit", "launch", "script.py", *words]
    return Command(command, folder, NPROC="2", PYTHONPATH=WINDOWS)


def test_the_launcher_without_posix(tmp_path: Path) -> None:
    """A wrong flag, a rank that fails, a stop, a launcher that is killed: nobody is left."""
    start(tmp_path, "--wrong").end().refused("script.parse", "--wrong 1")
    done = start(tmp_path, "--fail").end()
    assert done.status == 5
    assert re.fullmatch(r"error: rank 1 .* exited with status 5\n", done.err)
    assert not done.left
    for signum, status in (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL):
        for path in tmp_path.glob("at work*"):
            path.unlink()
        started = start(tmp_path)
        wait_for(lambda: len(list(tmp_path.glob("at work*"))) == 2)
        started.kill(signum)
        done = started.end()
        assert done.status == status
        assert done.err == ""
        assert not done.left


def test_modules_without_posix() -> None:
    """Each can be imported."""
    paths = [path.relative_to(ROOT) for path in sorted((ROOT / "ddpkit").rglob("*.py"))]
    names = [".".join(path.with_suffix("").parts) for path in paths]
    names = [name.removesuffix(".__init__") for name in names]
    code = f"import importlib\nfor name in {names}: importlib.import_module(name)"
    assert len(names) > 60
    run([sys.executable, "-c", code], PYTHONPATH=WINDOWS).ok()


@pytest.mark.soak
def test_spawned_loader_workers(project: Project, few: Path, tmp_path: Path) -> None:
    """Where no worker is forked a run stops, resumes, and ends with the same bits."""
    make = loading.val_loader

    def spawn() -> None:
        multiprocessing.set_start_method("spawn", force=True)
        loading.worker_context = lambda count: None
        # each worker imports torch, which takes seconds
        ddpkit.val_loader = lambda *words, **how: make(*words, **{**how, "workers": 0})

    def stopping() -> None:
        spawn()
        after_step(2, lambda: os.kill(os.getpid(), signal.SIGTERM), 1)()

    def train(folder: Path, patch: Patch | None) -> Done:
        flags = ["--data", few, "--output-dir", folder, *NET, "--weights", "none"]
        flags += ["--epochs", 1, "--batch-size", 2]
        script = project.folder / "main.py"  # workers look for it where pytest began
        return project.start(flags, script=script, patch=patch).end(300)

    train(tmp_path / "forked", None).ok()
    done = train(tmp_path / "spawned", stopping)
    assert done.statuses == [75, 75], done.err
    done = train(tmp_path / "spawned", spawn).ok()
    assert "steps of the next" in done.out
    assert digest(tmp_path / "spawned") == digest(tmp_path / "forked")


def test_files_that_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows nothing replaces them: it is tried again; a table then stays beside its own."""
    replace = os.replace
    tries = []

    def busy(source: Path, target: Path) -> None:
        tries.append(source)
        if len(tries) <= refused:
            raise PermissionError(errno.EACCES, "Permission denied")
        replace(source, target)

    monkeypatch.setattr(
        files, "sys", SimpleNamespace(platform="win32", stderr=sys.stderr)
    )
    monkeypatch.setattr(files.os, "replace", busy)
    monkeypatch.setattr(files.time, "sleep", lambda seconds: None)
    path = tmp_path / "last.pt"
    refused = 3
    with files.writing(path) as part:
        part.write_bytes(b"new")
    assert path.read_bytes() == b"new"
    assert len(tries) == 4
    refused = 1000
    with refusal("files.failure", path, "cannot be written"), files.writing(path):
        pass
    assert path.read_bytes() == b"new"
    table = tmp_path / "metrics.csv"
    with (
        refusal("files.failure", table, "cannot be written"),
        files.table(table, ["epoch"]) as write,
    ):
        write([1])
    assert (tmp_path / "metrics.csv.partial").read_bytes() == b"epoch\n1\n"


def test_a_folder_is_of_one_run(tmp_path: Path) -> None:
    """Windows has another lock."""
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, subprocess, sys\nfrom ddpkit import files\n"
        "print(files.lock(pathlib.Path('.lock')), flush=True)\n"
        "if sys.argv[1:]: subprocess.run([sys.executable, *sys.argv[1:]])\n"
    )
    for _ in "12":  # free again
        done = run([sys.executable, script, script], tmp_path, PYTHONPATH=WINDOWS).ok()
        assert done.out == "True\nFalse\n"


def test_texts_have_an_encoding() -> None:
    """Which is UTF-8: that of Windows has few letters."""
    places = ["ddpkit", "hooks", TEMPLATE_FOLDER]
    rules = ["--isolated", "--no-cache", "--preview", "--select", "PLW1514"]
    run([sys.executable, "-m", "ruff", "check", *rules, *places], ROOT).ok()
    for path in sorted((ROOT / "ddpkit").rglob("*.py")):
        code = path.read_text("utf-8")
        for call in re.findall(
            r"(?<!files)\.(?:read|write)_text\([^\n]*(?:\n[^\n]*)?", code
        ):
            assert "utf-8" in call, f"{path}: {call}"
