"""Three ranks of which some are held up, in another way in each epoch."""

import json
import os
import time
from pathlib import Path

import torch
from forked import run

from engine.data import datasets
from engine.data.loading import TrainSampler
from engine.ranks import distributed, replicas
from engine.run.reporting import Reporter

SECONDS = 0.08  # of the others' forward pass it is several times as much, even on a busy machine
# In which epoch what is held up on which ranks.
PLAN = [
    ("forward", {2}),
    ("forward", {0, 1, 2}),
    ("backward", {0}),
    ("images", {1}),
    ("between passes", {0, 1}),
    ("a quarter", {1}),
    ("forward", {0}),
]


def planned(out: str) -> None:
    """Hold up this rank according to PLAN; leave rank<n>.json: collectives for an epoch's speed."""
    rank, epoch, passes = int(os.environ["RANK"]), 0, 0
    set_epoch, speed = TrainSampler.set_epoch, Reporter.speed
    forward, backward = replicas.DistributedDataParallel.forward, torch.Tensor.backward
    open_image, counts = datasets.open_image, []

    def hold(what: str) -> None:
        if (what, rank) in ((PLAN[epoch][0], each) for each in PLAN[epoch][1]):
            time.sleep(SECONDS)

    def begin(self: TrainSampler, now: int, seen: int = 0) -> None:
        nonlocal epoch, passes
        epoch, passes = now, 0
        set_epoch(self, now, seen)

    def slow_forward(self: torch.nn.Module, *args: object) -> object:
        nonlocal passes
        passes += 1
        hold("forward")
        if PLAN[epoch][0] == "between passes":
            distributed.barrier()  # in which one waits for the others, as in SyncBatchNorm
        if passes % 4 == 0:
            for _ in range(4):
                hold("a quarter")
        return forward(self, *args)

    def slow_backward(*args: torch.Tensor) -> None:
        hold("backward")
        backward(*args)
        hold("between passes")

    def slow_read(*args: object) -> torch.Tensor:
        hold("images")
        return open_image(*args)

    def counted(self: Reporter) -> dict[str, float]:
        before = distributed.collectives()
        found = speed(self)
        counts.append(distributed.collectives() - before)
        Path(f"{out}/rank{rank}.json").write_text(json.dumps(counts))
        return found

    TrainSampler.set_epoch, Reporter.speed = begin, counted
    replicas.DistributedDataParallel.forward, torch.Tensor.backward = slow_forward, slow_backward
    datasets.open_image = slow_read


def of_plan(data: str, folder: str) -> str:
    """What a run on `data` says; its folder is `folder`/run."""
    words = ["--arch", "squeezenet1_1", "--weights", "none", "--image-size", 32, "--workers", 0]
    words += ["--batch-size", 1, "--epochs", len(PLAN), "--data", data]
    words += ["--optimizer", "sgd", "--lr", 0.001, "--output-dir", f"{folder}/run"]

    def patch() -> None:
        planned(folder)

    statuses = run(3, *words, output=f"{folder}/said", patch=patch, draws=False)
    assert statuses == [0, 0, 0], Path(f"{folder}/said.err").read_text()
    return Path(f"{folder}/said.out").read_text()
