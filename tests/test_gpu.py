"""The project on GPUs that are not there; gpus.py says what of them is real."""

import json
import os
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from running import NETS, SCRIPTS, Project, finish, processes, start, wait_for

FLAGS = (
    *("--image-size", 32, "--batch-size", 2, "--workers", 0, "--weights", "none"),
    *("--epochs", 1),
)
FP16 = ("--amp", "fp16")
CLIPPED = ("--accumulate", 2, "--clip-grad-norm", 1, "--epochs", 2)


@pytest.fixture
def gpu_project(on_gpus: Callable) -> Project:
    return on_gpus("classification")


@pytest.fixture
def flags(gpu_project: Project, tmp_path: Path) -> list[object]:
    data = gpu_project.draw(tmp_path / "set", 38, 11)
    return [*FLAGS, *NETS["classification"], "--data", data, "--output-dir", tmp_path / "run"]


def last(folder: Path) -> dict:
    return torch.load(folder / "last.pt", weights_only=True)


@pytest.mark.parametrize(
    ("task", "recipe"),
    [
        ("classification", ()),
        ("segmentation", (*FP16, "--optimizer", "sgd", "--clip-grad-norm", 1)),
        ("classification", (*FP16, "--ema", 0.9)),
    ],
)
def test_no_step_and_no_batch_waits_for_the_gpu(
    task: str, recipe: tuple, on_gpus: Callable, tmp_path: Path
) -> None:
    """Two copies a step, three a batch, of pinned memory. DDP waits in its first 10 steps only."""
    project = on_gpus(task)
    data = project.draw(tmp_path / "set", 26, 8)
    given = [*FLAGS, *NETS[task], *recipe, "--data", data, "--output-dir", tmp_path / "run"]
    out = project.alone(*given, script=SCRIPTS / "gpu_steps.py", draws=False).ok().out
    found = json.loads(out.splitlines()[-1])
    assert found["kernels"] == 0
    assert len(found["steps"]) == 2
    waits = found["batches"].pop("stream_waits")  # in torchmetrics' confusion matrix
    # A collective waits or not, as fast as it is; there are a few in each evaluation.
    assert round(waits / 40) == {"classification": 1, "segmentation": 3}[task]
    for asked, copies in *((step, 2) for step in found["steps"]), (found["batches"], 3 * 40):
        assert asked.pop("h2d") == copies, found
        assert asked.keys() <= {"h2d_bytes", "collectives"}, found


def test_stopped_and_resumed_on_three_gpus(
    gpu_project: Project, gpus: Callable, flags: list, tmp_path: Path
) -> None:
    """A run that SIGTERM stops in mid-epoch ends with the bits of one that nothing stopped."""
    flags += CLIPPED
    gpu_project.fork(*flags, "--output-dir", tmp_path / "whole", ranks=3, draws=False).ok()
    mark = uuid.uuid4().hex
    command = [gpu_project.folder / "launch.sh", *flags, "--save-every", 1]
    process = start(command, mark, **{**gpus(3), "NPROC": None})
    wait_for((tmp_path / "run" / "last.pt").exists, process)
    process.send_signal(signal.SIGTERM)
    done = finish(process, mark)
    assert (done.status, done.left) == (75, []), done.err
    assert "3 rank(s) on Fake GPU 0" in done.out
    assert 0 < last(tmp_path / "run")["step"] < 6
    gpu_project.fork(*flags, ranks=3, draws=False).ok()
    whole, resumed = last(tmp_path / "whole"), last(tmp_path / "run")
    assert whole["step"] == resumed["step"] == 6
    for name, value in whole["model"].items():
        assert torch.equal(value, resumed["model"][name]), name


def test_evaluation_on_two_gpus_and_on_the_cpu(
    gpu_project: Project, projects: Callable, flags: list
) -> None:
    gpu_project.fork(*flags, ranks=2, draws=False).ok()
    there, here = (
        json.loads(
            project.fork(*flags, "--eval-only", *more, draws=False).ok().out.splitlines()[-1]
        )
        for project, more in ((gpu_project, ["--amp", "off"]), (projects(gpu_project.task), []))
    )
    assert there == pytest.approx(here, rel=1e-5)


def test_more_ranks_than_gpus(gpu_project: Project, flags: list) -> None:
    gpu_project.fork(*flags, ranks=4).refused("4 ranks", "3 GPU(s)")


def test_a_broken_image(gpu_project: Project, flags: list, tmp_path: Path) -> None:
    image = sorted((tmp_path / "set" / "train").rglob("*.*"))[8]
    image.write_bytes(b"no image")
    gpu_project.fork(*flags, ranks=2).refused(image.name)


def test_a_killed_rank(gpu_project: Project, gpus: Callable, flags: list, tmp_path: Path) -> None:
    """The other one waits in nccl for it, and is ended all the same."""
    mark = uuid.uuid4().hex
    command = [gpu_project.folder / "launch.sh", *flags, "--epochs", 99, "--save-every", 1]
    process = start(command, mark, **gpus(2))
    wait_for((tmp_path / "run" / "last.pt").exists, process)
    victim = next(pid for pid, rank in processes(mark) if rank == 1)
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    done = finish(process, mark)
    line = done.err.splitlines()[-1]
    assert line.startswith("error: rank 1 (process ") and "was ended by SIGKILL" in line
    assert done.status not in (0, 75)
    assert not done.left
    assert time.monotonic() - began < 30


def test_a_collective_on_one_rank(gpu_project: Project, flags: list) -> None:
    """nccl's ranks hang: one block says where; then its watchdog ends them."""
    text = (gpu_project.folder / "main.py").read_text()
    text = f"import os; os.environ['TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC'] = '100'\n{text}"
    old = "            run.end_step()"
    new = "            if rank == 0 and run.step == 2:\n"
    new += "                distributed.reduce_tensor(run.totals)\n"
    assert text.count(old) == 1
    script = gpu_project.folder / f"runs/planted_{uuid.uuid4().hex}.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(text.replace(old, new + old))
    line = text[: text.index(old)].count("\n") + 2
    done = gpu_project.fork(*flags, "--dist-timeout", 5, script=script)
    script.unlink()
    assert f"rank 0, epoch 1, step 2, at runs/{script.name}:{line}: in collective " in done.err
    assert done.status == -signal.SIGABRT
    assert not done.left
