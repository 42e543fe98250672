"""What the values and colours in masks mean, and the classes' shares."""

import random
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from generated import ROOT, Project, refusal
from PIL import Image
from ranks import on_ranks
from torch.nn.functional import interpolate

import ddpkit
from ddpkit.convert import command
from ddpkit.data.format import Format
from ddpkit.errors import UserError
from ddpkit.vision import class_counts, folders, masks
from ddpkit.vision.tools import check

# by class number, for `recolor`
COLORS = {
    0: (10, 20, 30),
    1: (200, 0, 7),
    255: (0, 0, 0),
}


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
        ("\n é b \r\n\r\nvoids\r\n", ["é b", "voids"], None),
        ("a\nVoid\nb", ["a", "b"], None),
        ("# two\na # the first\nb#1\n  # c", ["a", "b#1"], None),
        ("a = 0\nb = 1\na = 2", ["a", "b"], None),
        ("a = 1 2 3\nb = 0 0 0\na = 3 2 1", ["a", "b"], [[1, 2, 3], [0, 0, 0]]),
        ("void = 7\nb = -1\na = 300", ["b", "a"], None),
        (
            "a = 1 2 3\nb = 255,0, 255\nVoid = 0 0 0",
            ["a", "b"],
            [[1, 2, 3], [255, 0, 255]],
        ),
    ],
)
def test_classes_txt(
    tmp_path: Path, text: str, classes: list, colors: list | None
) -> None:
    (tmp_path / "classes.txt").write_bytes(text.encode("utf-8-sig"))
    found = masks.read_classes(tmp_path / "classes.txt")
    assert list(found) == classes
    assert (None if found.colors is None else found.colors.tolist()) == colors


def test_the_table_of_the_page(tmp_path: Path) -> None:
    """The lines of classes.txt in docs/own-data.md mean what the column beside them says."""
    page = (ROOT / "docs/own-data.md").read_text()
    section = page.partition("Lines of `classes.txt`")[2].partition("\n\n")[0]
    rows = [re.findall("`(.+?)`", line) for line in section.splitlines()[2:]]
    shown = (
        np.array([[0, 1]], np.uint8),
        np.array([[0, 255]], np.uint8),
        np.array([[[128, 64, 128], [64, 0, 128], [0, 0, 0]]], np.uint8),
    )
    for lines, pixels in zip(rows, shown, strict=True):
        (tmp_path / "classes.txt").write_text("\n".join(lines))
        Image.fromarray(pixels).save(tmp_path / "mask.png")
        found = masks.read_classes(tmp_path / "classes.txt")
        mask = masks.read_mask(str(tmp_path / "mask.png"), found)
        assert mask.tolist() == [[0, 1, 255][: pixels.shape[1]]]


def test_lines_and_their_values(tmp_path: Path) -> None:
    """Void has its place among names alone, and is no class; a class may have several values."""
    path = tmp_path / "classes.txt"
    mask = tmp_path / "mask.png"
    for text, of_0_1_2 in ("a\nVoid\nb", [0, 255, 1]), ("a=0\nb=1\na=2", [0, 1, 0]):
        path.write_text(text)
        Image.fromarray(np.array([[0, 1, 2]], np.uint8)).save(mask)
        found = masks.read_mask(str(mask), masks.read_classes(path))
        assert found.tolist() == [of_0_1_2]
    path.write_text("a = 0 0 0\nb = 9 0 0\na = 0 9 0")
    Image.fromarray(np.array([[[0] * 3, [9, 0, 0], [0, 9, 0]]], np.uint8)).save(mask)
    assert masks.read_mask(str(mask), masks.read_classes(path)).tolist() == [[0, 1, 0]]


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
    with refusal("masks.parse", tmp_path / "classes.txt", words):
        masks.read_classes(tmp_path / "classes.txt")


