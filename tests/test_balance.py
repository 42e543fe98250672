"""Classes of unequal size: counts, --class-weights, --sampler balanced; and --overfit."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from digest import digest
from PIL import Image
from running import SAME_FOR_BOTH, Project, flags, rows, small

from engine.data import balance, overfit, samples, seeding
from engine.data.counts import CACHE, Counts, count_classes
from engine.data.loading import TrainSampler
from engine.errors import UserError
from engine.ranks import distributed

MASKS = pytest.mark.parametrize("project", ["segmentation"], indirect=True)


def counts_of(labels: list[list[int]], classes: int) -> Counts:
    """Of samples that each have some classes."""
    pairs = [(i, label) for i, each in enumerate(labels) for label in each]
    found = np.array(pairs, np.int64).reshape(-1, 2)
    names = [f"class{number}" for number in range(classes)]
    return Counts(found[:, 0].copy(), found[:, 1].copy(), np.ones(len(pairs), np.int64), names)


def draws(labels: list[list[int]], classes: int, epoch: int = 0, seed: int = 0) -> np.ndarray:
    sampler = TrainSampler(len(labels), 1, seed, counts_of(labels, classes))
    sampler.set_epoch(epoch)
    return np.array([draw for _, draw in sampler])


class TestBalancedSampler:
    @pytest.mark.parametrize("sizes", [(5, 200), (1, 1, 98), (40, 0, 7, 6), (3, 3), (1000, 1)])
    def test_each_class_and_each_of_its_images_equally_often(self, sizes: tuple) -> None:
        labels = [[label] for label, size in enumerate(sizes) for _ in range(size)]
        total = len(labels)
        for epoch in range(3):
            found = draws(labels, len(sizes), epoch)
            assert len(found) == len({*found.tolist()}) == total
            times = np.bincount(found % total, minlength=total)
            of_class = np.split(times, np.cumsum(sizes)[:-1])
            present = [each for each in of_class if len(each)]
            assert np.ptp([each.sum() for each in present]) <= 1
            assert max(np.ptp(each) for each in present) <= 1
            for image in np.flatnonzero(times):  # numbered from 0 without a gap
                repeats = sorted(found[found % total == image] // total)
                assert repeats == [*range(times[image])]

    def test_images_of_several_classes(self) -> None:
        """Background is everywhere, 30 images have cracks, 2 have dust, too; 5 have nothing."""
        labels = [[0, 1, 2]] * 2 + [[0, 1]] * 28 + [[0]] * 65 + [[]] * 5
        found = draws(labels, 4) % 100
        times = np.bincount(found, minlength=100)
        assert times.sum() == 100
        assert times[95:].sum() == 0
        assert 33 <= times[:2].sum() <= 33 + 2 * 3  # all of dust, and some for the other two
        assert times[:30].sum() >= 66

    def test_orders(self) -> None:
        labels = [[0]] * 6 + [[1]] * 60
        orders = {tuple(draws(labels, 2, *key)) for key in ((0, 1), (1, 1), (0, 2), (0, 1))}
        assert len(orders) == 3
        mixed = draws(labels, 2) % 66 < 6
        assert 8 < mixed[:33].sum() < 25  # not one class after the other

    def test_checkpoints_tell_orders_apart(self) -> None:
        two, one = (counts_of([[0]] * n + [[1]] * (4 - n), 2) for n in (2, 1))
        found = [TrainSampler(4, 2, 0, counts).order["sampler"] for counts in (None, two, one)]
        assert found[0] == "shuffle"
        assert len({*found}) == 3


class Random:
    """Samples of random numbers, one file each, with a label."""

    def __init__(self, labels: list[int], folder: Path) -> None:
        self.labels = labels
        self.files = [folder / f"{number}" for number in range(len(labels))]
        for file, label in zip(self.files, labels, strict=True):
            file.write_text(str(label))
        self.read = 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple:
        return torch.rand(3), self.labels[index]

    def count_labels(self, index: int) -> dict[int, int]:
        self.read += 1
        return {int(self.files[index].read_text()): 10}

    def label_sources(self) -> list[str]:
        return [str(file) for file in self.files]


def test_a_repeat_is_augmented_anew(tmp_path: Path) -> None:
    """And what comes once, as ever."""
    data = Random([0, 1, 0, 1], tmp_path)
    keyed = samples.KeyedDataset(data, 2, 7, 0, is_any_size=False)
    (first, _), (again, _), (other, _) = keyed.__getitems__([(2, 1), (2, 1 + 4), (2, 3)])
    seeding.seed(7, 2, 1)
    assert torch.equal(first, torch.rand(3))
    assert not torch.equal(first, again)
    assert not torch.equal(other, again)
    assert keyed.name(1 + 4) == "sample 1"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of one without a store."""
    monkeypatch.setattr(distributed, "gather_objects", lambda value: [value])
    monkeypatch.setattr(distributed, "from_rank_zero", lambda function, *args: function(*args))


