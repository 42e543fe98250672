"""What the model gets wrong, and the pictures of it."""

import csv
import json
import math
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from generated import Project, both_tasks, rows
from matplotlib.figure import Figure
from PIL import Image
from ranks import on_ranks
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchmetrics.classification import (
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassJaccardIndex,
    MulticlassPrecision,
    MulticlassRecall,
)

from ddpkit.data import folders
from ddpkit.data.samples import Seeded
from ddpkit.ranks import distributed
from ddpkit.run import metrics, pictures

CPU = torch.device("cpu")


def table(path: Path) -> dict[str, dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return {row["class"]: row for row in csv.DictReader(file)}


class TestWorst:
    @pytest.mark.parametrize("sides", [(), (5, 4)], ids=["labels", "masks"])
    @pytest.mark.parametrize("ranks", [1, 2, 3, 9])
    def test_the_same_on_any_number_of_ranks(
        self, sides: tuple[int, ...], ranks: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also where losses are equal or NaN, pixels or images are void, a rank has no batch."""
        generator = torch.Generator().manual_seed(1)
        outputs = 3 * torch.randn(40, 4, *sides, generator=generator)
        targets = torch.randint(0, 4, (40, *sides), generator=generator)
        outputs[10:35], targets[10:35] = outputs[5], targets[5]  # 26 equal losses
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
            mine = metrics.Worst(CPU)
            for start in range(4 * rank, 40, 4 * ranks):
                at = order[start : start + 4]
                mine.update(outputs[at], targets[at], at)
            parts.append(mine)
        given = [list(zip(w.losses.tolist(), w.indices.tolist(), strict=True)) for w in parts]
        monkeypatch.setattr(distributed, "gather_objects", lambda _: given)
        found = parts[0].compute()
        assert [index for _, index in found] == [index for _, index in expected]
        losses = [loss for loss, _ in expected]
        assert [loss for loss, _ in found] == pytest.approx(losses, rel=1e-5, nan_ok=True)

    @pytest.mark.parametrize(
        ("outputs", "targets"),
        [
            (torch.zeros(2, 3), torch.zeros(2, 3)),
            (torch.zeros(2, 3), torch.zeros(2)),
            (torch.zeros(2), torch.zeros(2).long()),
            (torch.zeros(2, 3, 4, 4), torch.zeros(2, 8, 8).long()),
            (torch.zeros(2, 3, 4, 4), torch.full((2, 4, 4), 255)),
        ],
        ids=["soft", "floats", "no classes", "sizes", "void"],
    )
    def test_what_has_no_classes_is_left_out(
        self, outputs: Tensor, targets: Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(distributed, "gather_objects", lambda mine: [mine])
        worst = metrics.Worst(CPU)
        worst.update(outputs, targets, torch.arange(2))
        assert worst.compute() == []


class TestCounts:
    def test_per_class(self, tmp_path: Path) -> None:
        """What torchmetrics makes of the same predictions; 0 / 0 is nan."""
        generator = torch.Generator().manual_seed(0)
        guess, truth = torch.randint(0, 6, (2, 500), generator=generator)
        truth[truth == 1], guess[guess == 2] = 0, 0  # 1 never comes, 2 is never predicted
        truth[truth == 5], guess[guess == 5] = 0, 0
        truth[::7] = 255
        confusion = MulticlassConfusionMatrix(6, ignore_index=255)(guess, truth)
        names = ["a,b", 'q"', "é", "$x$", " ", "neither"]
        metrics.write_per_class(tmp_path / "it.csv", confusion, names)
        found = table(tmp_path / "it.csv")
        assert list(found) == names
        classes = {
            "precision": MulticlassPrecision,
            "recall": MulticlassRecall,
            "f1": MulticlassF1Score,
            "iou": MulticlassJaccardIndex,
        }
        for column, metric in classes.items():
            right = metric(6, average="none", ignore_index=255)(guess, truth).tolist()
            mine = [float(row[column]) for row in found.values()]
            assert np.nan_to_num(mine) == pytest.approx(right, abs=1e-6)
            nowhere = {"precision": [2, 5], "recall": [1, 5]}.get(column, [5])
            assert np.flatnonzero(np.isnan(mine)).tolist() == nowhere
        support = [int(row["support"]) for row in found.values()]
        assert support == truth[truth != 255].bincount(minlength=6).tolist()

    @both_tasks
    @on_ranks(1)
    def test_they_are_counted_once(self, project: Project) -> None:
        """The groups of metrics that count once, and counts over two evaluations of 3 batches."""
        import model

        collection = model.build_metrics(["a", "b"])
        sides = (8, 8) if "iou" in collection else ()
        for _ in range(2):
            collection.reset()
            counts = torch.zeros(2, 2, dtype=torch.long)
            for _ in range(3):
                outputs = torch.randn(5, 2, *sides)
                targets = torch.randint(0, 2, (5, *sides))
                collection.update(outputs, targets)
                pairs = 2 * targets + outputs.argmax(1)
                counts += pairs.flatten().bincount(minlength=4).view(2, 2)
            numbers, confusion = metrics.compute(collection)
            assert all(type(number) is float for number in numbers.values())
            assert confusion.tolist() == counts.tolist()
        groups = sorted(map(sorted, collection.compute_groups.values()))
        is_dense = project.task == "segmentation"
        assert groups == ([["iou", "matrix", "miou"]] if is_dense else [["matrix"], ["top1"]])

    @both_tasks
    def test_files_of_a_run(
        self, project: Project, data: Path, trained: Path, tmp_path: Path
    ) -> None:
        """Those of --eval-only, the same on one and three ranks, say what metrics.csv says.

        They lie apart from those of the run, in whose folder nothing changes.
        """
        run, others = shutil.copytree(trained, tmp_path / "run"), tmp_path / "others"
        before = {path.name: path.read_bytes() for path in run.iterdir()}
        out = run / "eval"
        out.mkdir()
        (out / "worst.png").touch()  # of an evaluation before
        done = project.train(data, run, "--eval-only", on=1, draws=True).ok()
        said, numbers = done.out.splitlines()[-2:]
        assert said == f"written to {out}: per_class.csv, confusion.png, worst.png"
        assert {path.name for path in out.iterdir()} == {*said.split(": ")[1].split(", ")}
        assert (out / "per_class.csv").read_bytes() == before["per_class.csv"]
        assert before == {path.name: path.read_bytes() for path in run.iterdir() if path != out}
        assert "matrix" not in numbers
        more = ["--eval-only", "--resume", trained / "best.pt"]
        project.train(data, others, *more, on=3, draws=True).ok()
        others = others / "eval"
        assert (out / "per_class.csv").read_text() == (others / "per_class.csv").read_text()
        for name in ("confusion.png", "worst.png"):
            assert np.array_equal(*(np.asarray(Image.open(path / name)) for path in (out, others)))
        found, (row,) = table(out / "per_class.csv"), rows(trained)
        if project.task == "classification":
            support = np.array([int(each["support"]) for each in found.values()])
            recall = np.array([float(each["recall"]) for each in found.values()])
            assert (support * recall).sum() / 23 == pytest.approx(float(row["top1"]), abs=1e-5)
        else:
            for name, each in found.items():
                assert float(each["iou"]) == pytest.approx(float(row[f"iou_{name}"]), abs=1e-5)
        # The numbers come also where no file can be written.
        (tmp_path / "file").touch()
        done = project.train(data, tmp_path / "file", *more, on=1, draws=True).ok()
        said, again = done.out.splitlines()[-2:]
        assert "file/eval: cannot be written" in said
        assert json.loads(again) == json.loads(numbers)


# Machado, Oliveira and Fernandes 2009: protanopia, deuteranopia, tritanopia; of linear RGB.
BLINDNESS = np.array(
    [
        np.eye(3).tolist(),
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ],
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ],
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ],
    ]
)
XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)


def lab(colors: np.ndarray) -> np.ndarray:
    """CIELAB (D65) of sRGB (n, 3), as each of the four kinds of people sees it: (4, n, 3)."""
    share = np.asarray(colors) / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    seen = np.einsum("kij,nj->kni", BLINDNESS, linear).clip(0, 1)
    xyz = seen @ XYZ.T / XYZ.sum(1)
    x, y, z = np.moveaxis(
        np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116), -1, 0
    )
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], -1)


def distances(colors: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The least distance of each pair for anybody, (n, m)."""
    return np.linalg.norm(lab(colors)[:, :, None] - lab(others)[:, None], axis=-1).min(0)


class TestPalette:
    def test_anybody_can_tell_them_apart(self) -> None:
        """Red and green, which many cannot, are known to be found out."""
        assert distances(np.array([[0, 0, 0]]), np.array([[255, 255, 255]])) == pytest.approx(
            100, abs=0.1
        )
        red, green = np.array([[180, 120, 60]]), np.array([[120, 150, 60]])
        assert np.linalg.norm(lab(red)[0] - lab(green)[0]) > 40 > 25 > distances(red, green)
        colors = pictures.PALETTE
        apart = distances(colors, colors) + 999 * np.eye(len(colors))
        assert len(colors) >= 24
        assert apart[:8, :8].min() >= 40
        assert apart.min() >= 18
        assert distances(colors, np.array([[255, 255, 255]])).min() >= 25

    def test_colors_of(self) -> None:
        names = [str(i) for i in range(60)]
        found = pictures.colors_of(names)
        assert (found[:24] == pictures.PALETTE).all()
        assert (found[24:47] == pictures.PALETTE[1:]).all()
        assert found.any(1).tolist() == [False] + 59 * [True]
        mine = pictures.colors_of(pictures.Classes(["a", "b"], [[1, 2, 3], [4, 5, 6]]))
        assert mine.tolist() == [[1, 2, 3], [4, 5, 6]]

    def test_painted_masks(self, tmp_path: Path) -> None:
        mask = np.arange(256, dtype=np.uint8).reshape(16, 16)
        image = pictures.paint(mask, [str(i) for i in range(30)])
        image.save(tmp_path / "mask.png")
        read = Image.open(tmp_path / "mask.png")
        assert read.mode == "P"
        assert (np.array(read) == mask).all()
        shown = np.array(read.convert("RGB")).reshape(256, 3)
        assert (shown[:24] == pictures.PALETTE).all()
        assert (shown[30:] == 255).all()


class Cracks(torch.utils.data.Dataset):
    """Grey images with a crack one pixel wide, and names that matplotlib may stumble over."""

    samples = tuple((f"/set/$a/\udcff_{'long' * (i % 20)}${i}.png", "") for i in range(3))

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        height, width = ((64, 64), (96, 544), (720, 960))[index]
        mask = torch.zeros(height, width, dtype=torch.uint8)
        mask[height // 2] = 1
        return torch.full((3, height, width), 100, dtype=torch.uint8), mask


class TestGallery:
    def draw(self, path: Path, captions: dict[int, str]) -> np.ndarray:
        """What draw_images makes of Cracks, if a network finds nothing."""

        def example(axes: object, image: Tensor, target: Tensor, output: Tensor, _: object) -> None:
            pixels = image.permute(1, 2, 0).clone()
            pixels[target == 1] = torch.tensor([230, 60, 40], dtype=torch.uint8)
            axes.imshow(torch.cat([image.permute(1, 2, 0), pixels], 1).numpy())
            axes.set_title("$image | tr$uth")

        def infer(net: torch.nn.Module, images: Tensor) -> Tensor:
            return torch.stack((images[:, 0] + 100, images[:, 0]), 1)

        loader = torch.utils.data.DataLoader(Seeded(Cracks(), 2, seed=0))
        names = ["_back$ground$", "crack"]
        found = None, [(0.5, 0)]
        shown = metrics.Mistakes(found, torch.nn.Linear(1, 1), loader, names, infer, example)
        shown.draw_images(path, captions)
        return np.asarray(Image.open(path).convert("RGB"))

    @pytest.mark.parametrize(("index", "rows"), [(0, 6), (1, 1), (2, 0)])
    def test_a_thin_crack_shows(self, tmp_path: Path, index: int, rows: int) -> None:
        """In its own colour, unmixed, if the image is enlarged or shown as it is."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            drawn = self.draw(tmp_path / "worst.png", {index: "loss 2"})
            self.draw(tmp_path / "all.png", {0: "loss 2", 1: "loss 1", 2: "loss 0"})
        is_crack = (drawn == (230, 60, 40)).all(-1)
        longest = is_crack.sum(1).max()
        assert drawn.shape[0] * drawn.shape[1] < 2 * pictures.MOST_PIXELS
        if not rows:  # the image is made smaller
            return
        assert longest > 400
        assert rows <= (is_crack.sum(1) == longest).sum() <= rows + 1


class TestPlots:
    @pytest.mark.parametrize("count", [2, 11, 100])
    def test_confusion(self, tmp_path: Path, count: int) -> None:
        """Of a bounded size, no warning; a few percent show, rows without labels are grey."""
        confusion = 97 * torch.eye(count).long()
        confusion[0, 1] = 3
        confusion[-1] = 0
        names = [f"$a very long name of class {i}" for i in range(count)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pictures.draw_confusion(tmp_path / "it.png", confusion, names)
        drawn = np.asarray(Image.open(tmp_path / "it.png").convert("RGB"))
        assert 300 <= drawn.shape[0] <= 2300
        packed = drawn.astype(int) @ [2**16, 2**8, 1]
        shown, counts = np.unique(packed, return_counts=True)
        cell = max(300, min(1800, 36 * count)) / count
        assert counts[shown == 0xD9D9D9] >= 0.8 * cell**2 * count  # the last row
        pale = (shown >> 16 > 190) & (shown >> 16 < 225) & ((shown & 255) > (shown >> 16) + 10)
        assert counts[pale].max() >= 0.7 * (cell - 1) ** 2

    def test_curves(self, tmp_path: Path) -> None:
        """Of 40 classes, which are left out; rows without some, NaN, one row."""
        history = [{"epoch": 1, "train_loss": 2.0, "val_loss": math.nan, "when": "today"}]
        for epoch in range(2, 6):
            each = {f"iou_${i}$": i / epoch / 40 if i != 7 else math.nan for i in range(40)}
            row = {"epoch": epoch, "train_loss": 2.0, "val_loss": 1.0, **each, "miou": None}
            history.append({**row, "when": "today"})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pictures.draw_curves(tmp_path / "forty.png", history, [f"${i}$" for i in range(40)])
            pictures.draw_curves(tmp_path / "one.png", history[:1], ["a", "b"])
        for name in "forty.png", "one.png":
            width, height = Image.open(tmp_path / name).size
            assert 1300 < width < 1700
            assert 400 < height < 700


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
def test_predicted_masks(project: Project, data: Path, trained: Path, tmp_path: Path) -> None:
    """In the checkpoint's colours; they can be trained on."""
    state = torch.load(trained / "best.pt", weights_only=True)
    state["colors"] = [[10, 20, 30], [200, 100, 0]]
    torch.save(state, tmp_path / "colored.pt")
    found = []
    for checkpoint in (trained / "best.pt", tmp_path / "colored.pt"):
        out = tmp_path / checkpoint.stem
        more = ["--checkpoint", checkpoint, "--output", out]
        project.run(data / "val" / "images", *more, script="predict.py", on=1).ok()
        masks = [Image.open(path) for path in sorted((out / "masks").iterdir())]
        assert {mask.mode for mask in masks} == {"P"}
        found.append((masks[0].getpalette()[:6], np.array([np.array(mask) for mask in masks])))
        assert (out / "legend.png").exists()
    assert [colors for colors, _ in found] == [[0, 0, 0, 230, 60, 40], [10, 20, 30, 200, 100, 0]]
    assert (found[0][1] == found[1][1]).all()
    assert set(np.unique(found[0][1])) <= {0, 1}
    # Class 0 is tinted only if it has been given a colour.
    name = min(path.name for path in (tmp_path / "best" / "overlays").iterdir())
    given = np.asarray(Image.open(data / "val" / "images" / name.replace("png", "jpg")))
    is_zero = found[0][1][0] == 0
    for out, expected in (("best", given), ("colored", 0.4 * given + [6, 12, 18])):
        drawn = np.asarray(Image.open(tmp_path / out / "overlays" / name))
        assert np.abs(drawn - expected)[is_zero].max() <= 3
    own = tmp_path / "own"
    for part in ("train", "val"):
        shutil.copytree(data / "val" / "images", own / part / "images")
        shutil.copytree(tmp_path / "colored" / "masks", own / part / "masks")
    first = next((own / "train" / "masks").iterdir())
    mask = np.array(Image.open(first))
    mask[:9] = 1 - mask[:9]  # both classes come
    pictures.paint(mask, ["a", "b"]).save(first)

    @on_ranks(1)
    def find() -> None:
        train, val, classes = folders.find_masks(own)
        assert (len(train.samples), len(val.samples), [*classes]) == (23, 23, ["0", "1"])

    find()


def test_scores_of_all_classes(project: Project, data: Path, trained: Path, tmp_path: Path) -> None:
    more = ["--checkpoint", trained / "best.pt", "--output", tmp_path]
    project.run(data / "val", *more, script="predict.py", on=1).ok()
    with open(tmp_path / "predictions.csv", newline="") as file:
        header, *found = csv.reader(file)
    classes = torch.load(trained / "best.pt", weights_only=True)["classes"]
    assert header == ["file", "class", "probability", *(f"probability_{name}" for name in classes)]
    assert len(found) == 23
    for _, name, probability, *each in found:
        assert sum(map(float, each)) == pytest.approx(1, abs=5e-4)
        assert each[classes.index(name)] == probability == max(each, key=float)


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
@on_ranks(1)
def test_padding_is_not_drawn(project: Project) -> None:
    """Validation pads to multiples of 32; only the image's own 40 x 50 pixels are drawn."""
    import dataset

    axes, gap = Figure().add_subplot(), 2
    image = dataset.pad(torch.full((3, 40, 50), 7, dtype=torch.uint8), 0)
    target = dataset.pad(torch.zeros(40, 50, dtype=torch.uint8), 255)
    dataset.draw_example(axes, image, target, torch.zeros(2, *target.shape), ["a", "b"])
    assert axes.images[0].get_size() == (40, 3 * 50 + 2 * gap)
