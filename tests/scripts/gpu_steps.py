"""Trains as main.py does and prints, as JSON, what that asked of a GPU: counts of emulate.py.

{"steps": of the last two, "batches": of forty more batches of evaluate(), "kernels": in all}
"""

import json
import math
from collections import Counter
from typing import Any

import emulate
import torch
from torch.utils.data import DataLoader

import ddpkit
import main
from ddpkit.data.loading import First
from ddpkit.run.loop import Run

marks: list[Counter] = []
found: dict[str, Any] = {}
evaluate, end_step = main.evaluate, Run.end_step


class Again:
    """A validation loader whose batches come `times` times."""

    def __init__(self, loader: DataLoader, times: int) -> None:
        self.dataset, self.batch_sampler = loader.dataset, loader.batch_sampler
        self.groups = [*loader] * times

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self.groups)


def mark(*_: object) -> None:
    marks.append(Counter(emulate.counts()))


def differences() -> list[dict[str, int]]:
    """Return what was asked between the last three marks, without what was not."""
    return [dict(after - before) for before, after in zip(marks[-3:], marks[-2:], strict=False)]


def end_step_marked(self: Run) -> None:
    self.checked_at = math.inf  # every few seconds it reads the loss
    end_step(self)
    mark()


def evaluate_counted(model: torch.nn.Module, loader: Any, **options: Any) -> Any:
    result = evaluate(model, loader, **options)  # the first time metrics are grouped
    if isinstance(loader, First):
        return result
    found["steps"] = differences()
    for times in (1, 11):
        again = Again(loader, times)
        mark()
        result = evaluate(model, again, **options)  # type: ignore[arg-type]
        mark()
        found[str(times)] = differences()[-1]
    found["batches"] = dict(Counter(found.pop("11")) - Counter(found.pop("1")))
    return result


Run.end_step, main.evaluate = end_step_marked, evaluate_counted  # type: ignore[method-assign]
ddpkit.start(main.main)
print(json.dumps({**found, "kernels": emulate.counts()["kernels"]}))
