"""recipe.py: optimizers, schedules, averaged weights, frozen layers, the end before --epochs."""

import shutil
from pathlib import Path

import pytest
import torch
from running import SAME_FOR_BOTH, Project, flags, rows, small
from torch.optim import lr_scheduler

EPOCHS, STEPS = 6, 10
WARM = 5  # steps of half an epoch


def by_torch(schedule: str) -> list[float]:
    """The same rates by torch's own schedulers, where it has one."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    steps = EPOCHS * STEPS - WARM
    main = {
        "poly": lambda: lr_scheduler.PolynomialLR(optimizer, steps, 0.9),
        "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, steps),
    }[schedule]()
    rates = []
    for _ in range(steps + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        main.step()
    return rates


@SAME_FOR_BOTH
def test_schedules(project: Project) -> None:
    rates = {
        name: project.call("recipes.rates", name, EPOCHS, STEPS)
        for name in ("cosine", "poly", "step", "wsd")
    }
    for name in "cosine", "poly":
        assert rates[name][WARM:] == pytest.approx(by_torch(name), abs=1e-12)
        assert rates[name][:WARM] == pytest.approx([n / (WARM + 1) for n in range(1, WARM + 1)])
    stable, decay = rates["wsd"][WARM : WARM + 45], rates["wsd"][WARM + 44 :]
    assert stable == pytest.approx([1] * 45)
    assert decay == pytest.approx([1 - n / 11 for n in range(12)])
    assert set(rates["step"][WARM:]) == {1}


@SAME_FOR_BOTH
def test_optimizers(project: Project) -> None:
    """Which weight gets which rate and decay, from which optimizer."""
    bias, scale = "encoder.0.bias", "encoder.1.weight"
    sgd = project.call("recipes.groups", "--optimizer", "sgd")
    assert sgd["encoder.0.weight"] == ["SGD", 0.1, 0.0001, 0.9]
    assert sgd[bias] == sgd[scale] == sgd["head.bias"] == ["SGD", 0.1, 0, 0.9]
    slow = project.call("recipes.groups", "--backbone-lr", "0.1")
    assert slow["encoder.0.weight"][:3] == ["AdamW", pytest.approx(0.0001), 0.05]
    assert slow[scale][:3] == ["AdamW", pytest.approx(0.0001), 0]
    assert slow["head.weight"][:3] == ["AdamW", 0.001, 0.05]
    assert slow["head.bias"][:3] == ["AdamW", 0.001, 0]
    words = "--optimizer", "lion", "--lr", "0.5", "--weight-decay", "0"
    lion = project.call("recipes.groups", *words, "--backbone-lr", "0.1")
    assert lion["head.weight"][:3] == ["Lion", 0.5, 0]
    assert lion["encoder.0.weight"][:3] == ["Lion", 0.05, 0]
    still = project.call("recipes.groups", "--backbone-lr", "0")
    assert (still["encoder.0.weight"][1], still["head.weight"][1]) == (0, 0.001)


@SAME_FOR_BOTH
def test_optimizers_of_timm(project: Project) -> None:
    """They learn, and resume to the bit from what torch.load reads with weights_only."""
    names = ["muon", "adafactor", "lamb", "lion", "nadamw", "madgrad", "laprop"]
    for name, (first, last, is_same) in project.call("recipes.timms", *names).items():
        assert last < first, name
        assert is_same, name


@SAME_FOR_BOTH
def test_optimizers_that_are_refused(project: Project) -> None:
    line = project.call("recipes.refusal", "--optimizer", "adamwx")
    assert line == "--optimizer adamwx: not one of timm's, such as adamw, radamw, nadamw, cadamw"
    for name in "other", "adahessian", "bnbadamw":
        assert "not one of timm's" in project.call("recipes.refusal", "--optimizer", name), name


@SAME_FOR_BOTH
def test_average_by_hand(project: Project) -> None:
    assert max(project.call("recipes.averages", 0.5)) < 1e-5
    assert max(project.call("recipes.averages", 0.9)) < 1e-5


@SAME_FOR_BOTH
def test_frozen_statistics(project: Project) -> None:
    *frozen, thawed, trained = project.call("recipes.frozen_modes")
    assert frozen[0].count(False) == 1
    assert frozen[1].count(True) == 2  # the last layer's
    assert frozen[2:] == frozen[:2]
    assert all(thawed)
    assert trained.count(False) == 1  # what is never trained


RECIPES = {
    "classification": "--ema 0.9 --optimizer adafactor --schedule wsd",
    "segmentation": "--freeze-backbone 1 --backbone-lr 0.1 --optimizer sgd "
    "--schedule poly --clip-grad-norm 1 --ema 0.99 --accumulate 2 --batch-size 2",
}


def test_killed_and_resumed(project: Project, few: Path, tmp_path: Path) -> None:
    """The same bits, stopped in the first and in the second epoch."""
    words = [*small(few), "--image-size", 32, "--epochs", 2, *RECIPES[project.task].split()]
    found = project.call("recipes.resumed", few, tmp_path, *words)
    assert len(set(found)) == 1
    state = torch.load(tmp_path / "whole" / "last.pt", weights_only=True)
    average, trained = state["model"], state["trained"]
    assert average.keys() == trained.keys()
    assert any(not torch.equal(average[name], trained[name]) for name in average)
    name = next(iter(average))  # of the first layer
    if project.task == "segmentation":
        first = torch.load(tmp_path / "whole" / "last-1.pt", weights_only=True)
        assert first["epoch"] == 1
        assert not torch.equal(first["trained"][name], trained[name])


def test_what_is_frozen_stays(project: Project, few: Path, tmp_path: Path) -> None:
    """Weights and BatchNorm's statistics, on two ranks, and all but the last layer or decoder."""
    states = []
    for epochs in 1, 2:
        more = flags(few, tmp_path / "out", "--freeze-backbone", 1, "--epochs", epochs)
        project.fork(*more, "--save-every", 1, draws=False).ok()
        paths = tmp_path / "out" / "last-1.pt", tmp_path / "out" / "last.pt"
        states += [torch.load(path, weights_only=True) for path in paths]
    assert [(state["epoch"], state["step"]) for state in states[:2]] == [(0, 2), (1, 3)]
    early, frozen, _, late = (state["model"] for state in states)
    head = {"classification": "fc.", "segmentation": ("decoder.", "segmentation_head.")}
    changed = {name for name in early if not torch.equal(early[name], frozen[name])}
    assert changed == {name for name in early if name.startswith(head[project.task])}
    assert not torch.equal(frozen[next(iter(early))], late[next(iter(early))])


