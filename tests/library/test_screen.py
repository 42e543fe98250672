"""What a person sees of a run: its lines, and the files that it got wrong."""

import csv
import math
import re
import shlex
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generated import Project, rows
from matplotlib.figure import Figure
from PIL import Image

import ddpkit
from ddpkit.vision import mistakes, pictures, reporting
from ddpkit.vision.mistakes import Mistakes
from ddpkit.vision.rows import best_row, epoch_line, what_next


def test_lines_of_a_run(project: Project, few: Path, tmp_path: Path) -> None:
    """The network, the images that are left out, and the numbers of each epoch."""
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
    (few_steps,) = [line for line in lines if "optimizer steps in all" in line]
    advice = f"only {2 * steps} optimizer steps in all; 1,000 or more are usual: try "
    assert few_steps == f"{advice}--batch-size 1 and more --epochs"
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
    epochs = [line for line in lines if line.startswith("epoch ")]
    assert len(epochs) == 3
    table = rows(out)
    best = 0.0
    for line, row in zip(epochs, table, strict=True):
        for name in "train_loss", "val_loss", "top1", "top5":
            assert f"  {name} {float(row[name]):.4f}  " in line
        assert line.endswith("best") == (float(row["top1"]) > best)
        best = max(best, float(row["top1"]))
    (command,) = re.findall(r"^next: (.*)", said.split("done: ")[-1], re.M)
    words = shlex.split(command)
    assert words[0] == "python"
    assert words[3] == "--checkpoint"
    for path in words[1], words[2], words[4]:
        assert (project.folder / path).is_file()


def test_numbers_of_classes() -> None:
    """They are in the line of an epoch if there are few numbers."""
    row: dict[str, Any] = {"epoch": 3, "step": 7, "note": "text", "lr": 0.1}
    row |= {"cost": 1e9, "val_loss": 1e-7, "iou_a": 0.5, "iou_b": -0.25}
    few = "cost 1.00e+09  val_loss 1.00e-07  iou_a 0.5000  iou_b -0.2500"
    assert epoch_line(row, 900, ["a", "b"]) == f"epoch 3/900  {few}"
    row |= {f"metric_{i}": i / 7 for i in range(5)}
    names = epoch_line(row, 900, ["a", "b"]).split()[2::2]
    assert names == ["cost", "val_loss", *[f"metric_{i}" for i in range(5)]]


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
    """Any name of a file comes back; in the picture, with that of its folder."""
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

    def take(_: Path, examples: list, *more: Any) -> int:
        titles.extend(above for _, above, _ in examples)
        return original(_, examples, *more)

    original = pictures.draw_grid
    monkeypatch.setattr(pictures, "draw_grid", take)
    model = torch.nn.Linear(1, 1)

    def predict(_: Any, images: torch.Tensor) -> torch.Tensor:
        return torch.eye(2)[[1]].repeat(len(images), 1)

    found = Mistakes(model, loader, classes, predict, draw)
    found.write_files(tmp_path, None, worst)
    every = [
        (loss, index, np.int64(index // 10), np.float32([0.2, 0.8]))
        for loss, index in worst
    ]
    found.write_predictions(tmp_path, every)
    path = tmp_path / "predictions.csv"
    with open(path, newline="", errors="surrogateescape") as file:
        table = list(csv.DictReader(file))
    worst.sort(key=lambda pair: pair[1])
    assert [row["path"] for row in table] == [str(paths[index]) for _, index in worst]
    assert [row["label"] for row in table] == [
        classes[index // 10] for _, index in worst
    ]
    assert {row["prediction"] for row in table} == {"1dog, or not"}
    assert [float(row["loss"]) for row in table] == pytest.approx(
        [loss for loss, _ in worst], rel=1e-3
    )
    assert titles[3][0] == "cam1/001.jpg"
    assert titles[4][0] == "cam2/001.jpg"
    assert [above[1].split()[0] for above in titles] == [f"{i}." for i in range(1, 9)]
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
    assert said == ["ground (not tinted)", "a", "b", "void"]
    pictures.draw_masks(axes, image, guess, torch.full_like(truth, 255), classes)
    assert axes.get_title() == "mean IoU nan"


def test_the_best_row() -> None:
    """By the direction, the first of equal ones; rows without the number do not count."""
    scores = math.nan, 2.0, 1.0, 3.0, "text", 1.0, 3.0
    found = [{"epoch": n, "score": score} for n, score in enumerate(scores)]
    assert best_row(found, "score", "max") == found[3]
    assert best_row(found, "score", "min") == found[2]
    assert best_row(found, "other", "min") is None


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


def test_a_batch_size_that_leaves_out_much() -> None:
    source = types.SimpleNamespace(total=30, global_batch=16)
    assert reporting.left_out(source).endswith(
        "; a smaller --batch-size may skip fewer"
    )
    source.global_batch = 14
    assert "smaller" not in reporting.left_out(source)
