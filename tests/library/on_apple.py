"""Tests that test_apple.py runs, on a machine with a made-up GPU of Apple's."""

import os
import signal
from pathlib import Path

import pytest
import torch
from generated import Project, after_step, both_but_one_in_soak, rows
from ranks import on_ranks

from ddpkit.data import samples
from ddpkit.ranks import devices

RECIPES = {
    "classification": ["--ema", "0.9", "--augment", "mixup"],
    "segmentation": ["--clip-grad-norm", "1", "--accumulate", "2"],
}
MORE = ["--epochs", 2, "--log-every", 1, "--workers", 1]
SPEED = ("train_seconds", "img_per_s", "data_wait", "peak_memory")


def on_cpu() -> None:
    """Compute on the CPU, as on the GPU: images are not channels last there."""
    import ddp

    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    devices.APPLE = "cpu"
    devices.backend = lambda _: "gloo"
    ddp.memory_layout = devices.memory_layout


def numbers(out: Path) -> list[dict[str, str]]:
    found = rows(out)
    for row in found:
        for name in SPEED:
            row.pop(name, None)
    return found


def assert_same(out: Path, other: Path) -> None:
    """The same weights and state of the optimizer, and numbers, to the bit."""
    assert numbers(out) == numbers(other)
    states = [torch.load(each / "last.pt", weights_only=True) for each in (out, other)]
    for part in "model", "optimizer":
        leaves = [torch.utils._pytree.tree_leaves(state[part]) for state in states]
        for one, two in zip(*leaves, strict=True):
            assert (
                torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two
            )


@pytest.mark.parametrize("project", both_but_one_in_soak, indirect=True)
def test_as_on_the_cpu(project: Project, few: Path, tmp_path: Path) -> None:
    """Training, stopped and resumed in mid-epoch, evaluation and predictions: the same bits."""
    own = tmp_path / "own"
    other = tmp_path / "other"
    flags = [*MORE, *RECIPES[project.task]]

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    stopped = project.train(few, own, flags, on=1, patch=after_step(2, stop))
    assert stopped.statuses == [75], stopped.err
    assert "1 rank(s) on APPLE" in stopped.out
    assert "amp off" in stopped.out
    done = project.train(few, own, flags, on=1).ok()
    assert done.err == ""
    project.train(few, other, flags, on=1, patch=on_cpu).ok()
    assert_same(own, other)

    judged = [
        project.train(few, own, "--eval-only", on=1).ok(),
        project.train(few, own, "--eval-only", on=1, patch=on_cpu).ok(),
    ]
    assert judged[0].out.splitlines()[-1] == judged[1].out.splitlines()[-1]
    found = []
    for name, patch in ("own", None), ("other", on_cpu):
        out = tmp_path / f"predicted-{name}"
        words = [few / "val", "--checkpoint", own / "best.pt", "--output", out]
        project.run(words, on=1, script="predict.py", patch=patch).ok()
        files = sorted(file for file in out.rglob("*") if file.is_file())
        found.append([(file.name, file.read_bytes()) for file in files])
    assert found[0] == found[1]
    assert found[0]


@on_ranks(1, group=False)
def test_random_numbers_of_the_device() -> None:
    """They are seeded with the others."""
    before = len(torch.apple.seeds)
    samples.seed(7)
    assert len(torch.apple.seeds) == before + 1


def test_several_ranks(project: Project, few: Path, tmp_path: Path) -> None:
    """They compute on the CPU, which one line says."""
    done = project.train(few, tmp_path).ok()
    assert "2 rank(s) on CPU" in done.out
    line = "Apple's GPU supports only one process: using the CPU for 2 ranks\n"
    assert done.err == line
