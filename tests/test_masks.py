"""What the values and colours in masks mean, the classes' shares, and image sizes."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from running import SMALL, Project, flags
from torch import nn

from ddpkit.data import class_counts
from ddpkit.errors import UserError
from ddpkit.run import predicting

SEGMENTATION = pytest.mark.parametrize("project", ["segmentation"], indirect=True)
COLORS = {0: (10, 20, 30), 1: (200, 0, 7), 255: (0, 0, 0)}  # by class number, for `recolor`


def repaint(folder: Path, change: Callable[[np.ndarray], np.ndarray | Image.Image]) -> None:
    """Replace all masks of a set."""
    for path in folder.glob("*/masks/*"):
        made = change(np.array(Image.open(path)))
        (made if isinstance(made, Image.Image) else Image.fromarray(made.astype(np.uint8))).save(
            path
        )


def recolor(mask: np.ndarray) -> np.ndarray:
    table = np.zeros((256, 3), np.uint8)
    table[list(COLORS)] = list(COLORS.values())
    return table[mask]


def as_palette(mask: np.ndarray) -> Image.Image:
    """With other numbers than those of the classes."""
    image = Image.fromarray(np.where(mask == 255, 2, 1 - mask.clip(max=1)).astype(np.uint8))
    image.putpalette([*COLORS[1], *COLORS[0], *COLORS[255]])
    return image


def classes(*values: object) -> str:
    """A classes.txt of background, crack and void."""
    names = ("background", "crack", "void")
    return "\r\n".join(f"{name} = {value}" for name, value in zip(names, values, strict=True))


def rgb(key: int, separator: str = " ") -> str:
    return separator.join(map(str, COLORS[key]))


@SEGMENTATION
def test_lines_of_classes_txt(project: Project, tmp_path: Path) -> None:
    good = {
        "a\nb\n": [["a", "b"], None],
        "\n é b \r\n\r\nvoid\r\n": [["é b", "void"], None],
        "a = 0\nb=255\nvoid = 7": [["a", "b"], None],
        "void = 7\nb = -1\na = 300": [["b", "a"], None],
        "a\nb\nVoid = 7": [["a", "b"], None],
        "# all\n\na # one\nC#\n": [["a", "C#"], None],
        "class 1\nclass 2": [["class 1", "class 2"], None],
        "a = 1 2 3\nb = 255,0, 255\nVoid = 0 0 0": [["a", "b"], [[1, 2, 3], [255, 0, 255]]],
    }
    bad = {
        "a\nb = 1": ("b: write all lines in one way", "NAME = VALUE"),
        "a = 1\n\nb = 1 2 3": ("b: write all lines in one way", "NAME = R G B"),
        "a = 1\nb = 2\nvoid = 1 2 3": ("void: write all lines in one way",),
        "a = 1 2 3\nb = 4 5 6\nvoid = 0": ("void: write all lines in one way",),
        "a\nb\na": ("a: its name or its value comes twice",),
        "a = 1\na = 2": ("a: its name or its value comes twice",),
        "a = 7\nb = 7": ("b: its name or its value comes twice",),
        "a\nb\nvoid = 1": ("void: its name or its value comes twice",),
        "a = 1 2 3\nb = 1 2 3": ("b: its name or its value comes twice",),
        "a = 1 2\nb = 3 4": (", line 1", "expected one of NAME"),
        "a = 1 2 256\nb = 1 2 3": (", line 1", "0 to 255"),
        "a = red\nb = blue": (", line 1", "expected one of NAME"),
        "= 3\nb = 4": (", line 1", "expected one of NAME"),
        "a = 3\nvoid = 4": ("1 classes", "2 to 255"),
        "": ("0 classes", "2 to 255"),
    }
    found = project.call("labels.all_parsed", tmp_path, [*good, *bad])
    assert found[: len(good)] == list(good.values())
    for text, words, line in zip(bad, bad.values(), found[len(good) :], strict=True):
        assert all(word in line for word in words), (text, line)


@SEGMENTATION
def test_values_and_colors(project: Project, tmp_path: Path) -> None:
    names, values = ["a", "b", "c"], ["a = 0", "b = 255", "void = 7"]
    colors = ["a = 1 2 3", "b = 3 2 1", "void = 9 9 9"]
    row = [[1, 2, 3], [3, 2, 1], [9, 9, 9]]
    clear, opaque = ([[[*pixel, alpha] for pixel in row]] for alpha in (0, 255))
    palette = [3, 2, 1, 9, 9, 9, 1, 2, 3]
    good = [
        ({"classes": names, "pixels": [[0, 2, 255]]}, [0, 2, 255]),
        ({"classes": [*names, "void = 7"], "pixels": [[0, 7, 255]]}, [0, 255, 255]),
        ({"classes": names, "pixels": [[0, 1, 1]], "mode": "1"}, [0, 1, 1]),
        ({"classes": names, "pixels": [[2, 1, 0]], "mode": "P", "palette": palette}, [2, 1, 0]),
        ({"classes": values, "pixels": [[0, 255, 7]]}, [0, 1, 255]),
        ({"classes": ["a = 0", "b = 128"], "pixels": [[0, 128, 255]]}, [0, 1, 255]),
        (
            {"classes": ["a = 300", "b = 65535"], "pixels": [[300, 65535]], "dtype": "uint16"},
            [0, 1],
        ),
        ({"classes": colors, "pixels": [row]}, [0, 1, 255]),
        ({"classes": colors, "pixels": opaque}, [0, 1, 255]),
        ({"classes": colors, "pixels": [[2, 0, 1]], "mode": "P", "palette": palette}, [0, 1, 255]),
        ({"classes": colors, "pixels": [[0, 1, 255]]}, [0, 1, 255]),
        ({"classes": names, "pixels": [[0, 2]], "ending": ".jpg", "format": "PNG"}, [0, 2]),
        ({"classes": names, "pixels": [[0, 2]], "ending": ".tif"}, [0, 2]),
    ]
    bad = [
        ({"classes": names, "pixels": [[0, 3, 3]]}, ("value 3 in 2 pixels", "NAME = 3")),
        ({"classes": values, "pixels": [[0, 255, 8]]}, ("value 8 in 1 pixels is no", "void = 8")),
        (
            {
                "classes": ["a = 0", "b = 1"],
                "pixels": [[0.5]],
                "dtype": "float32",
                "ending": ".tif",
            },
            ("value 0.5",),
        ),
        (
            {"classes": colors, "pixels": [[*row, [0, 0, 4]]]},
            ("colour 0 0 4 in 1 pixels", "void = 0 0 4"),
        ),
        ({"classes": colors, "pixels": clear}, ("transparent",)),
        ({"classes": colors, "pixels": [[0, 7]]}, ("value 7", "NAME = 7")),
        ({"classes": names, "pixels": [row]}, ("colour ", "NAME = ")),
        (
            {"classes": names, "pixels": [[0, 0]], "ending": ".jpg"},
            ("JPEG has changed", "as PNG"),
        ),
        ({"classes": colors, "pixels": [row], "ending": ".JPG"}, ("JPEG has changed",)),
        ({"classes": values, "pixels": [[0, 255]], "ending": ".jpeg"}, ("JPEG has changed",)),
        ({"classes": names, "pixels": [[0, 1]], "ending": ".jpe"}, ("JPEG has changed",)),
        ({"classes": names, "pixels": [[0, 1]], "format": "JPEG"}, ("JPEG has changed",)),
        (
            {
                "classes": names,
                "pixels": [[0, 1]],
                "ending": ".tif",
                "save": {"compression": "jpeg"},
            },
            ("JPEG has changed",),
        ),
    ]
    found = project.call("labels.read", tmp_path, [case for case, _ in good + bad])
    assert found[: len(good)] == [expected for _, expected in good]
    for line, (case, words) in zip(found[len(good) :], bad, strict=True):
        assert all(word in line for word in words), (case, line)


@SEGMENTATION
def test_sets_of_values_and_colors(project: Project, data: Path, tmp_path: Path) -> None:
    """The same masks, however they are stored, prepared or not, and the same score."""
    expected = project.call("labels.digest", data)
    assert expected["said"].startswith("classes, in % of the pixels of 53 of 53 training masks: ")
    variants = {
        "values": (lambda mask: np.choose(mask.clip(max=2), (255, 0, 7)), classes(255, 0, 7)),
        "colors": (recolor, classes(rgb(0), rgb(1, ","), rgb(255, ", "))),
        "palette": (as_palette, classes(rgb(0), rgb(1), rgb(255))),
        "numbers": (None, classes(rgb(0), rgb(1), rgb(255))),
    }
    for name, (change, text) in variants.items():
        own, store = shutil.copytree(data, tmp_path / name), tmp_path / f"{name} prepared"
        (own / "classes.txt").write_bytes(text.encode("utf-8-sig"))
        if change:
            repaint(own, change)
        colors = None if name == "values" else [list(COLORS[0]), list(COLORS[1])]
        assert project.call("labels.digest", own) == {**expected, "colors": colors}
        project.call("preparing.prepare", ["--data", own, "--output", store, "--workers", 0], None)
        if name == "colors":  # what else is in the masks counts as a change
            (own / "classes.txt").write_text(text.replace("7", "8"))
            project.fork(*flags(data, tmp_path / "x", "--data", store)).refused("changed since")
            shutil.rmtree(own)
        assert project.call("labels.digest", store) == {**expected, "colors": colors}


@SEGMENTATION
def test_evaluation_of_colors(project: Project, data: Path, own_data: Path, trained: Path) -> None:
    """A checkpoint of a set of class numbers, and the same set in colours, on two ranks."""
    repaint(own_data, recolor)
    (own_data / "classes.txt").write_text(classes(rgb(0), rgb(1), rgb(255)))
    words = ["--output-dir", own_data / "out", "--eval-only", "--resume", trained / "best.pt"]
    start = functools.partial(project.fork, *SMALL, *words, draws=False)
    said = [start("--data", each).ok().out for each in (data, own_data)]
    assert said[0] == said[1]
    assert json.loads(said[0].splitlines()[-1])["miou"] > 0


@SEGMENTATION
@pytest.mark.parametrize(
    ("change", "text", "words"),
    [
        (lambda mask: 128 * (mask == 1), None, ["hold 0, 128", "NAME = 0, NAME = 128"]),
        (lambda mask: 255 * (mask == 1), None, ["hold 0, 255", "NAME = 0, NAME = 255"]),
        (lambda mask: 255 * (mask == 1), "ground\ncrack", ["hold 0, 255", "NAME = 255"]),
        (lambda mask: mask % 2 * 3, None, ["hold 0, 3", "without a gap"]),
        (lambda mask: 0 * mask, None, ["hold 0 (255 is void)", "two classes"]),
        (recolor, None, ["colour ", "NAME = "]),
        (lambda mask: 255 * (mask == 1), "a = 0\nb = 254", ["hold 0, 255", "NAME = 255"]),
    ],
)
def test_masks_that_cannot_be_meant(
    project: Project, own_data: Path, change: Callable, text: str | None, words: list[str]
) -> None:
    repaint(own_data, change)
    (own_data / "classes.txt").unlink()
    if text:
        (own_data / "classes.txt").write_text(text)
    line = project.call("labels.digest", own_data)["refused"]
    assert str(own_data) in line
    assert all(word in line for word in ["classes.txt" if text else "", *words])


class TestShares:
    def count(self, values: list[int], has_to_read_all: bool = False) -> tuple[list[int], int]:
        """The classes found in masks that have one value each, and how many masks were read."""

        def read(index: int) -> np.ndarray:
            return np.full((2, 50), values[index], np.uint8)

        counts, read_masks = class_counts.count_pixels(read, len(values), has_to_read_all)
        assert counts.sum() == 100 * read_masks
        return np.flatnonzero(counts).tolist(), read_masks

    def test_how_many_are_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.count([0] * 40) == ([0], 40)
        monkeypatch.setattr(class_counts, "MOST_PIXELS", 1000)
        assert self.count([0] * 20 + [1] * 20) == ([0, 1], 16)  # 16 at once
        assert self.count([0] * 20 + [1] * 20, has_to_read_all=True) == ([0, 1], 40)

    def test_many_classes(self, capsys: pytest.CaptureFixture) -> None:
        names = [f"c{n}" for n in range(20)]
        labels = [n for n in range(20) for _ in range(n)]
        class_counts.say_images(names, labels, [*range(20)])
        class_counts.say_images(["a", "b"], [0, 1, 1], [1])
        assert capsys.readouterr().out.splitlines() == [
            "classes, images for training (validation): "
            + ", ".join(f"c{n} {n} (1)" for n in range(12))
            + ", ...",
            "warning: 1 of 20 classes in none of the training images: c0",
            "classes, images for training (validation): a 1 (0), b 2 (1)",
            "warning: 1 of 2 classes in none of the validation images: a",
        ]


class Strided(nn.Module):
    """Takes sizes that `stride` divides, and has a layer that it does not use."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.used, self.unused = nn.Conv2d(3, 2, stride, stride), nn.Conv2d(3, 2, 1)
        self.stride = stride

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.shape[-1] % self.stride:
            raise RuntimeError("wrong\nsize")
        return self.used(images)