def test_names_of_classes_txt(tmp_path: Path) -> None:
    """A # within a word begins no comment; names that look the same are an error."""
    path = tmp_path / "classes.txt"
    path.write_text("C# = 1\nC = 2  # a comment\n")
    assert masks.read_classes(path) == ["C#", "C"]
    path.write_text("a\n\u200b\n", "utf-8")
    with refusal("names.refuse_alike", path, "'\\u200b' has no visible name"):
        masks.read_classes(path)
    path.write_text("new car = 1\nnew\xa0car = 2\n", "utf-8")
    with refusal("names.refuse_alike", path, "look the same"):
        masks.read_classes(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("class_dict.csv", "name,r,g,b\nroad,1,2,3\ncar, 0,0,0\nVoid,9,9,9\n"),
        ("class_dict_seg.csv", 'name, rgb\nroad,"[1, 2, 3]"\ncar,"[0, 0, 0]"\n'),
        ("label_colors.txt", "1 2 3\troad\n0 0 0\tcar\n9 9 9\t\tunlabelled\n"),
        (
            "labelmap.txt",
            "# label:color_rgb:parts:actions\nroad:1,2,3::\ncar:0,0,0::\n",
        ),
    ],
)
def test_lists_of_other_programs(tmp_path: Path, name: str, text: str) -> None:
    """Read as classes.txt, unless there is one."""
    (tmp_path / name).write_text(text)
    found = masks.read_classes(tmp_path / "classes.txt")
    assert list(found) == ["road", "car"]
    assert found.colors is not None
    assert found.colors.tolist() == [[1, 2, 3], [0, 0, 0]]
    assert (9 << 16 | 9 << 8 | 9 in found.colored) == (text.count("9") > 2)
    (tmp_path / "classes.txt").write_text("a\nb\n")
    assert list(masks.read_classes(tmp_path / "classes.txt")) == ["a", "b"]


NAMES = ["a", "b", "c"]
VALUES = ["a = 0", "b = 255", "void = 7"]
COLORED = ["a = 1 2 3", "b = 3 2 1", "void = 9 9 9"]
ROW = [
    [1, 2, 3],
    [3, 2, 1],
    [9, 9, 9],
]
PALETTE = [3, 2, 1, 9, 9, 9, 1, 2, 3]
WHITES = [7, 8, 9] + [255] * 3
CLEAR = [
    [1, 2, 3, 0],
    [3, 2, 1, 0],
    [9, 9, 9, 0],
]
OPAQUE = [
    [1, 2, 3, 255],
    [3, 2, 1, 255],
    [9, 9, 9, 255],
]


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
        (["a", "b", "c", "void = 7"], [0, 7, 255], {}, [0, 255, 255]),
        (NAMES, [False, True, True], {"dtype": "bool"}, [0, 1, 1]),
        (["a = 0", "b = 255"], [False, True, True], {"dtype": "bool"}, [0, 1, 1]),
        (
            ["a = 0 0 0", "b = 1 1 1", "c = 255 255 255"],
            [False, True],
            {"dtype": "bool"},
            [0, 2],
        ),
        (["a = 255 255 255", "b = 0 0 0"], [0, 255], {}, [1, 0]),
        (["a = 1 2 3", "b = 3 2 1"], [0, 1, 255], {}, [0, 1, 255]),
        (NAMES, [2, 0, 1], {"palette": PALETTE}, [2, 0, 1]),
        (NAMES, [2, 0, 1], {"palette": [1, 1, 1, 2, 2, 2, 0, 0, 0]}, [0, 1, 2]),
        (VALUES, [0, 255, 7], {}, [0, 1, 255]),
        (["a = 300", "b = 65535"], [300, 65535], {"dtype": "uint16"}, [0, 1]),
        (COLORED, ROW, {}, [0, 1, 255]),
        (COLORED, OPAQUE, {}, [0, 1, 255]),
        (COLORED, [2, 0, 1], {"palette": PALETTE}, [0, 1, 255]),
    ],
)
def test_masks(
    tmp_path: Path,
    classes: list,
    row: list,
    how: dict,
    expected: list,
) -> None:
    assert read(tmp_path, classes, row, **how) == expected


