"""What training leaves out: tools that few runs need, and what takes long to import."""

import sys
from pathlib import Path

from running import NET, SAME_FOR_BOTH, Project, run

# Names of modules, with all that is in them, which neither importing main.py nor a run loads.
ABSENT = {"ddpkit.tools"}
CODE = """
import sys, main
main.main(sys.argv[1:])
print("loaded", *sys.modules)
"""


@SAME_FOR_BOTH
def test_what_a_run_does_not_load(project: Project, data: Path, tmp_path: Path) -> None:
    words = ["--data", data, "--output-dir", tmp_path / "out", "--epochs", 1, "--workers", 0, *NET]
    done = run([sys.executable, "-c", CODE, *words], cwd=project.folder).ok()
    loaded = done.out.splitlines()[-1].split()
    assert loaded[0] == "loaded" and "ddpkit.run.loop" in loaded
    parts = (name.split(".") for name in loaded)
    assert not {".".join(part[:n]) for part in parts for n in range(1, 4)} & ABSENT
