"""The same bits whenever a run is killed, and the same numbers on any number of ranks."""

import json
import math
import os
import shutil
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digest import digest
from generated import NET, NETS, Done, Project, after_step, both_tasks, die, rows
from PIL import Image
from ranks import Patch, on_ranks
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset
from torchmetrics.classification import MulticlassAccuracy

import ddpkit
from ddpkit import files
from ddpkit.data import samples
from ddpkit.ranks import distributed, failures


def result(project: Project, data: Path, out: Path, on: int, *stops: int) -> str:
    """The digest of a run that is killed after each of these steps and started again."""
    flags = list(NET)
    flags += ["--epochs", 2, "--deterministic"]
    if stops:
        flags += ["--save-every", 2]

    def train(patch: Patch | None = None) -> Done:
        return project.train(data, out, flags, on=on, patch=patch)

    for step in stops:
        done = train(after_step(step, die))
        assert done.statuses == [-9] * on, done.err
    train().ok()
    return digest(out)


def test_resume_at_any_step(project: Project, few: Path, tmp_path: Path) -> None:
    """Before the first checkpoint, in a save's step, before evaluation, in the next epoch."""
    whole = tmp_path / "whole"
    stopped = tmp_path / "stopped"
    expected = result(project, few, whole, 2)
    assert expected == result(project, few, stopped, 2, 1, 2, 3, 5)
    for row, other in zip(rows(whole), rows(stopped), strict=True):
        different = {name for name in row if row[name] != other[name]}
        assert different <= {"img_per_s", "train_seconds", "data_wait"}


def test_a_checkpoint_of_version_1(project: Project, few: Path, tmp_path: Path) -> None:
    """Killed in mid-epoch with 1.1, which knew no --log-every, and left ImageNet's numbers out."""
    whole = tmp_path / "whole"
    stopped = tmp_path / "stopped"

    def train(out: Path, patch: Patch | None = None) -> Done:
        return project.train(
            few, out, "--deterministic", "--save-every", 1, NET, patch=patch
        )

    train(whole).ok()
    train(stopped, after_step(2, die))
    path = stopped / "last.pt"
    state = torch.load(path, weights_only=True)
    assert state["seen"]
    state["format"].update(mean=None, std=None)
    del state["args"]["log_every"]
    # of labels of its own, each rank
    total, count, _ = state.pop("sums")["train_loss"]
    state["totals"] = [[float(Fraction(total)) + 1, int(count) + 2], [-1.0, -2]]
    torch.save(state, path)
    train(stopped).ok()
    assert digest(whole) == digest(stopped)
    losses = [float(row["train_loss"]) for row in rows(whole)]
    others = [float(row["train_loss"]) for row in rows(stopped)]
    assert len(losses) == 1
    assert losses == pytest.approx(others, rel=1e-9)


def test_resume_of_three_ranks(project: Project, tmp_path: Path) -> None:
    """DDP would sum in another order in a process's first step."""
    data = project.draw(tmp_path / "set", 38, 6)  # three steps per epoch
    whole = result(project, data, tmp_path / "whole", 3)
    assert whole == result(project, data, tmp_path / "stopped", 3, 2)


def test_resume_on_another_number_of_ranks(
    project: Project, data: Path, tmp_path: Path
) -> None:
    """The same images in the same order, in whole steps; what cannot be the same is said."""

    def train(*more: object, **options: Any) -> Done:
        words = ["--image-size", 32, "--epochs", 2, "--save-every", 2]
        words += more
        return project.train(data, tmp_path, words, **options)

    assert train(patch=after_step(8, die)).statuses == [-9, -9]
    said = train("--batch-size", 3, "--accumulate", 2, on=1).ok().out
    assert "1 of 2 epochs done" in said
    assert " and 2 steps of the next; saved on 2 rank(s), now 1: BatchNorm" in said
    assert "the global batch was 8, now 6: " in said
    assert "--accumulate = 8, or scale --lr by about 0.75" in said
    # 37 images are left of that epoch: six steps of 6.
    assert [row["step"] for row in rows(tmp_path)] == ["6", str(8 + 6)]
    # the schedule has come to its end
    assert float(rows(tmp_path)[-1]["lr"]) == pytest.approx(0, abs=1e-9)


