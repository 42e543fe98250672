"""./launch.sh --check: what it says of nodes that are fine, and of nodes that are not.

Without several machines: ranks that take themselves for nodes, with one fault each.
"""

import fcntl
import itertools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from running import NETS, SAME_FOR_BOTH, SCRIPTS, SMALL, Done, Project, flags

from engine.check import network
from engine.check.preflight import Table

FAULTS = {  # what is wrong with the last node, and the row that says so
    "version": ("FAULT", "versions", "numpy n0: ", "; n1: 0.1; python 3"),
    "code": ("FAULT", "code", "recipe.py n0: ", "; n1: "),
    "variable": ("note", "environment", "NCCL_SOCKET_IFNAME: n0: none; n1: eth9; OMP_"),
    "clock": ("note", "clocks", "n1 is 90.0 s ahead of n0"),
    "memory": ("FAULT", "/dev/shm", "too small on n1: lower --workers; "),
    "file": ("FAULT", "data", "n0: 76 files (", "; n1: 75 files (", "; only n0 has 'train/"),
    "size": ("FAULT", "data", "n0: 76 files (", "; n1: 76 files (", " has 'train/"),
    "folder": ("FAULT", "data", "n0: 76 files (", "; n1: set: no such folder"),
    "disk": ("note", "output", "not shared: n1 cannot see the files of n0, which has rank 0; "),
    "decoding": ("note", "decoding", "slow on n2; "),
    "network": ("note", "node pairs", "n2 is slow; n0 to n1 "),
}
TOGETHER = [  # in one run, those of one verdict; of each row one
    *("version,code,memory,file", "size", "folder"),
    *("variable,clock,disk", "decoding,network"),
]


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
    assert done.err == ""
    assert names(out) == {"last.pt", ".lock"}
    assert (out / "last.pt").read_text() == "of a run"


@SAME_FOR_BOTH
@pytest.mark.parametrize("what", TOGETHER)
def test_one_odd_node(project: Project, data: Path, tmp_path: Path, what: str) -> None:
    found = [FAULTS[each] for each in what.split(",")]
    is_ready = found[0][0] == "note"
    ranks = 3 if "network" in what else 2
    for rank in range(ranks):  # a disk for each
        shutil.copytree(data, tmp_path / f"n{rank}" / "set")
    odd = tmp_path / "n1" / "set"
    image = sorted(odd.glob("train/*/*"))[4]
    if "file" in what:
        image.unlink()
    elif what == "size":
        image.write_bytes(image.read_bytes() + b"!")
    elif what == "folder":
        shutil.rmtree(odd)
    before = names(tmp_path)
    own = flags(
        Path("set"), Path("out") if "disk" in what else tmp_path / "out", *NETS["classification"]
    )
    done = check(project, what, tmp_path, *own, ranks=ranks)
    assert done.status == (0 if is_ready else 2), done.err
    for mark, name, *texts in found:
        line = row(done, name)
        assert line.startswith(f"{mark:<7}{name:<13}{texts[0]}"), done.out
        assert all(text in line for text in texts)
    start = f"ready: {ranks} rank(s) on {ranks} node(s), but" if is_ready else "not ready:"
    more = f"; and {len(found) - 1} more above" if len(found) > 1 else ""
    verdict = done.out.splitlines()[-1]
    assert verdict.startswith(f"{start} {found[0][1]}: ")
    assert verdict.endswith(more)
    assert verdict.count(" more above") == bool(more)
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
    assert row(done, "data").startswith("ok     data         fast: prepared (checksum ")
    index = tmp_path / "n1" / "fast" / "index.json"
    index.write_text(index.read_text().replace("0001", "0002", 1))
    done = check(project, "nothing", tmp_path, *words)
    assert done.status == 2
    assert row(done, "data").startswith("FAULT  data         n0: prepared (checksum ")


@SAME_FOR_BOTH
def test_a_node_that_hangs(project: Project, data: Path, tmp_path: Path) -> None:
    """It is named after a while, in place of a table that stops without a word."""
    done = check(project, "hangs", tmp_path, *flags(data, tmp_path))
    done.refused("not ready: rank 1 on ", ": not done with this step after 2 s: data")
    assert done.status == 2
    assert done.out.splitlines()[-1].startswith("ok     /dev/shm")


