"""The memory of GPUs that are not there: checkpoints, peaks, and what happens if it runs out."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from running import NETS, SCRIPTS, SMALL, Done, rows

from ddpkit.ranks import protocol

FLAGS = [*SMALL, *NETS["classification"], "--image-size", 32]


@pytest.fixture
def train(on_gpus: Callable, tmp_path: Path) -> Callable[..., Done]:
    """Trains with gpu_memory.py: train(word, *flags, ranks=1)."""
    project = on_gpus("classification")
    data = project.draw(tmp_path / "set", 64, 6)

    def run(word: str, *flags: object, ranks: int = 1) -> Done:
        where = "--data", data, "--output-dir", tmp_path / "run"
        script = SCRIPTS / "gpu_memory.py"
        words = [word, *FLAGS, *where, *flags]
        return project.fork(*words, ranks=ranks, script=script, draws=False)

    return run


def test_checkpoints_of_a_gpu(train: Callable, tmp_path: Path) -> None:
    """Rank 0 copies each tensor once for both files; any machine can load them."""
    out = train("copies", "--epochs", 2, "--batch-size", 8, ranks=2).ok().out
    saves = [json.loads(line) for line in out.splitlines() if line.startswith('{"asked"')]
    saves = [save for save in saves if save["asked"]]  # rank 1 copies nothing
    assert len(saves) == 4  # before and after each evaluation
    for save in saves:
        assert save["asked"].pop("d2h") == save["storages"] > 400
        assert {*save["asked"]} <= {"stream_waits", "device_waits"}
    for name in ("last.pt", "best.pt"):
        state = torch.load(tmp_path / "run" / name, weights_only=True)  # no GPU in this process
        assert {each.device.type for each in state["model"].values()} == {"cpu"}
        assert state["model"]["conv1.0.weight"].is_contiguous(memory_format=torch.channels_last)
    peaks = [float(row["peak_memory"]) for row in rows(tmp_path / "run")]
    assert all(0.001 < peak < 0.1 for peak in peaks)  # GiB
    assert peaks[0] > 2 * peaks[1]  # which is counted anew


def test_a_rank_runs_out_of_memory(train: Callable) -> None:
    """One line, with what it takes; a status after which nothing starts again."""
    done = train("step", ranks=2)
    assert re.fullmatch(
        r"error: rank 1 is out of GPU memory \(asked for 32\.00 GiB, peak 0\.0\d+ of 16 GiB\) with "
        r"--batch-size 4: lower --batch-size \(.*\n",
        done.err,
    ), done.err
    assert done.status == protocol.MISTAKE
    assert done.status in protocol.FINAL
    done = train("evaluation")
    found = r"error: rank 0 is out of GPU memory \(asked for 32.*, peak .*\n"
    assert re.fullmatch(found, done.err), done.err
    assert done.status == protocol.MISTAKE