@pytest.mark.parametrize(
    ("code", "classes", "row", "how", "words"),
    [
        (
            "translate",
            NAMES,
            [0.5],
            {"dtype": "float32", "name": "x.tif"},
            ["value 0.5"],
        ),
        (
            "translate",
            COLORED,
            [[1, 2, 3], [0, 0, 4]],
            {},
            ["colour 0 0 4 in 1 pixels", "void = 0 0 4"],
        ),
        ("lazy_mask", COLORED, CLEAR, {}, ["transparent"]),
        ("lazy_mask", COLORED, ROW, {"transparency": (1, 2, 3)}, ["transparent"]),
        (
            "translate",
            ["a = 0 0 0", "b = 9 9 9"],
            [0, 1],
            {},
            ["colour 1 1 1 in 1 pixels"],
        ),
        (
            "lazy_mask",
            ["a = 0 0 0", "b = 9 9 9"],
            [0, 9],
            {"dtype": "uint16"},
            ["mode I;16", "8 bits"],
        ),
        (
            "translate",
            NAMES,
            list(range(99)),
            {},
            ["more than 8 values", "edges may be smoothed"],
        ),
        (
            "refuse_changed",
            NAMES,
            [0, 1],
            {"name": "x.tif", "compression": "jpeg"},
            ["JPEG"],
        ),
        ("refuse_changed", NAMES, [0, 1], {"name": "x.avif"}, ["AVIF"]),
        (
            "lazy_mask",
            COLORED,
            [2, 0, 1],
            {"palette": PALETTE, "transparency": 1},
            ["transparent"],
        ),
    ],
)
def test_faults_of_masks(
    tmp_path: Path,
    code: str,
    classes: list,
    row: list,
    how: dict,
    words: list,
) -> None:
    with refusal(f"masks.{code}", tmp_path, words):
        read(tmp_path, classes, row, **how)


def test_numbers_that_no_line_can_have(tmp_path: Path) -> None:
    with refusal(
        "masks.translate", "value 0.5 in 1 pixels is not a class; correct the mask"
    ) as caught:
        read(tmp_path, NAMES, [0.5], "x.tif", "float32")
    assert "NAME" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "how", "words"),
    [
        (
            np.zeros((4, 4, 2), np.uint8),
            {"planarconfig": "contig"},
            "2 channels, of which 1",
        ),
        (np.zeros((4, 4), np.int8), {}, "8 bits with a sign"),
        (np.zeros((4, 4, 3), np.uint16), {"photometric": "rgb"}, "16 bits, of which 8"),
        (
            np.zeros((2, 9, 9), np.uint8),
            {"photometric": "minisblack"},
            "2 pages; save one per file",
        ),
    ],
)
def test_tiffs_that_are_no_masks(
    tmp_path: Path, values: np.ndarray, how: dict, words: str
) -> None:
    path = tmp_path / "x.tif"
    tifffile.imwrite(path, values, **how)
    with pytest.raises(UserError, match=words) as caught:
        masks.read_mask(str(path), masks.unnamed())
    assert "data.json" not in str(caught.value)  # which does not help with masks


