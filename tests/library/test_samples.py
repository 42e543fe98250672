"""Which samples a rank takes, with which random numbers, and what a sample may be."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from generated import refusal
from PIL import Image
from test_checkpoints import whole
from test_reading import failing
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from ddpkit import files
from ddpkit.data import loading, normalizing, samples
from ddpkit.data.format import MEAN, STD, Format
from ddpkit.errors import DiskError, UserError
from ddpkit.ranks import distributed
from ddpkit.run import checkpoint, folder


def test_seeding() -> None:
    def drawn(*key: int) -> tuple:
        samples.seed(*key)
        return samples.random.random(), np.random.rand(), torch.rand(1).item()

    first = drawn(1, 2)
    others = [
        drawn(1, 3),
        drawn(2, 1),
        drawn(1),
        drawn(1, 2, 0),
    ]
    assert first == drawn(1, 2) == drawn(np.int64(1), np.int64(2))
    assert not set(first) & {number for other in others for number in other}


class TestSampler:
    @pytest.mark.parametrize("ranks", [2, 3])
    @pytest.mark.parametrize("seen", [0, 24])
    def test_ranks_share_what_one_would_take(
        self, ranks: int, seen: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def taken(rank: int, ranks: int) -> list:
            monkeypatch.setattr(distributed, "world_size", lambda: ranks)
            monkeypatch.setattr(distributed, "rank", lambda: rank)
            sampler = loading.TrainSampler([()] * 53, 12 // ranks, 1, seed=5)
            sampler.set_epoch(3, seen)
            found = list(sampler)
            assert len(sampler) == 48 // ranks  # of the whole epoch, also in mid-epoch
            return found

        alone = taken(0, 1)
        each = 12 // ranks
        assert len(alone) == 48 - seen  # 53 are four global batches of 12, and a rest
        assert len(set(alone)) == len(alone)
        assert {key.epoch for key in alone} == {3}
        parts = [taken(rank, ranks) for rank in range(ranks)]
        for step in range(len(alone) // 12):
            mine = [part[step * each : (step + 1) * each] for part in parts]
            together = {key for part in mine for key in part}
            assert together == set(alone[step * 12 : (step + 1) * 12])

    def test_another_order(self) -> None:
        """With each seed, weights of samples and epoch; checkpoints hold what it depends on."""
        orders = set()
        held = set()
        for seed in 5, 6:
            for weights in None, [1.0] * 53, [1.0, 2.0] * 26 + [1.0]:
                sampler = loading.TrainSampler([()] * 53, 12, 1, seed, weights)
                held.add(str(sampler.order))
                for epoch in 0, 1:
                    sampler.set_epoch(epoch)
                    orders.add(tuple(key.number for key in sampler))
        assert len(held) == 6
        assert len(orders) == 12

    def test_a_batch_that_is_too_large(self) -> None:
        with refusal("loading.init", "--batch-size 4 x 1 ranks x --accumulate 3"):
            loading.TrainSampler([()] * 11, 4, 3, 0)


class Listed(torch.utils.data.Dataset):
    def __init__(self, samples: list) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple:
        return torch.zeros(3, 4, 4, dtype=torch.uint8), 0


class Returned(Listed):
    """One sample, which returns these parts."""

    def __init__(self, sample: tuple, *parts: object) -> None:
        super().__init__([sample])
        self.parts = parts

    def __getitem__(self, index: int) -> tuple:
        return self.parts


def test_fingerprints() -> None:
    def fingerprint(listed: list) -> str:
        return samples.fingerprint(Listed(listed))

    first = [("a/1.jpg", 0), ("a/2.jpg", 1)]
    assert fingerprint(first) == fingerprint([("b/1.jpg", 0), ("c/2.jpg", 1)])
    listings = [
        first,
        first[:1],
        [("a/1.jpg", 0), ("a/2.jpg", 1), ("a/3.jpg", 0)],
        first[::-1],
        [("a/1.jpg", 1), ("a/2.jpg", 1)],
    ]
    assert len({fingerprint(each) for each in listings}) == 5


class TestSamples:
    def keyed(self, dataset: object) -> samples.Seeded:
        return samples.Seeded(dataset, 2, 0)  # two classes

    @pytest.mark.parametrize(
        ("sample", "found"),
        [
            ({"image": torch.zeros(3, 4, 4), "boxes": 0}, "dict"),
            ((torch.zeros(3, 4, 4).int(), 0), "Tensor (3, 4, 4), torch.int32"),
            ((torch.zeros(3, 4, 4), "cat"), "the target is 'cat'"),
            ((torch.zeros(3, 4, 4), -1), "0 to 1"),
            ((torch.zeros(3, 4, 4), tv_tensors.Image(torch.zeros(4, 4).int())), "mask"),
        ],
    )
    def test_samples_of_other_kinds(self, sample: object, found: str) -> None:
        class Other(Listed):
            def __getitem__(self, index: int) -> object:
                return sample

        is_target = found in ("the target is 'cat'", "0 to 1")
        code = "samples.check_target" if is_target else "samples.parts"
        with refusal(code, "sample 0, a.jpg", found):
            self.keyed(Other([("a.jpg", 0)]))[samples.Key(0, 0)]

    def test_samples_as_people_have_them(self) -> None:
        """PIL images, arrays, floats as they are, more parts, dicts; masks of any of these."""
        grey = np.resize(np.array([0, 1, 255], np.uint8), (3, 4))
        pixels = torch.from_numpy(grey)
        floats = torch.randn(3, 3, 4)
        for sample, image, target in (
            ((Image.fromarray(grey), 1), pixels.expand(3, -1, -1), 1),
            ((np.stack([grey] * 5, -1), grey), pixels.expand(5, -1, -1), pixels),
            ((floats, Image.fromarray(grey), "a.jpg"), floats, pixels),
            ({"label": 1, "id": "x", "image": floats}, floats, 1),
        ):
            parts = self.keyed([sample])[samples.Key(0, 0)]
            assert torch.equal(parts[0], image)
            assert torch.equal(torch.as_tensor(parts[1]), torch.as_tensor(target))
            assert len(parts) == len(sample)

    @pytest.mark.parametrize(
        "dtype", [np.uint8, np.uint16, np.int16, np.int32, np.int64]
    )
    def test_numbers_in_masks(self, dtype: type) -> None:
        """Beyond the classes they would end a GPU's kernel, far from here."""
        image = torch.zeros(3, 2, 3)
        mask = np.array([[0, 1, 255], [1, 0, 0]], dtype)
        for wrong in (2, 254, -1, 256, -99):
            if not np.iinfo(dtype).min <= wrong <= np.iinfo(dtype).max:
                continue
            bad = np.where(np.eye(2, 3) > 0, dtype(wrong), mask)
            with refusal(
                "samples.check_mask", "sample 0, a.jpg", f" has {wrong}, ", "0 to 1"
            ):
                self.keyed(Returned(("a.jpg", 0), image, bad))[samples.Key(0, 0)]
        fine = [
            mask,
            mask.T.copy().T,
            mask[..., :1] * 0 + dtype(7),
            np.float32(mask) + 0.5,
        ]
        fine += (
            [np.where(mask == 255, dtype(-100), mask)] if np.iinfo(dtype).min else []
        )
        for target in fine:  # another shape is no mask
            self.keyed(Returned(("a.jpg", 0), image, target))[samples.Key(0, 0)]

    def test_random_numbers(self) -> None:
        """They depend on seed, epoch and sample, and on nothing else."""

        class Noise(Listed):
            def __getitem__(self, index: int) -> tuple:
                return torch.rand(3, 4, 4), 0

        sets = [samples.Seeded(Noise([()] * 2), 2, seed) for seed in (0, 1)]
        keys = [samples.Key(epoch, index) for epoch in (0, 1) for index in (0, 1)]
        drawn = [samples.checksum(each[key]) for each in sets for key in keys]
        assert len(set(drawn)) == 8
        assert drawn[0] == samples.checksum(sets[0][keys[0]])

    @pytest.mark.parametrize("workers", [0, 2])
    def test_set_epoch(self, workers: int) -> None:
        """It is called once in an epoch, before any sample of that, also on resuming."""

        class Curriculum(Listed):
            level = -1
            calls = 0

            def set_epoch(self, epoch: int) -> None:
                self.level = 10 * epoch
                self.calls += 1

            def __getitem__(self, index: int) -> tuple:
                return (
                    torch.zeros(3, 4, 4, dtype=torch.uint8),
                    0,
                    self.level,
                    self.calls,
                )

        dataset = Curriculum([("a.jpg", 0)] * 24)
        loader = loading.train_loader(dataset, 4, classes=2, workers=workers)
        for turn, (epoch, seen) in enumerate([(3, 16), (4, 0), (5, 0)], start=1):
            found = [batch[2:] for batch in loader.raw(epoch, seen)]
            assert len(found) == 6 - seen // 4
            assert {level for levels, _ in found for level in levels.tolist()} == {
                10 * epoch
            }
            assert {count for _, counts in found for count in counts.tolist()} == {turn}
        seeded = self.keyed(dataset)
        for key in samples.Key(7, 0), samples.Key(0, 0, is_val=True):
            level = seeded[key][2]
            assert level == 50  # as before: to read a sample begins no epoch

    def test_images_of_several_sizes(self) -> None:
        several = [(torch.zeros(3, 4, side, dtype=torch.uint8), 0) for side in (4, 5)]
        sizes = "sample 0 has (3, 4, 4)", "sample 1 has (3, 4, 5)"
        with refusal("samples.getitems", *sizes):
            self.keyed(several).__getitems__([samples.Key(0, 0), samples.Key(0, 1)])


