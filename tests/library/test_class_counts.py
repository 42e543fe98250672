"""Classes of unequal size: counts, --class-weights."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from digest import digest
from generated import Done, Project, after_step, die, refusal, rows
from PIL import Image
from ranks import Patch, on_ranks

import ddpkit
from ddpkit.ranks import distributed
from ddpkit.vision import class_counts, folders

MASKS = pytest.mark.parametrize("project", ["segmentation"], indirect=True)


class Labelled:
    """Samples of some classes each."""

    def __init__(self, labels: list[tuple[int, ...]]) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def count_labels(self, index: int) -> dict[int, int]:
        return dict.fromkeys(self.labels[index], 10)


def test_weights(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """scikit-learn's compute_class_weight("balanced"), and 1 for what does not occur."""
    monkeypatch.setattr(distributed, "gather_objects", lambda value: [value])
    data = Labelled([(0,)] * 30 + [(2,)] * 10)
    names = ["a", "b", "c"]
    weights = class_counts.class_weights("auto", data, names)
    assert torch.equal(weights, torch.tensor([40 / (2 * 30), 1.0, 40 / (2 * 10)]))
    said = capsys.readouterr().out
    assert "warning: no training samples of b: their weight is 1\n" in said
    assert "a 0.667, b 1, c 2\n" in said
    with refusal("class_counts.class_weights", "2 numbers", "3 classes"):
        class_counts.class_weights((1.0, 2.0), data, names)
    for wrong, words in (
        (Labelled([(0,), (1,), (7,)]), "sample 2: label 7, not 0 to 2"),
        (Labelled([(), ()]), "no training sample"),
    ):
        with refusal("class_counts.count_classes", words):
            class_counts.class_weights("auto", wrong, names)
    with refusal("class_counts.labels_of_sample", "list has no count_labels"):
        class_counts.class_weights("auto", [(1, 2)], names)


def test_the_same_counts_whatever_the_ranks(tmp_path: Path) -> None:
    ddpkit.demo_set(tmp_path / "set", 20, 4, masks=True)

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
    """The same bits; --eval-only takes the loss and its weights from the checkpoint."""
    whole = tmp_path / "whole"
    out = tmp_path / "killed"

    def train(out: Path, patch: Patch | None = None) -> Done:
        words = ["--image-size", 32, "--loss", "ce+0.5*dice", "--save-every", 2]
        words += ["--class-weights", "auto"]
        return project.train(few, out, words, patch=patch)

    said = train(whole).ok().out
    killed = after_step(3, die)
    assert train(out, killed).statuses == [-9, -9]
    assert "2 steps of the next" in train(out).ok().out
    assert digest(out) == digest(whole)
    masks = [np.array(Image.open(path)).ravel() for path in few.glob("train/masks/*")]
    pixels = np.bincount(np.concatenate(masks), minlength=256)[:2]
    line = r"weights in the loss: background (\S+), crack (\S+)\n"
    weights = [float(text) for text in re.search(line, said).groups()]
    assert weights == pytest.approx(pixels.sum() / (2 * pixels), rel=0.01)
    done = project.train(few, whole, "--eval-only", "--json", on=1).ok()
    loss = json.loads(done.out.splitlines()[-1])["val_loss"]
    assert loss == pytest.approx(float(rows(whole)[0]["val_loss"]), rel=1e-4)
