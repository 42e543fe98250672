"""Devices of real ranks: GPUs that torch cannot use, or that ranks share."""

from pathlib import Path

from running import SAME_FOR_BOTH, Project


@SAME_FOR_BOTH
def test_gpus_that_torch_cannot_use(project: Project, tmp_path: Path) -> None:
    """Nvidia-smi shows two, but nothing of CUDA is there: no rank trains on the CPU unasked."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: GPU-1)'; echo 'GPU 1: A (UUID: GPU-2)'\n")
    tool.chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "0,1"}
    done = project.launch("--output-dir", tmp_path / "out", **path)
    done.refused("nvidia-smi shows 2 GPU(s), but torch", "install", "CUDA_VISIBLE_DEVICES=")
    assert done.status == 2
    assert not (tmp_path / "out").exists()


@SAME_FOR_BOTH
def test_shared_gpus(project: Project, tmp_path: Path) -> None:
    """One of two ranks' GPUs is the other's, or none: one line, before nccl would hang or fail."""
    for names, words in (
        (["GPU-1", "GPU-1", "GPU-2"], "3 ranks on "),
        (["GPU-1", ""], "ranks compute on different kinds of device: rank 0 ("),
    ):
        (tmp_path / words).mkdir()
        statuses, out, err = project.call("devices.claimed", tmp_path / words, *names)
        assert (set(statuses), out) == ({2}, "")
        (line,) = err.splitlines()
        assert line.startswith(f"error: {words}")
