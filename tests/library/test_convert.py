"""python -m ddpkit convert: each format as its program writes it, pixel for pixel."""

import base64
import csv
import io
import json
import os
import re
import shlex
import shutil
import struct
import time
import unicodedata
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from generated import Project, type_in_shell
from PIL import Image

from ddpkit.convert import arrays, formats, result, shapes
from ddpkit.convert import command as convert
from ddpkit.convert import yolo as yolo_format
from ddpkit.convert.tree import ENDINGS, Tree
from ddpkit.errors import UserError
from ddpkit.vision import folders
from ddpkit.vision.masks import read_classes, read_mask

HEIGHT = 12
WIDTH = 16
VOID = 255
# A box of columns 2 to 9 and rows 1 to 6, and a smaller one over its corner.
LARGE = [2, 1, 10, 1, 10, 7, 2, 7]
SMALL = [8, 5, 12, 5, 12, 9, 8, 9]
Expected = dict[str, np.ndarray]  # by part and name


def two_boxes(large: int = 1, small: int = 2) -> np.ndarray:
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[1:7, 2:10] = large
    mask[5:9, 8:12] = small
    return mask


def inside(outline: list[int]) -> np.ndarray:
    """Bool (H, W) of a box as its corners are given."""
    mask = np.zeros((HEIGHT, WIDTH), bool)
    mask[outline[1] : outline[5], outline[0] : outline[2]] = True
    return mask


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(text, bytes):
        path.write_bytes(text)
        return
    path.write_text(text if isinstance(text, str) else json.dumps(text))


def save(path: Path, pixels: np.ndarray | None = None, **options: object) -> Path:
    """Save pixels, or an image of noise that is another one for each path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if pixels is None:
        noise = np.random.default_rng(sum(str(path).encode()))
        pixels = noise.integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return path


def lengths(mask: np.ndarray, order: str) -> list[int]:
    """The lengths of runs, the first one of what is outside."""
    flat = [False, *mask.reshape(-1, order=order).tolist(), None]
    edges = [n for n in range(1, len(flat)) if flat[n] != flat[n - 1]]
    return np.diff([0, *[n - 1 for n in edges]]).tolist()


def starts(mask: np.ndarray) -> str:
    """Kaggle's runs down the columns: START LENGTH ..., of which 1 is the first."""
    runs = lengths(mask, "F")
    ends = np.cumsum(runs)
    pairs = zip(ends[0::2] + 1, runs[1::2], strict=False)
    return " ".join(f"{start} {length}" for start, length in pairs)


def packed(counts: list[int]) -> str:
    """COCO's compressed form."""
    text = ""
    for n, count in enumerate(counts):
        rest = count - counts[n - 2] if n > 2 else count
        more = True
        while more:
            code = rest & 31
            rest >>= 5
            more = rest != (-1 if code & 16 else 0)
            text += chr(48 + code + 32 * more)
    return text


def coco(root: Path) -> Expected:
    """Outlines in both parts, an outline of two pieces, runs of both kinds, a crowd."""
    categories = [{"id": 7, "name": "cat"}, {"id": 3, "name": "_background_"}]
    categories += [{"id": 20, "name": "dog"}]
    ring = np.zeros((HEIGHT, WIDTH), bool)
    ring[0:9, 3:14] = True
    ring[3:6, 6:9] = False
    size = [HEIGHT, WIDTH]
    marked = {
        # smaller, but earlier in the file
        "a.png": [(20, [SMALL], 0), (7, [LARGE], 0)],
        "b.png": [
            (7, {"size": size, "counts": lengths(ring, "F")}, 0),
            (20, [[0, 10, 2, 10, 2, 12, 0, 12], [14, 10, 16, 10, 16, 12, 14, 12]], 0),
        ],
        "c.png": [
            (7, {"size": size, "counts": packed(lengths(ring, "F"))}, 0),
            (20, {"size": size, "counts": lengths(inside(SMALL), "F")}, 1),
            (20, [[1, 1, 2, 2]], 0),
        ],
        "gone.png": [],
    }
    for part, names in ("train", ["a.png", "b.png"]), ("val", ["c.png", "gone.png"]):
        content: dict[str, list] = {"categories": categories, "annotations": []}
        content["images"] = []
        for name in names:
            known = {"id": name, "file_name": name, "height": HEIGHT, "width": WIDTH}
            content["images"].append(known)
            for category, segmentation, crowd in marked[name]:
                annotation = {"id": len(content["annotations"]), "image_id": name}
                annotation |= {"category_id": category, "iscrowd": crowd}
                content["annotations"].append(
                    annotation | {"segmentation": segmentation}
                )
            if name != "gone.png":
                save(root / f"{part}2017" / name)
        write(root / f"annotations/instances_{part}2017.json", content)
    second = ring.astype(np.uint8)
    third = second.copy()
    third[5:9, 8:12] = VOID
    second[10:12, 0:2] = 2
    second[10:12, 14:16] = 2
    return {"train/a": two_boxes(), "train/b": second, "val/c": third}


def labelme(root: Path) -> Expected:
    """An outline, a box, a circle, a mask, a point, and what is to be ignored."""
    part = np.zeros((4, 4), np.uint8)
    part[1:3, 1:4] = 1
    buffer = io.BytesIO()
    Image.fromarray(part * 255).save(buffer, "PNG")
    text = base64.b64encode(buffer.getvalue()).decode()

    def shape(label: str, kind: str, *points: list[float], **more: str) -> dict:
        found = {"label": label, "shape_type": kind, "points": points}
        return {**found, **more}

    corners = [LARGE[n : n + 2] for n in range(0, 8, 2)]
    drawn = [
        shape("dog", "rectangle", [12, 9], [8, 5]),
        shape("cat", "polygon", *corners),
        shape("__ignore__", "circle", [14, 2], [15, 2]),
        shape("dog", "mask", [0, 8], [3, 11], mask=text),
        shape("nose", "point", [1, 1]),
    ]
    save(root / "a.png")
    save(root / "later.png")
    write(root / "a.json", {"imagePath": "a.png", "shapes": drawn, "imageData": None})
    write(root / "labels.txt", "__ignore__\n_background_\ncat\ndog\nnose\n")
    expected = two_boxes()
    expected[1:3, 13:15] = VOID
    expected[9:11, 1:4] = 2
    return {"train/a": expected}


def yolo(root: Path) -> Expected:
    def line(number: int, outline: list[int]) -> str:
        scaled = [v / (HEIGHT if n % 2 else WIDTH) for n, v in enumerate(outline)]
        return f"{number} {' '.join(map(str, scaled))}\n"

    text = "train: ../train/images\nval: ../valid/images\nnames: [cat, dog]\n"
    write(root / "data.yaml", text)
    large = [*LARGE, 2, 4]  # five points, as boxes have not
    for name in "train/images/a.png", "train/images/none.png", "valid/images/b.png":
        save(root / name)
    write(root / "train/labels/a.txt", line(1, SMALL) + line(0, large))
    write(root / "valid/labels/b.txt", "")
    write(root / "valid/labels/gone.txt", "")
    return {"train/a": two_boxes(), "val/b": two_boxes(0, 0)}


def cvat_xml(root: Path) -> Expected:
    """The larger one above the other by its z_order; runs along the rows of a box."""
    points = ";".join(f"{x},{y}" for x, y in zip(LARGE[::2], LARGE[1::2], strict=True))
    head = "".join(
        f"<label><name>{name}</name><color>{color}</color></label>"
        for name, color in (("cat", "#ff0000"), ("dog", "#00ff00"))
    )
    write(
        root / "annotations.xml",
        f"""<?xml version="1.0"?><annotations><meta><task><labels>{head}</labels></task></meta>
        <image name="sub/a.png" width="16" height="12">
        <polygon label="cat" points="{points}" z_order="1"/>
        <box label="dog" xtl="8" ytl="5" xbr="12" ybr="9" z_order="0"/>
        <mask label="dog" rle="1, 2, 2, 1" left="0" top="9" width="2" height="3" z_order="0"/>
        <polyline label="dog" points="0,0;1,1"/></image></annotations>""",
    )
    save(root / "images/sub/a.png")
    expected = two_boxes()
    expected[1:7, 2:10] = 1
    expected[9:12, 0:2] = [[0, 2], [2, 0], [0, 2]]
    return {"train/a": expected}


def label_studio(root: Path) -> Expected:
    """An outline in %, a box that is turned about its first corner, and a brush in a PNG."""
    points = [
        [100 * x / WIDTH, 100 * y / HEIGHT]
        for x, y in zip(LARGE[::2], LARGE[1::2], strict=True)
    ]
    result = {"type": "polygonlabels", "value": {"points": points}}
    result["value"]["polygonlabels"] = ["cat"]
    size = {"width": 300 / WIDTH, "height": 200 / HEIGHT, "rotation": 90}
    box = {"x": 1500 / WIDTH, "y": 100 / HEIGHT, **size, "rectanglelabels": ["cat"]}
    results = [result, {"type": "rectanglelabels", "value": box}]
    done = {"id": 5, "result": [*results, {"type": "brushlabels", "value": {}}]}
    task = {"id": 3, "data": {"image": "/data/upload/1/0123abcd-a.png"}}
    write(root / "project.json", [task | {"annotations": [done]}])
    brush = inside(SMALL).astype(np.uint8) * 255
    save(root / "task-3-annotation-5-by-1-tag-dog-0.png", brush)
    save(root / "images/a.png")
    expected = two_boxes()
    expected[1:4, 13:15] = 1
    return {"train/a": expected}


def palette_mask(path: Path, mask: np.ndarray) -> None:
    image = Image.fromarray(mask)
    image.putpalette([n * step % 256 for n in range(256) for step in (128, 64, 32)])
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def voc(root: Path) -> Expected:
    base = root / "VOCdevkit/VOC2012"
    for part, names in ("train", "ab"), ("val", "c"), ("trainval", "abc"):
        lines = "\n".join(names)
        write(base / f"ImageSets/Segmentation/{part}.txt", lines)
    mask = two_boxes(15, VOID)
    for name in "abcd":
        save(base / f"JPEGImages/{name}.jpg")
        if name in "ac":
            palette_mask(base / f"SegmentationClass/{name}.png", mask)
    return {"train/a": mask, "val/c": mask}


COLORS = np.array([[0, 0, 0], [250, 50, 83], [51, 221, 255]], np.uint8)


def cvat_mask(root: Path) -> Expected:
    head = "# label:color_rgb:parts:actions\n"
    lines = "background:0,0,0::\ncat:250,50,83::\ndog:51,221,255::\n"
    write(root / "labelmap.txt", head + lines)
    write(root / "ImageSets/Segmentation/default.txt", "a\n")
    save(root / "JPEGImages/a.png")
    save(root / "SegmentationClass/a.png", COLORS[two_boxes()])
    return {"train/a": two_boxes()}


def cityscapes(root: Path) -> Expected:
    expected = {}
    for part, ids in ("train", [3, 7, 33]), ("val", [0, 8, 11]), ("test", [1, 2, 3]):
        stem = f"{part}/ulm/ulm_000_001"
        save(root / f"leftImg8bit/{stem}_leftImg8bit.png")
        values = np.array(ids, np.uint8)[two_boxes()]
        save(root / f"gtFine/{stem}_gtFine_labelIds.png", values)
        classes = {7: 0, 8: 1, 11: 2, 33: 18}
        numbers = np.array([classes.get(n, VOID) for n in ids], np.uint8)
        expected[f"{part}/ulm_000_001_leftImg8bit"] = numbers[two_boxes()]
    del expected["test/ulm_000_001_leftImg8bit"]  # void alone
    return expected


def camvid(root: Path) -> Expected:
    for part in "train", "val", "test":
        save(root / part / "a.png")
        save(root / f"{part}annot/a.png", two_boxes(10, 11))
    expected = two_boxes(10, VOID)
    return {f"{part}/a": expected for part in ("train", "val", "test")}


def camvid_codes(root: Path) -> Expected:
    write(root / "codes.txt", "Sky\nVoid\nRoad\n")
    write(root / "valid.txt", "b.png\n")
    for name in "ab":
        save(root / f"images/{name}.png")
        save(root / f"labels/{name}_P.png", two_boxes())
    numbers = np.array([0, VOID, 1], np.uint8)
    return {"train/a": numbers[two_boxes()], "val/b": numbers[two_boxes()]}


