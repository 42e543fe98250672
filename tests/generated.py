"""A generated project, and how tests run its scripts without leaving a process behind."""

import contextlib
import csv
import inspect
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
from ranks import Patch, draw_nothing

from ddpkit.errors import LineError
from ddpkit.ranks.protocol import KILL

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE_FOLDER = "{{cookiecutter.project_slug}}"
TASKS = ("classification", "segmentation")
both_tasks = pytest.mark.parametrize("project", TASKS, indirect=True)


def in_soak(*values: object, **how: object) -> object:
    """A parameter of a test that `make soak` runs, and `make test` does not."""
    return pytest.param(*values, marks=pytest.mark.soak, **how)


def type_in_shell(lines: str, folder: Path) -> None:
    """Run lines of bash in a folder, where `python` is this one; fails if one of them does."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path}
    subprocess.run(["bash", "-e", "-c", lines], cwd=folder, check=True, env=env)


both_but_one_in_soak = [TASKS[0], in_soak(TASKS[1])]
# Small images and networks, and little time in processes. make demo and the projects'
# own tests keep to the default ones.
NETS = {
    "classification": ["--arch", "shufflenet_v2_x0_5"],
    "segmentation": ["--arch", "linknet", "--encoder", "tu-mobilenetv2_035"],
}
SHORT = ["--image-size", "64", "--batch-size", "4", "--workers", "0"]
SHORT += ["--epochs", "1", "--weights", "none"]
SMALL = {task: SHORT + network for task, network in NETS.items()}
# With BatchNorm, dropout, loader workers and a schedule: whatever can go astray.
NET = ["--arch", "mobilenet_v3_small", "--image-size", 32]
NET += ["--workers", 1, "--batch-size", 4]

LEAN = str(ROOT / "tests/lean")  # of a new Python, which then imports less

LIVE: set[int] = set()  # Commands, ranks and servers that have not been waited for


class Done:
    """What has become of a command, or of forks that were ranks."""

    def __init__(
        self,
        statuses: list[int],
        out: str,
        err: str,
        left: list[int],
    ) -> None:
        self.statuses = statuses  # of each rank, or of the command
        self.status = max(statuses, key=abs)
        self.out = out
        self.err = err
        self.left = left  # processes that outlived it

    def ok(self) -> "Done":
        assert self.status == 0, f"statuses {self.statuses}\n{self.out}\n{self.err}"
        assert not self.left
        return self

    def refused(self, code: str, *words: object) -> "Done":
        """One line of complaint with this code and all `words`, status 2, nobody left.

        Some words may be in lists. Of several ranks at least one has status 2, and none has 0.
        """
        said = (self.statuses, self.out, self.err)
        assert 2 in self.statuses, said
        assert 0 not in self.statuses, said
        return self.failed(code, words)

    def failed(self, code: str, *words: object) -> "Done":
        """As `refused`, with whatever status; code: "" for what is no mistake of the user's."""
        assert self.status, self.out
        assert len(self.err.splitlines()) == 1, self.err
        assert self.err.startswith("error: "), self.err
        assert not code or self.err.endswith(f" [{code}]\n"), self.err
        for word in texts(words):
            assert word in self.err, self.err
        assert not self.left
        return self


class Ranks:
    """Forks that run a script; `Project.start` makes them."""

    def __init__(self, pids: list[int], folder: tempfile.TemporaryDirectory) -> None:
        self.pids = pids
        self.folder = folder
        LIVE.update(pids)

    def kill(self, signum: int, *which: int) -> None:
        """Send a signal to these ranks, or to all."""
        for rank in which or range(len(self.pids)):
            os.kill(self.pids[rank], signum)

    def said(self) -> tuple[str, str]:
        """What they have printed so far, on stdout and on stderr."""
        return ranks.said(Path(self.folder.name, "said"))

    def end(self, seconds: float = 120) -> Done:
        """Wait for all, which end within `seconds`; else they are killed, and the test fails."""
        began = time.monotonic()
        statuses = ranks.wait(self.pids, seconds)
        out, err = self.said()
        self.folder.cleanup()
        LIVE.difference_update(self.pids)
        assert time.monotonic() - began < seconds, (out, err)
        return Done(statuses, out, err, left())


