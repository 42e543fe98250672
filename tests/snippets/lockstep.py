"""Ranks that wait for each other, and a person who asks where they are."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from forked import wait

from engine.ranks import distributed
from engine.run.folder import RunFolder
from snippets.faulty import Runs, after_step, wait_for


def asked(data: str, folder: str, *words: object) -> dict:
    """While rank 1 holds up the others: the answers to a person; then the run goes on."""
    held, free = Path(folder, "held"), Path(folder, "free")

    def hold() -> None:
        held.touch()
        wait_for(free.exists)

    def leftover() -> None:
        find = RunFolder.find_checkpoint

        def patched(self: RunFolder) -> object:
            if distributed.is_rank_zero():
                self.path.mkdir(parents=True, exist_ok=True)
                (self.path / ".where").write_text(".where-of a command that was killed")
                (self.path / ".where-0").touch()
            return find(self)

        RunFolder.find_checkpoint = patched
        after_step(3, hold, rank=1)()

    runs = Runs(data, folder, words)
    pids = runs.start("out", patch=leftover)
    wait_for(held.exists)
    command = [sys.executable, "-m", "engine.ranks.where", f"{folder}/out"]
    answers = [
        subprocess.run(command, capture_output=True, text=True, timeout=60).stdout for _ in range(2)
    ]
    free.touch()
    statuses = wait(pids)
    code = "from engine.ranks import where; where.ANSWER_SECONDS = 1; exit(where.main())"
    command[1:3] = ["-c", code]
    late = subprocess.run(command, capture_output=True, text=True, timeout=60)
    left = [path.name for path in Path(folder, "out").glob(".where*")]
    return {
        "answers": answers,
        "statuses": statuses,
        "err": runs.said("out")[1],
        "late": [late.returncode, late.stderr],
        "left": left,
    }


def killed(data: str, folder: str, *words: object) -> list:
    act = after_step(3, lambda: os.kill(os.getpid(), signal.SIGKILL), rank=1)
    return Runs(data, folder, words).train("killed", "--dist-timeout", 5, patch=act)
