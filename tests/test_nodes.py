"""The launchers of several nodes meet, start again and end together, whoever dies or is late."""

import re
from pathlib import Path

import pytest
from running import SAME_FOR_BOTH, Project


@SAME_FOR_BOTH
def test_counters_that_diverge(project: Project, tmp_path: Path) -> None:
    """Both take over the lower number of restarts, and the id of the launch that began first."""
    statuses, *nodes = project.call("nodes.counters_diverge", tmp_path)
    assert statuses == [0, 0]
    for out, err in nodes:
        *_, first, second = out.splitlines()
        assert (first, second) == ("start 0, id abcd, 2 left", "start 1, id abcd, 1 left")
        assert err == ""


@SAME_FOR_BOTH
@pytest.mark.parametrize(("status", "other"), [(75, 1), (1, 75)])
def test_one_ends_for_good(project: Project, tmp_path: Path, status: int, other: int) -> None:
    """Whichever: the launcher whose ranks have failed does not start them again alone."""
    statuses, *nodes, seconds = project.call("nodes.one_ends_for_good", tmp_path, status, other)
    assert statuses == [status, other]
    failed, final = nodes if other == 75 else reversed(nodes)
    line = rf"error: not restarting: node {int(other == 75)} \(.+\) has ended with status 75\n"
    assert re.fullmatch(line, failed[1])
    assert final[1] == ""
    assert seconds < 10


@SAME_FOR_BOTH
def test_a_launcher_that_dies(project: Project, tmp_path: Path) -> None:
    """While it waits: nobody starts without it, and another may take its place."""
    statuses, *nodes = project.call("nodes.dies_while_it_waits", tmp_path)
    assert statuses == [0, 0, 0]
    assert [out.count("start 0, ") for out, _ in nodes] == [1, 1, 1]
    assert "waiting up to 30 s for node 1 of 3 (NNODES=3); here: 0 (" in nodes[0][1]


@SAME_FOR_BOTH
def test_a_launcher_that_is_late(project: Project, tmp_path: Path) -> None:
    """It disturbs nobody: refused, or with MAX_RESTARTS in the next start."""
    statuses, _, (out, other) = project.call("nodes.late", tmp_path)
    assert statuses == [0, 0]
    refused, waits = other.splitlines()
    assert refused.startswith("error: NODE_RANK=1 is there twice (")
    assert re.fullmatch(
        r"NODE_RANK=1 is running already, on .+; waiting up to 30 s for the next start", waits
    )
    assert out.count("start 0, ") == 2


@SAME_FOR_BOTH
def test_absent_nodes(project: Project, tmp_path: Path) -> None:
    found = project.call("nodes.absent", tmp_path)
    statuses, _, (_, err) = found["alone"]
    assert statuses == [2]
    waiting, error = err.splitlines()
    assert re.match("nobody answers at MASTER_ADDR=127.0.0.1, .* Trying for 2 s", waiting)
    assert error.startswith("error: nobody answers at MASTER_ADDR=127.0.0.1, ")
    statuses, *nodes = found["absent"]
    assert statuses == [2, 2, 2]
    waiting, error = nodes[0][1].splitlines()
    which = r"s for node 2-3 of 5 \(NNODES=5\); here: 0-1 \([^()]+\), 4 \([^()]+\)"
    assert re.fullmatch(rf"waiting up to 3 {which}", waiting)
    assert re.fullmatch(rf"error: waited 3 {which}: start as many, .*", error)
    assert nodes[1][1] == nodes[4][1] == f"{error}\n"
