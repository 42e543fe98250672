"""Balanced batches, and runs that count classes first."""

import shutil
import zlib
from pathlib import Path

from digest import digest
from forked import run

import dataset
from engine.data import counts, loading
from engine.ranks import distributed
from snippets.resume import killed_after


def checksums(data: str, folder: str) -> list:
    """For each way to deal them, for each global batch of 8, (index, checksum) of each sample."""
    distributed.setup()
    train_set, _, classes = dataset.build_dataset(Path(data), 32)
    found = counts.count_classes(train_set, classes, Path(folder))

    class Numbered:
        def __len__(self) -> int:
            return len(train_set)

        def __getitem__(self, index: int) -> tuple:
            return (*train_set[index], index)

    def dealt(ranks: int, batch_size: int, accumulate: int, workers: int) -> list:
        options = loading.Options(workers, prefetch=2, pin_memory=False, seed=3)
        distributed.world_size = lambda: ranks
        steps: dict[int, list] = {}
        for rank in range(ranks):
            distributed.rank = lambda rank=rank: rank
            shape = batch_size, accumulate, options
            loader = loading.build_train_loader(Numbered(), len(classes), *shape, counts=found)
            loader.sampler.set_epoch(1, 8)
            for i, batch in enumerate(loader):
                for image, _, index in zip(*batch, strict=True):
                    checksum = zlib.crc32(image.numpy().tobytes())
                    steps.setdefault(i // accumulate, []).append((int(index), checksum))
        return [sorted(step) for step in steps.values()]

    return [dealt(*shape) for shape in ((1, 8, 1, 0), (2, 4, 1, 1), (2, 1, 4, 2), (4, 2, 1, 0))]


def counts_on_ranks(data: str) -> list:
    distributed.setup()
    train_set, _, _ = dataset.build_dataset(Path(data), 32)
    rows = []
    for ranks in (1, 2, 3):
        distributed.world_size = lambda ranks=ranks: ranks
        indices = range(len(train_set))
        parts = [counts._read(train_set, indices[r::ranks], r % 2 == 0) for r in range(ranks)]
        distributed.gather_objects = lambda _, parts=parts: parts
        rows.append(counts.read(train_set, indices, True).tolist())
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
        import masks  # of a project for segmentation

        masks.MOST_READ.update(training=1, validation=1)
        look_up = counts._look_up

        def spoiling(*args: object) -> tuple:
            Path(data, "train", "masks", name).write_bytes(b"no image")
            return look_up(*args)

        counts._look_up = spoiling

    flags = ["--data", data, "--output-dir", f"{folder}/out", *words, "--class-weights", "auto"]
    said = f"{folder}/said"
    return [run(2, *flags, patch=few, output=said), Path(f"{said}.err").read_text()]
