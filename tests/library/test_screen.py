"""What a person sees of a run: its lines, the files that it got wrong, and runs compared."""

import csv
import json
import math
import os
import random
import re
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generated import ROOT, Command, Done, Project, rows
from matplotlib.figure import Figure
from PIL import Image

import ddpkit
from ddpkit.vision import mistakes, pictures, reporting
from ddpkit.vision.mistakes import Mistakes
from ddpkit.vision.rows import best_row, epoch_lines, what_next


def columns(header: str, line: str) -> dict[str, str]:
    """The cells of a line by the names above them; each ends where its name does."""
    ends = {name: at.end() for at in re.finditer(r"\S+", header) for name in [at[0]]}
    found = {}
    start = len(re.match(r"epoch \d+/\d+ *", line)[0])
    for name, end in ends.items():
        found[name] = line[start:end].split()[-1]
        assert line[end : end + 1] in ("", " "), (name, line)
        start = end
    return found


def test_lines_of_a_run(project: Project, few: Path, tmp_path: Path) -> None:
    """The network, the images that are left out, and columns; the header where a run goes on."""
    out = tmp_path / "out"
    more = "--freeze-backbone", 1
    said = project.train(few, out, more, "--epochs", 2).ok().out
    lines = said.splitlines()
    (about,) = [line for line in lines if "steps per epoch" in line]
    numbers = re.fullmatch(
        r"(\d+) training \+ \d+ validation images \| (\d+) steps per epoch",
        about,
    )
    skipped = lines[lines.index(about) + 1]
    text = r"drop_last: (\d+) images skipped per epoch \(different ones each time\)"
    left = int(re.fullmatch(text, skipped)[1])
    total, steps = map(int, numbers.groups())
    assert total == 8 * steps + left
    (few_steps,) = [line for line in lines if "optimizer steps in total" in line]
    advice = (
        f"only {2 * steps} optimizer steps in total; 1,000 or more are typical: try "
    )
    size, epochs = re.fullmatch(
        re.escape(advice) + r"--batch-size (\d+) --epochs (\d+)", few_steps
    ).groups()
    assert int(epochs) * (total // (8 // 4 * int(size))) >= 1000
    assert left > 0
    networks = [line for line in lines if " parameters" in line]
    state = torch.load(out / "best.pt", weights_only=True)["model"]
    count = sum(
        value.numel()
        for name, value in state.items()
        if not re.search("running_|num_batches", name)
    )
    head = sum(state[name].numel() for name in ("fc.weight", "fc.bias"))
    frozen = f"ShuffleNetV2: {count:,} parameters, {head:,} of them trained"
    assert networks == [frozen, f"ShuffleNetV2: {count:,} parameters"]

    said += project.train(few, out, more, "--epochs", 3).ok().out
    lines = said.splitlines()
    headers = [line for line in lines if "train_loss  val_loss" in line]
    assert len(headers) == 2
    assert headers[0].split() == ["train_loss", "val_loss", "top1", "top5", "eta"]
    epochs = [line for line in lines if line.startswith("epoch ")]
    assert len(epochs) == 3
    table = rows(out)
    best = 0.0
    for line, row in zip(epochs, table, strict=True):
        assert len(line) <= 100
        cells = columns(headers[0], line)
        for name in headers[0].split()[:-1]:
            assert cells[name] == f"{float(row[name]):.4f}"
        assert line.endswith("best") == (float(row["top1"]) > best)
        best = max(best, float(row["top1"]))
    (command,) = re.findall(r"^next: (.*)", said.split("done: ")[-1], re.M)
    words = shlex.split(command)
    assert words[0] == "python"
    assert words[3] == "--checkpoint"
    for path in words[1], words[2], words[4]:
        assert (project.folder / path).is_file()


def test_columns_that_do_not_fit() -> None:
    """At most 100 letters: the metric of best.pt is there; those of classes, if all of them fit."""
    row: dict[str, Any] = {"epoch": 3, "step": 7, "note": "text", "lr": 0.1}
    row |= {f"metric_of_number_{i}": i / 7 for i in range(20)}
    row |= {"iou_a": 0.5, "iou_b": 0.25, "cost": 1e9, "val_loss": 1e-7, "score": -1.5}
    header, line = epoch_lines(row, 900, ["a", "b"], "00:01", "score", is_best=True)
    assert len(line) <= 100
    assert header.split()[:2] == ["val_loss", "score"]
    cells = columns(header, line)
    assert cells["val_loss"] == "1.00e-07"
    assert cells["score"] == "-1.5000"
    assert not cells.keys() & {"note", "lr", "step", "iou_a"}
    few = {name: row[name] for name in ("epoch", "iou_a", "iou_b", "cost", "val_loss")}
    header, line = epoch_lines(few, 900, ["a", "b"], "1:00:01")
    assert header.split() == ["val_loss", "cost", "iou_a", "iou_b", "eta"]
    assert columns(header, line)["cost"] == "1.00e+09"
    following, _ = epoch_lines({**few, "epoch": 4}, 900, ["a", "b"], "00:01")
    assert following == header
    few["new"] = 1.0
    following, _ = epoch_lines({**few, "epoch": 5}, 900, ["a", "b"], "00:01")
    assert following != header
    # best.pt is chosen by a class; a class is called loss
    few = {
        "epoch": 1,
        "train_loss": 2.0,
        "val_loss": 1.0,
        "iou_a": 0.5,
        "iou_loss": 0.1,
    }
    header, _ = epoch_lines(few, 900, ["a", "loss"], "00:01", "iou_a")
    assert header.split() == ["train_loss", "val_loss", "iou_a", "iou_loss", "eta"]


class Paths:
    """Images whose file says what they are: one pixel, its label, in a list `samples`."""

    def __init__(self, paths: list[Path]) -> None:
        self.samples = [(str(path), int(path.parts[-4][0])) for path in paths]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        value = index * 255 // len(self)
        image = torch.full((3, 4, 4), value, dtype=torch.uint8)
        return image, self.samples[index][1]


def test_files_that_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any name of a file comes back; in the picture, nested ones of one name are told apart."""
    names = ['a, "b".jpg', "a;b=1.jpg", "001.jpg", "é'\udcff.jpg", "x" * 90 + ".jpg"]
    folders = ["2024/cam1", "2024/cam2"]
    classes = ["0cat", "1dog, or not"]
    paths = [
        tmp_path / "val" / kind / folder / name
        for kind in classes
        for folder in folders
        for name in names
    ]
    loader = ddpkit.val_loader(Paths(paths), 4, classes=classes, workers=0)
    worst = [
        (9.0 - i / 3, index) for i, index in enumerate([3, 19, 0, 2, 7, 12, 17, 4])
    ]
    titles: list[list[str]] = []

    def draw(axes: Any, image: torch.Tensor, *_: Any) -> None:
        axes.imshow(image.permute(1, 2, 0).numpy())

    def take(_: Path, examples: list, *more: Any) -> None:
        titles.extend(above for *_, above in examples)
        original(_, examples, *more)

    original = pictures.draw_images
    monkeypatch.setattr(pictures, "draw_images", take)
    model = torch.nn.Linear(1, 1)

    def predict(_: Any, images: torch.Tensor) -> torch.Tensor:
        return torch.eye(2)[[1]].repeat(len(images), 1)

    found = Mistakes(model, loader, classes, predict, draw)
    found.write_files(tmp_path, None, worst)
    with open(tmp_path / "worst.csv", newline="", errors="surrogateescape") as file:
        table = list(csv.DictReader(file))
    assert [row["path"] for row in table] == [str(paths[index]) for _, index in worst]
    assert [row["label"] for row in table] == [
        classes[index // 10] for _, index in worst
    ]
    assert {row["prediction"] for row in table} == {"1dog, or not"}
    assert [float(row["loss"]) for row in table] == pytest.approx(
        [loss for loss, _ in worst], rel=1e-3
    )
    assert titles[3][0] == "0cat/2024/cam1/001.jpg"
    assert titles[4][0] == "0cat/2024/cam2/001.jpg"
    assert [above[1].split()[0] for above in titles] == [f"{i}." for i in range(1, 9)]
    long = titles[-1][0]
    assert len(long) == 40
    assert long.startswith("0cat/2024/cam")
    assert long.endswith("x.jpg")
    with Image.open(tmp_path / "worst.png") as drawn:
        assert np.asarray(drawn).std() > 10


def test_what_is_wrong_in_a_mask() -> None:
    """Wrong pixels are marked; void and padding are not. The tints are those of the classes."""
    truth = torch.tensor([[1, 1, 1, 0, 0, 2, 255, 255]], dtype=torch.uint8)
    guess = torch.tensor([[1, 0, 2, 1, 0, 2, 1, 0]], dtype=torch.uint8)
    image = torch.full((3, 1, 8), 90, dtype=torch.uint8)
    truth, guess = truth.repeat(8, 1), guess.repeat(8, 1)
    image = image.repeat(1, 8, 1)
    image[:, :, 7] = 0  # padded
    figure = Figure()
    axes = figure.subplots()
    classes = ["ground", "a", "b"]
    pictures.draw_masks(axes, image, guess, truth, classes)
    drawn = np.asarray(axes.images[0].get_array())
    assert drawn.shape == (8, 4 * 7 + 3 * 4, 3)  # with gaps
    plain, predicted, true, errors = (drawn[4, 11 * i :][:7] for i in range(4))
    assert (plain == 90).all()
    colors = pictures.colors_of(classes, 256)
    for panel, mask in (predicted, guess), (true, truth):
        for pixel, number in zip(panel, mask[0].tolist(), strict=False):
            color = colors[number] if number else np.full(3, 90)
            assert np.abs(pixel - (0.6 * 90 + 0.4 * color)).max() <= 1
    is_wrong = (errors == pictures.WRONG).all(1)
    assert is_wrong.tolist() == [False, True, True, True, False, False, False]
    assert len({*errors[~is_wrong].flatten().tolist()}) == 1  # pale
    # of 0: 1 of 3, of 1: 1 of 4, of 2: 1 of 2
    assert axes.get_title() == "mean IoU 0.36"
    pictures.draw_legend(figure, classes, {0, 1, 2, 255})
    (legend,) = figure.legends
    said = [text.get_text().strip() for text in legend.get_texts()]
    assert said == ["a", "b", "void"]
    pictures.draw_masks(axes, image, guess, torch.full_like(truth, 255), classes)
    assert axes.get_title() == "mean IoU nan"


def test_tables_of_classes() -> None:
    """Images or pixels; of many classes those with the lowest f1; of none a mean without nan."""
    matrix = torch.eye(60).long() * 9
    matrix[7, 8] = 90
    matrix[59] = 0
    names = [f"class {i}" for i in range(60)]
    lines = mistakes.per_class_lines(matrix, names, images=621)
    assert lines[0].split() == ["class", "images", "precision", "recall", "f1"]
    assert len(lines) == 23
    assert lines[1].split()[:3] == ["class", "7", "99"]
    assert lines[-2].split()[:3] == ["mean,", "sum", "621"]
    assert "nan" not in lines[-2]
    assert "20 of 60 classes" in lines[-1]
    lines = mistakes.per_class_lines(matrix[:2, :2], names[:2], images=17)
    assert lines[0].split() == ["class", "pixels", "precision", "recall", "f1", "iou"]
    assert len(lines) == 4


def test_what_a_table_lacks() -> None:
    """An evaluation's loss, and an own metric of each class, are printed below the table."""
    names = ["ground", "loss"]
    results = {"val_loss": 0.5, "miou": 1.0, "iou_loss": 1.0, "dice_loss": 0.25}
    matrix = torch.eye(2).long() * 9
    lines = reporting.evaluation_lines(results, matrix, names, None)
    assert [line.split()[0] for line in lines[4:]] == ["val_loss", "miou", "dice_loss"]


def compare(folder: Path, *words: str) -> Done:
    path = os.pathsep.join([str(folder / "no torch"), str(ROOT)])
    command = [sys.executable, "-m", "ddpkit", "compare", *words]
    return Command(command, folder, PYTHONPATH=path).end()


def test_the_best_row() -> None:
    """By the direction, the first of equal ones; rows without the number do not count."""
    scores = math.nan, 2.0, 1.0, 3.0, "text", 1.0, 3.0
    found = [{"epoch": n, "score": score} for n, score in enumerate(scores)]
    assert best_row(found, "score", "max") == found[3]
    assert best_row(found, "score", "min") == found[2]
    assert best_row(found, "other", "min") is None


def test_compare(project: Project, trained: Path, tmp_path: Path) -> None:
    """Real and damaged runs, one that has just begun, and what is no run; torch is not imported."""
    (tmp_path / "no torch").mkdir()
    (tmp_path / "no torch/torch.py").write_text("raise SystemExit('torch')")
    (tmp_path / "no torch/numpy.py").write_text("raise SystemExit('numpy')")
    runs = tmp_path / "runs"
    about = json.loads((trained / "args.json").read_text())
    text = (trained / "metrics.csv").read_text()
    top1 = float(rows(trained)[0]["top1"])

    def make(name: str, table: str, best: Any = None, **flags: Any) -> None:
        folder = runs / name
        folder.mkdir(parents=True)
        facts = {**about, "flags": {**about["flags"], "output_dir": name, **flags}}
        if best:
            facts["best"] = best
        (folder / "args.json").write_text(json.dumps(facts))
        if table:
            (folder / "metrics.csv").write_text(table)

    header, row = text.splitlines()
    at = header.split(",").index("top1")
    cells = row.split(",")
    cells[0], cells[at] = "2", "1.0"
    make("first", text)
    make(
        'a, "b"',
        f"{text}{','.join(cells)}\n3,9",
        lr=0.5,
        augment="rand,color",
        crop=None,
    )
    make("new", "")
    make("search/0", text, ["val_loss", "min"])
    chance = random.Random(1)
    (runs / "damaged").mkdir()
    (runs / "damaged/args.json").write_bytes(chance.randbytes(99))
    (runs / "list").mkdir()
    (runs / "list/args.json").write_text("[]")
    make("garbage", "")
    (runs / "garbage/metrics.csv").write_bytes(chance.randbytes(999))
    (runs / "empty").mkdir()
    (runs / "notes.txt").touch()

    words = sorted(str(path.relative_to(tmp_path)) for path in runs.iterdir())
    said = compare(tmp_path, *words).ok().out.splitlines()
    for name in "damaged", "list", "empty", "notes.txt":
        assert sum(line.startswith(f"runs/{name}: skipped") for line in said) == 1
    table = said[4:]
    titles = table[0].split()
    assert titles == ["run", "best", "epoch", "done", "trained", "--lr", "--augment"]
    assert [line.split("  ")[0] for line in table[1:]] == [
        *('runs/a, "b"', "runs/first", "runs/search/0"),
        *("runs/garbage", "runs/new"),
    ]
    assert table[1].split()[-6:-2] == ["1.0000", "2", "3/1", table[1].split()[-3]]
    assert table[1].split()[-2:] == ["0.5", "rand,color"]
    assert table[2].split()[1:5] == ["top1", f"{top1:.4f}", "1", "1/1"]
    assert table[3].split()[1] == "val_loss"
    assert table[5].split()[1:4] == ["-", "-", "0/1"]
    one = compare(tmp_path, "runs/first").ok().out.splitlines()
    assert one[0].split() == titles[:5]
    make("larger", text)
    facts = {**about, "global_batch": 2 * about["global_batch"]}
    (runs / "larger/args.json").write_text(json.dumps(facts))
    two = compare(tmp_path, "runs/first", "runs/larger").ok().out.splitlines()
    assert two[0].split()[5:] == ["global", "batch"]
    batches = sorted(int(line.split()[-1]) for line in two[1:])
    assert batches == [about["global_batch"], facts["global_batch"]]
    compare(tmp_path, "runs/empty").failed("compare.main", "no run in runs/empty")


def test_what_to_try_next() -> None:
    """Overfitting by both losses, a best last epoch, nothing, or too few epochs to tell."""

    def hint(train: list[float], val: list[float]) -> str:
        pairs = enumerate(zip(train, val, strict=True), 1)
        found = [
            {"epoch": n, "train_loss": a, "val_loss": b, "top1": 1 - b}
            for n, (a, b) in pairs
        ]
        return what_next(found, "top1", "max")

    down = [0.9, 0.5, 0.4, 0.3, 0.2, 0.1]
    assert "overfitting since epoch 2:" in hint(down, [0.8, 0.5, 0.6, 0.7, 0.8, 0.9])
    assert "the last epoch was the best" in hint(down, down)
    assert hint(down, [0.8, 0.5, 0.51, 0.51, 0.51, 0.51]) == ""
    assert hint(down[::-1], [0.8, 0.5, 0.6, 0.7, 0.8, 0.9]) == ""
    assert hint(down[:5], down[:5]) == ""


def test_weak_points(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A class that is never predicted, and a score that a constant answer has; or nothing."""
    path = tmp_path / "per_class.csv"

    def said(confusion: list[list[int]], **results: float) -> list[str]:
        mistakes.write_per_class(path, torch.tensor(confusion), ["a", "b", "c"])
        mistakes.say_weak(tmp_path, results)
        return capsys.readouterr().out.splitlines()

    always = [[1, 0, 0], [8, 0, 0], [0, 0, 0]]  # there is no c
    guess = "no better than a guess: always answering b has"
    assert said(always, top1=1 / 9, val_loss=0.1) == [
        "never predicted: b",
        f"{guess} top1 0.8889",
    ]
    assert said([[0, 1, 0], [0, 8, 0], [0, 0, 0]], miou=4 / 9) == [
        "never predicted: a",
        f"{guess} miou 0.4444",
    ]
    assert not said([[1, 0, 0], [1, 7, 1], [0, 0, 0]], top1=0.91)
    path.unlink()
    mistakes.say_weak(tmp_path, {"top1": 0.0})
    assert not capsys.readouterr().out


def test_a_batch_size_that_leaves_out_less() -> None:
    """Of 30 images a step takes 2 x 8, and 14 remain; 2 x 2 leave out 2."""
    source = types.SimpleNamespace(total=30, global_batch=16)
    assert reporting.left_out(source, 8).endswith("; try --batch-size 2")
    source.global_batch = 14
    assert "try" not in reporting.left_out(source, 7)
