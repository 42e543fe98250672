"""Ranks that wait for each other, and a person who asks where they are."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from forked import wait

from engine.ranks import distributed
from engine.run.folder import Folder
from snippets.faulty import Runs, after_step, wait_for


def asked(data: str, folder: str, *words: object) -> dict:
    """While rank 1 holds up the others: the answers to two people; then the run goes on."""
    held, free = Path(folder, "held"), Path(folder, "free")

    def hold() -> None:
        held.touch()
        wait_for(free.exists)

    def leftover() -> None:
        find = Folder.find_checkpoint

        def patched(self: Folder) -> object:
            self.path.mkdir(parents=True, exist_ok=True)
            for name in (".where-0", ".where-0.txt"):  # of a command that was killed
                if distributed.is_rank_zero():
                    (self.path / name).touch()
            return find(self)

        Folder.find_checkpoint = patched
        after_step(3, hold, rank=1)()

    runs = Runs(data, folder, words)
    pids = runs.start("out", patch=leftover)
    wait_for(held.exists)
    command = [sys.executable, "-m", "engine.ranks.where", f"{folder}/out"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [each.communicate(timeout=60)[0] for each in both]
    answers.append(subprocess.run(command, capture_output=True, text=True, timeout=60).stdout)
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


def asked_in_a_hang(data: str, folder: str, *words: object) -> dict:
    """A person asks before the ranks have noticed it."""
    held = Path(folder, "held")

    def hold() -> None:
        held.touch()
        wait_for((Path(folder) / "never").exists)

    runs = Runs(data, folder, words)
    pids = runs.start("out", "--dist-timeout", 10, patch=after_step(3, hold, rank=1))
    wait_for(held.exists)
    command = [sys.executable, "-m", "engine.ranks.where", f"{folder}/out"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    return {"answer": answer, "statuses": wait(pids), "err": runs.said("out")[1]}


def killed(data: str, folder: str, *words: object) -> list:
    act = after_step(3, lambda: os.kill(os.getpid(), signal.SIGKILL), rank=1)
    return Runs(data, folder, words).train("killed", "--dist-timeout", 5, patch=act)
