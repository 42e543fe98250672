"""The project on GPUs that are not there; gpus.py says what of them is real."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from running import NETS, SCRIPTS, TASKS

# Without what takes seconds; 16 steps on one rank: DDP times its first 10, and waits for that.
SMALL = (
    *("--image-size", 32, "--batch-size", 2, "--workers", 0, "--epochs", 1, "--threads", 1),
    *("--weights", "none"),
)
RECIPES = {"bf16": [], "fp16": ["--amp", "fp16"], "sgd": ["--amp", "fp16", "--optimizer", "sgd"]}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("task", TASKS)
def test_a_step_waits_for_no_gpu(task: str, recipe: str, on_gpus: Callable, tmp_path: Path) -> None:
    project = on_gpus(task)
    data = project.draw(tmp_path / "set", 32, 8)
    flags = [
        *SMALL,
        *NETS[task],
        *RECIPES[recipe],
        "--data",
        data,
        "--output-dir",
        tmp_path / "run",
    ]
    out = project.alone(*flags, script=SCRIPTS / "gpu_steps.py", draws=False).ok().out
    found = json.loads(out.splitlines()[-1])
    for step in found["steps"]:
        assert step.pop("h2d") == 2  # images and targets, from pinned memory
        assert step.keys() <= {"h2d_bytes", "collectives"}, step
    assert found["kernels"] == 0