def test_workers_do_not_change_what_is_learnt(
    project: Project, few: Path, tmp_path: Path
) -> None:
    """With dropout, whose random numbers loader workers must not share or shift."""
    weights = []
    for workers in 0, 2:
        out = tmp_path / str(workers)
        project.train(
            few, out, "--arch", "squeezenet1_1", "--workers", workers, on=1
        ).ok()
        weights.append(torch.load(out / "last.pt")["model"])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_training_set_that_changes(
    project: Project, few: Path, tmp_path: Path
) -> None:
    """In mid-epoch the rest of its images would be others: the epoch starts over, and says so."""
    own = shutil.copytree(few, tmp_path / "own")
    out = tmp_path / "out"

    def train(out: Path, patch: Patch | None = None) -> Done:
        return project.train(
            own, out, "--image-size", 32, "--save-every", 1, on=1, patch=patch
        )

    done = train(out, after_step(2, die))
    assert done.statuses == [-9], done.err
    image = min((own / "train").rglob("*.jpg"))
    image.rename(image.with_stem(f"z{image.stem}"))
    said = train(shutil.copytree(out, tmp_path / "copy")).ok().out
    assert "0 of 1 epochs done and 2 steps of the next" in said
    assert "the epoch starts over" in said
    image.with_stem(f"z{image.stem}").rename(image)
    assert "starts over" not in train(out).ok().out


def test_ranks_with_other_data(project: Project, few: Path, tmp_path: Path) -> None:
    """Nothing is learnt."""
    copy = shutil.copytree(few, tmp_path / "copy")
    first = min((copy / "val" / "dots").iterdir())
    first.rename(first.with_stem("a"))

    def patch() -> None:
        if os.environ["RANK"] == "1":
            sys.argv[sys.argv.index("--data") + 1] = str(copy)

    done = project.train(few, tmp_path / "new", patch=patch)
    images = "has 6 images ("
    done.refused("agreement.check_alike", f"rank 1 {images}", f"rank 0 {images}")
    assert done.statuses == [2, 2]
    assert not list((tmp_path / "new").rglob("*.pt"))


def looped(net: nn.Module, val: Dataset) -> dict[str, float]:
    """Loss and metrics of a loop over single images, without our library."""
    mean = torch.tensor((0.485, 0.456, 0.406)).view(3, 1, 1)
    std = torch.tensor((0.229, 0.224, 0.225)).view(3, 1, 1)
    loss = 0.0
    guesses = []
    truths = []
    for image, label in val:
        with torch.no_grad():
            output = net.eval()(((image / 255 - mean) / std)[None])[0].double()
        target = torch.as_tensor(label).long().flatten()
        is_labelled = target != 255
        target = target[is_labelled]
        scores = output.reshape(len(output), -1).T[is_labelled]
        loss -= scores.log_softmax(1).gather(1, target[:, None]).sum().item()
        guesses.append(scores.argmax(1))
        truths.append(target)
    guess = torch.cat(guesses)
    truth = torch.cat(truths)
    pairs = [(guess == number, truth == number) for number in (0, 1)]
    iou = [float((one & other).sum() / (one | other).sum()) for one, other in pairs]
    right = float((guess == truth).double().mean())
    found = {"top1": right, "iou_background": iou[0], "iou_crack": iou[1]}
    return {"val_loss": loss / len(truth), **found}