def roboflow_mask(root: Path) -> Expected:
    for part in "train", "valid":
        write(root / part / "_classes.csv", "Pixel Value, Class\n0, background\n1, cat")
        save(root / part / "a_jpg.rf.1.jpg")
        save(root / part / "a_jpg.rf.1_mask.png", two_boxes(1, 0))
    return {f"{part}/a_jpg.rf.1": two_boxes(1, 0) for part in ("train", "val")}


def rle_csv(root: Path) -> Expected:
    rows = [["ImageId", "ClassId", "EncodedPixels"]]
    rows += [["a", "10", starts(inside(SMALL))], ["a", "2", starts(inside(LARGE))]]
    rows += [["b", "", ""], ["gone", "2", "1 1"]]
    text = "\n".join(",".join(row) for row in rows)
    write(root / "train.csv", text)
    write(root / "sample_submission.csv", text.replace("a,", "x,"))
    save(root / "train_images/a.png")
    save(root / "train_images/b.png")
    return {"train/a": two_boxes(), "train/b": two_boxes(0, 0)}


def class_masks(root: Path) -> Expected:
    for name, outline, white in ("cat", LARGE, 255), ("dog", SMALL, 1):
        values = inside(outline).astype(np.uint8) * white
        save(root / f"train/masks/{name}/a.png", values)
    save(root / "train/images/a.jpg")
    return {"train/a": two_boxes()}


def jpeg_masks(root: Path) -> Expected:
    save(root / "images/a.png")
    values = inside(LARGE).astype(np.uint8) * 255
    save(root / "masks/a.jpg", values, quality=90)
    return {"train/a": two_boxes(1, 1) * inside(LARGE)}


def mat(root: Path) -> Expected:
    """As CrackForest has them: a structure, of which one field is the mask."""
    from scipy.io import savemat

    save(root / "image/a.jpg")
    save(root / "image/none.jpg")
    fields = {"Boundaries": inside(SMALL), "Segmentation": two_boxes(2, 3) + 1}
    (root / "groundTruth").mkdir()
    savemat(root / "groundTruth/a.mat", {"groundTruth": fields})
    write(root / "classes.txt", "ground = 1\ncrack = 3\nvoid = 4\n")
    return {"train/a": two_boxes(1, VOID)}


def npy(root: Path) -> Expected:
    save(root / "JPEGImages/a.jpg")
    (root / "SegmentationClassNpy").mkdir()
    values = two_boxes().astype(np.int32)
    values[0] = -1
    np.save(root / "SegmentationClassNpy/a.npy", values)
    expected = two_boxes()
    expected[0] = VOID
    return {"train/a": expected}


# by format: how it is made, the classes, and words of the lines about what is left out
SETS: dict[str, tuple[Callable[[Path], Expected], str, list[str]]] = {
    "coco": (
        coco,
        "background cat dog",
        ["not there: gone.png", "fewer than 3 points"],
    ),
    "labelme": (
        labelme,
        "background cat dog nose",
        ["images without labels: later.png", "a point of nose", "no mask has: nose"],
    ),
    "yolo": (
        yolo,
        "background cat dog",
        ["label file: train/images/none.png", "an image: valid/labels/gone.txt"],
    ),
    "cvat-xml": (cvat_xml, "background cat dog", ["a polyline of dog"]),
    "label-studio": (label_studio, "background cat dog", []),
    "voc": (voc, "", ["without a mask: b", "no mask has: aeroplane"]),
    "cvat-mask": (cvat_mask, "background cat dog", []),
    "cityscapes": (cityscapes, "", ["void everywhere: leftImg8bit/test/ulm/ulm_000"]),
    "camvid": (camvid, "", ["no mask has: Building"]),
    "camvid-codes": (camvid_codes, "Sky Road", []),
    "roboflow-mask": (roboflow_mask, "background cat", []),
    "rle-csv": (rle_csv, "background 2 10", ["that are not there: gone"]),
    "class-masks": (class_masks, "background cat dog", []),
    "jpeg-masks": (jpeg_masks, "background foreground", []),
    "arrays": (mat, "ground crack", ["images without labels: image/none.jpg"]),
    "arrays-npy": (npy, "", ["the classes are the values 0, 1, 2"]),
}


def masks_in(folder: Path) -> Expected:
    """The masks as training reads them, by part and name."""
    labels = read_classes(folder / "classes.txt")
    found = {}
    for path in folder.glob("*/masks/**/*.png"):
        part = path.relative_to(folder).parts[0]
        found[f"{part}/{path.stem}"] = read_mask(str(path), labels)
        image = Image.open(path)
        assert image.mode == "P"
        # the numbers are the classes, whatever the colours say
        assert (np.array(image) == found[f"{part}/{path.stem}"]).all()
    return found


