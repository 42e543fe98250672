"""Statuses of ranks that are killed."""

import os
import signal
from pathlib import Path

from forked import run

from snippets.faulty import after_step


def killed(data: str, folder: str, *words: object) -> dict:
    """Runs of three ranks without a launcher: statuses and what they say if one is killed."""

    def act() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def train(rank: int, step: int) -> list:
        output = f"{folder}/{rank}"
        flags = ["--data", data, *words, "--output-dir", f"{output}.out-dir"]
        statuses = run(3, *flags, patch=after_step(step, act, rank), output=output)
        return [statuses, Path(f"{output}.err").read_text()]

    return {str(rank): train(rank, 2) for rank in (0, 1)}
