"""What is no regular file, in place of any file that is read: nothing hangs, each has one line."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import test_convert as sets
import torch
from test_checkpoints import whole

from ddpkit.convert import command as convert
from ddpkit.data.format import read_format
from ddpkit.errors import LineError
from ddpkit.run import flags
from ddpkit.run.folder import RunFolder
from ddpkit.vision import folders, lists, pretrained, rows
from ddpkit.vision.images import open_image

SECONDS = 20


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def dangling(path: Path) -> None:
    path.symlink_to("none")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


ODD = [pipe, endless, dangling, loop, Path.mkdir]


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise AssertionError(f"not ended after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def lined(act: Callable[[], object]) -> str:
    """The line of the error that `act` raises, if any; another error is one of the test."""
    try:
        act()
    except LineError as error:
        assert "\n" not in error.line
        assert len(error.line) < 1000
        return error.line
    return ""


def ask(root: Path) -> None:
    parser = flags.Parser()
    parser.add_argument("--epochs")
    parser.parse_args([f"@{root / 'recipe.txt'}"])


def run_folder(root: Path) -> None:
    for name in "last.pt", "last-1.pt", "best.pt":
        torch.save(whole(), root / name)
    (root / "metrics.csv").write_text("epoch,val_loss\n1,0.5\n")
    (root / "recipe.txt").write_text("--epochs 3\n")


def classified(root: Path) -> None:
    for part in "train", "val":
        for name in "ab":
            sets.save(root / part / name / f"{part}{name}.png")


def listed(root: Path) -> None:
    classified(root)
    for part in "train", "val":
        text = "".join(f"{part}/{n}/{part}{n}.png,{n}\n" for n in "ab")
        (root / f"{part}.csv").write_text(f"file,label\n{text}")


def grouped(root: Path) -> None:
    classified(root)
    (root / "groups.csv").write_text(
        "file,group\ntrain/a/traina.png,p\ntrain/b/trainb.png,q\n"
    )
    (root / "data.json").write_text('{"max_megapixels": 9}')


def masked(root: Path) -> None:
    for part in "train", "val":
        for name in "xy":
            sets.save(root / part / "images" / f"{name}.png")
            sets.save(root / part / "masks" / f"{name}.png", sets.two_boxes())
    (root / "classes.txt").write_text("a\nb\nc\n")


def read_classes(root: Path) -> None:
    found, _, _ = folders.find_classes(root)
    for each in found.samples:
        open_image(each[0], found.format).read()


def read_masks(root: Path) -> None:
    found, _, _ = folders.find_masks(root)
    data = folders.MaskFiles(found, lambda image, mask: (image.read(), mask.read()))
    for n in range(len(data)):
        data.transform(*data.open(n))


# by door: what is made, what is spoilt, what reads it
DOORS: dict[str, tuple[Callable, str, Callable]] = {
    "resume": (run_folder, "last.pt", lambda root: RunFolder(root)._search()),
    "older": (run_folder, "last-1.pt", lambda root: RunFolder(root)._search()),
    "eval": (run_folder, "best.pt", lambda root: RunFolder(root).best()),
    "score": (run_folder, "best.pt", lambda root: RunFolder(root).best_score("x")),
    "weights": (
        run_folder,
        "best.pt",
        lambda root: pretrained.read_tensors(str(root / "best.pt")),
    ),
    "rows": (run_folder, "metrics.csv", rows.recorded_rows),
    "recipe": (run_folder, "recipe.txt", ask),
    "list": (listed, "train.csv", read_classes),
    "groups": (grouped, "groups.csv", read_classes),
    "format": (grouped, "data.json", read_format),
    "image": (classified, "train/a/traina.png", read_classes),
    "class list": (masked, "classes.txt", read_masks),
    "mask": (masked, "train/masks/x.png", read_masks),
    "image with a mask": (masked, "train/images/x.png", read_masks),
    "thresholds": (
        listed,
        "val.csv",
        lambda root: list(lists.read_rows(root / "val.csv")),
    ),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("door", DOORS)
def test_what_a_run_reads(door: str, odd: Callable, tmp_path: Path) -> None:
    make, name, act = DOORS[door]
    root = tmp_path / "set"
    root.mkdir()
    make(root)
    (root / name).unlink()
    odd(root / name)
    line = lined(lambda: act(root))
    assert not line or name.rpartition("/")[2] in line or str(root) in line
    # without it folders would be read, or masks by their numbers
    assert line or door not in ("list", "groups", "class list")


def voc_lists(root: Path) -> object:
    return sets.voc(root)


def roboflow_labels(root: Path) -> None:
    sets.save(root / "a.png")
    (root / "_classes.csv").write_text("filename, cat, dog\na.png, 1, 0\n")


def hugging_face(root: Path) -> None:
    sets.save(root / "a.png")
    (root / "metadata.jsonl").write_text('{"file_name": "a.png", "label": "pug"}')


def arrays_npy(root: Path) -> None:
    sets.npy(root)
    (root / "classes.txt").write_text("a\nb\nc\n")


def dictionary(root: Path) -> None:
    sets.cvat_mask(root)
    (root / "labelmap.txt").rename(root / "SegmentationClass/labelmap.txt")
    shutil.copy(root / "SegmentationClass/labelmap.txt", root / "label_colors.txt")


# by format: what is made, and each file of it that is spoilt in turn
SOURCES: dict[str, tuple[Callable, str]] = {
    "coco": (sets.coco, "annotations/instances_train2017.json train2017/a.png"),
    "labelme": (sets.labelme, "a.json labels.txt a.png"),
    "yolo": (sets.yolo, "data.yaml train/labels/a.txt train/images/a.png"),
    "cvat-xml": (sets.cvat_xml, "annotations.xml images/sub/a.png"),
    "label-studio": (
        sets.label_studio,
        "project.json task-3-annotation-5-by-1-tag-dog-0.png images/a.png",
    ),
    "voc": (
        sets.voc,
        "VOCdevkit/VOC2012/ImageSets/Segmentation/train.txt "
        "VOCdevkit/VOC2012/SegmentationClass/a.png VOCdevkit/VOC2012/JPEGImages/a.jpg",
    ),
    "cvat-mask": (sets.cvat_mask, "labelmap.txt ImageSets/Segmentation/default.txt"),
    "dictionary": (dictionary, "label_colors.txt SegmentationClass/labelmap.txt"),
    "camvid": (sets.camvid_codes, "codes.txt valid.txt labels/a_P.png"),
    "roboflow-mask": (sets.roboflow_mask, "train/_classes.csv"),
    "roboflow-classes": (roboflow_labels, "_classes.csv a.png"),
    "huggingface": (hugging_face, "metadata.jsonl"),
    "rle-csv": (sets.rle_csv, "train.csv train_images/a.png"),
    "class-masks": (sets.class_masks, "train/masks/cat/a.png train/images/a.jpg"),
    "jpeg-masks": (sets.jpeg_masks, "masks/a.jpg images/a.png"),
    "mat": (sets.mat, "groundTruth/a.mat classes.txt image/a.jpg"),
    "npy": (arrays_npy, "SegmentationClassNpy/a.npy classes.txt"),
}
SPOILT = [
    (kind, name) for kind, (_, names) in SOURCES.items() for name in names.split()
]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize(("kind", "name"), SPOILT)
def test_what_convert_reads(
    kind: str, name: str, odd: Callable, tmp_path: Path
) -> None:
    source = tmp_path / "set"
    source.mkdir()
    SOURCES[kind][0](source)
    (source / name).unlink()
    odd(source / name)
    for more in (), ("--follow-links",):
        lined(lambda: convert.main([str(source), str(tmp_path / "out"), *more]))  # noqa: B023
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
