"""Runs of which each step is recorded, and the same steps replayed."""

import fcntl
import hashlib
import json
import os
import re
import shlex
import sys
from argparse import Namespace
from pathlib import Path
from unittest.mock import Mock

import torch
from forked import Patch, run
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import dataset
import main
import model
from ddpkit import replay
from ddpkit.data import samples
from ddpkit.run import loop, pictures, reporting
from ddpkit.run.loop import Run

REPLAY = "ddpkit/replay.py"


def checksum(value: object) -> str:
    sums = hashlib.sha256()
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        sums.update(leaf if isinstance(leaf, bytes) else repr(leaf).encode())
    return sums.hexdigest()


def look(names: dict) -> dict:
    """What the local variables of train_one_epoch hold before a forward pass, as checksums."""
    weights = [*names["ddp_model"].parameters()]
    return {
        "images": [checksum(image) for image in names["images"]],
        "targets": checksum(names["targets"]),
        "random": checksum([torch.get_rng_state(), samples.random.getstate()]),
        "weights": checksum(weights),
        "finite": all(weight.isfinite().all().item() for weight in weights),
        "optimizer": checksum(names["optimizer"].state_dict()),
        "scheduler": checksum(names["scheduler"].state_dict()["_last_lr"]),
        "scaler": checksum(names["scaler"].state_dict()),
        "average": checksum([*names["run"].model.parameters()]),
        "step": names["run"].step,
    }


def recorded(out: str, more: Patch = lambda: None, keep: str = "") -> Patch:
    """Record all passes, the sums of losses after each step, and in which pass a debugger stops.

    keep: a step before which the weights are kept, too.
    """

    def patch() -> None:
        more()
        found: dict = {"passes": {}, "totals": {}, "stops": []}
        transform, end_step, due = dataset.transform_batch, Run.end_step, []

        def step(run: Run) -> str:
            return f"{run.epoch + 1}:{run.seen // run.global_batch + 1}"

        def watched(
            images: Tensor, targets: Tensor, args: Namespace, num_classes: int
        ) -> tuple[Tensor, Tensor]:
            images, targets = transform(images, targets, args, num_classes)
            names = {**sys._getframe(1).f_locals, "images": images, "targets": targets}
            now, run = look(names), names["run"]
            found["passes"].setdefault(step(run), []).append(now)
            if due:
                found["stops"].append([step(run), names["i"], now])
            due.clear()
            if step(run) == keep:
                torch.save([*names["ddp_model"].parameters()], f"{out}.weights")
            return images, targets

        def ended(self: Run) -> None:
            found["totals"][step(self)] = self.totals.compute().tolist()
            Path(f"{out}.{os.environ.get('RANK', 0)}").write_text(json.dumps(found))
            end_step(self)

        dataset.transform_batch = main.transform_batch = watched
        Run.end_step = ended
        replay.process = Mock(is_debugged=lambda: True)
        replay.stop_here = lambda: due.append(True)

    return patch


def undrawn() -> None:
    """Without the drawings, which take half of the time of such short runs."""
    pictures.draw_curves = reporting.Reporter.images = Mock()
    reporting.are_drawn = lambda *_: True


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
            again = [step, "--output-dir", out]
            patch = recorded(f"{folder}/{step}")
            output = f"{folder}/{step}.said"
            assert run(2, *again, script=REPLAY, patch=patch, output=output) == [0, 0]
            said[step] = Path(f"{folder}/{step}.said.out").read_text()
        again = ["2:7", "--output-dir", out]
        late = run(1, *again, script=REPLAY, patch=patch, output=f"{folder}/late")
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
    whole, later, earlier = (f"{folder}/{name}" for name in ("whole", "again", "earlier"))
    flags = ["--data", data, "--output-dir", out, *words]
    assert run(2, *flags, patch=recorded(whole, no_dropout, step)) == [0, 0]
    for name, at in (later, step), (earlier, "1:4"):
        patch = recorded(name, no_dropout, at)
        again = [at, "--output-dir", out]
        assert run(1, *again, script=REPLAY, patch=patch, output=f"{name}.said") == [0]
    weights = [torch.load(f"{name}.weights") for name in (whole, later, earlier)]

    def distance(one: list, other: list) -> float:
        return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))

    return {
        "whole": found(whole, 2),
        "again": found(later, 1)[0],
        "apart": distance(*weights[:2]),
        "moved": distance(weights[0], weights[2]),
    }


def no_number(data: str, folder: str, *words: object) -> dict:
    """The loss of rank 1 is NaN in step 3, which is noticed later; what is said is then done."""

    def bad() -> None:
        loop.SECONDS_BETWEEN_CHECKS = 99
        build, seed = model.build_criterion, samples.hash_key(0, 0, 2, 1)

        class Bad(nn.Module):
            def __init__(self, *args: object) -> None:
                super().__init__()
                self.criterion = build(*args)

            def forward(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
                loss, count = self.criterion(outputs, targets)
                return loss * (float("nan") if torch.initial_seed() == seed else 1), count

        model.build_criterion = main.build_criterion = Bad

    out = f"{folder}/run"
    patch = recorded(f"{folder}/whole", bad)
    statuses = run(
        *(2, "--data", data, "--output-dir", out, *words), patch=patch, output=f"{folder}/bad"
    )
    error = Path(f"{folder}/bad.err").read_text()
    said = [error]
    for name in "earlier", "last":
        *begin, step, folder_flag, at, _, _ = shlex.split(
            re.search(r"\./launch\.sh .*", said[-1])[0]
        )
        assert begin == ["./launch.sh", "-m", "ddpkit.replay"]
        patch, output = recorded(f"{folder}/{name}", bad), f"{folder}/{name}.said"
        assert 2 in run(2, step, folder_flag, at, script=REPLAY, patch=patch, output=output)
        said.append(Path(f"{output}.err").read_text())
    return {
        "statuses": statuses,
        "error": error,
        "earlier": said[1],
        "last": said[2],
        "whole": found(f"{folder}/whole", 2),
        "found": found(f"{folder}/last", 2),
    }
