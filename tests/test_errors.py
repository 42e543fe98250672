"""What torch.distributed, DDP and nccl say of the commonest mistakes comes as one line of ours."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import NET, SAME_FOR_BOTH, Project, flags

from engine.errors import UserError
from engine.ranks import environment
from engine.ranks.remedies import explain


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
    one_line(found["size"], "WORLD_SIZE is 3 for rank 1, 2 for another")
    one_line(found["beyond"], "RANK=2 with WORLD_SIZE=2: the last rank is 1")
    statuses, _, err = found["missing"]
    waiting, line = err.splitlines()
    here = f"; here: 0-1 ({environment.node()})"
    assert waiting == f"waiting up to 3 s for rank 2 of 3 (WORLD_SIZE=3){here}"
    one_line([statuses, "", line], "waited 3 s for rank 2 of 3", "MASTER_PORT")
    one_line(found["unset"], "RANK is set, WORLD_SIZE is not", "launch.sh")
    *busy, port = found["busy"]
    busy_line, other = sorted(busy[2].splitlines())
    one_line([busy[0], "", busy_line], f"MASTER_PORT={port} is in use by process", "python")
    one_line([busy[0], "", other], "RANK=x is not a number")


@SAME_FOR_BOTH
def test_nodes_that_disagree(project: Project, tmp_path: Path) -> None:
    """Each has a terminal, so each says it."""
    found = project.call("errors.nodes_that_disagree", tmp_path)
    assert found["good"] == [[0, 0], "together\n" * 2, ""]
    for name, text in (
        ("size", "NNODES is "),
        ("twice", "NODE_RANK=1 is there twice"),
        ("beyond", "NODE_RANK=2 is none of the NNODES=2 nodes"),
    ):
        statuses, out, err = found[name]
        assert (set(statuses), out) == ({2}, "")
        lines = err.splitlines()
        assert len(lines) == len(statuses), err
        assert {*lines} == {lines[0]}
        assert text in lines[0]
    *busy, port = found["busy"]
    one_line(busy, f"MASTER_PORT={port} is in use by process", f"MASTER_PORT={int(port) + 1}")


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
    statuses, _, err = found["detached"]
    assert statuses == [1, 1]
    line, title, *rest = err.splitlines()
    assert line.startswith("error: the loss depends on no weight")
    assert title.startswith("Traceback")
    assert err.count("Traceback") == 1
    assert any("in train_one_epoch" in each for each in rest)
    one_line(found["no loss"], "run.loss was called 0 time(s) in a step of 1 pass(es)")
    one_line(found["no gradient"], "no weight has a gradient", "zero_grad()")
    one_line(found["no division"], "call run.divide_gradients(ddp_model)")
    one_line(found["no end_step"], "run.end_step was not called")
    one_line(found["memory"], "rank 1 is out of GPU memory (asked for 2.00 GiB)", "--batch-size")


@SAME_FOR_BOTH
def test_debug_mode_that_crashes(fault: Callable) -> None:
    statuses, out, err = fault("in_detail")
    assert (statuses, err) == ([0, 0], "")
    assert out.count("TORCH_DISTRIBUTED_DEBUG=DETAIL crashes DDP with gloo") == 1


NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, "
CUDA = "unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3\n"
CUDA += "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
SYSTEM = "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\n"
SYSTEM += "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or "
SYSTEM += "device error. \nLast error:\n"
USAGE = "invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.20.5\n"
USAGE += "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            NCCL + USAGE + "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10",
            "LOCAL_RANK",
        ),
        (
            f"{NCCL}{CUDA}Cuda failure 217 'peer access is not supported between these two "
            "devices'",
            "again with NCCL_P2P_DISABLE=1",
        ),
        (
            NCCL + SYSTEM + "Error while creating shared memory segment /dev/shm/nccl-WU88OE "
            "(size 9637888), error: No space left on device (28)",
            "--ipc=host",
        ),
        (NCCL + CUDA + "Cuda failure 'invalid argument'", "NCCL_DEBUG=WARN"),
        (NCCL + SYSTEM, "NCCL_SOCKET_IFNAME"),
        (NCCL + USAGE, "NCCL_DEBUG=WARN"),
        ("Caught RuntimeError in DataLoader worker process 0.\nRuntimeError: unable to allocate "
         "shared memory(shm) for file </torch_2961_119_0>: No space left on device (28)\n",
         "lower --workers"),
        ("CUDA error: no kernel image is available for execution on the device", "get_arch_list"),
        ("[1]: params[0] in this process with sizes [2, 3] appears not to match sizes of the same "
         "param in process 0.", "another network"),
    ],
)  # fmt: skip
def test_what_nccl_says(text: str, words: str) -> None:
    """Texts of torch 2.9 to 2.15, and of nccl 2.20 to 2.30; no GPU is here to provoke them."""
    line = explain(RuntimeError(text))
    assert isinstance(line, str)
    assert line.startswith("rank 0: ")
    assert words in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Expected to mark a variable ready only once.", "once per ddp_model"),
        ("Trying to backward through the graph a second time (or directly access", ".detach()"),
        ("Default process group has not been initialized, please make sure", "engine.setup"),
        ("No backend type associated with device type cpu", "device=device"),
        ("CUDA error: device-side assert triggered\nCUDA kernel errors", "CUDA_LAUNCH_BLOCKING"),
    ],
)
def test_what_is_wrong_in_the_code(text: str, words: str) -> None:
    line = explain(ValueError(text))
    assert isinstance(line, Exception)
    assert not isinstance(line, UserError)  # its traceback matters
    assert words in str(line)
    assert explain(ValueError("a bug")) is None
