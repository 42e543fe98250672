"""What a training step does, in which portions, and how fast its pictures come."""

import json
import math
import os
from pathlib import Path

import torch
from forked import run

from engine.run import progress
from engine.run.progress import Run


def profiled() -> None:
    """Leave rank<n>.json: how often each thing was done in three optimizer steps."""
    progress.SECONDS_BETWEEN_CHECKS = (
        math.inf
    )  # the loss is read by time, and this machine may be slow
    end_step = Run.end_step
    profile = torch.profiler.profile()

    def patched(self: Run) -> None:
        end_step(self)
        if self.step == 2:
            profile.start()
        elif self.step == 5:
            profile.stop()
            counts = {event.key: event.count for event in profile.key_averages()}
            path = Path(self.folder.path, f"rank{os.environ['RANK']}.json")
            path.write_text(json.dumps(counts))

    Run.end_step = patched


def profiles(data: str, folder: str) -> None:
    """With and without accumulation."""
    flags = ["--data", data, "--weights", "none", "--epochs", 1, "--image-size", 32, "--workers", 1]
    # AdamW reads its count of steps, which lies on the CPU here.
    flags += ["--clip-grad-norm", 1, "--optimizer", "sgd"]
    for accumulate, batch_size in (1, 4), (2, 2):
        more = "--accumulate", accumulate, "--batch-size", batch_size
        out = "--output-dir", f"{folder}/{accumulate}"
        assert run(2, *flags, *more, *out, patch=profiled, draws=False) == [0, 0]


def portions(data: str, folder: str) -> None:
    """Train from the same weights in other portions; without dropout and BatchNorm."""

    def plain() -> None:
        torch.nn.Dropout.forward = lambda self, x: x

    flags = ["--data", data, "--weights", "none", "--image-size", 64, "--epochs", 1, "--workers", 0]
    flags += ["--warmup-epochs", 0, "--arch", "squeezenet1_1", "--optimizer", "sgd"]
    flags += ["--weight-decay", 0, "--momentum", 0]
    clipped = ("--clip-grad-norm", 1e-6, "--lr", 1)
    for name, ranks, batch_size, accumulate, *rest in (
        ("start", 1, 48, 1, "--lr", 0),
        ("one", 1, 48, 1),
        ("four", 1, 12, 4),
        ("ranks", 2, 12, 2),
        ("twice", 1, 48, 1, "--lr", 0.02),
        ("clipped", 2, 2, 2, *clipped),
        ("bf16", 2, 2, 2, *clipped, "--amp", "bf16"),
    ):
        words = "--batch-size", batch_size, "--accumulate", accumulate, "--lr", 0.01, *rest
        out = "--output-dir", f"{folder}/{name}"
        assert run(ranks, *flags, *words, *out, patch=plain, draws=False) == [0] * ranks