class Command:
    """A command in a process of its own, and what it has started."""

    def __init__(
        self, command: list, cwd: Path | None = None, **env: str | None
    ) -> None:
        env = {"PYTHONPATH": LEAN, **os.environ, "PYTHON": sys.executable, **env}
        self.process = subprocess.Popen(
            texts(command),
            cwd=cwd,
            env={name: value for name, value in env.items() if value is not None},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        LIVE.add(self.process.pid)

    def ranks(self) -> dict[int, int]:
        """The process ids of this test's ranks that a launcher has started, by rank."""
        there = children()
        found: dict[int, int] = {}
        for pid in there:
            with contextlib.suppress(OSError, StopIteration):
                entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                rank = next(entry for entry in entries if entry.startswith(b"RANK="))
                found[pid] = int(rank.removeprefix(b"RANK="))
        # Loader workers have their rank's environment, too.
        return {rank: pid for pid, rank in found.items() if there[pid] not in found}

    def kill(self, signum: int, *which: int) -> None:
        """Send a signal to these ranks, or else to the command itself."""
        for pid in [self.ranks()[rank] for rank in which] or [self.process.pid]:
            os.kill(pid, signum)

    def end(self, seconds: float = 300) -> Done:
        """Wait for it, give its descendants a moment, and end those that stay."""
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            said = (error.stdout or b"").decode() + (error.stderr or b"").decode()
            raise AssertionError(f"not ended after {seconds} s\n{said}") from None
        finally:
            LIVE.discard(self.process.pid)
        return Done([self.process.returncode], out, err, left())


class Project:
    """A generated project in a path with a space, and small data for it."""

    def __init__(self, folder: Path, task: str) -> None:
        self.folder = folder
        self.task = task

    def flags(self, data: Path, out: Path, *more: object) -> list[str]:
        """Flags for a short run of a small network."""
        return texts([SMALL[self.task], "--data", data, "--output-dir", out, more])

    def train(self, data: Path, out: Path, *more: object, **options: Any) -> Done:
        """A short run of main.py on two ranks; `options` are those of `start`."""
        return self.run(self.flags(data, out, more), **options)

    def run(self, *words: object, **options: Any) -> Done:
        return self.start(*words, **options).end()

    def start(
        self,
        *words: object,
        on: int = 2,
        script: str | Path = "main.py",
        patch: Patch | None = None,
        draws: bool = False,
    ) -> Ranks:
        """Start a script, or a command such as "ddpkit check", on so many forks of this process.

        words: what follows it, of which some may be in lists. patch: called in each before the
        script; it may import the project's modules and change them. draws: also make the images
        of what was learnt.
        """

        def before() -> None:
            if not draws:
                draw_nothing()
            if patch:
                patch()

        folder = tempfile.TemporaryDirectory()
        output = Path(folder.name, "said")
        command = texts(words)
        pids = ranks.start(on, str(script), command, output, self.folder, before)
        return Ranks(pids, folder)

    def here(self, act: Callable[[], object]) -> Done:
        """Call `act` in a fork that imports this project's modules, such as `dataset`."""
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, "said")
            statuses = ranks.wait([ranks.fork(act, output, self.folder)])
            out, err = ranks.said(output)
            return Done(statuses, out, err, left())

    def draw(self, folder: Path, train: int, val: int) -> Path:
        """Draw so many images of the demo set."""

        def act() -> None:
            import dataset

            dataset.draw_demo(folder, train, val)

        self.here(act).ok()
        return folder

    def launch(self, *words: object, **env: str | None) -> Command:
        """launch.sh with two ranks, in processes that import torch themselves."""
        return Command([self.folder / "launch.sh", words], **{"NPROC": "2", **env})

    def copy(self, folder: Path, *changes: tuple[str, str]) -> "Project":
        """A copy without what runs have left.

        Its main.py has, of each change, the second text where it had the first, once.
        """

        def ignore(path: str, names: list[str]) -> set[str]:
            made = {"__pycache__", ".pytest_cache"}
            if Path(path) == self.folder:
                made |= {"data", "runs"}
            return made & set(names)

        shutil.copytree(self.folder, folder, symlinks=True, ignore=ignore)
        copied = Project(folder, self.task)
        main = folder / "main.py"
        for old, new in changes:
            text = main.read_text()
            assert text.count(old) == 1, old
            main.write_text(text.replace(old, new))
        return copied

    def planted(self, folder: Path, code: str = "") -> "Project":
        """A copy that draws nothing, and runs `code` before each optimizer step."""
        step = "        grad_norm = None\n"
        recipe = "\nimport recipe\n"
        code = textwrap.indent(textwrap.dedent(code), " " * 8)
        return self.copy(folder, (step, code + step), (recipe, DRAWS_NOTHING + recipe))