@pytest.mark.usefixtures("alone")
class TestCounts:
    def test_what_is_kept(self, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        """Read once; again if a file, the classes or the list changes, or the cache is damaged."""
        folder = tmp_path / "files"
        folder.mkdir()
        data, out = Random([0, 1, 1, 2], folder), tmp_path / "new" / "out"
        names = ["a", "b", "c"]

        def reads(names: list[str] = names) -> int:
            data.read = 0
            found = count_classes(data, names, out)
            assert found.of_classes()[:3].tolist() == [10 * data.labels.count(n) for n in range(3)]
            assert ("from" in found.origin) == (data.read == 0)
            return data.read

        assert [reads(), reads()] == [4, 0]
        assert [reads([*names, "d"]), reads()] == [4, 4]
        data.files[0].write_text("1")
        data.labels[0] = 1
        assert [reads(), reads()] == [4, 0]
        cache = out / CACHE
        content = bytearray(cache.read_bytes())
        content[len(content) // 2] ^= 1
        for damaged in (content, content[:90], b"", b"text"):
            cache.write_bytes(damaged)
            assert [reads(), reads()] == [4, 0]
        shutil.rmtree(out)
        out.write_text("a file where the folder should be")
        assert [reads(), reads()] == [4, 4]
        assert not list(tmp_path.rglob("*.part"))

    def test_auto(self, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        """scikit-learn's compute_class_weight("balanced"), and 1 for what does not occur."""
        labels = [0] * 30 + [2] * 10
        counts = count_classes(Random(labels, tmp_path), ["a", "b", "c"], tmp_path)
        weights = balance.class_weights("auto", counts, counts.classes)
        assert weights == (40 / (2 * 30), 1.0, 40 / (2 * 10))
        said = capsys.readouterr().out
        assert "warning: b is in none of the training samples: weight 1" in said
        assert "weights in the loss: a 0.667, b 1, c 2; 40 samples read in " in said
        assert balance.class_weights(None, None, counts.classes) is None
        assert balance.class_weights((1.0, 2.0, 3.0), None, counts.classes) == (1.0, 2.0, 3.0)
        with pytest.raises(UserError, match="2 numbers, of the flag"):
            balance.class_weights((1.0, 2.0), None, counts.classes)

    @pytest.mark.parametrize(
        "text",
        [
            "a crack 2\nb 0.5\n",
            "\ufeff# weights\nb = .5  # rare\n\na crack = 2e0",
            "b,0.5\r\na crack,2\r\n",
            "a crack: 2\nb\t0.5",
        ],
    )
    def test_a_file(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "weights.txt"
        path.write_text(text, encoding="utf-8")
        names = ["a crack", "b"]
        assert balance.class_weights(str(path), None, names) == (2.0, 0.5)
        both = balance.class_weights(str(path), counts_of([[0], [1]], 2), names)
        assert both == (2.0, 0.5)  # with counts for --sampler balanced at hand, too

    @pytest.mark.parametrize(
        "text, words",
        [
            ("a 1", "weights.txt: no weight for b; each class needs one"),
            ("a 1\nb 2\nc 3", "weights.txt, line 3: c is no class; the classes are a, b"),
            ("a 1\nb 2\na 1", "line 3: a comes twice"),
            ("a 1\nb", "line 2: b: expected NAME WEIGHT"),
            *((f"a 1\nb {w}", f"line 2: {w} is no positive") for w in ("0", "-1", "nan", "inf")),
            ("a 1\nb 1e-60", "line 2: 1e-60 is no positive number"),  # 0 as float32
            ("a 1\nb x", "line 2: x is no positive number"),
            (None, "--class-weights .*weights.txt: neither numbers nor a file .*; use auto"),
        ],
    )
    def test_a_wrong_file(self, tmp_path: Path, text: str | None, words: str) -> None:
        path = tmp_path / "weights.txt"
        if text is not None:
            path.write_text(text)
        with pytest.raises(UserError, match=words) as found:
            balance.class_weights(str(path), None, ["a", "b"])
        assert "\n" not in str(found.value)

    def test_labels_that_are_no_classes(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="sample 2: label 7, but the classes are 0 to 1"):
            count_classes(Random([0, 1, 7], tmp_path), ["a", "b"], tmp_path)

    def test_a_data_set_that_does_not_count(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="list has no count_labels and label_sources"):
            count_classes([(1, 2)], ["a", "b"], tmp_path)


@pytest.mark.usefixtures("alone")
class TestFew:
    def test_all_classes_and_the_same_crops(self, tmp_path: Path) -> None:
        data = Random([0] * 300 + [1] * 5 + [2], tmp_path)
        data.label_sources = list  # known without a file
        train, val = overfit.choose(data, 7, 3, 8)
        assert np.bincount([val[i][1] for i in range(7)]).tolist() == [3, 3, 1]
        assert len(train) == math.ceil(overfit.MIN_STEPS * 8 / 7) * 7
        keyed = [samples.KeyedDataset(part, 3, 3, 0, is_any_size=False) for part in (train, val)]
        for key in (0, 3), (5, 3 + 7), (9, 3 + 2 * 7):
            assert torch.equal(keyed[0][key][0], keyed[1][0, 3][0])
        assert not torch.equal(keyed[1][0, 3][0], keyed[1][0, 4][0])
        with pytest.raises(UserError, match="--overfit 400: there are 306 training images"):
            overfit.choose(data, 400, 3, 8)

    def test_few_masks_are_read(self, tmp_path: Path) -> None:
        data = Random([0] * 500, tmp_path)
        overfit.choose(data, 2, 0, 4)
        assert data.read == overfit.MOST_READ


def test_the_same_batches_whatever_the_machine(
    project: Project, own_data: Path, tmp_path: Path
) -> None:
    for path in sorted(own_data.glob("train/dots/*"))[2:]:
        path.unlink()
    first, *others = project.call("balancing.checksums", own_data, tmp_path)
    assert {len(step) for step in first} == {8}
    assert all(other == first for other in others)
    drawn = [tuple(sample) for step in first for sample in step]
    assert len({index for index, _ in drawn}) < len({*drawn})  # repeats, in other crops
    one, *more = project.call("balancing.counts_on_ranks", own_data)
    assert all(rows == one for rows in more)


@MASKS
def test_stopped_and_resumed(project: Project, few: Path, tmp_path: Path) -> None:
    """The same bits; with another --sampler the epoch starts over; --eval-only reads no mask."""
    words = [*small(few), "--image-size", 32, "--class-weights", "auto"]
    found = project.call("balancing.resumed", few, tmp_path, *words)
    assert found["statuses"] == [0] * 6
    assert len({*found["digests"]}) == 1
    killed, changed = found["said"]
    assert "2 steps of the next" in killed
    assert f"; from {tmp_path / 'killed' / CACHE}" in killed
    assert "the images, --seed or --sampler have changed: the epoch starts over" in changed
    assert [row["step"] for row in rows(tmp_path / "changed")] == ["5"]
    whole = tmp_path / "whole"
    masks = [np.array(Image.open(path)).ravel() for path in few.glob("train/masks/*")]
    pixels = np.bincount(np.concatenate(masks), minlength=256)[:2]
    weights = torch.load(whole / "last.pt", weights_only=True)["args"]["class_weights"]
    assert weights == pytest.approx(tuple(pixels.sum() / (2 * pixels)), rel=1e-12)
    (whole / CACHE).unlink()
    done = project.alone(*flags(few, whole, "--eval-only"), draws=False).ok()
    loss = json.loads(done.out.splitlines()[-1])["val_loss"]
    assert loss == pytest.approx(float(rows(whole)[0]["val_loss"]), rel=1e-4)
    assert not (whole / CACHE).exists()


@MASKS
def test_a_broken_mask_in_the_pass(project: Project, own_data: Path, tmp_path: Path) -> None:
    """Named in one line; the other rank, which finds none, ends, too."""
    order = np.random.default_rng(0).permutation(53)  # in which the first line's masks are read
    name = f"{order[-1]:04d}.png"
    statuses, said = project.call("balancing.broken", own_data, tmp_path, name, *small(own_data))
    assert statuses == [2, 2]
    assert len(said.splitlines()) == 1
    assert name in said
    assert not (tmp_path / "out" / CACHE).exists()


@SAME_FOR_BOTH
def test_overfit(project: Project, data: Path, trained: Path, tmp_path: Path) -> None:
    """The loss falls on the same crops; no other run is continued by it, nor it by another."""
    out, before = tmp_path / "out", digest(trained)
    more = "--sampler", "balanced", "--class-weights", "auto"
    done = project.fork(*flags(data, out, "--overfit", 3, *more)).ok()
    assert "3 of 53 training images" in done.out
    assert "batch 2 per rank x 2 rank(s) x 1 accumulated = 4 " in done.out
    assert "+ 3 validation images | 50 steps per epoch" in done.out
    assert re.search(r"--overfit 3: (not learnt|learnt by heart) \(", done.out.splitlines()[-1])
    assert float(rows(out)[0]["train_loss"]) < float(rows(trained)[0]["train_loss"])
    other = project.alone(*flags(data, trained, "--overfit", 3, "--epochs", 2))
    other.refused("was trained without --overfit, not 3", "choose another --output-dir")
    project.alone(*flags(data, out, "--overfit", 4)).refused("trained with --overfit 3, not 4")
    project.alone(*flags(data, out)).refused("trained with --overfit 3, not without")
    assert digest(trained) == before
