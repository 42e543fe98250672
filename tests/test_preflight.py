"""./launch.sh --check: what it says of nodes that are fine, and of nodes that are not.

Without several machines: ranks that take themselves for nodes, with one fault each.
"""

import fcntl
import re
import shutil
from pathlib import Path

import pytest
from running import NETS, SAME_FOR_BOTH, SCRIPTS, SMALL, Done, Project, flags

FAULTS = {  # what is wrong with the last node, and the row that says so
    "version": ("FAULT", "numpy", "n0: ", "; n1: 0.1"),
    "code": ("FAULT", "code", "n0: ", "; n1: "),
    "device": ("note", "device", "n0: cpu; n1: another"),
    "file": ("FAULT", "data", "n0: set: 76 files (", "; n1: set: 75 files ("),
    "sum": ("FAULT", "all-reduce", "n0: right, ", "; n1: wrong on rank 1 on n1"),
}
TOGETHER = ["version,code,file", "sum", "device"]  # in one run, those of one verdict


def check(project: Project, what: str, folder: Path, *more: object, ranks: int = 2) -> Done:
    script = SCRIPTS / "odd_node.py"
    return project.fork(what, folder, *more, "--workers", 1, ranks=ranks, script=script)


def row(done: Done, name: str) -> str:
    return next(line for line in done.out.splitlines() if line[7:].startswith(f"{name} "))


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@SAME_FOR_BOTH
def test_good_nodes(project: Project, data: Path, tmp_path: Path) -> None:
    """Through launch.sh, beside a run that has the output folder, of which nothing changes."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "last.pt").write_text("of a run")
    with open(out / ".lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        done = project.launch(*flags(data, out), "--check", timeout=120).ok()
    lines = done.out.splitlines()
    assert lines[0] == "starting 2 rank(s) ..."
    assert lines[-1] == "ready: 2 rank(s) on 1 node(s)"
    assert all(line.startswith("ok ") for line in lines[1:-1]), done.out
    assert row(done, "data").startswith(f"ok     data         {data}: 76 files (checksum ")
    assert re.fullmatch(r"ok     all-reduce   right, [\d.e+-]+ GB/s", row(done, "all-reduce"))
    assert done.err == ""
    assert names(out) == {"last.pt", ".lock"}
    assert (out / "last.pt").read_text() == "of a run"


@SAME_FOR_BOTH
@pytest.mark.parametrize("what", TOGETHER)
def test_one_odd_node(project: Project, data: Path, tmp_path: Path, what: str) -> None:
    found = [FAULTS[each] for each in what.split(",")]
    is_ready = found[0][0] == "note"
    ranks = 2
    for rank in range(ranks):  # a disk for each
        shutil.copytree(data, tmp_path / f"n{rank}" / "set")
    odd = tmp_path / "n1" / "set"
    image = sorted(odd.glob("train/*/*"))[4]
    if "file" in what:
        image.unlink()
    before = names(tmp_path)
    own = flags(Path("set"), tmp_path / "out", *NETS["classification"])
    done = check(project, what, tmp_path, *own, ranks=ranks)
    assert done.status == (0 if is_ready else 2), done.err
    for mark, name, *texts in found:
        line = row(done, name)
        assert line.startswith(f"{mark:<7}{name:<13}{texts[0]}"), done.out
        assert all(text in line for text in texts)
    verdict = done.out.splitlines()[-1]
    if is_ready:
        assert verdict == "ready: 2 rank(s) on 2 node(s)"
    else:
        assert verdict.startswith("not ready: see ")
        assert {*verdict[15:].split(", ")} == {name for _, name, *_ in found}
    assert done.err == ""
    assert not done.left
    assert names(tmp_path) == before


def test_prepared_data(project: Project, data: Path, tmp_path: Path) -> None:
    """Of which one node has an older index; the folder that it was made from need not be there."""
    fast = tmp_path / "n0" / "fast"
    words = ["--data", data, "--output", fast, "--workers", 0]
    project.alone(*words, script="prepare_data.py").ok()
    shutil.copytree(fast, tmp_path / "n1" / "fast")
    words = [*SMALL, *NETS[project.task], "--data", "fast", "--output-dir", tmp_path / "out"]
    done = check(project, "nothing", tmp_path, *words).ok()
    assert row(done, "data").startswith("ok     data         fast: 3 files (checksum ")
    index = tmp_path / "n1" / "fast" / "index.json"
    index.write_text(index.read_text().replace("0001", "0002", 1))
    done = check(project, "nothing", tmp_path, *words)
    assert done.status == 2
    assert row(done, "data").startswith("FAULT  data         n0: fast: 3 files (checksum ")


@SAME_FOR_BOTH
def test_a_node_that_hangs(project: Project, data: Path, tmp_path: Path) -> None:
    """It is named after a while, in place of a table that stops without a word."""
    done = check(project, "hangs", tmp_path, *flags(data, tmp_path))
    assert "rank 0 on n0 timed out after 2 s (--dist-timeout)" in done.err
    assert "list_data" in done.err
    assert done.status


@SAME_FOR_BOTH
def test_wrong_flags(project: Project, tmp_path: Path) -> None:
    project.alone("--eval-only", script="preflight.py").refused("--check is for training")
    done = project.alone(*flags(tmp_path / "none", tmp_path), script="preflight.py")
    done.refused("none: no such folder")
