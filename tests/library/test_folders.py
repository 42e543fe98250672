"""Folders and lists as people have them: what is found in them, and what is refused."""

import csv
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from generated import refusal
from PIL import Image
from ranks import on_ranks

import ddpkit
from ddpkit.data import folders
from ddpkit.errors import UserError
from ddpkit.run import checkpoint

KINDS = "labels", "masks"


@pytest.fixture
def drawn(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Callable[[str], Path]:
    """A set to spoil, of each kind: 53 + 23 images."""

    def draw(kind: str) -> Path:
        source = tmp_path_factory.getbasetemp() / f"drawn {kind}"
        if not source.exists():
            {"labels": ddpkit.demo_classes, "masks": ddpkit.demo_masks}[kind](source, 53, 23)
        return shutil.copytree(source, tmp_path / "own")

    return draw


def find(kind: str, data: Path) -> tuple:
    """The training set, the validation set and the classes, every file of them opened."""
    find, dataset = {
        "labels": (folders.find_classes, folders.ImageFiles),
        "masks": (folders.find_masks, folders.MaskFiles),
    }[kind]
    train, val, classes = find(data)
    for part in train, val:
        opened = dataset(part, lambda *_: None)
        for index in range(len(opened)):
            for image in opened.open(index):
                image.read()
    return train.samples, val.samples, list(classes)


def names(samples: list, data: Path) -> set[str]:
    return {Path(sample[0]).relative_to(data).as_posix() for sample in samples}


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def odd_exif(path: Path) -> None:
    """An image to be turned, whose entry "rows per strip" is text."""
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


def rename_class(data: Path) -> None:
    for part in ("train", "val"):
        (data / part / "dots").rename(data / part / "\udcff")


def negative_mask(data: Path) -> None:
    mask = (data / "train/masks/0003.png").rename(data / "train/masks/0003.tif")
    Image.fromarray(np.full((64, 64), -2, np.int32)).save(mask)


def save_mask(mode: str, size: tuple[int, int], color: int = 0) -> Callable[[Path], None]:
    return lambda d: Image.new(mode, size, color).save(d / "train/masks/0003.png")


BROKEN, PAIR, VALUES, SURVEY = (
    *("images.reading", "folders.match_pairs", "masks.read_mask", "folders.survey"),
)
SPOILT = [
    ("labels", lambda d: shutil.rmtree(d / "train"), "folders.find_train", ["train"]),
    ("labels", lambda d: empty(d / "train/dots"), "folders.list_images", ["train/dots"]),
    ("labels", lambda d: shutil.rmtree(d / "train/dots"), "folders.find_labelled", ["dots"]),
    ("labels", rename_class, "folders.read_class_folders", ["train/\udcff", "UTF-8"]),
    ("labels", lambda d: truncate(d / "train/bricks/0000.jpg"), BROKEN, ["truncated"]),
    ("labels", lambda d: (d / "train/dots/0002.jpg").write_text("x"), BROKEN, ["dots/0002.jpg"]),
    ("labels", lambda d: odd_exif(d / "train/dots/0002.jpg"), BROKEN, ["dots/0002.jpg"]),
    ("labels", lambda d: (d / "val/dots/0002.jpg").write_bytes(b""), BROKEN, ["val/dots/0002"]),
    ("masks", lambda d: shutil.rmtree(d / "train"), "folders.find_train", ["train"]),
    ("masks", lambda d: empty(d / "train/images"), "folders.list_images", ["train/images"]),
    ("masks", lambda d: (d / "train/images/0003.jpg").unlink(), PAIR, ["masks/0003.png"]),
    ("masks", lambda d: (d / "val/masks/0003.png").unlink(), PAIR, ["images/0003.jpg", "val"]),
    ("masks", save_mask("L", (64, 60)), "folders.open_files", ["0003.png", "64 x 60", "64 x 64"]),
    ("masks", save_mask("L", (64, 64), 7), VALUES, ["0003.png", "value 7", "NAME = 7"]),
    ("masks", save_mask("RGB", (64, 64)), VALUES, ["0003.png", "colour 0 0 0", "NAME = 0 0 0"]),
    ("masks", negative_mask, VALUES, ["masks/0003.tif", "value -2"]),
    (
        "masks",
        lambda d: Image.new("RGB", (64, 64)).save(d / "train/images/0003.png"),
        "folders.by_name",
        ["images/0003.jpg", "images/0003.png"],
    ),
    ("masks", lambda d: truncate(d / "train/images/0003.jpg"), BROKEN, ["images/0003.jpg"]),
    ("masks", lambda d: repaint(d, {1: 255}), SURVEY, ["hold 0, 255", "NAME = 255"]),
    ("masks", lambda d: repaint(d, {0: 1}), SURVEY, ["hold 1, 255 (255 is void)"]),
    ("masks", lambda d: repaint(d, {0: 255, 1: 255}), SURVEY, ["hold 255 (255 is void)"]),
]


@pytest.mark.parametrize(("kind", "spoil", "code", "words"), SPOILT)
@on_ranks(1)
def test_spoilt_data(drawn, kind: str, spoil: Callable, code: str, words: list) -> None:
    data = drawn(kind)
    spoil(data)
    with refusal(code, *words):
        find(kind, data)


@on_ranks(1)
def test_a_class_that_is_rare(drawn: Callable) -> None:
    """In one training mask of 53 only: that is not a mistake."""
    data = drawn("masks")
    repaint(data, {1: 255})
    Image.new("L", (64, 64), 1).save(data / "train/masks/0030.png")
    train, val, classes = find("masks", data)
    assert (len(train), len(val), classes) == (53, 23, ["background", "crack"])


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1)
def test_what_is_left_out(drawn: Callable, kind: str, tmp_path: Path) -> None:
    """What editors and archives leave, and links back up, add no image, class or copy."""
    data = drawn(kind)
    before = find(kind, data)
    assert (len(before[0]), len(before[1])) == (53, 23)
    train = data / "train"
    within = [train / "images", train / "masks"]
    if kind == "labels":
        within = [train / "dots"]
        shutil.copytree(train / "dots", train / "__MACOSX")
        (train / "again").symlink_to(data)
    for folder in within:
        inside = [path for path in sorted(folder.iterdir()) if path.is_file()]
        for name in (".ipynb_checkpoints", "__MACOSX"):
            (folder / name).mkdir()
            shutil.copy(inside[0], folder / name)
        for name, target in ("loop", folder), ("up", train), ("here", "."):
            (folder / name).symlink_to(target)
        # Images that lie elsewhere, linked twice, and from there a link back.
        elsewhere = tmp_path / "elsewhere" / folder.name
        elsewhere.mkdir(parents=True)
        for path in inside[:3]:
            path.rename(elsewhere / path.name)
        for name in ("one", "two"):
            (folder / name).symlink_to(elsewhere)
        (elsewhere / "back").symlink_to(train)
    after = find(kind, data)
    assert [len(after[0]), *after[1:]] == [53, *before[1:]]


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1)
def test_names_of_folders(drawn: Callable, kind: str, capsys: pytest.CaptureFixture) -> None:
    """valid and validation are val, test is not; without DIR/train the folders in DIR are used."""
    data = drawn(kind)
    train, val, _ = find(kind, data)
    before = "val"
    for name in "valid", "validation":
        (data / before).rename(data / name)
        train_now, val_now, _ = find(kind, data)
        assert train_now == train
        assert names(val_now, data / name) == names(val, data / "val")
        before = name
    (data / before).rename(data / "test")
    _, held_out, _ = find(kind, data)
    assert len(held_out) == {"labels": 6, "masks": 8}[kind]
    for path in (data / "train").iterdir():
        shutil.move(path, data)
    shutil.rmtree(data / "train")
    if kind == "labels":
        with refusal("folders.find_train", data / "train"):  # test/ beside class folders
            find(kind, data)
    shutil.rmtree(data / "test")
    train_now, val_now, _ = find(kind, data)
    assert names(val_now, data) == {
        name.removeprefix("train/") for name in names(held_out, data)
    } or len(val_now) == len(held_out)
    assert len(names([*train_now, *val_now], data)) == 53
    for mistyped in (data.parent, data / "none", next(data.glob("[di]*"))):
        with pytest.raises(UserError, match=str(mistyped)):
            find(kind, mistyped)


