"""A generated project, and how tests run its commands without leaving a process behind."""

import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = Path(__file__).resolve().parent
SCRIPTS = TESTS / "scripts"  # which take the place of main.py
TEMPLATE_FOLDER = "{{cookiecutter.project_slug}}"
TASKS = ("classification", "segmentation")
# What most runs in these tests are given: small images, and little time in processes.
SMALL = (
    *("--image-size", "64", "--batch-size", "4", "--workers", "0", "--epochs", "1"),
    *("--weights", "none"),
)
# Small networks: building, exporting and saving the default ones would take most of the tests'
# time. make demo and the projects' own tests keep to those.
NETS = {
    "classification": ("--arch", "shufflenet_v2_x0_5"),
    "segmentation": ("--arch", "linknet", "--encoder", "tu-mobilenetv2_035"),
}
# With BatchNorm, dropout, loader workers and a schedule: whatever can go astray.
NET = ["--arch", "mobilenet_v3_small", "--image-size", 32, "--workers", 1, "--batch-size", 4]


# What these tests try is the same file, byte for byte, in both kinds of project.
SAME_FOR_BOTH = pytest.mark.parametrize("project", ["classification"], indirect=True)


def small(data: Path) -> tuple[str, ...]:
    """Flags for a short run on `data`, with a small network of its task."""
    rows = data / "rows.bin"  # of a prepared set: of a mask's four numbers the last one is 0
    has_masks = (data / "train" / "masks").exists() or (
        rows.exists() and 0 in np.fromfile(rows, np.int64)[3::4]
    )
    return (*SMALL, *NETS["segmentation" if has_masks else "classification"])