def test_arrays(tmp_path: Path) -> None:
    """convert reads .npy masks; where training finds one, it says so."""
    data = tmp_path / "data"
    made = tmp_path / "made"
    for name in "images/1.png", "images/2.png":
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(data / name)
    (data / "masks").mkdir()
    for number in 1, 2:
        np.save(data / f"masks/{number}.npy", np.arange(64).reshape(8, 8) // 32)
    with refusal("folders.match_pairs", data / "masks", ".npy: an array"):
        folders.find_mask_pairs(data)
    command.main([str(data), str(made)])
    train, val = folders.find_mask_pairs(made)
    assert len(train) == len(val) == 1
    with refusal("images.reading", "1.npy", "masks are PNG, or"):
        masks.read_mask(str(data / "masks/1.npy"), masks.unnamed())


def draw_size(length: int, chance: random.Random) -> int:
    """Another length; torch's kernels differ where a centre lies between two of `length`."""
    while True:
        size = chance.randint(1, 70)
        if all((2 * i + 1) * length % (2 * size) for i in range(size)):
            return size


class TestCrops:
    """What is read of a mask is what a plain reader makes of all of it."""

    def test_pixels(self, tmp_path: Path, chance: random.Random) -> None:
        """Padded, resized as torch does it, and looked up; however the file stores it."""
        lines = ["a = 10 20 30", "b = 200 0 7", "c = 0 0 4", "void = 9 9 9"]
        shown = np.array([[10, 20, 30], [200, 0, 7], [0, 0, 4], [9, 9, 9]], np.uint8)
        labels = masks.parse(lines, Path("classes.txt"))
        for number in range(25):
            height, width = chance.randint(1, 90), chance.randint(1, 90)
            rng = np.random.default_rng(number)
            stored = rng.integers(0, 4, (height, width))
            folder = tmp_path / str(number)
            folder.mkdir()
            paths = save_all(folder, shown[stored], chance)
            numbers = np.where(stored == 3, 255, stored).astype(np.uint8)
            for path in chance.sample(paths, 3):
                mask = masks.lazy_mask(path, labels)
                for _ in range(4):
                    top, left = chance.randint(-40, 99), chance.randint(-40, 99)
                    rows, columns = chance.randint(1, 99), chance.randint(1, 99)
                    size = draw_size(rows, chance), draw_size(columns, chance)
                    # from 200 rows and columns before the first to 200 after the last
                    around = np.pad(numbers, 200, constant_values=77)
                    part = around[200 + top :, 200 + left :][:rows, :columns]
                    box = (top, left, rows, columns)
                    assert np.array_equal(mask.read(box, fill=77), part)
                    part = torch.from_numpy(part)[None, None]
                    expected = interpolate(part, size, mode="nearest-exact")[0, 0]
                    found = mask.read(box, size, 77)
                    assert torch.equal(found, expected)
                    assert found.is_contiguous()
                assert np.array_equal(mask, numbers)

    def test_unknown_values(self, tmp_path: Path) -> None:
        """Found where they are read: outside of a crop by `check`, and by validation."""
        Image.new("RGB", (40, 40)).save(tmp_path / "x.png")
        numbers = np.zeros((40, 40), np.uint8)
        numbers[30:] = 7
        Image.fromarray(numbers).save(tmp_path / "mask.png")
        pair = str(tmp_path / "x.png"), str(tmp_path / "mask.png")
        part = folders.Part([pair], Format(), masks.parse(NAMES, Path("classes.txt")))
        dataset = folders.MaskFiles(part, tuple)
        _, mask = dataset.open(0)
        assert not mask.read((0, 0, 30, 40), (60, 60)).any()
        with refusal("masks.translate", "mask.png", "value 7 in 40 pixels"):
            mask.read((0, 0, 31, 40))
        with refusal("masks.translate", "mask.png", "value 7 in 400 pixels"):
            mask.read()
        assert "value 7 in 400 pixels" in check.look("train", dataset, 0).error

    def test_white_of_a_palette(self, tmp_path: Path) -> None:
        """Whether 255 is white or a value is a question for the whole file, not for a crop."""
        labels = masks.parse(["a", "b", "c", "void = 255"], Path("classes.txt"))
        image = Image.fromarray(np.array([[0, 1, 1], [0, 2, 2]], np.uint8))
        image.putpalette([0, 0, 0, 255, 255, 255, 1, 1, 1])
        image.save(tmp_path / "x.png")
        mask = masks.lazy_mask(str(tmp_path / "x.png"), labels)
        assert mask.read((0, 0, 1, 3)).tolist() == [[0, 255, 255]]
        assert mask.read().tolist() == [[0, 255, 255], [0, 1, 1]]


def test_a_bmp_that_pillow_misreads(tmp_path: Path) -> None:
    """Black and white of 8 bits: as one bit it would be all black."""
    with refusal("images.reading", "x.bmp", "save it as PNG"):
        read(
            tmp_path,
            ["a = 0 0 0", "b = 255 255 255"],
            [0, 1],
            "x.bmp",
            palette=[0] * 3 + [255] * 3,
        )


LISTED = [
    ["a = 0 0 0", "b = 255 0 0", "c = 255 255 255"],
    ["a = 0 0 0", "b = 1 1 1", "c = 255 255 255", "void = 128 128 128"],
    ["a = 10 20 30", "b = 200 0 7", "void = 9 9 9"],
    ["a = 10 20 30", "b = 200 0 7"],
    ["a = 0", "b = 255"],
    ["a = 0", "b = 1", "c = 255"],
    ["a = 0", "b = 1", "c = 2"],
    ["a", "b", "c"],
]


def save_all(folder: Path, picture: np.ndarray, chance: random.Random) -> list[str]:
    """Save a picture (H, W, 3) in every way that keeps it."""
    colors = sorted({tuple(color) for color in picture.reshape(-1, 3).tolist()})
    chance.shuffle(colors)
    places = [[colors.index(tuple(color)) for color in row] for row in picture.tolist()]
    palette = Image.fromarray(np.array(places, np.uint8))
    palette.putpalette([value for color in colors for value in color])
    rgb = Image.fromarray(picture)
    files: dict[str, tuple[Image.Image, dict]] = {
        "rgb.png": (rgb, {}),
        "rgba.png": (rgb.convert("RGBA"), {}),
        "rgb.bmp": (rgb, {}),
        "rgb.tif": (rgb, {"compression": "tiff_adobe_deflate"}),
        "rgb.webp": (rgb, {"lossless": True, "exact": True}),
        **{f"palette.{kind}": (palette, {}) for kind in ("png", "tif", "bmp", "gif")},
    }
    files |= {
        f"{n}.png": (palette, {"bits": n}) for n in (1, 2, 4) if len(colors) <= 2**n
    }
    if (picture == picture[..., :1]).all():
        grey = Image.fromarray(picture[..., 0].copy())
        files |= {f"grey.{kind}": (grey, {}) for kind in ("png", "tif", "bmp", "gif")}
        files["alpha.png"] = grey.convert("LA"), {}
        files["deep.png"] = (
            Image.fromarray(picture[..., 0].astype(np.uint16) * 257),
            {},
        )
        if set(np.unique(picture)) <= {0, 255}:
            files |= {
                f"two.{kind}": (grey.convert("1"), {}) for kind in ("png", "tif", "bmp")
            }
    for name, (image, how) in files.items():
        image.save(folder / name, **how)
    return [str(folder / name) for name in files]


def test_masks_mean_what_they_show(tmp_path: Path, chance: random.Random) -> None:
    """However the files of a set store the same pictures: the same classes, or an error."""
    compared = 0
    for number in range(32):
        lines = LISTED[number % len(LISTED)]
        labels = masks.parse(lines, Path("classes.txt"))
        pool = [(v, v, v) for v in (0, 1, 2, 9, 128, 255)] + [(255, 0, 0), (10, 20, 30)]
        if chance.random() < 0.8:
            own = [(value,) * 3 for value in labels.values]
            pool = (
                own
                if labels.colors is None
                else [tuple(c) for c in labels.colors.tolist()]
            )
        stored = []
        for picture in range(3):
            shown = chance.sample(pool, chance.randint(1, min(3, len(pool))))
            pixels = np.array([chance.choices(shown, k=6) for _ in range(5)], np.uint8)
            folder = tmp_path / f"{number}" / f"{picture}"
            folder.mkdir(parents=True)
            stored.append(save_all(folder, pixels, chance))
        found = []
        for _ in range(8):
            labels = masks.parse(lines, Path("classes.txt"))
            try:
                chosen = [chance.choice(paths) for paths in stored]
                read = np.stack([masks.read_mask(path, labels) for path in chosen])
            except UserError:
                continue
            # a set of one class, or of nothing but void, is refused before training
            if not masks.explain_values(np.unique(read).tolist(), ["a class"]):
                found.append(read.tobytes())
        assert len(set(found)) <= 1, (lines, stored)
        compared += len(found) > 1
    assert compared > 10


def test_what_an_optimiser_makes_of_colours(
    tmp_path: Path, chance: random.Random
) -> None:
    """Black and white alone becomes grey or 1 bit: if they are listed, the set is read the same."""
    lines = ["ground = 0 0 0", "car = 255 0 0", "road = 255 255 255"]
    labels = masks.parse(lines, Path("classes.txt"))
    colors = np.array([[0, 0, 0], [255, 0, 0], [255, 255, 255]], np.uint8)
    for name, numbers in (
        ("a", [[0, 1, 2]]),
        ("b", [[2, 0, 2]]),
        ("c", [[0, 0, 0]]),
    ):
        (tmp_path / name).mkdir()
        for path in save_all(tmp_path / name, colors[numbers], chance):
            if not path.endswith(("deep.png", "palette.bmp")):  # which are refused
                assert masks.read_mask(path, labels).tolist() == numbers


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"row": [0, 1, 255]}, {"row": [False, True], "dtype": "bool"}),
        (
            {"row": [0, 1], "palette": PALETTE},
            {"row": [0, 1], "palette": [9] * 3 + PALETTE},
        ),
        ({"row": [0, 1], "palette": PALETTE}, {"row": [False, True], "dtype": "bool"}),
        (
            {"row": [0, 1], "palette": [0] * 3 + [255] * 3 + [1, 2, 3]},
            {"row": [0, 255]},
        ),
        (
            {"row": [0, 0], "palette": [255] * 3 + [1, 2, 3]},
            {"row": [1, 1], "palette": WHITES},
        ),
    ],
)
def test_sets_that_mix(tmp_path: Path, one: dict, other: dict) -> None:
    """They are refused in either order; each file alone is read."""
    read(tmp_path, NAMES, **one, name="one.png")
    read(tmp_path, NAMES, **other, name="other.png")
    for first, second in ("one.png", "other.png"), ("other.png", "one.png"):
        labels = masks.parse(NAMES, Path("classes.txt"))
        masks.read_mask(str(tmp_path / first), labels)
        with refusal("masks.add_meanings", first, second):
            masks.read_mask(str(tmp_path / second), labels)


