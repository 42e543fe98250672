"""Short real runs on a handful of demo pictures, on the CPU. Keep them passing as you edit."""

import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
import torch

import demo_set
import main
import model
import predict
import recipe
from dataset import AUGMENTATIONS, build_dataset
from engine.data import loading
from engine.ranks import distributed, gradients
from engine.ranks.process import is_debugged
from engine.run import machine
from engine.run.metrics import Totals

ROOT = Path(__file__).resolve().parent.parent
# 37 images fill no batch evenly; of 9 one of two ranks gets two batches, the other one.
TRAIN, VAL, EPOCHS = 37, 9, 2
SECONDS = None if is_debugged() else 300  # none at a breakpoint
FLAGS = ["--image-size", "64", "--batch-size", "4", "--workers", "1", "--weights", "none"]
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of this process and of those that it starts


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "demo"
    demo_set.draw(folder, train=TRAIN, val=VAL)
    return folder


def start(ranks: int, *flags: object) -> subprocess.Popen:
    command: list[object] = [ROOT / "launch.sh", *FLAGS, *flags]
    if is_debugged():  # the debugger does not follow bash
        launcher = [sys.executable, ROOT / "engine" / "ranks" / "launcher.py", ROOT / "main.py"]
        command = [*launcher, *FLAGS, *flags, "--workers", 0]
    return subprocess.Popen(
        [str(word) for word in command],
        env={**os.environ, "NPROC": str(ranks), "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def launch(ranks: int, *flags: object) -> str:
    process = start(ranks, *flags)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    return out


def run_here(*flags: object) -> None:
    """Run main.py on one rank in this process, whose imports are done."""
    main.main([*FLAGS, "--workers", "0", *map(str, flags)])


@pytest.fixture(scope="session")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run on two ranks."""
    folder = tmp_path_factory.mktemp("run")
    launch(2, "--data", data, "--output-dir", folder, "--epochs", EPOCHS)
    return folder


def test_output(run: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = torch.load(run / "last.pt", weights_only=True)
    assert state["epoch"] == EPOCHS
    assert state["step"] == EPOCHS * (TRAIN // 2 // 4)
    for name in ("best.pt", "args.json", "curves.png", "examples.png"):
        assert (run / name).stat().st_size > 0
    written = (run / "last.pt").stat().st_mtime_ns
    run_here("--data", data, "--output-dir", run, "--epochs", EPOCHS)
    assert "nothing left to do" in capsys.readouterr().out
    assert (run / "last.pt").stat().st_mtime_ns == written


@pytest.mark.skipif(is_debugged(), reason="with a debugger a signal ends the run, unsaved")
def test_a_stopped_run_ends_as_if_it_had_gone_on(run: Path, data: Path, tmp_path: Path) -> None:
    """Stopped in mid-epoch and started again: the same weights and metrics, to the bit."""
    flags = ["--data", data, "--output-dir", tmp_path, "--epochs", EPOCHS]
    process = start(2, *flags, "--save-every", 1)
    while process.poll() is None and not (tmp_path / "last.pt").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 75, err
    assert "steps of the next" in launch(2, *flags)
    whole, stopped = (
        torch.load(folder / "last.pt", weights_only=True) for folder in (run, tmp_path)
    )
    assert all(torch.equal(whole["model"][name], stopped["model"][name]) for name in whole["model"])
    for row, other in zip(whole["history"], stopped["history"], strict=True):
        different = {name for name in row if row[name] != other[name]}
        assert different <= {"img_per_s", "train_seconds", "data_wait", "peak_memory"}


def test_loader_workers_change_no_sample(data: Path) -> None:
    """Augmentation that keeps a generator of its own from sample to sample fails here."""
    distributed.setup()
    batches = []
    for workers in (0, 2):
        args = main.parse_args(["--data", str(data), *FLAGS, "--workers", str(workers)])
        train_set, _, classes = build_dataset(args.data, args.image_size, augment=[*AUGMENTATIONS])
        options = loading.Options(workers, args.prefetch, pin_memory=False, seed=args.seed)
        loader = loading.build_train_loader(
            train_set, len(classes), args.batch_size, args.accumulate, options
        )
        batches.append(list(loader))
    distributed.teardown()
    for parts, others in zip(*batches, strict=True):
        for part, other in zip(parts, others, strict=True):
            assert torch.equal(part, other), "make generators in __getitem__: README.md says how"


def refuse_to_print(*_: object) -> NoReturn:
    """Stand in for what shows a tensor, which would read its values if it had some."""
    raise RuntimeError("a tensor is printed")


def test_a_step_reads_nothing_off_the_device(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of device "meta" have no values: loss.item() and print(loss) fail here."""
    device = torch.device("meta")
    distributed.setup()
    args = main.parse_args(["--data", str(data), *FLAGS])
    train_set, _, classes = build_dataset(args.data, args.image_size)
    settings = machine.Settings(0, 1, False, "off")
    loader = loading.build_train_loader(
        train_set, len(classes), args.batch_size, 1, loading.Options(0, 2, False, args.seed)
    )
    net = model.build_model(args, classes).to(device)
    criterion, metrics = model.build_criterion(args), model.build_metrics(classes)
    task = main.Task(args, settings, device, classes, net, criterion, metrics)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    parts: dict[str, Any] = {
        **{"model": net, "ddp_model": net, "optimizer": optimizer},
        "scheduler": recipe.build_scheduler(optimizer, args, 9),
        "scaler": torch.amp.GradScaler("cpu", enabled=False),
        "mean": gradients.Mean(device),
    }
    run = Mock(epoch=0, passes=0, totals=Totals(device))
    run.is_due.return_value = False
    report = Mock(progress=lambda loader, epoch: itertools.islice(loader, 2))
    try:
        with monkeypatch.context() as patch:
            for name in ("__repr__", "__format__"):
                patch.setattr(torch.Tensor, name, refuse_to_print)
            main.train_one_epoch(task, main.Stepper(**parts), loader, report, run)
    except RuntimeError as error:
        lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.line]
        own = [frame for frame in lines if Path(frame.filename).parent == ROOT][-1]
        pytest.fail(
            f"{Path(own.filename).name}:{own.lineno}: {own.line}\nreads a value off the device in "
            f"each step, or has a size that depends on one: the device waits ({error})"
        )
    finally:
        distributed.teardown()
    assert run.end_step.call_count == 2


def test_metrics_are_the_same_on_any_number_of_ranks(
    run: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data", data, "--output-dir", run, "--eval-only"]
    run_here(*flags)
    outputs = capsys.readouterr().out, launch(3, *flags)
    one, three = (json.loads(out.splitlines()[-1]) for out in outputs)
    row = torch.load(run / "best.pt", weights_only=True)["history"][-1]  # of two ranks
    two = {name: row[name] if math.isfinite(row[name]) else None for name in one}
    assert model.BEST in one
    assert one == pytest.approx(two)
    assert one == pytest.approx(three)


def test_predict_needs_the_checkpoint_alone(run: Path, data: Path, tmp_path: Path) -> None:
    checkpoint, output = shutil.copy(run / "best.pt", tmp_path), tmp_path / "predictions"
    words = [data / "val", "--output", output, "--checkpoint", checkpoint]
    predict.main([*map(str, words)])
    assert any(path.is_file() for path in output.rglob("*"))
