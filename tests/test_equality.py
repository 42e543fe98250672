"""The same training, to the bit, as by the projects of an older commit, which is the reference.

A change that is meant to change what is learnt takes its own commit as the reference.
"""

import functools
import json
import math
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import older
import pytest
import torch
from digest import SPEED
from PIL import Image
from running import NETS, ROOT, SCRIPTS, TASKS, Done, Project
from torch import Tensor

pytestmark = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="a copy without history, and so without older commits"
)
REFERENCE = "027e21f"
FORMAT = {"channels": 3, "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.25]}  # in data.json
CHANNELS = "--channels 3 --mean 0.5,0.4,0.3 --std 0.2,0.3,0.25"
# The reference's flags, and what today's projects are told instead.
SPELLED = {"--threads 1": "", CHANNELS: ""}
COMMON = "--image-size 32 --batch-size 4 --epochs 2 --workers 0 --threads 1 --weights none"
KERNELS = {"params", "part", "fused", "foreach", "capturable", "differentiable", "maximize"}


class Case(NamedTuple):
    words: str
    ranks: int = 2
    net: str = "tiny"
    tasks: tuple[str, ...] = TASKS


CLASSIFICATION, SEGMENTATION = (TASKS[0],), (TASKS[1],)
CASES = {
    "architecture": Case("", 1, "real"),
    "one rank": Case("--workers 1", 1),
    "two ranks": Case(""),
    "three ranks": Case("", 3),
    "accumulate": Case("--accumulate 2 --batch-size 2"),
    "ema": Case("--ema 0.99"),
    "weights of six": Case("--class-weights 1,2,0.5,1,3,0.25", tasks=CLASSIFICATION),
    "weights of two": Case("--class-weights 0.5,3", tasks=SEGMENTATION),
    "weights auto": Case("--class-weights auto"),
    "sgd": Case("--optimizer sgd --clip-grad-norm 0.1 --schedule poly"),
    "smoothing": Case("--label-smoothing 0.1", 1),
    "mixup": Case("--mixup 0.4 --class-weights auto", tasks=CLASSIFICATION),
    "cutmix": Case("--cutmix 1"),
    "step": Case("--schedule step"),
    "frozen": Case("--freeze-backbone 1 --backbone-lr 0.1 --schedule wsd"),
    "bf16": Case("--amp bf16", 1),
    "losses": Case("--loss focal+0.5*dice+0.3*lovasz", 1, tasks=SEGMENTATION),
    "augmented images": Case("--augment rand,color,erasing", 1, tasks=CLASSIFICATION),
    "augmented masks": Case("--augment color,rotation,vflip", 1, tasks=SEGMENTATION),
    "channels": Case(CHANNELS, 1),
}


class Sides:
    """A project of the reference and one of today, and what both make of the same data."""

    def __init__(self, reference: Project, today: Project, folder: Path) -> None:
        self.projects = {"reference": reference, "today": today}
        self.folder = folder
        self.data = reference.draw(folder / "data", 30, 9)
        thin_out(self.data)
        self.formatted = shutil.copytree(self.data, folder / "formatted")
        (self.formatted / "data.json").write_text(json.dumps(FORMAT))

    def run(self, side: str, name: str, case: Case, *more: object, stop: str = ":") -> Done:
        """Run or go on with `name` of one side; `stop` it as scripts/traced.py says."""
        out = self.folder / side / name
        words = f"{COMMON} {case.words}"
        for then, now in SPELLED.items() if side == "today" else ():
            words = words.replace(then, now)
        project = self.projects[side]
        nets = NETS[project.task] if case.net == "real" else ()
        out.mkdir(parents=True, exist_ok=True)
        data = self.formatted if CHANNELS in case.words else self.data
        flags = ["--data", data, "--output-dir", out, *nets, *words.split(), *more]
        order = [out / "steps", case.net, stop, *flags]
        return project.fork(*order, script=SCRIPTS / "traced.py", ranks=case.ranks, draws=False)

    @functools.cache  # noqa: B019  a few for a run of pytest
    def both(self, name: str, stop: str = ":") -> tuple[Path, Path]:
        """Run a case on both sides at once; return the folders."""
        case, status = CASES[name], -9 if stop.endswith("KILL") else 0
        more = ("--save-every", 1) if status else ()
        label = f"{name}, killed" if status else name

        def run(side: str) -> Path:
            done = self.run(side, label, case, *more, stop=stop)
            assert done.status == status, (side, done.out, done.err)
            return self.folder / side / label

        with ThreadPoolExecutor() as threads:
            first, second = threads.map(run, self.projects)
        return first, second


def thin_out(data: Path) -> None:
    """Leave classes of unequal size, and from none to all of a mask unlabelled."""
    for path in sorted(data.glob("train/dots/*"))[1:]:
        path.unlink()
    for n, path in enumerate(sorted(data.glob("*/masks/*"))):
        mask = np.array(Image.open(path))
        mask[: 11 * (n % 7)] = 255
        Image.fromarray(mask).save(path)


def flat(path: Path) -> dict[str, object]:
    """All that a checkpoint holds of the training, by name: tensors, and the text of the rest."""
    state = torch.load(path, weights_only=True)
    found: dict[str, object] = {
        f"{part} {name}": value
        for part in ("model", "trained")
        for name, value in state.get(part, {}).items()
    }
    groups = state["optimizer"]["param_groups"]
    # The reference has numbers in place of names, and those in an entry of its own.
    named = state["layout"]["optimizer"][1] if "layout" in state else [g["params"] for g in groups]
    names = [[name.removeprefix("trained.") for name in group] for group in named]
    for number, group in enumerate(groups):
        rate = state["scheduler"]["_last_lr"][number]
        settings = {key: value for key, value in group.items() if key not in KERNELS}
        for index, name in zip(group["params"], names[number], strict=True):
            values = {**settings, "_last_lr": rate, **state["optimizer"]["state"].get(index, {})}
            found |= {f"optimizer {name} {key}": value for key, value in values.items()}
    for row in state["history"]:
        measured = {key: value for key, value in row.items() if key not in SPEED}
        found |= {f"history {row['epoch']} {key}": value for key, value in measured.items()}
    for key in "epoch", "step", "seen", "totals", "best", "scaler":
        found[key] = state[key]
    return {key: v if isinstance(v, Tensor) else repr(v) for key, v in found.items()}


def differences(reference: Path, today: Path) -> list[str]:
    """What differs in the two last.pt, a line each."""
    then, now = (flat(folder / "last.pt") for folder in (reference, today))
    lines = [f"{key}: only in the reference" for key in then.keys() - now.keys()]
    lines += [f"{key}: only today" for key in now.keys() - then.keys()]
    for key in then.keys() & now.keys():
        old, new = then[key], now[key]
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            if old.dtype != new.dtype or old.shape != new.shape:
                lines.append(f"{key}: {old.dtype} {old.shape} then, {new.dtype} {new.shape} now")
            elif old.numpy().tobytes() != new.numpy().tobytes():
                most = (old.double() - new.double()).abs().max()
                lines.append(f"{key}: {int((old != new).sum())} of {old.numel()}, by {most:.1e}")
        elif type(old) is not type(new) or old != new:
            lines.append(f"{key}: {old} then, {new} now")
    return sorted(lines)


def by_step(path: Path) -> dict[str, str]:
    """The lines of scripts/traced.py; those of steps that were taken again are equal."""
    lines = (line.partition(":") for line in path.read_text().splitlines())
    return {step: line for step, _, line in lines}


def assert_equal(reference: Path, today: Path) -> None:
    lines = differences(reference, today)
    if not lines:
        return
    said = [f"{len(lines)} differences in last.pt, such as", *lines[:: math.ceil(len(lines) / 20)]]
    for path in sorted(reference.glob("steps.*")):
        then, now = (by_step(file) for file in (path, today / path.name))
        if first := next((step for step in then if then[step] != now.get(step)), None):
            said += [f"rank {path.suffix[1:]}, {first}:{then[first]} then,{now.get(first)} now"]
    pytest.fail("\n".join(said), pytrace=False)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The template as it was."""
    return older.unpack(REFERENCE, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="session")
def all_sides(
    reference: Path,
    projects: Callable[[str], Project],
    clean_home: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], Sides]]:
    @functools.cache
    def sides(task: str) -> Sides:
        project = older.generate(reference, tmp_path_factory.mktemp("older"), task, clean_home)
        made.append(project)
        return Sides(project, projects(task), tmp_path_factory.mktemp(task))

    made: list[Project] = []
    yield sides
    for each in made:
        each.close()


@pytest.fixture
def sides(project: Project, all_sides: Callable[[str], Sides]) -> Sides:
    return all_sides(project.task)


@pytest.mark.parametrize(
    ("project", "name"),
    [(task, name) for task in TASKS for name, case in CASES.items() if task in case.tasks],
    indirect=["project"],
)
def test_the_same_bits(sides: Sides, name: str) -> None:
    assert_equal(*sides.both(name))


def test_stopped_and_resumed(sides: Sides) -> None:
    """In mid-epoch: the checkpoint is the reference's, and so is the end."""
    reference, killed = sides.both("two ranks", "5:KILL")
    assert_equal(reference, killed)
    for name, stop, status in ("again", "2:TERM", 75), ("again", "5:KILL", -9), ("again", ":", 0):
        done = sides.run("today", name, CASES["two ranks"], "--save-every", 1, stop=stop)
        assert done.status == status, (done.out, done.err)
        if status < 0:
            assert_equal(reference, sides.folder / "today" / name)
    assert_equal(sides.both("two ranks")[0], sides.folder / "today" / "again")


def test_evaluated(sides: Sides) -> None:
    """--eval-only prints the same JSON."""
    name = "two ranks"
    sides.both(name)
    said = []
    for side in sides.projects:
        done = sides.run(side, name, CASES[name], "--eval-only").ok()
        said.append(json.loads(done.out.splitlines()[-1]))
    assert said[0] == said[1]
    assert math.isfinite(said[0]["val_loss"])
