"""Classes of unequal size: counts, --class-weights."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from running import Project, flags, rows, small
from torchvision.datasets import FakeData

from ddpkit.data import class_counts, samples
from ddpkit.data.class_counts import count_classes
from ddpkit.errors import UserError
from ddpkit.ranks import distributed

MASKS = pytest.mark.parametrize("project", ["segmentation"], indirect=True)


class Labelled:
    """Samples of some classes each."""

    def __init__(self, labels: list[list[int]]) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def count_labels(self, index: int) -> dict[int, int]:
        return dict.fromkeys(self.labels[index], 1)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of one without a store."""
    monkeypatch.setattr(distributed, "gather_objects", lambda value: [value])


class Random(Labelled):
    """Samples of random numbers with a label."""

    def __init__(self, labels: list[int]) -> None:
        super().__init__([[label] for label in labels])

    def __getitem__(self, index: int) -> tuple:
        return torch.rand(3, 1, 1), self.labels[index][0]

    def count_labels(self, index: int) -> dict[int, int]:
        return {self.labels[index][0]: 10}


def test_a_repeat_is_augmented_anew() -> None:
    """And what comes once, as ever."""
    seeded = samples.Seeded(Random([0, 1, 0, 1]), 2, 7)
    keys = [samples.Key(2, draw) for draw in (1, 1 + 4, 3)]
    (first, _), (again, _), (other, _) = seeded.__getitems__(keys)
    samples.seed(7, 2, 1)
    assert torch.equal(first, torch.rand(3, 1, 1))
    assert not torch.equal(first, again)
    assert not torch.equal(other, again)
    assert samples.name(seeded.dataset, 1 + 4) == "sample 1"


def totals(data: object, names: list[str]) -> list[int]:
    rows = count_classes(data, names)
    return np.bincount(rows[:, 1], rows[:, 2], len(names)).tolist()


class TestCounts:
    def test_totals(self) -> None:
        names = ["a", "b", "c"]
        assert totals(Random([0, 1, 1, 2]), names) == [10, 20, 10]
        assert totals(Random([2] * 40), names) == [0, 0, 400]

    def test_weights(self, capsys: pytest.CaptureFixture) -> None:
        """scikit-learn's compute_class_weight("balanced"), and 1 for what does not occur."""
        data, names = Random([0] * 30 + [2] * 10), ["a", "b", "c"]
        weights = class_counts.class_weights("auto", data, names)
        assert torch.equal(weights, torch.tensor([40 / (2 * 30), 1.0, 40 / (2 * 10)]))
        said = capsys.readouterr().out
        assert "warning: 1 of 3 classes in none of the training samples (weight 1): b" in said
        assert "weights in the loss: a 0.667, b 1, c 2\n" in said
        assert class_counts.class_weights(None, [], names) is None
        given = class_counts.class_weights((1.0, 2.5, 3.0), [], names)
        assert torch.equal(given, torch.tensor([1.0, 2.5, 3.0]))
        with pytest.raises(UserError, match="2 numbers, but the data has 3 classes"):
            class_counts.class_weights((1.0, 2.0), data, names)

    @pytest.mark.parametrize(
        ("data", "words"),
        [
            (Random([0, 1, 7]), "sample 2: label 7, not 0 to 1"),
            (Labelled([[]] * 3), "no training sample has a label"),
            ([(1, 2)], "list has no count_labels, which --class-weights auto needs"),
            (FakeData(8), "FakeData has no count_labels"),
        ],
    )
    def test_what_cannot_be_counted(self, data: object, words: str) -> None:
        with pytest.raises(UserError, match=words) as found:
            class_counts.class_weights("auto", data, ["a", "b"])
        assert "\n" not in str(found.value)


def test_the_same_counts_whatever_the_ranks(project: Project, own_data: Path) -> None:
    one, *more = project.call("balancing.counts_on_ranks", own_data)
    assert all(rows == one for rows in more)


@MASKS
def test_stopped_and_resumed(project: Project, few: Path, tmp_path: Path) -> None:
    """The same bits; with another --seed the epoch starts over; --eval-only reads no mask."""
    words = [*small(few), "--image-size", 32, "--class-weights", "auto"]
    found = project.call("balancing.resumed", few, tmp_path, *words)
    assert found["statuses"] == [0] * 6
    assert len({*found["digests"]}) == 1
    killed, changed = found["said"]
    assert "2 steps of the next" in killed
    assert "the images, --seed or the sampler have changed: the epoch starts over" in changed
    assert [row["step"] for row in rows(tmp_path / "changed")] == ["5"]
    whole = tmp_path / "whole"
    masks = [np.array(Image.open(path)).ravel() for path in few.glob("train/masks/*")]
    pixels = np.bincount(np.concatenate(masks), minlength=256)[:2]
    texts = [f"{weight:.3g}" for weight in pixels.sum() / (2 * pixels)]
    assert f"weights in the loss: background {texts[0]}, crack {texts[1]}\n" in killed
    done = project.alone(*flags(few, whole, "--eval-only"), draws=False).ok()
    loss = json.loads(done.out.splitlines()[-1])["val_loss"]
    assert loss == pytest.approx(float(rows(whole)[0]["val_loss"]), rel=1e-4)


@MASKS
def test_a_broken_mask_in_the_pass(project: Project, own_data: Path, tmp_path: Path) -> None:
    """Named in one line; the other rank, which finds none, ends, too."""
    order = np.random.default_rng(0).permutation(53)  # in which the first line's masks are read
    name = f"{order[-1]:04d}.png"
    statuses, said = project.call("balancing.broken", own_data, tmp_path, name, *small(own_data))
    assert statuses == [2, 2]
    assert len(said.splitlines()) == 1
    assert name in said