class TestSizes:
    def test_refused(self) -> None:
        words = r"^this network cannot .* 100 x 100 pixels \(wrong size\): use another --image-size"
        with pytest.raises(UserError, match=words):
            predicting.fit_input(lambda: Strided(32), 100)

    def test_taken(self) -> None:
        model = Strided(32)
        assert predicting.fit_input(lambda: model, 96) is model
        assert predicting.forward(model, 64).shape == (1, 2, 2, 2)
        frozen = predicting.freeze_unused(model, 32).parameters()
        assert [weight.requires_grad for weight in frozen] == [True, True, False, False]
        assert model.training
        assert {weight.device.type for weight in model.parameters()} == {"cpu"}


@pytest.mark.parametrize(
    ("project", "network", "size", "words"),
    [
        ("classification", ["--arch", "alexnet"], 32, ["32 x 32", "use another --image-size"]),
        ("segmentation", ["--arch", "linknet"], 100, ["100 x 100", "use another --image-size"]),
        ("segmentation", ["--encoder", "tu-maxvit_rmlp_pico_rw_256"], 256, ["160 x 160", "pads"]),
    ],
    indirect=["project"],
)
def test_sizes_that_networks_refuse(
    project: Project, data: Path, tmp_path: Path, network: list, size: int, words: list[str]
) -> None:
    given = flags(data, tmp_path / "out", *network, "--image-size", size)
    project.alone(*given).refused(*words)


@SEGMENTATION
def test_masks_that_take_longer_than_collectives(
    project: Project, few: Path, tmp_path: Path
) -> None:
    assert project.call("labels.read_slowly", few, tmp_path, *flags(few, tmp_path)[:-4]) == [0, 0]
