"""benchmarks/gpu.sh: its parts and their failures."""

import re
from pathlib import Path

from generated import ROOT, Done, run

STUB = """#!/bin/bash
case $1 in
-c) echo a machine; exit $CODE ;;
*step.py) echo the cause >&2; exit 3 ;;
*) printf 'a machine\\nits flags\\n\\n| a table |\\n' ;;
esac
"""


def test_parts(tmp_path: Path) -> None:
    """A part that fails is one line and the status, and the others go on; names are checked."""
    stub = tmp_path / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)

    def gpu(*words: str, code: int = 0) -> Done:
        return run([ROOT / "benchmarks/gpu.sh", *words], PYTHON=str(stub), CODE=str(code))

    done = gpu("step", "memory")
    assert done.status == 1
    assert done.out.count("| a table |") == 2  # both tasks
    assert "its flags" not in done.out
    lines = [line for line in done.out.splitlines() if line.startswith("step failed")]
    assert len(lines) == 4
    assert all(re.fullmatch(r"step failed with status 3 .*: the cause", line) for line in lines)
    assert gpu("memory", "resume").status == 0
    gpu("tea").refused("", "tea", "--list")
    gpu(code=3).refused("", "no GPU", "--quick")
    seconds = re.findall(r"^  [a-z]+ +(\d+) s  ", gpu("--list").out, re.M)
    assert len(seconds) == 9
    assert sum(map(int, seconds)) == 40 * 60
