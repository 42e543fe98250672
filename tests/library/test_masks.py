"""What the values and colours in masks mean, and the classes' shares."""

import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from generated import Project, refusal
from PIL import Image
from ranks import on_ranks

import ddpkit
from ddpkit.data import class_counts, folders, masks

COLORS = {0: (10, 20, 30), 1: (200, 0, 7), 255: (0, 0, 0)}  # by class number, for `recolor`


def repaint(folder: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Replace all masks of a set."""
    for path in folder.glob("*/masks/*"):
        changed = change(np.array(Image.open(path)))
        Image.fromarray(changed.astype(np.uint8)).save(path)


def recolor(mask: np.ndarray) -> np.ndarray:
    table = np.zeros((256, 3), np.uint8)
    table[list(COLORS)] = list(COLORS.values())
    return table[mask]


@pytest.mark.parametrize(
    ("text", "classes", "colors"),
    [
        ("\n é b \r\n\r\nvoid\r\n", ["é b", "void"], None),
        ("void = 7\nb = -1\na = 300", ["b", "a"], None),
        ("a = 1 2 3\nb = 255,0, 255\nVoid = 0 0 0", ["a", "b"], [[1, 2, 3], [255, 0, 255]]),
    ],
)
def test_classes_txt(tmp_path: Path, text: str, classes: list, colors: list | None) -> None:
    (tmp_path / "classes.txt").write_bytes(text.encode("utf-8-sig"))
    found = masks.read_classes(tmp_path / "classes.txt")
    assert list(found) == classes
    assert (None if found.colors is None else found.colors.tolist()) == colors


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\nb = 1", ["b: ", "NAME = VALUE"]),
        ("a\nb\na", ["a: ", "twice"]),
        ("a = 1 2 256\nb = 1 2 3", ["line 1", "0 to 255"]),
        ("a = 3\nvoid = 4", ["1 classes", "2 to 255"]),
    ],
)
def test_faults_of_classes_txt(tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "classes.txt").write_text(text)
    with refusal("masks.parse", tmp_path / "classes.txt", *words):
        masks.read_classes(tmp_path / "classes.txt")


NAMES, VALUES = ["a", "b", "c"], ["a = 0", "b = 255", "void = 7"]
COLORED = ["a = 1 2 3", "b = 3 2 1", "void = 9 9 9"]
ROW = [[1, 2, 3], [3, 2, 1], [9, 9, 9]]
PALETTE = [3, 2, 1, 9, 9, 9, 1, 2, 3]
CLEAR, OPAQUE = ([[*pixel, alpha] for pixel in ROW] for alpha in (0, 255))


def read(
    folder: Path,
    classes: list[str],
    row: list,
    name: str = "mask.png",
    dtype: str = "uint8",
    palette: list[int] | None = None,
    **how: str,
) -> list[int]:
    """The classes in a mask of one row that holds these values or colours."""
    image = Image.fromarray(np.array([row], dtype))
    if palette:
        image.putpalette(palette)
    image.save(folder / name, **how)
    labels = masks.parse(classes, Path("classes.txt"))
    return masks.read_mask(str(folder / name), labels)[0].tolist()


@pytest.mark.parametrize(
    ("classes", "row", "how", "expected"),
    [
        ([*NAMES, "void = 7"], [0, 7, 255], {}, [0, 255, 255]),
        (NAMES, [False, True, True], {"dtype": "bool"}, [0, 1, 1]),
        (VALUES, [0, 255, 7], {}, [0, 1, 255]),
        (["a = 300", "b = 65535"], [300, 65535], {"dtype": "uint16"}, [0, 1]),
        (COLORED, ROW, {}, [0, 1, 255]),
        (COLORED, OPAQUE, {}, [0, 1, 255]),
        (COLORED, [2, 0, 1], {"palette": PALETTE}, [0, 1, 255]),
    ],
)
def test_masks(tmp_path: Path, classes: list, row: list, how: dict, expected: list) -> None:
    assert read(tmp_path, classes, row, **how) == expected


@pytest.mark.parametrize(
    ("classes", "row", "how", "words"),
    [
        (NAMES, [0.5], {"dtype": "float32", "name": "x.tif"}, ["value 0.5"]),
        (COLORED, [*ROW, [0, 0, 4]], {}, ["colour 0 0 4 in 1 pixels", "void = 0 0 4"]),
        (COLORED, CLEAR, {}, ["transparent"]),
        (NAMES, [0, 1], {"name": "x.tif", "compression": "jpeg"}, ["JPEG"]),
    ],
)
def test_faults_of_masks(tmp_path: Path, classes: list, row: list, how: dict, words: list) -> None:
    with refusal("masks.read_mask", tmp_path, *words):
        read(tmp_path, classes, row, **how)


def content(data: Path) -> tuple:
    """The classes of a set, their colours, and a checksum of its masks."""
    train, val, classes = folders.find_masks(data)
    parts = [folders.MaskFiles(part, lambda *_: None) for part in (train, val)]
    found = [part.open_mask(n).read().numpy() for part in parts for n in range(len(part))]
    colors = None if classes.colors is None else classes.colors.tolist()
    return list(classes), colors, zlib.crc32(b"".join(mask.tobytes() for mask in found))


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
@on_ranks(1)
def test_colors(project: Project, tmp_path: Path) -> None:
    """The same masks, however they are stored."""
    plain, data = tmp_path / "plain", tmp_path / "set"
    for folder in plain, data:
        ddpkit.demo_masks(folder, 20, 6)
    repaint(data, recolor)
    text = "background = 10 20 30\r\ncrack = 200,0, 7\r\nvoid = 0 0 0"
    (data / "classes.txt").write_bytes(text.encode("utf-8-sig"))
    classes, _, checksum = content(plain)
    assert content(data) == (classes, [list(COLORS[0]), list(COLORS[1])], checksum)


@pytest.mark.parametrize(
    ("change", "text", "words"),
    [
        (lambda mask: 128 * (mask == 1), None, ["hold 0, 128", "NAME = 0, NAME = 128"]),
        (lambda mask: 255 * (mask == 1), "ground\ncrack", ["hold 0, 255", "NAME = 255"]),
    ],
)
@on_ranks(1)
def test_masks_that_cannot_be_meant(
    tmp_path: Path, change: Callable, text: str | None, words: list[str]
) -> None:
    data = tmp_path / "set"
    ddpkit.demo_masks(data, 12, 4)
    repaint(data, change)
    (data / "classes.txt").unlink()
    if text:
        (data / "classes.txt").write_text(text)
    with refusal("folders.survey", data, *words):
        content(data)


def test_images_of_each_class(capsys: pytest.CaptureFixture) -> None:
    class_counts.say_images(["a", "b"], [0, 1, 1], [1])
    counts, warning = capsys.readouterr().out.splitlines()
    assert counts.endswith("a 1 (0), b 2 (1)")
    assert "validation" in warning and warning.endswith(": a")
