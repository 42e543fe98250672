"""Generate projects as a user does, and run their commands without leaving a process behind."""

import contextlib
import csv
import fcntl
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = Path(__file__).resolve().parent
SCRIPTS = TESTS / "scripts"  # which take the place of main.py
TEMPLATE_FOLDER = "{{cookiecutter.project_slug}}"
TASKS = ("classification", "segmentation")
# Small pictures, a small share of time in processes: what most runs in these tests are given.
SMALL = (
    *("--image-size", "64", "--batch-size", "4", "--workers", "0", "--epochs", "1"),
    *("--threads", "1"),
)
# Networks whose checkpoints are a fifth of the default ones': writing those would take most of the
# tests' time. make demo and the projects' own tests keep to the default ones.
NETS = {
    "classification": ("--arch", "shufflenet_v2_x0_5"),
    "segmentation": ("--encoder", "mobilenet_v2"),
}


def small(data: Path) -> tuple[str, ...]:
    """Flags for a short run on `data`, with a small network of its task."""
    rows = data / "rows.bin"  # of a prepared set: of a mask's four numbers the last one is 0
    has_masks = (data / "train" / "masks").exists() or (
        rows.exists() and 0 in np.fromfile(rows, np.int64)[3::4]
    )
    return (*SMALL, *NETS["segmentation" if has_masks else "classification"])


# One thread a process; the log level is the one that main.py sets before it imports torch.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


# Tests of one group run in one worker of pytest-xdist, one after the other.
GROUPS = {
    "test_debug.py": "debugger",  # they share runs/default of the project, and mostly wait
    "test_demo.py": "demo {task}",  # they share what `make demo` has made
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if group := GROUPS.get(item.path.name):
            task = next((task for task in TASKS if task in item.name), "")
            item.add_marker(pytest.mark.xdist_group(group.format(task=task)))
    items.sort(key=lambda item: item.path.name != "test_faults.py")  # they take longest


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run of pytest, the same in all workers of pytest-xdist."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@contextlib.contextmanager
def once(path: Path) -> Iterator[bool]:
    """Whether `path` is to be made in this block; if another worker is at it, when it is done."""
    done = path.with_name(f"{path.name}.done")
    with open(path.with_name(f"{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not done.exists()
        done.touch()


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git would commit: no caches, no virtual environment."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    copy = tmp_path_factory.mktemp("template")
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # a deleted file is listed until the deletion is committed
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="session")
def clean_home(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which cookiecutter and git find no settings of the user's."""
    home = tmp_path_factory.mktemp("home")
    config = home / "cookiecutter.yaml"
    config.write_text(f"replay_dir: {home}/replay\ncookiecutters_dir: {home}/cookiecutters\n")
    git = {
        f"GIT_{who}_{what}": "test@example.org"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    return {**os.environ, "HOME": str(home), "COOKIECUTTER_CONFIG": str(config), **git}


Generate = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="session")
def generate(template: Path, clean_home: dict[str, str]) -> Generate:
    def generate(folder: Path, *answers: str, **options: object) -> subprocess.CompletedProcess:
        command = [
            sys.executable,
            "-m",
            "cookiecutter",
            str(template),
            "-o",
            str(folder),
        ]
        if "input" not in options:
            command.append("--no-input")
        return subprocess.run(
            [*command, *answers],
            env=clean_home,
            capture_output=True,
            text=True,
            timeout=60,
            **options,
        )

    return generate


class Project:
    """A generated project in a path with a space, and small data for it."""

    def __init__(self, folder: Path, task: str) -> None:
        self.folder = folder
        self.task = task
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

    def fork(self, *flags: object, ranks: int = 2, script: str | Path = "main.py") -> "Done":
        """As `launch`, but without a launcher, whose time most tests can do without."""
        with tempfile.TemporaryDirectory() as folder:
            return self._order(folder, ranks=ranks, flags=[*map(str, flags)], script=script)

    def _order(self, folder: str, **order: object) -> "Done":
        """Have the fork server do something whose output goes to `folder`."""
        if self.server is None:
            self.mark = uuid.uuid4().hex
            command = [sys.executable, TESTS / "forked.py"]
            self.server = start(command, self.mark, cwd=self.folder, stdin=subprocess.PIPE)
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
            assert word in self.err
        assert not self.left
        return self


def start(
    command: list,
    mark: str,
    ranks: int = 2,
    cwd: Path | None = None,
    stdin: int | None = None,
    **env: str,
) -> subprocess.Popen:
    """Start a command whose descendants all carry `mark` in their environment."""
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env={
            **os.environ,
            **ENVIRONMENT,
            "NPROC": str(ranks),
            "PYTHON": sys.executable,
            "DDP_TEMPLATE_TEST": mark,
            **env,
        },
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


@pytest.fixture(scope="session")
def projects(generate: Generate, shared: Path) -> Iterator[Callable]:
    """Both kinds of project, each generated once."""

    @functools.cache
    def project(task: str) -> Project:
        parent = shared / f"a path with a space, {task}"
        with once(parent) as is_first:
            if is_first:
                done = generate(parent, f"task={task}")
                assert done.returncode == 0, done.stderr
        made.append(Project(parent / "my_ddp_project", task))
        return made[-1]

    made: list[Project] = []
    yield project
    for each in made:
        each.close()


@pytest.fixture(params=TASKS)
def project(request: pytest.FixtureRequest, projects: Callable[[str], Project]) -> Project:
    return projects(request.param)


@pytest.fixture
def data(project: Project) -> Path:
    """53 + 23 pictures: they divide by no batch and no number of ranks that is tried."""
    folder = project.folder.parent / "set"
    with once(folder) as is_first:
        return project.draw(folder, 53, 23) if is_first else folder


@pytest.fixture
def trained(project: Project, data: Path) -> Path:
    """The output folder of a finished run of one epoch."""
    folder = project.folder.parent / "trained"
    with once(folder) as is_first:
        if is_first:
            project.fork(*small(data), "--data", data, "--output-dir", folder).ok()
    return folder


@pytest.fixture
def own_data(data: Path, tmp_path: Path) -> Path:
    """A copy of `data` to spoil."""
    return shutil.copytree(data, tmp_path / "own")