@on_ranks(1)
def test_class_folders(drawn: Callable) -> None:
    """Numbers sort as numbers; images beside the folders are left out; val may lack a class."""
    data = drawn("labels")
    numbers = iter(("10", "2", "0", "1", *map(str, range(11, 99))))
    for path in sorted((data / "train").iterdir()):
        number = next(numbers)
        path.rename(path.with_name(number))
        (data / "val" / path.name).rename(data / "val" / number)
    classes = find("labels", data)[2]
    assert classes == sorted(classes, key=int) != sorted(classes)
    shutil.copy(next((data / "train" / "2").iterdir()), data / "train" / "loose, é.JPG")
    shutil.rmtree(data / "val" / "2")
    train, _, classes_now = find("labels", data)
    assert (len(train), classes_now) == (53, classes)


@on_ranks(1)
def test_names_of_masks(drawn: Callable) -> None:
    """With accents and commas, linked; classes.txt as Windows writes it."""
    data = drawn("masks")
    for kind, ending in ("images", ".jpg"), ("masks", ".png"):
        folder, name = data / "train" / kind, f"é, 1{ending}"
        (folder / f"0002{ending}").rename(data / name)
        (folder / name).symlink_to(data / name)
    (data / "classes.txt").write_bytes("\ufeffground\r\nfissüre\r\n".encode())
    train, _, classes = find("masks", data)
    assert (len(train), classes) == (53, ["ground", "fissüre"])


