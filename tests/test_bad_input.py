"""What a user gets wrong: one line that names it, every rank gone, nothing half written."""

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from running import NETS, SMALL, Project

Spoil = Callable[[Path], None]


def first(folder: Path) -> Path:
    return sorted(path for path in folder.rglob("*") if path.is_file())[0]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def odd_exif(path: Path) -> None:
    """A picture to be turned, whose entry "rows per strip" is text."""
    exif = Image.Exif()
    exif[0x0112], exif[0x0116] = 6, 5
    Image.new("RGB", (64, 64)).save(path, exif=exif)
    content = path.read_bytes()
    order = "<" if b"II*" in content else ">"
    (kind,) = (k for k in (3, 4) if struct.pack(f"{order}HH", 0x0116, k) in content)
    old, new = (struct.pack(f"{order}HH", 0x0116, k) for k in (kind, 2))
    path.write_bytes(content.replace(old, new))


def empty(folder: Path) -> None:
    for path in folder.rglob("*.*"):
        path.unlink()


def repaint(folder: Path, labels: dict[int, int]) -> None:
    """Give the classes in the training masks other numbers."""
    for path in (folder / "train" / "masks").iterdir():
        Image.open(path).point(lambda value: labels.get(value, value)).save(path)


SPOILT: dict[str, dict[str, tuple[Spoil, list[str]]]] = {
    "classification": {
        "no train folder": (lambda d: shutil.rmtree(d / "train"), ["train", "no such"]),
        "no pictures": (
            lambda d: empty(d / "train" / "dots"),
            ["train/dots", "no images"],
        ),
        "class missing in val": (
            lambda d: shutil.rmtree(d / "val" / "dots"),
            ["val", "dots"],
        ),
        "class missing in train": (
            lambda d: shutil.rmtree(d / "train" / "dots"),
            ["train", "dots"],
        ),
        "class whose name is no text": (
            lambda d: [
                (d / part / "dots").rename(d / part / "\udcff") for part in ("train", "val")
            ],
            ["train/\\udcff", "not UTF-8", "rename"],
        ),
        "truncated": (
            lambda d: truncate(first(d / "train")),
            ["train/bricks/0000.jpg", "truncated"],
        ),
        "no picture at all": (
            lambda d: (d / "train" / "dots" / "0002.jpg").write_text("x"),
            ["dots/0002.jpg", "cannot be read"],
        ),
        "odd EXIF": (
            lambda d: odd_exif(d / "train" / "dots" / "0002.jpg"),
            ["dots/0002.jpg", "cannot be read"],
        ),
        "empty file": (
            lambda d: (d / "val" / "dots" / "0002.jpg").write_bytes(b""),
            ["val/dots/0002.jpg", "cannot be read"],
        ),
    },
    "segmentation": {
        "no train folder": (lambda d: shutil.rmtree(d / "train"), ["train", "no such"]),
        "no pictures": (
            lambda d: empty(d / "train" / "images"),
            ["train/images", "no images"],
        ),
        "mask without picture": (
            lambda d: (d / "train/images/0003.jpg").unlink(),
            ["masks/0003.png", "train/images"],
        ),
        "picture without mask": (
            lambda d: (d / "val/masks/0003.png").unlink(),
            ["images/0003.jpg", "val/masks"],
        ),
        "sizes differ": (
            lambda d: Image.new("L", (64, 60)).save(d / "train/masks/0003.png"),
            ["masks/0003.png", "64 x 60", "64 x 64"],
        ),
        "label outside the classes": (
            lambda d: Image.new("L", (64, 64), 7).save(d / "train/masks/0003.png"),
            ["masks/0003.png", "label 7", "0 to 1"],
        ),
        "label below 0": (
            lambda d: Image.fromarray(np.full((64, 64), -2, np.int32)).save(
                (d / "train/masks/0003.png").rename(d / "train/masks/0003.tif")
            ),
            ["masks/0003.tif", "label -2", "0 to 1"],
        ),
        "two pictures of one name": (
            lambda d: Image.new("RGB", (64, 64)).save(d / "train/images/0003.png"),
            ["images/0003.jpg", "images/0003.png", "same name"],
        ),
        "two classes of one name": (
            lambda d: (d / "classes.txt").write_text("ground\ncrack\ncrack\n"),
            ["classes.txt, line 3", "crack comes twice"],
        ),
        "nothing but void": (
            lambda d: [
                Image.new("L", (64, 64), 255).save(path) for path in (d / "val/masks").iterdir()
            ],
            ["all are void"],
        ),
        "mask in colour": (
            lambda d: Image.new("RGB", (64, 64)).save(d / "train/masks/0003.png"),
            ["masks/0003.png", "3 channels"],
        ),
        "truncated": (
            lambda d: truncate(d / "train/images/0003.jpg"),
            ["images/0003.jpg", "truncated"],
        ),
        "255 for the class": (
            lambda d: repaint(d, {1: 255}),
            ["own: all 53 training masks hold class 0 and nothing else", "'crack = 255'"],
        ),
        "255 for the class, without its name": (
            lambda d: (repaint(d, {1: 255}), (d / "classes.txt").unlink()),
            ["own: the values of the training masks (0, 255)", "background = 0, object = 255"],
        ),
        "one class alone": (
            lambda d: repaint(d, {0: 1}),
            ["own: all 53 training masks hold class 1 and nothing else"],
        ),
        "no class": (
            lambda d: repaint(d, {0: 255, 1: 255}),
            ["own: all 53 training masks hold no class", "255 is void"],
        ),
    },
}