@pytest.mark.parametrize("name", SETS)
def test_masks(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    make, classes, words = SETS[name]
    source = tmp_path / "set"
    source.mkdir()
    expected = make(source)
    before = contents(source)
    out = tmp_path / "out"
    convert.main([str(source), str(out)])
    said = capsys.readouterr().out
    format = name.removesuffix("-codes").removesuffix("-npy")
    assert said.startswith(f"{source}: {format} (")
    for each in words:
        assert each in said
    found = masks_in(out)
    assert found.keys() == expected.keys()
    for key, mask in expected.items():
        assert (found[key] == mask).all(), (key, found[key])
    if classes:
        assert list(read_classes(out / "classes.txt")) == classes.split()
    images = sorted(path for path in out.glob("*/images/**/*") if path.is_file())
    assert len(images) == len(expected)
    # hard links: nothing is copied on one disk
    assert all(os.stat(path).st_nlink > 1 for path in images)
    assert contents(source) == before
    convert.main([str(source), str(tmp_path / "again"), "--format", format])
    assert contents(tmp_path / "again") == contents(out)


def contents(folder: Path) -> dict[str, bytes]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_colours_of_the_source(tmp_path: Path) -> None:
    for make, lines in (
        (cvat_xml, "background = 0 0 0\ncat = 255 0 0\ndog = 0 255 0\n"),
        (cvat_mask, "background = 0 0 0\ncat = 250 50 83\ndog = 51 221 255\n"),
    ):
        source = tmp_path / make.__name__
        make(source)
        out = tmp_path / f"{make.__name__} out"
        convert.main([str(source), str(out)])
        assert (out / "classes.txt").read_text() == f"{lines}void = 255 255 255\n"


def test_runs_along_the_rows(tmp_path: Path) -> None:
    """What nothing in the file shows is to be named."""
    source = tmp_path / "set"
    save(source / "images/a.png")
    first = inside(LARGE).reshape(-1).nonzero()[0].tolist()
    pairs = " ".join(f"{n + 1} 1" for n in first)
    write(source / "train.csv", f"id,annotation\na,{pairs}\n")
    convert.main([str(source), str(tmp_path / "out"), "--format", "rle-csv-rows"])
    found = masks_in(tmp_path / "out")
    assert (found["train/a"] == inside(LARGE)).all()


def test_an_outline_by_its_pixels_centres() -> None:
    """Compared with the definition, of random outlines that also cross themselves."""
    noise = np.random.default_rng(0)
    rows, columns = np.mgrid[:20, :30] + 0.5
    for _ in range(50):
        points = noise.uniform(-5, 35, (noise.integers(3, 9), 2))
        inside = np.zeros((20, 30), bool)
        for (x, y), (end_x, end_y) in zip(points, np.roll(points, -1, 0), strict=True):
            passed = (y > rows) != (end_y > rows)
            inside ^= passed & (columns > x + (rows - y) * (end_x - x) / (end_y - y))
        area = shapes.fill_outline(points, (20, 30))
        found = np.zeros((20, 30), bool)
        height, width = area.inside.shape
        found[area.top : area.top + height, area.left : area.left + width] = area.inside
        assert (found == inside).all()


def test_a_box_that_is_turned() -> None:
    """Clockwise as one sees it, where y goes down: the first corner comes to the right."""
    corners = shapes.box_outline(0, 0, 4, 2)
    expected = [[3, -1], [3, 3], [1, 3], [1, -1]]
    np.testing.assert_allclose(shapes.turned(corners, 90), expected, atol=1e-9)


def folders_of(out: Path) -> dict[str, list[str]]:
    """The class folders of each part, with the names of their images."""
    found: dict[str, list[str]] = {}
    for path in sorted(out.glob("*/*/*")):
        key = "/".join(path.relative_to(out).parts[:2])
        found.setdefault(key, []).append(path.name)
    return found


def test_labels_of_images(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Kaggle's ids without ending, in comma or semicolon; Hugging Face's metadata."""
    kaggle = tmp_path / "kaggle"
    for name in "ab":
        save(kaggle / f"train/{name}.jpg")
    save(kaggle / "train/c.gif")
    save(kaggle / "test/a.jpg")
    write(kaggle / "labels.csv", "id;breed\na;pug\nb;collie\nc;pug\ngone;pug\n")
    write(kaggle / "sample_submission.csv", "id,pug\na,0.5\n")
    convert.main([str(kaggle), str(tmp_path / "k")])
    said = capsys.readouterr().out
    assert "skipped: 1 images of labels.csv that are not there: gone" in said
    expected = {"train/collie": ["b.jpg"], "train/pug": ["a.jpg", "c.gif"]}
    assert folders_of(tmp_path / "k") == expected
    hub = tmp_path / "hub"
    for part, label in ("train", 0), ("train", 1), ("validation", 0):
        save(hub / part / f"{label}.png")
    write(hub / "train/metadata.csv", "file_name,label\n0.png,no\n1.png,yes\n")
    write(hub / "validation/metadata.jsonl", {"file_name": "0.png", "label": "no"})
    convert.main([str(hub), str(tmp_path / "h")])
    expected = {"train/no": ["0.png"], "train/yes": ["1.png"], "val/no": ["0.png"]}
    assert folders_of(tmp_path / "h") == expected
    # a text in JSON is one label, a list several, which no list can have with a ;
    path = hub / "validation/metadata.jsonl"
    write(path, {"file_name": "0.png", "label": "no;yes"})
    convert.main([str(hub), str(tmp_path / "one")])
    assert folders_of(tmp_path / "one")["val/no;yes"] == ["0.png"]
    write(path, {"file_name": "0.png", "label": ["a;b", "no"]})
    assert "the label a;b has ;, which stands between labels" in refusal(hub)


def test_several_labels(tmp_path: Path) -> None:
    source = tmp_path / "set"
    for part in "train", "valid":
        for name in "abc":
            save(source / part / f"{name}.jpg")
        rows = "filename, cat, dog\na.jpg, 1, 1\nb.jpg, 0, 1\nc.jpg, 0, 0\n"
        write(source / part / "_classes.csv", rows)
    out = tmp_path / "out"
    convert.main([str(source), str(out)])
    for part in "train", "val":
        with open(out / f"{part}.csv", newline="") as file:
            rows = list(csv.reader(file))
        assert rows[0] == ["file", "label"]
        found = {Path(path).stem: label for path, label in rows[1:]}
        assert found == {"a": "cat;dog", "b": "dog", "c": ";"}
        assert all((out / path).is_file() for path, _ in rows[1:])


def test_a_label_that_comes_twice(tmp_path: Path) -> None:
    """It is one label, and the set not one of several."""
    source = tmp_path / "set"
    for name in "ab":
        save(source / f"{name}.jpg")
    write(source / "labels.csv", "image,label\na.jpg,cat; cat\nb.jpg,dog\n")
    convert.main([str(source), str(tmp_path / "out")])
    expected = {"train/cat": ["a.jpg"], "train/dog": ["b.jpg"]}
    assert folders_of(tmp_path / "out") == expected


def broken(root: Path, kind: str) -> None:
    """Make a set, and spoil it."""
    if kind == "unknown":
        return save(root / "a.png") and None
    if kind == "as training":
        save(root / "train/images/a.png")
        return save(root / "train/masks/a.png", two_boxes()) and None
    if kind == "two formats":
        labelme(root)
    coco(root)
    path = root / "annotations/instances_train2017.json"
    content = json.loads(path.read_text())
    first = content["annotations"][0]
    if kind == "json":
        return write(path, path.read_text()[:99])
    if kind == "category":
        first["category_id"] = 8
    if kind == "runs":
        first["segmentation"] = {"size": [HEIGHT, WIDTH], "counts": [1, 2]}
    if kind == "no key":
        del content["categories"][0]["id"]
    if kind == "no list":
        first["segmentation"] = 5
    if kind == "size":
        content["images"][0]["width"] = 9
    if kind == "points":
        first["segmentation"] = [[1, 2, "x", 4, 5, 6]]
    if kind == "boxes":
        content["annotations"] = [{**first, "segmentation": []}]
        (root / "annotations/instances_val2017.json").unlink()
    if kind == "no images":
        shutil.rmtree(root / "train2017")
        shutil.rmtree(root / "val2017")
    return write(path, content)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("unknown", ["unknown format (1 .png)", *formats.FORMATS]),
        ("as training", ["needs no conversion", "check"]),
        ("two formats", ["coco and labelme", "--format coco"]),
        ("json", ["instances_train2017.json: not JSON", "repair"]),
        ("category", ["annotation 0: category 8", "add it there"]),
        ("runs", ["annotation 0: its runs (RLE) have 3 pixels, not the 16 x 12"]),
        ("no key", ["set: cannot be read as coco (KeyError('id'))"]),
        ("no list", ["set: cannot be read as coco (TypeError"]),
        ("size", ["a.png: the labels are of 9 x 12 pixels, the image has 16 x 12"]),
        ("points", ["annotation 0: its outline is not a list"]),
        ("boxes", ["no object has an outline", "boxes"]),
        ("no images", ["no image with labels"]),
    ],
)
def test_what_is_broken(kind: str, words: list[str], tmp_path: Path) -> None:
    """One line, and nothing is left."""
    source = tmp_path / "set"
    source.mkdir()
    broken(source, kind)
    with pytest.raises(UserError) as caught:
        convert.main([str(source), str(tmp_path / "out")])
    for word in words:
        assert word in caught.value.line
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


@pytest.mark.parametrize(
    ("name", "lines", "words"),
    [
        (
            "train/labels/a.txt",
            "0.7 0 0 1 0 1 1",
            "class 0.7 is not among the names of data.yaml",
        ),
        (
            "train/labels/a.txt",
            "5 0 0 1 0 1 1",
            "line 1: class 5 is not among the names",
        ),
        ("train/labels/a.txt", "0 0 0 1 zero 1 1", "line 1: expected CLASS X Y"),
        (
            "train.csv",
            "id,rle\na,190 9",
            "the run 190 9 (RLE) does not fit into the 16",
        ),
        ("train.csv", "id,rle\na,1 2 3", "row 2: its runs (RLE) are not pairs"),
        ("annotations.xml", "<annotations><image>", "annotations.xml: not XML"),
        (
            "labelmap.txt",
            "a:0,0,0::\ncat:1,2::",
            "labelmap.txt: cat:1,2::: write all lines in one way",
        ),
    ],
)
def test_a_broken_line(name: str, lines: str, words: str, tmp_path: Path) -> None:
    source = tmp_path / "set"
    make = {"l": cvat_mask, "a": cvat_xml}.get(name[0], yolo)
    make(source)
    if name == "train.csv":
        shutil.rmtree(source)
        save(source / "a.png")
    write(source / name, lines)
    with pytest.raises(UserError) as caught:
        convert.main([str(source), str(tmp_path / "out")])
    assert words in caught.value.line
    assert not (tmp_path / "out").exists()


def test_where_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never over what is there, nor into the source; copies where there are no links."""
    source = tmp_path / "set"
    coco(source)
    kept = tmp_path / "kept"
    # a file with labels is a source, too, as far as it goes
    named = source / "annotations/instances_train2017.json"
    convert.main([str(named), str(tmp_path / "one")])
    assert masks_in(tmp_path / "one").keys() == {"train/a", "train/b"}
    write(kept / "mine.txt", "mine")
    for out in kept, source / "out":
        with pytest.raises(UserError):
            convert.main([str(source), str(out)])
    assert contents(kept) == {"mine.txt": b"mine"}

    def fail(*_: object) -> None:
        raise OSError("another disk")

    monkeypatch.setattr(os, "link", fail)
    convert.main([str(source), str(tmp_path / "out")])
    copies = list((tmp_path / "out").glob("*/images/*"))
    assert len(copies) == 3
    assert all(os.stat(path).st_nlink == 1 for path in copies)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(result, "put_image", stop)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        convert.main([str(source), str(tmp_path / "stopped")])
    assert sorted(tmp_path.iterdir()) == before


def test_images_of_one_name(tmp_path: Path) -> None:
    """They get the names of their folders, too: none is lost."""
    source = tmp_path / "set"
    for folder in "left", "right":
        save(source / folder / "a.png")
        shape = {"label": folder, "points": [[0, 0], [16, 0], [16, 6], [0, 6]]}
        content = {"imagePath": "a.png", "shapes": [shape]}
        write(source / folder / "a.json", content)
    convert.main([str(source), str(tmp_path / "out")])
    found = {str(path.relative_to(tmp_path / "out")) for path in
             (tmp_path / "out").rglob("*.png")}  # fmt: skip
    assert found == {
        f"train/{kind}/{folder}/a.png"
        for kind in ("images", "masks")
        for folder in ("left", "right")
    }


def test_an_image_that_exif_turns(tmp_path: Path) -> None:
    """Labels are of what programs show; a mask of the size before is refused."""
    exif = Image.Exif()
    exif[0x112] = 6  # a quarter turn
    source = tmp_path / "set"
    save(source / "images/a.jpg", exif=exif)
    for name, shape in ("cat", (WIDTH, HEIGHT)), ("dog", (HEIGHT, WIDTH)):
        assert not (tmp_path / "out").exists()
        mask = np.full(shape, 255, np.uint8)
        save(source / f"masks/{name}/a.png", mask)
        if name == "cat":
            convert.main([str(source), str(tmp_path / "upright")])
    assert (masks_in(tmp_path / "upright")["train/a"] == np.ones((WIDTH, HEIGHT))).all()
    with pytest.raises(UserError, match=r"dog/a.png: the mask has 16 x 12 .* EXIF"):
        convert.main([str(source), str(tmp_path / "out")])


# What has gone wrong in silence: each of these sets once gave a wrong image, mask or label.


def converted(source: Path, capsys: pytest.CaptureFixture, *words: str) -> str:
    """Convert to a new folder beside the source; return what was said."""
    out = source.with_name("out")
    shutil.rmtree(out, ignore_errors=True)
    capsys.readouterr()
    convert.main([str(source), str(out), *words])
    return capsys.readouterr().out


def refusal(source: Path, *words: str) -> str:
    with pytest.raises(UserError) as caught:
        convert.main([str(source), str(source.with_name("refused")), *words])
    assert not source.with_name("refused").exists()
    return caught.value.line


def images_in(source: Path) -> dict[str, str]:
    """The images of the folder that was made, and which files of the source they are."""
    found = {}
    out = source.with_name("out")
    known = {path.read_bytes(): path for path in source.rglob("*") if path.is_file()}
    for path in out.rglob("*"):
        if path.is_file() and "masks" not in path.parts and path.suffix in ENDINGS:
            name = path.relative_to(out).as_posix().replace("/images/", "/")
            found[name] = known[path.read_bytes()].relative_to(source).as_posix()
    return found


def coco_file(path: Path, names: list[str], outline: list[int], **more: object) -> None:
    """Write COCO's JSON of images with one object of a class named as the file."""
    content: dict[str, list] = {"images": [], "annotations": []}
    content["categories"] = [{"id": 1, "name": path.stem, **more}]
    for n, name in enumerate(names):
        content["images"].append({"id": n, "file_name": name})
        annotation = {"id": n, "image_id": n, "category_id": 1}
        content["annotations"].append({**annotation, "segmentation": [outline]})
    write(path, content)


def test_no_file_of_the_source_is_written_to(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Labels that give one folder name, and names that some disks take for one."""
    source = tmp_path / "set"
    for name in "x/1.jpg", "y/1.jpg", "y/2.jpg", "z/A.jpg", "z/a.jpg":
        save(source / name)
    before = contents(source)
    for labels in ("a/b", "a_b", "c"), ("Cat", "cat", "c"):
        first, second, third = labels
        rows = f"x/1.jpg,{first}\ny/1.jpg,{second}\ny/2.jpg,{third}\n"
        write(source / "l.csv", f"image,label\n{rows}z/A.jpg,c\nz/a.jpg,c\n")
        converted(source, capsys)
        with open(tmp_path / "out/train.csv", newline="") as file:
            found = list(csv.reader(file))[1:]
        assert sorted(row[1] for row in found) == sorted([*labels, "c", "c"])
        made = images_in(source)
        assert len({name.lower() for name in made}) == 5
        assert {made[name] for name, label in found if label == first} == {"x/1.jpg"}
        (source / "l.csv").unlink()
        assert contents(source) == before
    place = tmp_path / "out/train/new"
    result.put_image(source / "x/1.jpg", place)
    with pytest.raises(UserError, match=r"another image has become new\.jpg"):
        result.put_image(source / "y/1.jpg", place)
    assert contents(source) == before


def with_coco(root: Path, folder: str) -> None:
    names = [f"{folder}1.jpg", f"{folder}2.jpg"]
    coco_file(root / "annotations/train.json", names, LARGE)
    for name in "train/2.jpg", "val/1.jpg", "val/2.jpg":
        save(root / name)


def with_cvat(root: Path) -> None:
    box = '<box label="c" xtl="1" ytl="1" xbr="5" ybr="5"/>'
    both = "".join(f'<image name="{name}.jpg">{box}</image>' for name in ("b/1", "a/2"))
    write(root / "x.xml", f"<annotations>{both}</annotations>")
    for name in "a/1.jpg", "a/2.jpg":
        save(root / "images" / name)


def with_kaggle(root: Path, runs: bool) -> None:
    rows = "id,rle\n1,1 5\n2,1 5\n" if runs else "id_code,diagnosis\n1,c\n2,c\n"
    write(root / "train.csv", rows)
    for name in "train_images/2.jpg", "test_images/1.jpg":
        save(root / name)


def with_lists(root: Path) -> None:
    write(root / "data.yaml", "train: train.txt\nval: images/val\nnames: [c]\n")
    write(root / "train.txt", "images/train/1.jpg\n/data/me/images/train/2.jpg\n")
    for name in "train/2", "val/1", "val/2":
        save(root / f"images/{name}.jpg")
        write(root / f"labels/{name}.txt", "0 0 0 1 0 1 1\n")


def with_labelme(root: Path) -> None:
    shape = {"label": "c", "points": [[0, 0], [9, 0], [9, 9]]}
    for n in "12":
        content = {"imagePath": f"{n}.jpg", "shapes": [shape]}
        write(root / f"train/json/{n}.json", content)
    for name in "train/images/2.jpg", "test/images/1.jpg":
        save(root / name)


def with_local_files(root: Path) -> None:
    value = {"points": [[0, 0], [50, 0], [50, 50]], "polygonlabels": ["c"]}
    done = {"id": 1, "result": [{"type": "polygonlabels", "value": value}]}
    tasks = []
    for n in 1, 2:
        image = f"/data/local-files/?d=ds/train/{n}.jpg"
        tasks.append({"id": n, "data": {"image": image}, "annotations": [done]})
    write(root / "x.json", tasks)
    for name in "train/2.jpg", "test/1.jpg", "test/2.jpg":
        save(root / name)


@pytest.mark.parametrize(
    ("make", "is_taken"),
    [
        (lambda root: with_coco(root, ""), "train/2.jpg"),
        (lambda root: with_coco(root, "train/"), "train/2.jpg"),
        (with_cvat, "images/a/2.jpg"),
        (lambda root: with_kaggle(root, True), "train_images/2.jpg"),
        (lambda root: with_kaggle(root, False), "train_images/2.jpg"),
        (with_lists, "images/train/2.jpg"),
        (with_labelme, "train/images/2.jpg"),
        (with_local_files, "train/2.jpg"),
    ],
    ids=["coco", "coco-folder", "cvat", "runs", "csv", "yolo", "labelme", "studio"],
)
def test_no_other_image_of_the_same_name(
    make: Callable, is_taken: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """1.jpg is not there, but in another folder or part; 2.jpg is told apart by its path."""
    source = tmp_path / "set"
    make(source)
    said = converted(source, capsys)
    made = {
        name: path for name, path in images_in(source).items() if "val/" not in name
    }
    assert list(made.values()) == [is_taken]
    assert "1 images of" in said or "without an image" in said


def test_two_names_for_one_image(tmp_path: Path) -> None:
    """a/1.jpg and b/1.jpg, of which only one is there, in neither folder."""
    source = tmp_path / "set"
    coco_file(source / "x.json", ["a/1.jpg", "b/1.jpg"], LARGE)
    save(source / "images/1.jpg")
    assert "a/1.jpg and b/1.jpg are two images, but images/1.jpg" in refusal(source)
    shape = {"label": "c", "points": [[0, 0], [9, 0], [9, 9]]}
    copies = tmp_path / "copies"
    for n in "12":
        save(copies / f"{n}.jpg")
        write(copies / f"{n}.json", {"imagePath": "1.jpg", "shapes": [shape]})
    assert "imagePath names 1.jpg, but 2.jpg has the file's own name" in refusal(copies)


def test_objects_of_several_files(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source = tmp_path / "set"
    save(source / "images/1.jpg")
    coco_file(source / "cat.json", ["1.jpg"], LARGE)
    coco_file(source / "dog.json", ["1.jpg", "1.jpg"], SMALL)
    said = converted(source, capsys)
    assert "2 more entries of an image that is there" in said
    assert (masks_in(tmp_path / "out")["train/1"] == two_boxes()).all()
    content = json.loads((source / "dog.json").read_text())
    content["images"][0] |= {"height": HEIGHT + 1, "width": WIDTH}
    write(source / "dog.json", content)
    assert "the labels are of 16 x 13 pixels, the image has 16 x 12" in refusal(source)
    content["images"][0] = {"id": 1, "file_name": "2.jpg"}
    write(source / "dog.json", content)
    assert "2.jpg and 1.jpg have the same id 1" in refusal(source)


def test_an_object_that_is_left_out_is_counted_once(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source = tmp_path / "set"
    save(source / "1.jpg")
    coco_file(source / "cat.json", ["1.jpg"], LARGE)
    coco_file(source / "dog.json", ["1.jpg"], [1, 1, 2, 2])
    said = converted(source, capsys)
    assert "1 outlines of fewer than 3 points: dog.json, annotation 0" in said
    assert "cover no pixel" not in said


def test_an_image_in_two_parts(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """It is said; and the name of the image itself is no part."""
    source = tmp_path / "set"
    for name in "test1", "val 2", "3":
        save(source / f"images/{name}.jpg")
    names = ["test1.jpg", "val 2.jpg", "3.jpg"]
    coco_file(source / "x.json", names, LARGE)
    assert "3 in train; 2 classes" in converted(source, capsys)
    (source / "x.json").rename(source / "train.json")
    coco_file(source / "test.json", names[:1], LARGE)
    assert "1 images go into two parts, so that" in converted(source, capsys)
    # nor is a folder around it all a part
    shutil.copytree(source, tmp_path / "around/our_test_set/x")
    said = converted(tmp_path / "around", capsys)
    assert "3 in train, 1 in test; 3 classes" in said


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ({"train": "01", "val": "2", "test": "3", "all": "0123"}, ["01", "2", "3"]),
        ({"train": "01", "trainval": "012", "val": "2"}, ["01", "2", ""]),
        ({"train": "01", "trainval": "012"}, ["01", "2", ""]),
        ({"val": "2", "trainval": "012"}, ["01", "2", ""]),
        ({"train": "01", "val": "2", "cat_trainval": "012"}, ["01", "2", ""]),
        ({"val": "3", "train_aug": "0123"}, ["012", "3", ""]),
    ],
)
def test_lists_of_voc(
    lists: dict[str, str],
    expected: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    source = tmp_path / "set"
    for n in "0123":
        save(source / f"JPEGImages/{n}.jpg")
        palette_mask(source / f"SegmentationClass/{n}.png", two_boxes())
    for name, numbers in lists.items():
        write(source / f"ImageSets/Main/{name}.txt", "\n".join(numbers))
    said = converted(source, capsys)
    made = images_in(source)
    for part, numbers in zip(("train", "val", "test"), expected, strict=True):
        assert {n for n in "0123" if f"{part}/{n}.jpg" in made} == set(numbers)
    others = {"all", "cat_trainval"} & lists.keys()
    assert ("skipped: 1 lists besides" in said) == bool(others)


def test_masks_by_the_whole_path(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """images/a/1 and images/b/1 have masks of their own; of 1.jpg and 1.png nobody knows."""
    source = tmp_path / "set"
    for folder, outline in ("a", LARGE), ("b", SMALL):
        save(source / f"images/{folder}/1.jpg")
        mask = inside(outline).astype(np.uint8)
        save(source / f"masks/cat/{folder}/1.png", mask)
    converted(source, capsys)
    for folder, outline in ("a", LARGE), ("b", SMALL):
        mask = np.array(Image.open(tmp_path / f"out/train/masks/{folder}/1.png"))
        assert (mask == inside(outline)).all()
    save(source / "images/a/1.png")
    assert "1.png and images/a/1.jpg have the same name" in refusal(source)


@pytest.mark.parametrize("column", ["Split", "subset"])
def test_a_column_of_parts(
    column: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source = tmp_path / "set"
    for n in "012":
        save(source / f"images/{n}.jpg")
    expected = {"train/c/0.jpg", "test/d/1.jpg", "val/c/2.jpg"}
    rows = "0,c,train,7\n1,d,test,8\n2,c,valid,9\n"
    write(source / "l.csv", f"Image,Label,{column},Age\n{rows}")
    assert "l.csv: columns that are not read: Age" in converted(source, capsys)
    assert images_in(source).keys() == expected
    write(source / "l.csv", f"id,breed,{column}\n0,c,0\n1,d,1\n2,c,0\n")
    said = converted(source, capsys)
    assert f"not read: {column}" in said
    assert "3 in train" in said
    write(source / "l.csv", f"id,rle,{column}\n0,1 5,train\n1,1 9,test\n2,,val\n")
    assert "1 in train, 1 in val, 1 in test" in converted(source, capsys)


def test_columns_that_are_no_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source = tmp_path / "set"
    for n in "012":
        save(source / f"{n}.jpg")
    path = source / "l.csv"
    write(path, "image,stage,lesions\n0,0,1\n1,3,0\n2,1,7\n")
    assert "l.csv, line 3: stage is 3, but with a column for each" in refusal(source)
    write(path, "id_code,diagnosis,age\n0,x,31\n1,y,32\n2,x,33\n")
    assert "l.csv, line 2: diagnosis is x, but with" in refusal(source)
    path.rename(source / "train.csv")
    assert "train.csv, line 2: diagnosis is x, but with" in refusal(source)
    (source / "train.csv").unlink()
    path.write_bytes("image,label\n0,caf\xe9\n1,caf\xe8\n2,b\n".encode("cp1252"))
    assert "l.csv: not UTF-8 text" in refusal(source)
    write(path, "image,tags\n0,haze primary\n1,primary haze\n2,clear\n")
    assert '"haze primary" is one class' in converted(source, capsys)
    path.unlink()
    for column, value in ("text", "a cat"), ("objects", {"bbox": [1]}), ("x", {}):
        rows = {"file_name": "0.jpg", column: value}
        write(source / "metadata.jsonl", rows)
        assert f"its column {column} has texts or objects" in refusal(source)


@pytest.mark.parametrize(
    ("columns", "rows", "words"),
    [
        ("id,encoding", "{n},{n} 5 4{n} 5", "its column encoding has pairs of numbers"),
        ("id,attribute_ids", "{n},1{n} 61{n} 813", "attribute_ids has several numbers"),
        ("ImageId,PredictionString", "{n},n01 1 2 3 {n}", "has boxes around objects"),
        ("id,name", "{n},x{n}", "its column name has another value in nearly each row"),
        ("id,target", "{n},0.{n}", "its column target has another value in nearly"),
        ("filename,width,class,xmin", "{n}.jpg,9,cat,{n}", "xmin is of boxes around"),
        ("file,label,label ", "{n}.jpg,a,b", "column label appears twice"),
        ("file,breed,species", "{n}.jpg,pug,dog", "breed and species may each be"),
        # two that name images otherwise
        ("id,photo,label", "{n},{m},a", "id and photo may each name the images"),
        (
            "a,b,label",
            "{n}.jpg,{m}.jpg,a",
            "a and b may each name the images, 1.jpg and",
        ),
        ("id,image,rle", "{n},{m},1 5", "id and image may each name the images"),
        # even if one of them does so in few rows
        ("a,b,label", "{n}.jpg,{few},a", "a and b may each name the images"),
    ],
)
def test_columns_by_what_they_hold(
    columns: str, rows: str, words: str, tmp_path: Path
) -> None:
    source = tmp_path / "set"
    numbers = [*range(1, 12)]
    for n in numbers:
        save(source / f"{n}.jpg")
    lines = []
    for n in numbers:
        few = "2.jpg" if n == 1 else ""
        lines.append(rows.format(n=n, m=12 - n, few=few))
    write(source / "l.csv", "\n".join([columns, *lines]))
    assert words in refusal(source)


def test_the_column_that_names_images(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """It holds names of files that are there, wherever it stands and whatever its name."""
    source = tmp_path / "set"
    for n in "1234":
        save(source / f"{n}.jpg")
    expected = {f"train/a/{n}.jpg" for n in "24"} | {f"train/b/{n}.jpg" for n in "13"}
    for columns, rows in (
        ("id,filename,label", "1,4.jpg,a\n2,3.jpg,b\n3,2.jpg,a\n4,1.jpg,b\n"),
        # saved anew as JPEG
        ("id,photo,label", "1,4.png,a\n2,3.png,b\n3,2.png,a\n4,1.png,b\n"),
        ("class id,filepaths,labels", "1,x/4.jpg,a\n0,x/3.jpg,b\n1,2.jpg,a\n0,1.jpg,b"),
        ("kind,img,", "a,4,1\nb,3,2\na,2,3\nb,1,4\n"),
        ("file,path,label", "4,4.jpg,a\n3,3.jpg,b\n2,2.jpg,a\n1,1.jpg,b\n"),
    ):
        write(source / "l.csv", f"{columns}\n{rows}")
        converted(source, capsys)
        assert images_in(source).keys() == expected
    for n in "1234":
        save(source / f"m{n}.png")
    pairs = "".join(f"{n}.jpg,m{n}.png\n" for n in "1234")
    write(source / "l.csv", f"image,mask\n{pairs}")
    assert "call the file train.csv, and the columns image and mask" in refusal(source)
    # of runs, too
    write(source / "l.csv", "id,photo,rle\n1,4.jpg,1 5\n2,3.jpg,20 5\n3,2.jpg,\n")
    converted(source, capsys)
    assert images_in(source).keys() == {f"train/{n}.jpg" for n in "234"}
    mask = np.array(Image.open(source.with_name("out") / "train/masks/4.png"))
    assert mask[:5, 0].all()


def test_groups_of_the_source(tmp_path: Path) -> None:
    """A column of that name becomes groups.csv, or a column of the lists."""
    source = tmp_path / "set"
    for n in "0123":
        save(source / f"{n}.jpg")
    write(source / "l.csv", "id,group,label\n0,p,a\n1,q,b\n2,p,b\n3,,a\n")
    convert.main([str(source), str(tmp_path / "out")])
    text = (tmp_path / "out/groups.csv").read_text()
    assert set(text.splitlines()) == {
        "file,group",
        "train/a/0.jpg,p",
        "train/b/1.jpg,q",
        "train/b/2.jpg,p",
        "train/a/3.jpg,train/a/3.jpg",
    }
    write(source / "l.csv", "id,group,label\n0,p,a;b\n1,q,b\n2,p,b\n")
    convert.main([str(source), str(tmp_path / "several")])
    lines = (tmp_path / "several/train.csv").read_text().splitlines()
    assert lines[:2] == ["file,label,group", "train/0.jpg,a;b,p"]
    assert not (tmp_path / "several/groups.csv").exists()


def test_names_that_look_the_same(tmp_path: Path) -> None:
    """Classes stay apart or are refused; images are found in any Unicode form."""
    source = tmp_path / "set"
    composed, decomposed = (unicodedata.normalize(f, "caf\xe9") for f in ("NFC", "NFD"))
    coco(source)
    path = source / "annotations/instances_train2017.json"
    content = json.loads(path.read_text())
    names = [each["name"] for each in content["categories"]]
    for first, second, words in (
        ("C #", "C", "classes C and C # would both be C, as classes.txt has no"),
        ("a=b", "a b", "would both be a b"),
    ):
        for each, name in zip(content["categories"], (first, second), strict=False):
            each["name"] = name
        write(path, content)
        (source / "annotations/instances_val2017.json").unlink(missing_ok=True)
        assert words in refusal(source)
    content["categories"][0]["name"] = "C#"
    content["categories"][1]["name"] = "C"
    write(path, content)
    convert.main([str(source), str(tmp_path / "apart")])
    assert {"C#", "C"} < {*read_classes(tmp_path / "apart/classes.txt")}
    for each, name in zip(content["categories"], names, strict=True):
        each["name"] = name
    content["images"][0]["file_name"] = f"{composed}/a.png"
    write(path, content)
    (source / f"train2017/{decomposed}").mkdir()
    image = source / "train2017" / "a.png"
    image.rename(source / f"train2017/{decomposed}/a.png")
    convert.main([str(source), str(tmp_path / "out")])
    assert (tmp_path / "out/train/masks/a.png").is_file()
    shutil.rmtree(source)
    for n in "012":
        save(source / f"{n}.jpg")
    write(source / "l.csv", f"id,label\n0,{composed}\n1,{decomposed}\n2,b\n")
    assert "look the same" in refusal(source)


def test_colours_and_classes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Colours are decoration: those that cannot be read are left out."""
    source = tmp_path / "set"
    save(source / "1.jpg")
    for color, line in (
        ("#a92c6b", "c = 169 44 107"),
        ([1, 2, 3, 255], "c = 1 2 3"),
        ([0.5, 0.2, 0.3], "c\n"),
        ("red", "c\n"),
    ):
        coco_file(source / "c.json", ["1.jpg"], LARGE, color=color)
        converted(source, capsys)
        assert line in (tmp_path / "out/classes.txt").read_text()
    (source / "c.json").unlink()
    coco_file(source / "background.json", ["1.jpg"], LARGE)
    assert "the only class is background; segmentation needs two" in refusal(source)


def test_a_colour_that_labelmap_has_not(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The remedy that is named works."""
    source = tmp_path / "set"
    cvat_mask(source)
    colors = COLORS[two_boxes()]
    colors[0] = 224, 224, 192
    save(source / "SegmentationClass/a.png", colors)
    assert "classes.txt: NAME = 224 224 192 or void = 224 224 192" in refusal(source)
    write(source / "classes.txt", "void = 224 224 192\n")
    converted(source, capsys)
    assert (masks_in(tmp_path / "out")["train/a"][0] == VOID).all()


def test_what_a_stranger_may_have_made(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """In one line, and soon: pipes, depth, references, names beyond the source, sizes."""
    source = tmp_path / "set"
    outside = save(tmp_path / "secret/x.png")
    save(source / "a.png")
    save(source / "b.png")
    rows = "".join(
        f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 11)
    )
    laughs = f"l0: &l0 x\n{rows}names: *l10\ntrain: .\n"

    def coco(name: str, x: float = 1) -> str:
        outline = [x, 1, 9, 1, 9, 9]
        return json.dumps(
            {
                "images": [{"id": 1, "file_name": name, "width": 40, "height": 40}],
                "annotations": [
                    {
                        "id": 1,
                        "image_id": 1,
                        "category_id": 1,
                        "segmentation": [outline],
                    }
                ],
                "categories": [{"id": 1, "name": "cat"}],
            }
        )

    for name, content, words in (
        ("data.yaml", laughs, "implausibly large"),
        ("data.yaml", "names: " + "[" * 5000, "too many brackets"),
        ("data.yaml", "names: cat\ntrain: .\n", "names is a text; write names: [cat]"),
        ("data.json", "[" * 100_000, "not JSON"),
        ("data.json", coco("../secret/x.png"), "outside of"),
        ("data.json", coco(str(outside)), "outside of"),
        ("data.json", coco("a" * 5000 + ".png"), ""),
        ("data.csv", f"file,label\n{outside},a\na.png,b\n", "outside of"),
    ):
        path = source / name
        path.write_text(content)
        start = time.monotonic()
        try:
            convert.main([str(source), str(tmp_path / "out")])
        except UserError as error:
            assert words in error.line
            assert "\n" not in error.line
        else:
            assert not words, (name, content[:99])
        assert time.monotonic() - start < 10
        path.unlink()
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    for name in "data.json", "data.xml", "data.csv", "data.yaml":
        os.mkfifo(source / name)
        with pytest.raises(UserError):
            convert.main([str(source), str(tmp_path / "out")])
        (source / name).unlink()
    (source / "b.png").unlink()
    os.mkfifo(source / "b.png")
    write(source / "data.json", coco("b.png"))
    with pytest.raises(UserError):
        convert.main([str(source), str(tmp_path / "out")])
    (source / "b.png").unlink()
    # of which only the header is read
    sides = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
    chunks = b""
    for kind, body in (b"IHDR", sides), (b"IDAT", b""), (b"IEND", b""):
        check = struct.pack(">I", zlib.crc32(kind + body))
        chunks += struct.pack(">I", len(body)) + kind + body + check
    (source / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)
    with pytest.raises(UserError, match="60000 x 60000 pixels exceed max_meg"):
        convert.main([str(source), str(tmp_path / "out")])
    (source / "data.json").unlink()
    scipy.io.savemat(
        source / "a.mat",
        {"mask": np.zeros((15_000, 15_000), np.uint8)},
        do_compression=True,
    )
    with pytest.raises(UserError, match="max_megapixels"):
        arrays.load_values(source / "a.mat")


def test_yolo_without_yaml(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """classes.txt; folders in capitals; images that no part has; nan."""
    source = tmp_path / "set"
    for name in "train/Images/1", "train/Images/2", "val/Images/3":
        save(source / f"{name}.jpg")
        write(source / f"{name.replace('Images', 'Labels')}.txt", "0 0 0 1 0 1 1\n")
    write(source / "classes.txt", "c\nd\n")
    said = converted(source, capsys)
    assert "yolo (" in said
    assert "2 in train, 1 in val; 3 classes" in said
    write(source / "val/classes.txt", "d\nc\n")
    assert "val/classes.txt: has other classes than classes.txt" in refusal(source)
    (source / "val/classes.txt").unlink()
    (source / "classes.txt").unlink()
    write(source / "data.yaml", "train: train\\Images\nnames: [c]\n")
    said = converted(source, capsys)
    assert "labelled images that no part of data.yaml has: val/Images/3.jpg" in said
    assert "without an image" not in said
    write(source / "train/Labels/1.txt", "0 0 0 1 nan 1 1\n")
    assert "1.txt, line 1: expected CLASS X Y" in refusal(source)


def test_names_and_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """As many folders as are needed; images that nothing names; what an ended run has left."""
    source = tmp_path / "set"
    names = ["s1/left/1.jpg", "s2/left/1.jpg"]
    for name in (*names, "s1/left/9.jpg"):
        save(source / name)
    coco_file(source / "x.json", names, LARGE)
    (tmp_path / "out.partial-host-1").mkdir()
    said = converted(source, capsys)
    assert "skipped: 1 images without labels: s1/left/9.jpg" in said
    assert "out.partial-host-1: is left of a convert that was ended" in said
    assert images_in(source) == {f"train/{name}": name for name in names}


def test_a_mask_beyond_its_image(tmp_path: Path) -> None:
    """The line names the file and the object."""
    source = tmp_path / "set"
    labelme(source)
    content = json.loads((source / "a.json").read_text())
    for left in -1, WIDTH - 2:
        content["shapes"][3]["points"] = [[left, 8], [left + 3, 11]]
        write(source / "a.json", content)
        assert "a.json, a mask of dog: it reaches beyond the image" in refusal(source)


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
def test_the_command(project: Project, tmp_path: Path) -> None:
    """From COCO's files to a run, by the commands of docs/labels.md."""
    source = tmp_path / "set"
    coco(source)
    out = tmp_path / "out"
    words = (source, out)
    page = (Path(__file__).parents[2] / "docs/labels.md").read_text()
    block = page.partition("```bash\n")[2].partition("```")[0]
    path_of = {"SOURCE": source, "OUT": out}
    said = []
    for line in block.splitlines():
        typed = [path_of.get(word, word) for word in shlex.split(line, comments=True)]
        if typed[:3] == ["python", "-m", "ddpkit"]:
            done = project.run(*typed[4:], script=f"ddpkit {typed[3]}", on=1)
        else:
            assert typed == ["./launch.sh", "--data", out]
            done = project.train(out, tmp_path / "run", "--batch-size", 1)
        said.append(done.ok().out)
    assert "2 in train, 1 in val; 3 classes" in said[0]
    assert "0 errors, 0 warnings" in said[1]
    assert "done: " in said[2]
    assert len(said) == 3
    project.run(*words, script="ddpkit convert", on=1).refused("command.main", out)
    listed = project.run("--help", script="ddpkit convert", on=1).ok().out
    assert all(name in listed for name in formats.FORMATS)


@pytest.mark.parametrize("name", SETS)
def test_training_says_what_to_type(name: str, tmp_path: Path) -> None:
    """It reads a set, or refuses it with the command that makes one of it that it reads."""
    source = tmp_path / "a set"
    source.mkdir()
    SETS[name][0](source)
    try:
        folders.find_mask_pairs(source)
    except UserError as error:
        if "too few to split" in error.line:  # by now they are read
            return
        # COCO's train2017 has no masks: to rename it would not help
        assert "named as parts" not in error.line
        typed = shlex.split(error.line)
        start = typed.index("convert")
        assert typed[start - 3 : start] == ["python", "-m", "ddpkit"]
        convert.main(typed[start + 1 : start + 3])
        found = folders.read_parts(
            tmp_path / "a set-converted", True, ["train", "val"], folders.raise_it
        )
        assert found["train"]


# What a file means is decided by what it holds: what another export says, or nothing tells.


@pytest.mark.parametrize("kind", ["roboflow", "cvat", "voc", "arrays"])
def test_two_exports_below_one_folder(kind: str, tmp_path: Path) -> None:
    """Each has its own classes: the cats of one are not the dogs of the other."""
    source = tmp_path / "set"
    for number, (folder, name) in enumerate([("a", "cat"), ("b", "dog")]):
        root = source / folder
        mask = inside(LARGE).astype(np.uint8)
        image = root / f"JPEGImages/{number}.jpg"
        if kind == "roboflow":
            image = root / f"{number}.jpg"
            save(root / f"{number}_mask.png", mask)
            rows = f"Pixel Value, Class\n0, background\n1, {name}\n"
            write(root / "_classes.csv", rows)
        elif kind == "cvat":
            save(root / f"SegmentationClass/{number}.png", COLORS[mask])
            lines = f"background:0,0,0::\n{name}:250,50,83::\n"
            write(root / "labelmap.txt", lines)
        elif kind == "voc":
            palette_mask(root / f"SegmentationClass/{number}.png", mask)
            write(root / "class_names.txt", f"_background_\n{name}\n")
        else:
            (root / "SegmentationClassNpy").mkdir(parents=True)
            np.save(root / f"SegmentationClassNpy/{number}.npy", mask.astype(np.int32))
            write(root / "classes.txt", f"background = 0\n{name} = 1\n")
        save(image)
    out = tmp_path / "out"
    convert.main([str(source), str(out)])
    assert list(read_classes(out / "classes.txt")) == ["background", "cat", "dog"]
    found = masks_in(out)
    for key, mask in found.items():
        assert (mask == inside(LARGE) * (1 + int(key[-1]))).all()
    assert len(found) == 2


def runs_of(mask: np.ndarray, order: str) -> list[list[int]]:
    """START LENGTH of each run, the first pixel being 1."""
    counts = lengths(mask, order)
    ends = np.cumsum(counts)
    pairs = zip(ends[0::2] + 1, counts[1::2], strict=False)
    return [[int(start), int(length)] for start, length in pairs]


def test_which_way_runs_go(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Objects tell it, but in square images; starts that fall are no absolute ones."""
    source = tmp_path / "set"
    save(source / "images/a.png")
    for order in "FC":
        words = " ".join(f"{s} {n}" for s, n in runs_of(inside(LARGE), order))
        write(source / "t.csv", f"id,annotation\na,{words}\n")
        said = converted(source, capsys)
        assert ("along the rows" in said) == (order == "C")
        assert (masks_in(tmp_path / "out")["train/a"] == inside(LARGE)).all()
    square = np.zeros((12, 12), bool)
    square[1:7, 2:5] = True
    save(source / "images/a.png", np.zeros((12, 12, 3), np.uint8))
    words = " ".join(f"{s} {n}" for s, n in runs_of(square, "C"))
    write(source / "t.csv", f"id,annotation\na,{words}\n")
    line = refusal(source)
    assert "not clear" in line
    for order, mask in ("columns", square.T), ("rows", square):
        assert f"--format rle-csv-{order}" in line
        converted(source, capsys, "--format", f"rle-csv-{order}")
        assert (masks_in(tmp_path / "out")["train/a"] == mask).all()
    relative = "14 6 6 6 6 6"  # from the end of the last run, as SIIM-ACR's
    for words in relative, "10 5 12 5":
        write(source / "t.csv", f"id,rle\na,{words}\n")
        assert "row 2: the starts of its runs (RLE) do not rise" in refusal(source)


def test_crowds(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Brushes as CVAT and datumaro write them; void that is meant is counted."""
    source = tmp_path / "set"
    save(source / "1.jpg")
    names = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    brush = {"size": [HEIGHT, WIDTH], "counts": lengths(inside(LARGE), "F")}
    first = {"id": 1, "image_id": 1, "category_id": 1, "iscrowd": 1}
    first["segmentation"] = brush
    second = {"id": 2, "image_id": 1, "category_id": 2, "segmentation": [SMALL]}
    content = {"images": [{"id": 1, "file_name": "1.jpg"}], "categories": names}
    for annotations in [first, second], [first]:
        write(source / "x.json", content | {"annotations": annotations})
        line = refusal(source)
        assert "all objects of cat are crowds (iscrowd 1)" in line
        assert "--format coco-objects" in line
    write(source / "x.json", content | {"annotations": [first, second]})
    for format, number in ("coco-objects", 1), ("coco-void", VOID):
        converted(source, capsys, "--format", format)
        assert (masks_in(tmp_path / "out")["train/1"] == two_boxes(number)).all()
    third = {**second, "category_id": 1}
    write(source / "x.json", content | {"annotations": [first, second, third]})
    assert "1 objects are crowds (iscrowd 1), so void" in converted(source, capsys)


def test_turned_boxes_and_key_points(tmp_path: Path) -> None:
    source = tmp_path / "set"
    save(source / "a.png")
    corners = [LARGE[n : n + 2] for n in range(0, 8, 2)]
    shape = {"label": "cat", "shape_type": "oriented_rectangle", "points": corners}
    write(source / "a.json", {"imagePath": "a.png", "shapes": [shape]})
    convert.main([str(source), str(tmp_path / "out")])
    assert (masks_in(tmp_path / "out")["train/a"] == inside(LARGE)).all()
    pose = tmp_path / "pose"
    yolo(pose)
    with open(pose / "data.yaml", "a") as file:
        file.write("kpt_shape: [4, 2]\n")
    assert "key points (kpt_shape), which have no inside" in refusal(pose)


def test_outlines_of_four_points(tmp_path: Path) -> None:
    """They may be oriented boxes, of which nothing but the user knows."""
    source = tmp_path / "set"
    for n in "12":
        save(source / f"images/{n}.png")
        write(source / f"labels/{n}.txt", "0 .1 .3 .3 .1 .5 .3 .3 .5\n")
    for name, text in (
        ("classes.txt", "cat\n"),
        ("data.yaml", "names: [cat]\ntrain: images\n"),
    ):
        write(source / name, text)
        line = refusal(source)
        assert f"{source / name}: all outlines have four points, as oriented" in line
        assert "--format yolo-outlines" in line
    out = tmp_path / "out"
    convert.main([str(source), str(out), "--format", "yolo-outlines"])
    assert [mask.max() for mask in masks_in(out).values()] == [1, 1]
    shutil.rmtree(out)
    # another number of points in one row is enough
    write(source / "labels/2.txt", "0 .1 .3 .3 .1 .5 .3 .3 .5\n0 .1 .1 .3 .1 .3 .3\n")
    convert.main([str(source), str(out)])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "panoptic_val.json",
            {
                "images": [],
                "categories": [],
                "annotations": [{"image_id": 1, "segments_info": []}],
            },
            "COCO panoptic; take instances_",
        ),
        ("via.json", {"_via_settings": {}}, "VIA; export it as COCO"),
        (
            "a.jpg.json",
            {"objects": [{"classTitle": "c"}]},
            "Supervisely, SuperAnnotate",
        ),
        ("h.json", {"label_classes": []}, "Hasty; export COCO"),
        ("sa_1.json", {"annotations": [{"predicted_iou": 1}]}, "SA-1B"),
        ("a.json", {"schema_ref": "x", "item": {}}, "V7 Darwin; export it as COCO"),
        ("x.ndjson", {"data_row": {}}, "Labelbox; convert it to COCO"),
        ("a.xml", "<annotation><object><bndbox>", "boxes, which have no outline"),
        ("t.parquet", "PAR1", "Parquet; datasets.load_dataset reads it"),
        ("t.npz", "PK", "numpy.load reads it"),
        ("t.tar", "", "tar xf"),
        ("t.zip", "PK", "unzip it"),
        ("cifar-10-batches-py/data_batch_1", "", "torchvision.datasets.CIFAR10"),
        ("train-images-idx3-ubyte.gz", "", "torchvision.datasets.MNIST"),
        (
            "output.manifest",
            {"source-ref": "s3://b/a.jpg"},
            "a manifest; write columns",
        ),
        ("train.jsonl", {"image_url": "a.jpg", "label": "a"}, "a manifest; write"),
        ("labels.json", {"classes": ["a"], "labels": {"a": 0}}, "FiftyOne; export it"),
        ("a.txt", "imagesource:x\n1 1 9 1 9 9 1 9 plane 0\n", "boxes, which have no"),
        ("val.txt", "a.jpg 65\nb.jpg 970\n", "make a CSV file of each"),
        ("l.csv", "file,label\na.jpg,x\n".encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
        ("a.regions.txt", "0 1 -1 0 1 1 1 1 1 0\n" * 9, "numpy.loadtxt reads it"),
        ("det_val.json", [{"name": "a.jpg", "labels": [{"box2d": {}}]}], "BDD100K's,"),
        ("a.lst", "0\t4\t5\t16\t12\t1\t0.1\ta.jpg\n", "boxes, which have no outline"),
        ("a.lst", "a.jpg\ta.png\n", "a list of images and masks; with each list as"),
        ("list_attr.txt", "1\nbald old\na.jpg  -1  1\n", "as CelebA's; make a CSV"),
        ("train_32x32.mat", b"", "torchvision.datasets.SVHN"),
    ],
)
def test_what_is_not_taken(
    name: str, content: object, words: str, tmp_path: Path
) -> None:
    """One line says what it is, and what to export or type."""
    source = tmp_path / "set"
    save(source / "a.jpg")
    write(source / name, content)
    line = refusal(source)
    assert name in line
    assert words in line


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["1_seg.png", "1.jpg", "2.jpg"], "/1_seg.png: if it is a mask"),
        (["img_dir/1.jpg", "ann_dir/1.png"], "/ann_dir/1.png: if it is a mask"),
        (["in/1.png", "instances/1.png"], "instances/1.png: if it is a mask, name the"),
        (
            ["x/21.tif", "1st_manual/21_manual1.gif"],
            "1st_manual/21_manual1.gif: if it is a mask",
        ),
        (
            ["Train/images_png/0.png", "Train/masks_png/0.png"],
            "0 is no data, write void",
        ),
        (["mask/1.png", "no_mask/1.png"], "If its folder is a class: python -m ddpkit"),
        (["cat/cat.1.jpg", "cat/cat.2.jpg", "dog/dog.1.jpg", "dog/dog.2.jpg"], "check"),
        (["cat.0.jpg", "cat.1.jpg", "dog.0.jpg", "dog.1.jpg"], "such as cat, dog"),
        (["0001_c1.jpg", "0001_c2.jpg", "0002_c1.jpg", "0002_c2.jpg"], "as 0001, 0002"),
        (["1.jpg", "2.jpg", "label.jpg"], "--format takes one of coco"),
        (["IMG_1.jpg", "IMG_2.jpg"], "--format takes one of coco"),
    ],
)
def test_what_files_may_be(names: list[str], words: str, tmp_path: Path) -> None:
    """By their names, if nothing else says what a folder has."""
    source = tmp_path / "set/inner/images"
    for name in names:
        save(source / name)
    assert words in refusal(source)


