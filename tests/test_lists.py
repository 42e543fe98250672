"""Samples that train.csv and val.csv list instead of folders."""

import csv
import shutil
from pathlib import Path

import pytest
from running import SAME_FOR_BOTH, Project, flags, rows

pytestmark = pytest.mark.usefixtures("project")


def write(path: Path, columns: tuple[str, ...], found: list[tuple[str, ...]]) -> None:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([columns, *found])


def listed(project: Project, data: Path, folder: Path) -> Path:
    """A folder with the images of `data` in one heap, and lists that say what they are."""
    heap = shutil.copytree(data, folder / "listed")
    (heap / "train").rename(heap / "heap of train")
    (heap / "val").rename(heap / "heap of val")
    for part in "train", "val":
        if project.task == "segmentation":
            columns = ("image", "mask")
            found = [
                (image, heap / f"heap of {part}/masks" / f"{image.stem}.png")
                for image in (heap / f"heap of {part}/images").iterdir()
            ]
        else:
            columns = ("file", "label")
            found = [(image, image.parent.name) for image in heap.glob(f"heap of {part}/*/*")]
        texts = [[p.relative_to(heap) if isinstance(p, Path) else p for p in row] for row in found]
        write(heap / f"{part}.csv", columns, texts)
    return heap


def test_the_same_as_folders(project: Project, data: Path, tmp_path: Path) -> None:
    """The same samples, training on two ranks, prepared data; without val.csv a split."""
    heap = listed(project, data, tmp_path)
    folders, lists = (project.call("data.parts", folder)["parts"] for folder in (data, heap))
    assert [{path.replace("heap of ", "") for path in part} for part in lists] == [
        {*part} for part in folders
    ]
    assert project.call("data.found", heap) == project.call("data.found", data)
    project.fork(*flags(data, tmp_path / "out"), "--data", heap, draws=False).ok()
    assert len(rows(tmp_path / "out")) == 1
    fast = tmp_path / "fast"
    words = ["--data", heap, "--output", fast, "--workers", 0]
    project.alone(*words, script="ddpkit prepare").ok()
    assert project.call("data.found", fast) == project.call("data.found", data)
    (heap / "val.csv").unlink()
    found = project.call("data.parts", heap)
    held_out = {"classification": 6, "segmentation": 8}[project.task]
    assert [len(part) for part in found["parts"]] == [53 - held_out, held_out]
    assert f"no {heap / 'val.csv'}: {held_out} of 53 images used for validation" in found["said"]


@SAME_FOR_BOTH
def test_labels_of_the_lists(project: Project, data: Path, tmp_path: Path) -> None:
    heap = listed(project, data, tmp_path)
    more = [*flags(data, tmp_path / "out"), "--data", heap]
    kept = (heap / "val.csv").read_text()
    with open(heap / "val.csv", "a") as file:
        file.write(f"{kept.splitlines()[1].split(',')[0]},unheard of\n")
    project.alone(*more).refused("unheard of", "not in the training set")
    (heap / "val.csv").write_text(kept)
    images = sorted(path.relative_to(heap) for path in heap.glob("heap of train/*/*"))
    write(heap / "train.csv", ("file", "label"), [(path, "one") for path in images])
    project.alone(*more).refused("1 class(es)")
    (heap / "val.csv").unlink()
    names = ["2", "10", "1"]
    write(heap / "train.csv", ("label", "file"), [(names[i % 3], p) for i, p in enumerate(images)])
    assert project.call("data.found", heap).split()[2:] == ["1", "2", "10"]
