"""recipe.py: optimizers, schedules, averaged weights, frozen layers, the end before --epochs."""

import io
import json
import os
import re
import runpy
import signal
from pathlib import Path

import pytest
import torch
from digest import digest
from generated import Project, after_step, both_tasks, refusal, rows
from pages import TASKS, TEMPLATE
from ranks import on_ranks
from torch import nn
from torch.optim import lr_scheduler

import recipe
from ddpkit.run import checkpoint
from flags import parse_args

EPOCHS, STEPS = 6, 10
WARM = 5  # steps of half an epoch


class Net(nn.Module):
    """Two hidden layers and BatchNorm, with the names that backbone() of both tasks looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        self.head = nn.Linear(6, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(inputs))


def build(*words: object) -> tuple[Net, torch.optim.Optimizer, object]:
    torch.manual_seed(0)
    model, args = Net(), parse_args([*map(str, words)])
    return model, recipe.build_optimizer(model, args), args


def rates(schedule: str) -> list[float]:
    """The factor of the learning rate at each step, and at one after the last."""
    _, optimizer, args = build("--schedule", schedule, "--epochs", EPOCHS, "--lr", 1)
    scheduler = recipe.build_scheduler(optimizer, args, STEPS)
    found = []
    for _ in range(EPOCHS * STEPS + 1):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def by_torch(schedule: str) -> list[float]:
    """The same rates by torch's own schedulers, where it has one."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    steps = EPOCHS * STEPS - WARM
    main = {
        "poly": lambda: lr_scheduler.PolynomialLR(optimizer, steps, 0.9),
        "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, steps),
    }[schedule]()
    found = []
    for _ in range(steps + 1):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        main.step()
    return found


def test_schedules() -> None:
    for name in "cosine", "poly":
        found = rates(name)
        assert found[WARM:] == pytest.approx(by_torch(name), abs=1e-12)
        assert found[:WARM] == pytest.approx([n / (WARM + 1) for n in range(1, WARM + 1)])
    stable, decay = rates("wsd")[WARM : WARM + 45], rates("wsd")[WARM + 44 :]
    assert stable == pytest.approx([1] * 45)
    assert decay == pytest.approx([1 - n / 11 for n in range(12)])
    assert set(rates("step")[WARM:]) == {1}


def groups(*words: str) -> dict[str, list]:
    """Of each weight, by name: optimizer, learning rate, weight decay, momentum."""
    model, optimizer, _ = build(*words)
    name_of = {weight: name for name, weight in model.named_parameters()}
    found = {}
    for group in optimizer.param_groups:
        for weight in group["params"]:
            assert name_of[weight] not in found
            values = (group.get(key) for key in ("lr", "weight_decay", "momentum"))
            found[name_of[weight]] = [type(optimizer).__name__, *values]
    return found


def test_optimizers() -> None:
    """Which weight gets which rate and decay, from which optimizer."""
    bias, scale = "encoder.0.bias", "encoder.1.weight"
    sgd = groups("--optimizer", "sgd")
    assert sgd["encoder.0.weight"] == ["SGD", 0.1, 0.0001, 0.9]
    assert sgd[bias] == sgd[scale] == sgd["head.bias"] == ["SGD", 0.1, 0, 0.9]
    slow = groups("--backbone-lr", "0.1")
    assert slow["encoder.0.weight"][:3] == ["AdamW", pytest.approx(0.0001), 0.05]
    assert slow[scale][:3] == ["AdamW", pytest.approx(0.0001), 0]
    assert slow["head.weight"][:3] == ["AdamW", 0.001, 0.05]
    words = "--optimizer", "lion", "--lr", "0.5", "--weight-decay", "0"
    lion = groups(*words, "--backbone-lr", "0.1")
    assert lion["head.weight"][:3] == ["Lion", 0.5, 0]
    assert lion["encoder.0.weight"][:3] == ["Lion", 0.05, 0]
    still = groups("--backbone-lr", "0")
    assert (still["encoder.0.weight"][1], still["head.weight"][1]) == (0, 0.001)
    for name in "other", "adahessian", "bnbadamw", "adamwx":
        with refusal("recipe.timms_optimizer", f"--optimizer {name}"):
            build("--optimizer", name)


def train(parts: dict, steps: range) -> float:
    for step in steps:
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        loss = nn.functional.mse_loss(parts["model"](inputs), inputs[:, :2])
        loss.backward()
        parts["optimizer"].step()
        parts["optimizer"].zero_grad()
        parts["scheduler"].step()
    return loss.item()


@pytest.mark.parametrize("name", ["muon", "adafactor", "lamb", "lion", "nadamw", "madgrad"])
@on_ranks(1)
def test_optimizers_of_timm(name: str) -> None:
    """They learn, and resume to the bit from what torch.load reads with weights_only."""

    def parts() -> dict:
        model, optimizer, args = build("--optimizer", name, "--epochs", 2, "--lr", 0.01)
        scheduler = recipe.build_scheduler(optimizer, args, 4)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    whole, stopped, resumed, file = parts(), parts(), parts(), io.BytesIO()
    assert train(whole, range(1)) > train(whole, range(1, 8))
    train(stopped, range(3))
    state = checkpoint.take_states(stopped)
    torch.save({**state, "kinds": checkpoint.kinds(stopped), "path": "last.pt"}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed["model"].load_state_dict(state["model"])
    checkpoint.load_states(state, resumed, 3)
    train(resumed, range(3, 8))
    ends = (each["model"].state_dict().values() for each in (whole, resumed))
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))