def run_command(source: Path) -> str:
    """Type the command in the line that refuses a source, with its file; return the line."""
    line = refusal(source)
    name = line.partition(": ")[0].removeprefix(f"{source}/")
    command = re.search(r"(for p .*|\(echo .*csv|python -c .*csv|tail .*?csv)", line)
    assert command
    type_in_shell(command[0].replace("FILE", name), source)
    return line


def test_commands_for_lists(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """PaddleSeg's, FGVC-Aircraft's and those of CUB-200-2011, as the lines say."""
    source = tmp_path / "paddle"
    for name in "01":
        save(source / f"images/{name}.jpg")
        save(source / f"annotations/{name}.png", two_boxes())
        row = f"images/{name}.jpg annotations/{name}.png\n"
        write(source / ("train.txt", "val.txt")[int(name)], row)
    # the folders could be read, but without the parts
    assert "train.txt: a list of images and masks; with each list as" in run_command(
        source
    )
    pairs = folders.read_list(source / "train.csv", ["image", "mask"])
    assert pairs == [
        (str(source / "images/0.jpg"), str(source / "annotations/0.png")),
    ]
    source = tmp_path / "aircraft"
    for name in "1025794", "1340192":
        save(source / f"images/{name}.jpg")
    rows = "1025794 707-320\n1340192 Boeing 727\n"
    write(source / "images_variant_train.txt", rows)
    write(source / "variants.txt", "707-320\n727\n")
    assert "images_variant_train.txt: a list of images and labels" in refusal(source)
    (source / "images_variant_train.txt").rename(source / "train.txt")
    write(source / "images_variant_val.txt", rows)
    run_command(source)
    converted(source, capsys)
    made = folders_of(tmp_path / "out")
    assert sorted(made) == ["train/707-320", "train/Boeing 727"]
    source = tmp_path / "birds"
    files = "1 001.Auk/1.jpg\n2 002.Wren/2.jpg\n3 002.Wren/3.jpg\n"
    for line in files.splitlines():
        save(source / "images" / line.partition(" ")[2])
    write(source / "images.txt", files)
    write(source / "image_class_labels.txt", "1 1\n2 2\n3 2\n")
    write(source / "train_test_split.txt", "1 1\n2 1\n3 0\n")
    write(source / "classes.txt", "1 001.Auk\n2 002.Wren\n")
    assert "train_test_split.txt: lists as CUB-200-2011 has" in run_command(source)
    converted(source, capsys)
    expected = {"train/1": ["1.jpg"], "train/2": ["2.jpg"], "test/2": ["3.jpg"]}
    assert folders_of(tmp_path / "out") == expected
    source = tmp_path / "food"
    for name in "pie/1", "pie/2", "tea/1", "tea/2":
        save(source / f"images/{name}.jpg")
    write(source / "meta/train.txt", "pie/1\ntea/1\n")
    write(source / "meta/test.txt", "pie/2\ntea/2\n")
    assert "lists as Food-101 has them" in run_command(source)
    assert folders.read_list(source / "test.csv", ["file", "label"]) == [
        (str(source / "images/pie/2.jpg"), "pie"),
        (str(source / "images/tea/2.jpg"), "tea"),
    ]
    # Tiny ImageNet's boxes are no labels
    (source / "meta/train.txt").rename(source / "boxes.txt")
    (source / "meta/test.txt").unlink()
    for path in source.glob("*.csv"):
        path.unlink()
    write(source / "boxes.txt", "1.JPEG\t0\t62\t0\t64\n")
    assert "needs no conversion" in refusal(source)


def structures(rows: list[dict]) -> np.ndarray:
    """As MATLAB saves them."""
    kinds = [(name, object) for name in rows[0]]
    return np.array([[tuple(row.values()) for row in rows]], dtype=kinds)


def test_commands_for_other_lists(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Those of Flowers102, Stanford Cars, BDD100K, MXNet, Tiny ImageNet and CelebA."""
    out = tmp_path / "out"
    source = tmp_path / "flowers"
    for n in range(1, 5):
        save(source / f"jpg/image_{n:05}.jpg")
    scipy.io.savemat(source / "imagelabels.mat", {"labels": [[7, 7, 12, 12]]})
    ids = {"trnid": [[1, 3]], "valid": [[4]], "tstid": [[2]]}
    scipy.io.savemat(source / "setid.mat", ids)
    assert "imagelabels.mat: lists as Flowers102 has them" in run_command(source)
    converted(source, capsys)
    assert folders_of(out) == {
        "train/7": ["image_00001.jpg"],
        "train/12": ["image_00003.jpg"],
        "val/12": ["image_00004.jpg"],
        "test/7": ["image_00002.jpg"],
    }
    source = tmp_path / "cars"
    for part in "train", "test":
        for n in "12":
            save(source / f"cars_{part}/0000{n}.jpg")
    rows = [{"bbox_x1": 3, "class": 5 - n, "fname": f"0000{n}.jpg"} for n in (1, 2)]
    annotations = {"annotations": structures(rows)}
    (source / "devkit").mkdir()
    scipy.io.savemat(source / "devkit/cars_train_annos.mat", annotations)
    assert "cars_train_annos.mat: lists as Stanford Cars" in run_command(source)
    converted(source, capsys)
    assert images_in(source) == {
        "train/4/00001.jpg": "cars_train/00001.jpg",
        "train/3/00002.jpg": "cars_train/00002.jpg",
    }
    source = tmp_path / "bdd"
    items = []
    for name, weather in ("a", "clear"), ("b", "rainy"):
        save(source / f"images/100k/train/{name}.jpg")
        box = {"category": "car", "box2d": {"x1": 1}}
        items.append({"name": f"{name}.jpg", "attributes": {"weather": weather}})
        items[-1]["labels"] = [box]
    write(source / "labels/det_20/det_train.json", items)
    assert "det_train.json: BDD100K's, whose boxes have no" in run_command(source)
    converted(source, capsys)
    assert folders_of(out) == {"train/clear": ["a.jpg"], "train/rainy": ["b.jpg"]}
    for rows in (
        "0\t0.000000\tx/a.jpg\n1\t3.000000\tx/b.jpg\n",
        "x/a.jpg 0\nx/b.jpg 3\n",
    ):
        source = tmp_path / f"lst {len(rows)}"
        for name in "ab":
            save(source / f"x/{name}.jpg")
        write(source / "train.lst", rows)
        assert "train.lst: a list of MXNet's im2rec" in run_command(source)
        converted(source, capsys)
        assert folders_of(out) == {"train/0": ["a.jpg"], "train/3": ["b.jpg"]}
    source = tmp_path / "tiny"
    for n in "01":
        save(source / f"val/images/val_{n}.JPEG")
    rows = "val_0.JPEG\tn07\t0\t32\t44\t62\nval_1.JPEG\tn08\t52\t55\t57\t59\n"
    write(source / "val/val_annotations.txt", rows)
    assert "the validation images of Tiny ImageNet" in run_command(source)
    converted(source, capsys)
    assert folders_of(out) == {"train/n07": ["val_0.JPEG"], "train/n08": ["val_1.JPEG"]}
    source = tmp_path / "fashion"
    for n in "1234":
        save(source / f"img/{n}.jpg")
    rows = "".join(f"img/{n}.jpg      {int(n) % 2}\n" for n in "1234")
    write(source / "list_category_img.txt", f"4\nimage_name  category_label\n{rows}")
    assert "a list with its length and names of columns" in run_command(source)
    converted(source, capsys)
    expected = {"train/0": ["2.jpg", "4.jpg"], "train/1": ["1.jpg", "3.jpg"]}
    assert folders_of(out) == expected


def test_texts_are_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their beginnings alone, and soon, whatever they hold."""
    source = tmp_path / "set"
    save(source / "a.jpg")
    read = []
    start_of = Tree.start_of

    def counted(tree: Tree, name: str) -> str:
        read.append(name)
        return start_of(tree, name)

    monkeypatch.setattr(Tree, "start_of", counted)
    write(source / "huge.txt", "")
    os.truncate(source / "huge.txt", 7 * 10**9)
    for n, text in enumerate(
        (
            ".txt" * 25_000,
            ".txt1 " * 16_000,
            "/images_" * 12_000,
            '.json{"classes": [' * 6_000,
            "masks.a" * 14_000,
        )
    ):
        write(source / f"{n}.txt", text)
    start = time.monotonic()
    assert "unknown format (6 .txt, 1 .jpg)" in refusal(source)
    assert time.monotonic() - start < 30
    assert sorted(read) == [*(f"{n}.txt" for n in range(5)), "huge.txt"]
    os.mkfifo(source / "pipe.lst")
    assert "pipe.lst: cannot be read (not a regular file" in refusal(source)


def test_what_is_no_label_file_of_yolo(tmp_path: Path) -> None:
    """A classes.txt beside images is YOLO's if a first line has five numbers or more, alone."""
    source = tmp_path / "set"
    save(source / "a.jpg")
    write(source / "classes.txt", "cat\ndog\n")
    for text, is_yolo in {
        "0 .5 0.5 1e-3 1.5E+00\r\n": True,
        "1 0 0 1 0 1 1": True,
        "\n\n0 1 2 3 4 \n": True,
        "0 1 2 3\n4 5": False,
        "1 1 9 1 9 9 1 9 plane 0\n": False,
        "1" * 90_000: False,
        "": False,
    }.items():
        write(source / "a.txt", text)
        assert bool(yolo_format.find_yolo(Tree(source))) == is_yolo, text[:20]


def test_lists_in_cells(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Of Python or JSON, or one-hot, they are no names of classes; with commas a line asks."""
    source = tmp_path / "set"
    for n in "123456":
        save(source / f"{n}.jpg")
    for one, other in ("['a', 'b']", "['b']"), ("[0, 1]", "[1, 0]"), ("{'a'}", "{'b'}"):
        rows = "".join(f'{n}.jpg,"{one if n < "4" else other}"\n' for n in "123456")
        write(source / "l.csv", f"image,label\n{rows}")
        assert "its column label has lists in brackets, or an open" in refusal(source)
    rows = "".join(f'{n}.jpg,"{"cat,dog" if n < "4" else "cat"}"\n' for n in "123456")
    write(source / "l.csv", f"image,label\n{rows}")
    assert '"cat,dog" is one class; if these are several' in converted(source, capsys)
    # a quote that nobody closes takes the next rows in
    write(source / "l.csv", 'image,label\n1.jpg,a\n2.jpg,"b\n3.jpg,a\n4.jpg,b\n')
    assert "its column label has lists in brackets, or an open quote" in refusal(source)
    (source / "l.csv").unlink()
    for width in 2, 3:
        text = ""
        for n in range(1, 7):
            row = {
                "file_name": f"{n}.jpg",
                "label": [int(n % 2 == i) for i in range(width)],
            }
            text += f"{json.dumps(row)}\n"
        write(source / "metadata.jsonl", text)
        assert "its column label has lists of 0 and 1" in refusal(source)


def test_folders_beyond_the_longest_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "set"
    save(source / "a.png")
    monkeypatch.chdir(source)
    for _ in range(25):
        os.mkdir("x" * 200)
        os.chdir("x" * 200)
    try:
        assert "cannot be read (File name too long)" in refusal(source)
    finally:
        for _ in range(25):
            os.chdir("..")
            os.rmdir("x" * 200)


def test_columns_of_answers_in_json(tmp_path: Path) -> None:
    """Which tell parts by yes and no: as in CSV, whatever else the rows have."""
    source = tmp_path / "set"
    for n in "12":
        save(source / f"{n}.jpg")
    for column in "is_valid", "is_train", "isTest":
        rows = [{"file_name": "1.jpg", "label": "a"}]
        rows += [{"file_name": "2.jpg", "label": "b", column: True}]
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        write(source / "metadata.jsonl", text)
        line = (
            f"metadata.jsonl: column {column} tells splits apart by yes and no; write"
        )
        assert line in refusal(source)


def test_long_names_of_classes(tmp_path: Path) -> None:
    """In one line, soon, with the beginning of the name."""
    source = tmp_path / "set"
    long = "ab " * 3_000_000
    start = time.monotonic()
    coco_file(source / "a.json", ["a.png"], LARGE)
    save(source / "a.png")
    text = (source / "a.json").read_text()
    write(source / "a.json", text.replace('"name": "a"', f'"name": "{long}"'))
    words = (
        "the class ab ab ab ab ab ab ab ab ab ab ab ab ab a ... has 8,999,999 letters"
    )
    assert words in refusal(source)
    (source / "a.json").unlink()
    save(source / "b.png")
    write(source / "a.csv", f"file,label\na.png,{long}\nb.png,b\n")
    assert words in refusal(source)
    (source / "a.csv").unlink()
    write(source / "a.txt", "0 .1 .1 .9 .1 .9 .9\n")
    write(source / "data.yaml", f"names: [{long}]\ntrain: .\n")
    assert "data.yaml: cannot be read (9,000,0" in refusal(source)
    write(source / "data.yaml", f"names: [{long[:300]}]\ntrain: .\n")
    line = refusal(source)
    assert "has 299 letters in its name, more than 255; shorten it" in line
    assert len(line) < 300
    assert time.monotonic() - start < 20


def test_missing_values(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """As programs write them they are no labels; none is a word of people's."""
    source = tmp_path / "set"
    for n in "0123":
        save(source / f"{n}.jpg")
    for text in "nan", "NaN", "None", "N/A", "NA", "<NA>", "NULL", "null":
        write(source / "l.csv", f"id,label\n0,a\n1,{text}\n2,a\n3,b\n")
        line = refusal(source)
        assert f"l.csv, line 3: label is {text}, which usually means" in line
        assert "remove the row" in line
    write(source / "l.csv", "id,label,group\n0,a,nan\n1,b,p\n2,a,p\n3,b,q\n")
    assert "line 2: group is nan" in refusal(source)
    write(source / "l.csv", "id,label\n0,a;nan\n1,b\n2,a;b\n3,b\n")
    assert "line 2: label is nan" in refusal(source)
    write(source / "l.csv", "id,class,rle\n0,a,1 5 20 5\n1,nan,1 5 20 5\n")
    assert "row 3: class is nan" in refusal(source)
    (source / "l.csv").unlink()
    rows = [{"file_name": f"{n}.jpg", "label": label} for n, label in enumerate("aba")]
    rows[2]["label"] = float("nan")
    write(source / "metadata.jsonl", "\n".join(map(json.dumps, rows)))
    assert "line 3: label is nan" in refusal(source)
    (source / "metadata.jsonl").unlink()
    write(source / "l.csv", "id,label\n0,none\n1,scratch\n2,none\n3,\n")
    assert "skipped: 1 images without a label: 3.jpg" in converted(source, capsys)
    expected = {"train/none": ["0.jpg", "2.jpg"], "train/scratch": ["1.jpg"]}
    assert folders_of(tmp_path / "out") == expected
    # a list for training
    write(source / "train.csv", "file,label\n0.jpg,a\n1.jpg,NaN\n")
    with pytest.raises(UserError, match=r"train\.csv, line 3: label is NaN"):
        folders.find_classes(source)


def test_a_class_without_a_name(tmp_path: Path) -> None:
    source = tmp_path / "set"
    coco(source)
    for path in source.glob("annotations/*.json"):
        path.write_text(path.read_text().replace('"dog"', "null"))
    assert "a class has no name (null)" in refusal(source)
    shutil.rmtree(source)
    yolo(source)
    with open(source / "data.yaml", "a") as file:
        file.write("names: [cat, null]\n")
    assert "a class has no name (null)" in refusal(source)
    shutil.rmtree(source)
    labelme(source)
    text = (source / "a.json").read_text()
    write(source / "a.json", text.replace('"dog"', "null").replace('"cat"', "null"))
    refusal(source)
    shutil.rmtree(source)
    coco(source)
    for path in source.glob("annotations/*.json"):
        path.write_text(path.read_text().replace('"dog"', '"\\u200b"'))
    assert "or none that can be seen" in refusal(source)


def test_a_table_without_names_of_columns(tmp_path: Path) -> None:
    """Its first image would be lost."""
    source = tmp_path / "set"
    for n in "01234567":
        save(source / f"{n}.jpg")
    write(
        source / "l.csv", "".join(f"{n}.jpg,{'ab'[int(n) % 2]}\n" for n in "01234567")
    )
    assert "l.csv: its first line names an image; add a header" in refusal(source)


def test_trimaps_are_no_class(tmp_path: Path) -> None:
    """Of Oxford-IIIT Pet: annotations/trimaps has numbers of three classes."""
    source = tmp_path / "set"
    for name in "abc":
        save(source / f"images/{name}.jpg")
        save(source / f"annotations/trimaps/{name}.png", two_boxes(2, 3) + 1)
    line = refusal(source)
    assert "trimaps" in line
    assert "has numbers of several classes, so it is not a black and white mask" in line


def test_class_folders(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """As YOLO's classification and others have them: training reads them as they are."""
    source = tmp_path / "set"
    parts = "train", "val", "test"
    for folder in ("", "archive"):
        for part in parts:
            for name in "cat", "dog":
                save(source / folder / part / name / f"{part}{name}.jpg")
        words = "if cat, dog are classes, it needs no conversion: python -m ddpkit"
        line = refusal(source)
        assert f"{source / folder}: {words} check {source / folder}" in line
        assert not capsys.readouterr().out
        for part in parts:
            shutil.rmtree(source / folder / part)
    shutil.rmtree(source)
    for name in "cat", "dog":
        save(source / name / "1.jpg")
    assert f"check {source}" in refusal(source)
    shutil.rmtree(source)
    # of images and of labels, which are no masks
    save(source / "images/a.png")
    write(source / "labels/a.txt", "0 0.1 0.1 0.5 0.1 0.5 0.5\n")
    assert "unknown format" in refusal(source)


def test_links_to_lists_of_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """One out of the source is not read, whatever its name."""
    source = tmp_path / "set"
    cvat_mask(source)
    for name in "labelmap.txt", "classes.txt", "class_dict.csv", "label_colors.txt":
        (source / "labelmap.txt").unlink(missing_ok=True)
        save(tmp_path / "elsewhere/x.png")
        write(tmp_path / f"elsewhere/{name}", "name,r,g,b\nsecret,0,0,0\nb,250,50,83\n")
        (source / name).symlink_to(tmp_path / "elsewhere" / name)
        line = refusal(source)
        said = capsys.readouterr().out
        assert f"skipped: 1 links that lead out of {source}" in said
        assert "secret" not in line + said
        (source / name).unlink()


def test_files_that_take_long(tmp_path: Path) -> None:
    """Lists of 2 GB, and numbers of classes that no mask has, are refused at once."""
    source = tmp_path / "set"
    save(source / "images/a.png")
    save(source / "labels/a_P.png", two_boxes())
    write(source / "train.csv", "file,label\na.png,x\n")
    os.truncate(source / "train.csv", 2 * 10**9)
    start = time.monotonic()
    line = refusal(source)
    assert (
        "train.csv: cannot be read (2,000,000,000 bytes, more than 268,435,456" in line
    )
    (source / "train.csv").unlink()
    write(source / "codes.txt", "".join(f"c{n}\n" for n in range(10**6)))
    assert "codes.txt: cannot be read (" in refusal(source)
    (source / "codes.txt").unlink()
    write(source / "data.yaml", "nc: 1000000000000\ntrain: images\n")
    write(source / "labels/a.txt", "0 0.1 0.1 0.5 0.1 0.5 0.5\n")
    assert "needs 2 to 255" in refusal(source)
    assert time.monotonic() - start < 30


def lists_of(out: Path) -> dict[str, str]:
    """The labels in the lists that were made, by part and name of the image."""
    found = {}
    for path in out.glob("*.csv"):
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                found[f"{path.stem}/{Path(row['file']).stem}"] = row["label"]
    return found


def test_labels_of_whole_images(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """CVAT's tags, Label Studio's choices, LabelMe's flags; beside objects they are counted."""
    source = tmp_path / "set"
    out = tmp_path / "out"

    def remade() -> None:
        shutil.rmtree(source, ignore_errors=True)
        for name in "abc":
            save(source / f"{name}.png")

    def cvat(tags_of: dict[str, list[str]], more: str = "") -> None:
        remade()
        text = "<annotations><meta/>"
        for name, tags in tags_of.items():
            marks = "".join(
                f'<tag label="{tag}" source="manual"></tag>' for tag in tags
            )
            text += f'<image name="{name}.png" subset="Train">{marks}{more}</image>'
        write(source / "annotations.xml", f"{text}</annotations>")

    cvat({"a": ["wet"], "b": ["dry"], "c": []})
    said = converted(source, capsys)
    assert folders_of(out) == {"train/dry": ["b.png"], "train/wet": ["a.png"]}
    assert "skipped: 1 images without a label: c.png" in said
    cvat({"a": ["wet", "dark"], "b": ["dark"], "c": []})
    converted(source, capsys)
    assert lists_of(out) == {"train/a": "dark;wet", "train/b": "dark", "train/c": ";"}
    cvat({"a": ["wet"]}, '<box label="car" xtl="1" ytl="1" xbr="4" ybr="4"/>')
    said = converted(source, capsys)
    assert list(read_classes(out / "classes.txt")) == ["background", "car", "wet"]
    assert "skipped: 1 labels of whole images, which also have objects" in said

    def studio(answers_of: dict[str, dict[str, list[str]]]) -> None:
        remade()
        tasks = []
        for number, (name, answers) in enumerate(answers_of.items()):
            results = []
            for question, choices in answers.items():
                result = {"type": "choices", "from_name": question, "to_name": "image"}
                results.append(result | {"value": {"choices": choices}})
            data = {"image": f"/data/upload/1/0123abcd-{name}.png"}
            done = [{"id": number, "result": results}]
            tasks.append({"id": number, "data": data, "annotations": done})
        write(source / "tasks.json", tasks)

    studio({"a": {"kind": ["cat"]}, "b": {"kind": ["a dog"]}, "c": {"kind": ["cat"]}})
    converted(source, capsys)
    expected = {"train/cat": ["a.png", "c.png"], "train/a dog": ["b.png"]}
    assert folders_of(out) == expected
    studio({"a": {"kind": ["cat", "dog"]}, "b": {"kind": ["dog"]}, "c": {}})
    converted(source, capsys)
    assert lists_of(out) == {"train/a": "cat;dog", "train/b": "dog", "train/c": ";"}
    # one answer to two questions is two labels
    studio({"a": {"wet": ["yes"], "dark": ["no"]}, "b": {"wet": ["no"]}, "c": {}})
    converted(source, capsys)
    expected = {"train/a": "dark no;wet yes", "train/b": "wet no", "train/c": ";"}
    assert lists_of(out) == expected

    def flagged(flags_of: dict[str, dict[str, bool]]) -> None:
        remade()
        for name, flags in flags_of.items():
            content = {"version": "5.5.0", "flags": flags, "shapes": []}
            write(source / f"{name}.json", content | {"imagePath": f"{name}.png"})

    good = {"good": True, "bad": False}
    bad = {"good": False, "bad": True}
    flagged({"a": good, "b": bad, "c": good})
    converted(source, capsys)
    expected = {"train/good": ["a.png", "c.png"], "train/bad": ["b.png"]}
    assert folders_of(out) == expected
    flagged({"a": {"good": True, "new": True}, "b": bad, "c": {}})
    converted(source, capsys)
    assert lists_of(out) == {"train/a": "good;new", "train/b": "bad", "train/c": ";"}
    # two files of one image, which do not say the same
    write(source / "d.json", {"flags": bad, "shapes": [], "imagePath": "a.png"})
    words = "a.png: has two entries with different labels, good, new and bad"
    assert words in refusal(source)


def test_links_that_lead_out_of_the_source(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Images, folders and labels are taken with --follow-links alone; links within are followed."""
    source = tmp_path / "set"
    secret = save(tmp_path / "secret/x.png")
    write(tmp_path / "list.csv", "file,label\na.png,c\n")
    save(source / "a.png")
    save(source / "inner/b.png")
    (source / "c.png").symlink_to(secret)
    (source / "d").symlink_to(save(tmp_path / "deep/y.png").parent)
    (source / "e.csv").symlink_to(tmp_path / "list.csv")
    (source / "f").symlink_to(source / "inner")
    rows = "a.png,one\nf/b.png,two\nc.png,one\nd/y.png,two\n"
    write(source / "rows.csv", f"file,label\n{rows}")
    said = converted(source, capsys)
    out = tmp_path / "out"
    assert "skipped: 3 links that lead out of" in said
    assert "skipped: 2 images of rows.csv that are not there: c.png, d/y.png" in said
    assert folders_of(out) == {"train/one": ["a.png"], "train/two": ["b.png"]}
    (source / "e.csv").unlink()
    said = converted(source, capsys, "--follow-links")
    assert "skipped" not in said
    expected = {"train/one": ["a.png", "x.png"], "train/two": ["b.png", "y.png"]}
    assert folders_of(out) == expected
    # one image by two names
    (source / "g.png").symlink_to(source / "a.png")
    write(source / "rows.csv", f"file,label\n{rows}g.png,two\n")
    assert "has two entries with different labels" in refusal(source)


def test_images_of_other_folders_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Class folders beside a list, which nobody would miss."""
    source = tmp_path / "set"
    for name in "a/1", "b/2", "val/3", "val/4":
        save(source / f"{name}.png")
    write(source / "val.csv", "file,label\nval/3.png,a\nval/4.png,b\n")
    said = converted(source, capsys)
    assert "skipped: 2 images without labels: a/1.png, b/2.png" in said
    write(source / "val.csv", "file,label\nval/3.png,\nval/4.png,\n")
    assert "no image with labels was found" in refusal(source)


def test_types_and_sizes_that_a_stranger_may_have_written(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Each ends in one line, soon, without memory for what is only claimed."""
    source = tmp_path / "set"
    image = save(source / "a.png")
    size = [HEIGHT, WIDTH]

    def coco_of(segmentation: object, **known: object) -> dict:
        entry = {"id": 1, "file_name": "a.png", "height": HEIGHT, "width": WIDTH}
        marked = {"id": 1, "image_id": 1, "category_id": 1}
        return {
            "images": [entry | known],
            "annotations": [marked | {"segmentation": segmentation}],
            "categories": [{"id": 1, "name": "cat"}],
        }

    huge = {"file_name": "b.tif", "height": 10**6, "width": 10**6}
    mask = '<mask label="a" left="0" top="0" width="100000" height="100000" rle="{}"/>'
    xml = "<annotations><meta/><image name='a.png'>{}</image></annotations>"
    whole = mask.format("0, 10000000000")
    deep = "[" * 100_000
    (source / "b.tif").write_bytes(b"II*\0 no TIFF")
    for name, content, words in (
        (
            "a.json",
            {"images": [1], "annotations": [2], "categories": [3]},
            "cannot be read as",
        ),
        (
            "a.json",
            coco_of({"size": size, "counts": "o" * 10**6}),
            "not a letter of runs",
        ),
        ("a.json", coco_of({"size": size, "counts": [10**30]}), "not integers"),
        ("a.json", coco_of([[1e300, 1, -1e300, 9, 9, 9]]), "not a list of x, y"),
        ("a.json", coco_of([[1, 1, 9, 1, 9, 9]], **huge), "max_megapixels"),
        ("a.json", coco_of([[1, 1, 9, 1, 9, 9]], file_name="x" * 10**6), "no image"),
        ("a.xml", xml.format(whole), "max_megapixels"),
        (
            "metadata.jsonl",
            f'{{"file_name": "a.png", "label": {deep}',
            "not a JSON object",
        ),
        ("a.csv", f"file,{','.join(map(str, range(4000)))}\na.png\n", "0 is , but"),
        # also if all of them are labels
        (
            "a.csv",
            f"file,{','.join(map(str, range(40_000)))}\na.png{',0' * 40_000}\n",
            "no image with labels",
        ),
    ):
        write(source / name, content)
        start = time.monotonic()
        line = refusal(source)
        assert words in line, name
        assert len(line) < 1000
        assert max(map(len, capsys.readouterr().out.splitlines()), default=0) < 20_000
        assert time.monotonic() - start < 20, name
        (source / name).unlink()
    write(source / "data.yaml", "names: [a]\ntrain: .\n")
    write(source / "a.txt", "0 1e300 .1 .9 .1 .9 .9\n")
    assert "expected CLASS X Y" in refusal(source)
    image.unlink()
    grid = np.zeros((8_000, 15_000), np.uint8)
    # each is within the limit, both are not; and one that is in a structure
    scipy.io.savemat(source / "m.mat", {"a": grid, "b": grid}, do_compression=True)
    with pytest.raises(UserError, match="max_megapixels"):
        arrays.load_values(source / "m.mat")
    inner = {"mask": {"a": np.zeros((12_000, 15_000), np.uint8)}}
    scipy.io.savemat(source / "s.mat", inner, do_compression=True)
    with pytest.raises(UserError, match="max_megapixels"):
        arrays.load_values(source / "s.mat")