# One thread a process; the log level is the one that main.py sets before it imports torch.
ENVIRONMENT = {
    **{"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
    **{"https_proxy": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"},  # no run downloads weights
}


class Project:
    """A generated project in a path with a space, and small data for it."""

    def __init__(self, folder: Path, task: str, **env: str | None) -> None:
        self.folder = folder
        self.task = task
        self.env = env  # of what `call` and `fork` run
        self.server: subprocess.Popen | None = None

    def call(self, name: str, *args: object, fresh: bool = False) -> Any:
        """Return what a function of snippets/ returns, such as "data.draw", called here.

        In a fork of a Python that has imported main.py; with `fresh` in a Python of its own, for
        another environment or edited modules. Paths become texts.
        """
        with tempfile.TemporaryDirectory() as folder:
            if fresh:
                value = Path(folder, "value")
                words = [name, json.dumps(args, default=str), value]
                run([sys.executable, TESTS / "calling.py", *words], cwd=self.folder).ok()
                return json.loads(value.read_text())
            done = self._order(folder, call=name, args=args)
            assert done.status == 0, done.err
            return json.loads(Path(folder, "said.value").read_text())

    def copy(self, folder: Path) -> "Project":
        """A copy to change, without what runs have left."""

        def ignore(path: str, names: list[str]) -> set[str]:
            made_by_runs = {"data", "runs"} if Path(path) == self.folder else set()
            return {"__pycache__", ".pytest_cache", *made_by_runs} & {*names}

        return Project(shutil.copytree(self.folder, folder, ignore=ignore), self.task)

    def draw(self, folder: Path, train: int, val: int) -> Path:
        self.call("data.draw", folder, train, val)
        return folder

    def launch(self, *flags: object, **kwargs: object) -> "Done":
        return run([self.folder / "launch.sh", *flags], **kwargs)

    def fork(
        self,
        *flags: object,
        ranks: int = 2,
        script: str | Path = "main.py",
        draws: bool = True,
    ) -> "Done":
        """As `launch`, but without a launcher, whose time most tests can do without.

        With `draws=False` also without curves.png, examples.png and the like.
        """
        options = {"ranks": ranks, "script": script, "draws": draws}
        with tempfile.TemporaryDirectory() as folder:
            return self._order(folder, flags=[*map(str, flags)], **options)

    def _order(self, folder: str, **order: object) -> "Done":
        """Have the fork server do something whose output goes to `folder`."""
        if self.server is None:
            self.mark = uuid.uuid4().hex
            command = [sys.executable, TESTS / "forked.py"]
            options = {"cwd": self.folder, "stdin": subprocess.PIPE, **self.env}
            self.server = start(command, self.mark, **options)
        output = f"{folder}/said"
        self.server.stdin.write(json.dumps({**order, "output": output}, default=str) + "\n")
        self.server.stdin.flush()
        statuses = json.loads(self.server.stdout.readline())
        out, err = (Path(f"{output}.{end}").read_text() for end in ("out", "err"))
        # Python 3.14 starts a resource tracker for tqdm's lock; it exits just after its parent.
        deadline = time.monotonic() + 5
        while left := [pid for pid in marked(self.mark) if pid != self.server.pid]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return Done(max(statuses, key=abs), out, err, left)

    def alone(self, *flags: object, **options: Any) -> "Done":
        return self.fork(*flags, ranks=1, **options)

    def close(self) -> None:
        if self.server is not None:
            self.server.stdin.close()
            self.server.wait(30)


def rows(folder: Path) -> list[dict[str, str]]:
    """The rows of a run's metrics.csv."""
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


class Done:
    def __init__(self, status: int, out: str, err: str, left: list[int]) -> None:
        self.status = status
        self.out = out
        self.err = err
        self.left = left  # processes that outlived the command

    def ok(self) -> "Done":
        assert self.status == 0, f"status {self.status}\n{self.out}\n{self.err}"
        assert not self.left
        return self

    def refused(self, *words: str) -> "Done":
        """Exactly one line of complaint with all `words`, a non-zero status, nobody left."""
        assert self.status not in (0, None), self.out
        assert len(self.err.splitlines()) == 1, self.err
        for word in words:
            assert word in self.err, self.err
        assert not self.left
        return self


def start(
    command: list,
    mark: str,
    ranks: int = 2,
    cwd: Path | None = None,
    stdin: int | None = None,
    **env: str | None,
) -> subprocess.Popen:
    """Start a command whose descendants all carry `mark` in their environment.

    env: more variables; None: not set.
    """
    own = {"NPROC": str(ranks), "PYTHON": sys.executable, "DDP_TEMPLATE_TEST": mark}
    env = {**os.environ, **ENVIRONMENT, **own, **env}
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env={name: value for name, value in env.items() if value is not None},
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def marked(mark: str) -> list[int]:
    """The ids of the living processes that carry `mark`, zombies not among them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"DDP_TEMPLATE_TEST={mark}".encode() in (folder / "environ").read_bytes().split(
                b"\0"
            ):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def processes(mark: str) -> list[tuple[int, int]]:
    """The process ids and ranks of the ranks that carry `mark`, without their loader workers."""
    found: dict[int, tuple[int, int]] = {}
    for pid in marked(mark):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        for entry in environment:
            if entry.startswith(b"RANK="):
                found[pid] = parent, int(entry[5:])
    return [(pid, rank) for pid, (parent, rank) in found.items() if parent not in found]


def finish(process: subprocess.Popen, mark: str, timeout: float = 300) -> Done:
    """Wait for the command, give its descendants a moment, and end those that stay."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode() + (error.stderr or b"").decode()
        raise AssertionError(
            f"not ended: launcher {process.poll()}, there are {marked(mark)}\n{said}"
        ) from None
    finally:
        deadline = time.monotonic() + 10
        while (left := marked(mark)) and process.poll() is not None and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            os.kill(pid, 9)
    return Done(process.returncode, out, err, left)


def run(command: list, timeout: float = 300, **kwargs: object) -> Done:
    mark = uuid.uuid4().hex
    return finish(start(command, mark, **kwargs), mark, timeout)


def flags(data: Path, out: Path, *more: object) -> list[object]:
    return [*small(data), "--data", data, "--output-dir", out, *more]


def edited(project: Project, folder: Path, *changes: tuple[str, str]) -> Project:
    """A copy of the project whose main.py has, of each change, the second where it had the first.

    That is there once.
    """
    copy = project.copy(folder)
    main = copy.folder / "main.py"
    text = main.read_text()
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    main.write_text(text)
    return copy


DRAWS_NOTHING = """
import unittest.mock
from ddpkit.run import pictures, reporting
pictures.draw_curves = reporting.Reporter.images = reporting.report = unittest.mock.Mock()
reporting.are_drawn = lambda *_: True
"""


def planted(project: Project, folder: Path, code: str = "") -> Project:
    """A copy of the project that draws nothing, and runs `code` before each optimizer step."""
    step, recipe = "        if is_last:\n", "\nimport recipe\n"
    code = textwrap.indent(code, " " * 8)
    return edited(project, folder, (step, code + step), (recipe, DRAWS_NOTHING + recipe))


def in_place_of_main(project: Project, folder: Path, script: str) -> Project:
    """A copy of the project whose main.py is that one of scripts/."""
    copy = project.copy(folder)
    shutil.copy(SCRIPTS / script, copy.folder / "main.py")
    return copy


def wait_for(condition, process, timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)  # a look at all processes takes 2 ms
