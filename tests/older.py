"""The projects that this template generated at an older commit, to compare today's with."""

import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from running import ROOT, Project, start


class Older(Project):
    """A project of an older commit, whose own tests/forked.py runs it."""

    def __init__(self, folder: Path, task: str, tests: Path) -> None:
        super().__init__(folder, task)
        self.mark = uuid.uuid4().hex
        command = [sys.executable, tests / "forked.py"]
        self.server = start(command, self.mark, cwd=folder, stdin=subprocess.PIPE)


def unpack(commit: str, folder: Path) -> Path:
    """Return a new folder in `folder` with what the repository was at `commit`."""
    git = ["git", "-C", str(ROOT)]
    if subprocess.run(
        [*git, "cat-file", "-e", f"{commit}^{{commit}}"], stderr=subprocess.DEVNULL
    ).returncode:
        line = f"this clone does not reach back to commit {commit}: git fetch --unshallow"
        pytest.fail(line, pytrace=False)
    archive = folder / f"{commit}.zip"
    subprocess.run([*git, "archive", "--output", str(archive), commit], check=True)
    shutil.unpack_archive(archive, folder / commit)
    return folder / commit


def generate(template: Path, folder: Path, task: str, env: dict[str, str]) -> Older:
    """Generate a project of `template`, an unpacked commit."""
    words = ["--no-input", "-o", str(folder / task), str(template), f"task={task}"]
    command = [sys.executable, "-m", "cookiecutter", *words]
    subprocess.run(command, env=env, check=True, capture_output=True)
    return Older(folder / task / "my_ddp_project", task, template / "tests")