def test_a_colour_that_comes_twice_in_a_palette(tmp_path: Path) -> None:
    """The masks have numbers: what they show does not tell two classes apart."""
    labels = masks.parse(NAMES, Path("classes.txt"))
    path = str(tmp_path / "mask.png")
    for number in 1, 2:
        image = Image.fromarray(np.array([[0, number]], np.uint8))
        image.putpalette([1, 2, 3, 7, 7, 7, 7, 7, 7])
        image.save(path)
        assert masks.read_mask(path, labels).tolist() == [[0, number]]


@on_ranks(1)
def test_a_set_that_mixes(tmp_path: Path) -> None:
    """Training says so before its first step; void in an optimised file is no crack."""
    data = tmp_path / "set"
    ddpkit.demo_set(data, 12, 4, masks=True)
    Image.new("1", (64, 64), 1).save(data / "train/masks/0003.png")
    with refusal("masks.add_meanings", data / "train/masks/0003.png"):
        content(data)


def content(data: Path) -> tuple:
    """The classes of a set, their colours, and a checksum of its masks."""
    train, val, classes = folders.find_masks(data)
    parts = [folders.MaskFiles(part, lambda *_: None) for part in (train, val)]
    found = [
        part.open_mask(n).read().numpy() for part in parts for n in range(len(part))
    ]
    colors = None if classes.colors is None else classes.colors.tolist()
    return list(classes), colors, zlib.crc32(b"".join(mask.tobytes() for mask in found))


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
@on_ranks(1)
def test_colors(project: Project, tmp_path: Path) -> None:
    """The same masks, however they are stored."""
    plain = tmp_path / "plain"
    data = tmp_path / "set"
    for folder in plain, data:
        ddpkit.demo_set(folder, 20, 6, masks=True)
    repaint(data, recolor)
    text = "background = 10 20 30\r\ncrack = 200,0, 7\r\nvoid = 0 0 0"
    (data / "classes.txt").write_bytes(text.encode("utf-8-sig"))
    classes, _, checksum = content(plain)
    assert content(data) == (classes, [list(COLORS[0]), list(COLORS[1])], checksum)


