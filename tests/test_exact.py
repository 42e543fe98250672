"""The same pictures and the same numbers on any number of ranks and of loader workers."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from running import SAME_FOR_BOTH, SCRIPTS, Project, flags, rows


def test_same_pictures_whatever_the_machine(project: Project, data: Path) -> None:
    """On 1, 2 and 4 ranks, with 0 to 3 workers; not without the seeds for each sample."""
    found = project.call("batches.checksums", data)
    first, *others = found["keyed"]
    for epoch in first:
        assert [len(step) for step in epoch] == [8] * 6  # of 53 pictures
    assert first[0] != first[1]
    assert all(other == first for other in others)
    assert found["unkeyed"] != first


@SAME_FOR_BOTH
def test_workers_do_not_change_what_is_learnt(project: Project, data: Path, tmp_path: Path) -> None:
    """With dropout, whose random numbers loader workers must not share or shift."""
    weights = []
    for workers in (0, 2):
        out = tmp_path / str(workers)
        more = ["--arch", "squeezenet1_1", "--workers", workers]
        project.alone(*flags(data, out, *more), draws=False).ok()
        weights.append(torch.load(out / "last.pt", weights_only=True)["model"])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
def test_first_masks_without_labels(project: Project, own_data: Path, tmp_path: Path) -> None:
    """They are what a run tries before its first epoch, and no reason to refuse it."""
    for path in sorted((own_data / "val" / "masks").iterdir())[:2]:
        Image.fromarray(np.full(Image.open(path).size[::-1], 255, np.uint8)).save(path)
    project.alone(*flags(own_data, tmp_path / "out"), draws=False).ok()
    for path in (own_data / "val" / "masks").iterdir():
        Image.fromarray(np.full(Image.open(path).size[::-1], 255, np.uint8)).save(path)
    evaluated = project.alone(*flags(own_data, tmp_path / "out"), "--eval-only")
    evaluated.refused("no labelled samples")


@SAME_FOR_BOTH
def test_resume_at_any_step(project: Project, data: Path, tmp_path: Path) -> None:
    """Before the first checkpoint, in a save's step, before evaluation, in the next epoch."""
    words = ["--arch", "mobilenet_v3_small", "--epochs", 2, "--workers", 1, "--image-size", 32]
    words += ["--batch-size", 4, "--deterministic"]
    found = project.call("resume.at_any_step", data, tmp_path, *words)
    assert {*found["intervals"], found["stops"]} == {found["whole"]}
    assert len(set(found["unkeyed"])) == 2
    kept = rows(tmp_path / "stops")
    for row, other in zip(kept, rows(tmp_path / "whole"), strict=True):
        different = {name for name in row if row[name] != other[name]}
        assert different <= {"img_per_s", "train_seconds", "data_wait"}


@SAME_FOR_BOTH
def test_resume_of_three_ranks(project: Project, tmp_path: Path) -> None:
    """DDP sums in another order in a process's first step; not, if that was a throw-away pass."""
    data = project.draw(tmp_path / "set", 38, 6)  # three steps
    words = ["--image-size", 32, "--batch-size", 4, "--workers", 0, "--epochs", 1]
    words += ["--arch", "mobilenet_v3_small"]
    found = project.call("resume.of_three_ranks", data, tmp_path, *words)
    assert len(set(found["settled"])) == 1
    assert len(set(found["unsettled"])) == 2


@SAME_FOR_BOTH
def test_resume_on_another_number_of_ranks(project: Project, data: Path, tmp_path: Path) -> None:
    """The same pictures in the same order; what cannot be the same is said."""
    words = ["--image-size", 32, "--workers", 0, "--epochs", 2, "--arch", "shufflenet_v2_x0_5"]
    said = project.call("resume.on_fewer_ranks", data, tmp_path, *words)
    assert "1 of 2 epochs done" in said
    assert " and 2 steps of the next; 2 rank(s) then, 1 now: BatchNorm" in said
    assert "--batch-size" in said
    # 37 pictures are left of that epoch: six steps of 6.
    assert [row["step"] for row in rows(tmp_path / "run")] == ["6", str(8 + 6)]


