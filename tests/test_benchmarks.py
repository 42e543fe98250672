"""benchmarks/gpu.sh: its parts, their failures, and one of them for real, without a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

from running import ROOT

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
        timeout=300,
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


def test_gpu_quick(tmp_path: Path) -> None:
    """Without a GPU nothing begins, but with --quick."""
    stub = tmp_path / "python"
    stub.write_text("#!/bin/bash\nexit 3\n")
    stub.chmod(0o755)
    done = gpu(stub)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: torch finds no GPU here; --quick runs without one\n"
    done = gpu(sys.executable, "--quick", "checkpoint")
    assert done.returncode == 0, done.stderr
    (row,) = re.findall(r"^\| `--arch.*", done.stdout, re.M)
    _, _, size, last, both, _, _ = (cell.strip() for cell in row.split("|"))
    assert 3 < int(size) < 6
    assert 0 < float(last) < 60
    assert 0 < float(both) < 60
