"""benchmarks/gpu.sh: its parts, their failures, and what it measures."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from running import NETS, ROOT, Project

STUB = """#!/bin/bash
case $1 in
-c) echo a machine ;;
*step.py) echo the cause >&2; exit 3 ;;
*) printf 'a machine\\nits flags\\n\\n| a table |\\n' ;;
esac
"""


def gpu(python: Path | str, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [ROOT / "benchmarks" / "gpu.sh", *words],
        env={**os.environ, "PYTHON": str(python), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_gpu_parts(tmp_path: Path) -> None:
    """A part that fails is one line and the status, and the others go on; names are checked."""
    stub = tmp_path / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    done = gpu(stub, "step", "memory")
    assert done.returncode == 1
    assert done.stdout.count("| a table |") == 2  # both tasks
    assert "its flags" not in done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("step failed")]
    assert len(lines) == 4
    assert all(re.fullmatch(r"step failed with status 3 .*: the cause", line) for line in lines)
    assert gpu(stub, "memory", "resume").returncode == 0
    done = gpu(stub, "tea")
    assert (done.returncode, done.stderr) == (2, "error: tea: no such part; see --list\n")

    listed = gpu(stub, "--list").stdout
    seconds = re.findall(r"^  [a-z]+ +(\d+) s  ", listed, re.M)
    assert len(seconds) == 9
    assert sum(map(int, seconds)) == 40 * 60


def test_gpu_is_looked_for(tmp_path: Path) -> None:
    stub = tmp_path / "python"
    stub.write_text("#!/bin/bash\nexit 3\n")
    stub.chmod(0o755)
    done = gpu(stub)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: torch finds no GPU here; --quick runs without one\n"


def test_gpu_measures(project: Project, data: Path, tmp_path: Path) -> None:
    """It knows the projects' code: a step, a save, decoding beside a step; here on the CPU."""
    words = " ".join((*NETS[project.task], "--image-size 32 --batch-size 2"))
    assert project.call("benchmarking.measured", "peak", tmp_path, words, "ours") > 1e8
    if project.task == "classification":
        size, *times = project.call("benchmarking.measured", "save", tmp_path, words)
        file = tmp_path / "run" / "best.pt"
        assert size == pytest.approx(file.stat().st_size / 2**20, rel=0.01)
        assert len(times) == 4
        assert min(times) > 0
        alone, *trained = project.call(
            "benchmarking.measured", "decode_and_train", tmp_path, data, words
        )
        assert 0 < min(trained) < max(trained) < alone
