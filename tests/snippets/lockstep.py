"""Ranks that wait for each other, and a person who asks where they are."""

import os
import signal
from pathlib import Path

from forked import wait

from snippets.faulty import Runs, after_step, wait_for


def asked(data: str, folder: str, *words: object) -> dict:
    """While rank 1 holds up the others, a person asks; then the run goes on."""
    held, free, question = (Path(folder, name) for name in ("held", "free", "out/.where"))

    def hold() -> None:
        held.touch()
        wait_for(free.exists)

    runs = Runs(data, folder, words)
    pids = runs.start("out", patch=after_step(3, hold, rank=1))
    wait_for(held.exists)
    while "in collective" not in runs.said("out")[1]:  # rank 0 may still be on its way there
        question.touch()
        wait_for(lambda: not question.exists())
        wait_for(
            lambda: runs.said("out")[1].count("\nrank 1, ") == runs.said("out")[1].count("asked")
        )
    free.touch()
    return {"statuses": wait(pids), "err": runs.said("out")[1], "left": question.exists()}


def killed(data: str, folder: str, *words: object) -> list:
    act = after_step(3, lambda: os.kill(os.getpid(), signal.SIGKILL), rank=1)
    return Runs(data, folder, words).train("killed", "--dist-timeout", 5, patch=act)