@pytest.mark.parametrize(
    ("project", "case"),
    [(task, case) for task, cases in SPOILT.items() for case in cases],
    indirect=["project"],
)
def test_spoilt_data(project: Project, own_data: Path, tmp_path: Path, case: str) -> None:
    spoil, words = SPOILT[project.task][case]
    spoil(own_data)
    # One worker: its exceptions reach the rank as text.
    flags = [*SMALL, *NETS[project.task], "--image-size", 32, "--workers", 1, "--data", own_data]
    project.fork(*flags, "--output-dir", tmp_path / "out").refused(*words)
    assert not (tmp_path / "out" / "best.pt").exists()  # no epoch has been finished


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
def test_a_class_that_is_rare(project: Project, own_data: Path) -> None:
    """In one training mask of 53 only: that is not a mistake."""
    repaint(own_data, {1: 255})
    Image.new("L", (64, 64), 1).save(own_data / "train" / "masks" / "0030.png")
    assert project.call("data.found", own_data) == "53 23 background crack"


def test_folders_to_leave_out(project: Project, own_data: Path, tmp_path: Path) -> None:
    """What editors and archives leave, and links back up, add no picture, class or copy."""
    before = project.call("data.found", own_data)
    assert before.startswith("53 23 ")
    train = own_data / "train"
    folders = [train / "images", train / "masks"]
    if project.task == "classification":
        folders = [train / "dots"]
        shutil.copytree(train / "dots", train / "__MACOSX")
        (train / "again").symlink_to(own_data)
    for folder in folders:
        within = [path for path in sorted(folder.iterdir()) if path.is_file()]
        for name in (".ipynb_checkpoints", "__MACOSX"):
            (folder / name).mkdir()
            shutil.copy(within[0], folder / name)
        for name, target in ("loop", folder), ("up", train), ("here", "."):
            (folder / name).symlink_to(target)
        # Pictures that lie elsewhere, linked twice, and from there a link back.
        elsewhere = tmp_path / "elsewhere" / folder.name
        elsewhere.mkdir(parents=True)
        for path in within[:3]:
            path.rename(elsewhere / path.name)
        for name in ("one", "two"):
            (folder / name).symlink_to(elsewhere)
        (elsewhere / "back").symlink_to(train)
    assert project.call("data.found", own_data) == before
