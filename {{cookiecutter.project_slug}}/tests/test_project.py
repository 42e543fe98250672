"""Short real runs on a handful of demo images, on the CPU. Keep them passing as you edit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ddp
import ddpkit
import main
import predict
import recipe
import stalls
from dataset import AUGMENTATIONS, build_datasets, draw_demo
from flags import parse_args

ROOT = Path(__file__).resolve().parent.parent
SMALL = [
    "--image-size",
    "64",
    "--batch-size",
    "4",
    "--epochs",
    "2",
    "--weights",
    "none",
]
FLAGS = [*SMALL, "--amp", "off", "--data"]
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of this process and of those that it starts


def is_debugged() -> bool:
    return "pydevd" in sys.modules


def launch(ranks: int, *flags: object) -> str:
    command: list[object] = [ROOT / "launch.sh", "--workers", 1]
    # The debugger does not follow bash, and Windows has none; there is no time-out at a
    # breakpoint.
    if is_debugged() or os.name == "nt":
        command = [sys.executable, "-m", "ddpkit.launch"]
    env = {**os.environ, "NPROC": str(ranks), "PYTHON": sys.executable}
    words = [str(word) for word in (*command, *flags)]
    seconds = None if is_debugged() else 300
    done = subprocess.run(
        words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=seconds
    )
    # Stop, of a rank that this test has started, is meant for the session.
    if is_debugged() and done.returncode in (-9, 130):
        pytest.exit("stopped in the debugger")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """37 images fill no batch evenly; of 9 one of two ranks gets two batches, the other one."""
    return draw_demo(tmp_path_factory.mktemp("data") / "demo", train=37, val=9)


@pytest.fixture(scope="session")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run on two ranks; last-1.pt is of the middle of its last epoch."""
    folder = tmp_path_factory.mktemp("run")
    launch(2, *FLAGS, data, "--output-dir", folder, "--save-every", 3)
    assert (folder / "examples.png").stat().st_size > 0
    return folder


def test_a_resumed_run_ends_with_the_same_bits(
    run: Path, data: Path, tmp_path: Path
) -> None:
    out = launch(
        2, *FLAGS, data, "--output-dir", tmp_path, "--resume", run / "last-1.pt"
    )
    assert "steps of the next" in out
    paths = run / "last.pt", tmp_path / "last.pt"
    states = [torch.load(path, weights_only=True) for path in paths]
    whole, resumed = (state["model"] for state in states)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    rows = [state["history"][-1] for state in states]
    for row in rows:
        for name in "img_per_s", "train_seconds", "data_wait":
            del row[name]
    assert rows[0] == rows[1], "what the loop counts itself starts over: run.numbers"


def test_loader_workers_change_no_sample(data: Path) -> None:
    """Augmentation that keeps a generator of its own from sample to sample fails here."""
    batches = []
    args = parse_args([*FLAGS, str(data), "--augment", ",".join(AUGMENTATIONS)])
    ddp.setup(0, args)
    train_set, _, classes = build_datasets(args)
    for workers in (0, 2):
        loader = ddpkit.train_loader(train_set, 4, classes=classes, workers=workers)
        batches.append(list(loader))
    torch.distributed.destroy_process_group()
    parts, others = ([part for batch in each for part in batch] for each in batches)
    assert all(map(torch.equal, parts, others)), (
        "make generators in __getitem__: AGENTS.md"
    )


def test_metrics_are_the_same_on_any_number_of_ranks(run: Path, data: Path) -> None:
    flags = ["--data", data, "--output-dir", run, "--eval-only", "--json"]
    one, three = (
        json.loads(launch(ranks, *flags).splitlines()[-1]) for ranks in (1, 3)
    )
    assert one == pytest.approx(three)


def test_predict_needs_the_checkpoint_alone(
    run: Path, data: Path, tmp_path: Path
) -> None:
    predict.main(
        [f"{data}/val", "--output", f"{tmp_path}/out", "--checkpoint", f"{run}/best.pt"]
    )
    assert any(path.is_file() for path in (tmp_path / "out").rglob("*"))


def test_a_step_reads_nothing_off_the_device(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for loss.item() or print(loss) in each step; now and then does no harm."""
    # AdamW reads its count of steps, which lies on the CPU on GPUs, too
    sgd = torch.optim.SGD
    monkeypatch.setattr(
        recipe, "build_optimizer", lambda net, _: sgd(net.parameters(), 0.1)
    )
    # a worker, because what reads images may read values: they lie on the CPU
    flags = [*FLAGS, str(data), "--output-dir", str(tmp_path), "--workers", "1"]
    fault = stalls.find(main, flags)
    if fault:
        pytest.fail(fault)
