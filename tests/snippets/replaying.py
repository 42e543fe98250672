"""Runs of which each step is recorded, and the same steps replayed."""

import fcntl
import hashlib
import json
import os
import re
import shlex
import sys
from pathlib import Path
from unittest.mock import Mock

import torch
from forked import Patch, run
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import model
from engine.data import seeding
from engine.run import plots, progress, records, reporting
from engine.run.progress import Run


def checksum(value: object) -> str:
    sums = hashlib.sha256()
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        sums.update(leaf if isinstance(leaf, bytes) else repr(leaf).encode())
    return sums.hexdigest()


def look(names: dict) -> dict:
    """What the local variables of train_one_epoch hold before a forward pass, as checksums."""
    stepper = names["stepper"]
    weights = [*stepper.model.parameters()]
    return {
        "images": [checksum(image) for image in names["images"]],
        "targets": checksum(names["targets"]),
        "random": checksum([torch.get_rng_state(), seeding.random.getstate()]),
        "weights": checksum(weights),
        "finite": all(weight.isfinite().all().item() for weight in weights),
        "optimizer": checksum(stepper.optimizer.state_dict()),
        "scheduler": checksum(stepper.scheduler.state_dict()["_last_lr"]),
        "scaler": checksum(stepper.scaler.state_dict()),
        "average": checksum([*stepper.average.module.parameters()]) if stepper.average else "",
        "averaged": stepper.average.step if stepper.average else 0,
    }


def recorded(out: str, more: Patch = lambda: None, keep: str = "") -> Patch:
    """Record all passes, the sums of losses after each step, and where breakpoint() stops.

    keep: a step before which the weights are kept, too.
    """

    def patch() -> None:
        more()
        os.environ["PYTHONBREAKPOINT"] = "a.debugger"
        found: dict = {"passes": {}, "totals": {}, "stops": []}
        is_due, end_step = Run.is_due, Run.end_step

        def step(self: Run) -> str:
            return f"{self.epoch + 1}:{self.seen // self.global_batch + 1}"

        def watched(self: Run, i: int) -> bool:
            names = sys._getframe(1).f_locals
            found["passes"].setdefault(step(self), []).append(look(names))
            if step(self) == keep:
                torch.save([*names["stepper"].model.parameters()], f"{out}.weights")
            return is_due(self, i)

        def ended(self: Run) -> None:
            found["totals"][step(self)] = self.totals.compute().tolist()
            Path(f"{out}.{os.environ.get('RANK', 0)}").write_text(json.dumps(found))
            end_step(self)

        def stopped() -> None:
            names = sys._getframe(1).f_locals
            found["stops"].append([step(names["run"]), names["i"], look(names)])

        Run.is_due, Run.end_step, sys.breakpointhook = watched, ended, stopped

    return patch


def undrawn() -> None:
    """Without the drawings, which take half of the time of such short runs."""
    plots.draw_curves = reporting.Reporter.images = Mock()
    records.are_drawn = lambda _: True


def found(out: str, ranks: int) -> list:
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(ranks)]


def contents(folder: Path) -> dict:
    """All that there is to know of the files in a folder."""
    return {
        str(path): (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
        for path in (folder, *folder.rglob("*"))
    }


def exactly(data: str, folder: str, *words: object) -> dict:
    """A run, and two of its steps again: after a checkpoint within an epoch, and without any."""
    out = Path(folder, "run")
    patch = recorded(f"{folder}/whole", undrawn)
    assert run(2, "--data", data, "--output-dir", out, *words, patch=patch) == [0, 0]
    before = contents(out)
    with open(out / ".lock", "r+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)  # as if the run was going on
        said = {}
        for step in "2:5", "1:3":
            again = ["--output-dir", out, "--replay", step]
            patch = recorded(f"{folder}/{step}")
            assert run(2, *again, patch=patch, output=f"{folder}/{step}.said") == [0, 0]
            said[step] = Path(f"{folder}/{step}.said.out").read_text()
        late = run(1, "--output-dir", out, "--replay", "2:7", patch=patch, output=f"{folder}/late")
    return {
        **{name: found(f"{folder}/{name}", 2) for name in ("whole", "2:5", "1:3")},
        "said": said,
        "late": [*late, Path(f"{folder}/late.err").read_text()],
        "is_unchanged": contents(out) == before,
    }


def on_one_process(data: str, folder: str, *words: object) -> dict:
    """A step of two ranks again, in one process; how far weights are apart, how far they moved."""

    def no_dropout() -> None:
        undrawn()
        nn.Dropout.forward = lambda self, x: x

    out, step = f"{folder}/run", "1:6"
    whole, again, earlier = (f"{folder}/{name}" for name in ("whole", "again", "earlier"))
    flags = ["--data", data, "--output-dir", out, *words]
    assert run(2, *flags, patch=recorded(whole, no_dropout, step)) == [0, 0]
    for name, at in (again, step), (earlier, "1:4"):
        flags = ["--output-dir", out, "--replay", at]
        assert run(1, *flags, patch=recorded(name, no_dropout, at), output=f"{name}.said") == [0]
    weights = [torch.load(f"{name}.weights") for name in (whole, again, earlier)]

    def distance(one: list, other: list) -> float:
        return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))

    return {
        "whole": found(whole, 2),
        "again": found(again, 1)[0],
        "apart": distance(*weights[:2]),
        "moved": distance(weights[0], weights[2]),
    }


def no_number(data: str, folder: str, *words: object) -> dict:
    """The loss of rank 1 is NaN in step 3, which is noticed later; what is said is then done."""

    def bad() -> None:
        progress.SECONDS_BETWEEN_CHECKS = 99
        build, seed = model.build_criterion, seeding.number(0, 0, 2, 1)

        def build_bad(*args: object) -> object:
            criterion = build(*args)

            def one(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
                loss, count = criterion(outputs, targets)
                return loss * (float("nan") if torch.initial_seed() == seed else 1), count

            return one

        model.build_criterion = build_bad

    out = f"{folder}/run"
    patch = recorded(f"{folder}/whole", bad)
    statuses = run(
        *(2, "--data", data, "--output-dir", out, *words), patch=patch, output=f"{folder}/bad"
    )
    error = Path(f"{folder}/bad.err").read_text()
    _, *flags = shlex.split(re.search(r"\./launch\.sh .*", error)[0])
    del flags[flags.index("--debug-rank") :]
    again = run(2, *flags, patch=recorded(f"{folder}/again", bad), output=f"{folder}/again.said")
    return {
        "statuses": statuses,
        "error": error,
        "again": again,
        "said": Path(f"{folder}/again.said.out").read_text(),
        "whole": found(f"{folder}/whole", 2),
        "found": found(f"{folder}/again", 2),
    }