@SAME_FOR_BOTH
def test_the_average_is_what_is_used(project: Project, few: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    more = flags(few, out, "--epochs", 2, "--ema", 0.5)
    project.fork(*more, draws=False).ok()
    # Another average, or none, would be another network.
    project.fork(*flags(few, out, "--epochs", 3)).refused("with --ema, not without", "--output-dir")
    row = max(rows(out), key=lambda row: float(row["top1"]))
    evaluate = flags(few, out, "--eval-only")
    said = project.fork(*evaluate, draws=False).ok().out.splitlines()[-1]
    assert f'"val_loss": {float(row["val_loss"])}' in said
    for path in out.glob("*.pt"):
        state = torch.load(path, weights_only=True)
        state["model"], state["trained"] = state["trained"], state["model"]
        torch.save(state, path)
    other = project.fork(*evaluate, draws=False).ok().out.splitlines()[-1]
    assert other != said


@SAME_FOR_BOTH
def test_patience(project: Project, few: Path, tmp_path: Path) -> None:
    """With a rate of 0 nothing improves: two epochs after the first it ends, and stays ended."""
    more = flags(few, tmp_path, "--lr", 0, "--patience", 2, "--epochs", 9)
    frozen = ["--freeze-backbone", 9]  # BatchNorm's statistics would change
    said = project.fork(*more, *frozen, draws=False).ok().out
    assert "--patience 2: no new best" in said
    assert [row["epoch"] for row in rows(tmp_path)] == ["1", "2", "3"]
    before = (tmp_path / "last.pt").read_bytes()
    again = project.fork(*more, *frozen, draws=False).ok().out
    assert "--patience 2: no new best" in again
    assert (tmp_path / "last.pt").read_bytes() == before


@SAME_FOR_BOTH
def test_mistakes(project: Project, data: Path, tmp_path: Path) -> None:
    for words, line in (
        (["--optimizer", "mouse"], "--optimizer mouse: not one of timm's, such as "),
        (["--ema", 1], "--ema: 1 is not a number of 0 or more and less than 1"),
    ):
        project.fork(*flags(data, tmp_path / "out", *words)).refused(line)
    assert not shutil.os.path.exists(tmp_path / "out" / "last.pt")
