"""`make demo`, and what it promises: a trained model, pictures, predictions."""

import csv
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from running import Project, rows, run

RUN = Path("runs/default")  # where a run leaves its files unless told otherwise
SMALL = "--epochs 1 --arch shufflenet_v2_x0_5 --image-size 32"
EPOCHS = {"classification": 3, "segmentation": 1}  # of the demo's own 5 and 2
PROMISED = {"classification": ("top1", 0.90), "segmentation": ("miou", 0.60)}  # with the own: 0.70


def make_demo(folder: Path, task: str, flags: str = "") -> str:
    # -o: the environment of these tests is set up already.
    command = ["make", "-o", "ready", "demo", f"TASK={task}", f"FLAGS={flags}"]
    done = run(command, cwd=folder, timeout=900, OMP_NUM_THREADS="").ok()
    assert done.err == ""
    return done.out


@pytest.fixture(scope="module", params=PROMISED)
def demo(
    request: pytest.FixtureRequest, template: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path, str]]:
    """The task, the project's folder and the output of `make demo` at a path with a space."""
    folder = tmp_path_factory.mktemp("demo") / "a space"
    shutil.copytree(template, folder, symlinks=True)
    (folder / ".venv").symlink_to(Path(sys.executable).parent.parent)
    out = make_demo(folder, request.param, f"--epochs {EPOCHS[request.param]}")
    yield request.param, folder / "demo" / request.param, out
    shutil.rmtree(folder)


def test_it_learns(demo: tuple[str, Path, str]) -> None:
    task, project, out = demo
    name, promised = PROMISED[task]
    assert float(rows(project / RUN)[-1][name]) >= promised
    assert "2 rank(s) on CPU" in out
    last = out[out.index("The project:") :]
    for path in re.findall(r"(demo/\S+)", last.replace(",", "")):
        assert (project.parent.parent / path).exists(), path
    pixels = np.asarray(Image.open(project / "runs" / "default" / "examples.png"))
    assert pixels.std() > 10


def test_predictions_are_as_good_as_the_run_says(demo: tuple[str, Path, str]) -> None:
    """Accuracy or IoU counted from the files that predict.py writes."""
    task, project, _ = demo
    name, _ = PROMISED[task]
    reported = max(float(row[name]) for row in rows(project / RUN))
    command = [sys.executable, "predict.py", "data/demo/val", "--output", "predictions"]
    if task == "classification":
        assert run(command, cwd=project).ok().err == ""
        with open(project / "predictions" / "predictions.csv", newline="") as file:
            found = list(csv.DictReader(file))
        right = [Path(row["file"]).parent.name == row["class"] for row in found]
        assert len(right) == len(list((project / "data/demo/val").glob("*/*.jpg")))
        assert np.mean(right) == pytest.approx(reported, abs=1e-6)
        return
    command[2] += "/images"
    assert run(command, cwd=project).ok().err == ""
    both, either = np.zeros(2), np.zeros(2)
    masks = sorted((project / "data/demo/val/masks").iterdir())
    for path in masks:
        truth = np.asarray(Image.open(path))
        guess = np.asarray(Image.open(project / "predictions/masks" / path.name))
        assert (project / "predictions/overlays" / path.name).exists()
        for label in range(2):
            hit, said = truth == label, (guess == label) & (truth != 255)
            both[label] += (hit & said).sum()
            either[label] += (hit | said).sum()
    assert len(masks) == len(list((project / "predictions/masks").iterdir()))
    assert np.mean(both / either) == pytest.approx(reported, abs=1e-3)


@pytest.mark.parametrize(
    "words",
    ["main.py --eval-only", "main.py --help", "-m ddpkit export", "-m ddpkit check data/demo"],
)
def test_nothing_but_the_project_speaks(demo: tuple[str, Path, str], words: str) -> None:
    """As in the runs above: torch and other libraries leave no line on stderr."""
    _, project, _ = demo
    done = run([sys.executable, *words.split()], cwd=project).ok()
    assert done.out
    assert done.err == ""


def test_a_model_that_does_not_learn_fails(project: Project, tmp_path: Path) -> None:
    name, promised = PROMISED[project.task]
    data = project.draw(tmp_path / "set", 16, 60)
    size = ["--image-size", 64, "--batch-size", 8, "--epochs", 1, "--lr", 0, "--weights", "none"]
    flags = [*size, "--data", data, "--output-dir", tmp_path / "out"]
    project.fork(*flags, draws=False).ok()
    assert float(rows(tmp_path / "out")[0][name]) < promised - 0.2


@pytest.mark.parametrize("demo", ["classification"], indirect=True)
def test_twice_in_a_row(demo: tuple[str, Path, str]) -> None:
    """The same commands for both tasks, so the quicker one will do."""
    task, project, _ = demo
    drawn = (project / "data" / "demo").stat().st_mtime_ns
    assert "--resume never: removing" in make_demo(project.parent.parent, task, SMALL)
    assert [row["epoch"] for row in rows(project / RUN)] == ["1"]
    assert (project / "data" / "demo").stat().st_mtime_ns == drawn