@pytest.mark.parametrize(
    ("change", "text", "words"),
    [
        (lambda mask: 128 * (mask == 1), None, ["hold 0, 128", "NAME = 0, NAME = 128"]),
        (
            lambda mask: 255 * (mask == 1),
            "ground\ncrack",
            ["hold ground and void alone", "NAME = 255"],
        ),
    ],
)
@on_ranks(1)
def test_masks_that_cannot_be_meant(
    tmp_path: Path, change: Callable, text: str | None, words: list[str]
) -> None:
    data = tmp_path / "set"
    ddpkit.demo_set(data, 12, 4, masks=True)
    repaint(data, change)
    (data / "classes.txt").unlink()
    if text:
        (data / "classes.txt").write_text(text)
    with refusal("folders.survey", data, words):
        content(data)


def test_images_of_each_class(capsys: pytest.CaptureFixture) -> None:
    for part, name in ("val", "validation"), ("test", "test"):
        class_counts.say_images(["a", "b"], [0, 1, 1], [1], part)
        counts, warning = capsys.readouterr().out.splitlines()
        assert counts.endswith(f" ({name}): a 1 (0), b 2 (1)")
        line = f"warning: no {name} images of a: their accuracy is not measured"
        assert warning == line


def narrow_png(path: Path, values: list[int], bits: int) -> None:
    """A grey PNG of one row whose values have so many bits, as other programs write it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        length = struct.pack(">I", len(data))
        return length + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", len(values), 1, bits, 0, 0, 0, 0)
    text = "".join(f"{value:0{bits}b}" for value in values)
    row = int(text.ljust(-(-len(text) // 8) * 8, "0"), 2)
    packed = b"\0" + row.to_bytes(-(-len(text) // 8), "big")
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(packed))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + data + chunk(b"IEND", b""))


@pytest.mark.parametrize("bits", [2, 4])
def test_fewer_than_8_bits(tmp_path: Path, bits: int) -> None:
    """Stored numbers or what they show: an error, unless classes.txt has what they show."""
    path = tmp_path / "mask.png"
    largest = 2**bits - 1
    narrow_png(path, [0, 1, largest], bits)
    step = 255 // largest
    palette = Image.fromarray(np.array([[0, 1, largest]], np.uint8))
    palette.putpalette([n * step for n in range(largest + 1) for _ in "RGB"])
    palette.save(tmp_path / "palette.png", bits=bits)
    Image.open(path).save(tmp_path / "8.png")
    lists = ["a", "b", "c"], [f"c{n}" for n in range(250)], ["a = 0", f"b = {step}"]
    for name in "mask.png", "palette.png":
        for lines in lists:
            labels = masks.parse(lines, Path("classes.txt"))
            with refusal("masks.read_bytes", name, "2 or 4 bits"):
                masks.read_mask(str(tmp_path / name), labels)
    lines = ["a = 0 0 0", f"b = {step} {step} {step}", "c = 255 255 255"]
    for name in "mask.png", "palette.png", "8.png":
        labels = masks.parse(lines, Path("classes.txt"))
        assert masks.read_mask(str(tmp_path / name), labels).tolist() == [[0, 1, 2]]