@both_tasks
def test_metrics_on_any_number_of_ranks(project: Project, tmp_path: Path) -> None:
    """Of 1, 5 and 53 images: fewer than ranks, void, a class that never comes; by a plain loop."""
    data = project.draw(tmp_path / "set", 6, 53)
    if project.task == "segmentation":
        (data / "classes.txt").write_text("background\ncrack\nnever\n")
        for n, path in enumerate(sorted((data / "val" / "masks").iterdir())):
            mask = np.array(Image.open(path))
            mask[: 5 * (n % 7)] = 255
            Image.fromarray(mask).save(path)

    # An untrained ShuffleNet hardly looks at its images
    net_of = {**NETS, "classification": ("--arch", "squeezenet1_1")}

    @on_ranks(1, 2, 3)
    def measure(project: Project) -> None:
        import dataset
        import main
        import model
        from flags import parse_args

        words = ["--data", str(data), "--image-size", "32", "--amp", "off"]
        words += net_of[project.task]
        args = parse_args(words)
        _, val, classes = dataset.build_datasets(args)
        samples.seed(1)
        net = model.build_model(args, classes)
        criterion = ddpkit.Criterion(model.build_criterion(args, val, classes), classes)
        for size in 1, 5, 53:
            part = Subset(val, list(range(0, 53, 53 // size))[:size])
            loader = ddpkit.val_loader(part, 2, classes=classes, workers=0)
            metrics = model.build_metrics(args, classes)
            found, confusion, worst = main.evaluate(
                net, loader, criterion, metrics, args
            )
            if size == 5:  # as after the next epoch: nothing is counted with it
                again = main.evaluate(net, loader, criterion, metrics, args)[1]
                assert torch.equal(again, confusion)
            if distributed.rank():  # rank 0 alone has all of them
                continue
            assert worst
            now = list(found.values())
            now += [confusion.tolist(), json.loads(json.dumps(worst))]
            path = tmp_path / f"of {size}"
            if distributed.world_size() == 1:
                path.write_text(json.dumps(now))
                plain = looped(net, part) if size == 53 else {}
                names = plain.keys() & found.keys()
                assert size != 53 or len(names) >= 2
                for name in names:
                    near = 1e-5 if name == "val_loss" else 1e-3
                    assert found[name] == pytest.approx(plain[name], rel=near), name
            then = json.loads(path.read_text())
            assert now[0] == pytest.approx(then[0], rel=1e-14)  # the loss
            assert str(now[1:]) == str(then[1:])  # NaN for NaN
            # The class that never comes is predicted here and there, or nowhere.
            never = found.get("iou_never", 0)
            assert never == 0 or math.isnan(never)

    measure(project=project)
    assert len({(tmp_path / f"of {size}").read_text() for size in (1, 5, 53)}) == 3


def test_a_disk_that_does_not_answer(project: Project) -> None:
    """One line that names the file, and the status of a failure, after which a job starts again."""

    class Stale(list):
        def __getitem__(self, index: int) -> bytes:
            raise files.failure("a.jpg", OSError(116, "Stale file handle"))

    def load() -> None:
        with failures.one_line_errors():
            next(iter(DataLoader(Stale([1]), num_workers=1)))

    done = project.here(load)
    done.failed("files.failure", "a.jpg", "Stale file handle")
    assert done.status == 1


@on_ranks(1)
def test_metrics_that_begin_alike(project: Project) -> None:
    """What two metrics count in a first batch is the same by chance: they stay two."""
    import model
    from flags import parse_args

    metrics = model.build_metrics(parse_args([]), list("abcdefg"))
    metrics.add_metrics({"macro": MulticlassAccuracy(7, average="macro")})
    order = torch.arange(7.0).repeat(2, 1)  # 6 is first, 0 is not among the first five
    metrics.update(order, torch.tensor([0, 0]))
    metrics.reset()
    metrics.update(order, torch.tensor([4, 5]))
    found = metrics.compute()
    assert float(found["top5"]) == 1
    assert float(found["top1"]) == 0
    assert float(found["macro"]) == 0