@pytest.mark.parametrize("decay", [0.5, 0.9])
def test_average_by_hand(decay: float) -> None:
    model, _, _ = build()
    ema = recipe.Ema(model, decay)
    expected = {name: value.double() for name, value in model.state_dict().items()}
    for step in range(20):
        ema.trained(torch.randn(8, 4))
        with torch.no_grad():
            for weight in ema.trained.parameters():
                weight.add_(torch.randn_like(weight))
        ema.update(step)
        share = min(decay, (1 + step) / (10 + step))
        for name, value in ema.trained.state_dict().items():
            expected[name] = share * expected[name] + (1 - share) * value.double()
    assert model.encoder[1].num_batches_tracked == 20
    for name in "encoder.0.weight", "encoder.1.running_var":
        assert torch.allclose(model.state_dict()[name].double(), expected[name], atol=1e-5)


def test_frozen_statistics() -> None:
    """BatchNorm of a frozen backbone is in evaluation mode; the last layer is trained."""
    model, _, _ = build()
    model.encoder[2].bias.requires_grad_(False)  # as of a layer that no decoder reads
    for is_frozen in True, True, False:
        recipe.freeze(model, is_frozen)
        recipe.set_training(model)
        modes = [module.training for module in model.modules()]
        trained = [weight.requires_grad for weight in model.parameters()]
        assert modes.count(False) == is_frozen
        assert trained.count(True) == (2 if is_frozen else len(trained) - 1)


@pytest.mark.parametrize("task", TASKS)
def test_files_of_flags(task: str) -> None:
    """Their flags exist; their heads name command, data, figure, time and versions."""
    folder = TEMPLATE / "tasks" / task
    parse = runpy.run_path(str(folder / "flags.py"))["parse_args"]
    for path in sorted((folder / "recipes").glob("*.txt")):
        head = path.read_text().split("\n\n")[0]
        parse([f"@{path}"])
        assert f"#   ./launch.sh @recipes/{path.name} " in head
        for pattern in (
            r"Data: .*\d",
            r"Result: .* of 0\.\d+",
            r"Time: \d+ s on two CPU cores",
            "torch 2",
        ):
            assert re.search(pattern, head), f"{path.name}: {pattern}"


RECIPES = {
    "classification": "--ema 0.9 --optimizer adafactor --schedule wsd",
    "segmentation": "--freeze-backbone 1 --backbone-lr 0.1 --optimizer sgd "
    "--schedule poly --clip-grad-norm 1 --ema 0.99 --accumulate 2 --batch-size 2",
}


@both_tasks
def test_killed_and_resumed(project: Project, few: Path, tmp_path: Path) -> None:
    """The same bits, killed in the first and in the second epoch."""
    words = ["--image-size", 32, "--epochs", 2, "--save-every", 2, *RECIPES[project.task].split()]
    for name, step in ("whole", 0), ("first", 3), ("second", 5):
        out = tmp_path / name
        if step:
            killed = after_step(step, lambda: os.kill(os.getpid(), signal.SIGKILL))
            assert project.train(few, out, *words, patch=killed).statuses == [-9, -9]
        project.train(few, out, *words).ok()
        assert digest(out) == digest(tmp_path / "whole")
    state = torch.load(tmp_path / "whole" / "last.pt", weights_only=True)
    average, trained = state["model"], state["trained"]
    assert average.keys() == trained.keys()
    assert any(not torch.equal(average[name], trained[name]) for name in average)


@both_tasks
def test_what_is_frozen_stays(project: Project, few: Path, tmp_path: Path) -> None:
    """Weights and BatchNorm's statistics, on two ranks, and all but the last layer or decoder."""
    states = []
    for epochs in 1, 2:
        more = "--freeze-backbone", 1, "--epochs", epochs, "--save-every", 1
        project.train(few, tmp_path, *more).ok()
        paths = tmp_path / "last-1.pt", tmp_path / "last.pt"
        states += [torch.load(path, weights_only=True) for path in paths]
    assert [(state["epoch"], state["step"]) for state in states[:2]] == [(0, 2), (1, 3)]
    early, frozen, _, late = (state["model"] for state in states)
    head = {"classification": "fc.", "segmentation": ("decoder.", "segmentation_head.")}
    changed = {name for name in early if not torch.equal(early[name], frozen[name])}
    assert changed == {name for name in early if name.startswith(head[project.task])}
    first = next(iter(early))
    assert not torch.equal(frozen[first], late[first])


def test_the_average_is_what_is_used(project: Project, few: Path, tmp_path: Path) -> None:
    project.train(few, tmp_path, "--epochs", 2, "--ema", 0.5).ok()
    # Another average, or none, would be another network.
    without = project.train(few, tmp_path, "--epochs", 3)
    without.refused("loop.check_kind", "--ema", "--output-dir")
    row = max(rows(tmp_path), key=lambda row: float(row["top1"]))
    losses = []
    for _ in range(2):
        done = project.train(few, tmp_path, "--eval-only", on=1).ok()
        losses.append(json.loads(done.out.splitlines()[-1])["val_loss"])
        for path in tmp_path.glob("*.pt"):
            state = torch.load(path, weights_only=True)
            state["model"], state["trained"] = state["trained"], state["model"]
            torch.save(state, path)
    assert losses[0] == pytest.approx(float(row["val_loss"]), rel=1e-6)
    assert losses[1] != losses[0]


def test_patience(project: Project, few: Path, tmp_path: Path) -> None:
    """With a rate of 0 nothing improves: two epochs after the first it ends, and stays ended."""
    more = "--lr", 0, "--patience", 2, "--epochs", 9, "--freeze-backbone", 9
    assert "--patience 2" in project.train(few, tmp_path, *more).ok().out
    assert [row["epoch"] for row in rows(tmp_path)] == ["1", "2", "3"]
    before = (tmp_path / "last.pt").read_bytes()
    assert "--patience 2" in project.train(few, tmp_path, *more).ok().out
    assert (tmp_path / "last.pt").read_bytes() == before
