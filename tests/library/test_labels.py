"""Several labels per image, folds, groups, a test set, mirrored images."""

import csv
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from digest import digest
from generated import Done, Project, after_step, both_tasks, die, rows
from ranks import on_ranks
from torch import nn

import ddpkit
from ddpkit.vision import folders, mistakes

# of classes
OF = {"bricks": "square", "checks": "square", "dots": "round", "rings": "round"}


@pytest.fixture
def several(own_data: Path) -> Path:
    """Lists of images with one label, two, or none, in groups; the test set is that of val."""
    for part, title in (
        ("train", "train"),
        ("val", "val"),
        ("val", "test"),
    ):
        with open(own_data / f"{title}.csv", "w", newline="") as file:
            write = csv.writer(file).writerow
            write(["file", "label", "group"])
            for n, path in enumerate(sorted((own_data / part).rglob("*.jpg"))):
                kind = path.parent.name
                labels = [] if kind == "waves" else [kind]
                if kind in OF:
                    labels.append(OF[kind])
                name = path.relative_to(own_data)
                write([name, ";".join(labels) or ";", f"camera {n % 9}"])
    return own_data


@on_ranks(1, 3)
def test_loss_and_metrics(project: Project, several: Path) -> None:
    """Those of scikit-learn over all images, on any number of ranks, and of torch."""
    import dataset
    import main
    import model
    from flags import parse_args

    words = ["--data", str(several), "--image-size", "32", "--amp", "off"]
    words += ["--arch", "shufflenet_v2_x0_5", "--label-smoothing", "0.1"]
    args = parse_args(words)
    _, val, classes = dataset.build_datasets(args)
    assert args.several_labels
    assert classes == sorted(OF.keys() | OF.values() | {"stripes"})
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, len(classes))
    )
    loader = ddpkit.val_loader(val, 4, classes=classes, workers=0)
    criterion = ddpkit.Criterion(model.build_criterion(args, val, classes), classes)
    metric = model.build_metrics(args, classes)
    found, matrix, worst = main.evaluate(net, loader, criterion, metric, args)
    images, targets = torch.utils.data.default_collate([val[n] for n in range(23)])
    with torch.inference_mode():
        logits = net(ddpkit.data.normalizing.normalize_images(images, val.format))
    precisions = []
    scores = []
    for truth, values in zip(targets.bool().T, logits.T, strict=True):
        hits = truth[values.argsort(descending=True)]
        at = torch.arange(1, 24)[hits]  # of each label that is there
        precisions.append(float((torch.arange(1, len(at) + 1) / at).mean()))
        right = int((truth & (values > 0)).sum())
        said = int((values > 0).sum())
        scores.append(2 * right / max(int(truth.sum()) + said, 1))
    near = pytest.approx
    assert found["map"] == near(sum(precisions) / len(classes), abs=1e-5)
    assert found["f1"] == near(sum(scores) / len(classes), abs=1e-5)
    bce = nn.functional.binary_cross_entropy_with_logits
    loss = bce(logits, 0.9 * targets + 0.05)  # label smoothing
    assert found["val_loss"] == near(float(loss), rel=1e-5)
    assert matrix.sum((1, 2)).tolist() == [23] * len(classes)
    plain = bce(logits, targets, reduction="none").mean(1)
    assert len(worst) == mistakes.COUNT
    assert worst[0][1] == int(plain.argmax())


