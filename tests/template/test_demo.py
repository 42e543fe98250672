"""`make demo`, and what it promises: a trained model, images, predictions."""

import csv
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from generated import ROOT, Project, both_but_one_in_soak, rows, run
from PIL import Image

RUN = Path("runs/default")  # where a run leaves its files unless told otherwise
# In place of the demo's 5 and 2 epochs of larger networks; by chance it would have 0.17
# and 0.49.
SHORT = "--epochs 1 --batch-size 8 --arch"
FLAGS = {
    "classification": f"{SHORT} timm/resnet10t",
    "segmentation": f"{SHORT} linknet --encoder tu-resnet10t",
}
PROMISED = {"classification": ("top1", 0.55), "segmentation": ("miou", 0.6)}


@pytest.mark.parametrize("task", both_but_one_in_soak)
def test_it_learns_and_predicts(template: Path, tmp_path: Path, task: str) -> None:
    """predict.py is as good as the run says; nothing but the project speaks on stderr."""
    name, promised = PROMISED[task]
    folder = shutil.copytree(template, tmp_path / f"a demo of {task}", symlinks=True)
    (folder / ".venv").symlink_to(Path(sys.executable).parent.parent)
    # -o: the environment of these tests is set up already.
    command = ["make", "-o", "ready", "demo", f"TASK={task}", f"FLAGS={FLAGS[task]}"]
    done = run(command, folder, OMP_NUM_THREADS="").ok()
    project = folder / "demo" / task
    table = rows(project / RUN)
    assert done.err == ""
    assert float(table[-1][name]) >= promised
    assert "2 rank(s) on CPU" in done.out
    last = done.out[done.out.index("The project:") :]
    named = re.findall(r"(demo/\S+)", last.replace(",", ""))
    assert len(named) >= 3
    for path in named:
        assert (folder / path).exists(), path
    assert np.asarray(Image.open(project / RUN / "examples.png")).std() > 10

    val = project / "data/demo/val"
    found = project / "predictions"
    images = val if task == "classification" else val / "images"
    library = project / "ddpkit"
    shutil.rmtree(library)
    library.symlink_to(ROOT / "ddpkit")  # which forks of this process have imported
    words = [images, "--output", found]
    done = Project(project, task).run(words, script="predict.py", on=1).ok()
    assert done.out
    assert done.err == ""
    count = accuracy if task == "classification" else miou
    best = max(float(row[name]) for row in table)
    assert count(val, found) == pytest.approx(best, abs=1e-3)


def accuracy(val: Path, found: Path) -> float:
    with open(found / "predictions.csv", newline="") as file:
        right = [
            Path(row["file"]).parent.name == row["class"]
            for row in csv.DictReader(file)
        ]
    assert len(right) == len(list(val.glob("*/*.jpg")))
    return np.mean(right)


def miou(val: Path, found: Path) -> float:
    both = np.zeros(2)
    either = np.zeros(2)
    names = sorted(path.name for path in (val / "masks").iterdir())
    for folder in "masks", "overlays":
        assert names == sorted(path.name for path in (found / folder).iterdir())
    for name in names:
        truth = np.asarray(Image.open(val / "masks" / name))
        guess = np.asarray(Image.open(found / "masks" / name))
        for label in range(2):
            hit = truth == label
            said = (guess == label) & (truth != 255)
            both[label] += (hit & said).sum()
            either[label] += (hit | said).sum()
    return np.mean(both / either)
