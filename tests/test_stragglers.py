"""A rank that computes slower than the others is named after each epoch, and no other rank."""

import json
import re
import socket
from pathlib import Path

import pytest
import torch
from running import SAME_FOR_BOTH, Project, rows

from engine.ranks import distributed, positions
from engine.run import stragglers
from engine.run.stragglers import Stopwatch

CPU = torch.device("cpu")


@SAME_FOR_BOTH
def test_who_holds_up_an_epoch(project: Project, data: Path, tmp_path: Path) -> None:
    """The rank that computes slowly, or the images; not a rank that waits for another."""
    said = project.call("stragglers.of_plan", data, tmp_path)
    starts = ("rank ", "epoch ", "input-bound")
    lines = [line for line in said.splitlines() if line.startswith(starts)]
    epochs = [f"epoch {epoch}/7" for epoch in range(1, 8)]
    assert [" ".join(line.split()[:2]) for line in lines] == [
        *("rank 2", *epochs[:4], "input-bound: " + lines[5].split()[1]),
        *(*epochs[4:6], "rank 0", epochs[6]),
    ]
    pattern = (
        rf"rank 2 on {socket.gethostname()} needs (\S+) x the others' time for a forward pass "
        r"\((\S+) ms, median (\S+) ms\): a slower CPU there, or a busy CPU\?"
    )
    ratio, own, usual = map(float, re.fullmatch(pattern, lines[0]).groups())
    assert own > 80
    assert ratio == pytest.approx(own / usual, rel=0.05)
    waits = [float(row["data_wait"]) for row in rows(tmp_path / "run")]
    assert "peak_memory" not in rows(tmp_path / "run")[0]  # of a GPU only
    assert waits[3] > 0.5 > max(waits[:3])  # the longest of all ranks'
    assert f"input-bound: {waits[3]:.0%} of " in lines[5]
    assert "with 0 worker(s) on " in lines[5]
    assert re.search(r"what helps: --workers \d+, prepare_data.py .*, more CPUs", lines[5])
    assert "per rank 0 loader worker(s), 0 batches ahead each, and 1 thread(s)" in said
    for rank in range(3):
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == [1] * 7


def line(*quartiles: tuple[float, float, float], passes: int = 100, seconds: float = 60) -> str:
    """What is said of ranks with these quartiles, in milliseconds."""
    watch = Stopwatch(CPU, passes)
    watch.passes = passes
    table = torch.tensor(quartiles, dtype=torch.float64) / 1000
    return watch.explain(table, seconds) or ""


def test_how_much_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "process_of", lambda rank: (f"n{rank // 2}", 0))
    usual, slow, other = (99, 100, 102), (130, 140, 150), (94, 95, 96)
    found = line(usual, usual, usual, slow)
    assert found.startswith("rank 3 on n1 needs 1.4 x ")
    assert "(140 ms, median 100 ms)" in found
    assert line(slow, usual).startswith("rank 0 on n0 ")  # of two ranks the other is the others
    assert line(slow, slow, usual, usual).startswith("rank ")  # all of a slow node
    assert not line(usual)
    assert not line(usual, other)
    assert not line(slow, slow, other)  # the odd one is fast
    assert not line(usual, (100, 140, 150))  # in many passes it was as fast
    assert not line((50, 100, 135), slow)  # in many passes the other was as slow
    assert not line(usual, slow, passes=20)  # that costs 0.8 s
    assert not line(usual, slow, seconds=300)  # 4 s of 300
    assert not line(usual, (float("nan"),) * 3)


def test_of_a_gpu_no_time_is_read_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for its events are read when the epoch is over; not all passes have them."""
    done = []

    class Event:
        def __init__(self, device: torch.device, enable_timing: bool) -> None:
            assert device.type == "cuda"
            assert enable_timing

        def record(self) -> None:
            done.append("record")
            self.at = len(done)  # milliseconds

        def synchronize(self) -> None:
            done.append("wait")

        def elapsed_time(self, end: "Event") -> float:
            assert done[-1] == "wait"
            return 1.5 * (end.at - self.at)

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(distributed, "collectives", lambda: 7)
    watch = Stopwatch(torch.device("cuda"), 1000)
    for _ in range(1000):
        watch.start()
        watch.end()
    assert done == ["record"] * 2 * stragglers.SAMPLES
    assert watch.quartiles().tolist() == [0.0015] * 3
    few = Stopwatch(torch.device("cuda"), 5)
    for _ in range(5):
        few.start()
        few.end()
    assert few.quartiles().isnan().all()
