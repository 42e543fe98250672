"""Fixtures: the template, both kinds of project, data, and a run of each."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import foreground
import pytest

if TYPE_CHECKING:
    from generated import Project

ROOT = Path(__file__).resolve().parent.parent
foreground.restore_signals()  # before pytest-xdist starts its workers
os.environ["COLUMNS"] = "120"  # of --help, whatever terminal this is

# generated.py imports torch, which pytest-xdist's own process does not need: it would take as long
# again until its workers begin. All others import it before their tests import anything.
WORDS = ("-n", "--numprocesses")
if "PYTEST_XDIST_WORKER" in os.environ or not any(
    word.startswith(WORDS) for word in sys.argv
):
    import generated  # noqa: F401

# They take long, and come first, so that no worker is left with one at the end.
LONGEST = (
    "slurm",
    "stopping",
    "demo",
    "gpu",
    "apple",
    "template",
    "debug",
    "layouts",
    "runs",
    "launch",
    "sweep",
    "seams",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {f"test_{name}.py": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    """Each test ends all that it has started."""
    import generated

    before = set(generated.LIVE)
    yield
    forgotten = generated.LIVE - before
    generated.LIVE.intersection_update(before)
    # the resource tracker of Python 3.14 ends a moment after its process
    assert not generated.left(5 if sys.version_info >= (3, 14) else 0)
    assert not forgotten


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run of pytest, the same in all workers of pytest-xdist."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@contextlib.contextmanager
def once(path: Path) -> Iterator[bool]:
    """Whether `path` is to be made in this block; if another worker is at it, when it is done."""
    import fcntl  # not on Windows, where some tests run

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
        source = ROOT / name
        # deleted ones are listed until committed
        if source.is_file() or source.is_symlink():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy / name, follow_symlinks=False)
    return copy


@pytest.fixture(scope="session")
def clean_home(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which cookiecutter and git find no settings of the user's."""
    home = tmp_path_factory.mktemp("home")
    config = home / "cookiecutter.yaml"
    config.write_text(
        f"replay_dir: {home}/replay\ncookiecutters_dir: {home}/cookiecutters\n"
    )
    git = {
        f"GIT_{who}_{what}": "test@example.org"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    return {**os.environ, "HOME": str(home), "COOKIECUTTER_CONFIG": str(config), **git}


Generate = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="session")
def generate(template: Path, clean_home: dict[str, str]) -> Generate:
    def generate(
        folder: Path, *answers: str, source: Path = template, **options: object
    ) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "cookiecutter", source, "-o", folder]
        if "input" not in options:
            command.append("--no-input")
        return subprocess.run(
            command + list(answers),
            env=clean_home,
            capture_output=True,
            text=True,
            timeout=60,
            **options,
        )

    return generate


@pytest.fixture(scope="session")
def projects(generate: Generate, shared: Path) -> Callable[[str], Project]:
    """Both kinds of project, each generated once."""
    from generated import Project

    @functools.cache
    def project(task: str) -> Project:
        parent = shared / f"a path with a space, {task}"
        with once(parent) as is_first:
            if is_first:
                done = generate(parent, f"task={task}")
                assert done.returncode == 0, done.stderr
                library = parent / "my_ddp_project" / "ddpkit"
                shutil.rmtree(library)
                # which forks of this process have imported
                library.symlink_to(ROOT / "ddpkit")
        return Project(parent / "my_ddp_project", task)

    return project


@pytest.fixture
def project(
    request: pytest.FixtureRequest, projects: Callable[[str], Project]
) -> Project:
    """The project for classification, or of each task with `@both_tasks`."""
    return projects(getattr(request, "param", "classification"))


@pytest.fixture
def data(project: Project) -> Path:
    """53 + 23 images: they divide by no batch and no number of ranks that is tried."""
    folder = project.folder.parent / "set"
    with once(folder) as is_first:
        return project.draw(folder, 53, 23) if is_first else folder


@pytest.fixture
def few(project: Project) -> Path:
    """Data of which two ranks make three steps of 4 + 4 images per epoch."""
    folder = project.folder.parent / "few"
    with once(folder) as is_first:
        return project.draw(folder, 26, 6) if is_first else folder


@pytest.fixture
def own_data(data: Path, tmp_path: Path) -> Path:
    """A copy of `data` to spoil."""
    return shutil.copytree(data, tmp_path / "own")


@pytest.fixture
def trained(project: Project, data: Path) -> Path:
    """The output folder of a finished run of one epoch, which is only read."""
    folder = project.folder.parent / "trained"
    with once(folder) as is_first:
        if is_first:
            project.train(data, folder, draws=True).ok()
    return folder


@pytest.fixture
def chance() -> random.Random:
    """Chance whose seed is printed, and can be given: TEST_SEED=123 pytest ..."""
    seed = int(os.environ.get("TEST_SEED", time.time_ns() % 10**6))
    print(f"TEST_SEED={seed}")
    return random.Random(seed)
