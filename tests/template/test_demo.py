"""`make demo`, and what it promises: a trained model, images, predictions."""

import csv
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import once
from generated import Project, both_tasks, rows, run
from PIL import Image

RUN = Path("runs/default")  # where a run leaves its files unless told otherwise
SMALL = "--epochs 1 --arch shufflenet_v2_x0_5 --image-size 32"
EPOCHS = {"classification": 3, "segmentation": 1}  # of the demo's own 5 and 2
PROMISED = {"classification": ("top1", 0.90), "segmentation": ("miou", 0.60)}  # with the own: 0.70


def make_demo(folder: Path, task: str, flags: str) -> str:
    # -o: the environment of these tests is set up already.
    command = ["make", "-o", "ready", "demo", f"TASK={task}", f"FLAGS={flags}"]
    done = run(command, folder, OMP_NUM_THREADS="").ok()
    assert done.err == ""
    return done.out


GROUPS = [pytest.param(task, marks=pytest.mark.xdist_group(f"demo of {task}")) for task in PROMISED]


@pytest.fixture(scope="module", params=GROUPS)
def demo(request: pytest.FixtureRequest, template: Path, shared: Path) -> tuple[str, Path, str]:
    """The task, the project's folder and the output of `make demo` at a path with a space."""
    task, folder = request.param, shared / f"a demo of {request.param}"
    with once(folder) as is_first:
        if is_first:
            shutil.copytree(template, folder, symlinks=True)
            (folder / ".venv").symlink_to(Path(sys.executable).parent.parent)
            out = make_demo(folder, task, f"--epochs {EPOCHS[task]}")
            (folder / "out.txt").write_text(out)
    return task, folder / "demo" / task, (folder / "out.txt").read_text()


def test_it_learns_and_predicts(demo: tuple[str, Path, str]) -> None:
    """predict.py is as good as the run says; nothing but the project speaks on stderr."""
    task, project, out = demo
    name, promised = PROMISED[task]
    table = rows(project / RUN)
    assert float(table[-1][name]) >= promised
    assert "2 rank(s) on CPU" in out
    last = out[out.index("The project:") :]
    for path in re.findall(r"(demo/\S+)", last.replace(",", "")):
        assert (project.parent.parent / path).exists(), path
    assert np.asarray(Image.open(project / RUN / "examples.png")).std() > 10

    val, found = project / "data/demo/val", project / "predictions"
    folder = val if task == "classification" else val / "images"
    for words in ["predict.py", folder, "--output", found], ["-m", "ddpkit", "export"]:
        done = run([sys.executable, *words], project).ok()
        assert done.out and done.err == ""
    count = accuracy if task == "classification" else miou
    assert count(val, found) == pytest.approx(max(float(row[name]) for row in table), abs=1e-3)


def accuracy(val: Path, found: Path) -> float:
    with open(found / "predictions.csv", newline="") as file:
        right = [Path(row["file"]).parent.name == row["class"] for row in csv.DictReader(file)]
    assert len(right) == len(list(val.glob("*/*.jpg")))
    return np.mean(right)


def miou(val: Path, found: Path) -> float:
    both, either = np.zeros(2), np.zeros(2)
    names = sorted(path.name for path in (val / "masks").iterdir())
    for folder in "masks", "overlays":
        assert names == sorted(path.name for path in (found / folder).iterdir())
    for name in names:
        truth, guess = (np.asarray(Image.open(at / "masks" / name)) for at in (val, found))
        for label in range(2):
            hit, said = truth == label, (guess == label) & (truth != 255)
            both[label] += (hit & said).sum()
            either[label] += (hit | said).sum()
    return np.mean(both / either)


@pytest.mark.xdist_group("demo of classification")
@pytest.mark.parametrize("demo", ["classification"], indirect=True)
def test_twice_in_a_row(demo: tuple[str, Path, str]) -> None:
    """The last test of the folder: it overwrites the run."""
    task, project, _ = demo
    drawn = (project / "data" / "demo").stat().st_mtime_ns
    assert "--resume never: removing" in make_demo(project.parent.parent, task, SMALL)
    assert [row["epoch"] for row in rows(project / RUN)] == ["1"]
    assert (project / "data" / "demo").stat().st_mtime_ns == drawn


@both_tasks
def test_a_model_that_does_not_learn_fails(project: Project, tmp_path: Path) -> None:
    name, promised = PROMISED[project.task]
    data = project.draw(tmp_path / "set", 16, 60)
    project.train(data, tmp_path / "out", "--batch-size", 8, "--lr", 0).ok()
    assert float(rows(tmp_path / "out")[0][name]) < promised - 0.2
