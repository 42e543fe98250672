"""Runs that count classes first."""

import shutil
from pathlib import Path

from digest import digest
from forked import run

from ddpkit.data import class_counts
from ddpkit.ranks import distributed
from snippets.data import build
from snippets.resume import killed_after


def counts_on_ranks(data: str) -> list:
    train_set, _, classes = build(data, 32)
    rows = []
    for ranks in (1, 2, 3):
        distributed.world_size = lambda ranks=ranks: ranks
        parts: list = []
        distributed.gather_objects = lambda part, parts=parts: parts.append(part) or parts
        for rank in range(ranks):
            distributed.rank = lambda rank=rank: rank
            found = class_counts.count_classes(train_set, classes)  # with those of ranks before
        rows.append(found.tolist())
    return rows


def resumed(data: str, folder: str, *words: object) -> dict:
    """A whole run, and one killed in mid-epoch that goes on, or goes on with another --seed."""

    def train(name: str, *more: object, **options: object) -> list[int]:
        flags = ["--data", data, "--output-dir", f"{folder}/{name}", *words, *more]
        return run(2, *flags, output=f"{folder}/{name}.said", draws=False, **options)

    statuses = train("whole")
    killed = train("killed", "--save-every", 2, patch=killed_after(3))
    assert killed == [-9, -9]
    shutil.copytree(f"{folder}/killed", f"{folder}/changed")
    statuses += train("killed") + train("changed", "--seed", 1)
    return {
        "statuses": statuses,
        "digests": [digest(f"{folder}/{name}") for name in ("whole", "killed")],
        "said": [Path(folder, f"{name}.said.out").read_text() for name in ("killed", "changed")],
    }


def broken(data: str, folder: str, name: str, *words: object) -> list:
    """A mask that only the pass over all masks meets: the statuses, and what is said."""

    def few() -> None:
        class_counts.MOST_PIXELS = 1
        count = class_counts.count_classes

        def spoiling(*args: object) -> object:
            Path(data, "train", "masks", name).write_bytes(b"no image")
            return count(*args)

        class_counts.count_classes = spoiling

    flags = ["--data", data, "--output-dir", f"{folder}/out", *words, "--class-weights", "auto"]
    said = f"{folder}/said"
    return [run(2, *flags, patch=few, output=said), Path(f"{said}.err").read_text()]
