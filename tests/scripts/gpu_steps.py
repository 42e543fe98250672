"""Trains as main.py does and prints, as JSON, what the last steps and evaluations asked of a GPU.

Each rank prints {"rank": N, "steps": [...], "evaluations": [...]}: counts of emulate.py.
"""

import json
from typing import Any

import emulate

import main
from engine.ranks import failures
from engine.run.progress import Run

seen: list[dict[str, int]] = []
steps: list[dict[str, int]] = []
evaluations: list[dict[str, int]] = []
evaluate, end_step = main.evaluate, Run.end_step


def difference(before: dict[str, int]) -> dict[str, int]:
    return {name: n - before[name] for name, n in emulate.counts().items() if n != before[name]}


def mark(self: Run) -> None:
    if seen:
        steps.append(difference(seen[-1]))
    end_step(self)
    seen.append(emulate.counts())


def evaluate_counted(*args: Any) -> Any:
    before = emulate.counts()
    result = evaluate(*args)
    evaluations.append(difference(before))
    seen.clear()
    return result


Run.end_step, main.evaluate = mark, evaluate_counted
with failures.one_line_errors():
    main.main()
found = {"steps": steps[-2:], "evaluations": evaluations, "kernels": emulate.counts()["kernels"]}
print(json.dumps(found))
