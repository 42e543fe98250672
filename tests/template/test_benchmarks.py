"""benchmarks/gpu.sh: its parts, their failures, and what it measures."""

import json
import re
import sys
from pathlib import Path

import pytest
from generated import NET, ROOT, Done, Project, run

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


def test_what_it_measures(project: Project, few: Path, tmp_path: Path) -> None:
    """It knows the project's code: a step, a save, decoding beside a step; here on the CPU."""
    words = " ".join(map(str, (*NET[:4], "--batch-size", 2)))

    def measured(name: str, *args: object) -> list[float]:
        def act() -> None:
            sys.path.insert(0, str(ROOT / "benchmarks"))
            import gpu

            gpu.SECONDS = 0.1
            found = getattr(gpu, name)(*map(str, args))
            (tmp_path / "found.json").write_text(json.dumps(found))

        project.here(act).ok()
        return json.loads((tmp_path / "found.json").read_text())

    assert measured("peak", tmp_path, words, "ours") > 1e8
    size, *times = measured("save", tmp_path, words)
    assert size == pytest.approx((tmp_path / "run/best.pt").stat().st_size / 2**20, rel=0.01)
    assert len(times) == 4 and min(times) > 0
    alone, *trained = measured("decode_and_train", tmp_path, few, words)
    assert 0 < min(trained) < max(trained) < alone