# For a script, which does not import ranks.py
DRAWS_NOTHING = "\nfrom ddpkit.vision import mistakes, pictures, reporting\n"
DRAWS_NOTHING += f"\n{inspect.getsource(draw_nothing)}\ndraw_nothing()\n"


def texts(words: Iterable[object]) -> list[str]:
    """The words of a command as text; some may be in lists or tuples."""
    found = []
    for word in words:
        found += texts(word) if isinstance(word, list | tuple) else [str(word)]
    return found


def run(command: list, cwd: Path | None = None, **env: str | None) -> Done:
    """Run a command to its end."""
    return Command(command, cwd, **env).end()


def after_step(step: int, act: Patch, *which: int, before: bool = False) -> Patch:
    """A patch: these ranks, or all, call `act` after (or just before) the end of step `step`."""

    def patch() -> None:
        from ddpkit.run.loop import Run

        name = "end_step" if before else "_end_turn"
        end = getattr(Run, name)

        def patched(self: Run, *words: Any, **more: Any) -> None:
            is_here = not which or int(os.environ.get("RANK", 0)) in which
            if before and is_here and self.step + 1 == step:
                act()
            end(self, *words, **more)
            if not before and is_here and self.step == step:
                act()

        setattr(Run, name, patched)

    return patch


def die() -> None:
    """For `after_step`: an end without a word, as the kernel ends what has too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def refusal(code: str, *words: object) -> Iterator[pytest.ExceptionInfo[LineError]]:
    """What is in this block raises an error in one line, with this code and all `words`."""
    with pytest.raises(LineError) as caught:
        yield caught
    line = str(caught.value)
    assert line.endswith(f" [{code}]"), line
    assert "\n" not in line, line
    for word in texts(words):
        assert word in line, line


def rows(folder: Path) -> list[dict[str, str]]:
    """The rows of a run's metrics.csv."""
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def wait_for(condition: Callable[[], object], seconds: float = 120) -> None:
    """Wait until `condition()` is true; a run that ends without it makes the test fail at last."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def children(stop: set[int] = frozenset()) -> dict[int, int]:
    """The living processes below this one, each with its parent; not `stop`, nor what is below."""
    for _ in range(10):
        parents = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, parent = path.read_text().rsplit(")", 1)[1].split()[:2]
                if state != "Z":
                    parents[int(path.parent.name)] = int(parent)
        if parents.keys() >= set(parents.values()) - {0}:
            break  # else a parent ended meanwhile, whose children are another's now
    found: dict[int, int] = {}
    new = {os.getpid()}
    while new:
        below = {pid for pid, parent in parents.items() if parent in new}
        new = below - stop
        found.update((pid, parents[pid]) for pid in new)
    return found


def left(seconds: float = 10) -> list[int]:
    """Return who is left after `seconds` of what has ended, and end them."""
    deadline = time.monotonic() + seconds
    there = children(LIVE)
    while there and time.monotonic() < deadline:
        time.sleep(0.05)
        there = children(LIVE)
    kill(there, KILL)
    return list(there)


def kill(pids: Iterable[int], signum: int) -> None:
    """Send a signal to those that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