def test_endings(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """What was meant as an image is named once; what usually lies beside images is not."""
    kept = ["a.JPG", "b.jfif", "c.jpe", "d.Tiff"]
    quiet = ["4", ".hidden.gif", "Thumbs.db", "desktop.ini", "n.txt", "n.json", "n.xml"]
    for name in [*kept, "1.heic", "2.HEIC", "3.npy", *quiet]:
        (tmp_path / name).touch()
    folders.say_skipped.cache_clear()
    for _ in range(2):
        assert [os.path.basename(path) for path in folders.list_images(tmp_path)] == kept
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == [".heic", ".npy"]
    for name in [*kept, "3.npy"]:  # an array is an image where there are no others
        os.remove(tmp_path / name)
    with refusal("folders.list_images", ".bmp"):
        folders.list_images(tmp_path)


def test_inputs_of_predict(tmp_path: Path) -> None:
    for name in ("b/2.jpg", "1.PNG", ".3.jpg", "4.txt", ".c/5.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = folders.collect([tmp_path, tmp_path / "b" / "2.jpg"])
    assert [name for _, name in found] == ["1", "b/2", "2"]
    assert folders.by_name(found)["b/2"] == str(tmp_path / "b/2.jpg")
    with refusal("folders.by_name", "a/1.jpg", "b/1.jpg"):
        folders.by_name([("a/1.jpg", "1"), ("b/1.jpg", "1")])


@pytest.mark.parametrize(("count", "aside"), [(1, 0), (2, 1), (6, 1), (20, 3), (100, 15)])
def test_the_split(count: int, aside: int) -> None:
    """It depends on the names below DIR alone, and stays; a path is on one side only."""
    listed = [(f"/data/{number}.jpg", 0) for number in range(count)]
    train, val = folders.split(listed, Path("/data"))
    assert (len(val), sorted([*train, *val])) == (aside, sorted(listed))
    moved = [(path.replace("data", "other"), 0) for path, _ in listed]
    expected = [(path.replace("data", "other"), 0) for path, _ in val]
    assert folders.split(moved[::-1], Path("/other"))[1] == expected
    twice = folders.split(listed * 2, Path("/data"))
    assert not {*twice[0]} & {*twice[1]}
    if count == 20:  # of earlier versions, too
        listed = [(f"/d/train/images/{number:02d}.jpg", 0) for number in range(20)]
        held_out = folders.split(listed, Path("/d"))[1]
        assert [path[-6:-4] for path, _ in held_out] == ["02", "03", "17"]
    if count == 1:
        with refusal("folders.say_split", "/data", "/data/val"):
            folders.say_split(Path("/data"), 0, 2)


def test_classes_in_another_order() -> None:
    with refusal("checkpoint.check_classes", "a.pt", "another order"):
        checkpoint.check_classes("a.pt", ["0", "10", "2"], ["0", "2", "10"])
    checkpoint.check_classes("a.pt", ["0", "2"], ["0", "2"])


class TestLists:
    """train.csv and val.csv."""

    def rows(self, folder: Path, content: str | bytes) -> list[tuple[str, ...]]:
        """What a list of `content` beside the files a.jpg and "b,1.jpg" holds."""
        for name in "a.jpg", "b,1.jpg":
            (folder / name).touch()
        data = content if isinstance(content, bytes) else content.encode()
        (folder / "train.csv").write_bytes(data)
        return folders.read_list(folder / "train.csv", ("file", "label"), count=1)

    def test_rows(self, tmp_path: Path) -> None:
        """As spreadsheets write them: a mark, CRLF, quotes, further columns in another order."""
        content = '\ufefflabel,note,file\r\ncät,,a.jpg\r\n\r\n"cät, old",x,"b,1.jpg"\r\n'
        a, b = (str(tmp_path / name) for name in ("a.jpg", "b,1.jpg"))
        assert self.rows(tmp_path, content) == [(a, "cät"), (b, "cät, old")]

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ("file;label\na.jpg;x\n", "no column file"),
            ("file,label\na.jpg,x\na.jpg,\n", "train.csv, line 3: no label"),
            ("file,label\na.jpg\n", "train.csv, line 2: no label"),
            ("file,label\nc.jpg,x\n", "train.csv, line 2: "),
            ("file,label\n", "train.csv: no rows"),
            ("", "train.csv: no column file"),
            ("file,label\na.jpg,c\xe4t\n".encode("latin-1"), "UTF-8"),
        ],
    )
    def test_faults(self, tmp_path: Path, content: str | bytes, words: str) -> None:
        with refusal("folders.read_list", words):
            self.rows(tmp_path, content)


