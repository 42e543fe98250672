"""What torch.distributed, DDP and nccl say of the commonest mistakes comes as one line of ours."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import NET, SAME_FOR_BOTH, Project, flags

from ddpkit.ranks import environment
from ddpkit.ranks.failures import _of_torch


@pytest.fixture
def fault(project: Project, data: Path, tmp_path: Path) -> Callable[[str], Any]:
    words = [str(word) for word in [*flags(data, tmp_path)[:-2], *NET]]
    words = [word for word in words if word not in ("--data", str(data))]
    return lambda name: project.call(f"errors.{name}", data, tmp_path, *words)


def one_line(found: list, *words: str, status: int = 2) -> None:
    statuses, _, err = found
    assert set(statuses) == {status}, (statuses, err)
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line, line


@SAME_FOR_BOTH
def test_ranks_that_disagree(project: Project, tmp_path: Path) -> None:
    """One of them says how, all exit; nobody waits for the timeout unless a rank is missing."""
    found = project.call("errors.ranks_that_disagree", tmp_path)
    one_line(found["twice"], "RANK=1 is there twice")
    one_line(found["size"], "WORLD_SIZE is ", " for rank 1", " for rank 0")
    one_line(found["beyond"], "RANK=2 with WORLD_SIZE=2: the last rank is 1")
    statuses, _, err = found["missing"]
    waiting, line = err.splitlines()
    here = f"; here: {environment.node()}"
    assert waiting == f"waiting up to 3 s for rank 2 of 3 (WORLD_SIZE=3){here}"
    one_line([statuses, "", line], "waited 3 s for rank 2 of 3", "MASTER_PORT")
    statuses, _, err = found["unset"]
    one_line([statuses, "", err.splitlines()[0]], "RANK is set, WORLD_SIZE is not", "launch.sh")
    *busy, port = found["busy"]
    assert busy[2].count("\n") == 2, busy[2]
    busy_line, other = sorted(busy[2].splitlines())
    one_line(
        [busy[0], "", busy_line], f"MASTER_PORT={port} is in use", f"MASTER_PORT={int(port) + 1}"
    )
    one_line([busy[0], "", other], "RANK=x is not a number")


@SAME_FOR_BOTH
@pytest.mark.parametrize("debug", [False, True])
def test_weights_without_a_gradient(project: Project, debug: bool) -> None:
    """The names are right with several networks, outputs and passes, and in debug mode."""
    lines = project.call("errors.unused_weights", debug)
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("second.weight, second.bias: no gradient")


@SAME_FOR_BOTH
def test_mistakes_in_the_loop(fault: Callable) -> None:
    found = fault("mistakes_in_the_loop")
    one_line(found["no loss"], "run.loss was called 0 time(s) in a step of 1 pass(es)")
    one_line(found["no gradient"], "no weight has a gradient", "zero_grad()")
    one_line(found["no division"], "call run.divide_gradients(ddp_model)")
    one_line(found["no end_step"], "run.end_step was not called")
    one_line(found["memory"], "rank 1 is out of GPU memory (asked for 2.00 GiB)", "--batch-size")


@SAME_FOR_BOTH
def test_debug_mode_that_crashes(fault: Callable) -> None:
    statuses, _, err = fault("in_detail")
    assert statuses == [0, 0]
    assert err == "TORCH_DISTRIBUTED_DEBUG=DETAIL crashes DDP with gloo: using INFO\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Caught RuntimeError in DataLoader worker process 0.\nRuntimeError: unable to allocate "
         "shared memory(shm) for file </torch_2961_119_0>: No space left on device (28)\n",
         "lower --workers"),
    ],
)  # fmt: skip
def test_what_torch_says(text: str, words: str) -> None:
    """Texts of torch 2.9 to 2.15."""
    line = _of_torch(RuntimeError(text))
    assert isinstance(line, str)
    assert line.startswith("rank 0: ")
    assert words in line
