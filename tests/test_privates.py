"""The private parts of torch, debugpy and Python that are used: where, and that they are there."""

import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from running import ROOT, TEMPLATE_FOLDER
from torchmetrics import Metric
from torchmetrics.classification import MulticlassConfusionMatrix

from engine.data import samples
from engine.ranks import explaining, process

RANKS = ROOT / TEMPLATE_FOLDER / "engine" / "ranks"
PLACES = {  # each in one file only
    "_dump_fr_trace": "explaining.py",
    "_dump_nccl_trace": "explaining.py",
    "_foreach_mul_": "replicas.py",
    "_is_attached": "process.py",
    "_current_frames": "explaining.py",
}


@pytest.mark.parametrize("name", PLACES)
def test_one_place(name: str) -> None:
    found = {path.name for path in RANKS.glob("*.py") if name in path.read_text()}
    assert found == {PLACES[name]}


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_flight_recorder(group: None) -> None:
    """What it keeps of each collective, and its lines."""
    for size in (3, 4):
        dist.all_reduce(torch.ones(size))
    *_, first, last = explaining.records()
    found = [explaining.described(each).what for each in (first, last)]
    assert found == ["all_reduce (3,) float", "all_reduce (4,) float"]
    assert any(frame["filename"] == __file__ for frame in last["frames"])
    assert last["retired"] or last["state"] == "completed"
    assert last["collective_seq_id"] == first["collective_seq_id"] + 1


def test_without_the_flight_recorder(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of torch: the hang is explained by stacks alone, saves compare nothing."""
    monkeypatch.setattr(explaining, "_distributed_c10d", types.ModuleType("other"))
    dist.all_reduce(torch.ones(3))
    assert explaining.records() == []
    assert explaining.Checksum().compute() == 0
    here = explaining.here()
    assert (here.reached, here.waits) == (0, 0)
    assert explaining.compare({0: here})[1] == explaining.RECORDING


def test_one_product_for_all_gradients() -> None:
    weights = [torch.ones(2), torch.ones(3)]
    torch._foreach_mul_(weights, torch.tensor(0.5))
    assert [weight.tolist() for weight in weights] == [[0.5] * 2, [0.5] * 3]


def test_whether_a_debugger_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of pydevd that does not say so counts as attached."""
    code = "import debugpy._vendored.force_pydevd, pydevd; print(pydevd._is_attached())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
    assert not process.is_debugged()
    monkeypatch.setitem(sys.modules, "pydevd", types.ModuleType("pydevd"))
    assert process.is_debugged()


def test_where_a_thread_is() -> None:
    assert Path(explaining.__file__).name == "explaining.py"
    assert sys._current_frames()


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Metric, "_wrap_update", Metric._wrap_update)
    yield
    torch.use_deterministic_algorithms(False)


def test_metrics_count_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metric._wrap_update is wrapped once, however often `setup` is called."""
    samples.be_deterministic()
    wrapped = Metric._wrap_update
    samples.be_deterministic()
    assert Metric._wrap_update is wrapped
    seen = []

    class Watched(MulticlassConfusionMatrix):
        def update(self, predicted: torch.Tensor, target: torch.Tensor) -> None:
            seen.append(torch.are_deterministic_algorithms_enabled())
            super().update(predicted, target)

    metric = Watched(2)
    metric.update(torch.tensor([0, 1]), torch.tensor([0, 0]))
    assert metric.compute().tolist() == [[1, 1], [0, 0]]
    assert seen == [False]
    assert torch.are_deterministic_algorithms_enabled()


def test_metrics_without_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(Metric, "_wrap_update")
    samples.be_deterministic()
    assert "takes more memory" in capsys.readouterr().out
