"""Many ranks on few cores, and many epochs: memory, descriptors and threads stay as they are."""

import os
import random
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from generated import SMALL, children, rows
from launcher import Launch
from ranks import draw_nothing
from setting import Setting

EPOCHS = 300
WARM = 40  # epochs, after which nothing grows
MARGIN = 24  # MiB of resident memory, of allocators' luck
RANKS = 8
FLAGS = [SMALL["classification"], "--image-size", 32, "--batch-size", 2]


def launch(setting: Setting, folder: Path, words: list, ranks: int) -> Launch:
    project = setting.projects["classification"]
    words = [FLAGS, words, "--output-dir", folder / "out"]
    said = folder / "said"
    return Launch(project.folder, words, said, draw_nothing, NPROC=str(ranks))


def many_ranks(chance: random.Random, folder: Path, setting: Setting) -> str:
    """As many as a node has GPUs; with loader workers."""
    data = setting.projects["classification"].draw(folder / "set", 70, 21)
    run = launch(setting, folder, ["--workers", 1, "--data", data], RANKS)
    run.end(500).ok()
    (row,) = rows(folder / "out")
    assert row["step"] == str(70 // (2 * RANKS)), row  # what fills no step is left out
    return f"{RANKS} ranks with a worker each"


def memory(chance: random.Random, folder: Path, setting: Setting) -> str:
    """Each rank, and the launcher, at each epoch after the first ones."""
    data = setting.projects["classification"].draw(folder / "set", 8, 4)
    workers = chance.choice([0, 1])
    words = ["--workers", workers, "--epochs", EPOCHS, "--data", data]
    run = launch(setting, folder, words, 2)
    # by process id, one of each epoch
    found: dict[int, list[Sizes]] = defaultdict(list)
    table = folder / "out" / "metrics.csv"
    seen = 0
    while run.pid in children():
        epochs = table.read_text().count("\n") - 1 if table.exists() else 0
        if epochs > seen:
            seen = epochs
            if epochs >= WARM:
                for pid in [run.pid, *run.ranks()]:
                    sizes = measure(pid)
                    if sizes:
                        found[pid].append(sizes)
        time.sleep(0.05)
    run.end(60).ok()
    assert len(rows(folder / "out")) == EPOCHS
    assert len(found) == 3, found.keys()
    growth = [grown(sizes) for sizes in found.values()]
    said = f"{EPOCHS} epochs, {workers} worker(s): {growth}"
    assert all(memory < MARGIN and others <= 0 for memory, others in growth), said
    return said


Sizes = tuple[int, int, int]  # MiB of resident memory, descriptors, threads


def measure(pid: int) -> Sizes | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:  # it has ended
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if "VmRSS" not in fields:  # it is ending
        return None
    return int(fields["VmRSS"].split()[0]) // 1024, descriptors, int(fields["Threads"])


def grown(sizes: list[Sizes]) -> tuple[int, int]:
    """Return by how much memory, and descriptors and threads, have grown.

    Of the last quarter against the first one, and the least of each: what is there for a moment,
    such as a file that is being written, is no growth.
    """
    quarter = max(1, len(sizes) // 4)
    growth = np.min(sizes[-quarter:], 0) - np.min(sizes[:quarter], 0)
    memory, descriptors, threads = growth.tolist()
    return memory, max(descriptors, threads)