def test_metrics_on_any_number_of_ranks(project: Project, tmp_path: Path) -> None:
    """Fewer pictures than ranks, void, and a class that never comes."""
    data = project.draw(tmp_path / "set", 6, 53)
    if project.task == "segmentation":
        (data / "classes.txt").write_text("background\ncrack\nnever\n")
        for n, path in enumerate(sorted((data / "val" / "masks").iterdir())):
            mask = np.array(Image.open(path))
            mask[: 5 * (n % 7)] = 255
            Image.fromarray(mask).save(path)
    found = []
    for ranks in (1, 2, 3):
        out = project.fork(data, script=SCRIPTS / "metrics.py", ranks=ranks).ok().out
        found.append([json.loads(line) for line in out.splitlines() if line.startswith("[{")])
    for other in found[1:]:
        for (mine, *mistakes), (theirs, *its_mistakes) in zip(found[0], other, strict=True):
            assert its_mistakes == mistakes
            assert mistakes[1]  # the worst
            loss, its = mine["val_loss"], theirs["val_loss"]
            assert its == pytest.approx(loss, rel=1e-14)
            assert {**theirs, "val_loss": 0} == pytest.approx(
                {**mine, "val_loss": 0}, rel=0, abs=0, nan_ok=True
            )
    assert len({str(each) for each in found[0]}) == 3
    if project.task == "segmentation":
        # The class that never comes is predicted here and there, or nowhere: 0 or nan.
        assert all(np.nan_to_num(each["iou_never"]) == 0 for each, *_ in found[0])


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
def test_deterministic_metrics_take_no_more_memory(project: Project) -> None:
    """For what is told to be deterministic torchmetrics takes pixels x classes squared: 0.9 GB."""
    assert project.call("memory.of_deterministic_metrics") < 300_000  # kilobytes


@SAME_FOR_BOTH
def test_a_training_set_that_changes(project: Project, few: Path, tmp_path: Path) -> None:
    """In mid-epoch the rest of its images would be others: the epoch starts over, and says so."""
    words = [*flags(few, tmp_path)[:-4], "--epochs", 1]
    own = shutil.copytree(few, tmp_path / "own")
    found = project.call("resume.after_a_renaming", own, tmp_path, *words)
    assert ["the epoch starts over" in said for said in found] == [True, True, False]
    assert all("0 of 1 epochs done and 2 steps of the next" in said for said in found)


@SAME_FOR_BOTH
def test_ranks_with_other_data(project: Project, few: Path, trained: Path, tmp_path: Path) -> None:
    """Nothing is learnt or measured; a copy in another folder will do."""
    words, copy = flags(few, tmp_path)[:-4], shutil.copytree(few, tmp_path / "copy")

    def said(name: str, status: int, *more: str) -> str:
        (tmp_path / name).mkdir(exist_ok=True)
        found = project.call("resume.with_other_data", few, copy, tmp_path / name, *words, *more)
        assert found[0] == [status, status]
        assert len(found[1].splitlines()) == bool(status)
        return found[1]

    said("copied", 0)
    first = min((copy / "val" / "dots").iterdir())
    first.rename(first.with_stem("a"))
    shutil.copytree(trained, tmp_path / "evaluated" / "out")
    for line in said("trained", 2), said("evaluated", 2, "--eval-only"):
        assert "rank 1 has 6 images (" in line
        assert "for validation, rank 0 has 6 images (" in line
    assert not list((tmp_path / "trained").rglob("*.pt"))
    for part in ("train", "val"):
        (copy / part / "dots").rename(copy / part / "zdots")
    assert "rank 1 has class 2 rings, rank 0 has class 2 dots; all" in said("renamed", 2)
