"""What the model gets wrong, and the pictures of it."""

import csv
import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from generated import Project, rows
from PIL import Image
from torch.nn.functional import cross_entropy

from ddpkit.ranks import distributed
from ddpkit.vision import mistakes, pictures

CPU = torch.device("cpu")
SEGMENTATION = pytest.mark.parametrize("project", ["segmentation"], indirect=True)


def table(path: Path) -> dict[str, dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return {row["class"]: row for row in csv.DictReader(file)}


def test_letters_that_the_font_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Boxes in place of letters are drawn with a line that says so, in whichever text."""
    for name, is_lacking in ("猫.jpg", True), ("🦄 x", True), ("ä.jpg", False):
        with pictures.drawing(tmp_path / "x.png") as figure:
            figure.suptitle(name)
        said = capsys.readouterr().out
        assert ("x.png: letters missing from matplotlib's font" in said) == is_lacking
        assert (tmp_path / "x.png").is_file()


@pytest.mark.parametrize("sides", [(), (5, 4)], ids=["labels", "masks"])
@pytest.mark.parametrize("ranks", [1, 3, 11])
def test_worst_on_any_number_of_ranks(
    sides: tuple[int, ...], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses are equal or NaN, pixels or images void, a rank has no batch."""
    generator = torch.Generator().manual_seed(1)
    outputs = 3 * torch.randn((40, 4, *sides), generator=generator)
    targets = torch.randint(0, 4, (40, *sides), generator=generator)
    outputs[10:35] = outputs[5]  # 26 equal losses
    targets[10:35] = targets[5]
    outputs[38] = math.nan
    targets[39] = 255
    if sides:
        targets[::2, 0] = 255
        targets[1::2, 1] = -1
    order = torch.arange(40)
    order[10:35] = order[10:35].flip(0)  # a batch need not be sorted
    valid = targets.where((targets >= 0) & (targets < 4), -100)
    each = [cross_entropy(outputs[i : i + 1], valid[i : i + 1]).item() for i in order]
    expected = sorted(
        [pair for pair in zip(each, order.tolist(), strict=True) if pair[1] != 39],
        key=lambda pair: (pair[1] != 38, -round(pair[0], 5), pair[1]),
    )[:12]
    parts = []
    for rank in range(ranks):
        mine = mistakes.TopLosses(CPU)
        for start in range(4 * rank, 40, 4 * ranks):
            at = order[start : start + 4]
            mine.update(outputs[at], targets[at], at)
        parts.append(mine)
    every: list[tuple] = []
    monkeypatch.setattr(
        distributed, "gather_objects", lambda own: every.append(own) or []
    )
    for part in parts:
        part.compute()
    assert all(len(pairs) <= 12 for pairs, _ in every)
    monkeypatch.setattr(distributed, "gather_objects", lambda _: every)
    found = parts[0].compute()
    assert [index for _, index in found] == [index for _, index in expected]
    losses = [loss for loss, _ in expected]
    assert [loss for loss, _ in found] == pytest.approx(losses, rel=1e-5, nan_ok=True)


def test_per_class(tmp_path: Path) -> None:
    """Worked out by hand; 0 / 0 is nan, and any names will do."""
    confusion = torch.tensor(
        [
            [6, 1, 0, 1, 0],
            [1, 1, 0, 0, 0],
            [3, 0, 0, 0, 0],  # never predicted
            [0, 0, 0, 0, 0],  # never comes
            [0, 0, 0, 0, 0],  # neither
        ]
    )
    names = ["a,b", 'q"', "é", "$x$", " "]
    mistakes.write_per_class(tmp_path / "it.csv", confusion, names)
    found = table(tmp_path / "it.csv")
    nan = math.nan
    expected = [
        [0.6, 0.75, 2 / 3, 0.5, 8],
        [0.5, 0.5, 0.5, 1 / 3, 2],
        [nan, 0, 0, 0, 3],
        [0, nan, 0, 0, 0],
        [nan, nan, nan, nan, 0],
    ]
    assert list(found) == names
    for row, right in zip(found.values(), expected, strict=True):
        numbers = [float(value) for name, value in row.items() if name != "class"]
        assert numbers == pytest.approx(right, abs=1e-6, nan_ok=True)


@SEGMENTATION
def test_files_of_a_run(
    project: Project, data: Path, trained: Path, tmp_path: Path
) -> None:
    """Those of --eval-only, the same on one and three ranks, say what metrics.csv says.

    They lie apart from the run's own, which stay. The network is the checkpoint's.
    """
    run = shutil.copytree(trained, tmp_path / "run")
    others = tmp_path / "others"
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    out = run / "eval"
    words = "--data", data, "--output-dir", run, "--eval-only", "--json"
    done = project.run(words, on=1, draws=True).ok()
    said, numbers = done.out.splitlines()[-2:]
    written = "per_class.csv, confusion.png, worst.png, worst.csv, predictions.csv"
    assert said == f"written to {out}: {written}"
    assert (out / "per_class.csv").read_bytes() == before["per_class.csv"]
    assert before == {
        path.name: path.read_bytes() for path in run.iterdir() if path.is_file()
    }
    best = trained / "best.pt"
    words = "--eval-only", "--resume", best
    done = project.train(data, others, words, on=3, draws=True).ok()
    others = others / "eval"
    assert (out / "per_class.csv").read_text() == (others / "per_class.csv").read_text()
    for name in "confusion.png", "worst.png":
        one = np.asarray(Image.open(out / name))
        other = np.asarray(Image.open(others / name))
        assert np.array_equal(one, other)
    check_worst(out / "worst.csv", others / "worst.csv", data / "val")
    (row,) = rows(trained)
    found = json.loads(numbers)
    assert found.keys() >= {"val_loss", "miou"}
    for name, value in found.items():
        assert value == pytest.approx(float(row[name]), rel=1e-4)
    classes = table(out / "per_class.csv")
    assert len(classes) >= 2
    for name, each in classes.items():
        assert float(each["iou"]) == pytest.approx(float(row[f"iou_{name}"]), abs=1e-5)
    check_printed(done.out, classes, found)
    every = [folder / "predictions.csv" for folder in (out, others)]
    check_areas(*every, list(classes), found["miou"])


def test_predictions_of_classes(
    project: Project, data: Path, trained: Path, tmp_path: Path
) -> None:
    """The table alone gives accuracy, loss and calibration error, on any number of ranks."""
    tables = []
    results = []
    for ranks in 1, 3:
        out = tmp_path / f"{ranks}"
        words = "--eval-only", "--json", "--resume", trained / "best.pt"
        done = project.train(data, out, words, on=ranks).ok()
        results.append(json.loads(done.out.splitlines()[-1]))
        with open(out / "eval/predictions.csv", newline="") as file:
            tables.append(list(csv.DictReader(file)))
        assert not (out / "eval/thresholds.csv").exists()
    first, second = results
    assert first == pytest.approx(second, rel=1e-6)
    every, others = tables
    assert [row["path"] for row in every] == sorted(map(str, data.glob("val/*/*")))
    losses = []
    confidence = []
    for row, other in zip(every, others, strict=True):
        shares = {
            name.removeprefix("probability_"): float(value)
            for name, value in row.items()
            if name.startswith("probability_")
        }
        assert sum(shares.values()) == pytest.approx(1, abs=1e-6)
        assert row["label"] == Path(row["path"]).parent.name
        assert row["prediction"] == max(shares, key=shares.__getitem__)
        for name, value in row.items():
            if name in ("path", "label", "prediction"):
                assert other[name] == value
            else:
                assert float(other[name]) == pytest.approx(float(value), rel=1e-4)
        losses.append(-math.log(shares[row["label"]]))
        assert float(row["loss"]) == pytest.approx(losses[-1], rel=1e-4)
        confidence.append(max(shares.values()))
    is_right = np.array([row["label"] == row["prediction"] for row in every])
    assert first["top1"] == pytest.approx(is_right.mean())
    assert first["val_loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    bins = np.digitize(confidence, np.arange(1, 15) / 15)
    gaps = [
        abs(np.sum(np.array(confidence)[bins == n] - is_right[bins == n]))
        for n in set(bins)
    ]
    assert first["ece"] == pytest.approx(sum(gaps) / len(every), abs=1e-5)


def check_areas(one: Path, other: Path, classes: Sequence[str], miou: float) -> None:
    """The pixels of all images give the metric, on any number of ranks."""
    tables = []
    for path in one, other:
        with open(path, newline="") as file:
            tables.append(list(csv.DictReader(file)))
    for row, other_row in zip(*tables, strict=True):
        loss = float(other_row.pop("loss"))
        assert float(row.pop("loss")) == pytest.approx(loss, rel=1e-5)
        assert row == other_row
    each = []
    for name in classes:
        label, said, both = (
            sum(int(row[f"{part}_pixels_{name}"]) for row in tables[0])
            for part in ("label", "predicted", "right")
        )
        each.append(both / (label + said - both))
    assert np.mean(each) == pytest.approx(miou, abs=1e-6)


def check_worst(one: Path, other: Path, val: Path) -> None:
    """Files that exist, and what is in their masks, whatever the number of ranks."""
    with open(one, newline="") as file, open(other, newline="") as other_file:
        found = list(csv.DictReader(file))
        others = list(csv.DictReader(other_file))
    assert len(found) == len(others) == 12
    losses = [float(row["loss"]) for row in found]
    assert losses == sorted(losses, reverse=True)
    for row, other_row in zip(found, others, strict=True):
        assert float(row.pop("loss")) == pytest.approx(
            float(other_row.pop("loss")), rel=1e-3
        )
        assert row == other_row
        path = Path(row["path"])
        assert path.parent == val / "images"
        mask = np.asarray(Image.open(val / "masks" / f"{path.stem}.png"))
        share = 100 * (mask == 1).sum() / (mask < 2).sum()
        crack = re.search(r"crack ([\d.]+)%", row["label"])
        assert float(crack[1] if crack else 0) == pytest.approx(share, rel=0.01)
        assert row["prediction"]


def check_printed(said: str, classes: dict, results: dict[str, float]) -> None:
    """A table of the classes, their means, and the results that are not in it."""
    lines = [line.split() for line in said.splitlines()]
    at = lines.index(["class", "pixels", "precision", "recall", "f1", "iou"])
    for line, (name, row) in zip(lines[at + 1 :], classes.items(), strict=False):
        assert line[:2] == [name, f"{int(row['support']):,}"]
        numbers = [row[measure] for measure in lines[at][2:]]
        assert line[2:] == [f"{float(number):.4f}" for number in numbers]
    last = lines[at + len(classes) + 1 :]
    assert last[0][:2] == ["mean,", "sum"]
    assert last[0][-1] == f"{results['miou']:.4f}"
    names = ("val_loss", "miou")
    assert last[1:3] == [[name, f"{results[name]:.4f}"] for name in names]
    pixels = {name: int(row["support"]) for name, row in classes.items()}
    usual = max(pixels, key=pixels.__getitem__)
    guess = pixels[usual] / sum(pixels.values()) / len(pixels)
    line = f"no better than a guess: always answering {usual} has miou {guess:.4f}"
    assert (line in said) == (results["miou"] <= guess)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [2, 100])
def test_plots(tmp_path: Path, count: int) -> None:
    """Of a bounded size: many classes with long names, a row without labels, NaN, one epoch."""
    confusion = 97 * torch.eye(count).long()
    confusion[-1] = 0
    names = [f"$a very long name of class {i}" for i in range(count)]
    first = {"epoch": 1, "val_loss": math.nan, "when": "today"}
    second = {
        **first,
        "epoch": 2,
        "miou": None,
        **{f"iou_{name}": 0.5 for name in names},
    }
    pictures.draw_confusion(tmp_path / "confusion.png", confusion, names)
    pictures.draw_curves(tmp_path / "first.png", [first], names)
    pictures.draw_curves(tmp_path / "curves.png", [first, second], names)
    for name in "confusion.png", "first.png", "curves.png":
        with Image.open(tmp_path / name) as drawn:
            assert all(300 <= side <= 2300 for side in drawn.size)


def predict(project: Project, inputs: Path, checkpoint: Path, out: Path) -> Path:
    words = inputs, "--checkpoint", checkpoint, "--output", out
    project.run(words, script="predict.py", on=1).ok()
    return out


@SEGMENTATION
def test_predicted_masks(
    project: Project, data: Path, trained: Path, tmp_path: Path
) -> None:
    """In the checkpoint's colours, also as a tint of the image."""
    state = torch.load(trained / "best.pt", weights_only=True)
    state["colors"] = [[10, 20, 30], [200, 100, 0]]
    torch.save(state, tmp_path / "colored.pt")
    out = predict(project, data / "val/images", tmp_path / "colored.pt", tmp_path / "o")
    assert (out / "legend.png").exists()
    path = min((out / "masks").iterdir())
    mask = Image.open(path)
    assert mask.getpalette()[:6] == [10, 20, 30, 200, 100, 0]
    given = np.asarray(Image.open(data / "val" / "images" / f"{path.stem}.jpg"))
    drawn = np.asarray(Image.open(out / "overlays" / path.name))
    is_zero = np.array(mask) == 0
    assert is_zero.any()
    assert np.abs(drawn - (0.6 * given + [4, 8, 12]))[is_zero].max() <= 3


def test_scores_of_all_classes(
    project: Project, data: Path, trained: Path, tmp_path: Path
) -> None:
    predict(project, data / "val", trained / "best.pt", tmp_path)
    with open(tmp_path / "predictions.csv", newline="") as file:
        found = list(csv.DictReader(file))
    classes = torch.load(trained / "best.pt", weights_only=True)["classes"]
    columns = [f"probability_{name}" for name in classes]
    assert list(found[0]) == ["file", "class", "probability", *columns]
    assert len(found) == 23
    for row in found:
        highest = max((row[column] for column in columns), key=float)
        assert row[f"probability_{row['class']}"] == row["probability"] == highest
