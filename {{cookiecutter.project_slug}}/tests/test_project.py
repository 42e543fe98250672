"""Short real runs on a handful of demo pictures, on the CPU. Keep them passing as you edit."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import demo_set
import model

ROOT = Path(__file__).resolve().parent.parent
# 37 pictures fill no batch evenly, 11 come out evenly on no number of ranks.
TRAIN, VAL = 37, 11
FLAGS = ["--image-size", "64", "--batch-size", "4", "--workers", "1"]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "demo"
    demo_set.draw(folder, train=TRAIN, val=VAL)
    return folder


def launch(ranks: int, *flags: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [ROOT / "launch.sh", *FLAGS, *map(str, flags)],
        env={
            **os.environ,
            "NPROC": str(ranks),
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHON": sys.executable,
        },
        capture_output=True,
        text=True,
        timeout=300,
    )


def epochs(folder: Path) -> list[str]:
    with open(folder / "metrics.csv", newline="") as file:
        return [row["epoch"] for row in csv.DictReader(file)]


@pytest.fixture(scope="session")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run that was resumed after its first epoch, on two ranks."""
    folder = tmp_path_factory.mktemp("run")
    first = launch(2, "--data", data, "--output-dir", folder, "--epochs", 1)
    assert first.returncode == 0, first.stderr
    second = launch(2, "--data", data, "--output-dir", folder, "--epochs", 2)
    assert second.returncode == 0, second.stderr
    assert "1 of 2 epochs done" in second.stdout
    return folder


def test_resumed_run_is_whole(run: Path, data: Path) -> None:
    assert epochs(run) == ["1", "2"]
    state = torch.load(run / "last.pt", weights_only=True)
    assert state["epoch"] == 2
    assert state["step"] == 2 * (TRAIN // 2 // 4)
    for name in ("best.pt", "args.json", "curves.png", "examples.png"):
        assert (run / name).stat().st_size > 0
    written = (run / "last.pt").stat().st_mtime_ns
    again = launch(2, "--data", data, "--output-dir", run, "--epochs", 2)
    assert again.returncode == 0, again.stderr
    assert "nothing left to do" in again.stdout
    assert (run / "last.pt").stat().st_mtime_ns == written


def test_metrics_are_the_same_on_any_number_of_ranks(run: Path, data: Path) -> None:
    results = []
    for ranks in (1, 2, 3):
        done = launch(ranks, "--data", data, "--output-dir", run, "--eval-only")
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout.splitlines()[-1]))
    assert model.BEST in results[0]
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-12, nan_ok=True)


def test_predict_needs_the_checkpoint_alone(run: Path, data: Path, tmp_path: Path) -> None:
    checkpoint, output = run / "best.pt", tmp_path / "predictions"
    command = [sys.executable, ROOT / "predict.py", data / "val", "--output", output]
    subprocess.run([*map(str, command), "--checkpoint", checkpoint], check=True, timeout=300)
    assert any(path.is_file() for path in output.rglob("*"))
