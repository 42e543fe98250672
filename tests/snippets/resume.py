"""Runs that are killed after a step, started again, and compared with one that went on."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from digest import digest
from forked import nothing, run

import ddpkit
from ddpkit import files
from ddpkit.data import samples
from ddpkit.ranks import process, replicas
from ddpkit.run.loop import Run

Patch = Callable[[], object]


def killed_after(step: int, more: Patch = nothing) -> Patch:
    def patch() -> None:
        more()
        end_step = Run.end_step

        def patched(self: Run) -> None:
            end_step(self)
            if self.step == step:
                os.kill(os.getpid(), signal.SIGKILL)

        Run.end_step = patched

    return patch


class Runs:
    """Runs on the same data with the same flags, each in a folder of its own in `folder`."""

    def __init__(self, data: str, folder: str, ranks: int, words: list) -> None:
        self.data, self.folder, self.ranks, self.words = data, folder, ranks, words

    def result(
        self, name: str, *more: object, stop: int | Sequence[int] = (), spoil: Patch = nothing
    ) -> str:
        """The digest of a run, which is killed after each step in `stop` and started again."""
        out = f"{self.folder}/{name}"
        flags = ["--data", self.data, "--output-dir", out, *self.words, *more]
        options = {"output": f"{out}.said", "draws": False}
        for step in [stop] if isinstance(stop, int) else stop:
            killed = run(self.ranks, *flags, patch=killed_after(step, spoil), **options)
            assert killed == [-9] * self.ranks
        done = run(self.ranks, *flags, patch=spoil, **options)
        assert done == [0] * self.ranks
        return digest(out)


def at_any_step(data: str, folder: str, *words: object) -> dict:
    def unkeyed() -> None:
        numbers = iter(range(10**6))
        key = samples.hash_key
        samples.hash_key = lambda *_: key(next(numbers))

    result = Runs(data, folder, 2, list(words)).result
    every3 = ("--save-every", 3)
    return {
        "whole": result("whole"),
        "intervals": [result(f"every{n}", "--save-every", n) for n in (1, 4)],
        "stops": result("stops", *every3, stop=(1, 3, 6, 10)),
        "unkeyed": [
            result("unkeyed", spoil=unkeyed),
            result("unkeyed9", *every3, stop=9, spoil=unkeyed),
        ],
    }


def of_three_ranks(data: str, folder: str, *words: object) -> dict:
    def unsettled() -> None:
        replicas._settle_buckets = lambda *_: None

    result = Runs(data, folder, 3, list(words)).result
    each = ("--save-every", 2)
    return {
        "settled": [result("whole"), result("stop", *each, stop=2)],
        "unsettled": [
            result("whole2", spoil=unsettled),
            result("stop2", *each, stop=2, spoil=unsettled),
        ],
    }


def on_fewer_ranks(data: str, folder: str, *words: object) -> str:
    """Two ranks are killed, one goes on with whole steps only; return what it says."""
    passes = []

    def whole_steps() -> None:
        wrap, end_step = replicas.wrap, Run.end_step

        def counting(*args: object) -> object:
            ddp_model = wrap(*args)
            ddp_model.register_forward_pre_hook(lambda *_: passes.append(1))
            return ddp_model

        def checked(self: Run) -> None:
            assert len(passes) % 2 == 0, len(passes)
            end_step(self)

        ddpkit.wrap, Run.end_step = counting, checked

    flags = ["--data", data, "--output-dir", f"{folder}/run", *words, "--save-every", 2]
    killed = run(2, *flags, "--batch-size", 4, patch=killed_after(8), draws=False)
    assert killed == [-9, -9]
    accumulating = ["--batch-size", 3, "--accumulate", 2]
    said = f"{folder}/said"
    options = {"output": said, "draws": False}
    assert run(1, *flags, *accumulating, patch=whole_steps, **options) == [0]
    return Path(f"{said}.out").read_text()


def in_half_precision(data: str, folder: str, *words: object) -> dict:
    result = Runs(data, folder, 2, list(words)).result
    return {
        "whole": result("whole"),
        "stop": result("stop", "--save-every", 1, stop=4),
        "bf16": result("bf16", "--amp", "bf16"),
        "off": result("off", "--amp", "off"),
    }


def in_mid_epoch(data: str, folder: str, *words: object) -> dict:
    result = Runs(data, folder, 2, list(words)).result
    return {"whole": result("whole"), "stop": result("stop", "--save-every", 1, stop=2)}


def after_a_renaming(data: str, folder: str, *words: object) -> list[str]:
    """What runs say that are killed in mid-epoch and go on once a training image has a new name.

    The second has a checkpoint that does not know its training set; the third changes nothing.
    """
    found = []
    for name in "renamed", "unknown", "same":
        out = Path(folder, name)
        flags = ["--data", data, "--output-dir", out, *words, "--save-every", 1]
        assert run(2, *flags, patch=killed_after(2), draws=False) == [-9, -9]
        image = sorted(Path(data, "train").rglob("*.jpg"))[0]
        if name == "unknown":
            state = torch.load(out / "last.pt")
            del state["training_set"]
            torch.save(state, out / "last.pt")
        if name != "same":
            image.rename(image.with_stem(f"z{image.stem}"))
        assert run(2, *flags, output=f"{out}.said", draws=False) == [0, 0]
        found.append(Path(f"{out}.said.out").read_text())
    return found


def with_other_data(data: str, other: str, folder: str, *words: object) -> list:
    """Statuses of two ranks of which the second has other data, and what they say on stderr."""

    def patch() -> None:
        if os.environ["RANK"] == "1":
            sys.argv[sys.argv.index("--data") + 1] = other

    flags = ["--data", data, "--output-dir", f"{folder}/out", *words]
    statuses = run(2, *flags, patch=patch, output=f"{folder}/said", draws=False)
    return [statuses, Path(f"{folder}/said.err").read_text()]


def on_a_dead_disk(data: str, folder: str, *words: object) -> list:
    """Statuses of two ranks whose loader workers cannot read, and what they say on stderr."""

    def patch() -> None:
        def fail(path: Path | str) -> bytes:
            return files.retried(path, stale, path)

        def stale(path: Path | str) -> bytes:
            raise OSError(116, "Stale file handle", str(path))

        def start(worker: int) -> None:
            files.read, files.WAITS = fail, (0,)
            start_worker(worker)

        start_worker, process.start_worker = process.start_worker, start

    flags = ["--data", data, "--output-dir", f"{folder}/out", *words, "--workers", 1]
    statuses = run(2, *flags, patch=patch, output=f"{folder}/said", draws=False)
    return [statuses, Path(f"{folder}/said.err").read_text()]
