"""Classes of unequal size: counts, --class-weights."""

import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from digest import digest
from generated import Project, after_step, refusal, rows
from PIL import Image
from ranks import on_ranks
from torchvision.datasets import FakeData

import ddpkit
from ddpkit.data import class_counts, folders
from ddpkit.ranks import distributed

MASKS = pytest.mark.parametrize("project", ["segmentation"], indirect=True)


class Labelled:
    """Samples of some classes each."""

    def __init__(self, *labels: tuple[int, ...]) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def count_labels(self, index: int) -> dict[int, int]:
        return dict.fromkeys(self.labels[index], 10)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of one without a store."""
    monkeypatch.setattr(distributed, "gather_objects", lambda value: [value])


@pytest.mark.usefixtures("alone")
def test_weights(capsys: pytest.CaptureFixture) -> None:
    """scikit-learn's compute_class_weight("balanced"), and 1 for what does not occur."""
    data, names = Labelled(*[(0,)] * 30, *[(2,)] * 10), ["a", "b", "c"]
    weights = class_counts.class_weights("auto", data, names)
    assert torch.equal(weights, torch.tensor([40 / (2 * 30), 1.0, 40 / (2 * 10)]))
    said = capsys.readouterr().out
    assert "1 of 3 classes" in said and "a 0.667, b 1, c 2\n" in said
    assert class_counts.class_weights(None, [], names) is None
    given = class_counts.class_weights((1.0, 2.5, 3.0), [], names)
    assert torch.equal(given, torch.tensor([1.0, 2.5, 3.0]))
    with refusal("class_counts.class_weights", "2 numbers", "3 classes"):
        class_counts.class_weights((1.0, 2.0), data, names)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Labelled((0,), (1,), (7,)), "sample 2: label 7, not 0 to 1"),
        (Labelled((), ()), "no training sample"),
        ([(1, 2)], "list has no count_labels"),
        (FakeData(8), "FakeData has no count_labels"),
    ],
)
@pytest.mark.usefixtures("alone")
def test_what_cannot_be_counted(data: object, words: str) -> None:
    with refusal("class_counts.count_classes", words):
        class_counts.class_weights("auto", data, ["a", "b"])


def test_the_same_counts_whatever_the_ranks(tmp_path: Path) -> None:
    ddpkit.demo_masks(tmp_path / "set", 20, 4)

    @on_ranks(1, 2, 3)
    def count() -> None:
        train, _, classes = folders.find_masks(tmp_path / "set")
        dataset = folders.MaskFiles(train, tuple)
        found = class_counts.count_classes(dataset, classes)
        path = tmp_path / "counts.npy"
        if distributed.world_size() == 1:
            np.save(path, found)
        assert np.array_equal(np.load(path), found)

    count()


@MASKS
def test_stopped_and_resumed(project: Project, few: Path, tmp_path: Path) -> None:
    """The same bits; with another --seed the epoch starts over; --eval-only reads no mask."""
    words, whole = ["--image-size", 32, "--class-weights", "auto"], tmp_path / "whole"
    killed = after_step(3, lambda: os.kill(os.getpid(), signal.SIGKILL))
    project.train(few, whole, *words).ok()
    for name, more in ("same", ()), ("changed", ("--seed", 1)):
        out = tmp_path / name
        first = project.train(few, out, *words, "--save-every", 2, patch=killed)
        assert first.statuses == [-9, -9]
        said = project.train(few, out, *words, *more).ok().out
        assert "2 steps of the next" in said
        assert ("the epoch starts over" in said) == (name == "changed")
        assert (digest(out) == digest(whole)) == (name == "same")
    masks = [np.array(Image.open(path)).ravel() for path in few.glob("train/masks/*")]
    pixels = np.bincount(np.concatenate(masks), minlength=256)[:2]
    texts = re.search(r"weights in the loss: background (\S+), crack (\S+)\n", said).groups()
    assert [*map(float, texts)] == pytest.approx(pixels.sum() / (2 * pixels), rel=0.01)
    done = project.train(few, whole, "--eval-only", on=1).ok()
    loss = json.loads(done.out.splitlines()[-1])["val_loss"]
    assert loss == pytest.approx(float(rows(whole)[0]["val_loss"]), rel=1e-4)


@MASKS
def test_a_broken_mask_in_the_pass(project: Project, own_data: Path, tmp_path: Path) -> None:
    """Named in one line; the other rank, which finds none, ends, too."""
    order = np.random.default_rng(0).permutation(53)  # in which the first line's masks are read
    mask = own_data / "train" / "masks" / f"{order[-1]:04d}.png"

    def spoil() -> None:
        class_counts.MOST_PIXELS = 1
        count = class_counts.count_classes

        def spoiling(*args: object) -> object:
            mask.write_bytes(b"no image")
            return count(*args)

        class_counts.count_classes = spoiling

    words = "--class-weights", "auto"
    done = project.train(own_data, tmp_path / "out", *words, patch=spoil)
    done.refused("images.reading", mask)
    assert done.statuses == [2, 2]