@SAME_FOR_BOTH
def test_wrong_flags(project: Project, data: Path, tmp_path: Path) -> None:
    project.alone("--eval-only", script="preflight.py").refused("--check is for training")
    file = tmp_path / "file"
    file.touch()
    words = [*flags(data, file / "out"), "--arch", "nothing"]
    done = project.alone(*words, script="preflight.py")
    assert done.status == 2
    assert row(done, "network").startswith("FAULT  network      --arch nothing: torchvision has ")
    assert "cannot be written (" in row(done, "output")
    assert done.out.splitlines()[-1].startswith("not ready: network: --arch nothing")
    assert done.out.splitlines()[-1].endswith("; and 1 more above")


def of(counts: Sequence[int]) -> Table:
    """A table of nodes with so many ranks each, without a process group."""
    table = object.__new__(Table)
    table.node_of = [node for node, count in enumerate(counts) for _ in range(count)]
    table.nodes = [f"n{node}" for node in range(len(counts))]
    return table


def test_ranks_that_agree_are_put_together() -> None:
    assert of([8]).spread(["a"] * 8) == "a"
    assert of([8]).spread(["a"] * 3 + ["b"] * 5) == "ranks 0-2: a; ranks 3-7: b"
    assert of([2, 2]).spread([*"aabb"]) == "n0: a; n1: b"
    assert of([2, 2]).spread([*"abaa"]) == "rank 1 on n0: b; ranks 0, 2, 3 on n0, n1: a"
    assert of([2] * 9).spread([*"aaaabbaaaaaaaaaaaa"]) == "n2: b; all others: a"
    many = of([1] * 9).spread([*"abcdefggg"])
    assert many == "n0: a; n1: b; n2: c; n3: d; 2 more kinds; n6, n7, n8: g"
    numbers = of([2] * 3).numbers([5, 4, 7, 9, 4, 6], "{:.0f} GB".format)
    assert numbers == "n0 4 GB, n1 7 GB, n2 4 GB"
    numbers = of([1] * 9).numbers(range(9), "{:.0f} GB".format)
    assert numbers == "0 GB (n0) to 8 GB (n8)"


def test_each_two_nodes_meet_once() -> None:
    for count in range(2, 9):
        found = [*network.rounds(count)]
        assert all(
            len({node for pair in pairs for node in pair}) == 2 * len(pairs) for pairs in found
        )
        pairs = [pair for each in found for pair in each]
        assert sorted(pairs) == [*itertools.combinations(range(count), 2)]


def test_which_nodes_and_pairs_are_slow() -> None:
    def judge(count: int, slow: Callable[[int, int], bool]) -> str:
        pairs = itertools.combinations(range(count), 2)
        found = {pair: (1e-4, 1e8 if slow(*pair) else 1e9) for pair in pairs}
        return network.judge(found, [f"n{node}" for node in range(count)])[1]

    assert judge(2, lambda *_: True) == ""  # nothing to compare with
    assert judge(6, lambda *_: False) == ""
    assert judge(3, lambda _, b: b == 2) == "n2 is slow"
    assert judge(6, lambda *pair: pair == (1, 4)) == "slow: n1 to n4 0.1 GB/s, 0.1 ms"


def test_what_nccl_says_of_its_network() -> None:
    """Lines as in NVIDIA/nccl's issues 226 and 676."""
    log = """h:7:7 [0] NCCL INFO NET/IB : No device found.
h:7:7 [0] NCCL INFO NET/Socket : Using [0]ens3:172.31.5.4<0>
h:7:7 [0] NCCL INFO Using network Socket
h:7:9 [0] NCCL INFO NET/Socket : Using [0]ens3:172.31.5.4<0>
"""
    assert network.interfaces(log) == [
        "NET/Socket : Using [0]ens3:172.31.5.4",
        "Using network Socket",
    ]
    log = "h:7:7 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB ; OOB ib0:10.0.0.1<0>"
    assert network.interfaces(log) == ["NET/IB : Using [0]mlx5_0:1/IB ; OOB ib0:10.0.0.1"]