def test_normalized() -> None:
    """What ToTensor and Normalize make of them, channels last."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(
        0, 256, (4, 20, 30, 3), dtype=torch.uint8, generator=generator
    )
    batch = loading.Collate()(
        [(image.movedim(-1, 0), n) for n, image in enumerate(pixels)]
    )
    found, targets = normalizing.move(batch, torch.device("cpu"), Format())
    scaled = F.to_dtype(pixels.movedim(-1, 1), torch.float32, scale=True)
    expected = F.normalize(scaled, MEAN, STD)
    assert (found - expected).abs().max() < 1e-6
    assert targets.tolist() == [0, 1, 2, 3]
    assert found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """On a network disk a checkpoint is written whole or not at all."""
    monkeypatch.setattr(files, "WAITS", (1e-6, 1e-6))
    run = folder.RunFolder(tmp_path, "auto")
    state = whole(model={"w": torch.arange(999)})

    def epochs() -> list[int]:
        return [checkpoint.read(path)["epoch"] for path in run.saves()]

    def save(epoch: int, times: int, number: int) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing(getattr(os, call), times, number))
            run.add({**state, "epoch": epoch, "step": epoch}, epoch == 1)

    save(1, 0, 0)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(DiskError, match=r"last.pt: the disk does not respond"):
        save(2, 9, errno.EIO)
    with pytest.raises(UserError, match=r"last.pt: cannot be written \(No space left"):
        save(2, 9, errno.ENOSPC)
    if call == "replace":  # which is not tried again
        return
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    save(2, 2, errno.ESTALE)
    assert epochs() == [2, 1]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "check_archive", failing(open, 9, errno.EIO))
        with pytest.raises(DiskError, match=r"last.pt: the disk does not respond"):
            folder.read_newest(run.saves(), run.read)
    assert epochs() == [2, 1]


def test_a_checksum_is_made_once() -> None:
    """Of the same list; not of another, or of one that has grown."""

    class Samples(list):
        reads = 0

        def __iter__(self) -> Iterator:
            self.reads += 1
            return super().__iter__()

    class Images:
        samples = Samples([("a.png", 0), ("b.png", 1)])

        def __len__(self) -> int:
            return len(self.samples)

    dataset = Images()
    first = samples.fingerprint(dataset)
    assert samples.fingerprint(dataset) == first
    assert dataset.samples.reads == 1
    dataset.samples.append(("c.png", 0))
    second = samples.fingerprint(dataset)
    dataset.samples = [
        ("a.png", 0),
        ("b.png", 0),
        ("c.png", 0),
    ]
    assert len({first, second, samples.fingerprint(dataset)}) == 3
