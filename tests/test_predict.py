"""predict.py, and images and names of every kind."""

import csv
import shutil
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from running import (
    SAME_FOR_BOTH,
    SCRIPTS,
    Done,
    Project,
    flags,
    run,
)


def test_predict_bad_input(project: Project, data: Path, trained: Path, tmp_path: Path) -> None:
    def predict(*args: object) -> Done:
        more = ["--output", tmp_path / "p", "--checkpoint", trained / "best.pt"]
        return project.fork(*args, *more, ranks=1, script="predict.py")

    predict(tmp_path / "none").refused("none", "cannot be read (No such file")
    (tmp_path / "bad.jpg").write_bytes(b"\xff\xd8 no picture")
    predict(tmp_path / "bad.jpg").refused("bad.jpg", "cannot be read")
    assert not list((tmp_path / "p").rglob("*.*"))
    if project.task == "segmentation":  # whose masks would overwrite one another
        for name in ("same.png", "same.jpg"):
            Image.new("RGB", (64, 64)).save(tmp_path / name)
        (tmp_path / "bad.jpg").unlink()
        predict(tmp_path).refused("same.png", "same.jpg")


def test_predict_goes_on(project: Project, own_data: Path, trained: Path, tmp_path: Path) -> None:
    """Pictures that cannot be read are left out and named at the end; names stay as they are."""
    where = {"classification": "*", "segmentation": "images"}[project.task]
    broken, empty, named, *others = sorted((own_data / "train").glob(f"{where}/*.jpg"))
    broken.write_bytes(broken.read_bytes()[:500])
    empty.write_bytes(b"")
    named = named.rename(named.with_name("\udcff.jpg"))
    more = [*{path.parent: None for path in others}, "--checkpoint", trained / "best.pt"]

    def predict(*words: object, script: str | Path = "predict.py") -> Done:
        return project.fork(*more, *words, ranks=1, script=script)

    out = tmp_path / "\udcfe"
    done = predict("--output", out)
    assert done.status == 1
    assert done.out.startswith("51 of 53 images predicted: ")
    first, second = done.err.splitlines()
    assert first.startswith(f"error: {broken}: cannot be read")
    assert second.startswith(f"error: {empty}: cannot be read")
    if project.task == "segmentation":
        names = {path.stem for path in [named, *others]}
        assert {path.stem for path in (out / "masks").iterdir()} == names
        assert {path.stem for path in (out / "overlays").iterdir()} == names
        return

    def files(path: Path) -> list[str]:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
            return [row["file"] for row in csv.DictReader(file)]

    # One folder after the other.
    listed = sorted(map(str, [named, *others]))
    assert files(out / "predictions.csv") == listed
    assert [path.name for path in out.iterdir()] == ["predictions.csv"]
    done = predict("--output", tmp_path / "killed", script=SCRIPTS / "predict_killed.py")
    assert done.status == -9
    assert files(tmp_path / "killed" / "predictions.csv.partial") == listed[:30]


@SAME_FOR_BOTH
def test_names_that_are_not_text(project: Project, own_data: Path) -> None:
    """Of a picture and of the folders above it, on a terminal that takes ASCII alone."""
    shutil.rmtree(own_data / "val")
    dots = own_data / "train" / "dots"
    (dots / "0002.jpg").rename(dots / "\udcff.jpg")
    data = own_data.rename(own_data.with_name("\udcfe \u00e9"))
    store, ascii_only = data.with_name("\udcfd"), {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "ddpkit", "prepare", "--data", data, "--output", store]
    assert "53 samples" in run(command, cwd=project.folder, **ascii_only).ok().out
    project.alone(*flags(store, data.with_name("out"))).ok()


def test_pictures_of_every_kind(project: Project, trained: Path, tmp_path: Path) -> None:
    """Grey, 16-bit, with alpha, with a palette, CMYK, and one that a camera held upright."""
    ramp = np.arange(40 * 96).reshape(40, 96)
    kinds = {
        "grey.png": Image.fromarray((ramp // 16).astype(np.uint8)),
        "deep.png": Image.fromarray((ramp * 17).astype(np.uint16)),
        "alpha.png": Image.new("RGBA", (96, 40), (200, 30, 30, 128)),
        "palette.png": Image.new("P", (96, 40), 3),
        "cmyk.jpg": Image.new("CMYK", (96, 40), (9, 99, 9, 9)),
    }
    for name, image in kinds.items():
        image.save(tmp_path / name)
    turned = Image.Exif()
    turned[0x0112] = 6  # to be turned by 90 degrees
    Image.new("RGB", (96, 40)).save(tmp_path / "turned.jpg", exif=turned)
    more = ["--output", tmp_path / "p", "--checkpoint", trained / "best.pt"]
    project.fork(tmp_path, *more, ranks=1, script="predict.py").ok()
    if project.task == "classification":
        with open(tmp_path / "p" / "predictions.csv", newline="") as file:
            found = [Path(row["file"]).name for row in csv.DictReader(file)]
        assert found == sorted([*kinds, "turned.jpg"])
    else:
        sizes = {p.stem: Image.open(p).size for p in (tmp_path / "p" / "masks").iterdir()}
        assert sizes == {
            **{Path(name).stem: (96, 40) for name in kinds},
            "turned": (40, 96),
        }
    assert project.call("decoding.extrema", tmp_path / "deep.png") == [0, 254]
