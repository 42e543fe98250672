"""--augment, --mixup and --cutmix: the same on any machine, and labels that follow their images."""

from pathlib import Path

import numpy as np
import pytest
from running import NETS, Project, flags

CLASSIFICATION = pytest.mark.parametrize("project", ["classification"], indirect=True)
SEGMENTATION = pytest.mark.parametrize("project", ["segmentation"], indirect=True)
MIXES = {"classification": ["--mixup", 0.2, "--cutmix", 1], "segmentation": ["--cutmix", 1]}


@pytest.fixture
def names(project: Project) -> list[str]:
    return project.call("augmenting.names")


def test_same_images_whatever_the_machine(project: Project, data: Path, names: list[str]) -> None:
    """On 1, 2 and 4 ranks, with 0 to 3 workers; not without the seeds for each sample."""
    found = project.call("batches.checksums", data, names)
    first, *others = found["keyed"]
    assert first[0] != first[1]
    assert all(other == first for other in others)
    assert found["unkeyed"] != first
    project.call("augmenting.pickled", data)


def test_resume(project: Project, names: list[str], tmp_path: Path) -> None:
    """Two ranks, killed in mid-epoch, end with the same bits."""
    data = project.draw(tmp_path / "set", 18, 6)
    words = [*NETS[project.task], "--image-size", 32, "--batch-size", 3, "--epochs", 1]
    words += ["--workers", 1, "--augment", ",".join(names), *MIXES[project.task]]
    found = project.call("resume.in_mid_epoch", data, tmp_path, *words)
    assert found["stop"] == found["whole"]


def test_the_gradient_of_mixed_batches(project: Project, tmp_path: Path) -> None:
    """That of torch's mean over all soft targets, or labelled pixels, of both ranks.

    BatchNorm, which all U-Nets have, multiplies the rounding errors of small batches.
    """
    data = project.draw(tmp_path / "set", 12, 6)
    is_plain = project.task == "classification"
    net = ["--arch", "squeezenet1_1"] if is_plain else NETS[project.task]
    words = [*net, "--image-size", 64, "--batch-size", 6, "--workers", 0, *MIXES[project.task]]
    difference = project.call("augmenting.gradient", data, tmp_path, *words)
    assert difference < (1e-5 if is_plain else 1e-2)


@CLASSIFICATION
def test_shares_of_mixed_images(project: Project) -> None:
    found = project.call("augmenting.mixed_batches")
    assert min(found.values()) > 8


@SEGMENTATION
def test_masks_follow_images(project: Project) -> None:
    found = project.call("augmenting.masks_that_follow")
    assert [each["wrong"] for each in found] == [0] * len(found)
    assert all(each["inside"] > 1500 for each in found)
    assert sum(each["corners"] for each in found) > len(found) / 2
    assert {label for each in found for label in each["classes"]} == {*range(6), 255}
    changed = project.call("augmenting.mixed_masks")
    assert max(changed) > 0.3
    assert len({*changed}) > 10


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_images_of_full_depth(project: Project, channels: int) -> None:
    found = project.call("augmenting.of_channels", channels)
    refused = {"trivial", "rand", "color", "grey"} & {*found} if channels == 5 else set()
    for name, made in found.items():
        if name in refused:
            assert made == f"--augment {name}: takes 1 or 3 channels, not 5"
        else:
            assert made == f"Tensor torch.float32 ({channels}, 32, 32)"


def test_a_name_that_is_none(project: Project, data: Path, tmp_path: Path) -> None:
    words = flags(data, tmp_path, "--augment", "vflip,nothing")
    project.fork(*words).refused("--augment nothing: is none of", "color, grey, rota")


@pytest.mark.parametrize("project", ["classification"], indirect=True)
def test_crops(project: Project) -> None:
    """As those of torchvision's RandomResizedCrop, also where it gives up and takes the middle."""
    for mine, theirs in project.call("augmenting.boxes", 2000):
        mine, theirs = np.array(mine), np.array(theirs)
        for statistic in np.mean, np.std:
            apart = statistic(mine, axis=0) - statistic(theirs, axis=0)
            assert (abs(apart) <= 1 + 0.15 * theirs.std(0)).all(), statistic
    assert (mine == theirs).all()
