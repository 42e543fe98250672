"""The same pictures and the same numbers on any number of ranks and of loader workers."""

import json
from pathlib import Path

import torch
from conftest import Project
from test_runs import SAME_FOR_BOTH, flags

# Prints, for each epoch, what each global batch of 8 holds: a checksum for each sample.
BATCHES = """
import argparse, json, random, sys, zlib
from pathlib import Path
import numpy as np, torch
import dataset
from engine import distributed, loading, seeding

distributed.setup()
args = argparse.Namespace(data=Path(sys.argv[1]), image_size=32, seed=3)
data, _, _ = dataset.build_dataset(args)

def sums(ranks, batch_size, accumulate, workers):
    args.batch_size, args.accumulate, args.workers = batch_size, accumulate, workers

    class Noisy(torch.utils.data.Dataset):  # what an owner may write
        def __len__(self):
            return len(data)
        def __getitem__(self, index):
            noise = [random.random(), np.random.rand(), torch.rand(1).item()]
            return (*data[index], torch.tensor(noise, dtype=torch.float64))

    distributed.world_size = lambda: ranks
    found = [{}, {}]
    for rank in range(ranks):
        distributed.rank = lambda: rank
        loader = loading.build_train_loader(Noisy(), args)
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            for i, batch in enumerate(loader):
                step = found[epoch].setdefault(i // accumulate, [])
                step += [zlib.crc32(b"".join(part.numpy().tobytes() for part in sample))
                         for sample in zip(*batch)]
    return [[sorted(step) for step in epoch.values()] for epoch in found]

shapes = [(1, 8, 1, 0), (2, 4, 1, 1), (4, 1, 2, 0), (1, 2, 4, 3)]
out = [sums(*shape) for shape in shapes]
seeding.seed = lambda *key: None
print(json.dumps([out, sums(1, 8, 1, 0)]))
"""


def test_same_pictures_whatever_the_machine(project: Project, data: Path) -> None:
    """On 1, 2 and 4 ranks, with 0 to 3 workers; not without the seeds for each sample."""
    (first, *others), unkeyed = json.loads(project.python(BATCHES, data))
    for epoch in first:
        assert [len(step) for step in epoch] == [8] * 6  # of 53 pictures
    assert first[0] != first[1]
    assert all(other == first for other in others)
    assert unkeyed != first


@SAME_FOR_BOTH
def test_workers_do_not_change_what_is_learnt(project: Project, data: Path, tmp_path: Path) -> None:
    """With dropout, whose random numbers loader workers must not share or shift."""
    weights = []
    for workers in (0, 2):
        out = tmp_path / str(workers)
        more = ["--arch", "squeezenet1_1", "--workers", workers]
        project.alone(*flags(data, out, *more)).ok()
        weights.append(torch.load(out / "last.pt", weights_only=True)["model"])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@SAME_FOR_BOTH
def test_seeds_of_different_lengths_differ(project: Project) -> None:
    code = "from engine.seeding import number as n; print(n(1, 2), n(1, 2), n(1, 2, 0), n(2, 1))"
    same, again, longer, turned = project.python(code).split()
    assert same == again
    assert len({same, longer, turned}) == 3