def heap(kind: str, data: Path) -> Path:
    """Put the images in one heap, and lists beside them that say what they are."""
    for part in "train", "val":
        (data / part).rename(data / f"heap of {part}")
        if kind == "masks":
            images = (data / f"heap of {part}/images").iterdir()
            found = [(path, path.parent.parent / "masks" / f"{path.stem}.png") for path in images]
            lines = [[each.relative_to(data) for each in pair] for pair in found]
        else:
            images = data.glob(f"heap of {part}/*/*")
            lines = [[path.relative_to(data), path.parent.name] for path in images]
        with open(data / f"{part}.csv", "w", newline="") as file:
            columns = ["image", "mask"] if kind == "masks" else ["file", "label"]
            csv.writer(file).writerows([columns, *lines])
    return data


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1)
def test_lists_are_the_same_as_folders(drawn: Callable, kind: str) -> None:
    data = drawn(kind)
    before = find(kind, data)
    after = find(kind, heap(kind, data))
    assert after[2] == before[2]
    for then, now in zip(before[:2], after[:2], strict=True):
        assert {name.removeprefix("heap of ") for name in names(now, data)} == names(then, data)
    (data / "val.csv").unlink()
    held_out = {"labels": 6, "masks": 8}[kind]
    train, val, _ = find(kind, data)
    assert (len(train), len(val)) == (53 - held_out, held_out)


@on_ranks(1)
def test_labels_of_the_lists(drawn: Callable) -> None:
    data = heap("labels", drawn("labels"))
    kept = (data / "val.csv").read_text()
    file = kept.splitlines()[1].split(",")[0]
    (data / "val.csv").write_text(f"{kept}{file},unheard of\n")
    with refusal("folders.find_labelled", "unheard of"):
        find("labels", data)
    (data / "val.csv").unlink()
    lines = (data / "train.csv").read_text().splitlines()[1:]
    paths = [line.rsplit(",", 1)[0] for line in lines]
    for labels, classes in (["one"], None), (["2", "10", "1"], ["1", "2", "10"]):
        rows = [f"{labels[n % len(labels)]},{path}" for n, path in enumerate(paths)]
        (data / "train.csv").write_text("\n".join(["label,file", *rows]))
        if classes:
            assert find("labels", data)[2] == classes
        else:
            with refusal("folders.find_labelled", "1 class(es)"):
                find("labels", data)
