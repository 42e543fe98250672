"""./launch.sh --check: what it says of nodes that are fine, and of nodes that are not.

Without several machines: ranks that take themselves for nodes, with one fault each.
"""

import fcntl
import shutil
from pathlib import Path

import pytest
from running import NETS, SAME_FOR_BOTH, SCRIPTS, Done, Project, flags

FAULTS = {  # what is wrong with the last node, and the row that says so
    "version": ("FAULT", "versions", "numpy n0: ", "; n1: 0.1; python 3"),
    "code": ("FAULT", "code", "recipe.py n0: ", "; n1: "),
    "variable": ("note", "environment", "NCCL_SOCKET_IFNAME: n0: none; n1: eth9; OMP_"),
    "clock": ("note", "clocks", "n1 is 90.0 s ahead of n0"),
    "memory": ("FAULT", "/dev/shm", "too small on n1: lower --workers; "),
    "file": ("FAULT", "data", "n0: 76 samples (", "; n1: 75 samples (", "; only n0 has 'train: "),
    "size": ("FAULT", "data", "n0: 76 samples (", "; n1: 76 samples (", " has 'train: "),
    "folder": ("FAULT", "data", "n0: 76 samples (", "; n1: set/train: no such folder"),
    "disk": ("note", "output", "not shared: n1 cannot see the files of n0, which has rank 0; "),
    "decoding": ("note", "decoding", "slow on n2; "),
    "network": ("note", "node pairs", "n2 is slow; n0 to n1 "),
}


def check(project: Project, what: str, folder: Path, *more: object, ranks: int = 2) -> Done:
    script = SCRIPTS / "odd_node.py"
    return project.fork(what, folder, *more, "--workers", 1, ranks=ranks, script=script)


def row(done: Done, name: str) -> str:
    return next(line for line in done.out.splitlines() if line[7:].startswith(f"{name} "))


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


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
    assert row(done, "data").startswith(f"ok     data         {data}: 76 samples (checksum ")
    assert done.err == ""
    assert names(out) == {"last.pt", ".lock"}
    assert (out / "last.pt").read_text() == "of a run"


@SAME_FOR_BOTH
@pytest.mark.parametrize("what", FAULTS)
def test_one_odd_node(project: Project, data: Path, tmp_path: Path, what: str) -> None:
    mark, name, *words = FAULTS[what]
    ranks = 3 if words[0].find("n2") >= 0 else 2
    for rank in range(ranks):  # a disk for each
        shutil.copytree(data, tmp_path / f"n{rank}" / "set")
    odd = tmp_path / "n1" / "set"
    image = sorted(odd.glob("train/*/*"))[4]
    if what == "file":
        image.unlink()
    elif what == "size":
        image.write_bytes(image.read_bytes() + b"!")
    elif what == "folder":
        shutil.rmtree(odd)
    before = names(tmp_path)
    own = flags(
        Path("set"), Path("out") if what == "disk" else tmp_path / "out", *NETS["classification"]
    )
    done = check(project, what, tmp_path, *own, ranks=ranks)
    assert done.status == (2 if mark == "FAULT" else 0), done.err
    line = row(done, name)
    assert line.startswith(f"{mark:<7}{name:<13}{words[0]}"), done.out
    assert all(word in line for word in words)
    start = "not ready" if mark == "FAULT" else f"ready: {ranks} rank(s) on {ranks} node(s), but"
    verdict = done.out.splitlines()[-1]
    assert verdict.startswith(start)
    assert f"{name}: " in verdict
    assert done.err == ""
    assert not done.left
    assert names(tmp_path) == before