def test_a_run(project: Project, several: Path, tmp_path: Path) -> None:
    """Killed and resumed to the bit, with a fold and mixed images; its files; predict.py."""
    words = ["--fold", "2/3", "--class-weights", "auto"]
    words += ["--augment", "mixup", "--save-every", "2"]
    out = tmp_path / "whole"
    killed = tmp_path / "killed"
    done = project.train(several, out, words, draws=True).ok()
    assert "best map" in done.out
    done = project.train(several, killed, words, patch=after_step(3, die))
    assert done.statuses == [-9, -9]
    project.train(several, killed, words).ok()
    assert digest(out) == digest(killed)
    assert {"map", "f1"} < rows(out)[0].keys()
    assert (out / "worst.png").exists()
    assert not (out / "confusion.png").exists()
    with open(out / "per_class.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == 7
    one = project.train(several, out, "--eval-only", "test", "--json", on=1).ok()
    assert "images for training (test): " in one.out
    of_one = read(out / "eval/predictions.csv")
    three = project.train(several, out, "--eval-only", "test", "--json", on=3).ok()
    assert one.out.splitlines()[-1] == three.out.splitlines()[-1]
    check_predictions(of_one, json.loads(one.out.splitlines()[-1]))
    assert [row["path"] for row in of_one] == [
        row["path"] for row in read(out / "eval/predictions.csv")
    ]

    def predict(threshold: object) -> Done:
        words = ["--checkpoint", out / "best.pt", "--threshold", threshold]
        words += ["--output", tmp_path / "predicted"]
        return project.run(several / "val", words, script="predict.py", on=1)

    predict(0.3).ok()
    predicted = read(tmp_path / "predicted/predictions.csv")
    assert len(predicted) == 23
    for row in predicted:
        scores = {
            column.removeprefix("probability_"): float(value)
            for column, value in row.items()
            if column.startswith("probability_")
        }
        assert len(scores) == 7
        said = set(filter(None, row["class"].split(";")))
        assert {name for name, score in scores.items() if score > 0.3001} <= said
        assert said <= {name for name, score in scores.items() if score > 0.2999}

    limits = out / "eval/thresholds.csv"
    predict(limits).ok()
    limit_of = {row["class"]: row for row in read(limits)}
    for (
        name,
        row,
    ) in limit_of.items():  # the F1 that it names, and there is no better one
        limit, best = float(row["threshold"]), float(row["f1"])
        truth = [name in row["label"].split("; ") for row in of_one]
        scores = [float(row[f"probability_{name}"]) for row in of_one]
        assert best == pytest.approx(f1_of(truth, [x >= limit for x in scores]))
        every = [f1_of(truth, [x >= score for x in scores]) for score in scores]
        assert best == pytest.approx(max(every))
    for row in read(tmp_path / "predicted/predictions.csv"):
        said = row["class"].split(";")
        for name, found in limit_of.items():
            above = float(row[f"probability_{name}"]) - float(found["threshold"])
            assert (name in said) == (above >= 0) or abs(above) < 1e-5
    predict("many").refused("files.failure", "many")
    limits.write_text("class,threshold\nelephant,0.3\n")
    predict(limits).refused("predicting.thresholds", "elephant")


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def f1_of(truth: Sequence[bool], said: Sequence[bool]) -> float:
    right = sum(map(min, truth, said))
    return 2 * right / max(sum(truth) + sum(said), 1)


def check_predictions(table: list[dict[str, str]], found: dict[str, float]) -> None:
    """The table alone gives the metrics, and the calibration error by its definition."""
    precisions = []
    scores = []
    shares = []
    hits = []
    for column in table[0]:
        if not column.startswith("probability_"):
            continue
        name = column.removeprefix("probability_")
        truth = [name in row["label"].split("; ") for row in table]
        said = [name in row["prediction"].split("; ") for row in table]
        values = [float(row[column]) for row in table]
        assert said == [value > 0.5 for value in values]
        # of each image with the label: among those that are as probable
        above = [[value >= other for value in values] for other in values]
        each = [np.mean(np.array(truth)[line]) for line in above]
        precisions.append(np.mean(np.array(each)[truth]))
        scores.append(f1_of(truth, said))
        shares += values
        hits += truth
    assert found["map"] == pytest.approx(np.mean(precisions), abs=1e-6)
    assert found["f1"] == pytest.approx(np.mean(scores), abs=1e-6)
    bins = np.digitize(shares, np.arange(1, 15) / 15)
    gaps = [
        abs(np.mean(np.array(shares)[bins == n]) - np.mean(np.array(hits)[bins == n]))
        * np.mean(bins == n)
        for n in set(bins)
    ]
    assert found["ece"] == pytest.approx(sum(gaps), abs=1e-4)


@on_ranks(1)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_weights_of_rare_labels(smoothing: float, is_mixed: bool) -> None:
    """With "auto" the best constant answer of each label is 0.5, as with torch's pos_weight.

    Without, it is the label's share of the images; smoothing moves it a little to the middle, and
    mixed images have the mean of what their parts have.
    """
    targets = torch.zeros(1000, 2)
    targets[:500, 0] = 1
    targets[:20, 1] = 1

    class Images:
        def __len__(self) -> int:
            return len(targets)

        def count_labels(self, index: int) -> dict[int, int]:
            return dict.fromkeys(targets[index].nonzero().flatten().tolist(), 1)

    weights = ddpkit.class_weights("auto", Images(), ["common", "rare"], True)
    assert weights.tolist() == [1, 49]
    if is_mixed:
        targets = 0.7 * targets + 0.3 * targets.roll(300, 0)

    def best(weights: torch.Tensor | None) -> list[float]:
        criterion = ddpkit.BinaryCrossEntropy(weights, smoothing)
        answers = torch.zeros(2, requires_grad=True)
        optimizer = torch.optim.LBFGS([answers], max_iter=100)

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            total = criterion(answers.expand(1000, 2), targets) / 1000
            total.backward()
            return total

        optimizer.step(loss)
        return answers.sigmoid().tolist()

    assert best(weights) == pytest.approx([0.5, 0.5], abs=1e-3)
    rare = 0.02 * (1 - smoothing) + smoothing / 2
    assert best(None) == pytest.approx([0.5, rare], abs=1e-3)


def test_groups_stay_together(several: Path) -> None:
    """With lists for validation or without, of the training set or of what is held out of it."""
    for fold in (1, 3), (3, 3), None:
        if fold is None:
            (several / "val.csv").unlink()
        train, val, _ = folders.find_classes(several, fold)
        groups = [{sample[2] for sample in part.samples} for part in (train, val)]
        assert len(train.samples) + len(val.samples) == 53
        assert groups[1]
        assert not groups[0] & groups[1]


@both_tasks
def test_a_test_set_and_mirrored_images(
    project: Project, own_data: Path, trained: Path, tmp_path: Path
) -> None:
    """In folders: another set than val; --tta changes the loss, and is the same on more ranks."""

    def run(what: str, on: int = 1) -> Done:
        words = ["--resume", trained / "best.pt", "--json"]
        words += what.split()
        return project.train(own_data, tmp_path, words, on=on)

    def evaluate(what: str, on: int = 1) -> dict[str, float]:
        return json.loads(run(what, on).ok().out.splitlines()[-1])

    run("--eval-only test").refused("folders.find_parts", own_data / "test")
    val = evaluate("--eval-only")
    shutil.copytree(own_data / "val", own_data / "test")
    assert evaluate("--eval-only test") == val
    first = min(
        path
        for path in (own_data / "test").rglob("*")
        if path.suffix in (".jpg", ".png")
    )
    for path in (own_data / "test").rglob(f"{first.stem}.*"):
        path.unlink()
    assert evaluate("--eval-only test") != val
    mirrored = evaluate("--eval-only --tta")
    assert mirrored["val_loss"] != val["val_loss"]
    assert evaluate("--eval-only --tta", on=2) == pytest.approx(mirrored, rel=1e-6)
