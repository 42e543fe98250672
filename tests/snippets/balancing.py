"""Balanced batches, and runs that count classes first."""

import shutil
import zlib
from pathlib import Path

import torch
from digest import digest
from forked import run
from torch.utils.data import DataLoader

import ddpkit
from ddpkit.data import class_counts
from ddpkit.ranks import distributed
from snippets.data import build
from snippets.resume import killed_after


def checksums(data: str) -> list:
    """For each way to deal them, for each global batch of 8, (index, checksum) of each sample."""
    train_set, _, classes = build(data, 32)

    class Numbered:
        count_labels = staticmethod(train_set.count_labels)

        def __len__(self) -> int:
            return len(train_set)

        def __getitem__(self, index: int) -> tuple:
            return (*train_set[index], index)

    numbered = Numbered()

    def dealt(ranks: int, batch_size: int, accumulate: int, workers: int) -> list:
        distributed.world_size = lambda: ranks
        steps: dict[int, list] = {}
        for rank in range(ranks):
            distributed.rank = lambda rank=rank: rank
            shape, options = (batch_size, accumulate, 3), {"balanced": True, "classes": classes}
            sampler = ddpkit.TrainSampler(numbered, *shape, **options)
            sampler.set_epoch(1, 8)
            loader = DataLoader(
                ddpkit.Seeded(numbered, classes, 3),
                batch_size,
                sampler=sampler,
                collate_fn=ddpkit.Collate(),
                **ddpkit.workers(workers, torch.device("cpu")),
            )
            for i, batch in enumerate(loader):
                for image, _, index in zip(*batch, strict=True):
                    checksum = zlib.crc32(image.numpy().tobytes())
                    steps.setdefault(i // accumulate, []).append((int(index), checksum))
        return [sorted(step) for step in steps.values()]

    counts = class_counts.count_classes(numbered, classes)  # on one rank
    class_counts.count_classes = lambda *_: counts
    return [dealt(*shape) for shape in ((1, 8, 1, 0), (2, 4, 1, 1), (2, 1, 4, 2), (4, 2, 1, 0))]


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
    """A whole run, and one killed in mid-epoch that goes on, or goes on without --sampler."""

    def train(name: str, *more: object, **options: object) -> list[int]:
        flags = ["--data", data, "--output-dir", f"{folder}/{name}", *words, *more]
        return run(2, *flags, output=f"{folder}/{name}.said", draws=False, **options)

    balanced = "--sampler", "balanced"
    statuses = train("whole", *balanced)
    killed = train("killed", *balanced, "--save-every", 2, patch=killed_after(3))
    assert killed == [-9, -9]
    shutil.copytree(f"{folder}/killed", f"{folder}/changed")
    statuses += train("killed", *balanced) + train("changed")
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
