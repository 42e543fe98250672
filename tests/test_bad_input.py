"""What a user gets wrong: one line that names it, every rank gone, nothing half written."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import SMALL, Project
from PIL import Image

Spoil = Callable[[Path], None]


def first(folder: Path) -> Path:
    return sorted(path for path in folder.rglob("*") if path.is_file())[0]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(folder: Path) -> None:
    for path in folder.rglob("*.*"):
        path.unlink()


SPOILT: dict[str, dict[str, tuple[Spoil, list[str]]]] = {
    "classification": {
        "no train folder": (lambda d: shutil.rmtree(d / "train"), ["train", "no such"]),
        "no pictures": (
            lambda d: empty(d / "train" / "dots"),
            ["train/dots", "no pictures"],
        ),
        "class missing in val": (
            lambda d: shutil.rmtree(d / "val" / "dots"),
            ["val", "dots"],
        ),
        "class missing in train": (
            lambda d: shutil.rmtree(d / "train" / "dots"),
            ["train", "dots"],
        ),
        "truncated": (
            lambda d: truncate(first(d / "train")),
            ["train/bricks/0000.jpg", "truncated"],
        ),
        "no picture at all": (
            lambda d: (d / "train" / "dots" / "0002.jpg").write_text("x"),
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
            ["train/images", "no pictures"],
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
        "two pictures of one name": (
            lambda d: Image.new("RGB", (64, 64)).save(d / "train/images/0003.png"),
            ["images/0003.jpg", "images/0003.png", "same name"],
        ),
        "two classes of one name": (
            lambda d: (d / "classes.txt").write_text("ground\ncrack\ncrack\n"),
            ["classes.txt", "2 to 255 names"],
        ),
        "nothing but void": (
            lambda d: [
                Image.new("L", (64, 64), 255).save(path) for path in (d / "val/masks").iterdir()
            ],
            ["all is void"],
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
            lambda d: [
                Image.open(p).point(lambda v: 255 if v else 0).save(p)
                for p in [*(d / "train/masks").glob("*"), d / "classes.txt"]
                if p.suffix == ".png" or p.unlink()
            ],
            ["train/masks", "255 is void"],
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
    flags = [*SMALL, "--workers", 1, "--data", own_data, "--output-dir", tmp_path / "out"]
    project.fork(*flags).refused(*words)
    assert not (tmp_path / "out" / "last.pt").exists()
