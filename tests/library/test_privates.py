"""Private parts of debugpy and torchmetrics that are used."""

import subprocess
import sys
import types
from collections.abc import Iterator

import pytest
import torch
from torchmetrics import Metric
from torchmetrics.classification import MulticlassConfusionMatrix

from ddpkit.data import samples
from ddpkit.ranks import process


def test_whether_a_debugger_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of pydevd that does not say so counts as attached."""
    code = "import debugpy._vendored.force_pydevd, pydevd; print(pydevd._is_attached())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
    assert not process.is_debugged()
    monkeypatch.setitem(sys.modules, "pydevd", types.ModuleType("pydevd"))
    assert process.is_debugged()


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
