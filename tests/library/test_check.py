"""python -m ddpkit check on folders with faults of every kind, and on whole ones."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
from generated import Done, Project, both_tasks
from PIL import Image

RIGHT = 6  # an orientation in EXIF


def check(project: Project, data: Path, out: Path, *more: object) -> Done:
    return project.run(data, "--output", out, *more, "--workers", 2, script="ddpkit check", on=1)


def findings(data: Path, out: Path) -> set[tuple[str, ...]]:
    """(what, file, other file) of each row of check.csv, without folder and repetition."""
    with open(out / "check.csv", newline="") as file:
        rows = [tuple(row.values()) for row in csv.DictReader(file)]
    assert len(rows) == len({*rows})

    def below(path: str) -> str:
        return Path(path).relative_to(data).as_posix() if path else ""

    return {(what, below(file), below(other)) for what, file, other, _ in rows}


class Painter:
    """Draws images and masks below a folder."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.noise = np.random.default_rng(0)

    def image(self, name: str, size: tuple[int, int] = (20, 30), turn: int = 1) -> None:
        self.save(name, self.noise.integers(0, 256, (*size, 3), dtype=np.uint8), turn)

    def mask(self, name: str, size: tuple[int, int] = (20, 30), top: int = 2) -> None:
        self.save(name, self.noise.integers(0, top, size, dtype=np.uint8))

    def save(self, name: str, values: np.ndarray, turn: int = 1) -> None:
        path = self.data / name
        path.parent.mkdir(parents=True, exist_ok=True)
        exif = Image.Exif()
        exif[0x112] = turn
        Image.fromarray(values).save(path, **({"exif": exif} if turn > 1 else {}))

    def copy(self, name: str, other: str) -> None:
        (self.data / other).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.data / name, self.data / other)


def test_faults_of_classification(project: Project, tmp_path: Path) -> None:
    data, out = tmp_path / "set", tmp_path / "out"
    painter = Painter(data)
    for name in "ab":
        for part, count in ("train", 5), ("val", 2):
            for number in range(count):
                painter.image(f"{part}/{name}/{number}.png")
    painter.image("train/c/0.png", (40, 40))
    painter.image("val/c/0.png")
    painter.image("spare.jpg", (60, 60))
    jpeg = (data / "spare.jpg").read_bytes()
    bad = ("train/a/cut.jpg", jpeg[:900]), ("train/b/text.png", b"text"), ("val/a/none.tif", b"")
    for name, content in bad:
        (data / name).write_bytes(content)
    painter.copy("train/a/0.png", "val/a/leak.png")
    with Image.open(data / "train/b/1.png") as image:
        image.save(data / "val/b/saved again.bmp")
    painter.copy("train/a/2.png", "train/b/clash.png")
    painter.copy("train/a/3.png", "train/a/twice.png")
    done = check(project, data, out)
    assert done.status == 1, done.err
    assert findings(data, out) == {
        *(("broken", name, "") for name, _ in bad),
        ("leak", "val/a/leak.png", "train/a/0.png"),
        ("leak", "val/b/saved again.bmp", "train/b/1.png"),
        ("twice", "train/b/clash.png", "train/a/2.png"),
        ("twice", "train/a/twice.png", "train/a/3.png"),
    }
    assert "train     15 images, 2 of them with errors; " in done.out
    assert done.out.splitlines()[-2].startswith("5 errors, 2 warnings")
    (data / "train/empty").mkdir()
    check(project, data, out).refused("folders.list_images", "empty")


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
def test_faults_of_segmentation(project: Project, tmp_path: Path) -> None:
    data, out = tmp_path / "set", tmp_path / "out"
    painter = Painter(data)
    for part, count in ("train", 6), ("val", 3):
        for number in range(count):
            painter.image(f"{part}/images/{number}.png")
            painter.mask(f"{part}/masks/{number}.png", top=3)
    (data / "classes.txt").write_text("ground\ncrack\nstain\nnever\n")

    def pair(name: str, size: tuple[int, int], turn: int, of_mask: tuple[int, int]) -> None:
        painter.image(f"train/images/{name}.png", size, turn)
        painter.mask(f"train/masks/{name}.png", of_mask)

    pair("fine", (20, 30), RIGHT, (30, 20))
    pair("as stored", (20, 30), RIGHT, (20, 30))
    pair("unknown", (20, 30), 1, (20, 30))
    painter.save("train/masks/unknown.png", np.full((20, 30), 9, np.uint8))
    pair("broken mask", (20, 30), 1, (20, 30))
    (data / "train/masks/broken mask.png").write_bytes(b"text")
    pair("broken", (20, 30), 1, (20, 30))
    cut = (data / "train/images/0.png").read_bytes()[:300]
    (data / "train/images/broken.png").write_bytes(cut)
    painter.image("train/images/alone.png")
    painter.mask("val/masks/alone.png")
    for kind in "images", "masks":
        painter.copy(f"train/{kind}/0.png", f"val/{kind}/leak.png")
        painter.copy(f"train/{kind}/1.png", f"train/{kind}/twice.png")
    painter.copy("train/images/2.png", "train/images/two masks.png")
    painter.mask("train/masks/two masks.png")

    done = check(project, data, out)
    assert done.status == 1, done.err
    assert findings(data, out) == {
        ("size", "train/masks/as stored.png", "train/images/as stored.png"),
        ("label", "train/masks/unknown.png", "train/images/unknown.png"),
        ("broken", "train/masks/broken mask.png", "train/images/broken mask.png"),
        ("broken", "train/images/broken.png", ""),
        ("no mask", "train/images/alone.png", ""),
        ("no image", "val/masks/alone.png", ""),
        ("leak", "val/images/leak.png", "train/images/0.png"),
        ("twice", "train/images/twice.png", "train/images/1.png"),
        ("twice", "train/images/two masks.png", "train/images/2.png"),
    }
    assert "value 9 in 600 pixels is no class; " in done.out
    assert done.out.splitlines()[-2].startswith("7 errors, 2 warnings")


@both_tasks
def test_a_whole_set(project: Project, data: Path, tmp_path: Path) -> None:
    """No finding, no check.csv, not even an older one; counts as numpy has them."""
    (tmp_path / "check.csv").write_text("old")
    done = check(project, data, tmp_path).ok()
    assert [path.name for path in tmp_path.iterdir()] == ["check.png"]
    assert "0 errors, 0 warnings" in done.out
    assert "train     53 images; " in done.out
    if project.task == "segmentation":
        files = (data / "train/masks").iterdir()
        masks = np.stack([np.asarray(Image.open(path)) for path in files])
        images, void = ((masks == value).any(axis=(1, 2)).sum() for value in (1, 255))
        assert f"{'crack':10}  {images:9} {100 * (masks == 1).mean():8.3g} %" in done.out
        assert f"{'void':10}  {void:9} {100 * (masks == 255).mean():8.3g} %" in done.out
    else:
        count = len([*(data / "train/dots").iterdir()])
        assert f"dots     {count:9} {100 * count / 53:8.3g} %" in done.out
