"""Folders and lists as people have them: what is found in them, and what is refused."""

import contextlib
import csv
import io
import os
import shutil
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from generated import ROOT, refusal, type_in_shell
from PIL import Image
from ranks import on_ranks

import ddpkit
from ddpkit.errors import UserError
from ddpkit.vision import folders, places
from ddpkit.vision.places import Place

KINDS = "labels", "masks"


@pytest.fixture
def drawn(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> Callable[[str], Path]:
    """A set to spoil, of each kind: 53 + 23 images."""

    def draw(kind: str) -> Path:
        source = tmp_path_factory.getbasetemp() / f"drawn {kind}"
        if not source.exists():
            ddpkit.demo_set(source, 53, 23, masks=kind == "masks")
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


def empty(folder: Path) -> None:
    for path in folder.rglob("*.*"):
        path.unlink()


def save_mask(size: tuple[int, int], value: int) -> Callable[[Path], None]:
    return lambda d: Image.new("L", size, value).save(d / "train/masks/0003.png")


def save_plain(folder: Path) -> None:
    for path in folder.iterdir():
        Image.new("L", (64, 64)).save(path)


SPOILT = [
    (
        "labels",
        lambda d: shutil.rmtree(d / "train"),
        "places.refuse_unknown",
        ["it has val", "DIR/train/CLASS"],
    ),
    (
        "labels",
        lambda d: empty(d / "train/dots"),
        "folders.list_images",
        ["train/dots"],
    ),
    (
        "labels",
        lambda d: shutil.rmtree(d / "train/dots"),
        "folders.find_labelled",
        ["dots"],
    ),
    (
        "labels",
        lambda d: os.truncate(d / "train/bricks/0000.jpg", 800),
        "images.reading",
        ["bricks/0000"],
    ),
    (
        "masks",
        lambda d: (d / "val/masks/0003.png").unlink(),
        "folders.match_pairs",
        ["images/0003.jpg", "val"],
    ),
    (
        "masks",
        save_mask((64, 60), 0),
        "folders.open",
        ["0003.png", "64 x 60", "128 x 128"],
    ),
    (
        "masks",
        lambda d: save_plain(d / "train/masks"),
        "folders.survey",
        ["masks hold background alone", "no pixel of another class"],
    ),
    (
        "masks",
        lambda d: (d / "train/masks").rename(d / "train/odd"),
        "places.refuse_unknown",
        ["it has images, odd", "DIR/images/train"],
    ),
    (
        "masks",
        save_mask((64, 64), 7),
        "masks.translate",
        ["0003.png", "value 7", "NAME = 7"],
    ),
]


@pytest.mark.parametrize(("kind", "spoil", "code", "words"), SPOILT)
@on_ranks(1)
def test_spoilt_data(drawn, kind: str, spoil: Callable, code: str, words: list) -> None:
    data = drawn(kind)
    spoil(data)
    with refusal(code, words):
        find(kind, data)


@on_ranks(1)
def test_what_is_left_out(drawn: Callable, tmp_path: Path) -> None:
    """What editors and archives leave, and links back up, add no image, class or copy."""
    data = drawn("labels")
    before = find("labels", data)
    assert len(before[0]) == 53
    assert len(before[1]) == 23
    train = data / "train"
    folder = train / "dots"
    shutil.copytree(folder, train / "__MACOSX")
    (train / "again").symlink_to(data)
    inside = sorted(folder.iterdir())
    for name in (".ipynb_checkpoints", "__MACOSX"):
        (folder / name).mkdir()
        shutil.copy(inside[0], folder / name)
    # the images of a class
    elsewhere = tmp_path / "elsewhere"
    (train / "bricks").rename(elsewhere)
    (train / "bricks").symlink_to(elsewhere)
    for place in folder, elsewhere:
        (place / "loop").symlink_to(train)
    after = find("labels", data)
    assert len(after[0]) == 53
    assert after[1:] == before[1:]


SYSTEMS = [  # of a NAS, of Windows, of macOS
    "@eaDir",
    "#recycle",
    "@Recycle",
    "#snapshot",
    "~snapshot",
    "$RECYCLE.BIN",
    "lost+found",
    "System Volume Information",
    ".Spotlight-V100",
    ".Trashes",
    ".AppleDouble",
    "@__thumb",
    "FOUND.001",
]


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1)
def test_what_disks_and_runs_add(
    drawn: Callable, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders of a NAS, runs and predictions are neither classes nor images; one line says so."""
    data = drawn(kind)
    before = find(kind, data)
    folders.say_skipped.cache_clear()
    said: list[str] = []
    monkeypatch.setattr(folders.distributed, "print0", said.append)
    image = next(data.glob("train/*/*.jpg"))
    inside = image.parent
    for parent in data, data / "train", inside, data / "val" / inside.name:
        for name in SYSTEMS:
            (parent / name / "t0.jpg").mkdir(parents=True)
            shutil.copy(image, parent / name / "t0.jpg/SYNOPHOTO_THUMB_M.jpg")
            shutil.copy(image, parent / name)
    for name in ["predictions/masks", "predictions/overlays", "runs/first", "old"]:
        for parent in data / "train", inside:
            (parent / name).mkdir(parents=True)
            shutil.copy(image, parent / name / "examples.png")
            (parent / "predictions/legend.png").touch()
    for parent in data / "train", inside:
        (parent / "runs/first/.lock").touch()
        for name in "args.json", "metrics.csv":
            (parent / "old" / name).touch()
    for name in ".lock", "epochs/events", "eval/worst.png":  # --output-dir DIR/train
        (data / "train" / name).parent.mkdir(exist_ok=True)
        (data / "train" / name).touch()
    assert find(kind, data) == before
    lines = [line for line in said if line.startswith("skipped")]
    shown = [name for name in SYSTEMS if not name.startswith(".")]
    assert {line.rpartition(": ")[2] for line in lines} >= set(shown)
    assert len([line for line in lines if "@eaDir" in line]) == 1
    here = sorted(sample[0] for sample in before[0] if Path(sample[0]).parent == inside)
    # as of predict.py, and of a shell's *
    for inputs in [inside], list(inside.glob("[!.]*")):
        assert [path for path, _ in sorted(folders.collect(inputs))] == here


def test_an_empty_class_stays_an_error(tmp_path: Path) -> None:
    for name in "a", "b":
        (tmp_path / name).mkdir()
    with refusal("folders.list_images", tmp_path / "a"):
        folders.read_class_folders(Place(tmp_path))


def test_output_below_inputs(tmp_path: Path) -> None:
    """predict.py does not read what it has written: not even before it has ended."""
    (tmp_path / "a.jpg").touch()
    before = folders.collect([tmp_path])
    for output in tmp_path, tmp_path / "deep/predictions":
        for name in "masks", "overlays":
            (output / name).mkdir(parents=True)
            (output / name / "a.png").touch()
        assert folders.collect([tmp_path], output) == before
        (output / "legend.png").touch()
        assert folders.collect([tmp_path], output) == before
        assert folders.collect([tmp_path]) == before
    # predict.py DIR/*
    assert folders.collect(list(tmp_path.iterdir()), tmp_path) == before
    for asked in tmp_path / "masks", tmp_path / "overlays/a.png":
        assert len(folders.collect([asked], tmp_path)) == 1
    with pytest.raises(UserError, match="aaa"):  # a name that is too long for a disk
        folders.collect(["a" * 300])


@on_ranks(1)
def test_parts_in_folders(drawn: Callable) -> None:
    """images/train beside images/test: the test set is not trained on."""
    data = drawn("masks")
    for kind in "images", "masks":
        for old, new in ("train", "train2017"), ("val", "Test"):
            (data / kind).mkdir(exist_ok=True)
            (data / old / kind).rename(data / kind / new)
    shutil.rmtree(data / "train")
    shutil.rmtree(data / "val")
    with refusal("folders.refuse_splits", data / "images", "DIR/train"):
        find("masks", data)
    classes = data / "classes"
    for name in "a/train", "a/val", "b/train":
        (classes / name).mkdir(parents=True)
        (classes / name / "x.jpg").touch()
    with refusal("folders.refuse_splits", classes):
        folders.read_class_folders(Place(classes))


def test_forms_of_unicode(tmp_path: Path) -> None:
    """Names that look the same are paired; of classes they are said to differ, and how."""
    one = unicodedata.normalize("NFC", "caf\xe9")
    other = unicodedata.normalize("NFD", "caf\xe9")
    for name in f"images/{one}.jpg", f"masks/{other}.png":
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    pairs = folders.match_pairs(Place(tmp_path / "images", tmp_path / "masks"))
    assert len(pairs) == 1
    for row in f"train/{one}", "train/b", f"val/{other}":
        (tmp_path / row).mkdir(parents=True)
        (tmp_path / row / "x.jpg").touch()
    with refusal("folders.find_labelled", "Unicode"):
        folders.find_labelled(tmp_path)
    # in one part they would be two classes; nor is a letter without width seen
    for alike in other, "b\u200b", "b ", "b\xa0":
        (tmp_path / "train" / alike).mkdir()
        (tmp_path / "train" / alike / "x.jpg").touch()
        with refusal("names.refuse_alike", "look the same", "rename one"):
            folders.find_labelled(tmp_path)
        shutil.rmtree(tmp_path / "train" / alike)
    (tmp_path / "train/\u200b\xa0").mkdir()
    (tmp_path / "train/\u200b\xa0/x.jpg").touch()
    with refusal("names.refuse_alike", "'\\u200b\\xa0' has no visible name"):
        folders.find_labelled(tmp_path)
    table = tmp_path / "train.csv"
    table.write_text(f"file,label\ntrain/{one}/x.jpg,{one}\ntrain/b/x.jpg,{other}\n")
    with refusal("names.refuse_alike", "look the same"):
        folders.find_labelled(tmp_path)
    table.write_text(f"file,label\ntrain/b/x.jpg,a\nimages/{other}.jpg,b\n")
    with refusal("folders.read_row", "does not exist", "looks the same"):
        folders.find_labelled(tmp_path)
    table.write_text("file,label\ntrain/b/x.jpg,a\ntrain/b,b\n")
    with refusal(
        "folders.read_row",
        "train/b does not exist, or is not a file; correct the line [",
    ):
        folders.find_labelled(tmp_path)


def touch_pairs(folder: Path, image: str, mask: str, numbers: Sequence[int]) -> Place:
    """Name files of images and masks; `image` and `mask` have a {} for the number."""
    for kind, form in ("images", image), ("masks", mask):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for number in numbers:
            path = folder / kind / form.format(number)
            path.parent.mkdir(exist_ok=True)
            path.touch()
    return Place(folder / "images", folder / "masks")


@pytest.mark.parametrize(
    ("image", "mask", "said"),
    [
        ("{}.jpg", "{}_mask.png", "masks are named NAME_mask"),
        ("{}_sat.jpg", "{}_seg.png", "images are named NAME_sat and masks are named "),
        ("{}_training.tif", "{}_manual1.gif", "masks are named NAME_manual1"),
        ("img_{}.jpg", "gt_{}.png", "masks are named gt_NAME"),
        ("{}.jpg", "{}.jpg.png", "masks are named NAME.jpg"),
        ("IMG_{}.JPG", "img_{}.png", ""),
        ("a/x{}.jpg", "a/X{}_P.png", "masks are named NAME_p"),
    ],
)
def test_names_of_masks(
    tmp_path: Path, capsys: pytest.CaptureFixture, image: str, mask: str, said: str
) -> None:
    """An ending that all have is found, and a line says so; 1 does not get the mask of 10."""
    numbers = range(1, 31)
    place = touch_pairs(tmp_path, image, mask, numbers)
    pairs = folders.match_pairs(place)
    assert len(pairs) == 30
    of_images = place.images
    for image_path, mask_path in pairs:
        at = [image.format(n) for n in numbers].index(
            Path(image_path).relative_to(of_images).as_posix()
        )
        assert mask_path == str(place.masks / mask.format(numbers[at]))
    lines = capsys.readouterr().out
    assert said in lines if said else not lines
    # one without the other is named, as are the names that there are
    Path(pairs[0][1]).rename(place.masks / "other.png")
    with refusal("folders.match_pairs", pairs[0][0], "other.png", "train.csv"):
        folders.match_pairs(place)


def test_names_that_are_not_paired(tmp_path: Path) -> None:
    """What may be meant in two ways, and numbers that look alike, are refused."""
    every = tmp_path / "two masks each"
    touch_pairs(every, "{}.jpg", "{}_gt.png", range(9))
    place = touch_pairs(every, "{}.jpg", "{}_mask.png", range(9))
    with refusal("folders.match_pairs", "no image of that name"):
        folders.match_pairs(place)
    place = touch_pairs(every, "{}.jpg", "{}.png", range(9))
    with refusal("folders.match_pairs", "0_gt.png", "no image of that name"):
        folders.match_pairs(place)
    place = touch_pairs(tmp_path / "two rules", "{}.jpg", "{}_a.png", range(9))
    for path in list(place.masks.iterdir()):
        (place.images / path.name).touch()
        path.with_name(f"{path.stem}_a.png").touch()
    with refusal("pairing.refuse_doubt", "0_a.png", "0_a_a.png"):
        folders.match_pairs(place)
    for number, masks in enumerate(["{}0.png", "{}_1.png", "{}0_mask.png"]):
        place = touch_pairs(tmp_path / str(number), "{}.jpg", masks, range(1, 10))
        with refusal("folders.match_pairs", "1.jpg", "names may differ by one ending"):
            folders.match_pairs(place)
    place = touch_pairs(tmp_path / "mixed", "a{}.jpg", "a{}.png", range(5))
    alone = touch_pairs(tmp_path / "alone", "a{}_mask.png", "b{}.png", range(2))
    with refusal("folders.match_pairs", "a0_mask.png", "no image of that name"):
        folders.match_pairs(Place(alone.images))
    (place.masks / "a3.png").rename(place.masks / "a3_mask.png")
    with refusal("folders.match_pairs", "a3.jpg", "a3_mask.png"):
        folders.match_pairs(place)
    for form in "x.jpg", "X.jpg":
        (tmp_path / "mixed/images" / form).touch()
    (tmp_path / "mixed/masks/x_mask.png").touch()
    with refusal("folders.match_pairs", "X.jpg"):
        folders.match_pairs(place)


LAYOUTS = {
    "CamVid": ("{part}", "{part}annot", ""),
    "ADE20K": ("images/{part}", "annotations/{part}", ""),
    "by capital letters": ("{part}/JPEGImages", "{part}/SegmentationClass", ""),
    "in one folder": ("{part}", "{part}", "_mask"),
    "with the kind behind": ("{part}_images", "{part}_labels", "_L"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(1)
def test_layouts_of_masks(
    drawn: Callable, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same pairs, and no image of the test set among them; a line says where they are."""
    data = drawn("masks")
    _, before_val, classes = find("masks", data)
    images, masks, ending = LAYOUTS[layout]
    new = data.parent / "new"
    for part, name in ("train", "training"), ("val", "val"), ("val", "test"):
        for kind, form, end in ("images", images, ""), ("masks", masks, ending):
            folder = new / form.format(part=name)
            folder.mkdir(parents=True, exist_ok=True)
            for path in (data / part / kind).iterdir():
                shutil.copy(path, folder / f"{path.stem}{end}{path.suffix}")
    shutil.copy(data / "classes.txt", new)
    said: list[str] = []
    monkeypatch.setattr(places.distributed, "print0", said.append)
    train, val, found = find("masks", new)
    assert found == classes
    assert names(train, new) == {
        f"{images.format(part='training')}/{n:04}.jpg" for n in range(53)
    }
    assert len(val) == len(before_val)
    where = f"val: images in {new / images.format(part='val')}, masks in "
    assert where + str(new / masks.format(part="val")) in said
    tested = folders.find_masks(new, part="test")[1]
    assert names(tested.samples, new) == {
        f"{images.format(part='test')}/{n:04}.jpg" for n in range(23)
    }


@on_ranks(1)
def test_layouts_in_doubt(drawn: Callable) -> None:
    """Two folders that may be meant are refused, and so is a set for the other task."""
    data = drawn("masks")
    shutil.copytree(data / "train/masks", data / "train/1st_manual")
    with refusal("places.choose_folder", "train/1st_manual and train/masks"):
        find("masks", data)
    shutil.rmtree(data / "train/1st_manual")
    with refusal("places.refuse_unknown", "images, masks; classification expects"):
        find("labels", data)
    shutil.copytree(data, data.with_name("kinds") / "images")
    shutil.copytree(data / "val/masks", data.with_name("kinds") / "masks")
    with refusal("places.refuse_unknown", "images, masks; classification expects"):
        find("labels", data.with_name("kinds"))
    shutil.copytree(data / "val", data / "valid")
    with refusal("places.choose_folder", "val/images and valid/images"):
        find("masks", data)
    shutil.rmtree(data)
    data = drawn("labels")
    with refusal("places.refuse_unknown", "rings, ...; segmentation expects"):
        find("masks", data)
    listed = next((data / "train").glob("*/*"))
    with refusal("places.inner_folders", listed, "a file"):
        find("labels", listed)
    with refusal("places.refuse_unknown", "expects DIR/train/CLASS/*.jpg"):
        find("labels", listed.parent)
    with refusal("places.inner_folders", f"none: no such folder in {Path.cwd()}"):
        find("labels", Path("none"))
    # images of YOLO, whose labels are texts
    for name in "images/train/1.jpg", "labels/train/1.txt":
        (data / "yolo" / name).parent.mkdir(parents=True)
        (data / "yolo" / name).touch()
    with refusal("folders.list_images", "labels/train", "ddpkit convert"):
        find("masks", data / "yolo")
    # a test set alone, beside the images for training
    touch_pairs(data / "loose", "{}.jpg", "{}.png", range(3))
    place = touch_pairs(data / "loose", "test/{}.jpg", "test/{}.png", range(3))
    with refusal("folders.refuse_splits", "all would be trained on"):
        folders.match_pairs(place)
    shutil.copytree(data / "yolo/images/train", data / "yolo/images/val")
    with refusal(
        "places.find_masks_of", "images/val", "the folder with its masks is missing"
    ):
        find("masks", data / "yolo")


NAMED = [
    # as Intel's, and those of many others
    (["seg_train/seg_train/CLASS", "seg_test/seg_test/CLASS"], "seg_test, seg_train"),
    (["training_set/CLASS", "test_set/CLASS"], "folders to DIR/train, DIR/val and"),
    (
        ["Train_Set/CLASS", "ValidationSet/CLASS"],
        "apparent splits of the dataset: Train_Set, ValidationSet",
    ),
    (
        ["train_data/CLASS", "test/CLASS", "more/CLASS"],
        "apparent splits of the dataset: train_data",
    ),
    (["CLASS", "freight train"], "move all classes into DIR/train"),
    (["CLASS", "cat/test"], "(test)"),
    (["CLASS", "cat/Test Images"], "(Test Images)"),
    (["train/CLASS", "train/cat/old train", "train/cat/old test"], "(old test, old "),
    (["train/train/CLASS", "train/test/CLASS"], "(test, train)"),
    # what is expected
    (["animals/train/CLASS", "animals/test/CLASS"], "has animals; classification "),
    (["set/images/CLASS"], "it has set; classification expects DIR/train/CLASS"),
    (["train", "bus"], "no class has the name of a part"),
    (["images/CLASS", "more/CLASS"], "it has images, more; classification expects"),
    (["images/fold1 masks/fold1", "images/test_set masks/test_set"], "(test_set)"),
    (["training_set/images training_set/masks", "test_set/images"], "training_set; "),
    (["data/images data/masks"], "it has data; segmentation expects DIR/train/images"),
]


@pytest.mark.parametrize(("layout", "words"), NAMED)
def test_folders_named_as_parts(
    tmp_path: Path, layout: Sequence[str], words: str
) -> None:
    """A word such as train in the names of folders: the test set is no class, and in none."""
    kind = "masks" if "masks" in layout[0] else "labels"
    for form in layout:
        for folder in [form] if "masks" not in form else form.split(" "):
            for name in "cat", "dog":
                path = tmp_path / folder.replace("CLASS", name) / f"{name}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
    found = {"labels": folders.find_labelled, "masks": folders.find_mask_pairs}[kind]
    with pytest.raises(UserError) as caught:
        found(tmp_path)
    assert words in caught.value.line.replace(str(tmp_path), "DIR")


def test_one_folder_named_as_a_part(tmp_path: Path) -> None:
    """A class within DIR/train has any name."""
    for name in "test tube", "bullet train":
        for number in range(2):
            path = tmp_path / "train" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    assert folders.find_labelled(tmp_path)[2] == ["bullet train", "test tube"]


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1)
def test_broken_txt(drawn: Callable, kind: str) -> None:
    """What left images out in 2.x is refused with what does so now."""
    data = drawn(kind)
    listed = data / "broken.txt"
    listed.touch()
    with refusal("folders.read_parts", listed, f"check {data} --skip-broken"):
        find(kind, data)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1)
def test_names_of_folders(drawn: Callable, kind: str) -> None:
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
    held_out = len(find(kind, data)[1])
    assert held_out == {"labels": 6, "masks": 8}[kind]
    for path in (data / "train").iterdir():
        shutil.move(path, data)
    shutil.rmtree(data / "train")
    if kind == "labels":
        # beside class folders it is no class
        assert len(find(kind, data)[2]) == 6
    shutil.rmtree(data / "test")
    train_now, val_now, _ = find(kind, data)
    assert len(val_now) == held_out
    assert len(names(train_now + val_now, data)) == 53
    for mistyped in (data.parent, data / "none", next(data.glob("[di]*"))):
        with pytest.raises(UserError, match=str(mistyped)):
            find(kind, mistyped)


@on_ranks(1)
def test_class_folders(drawn: Callable) -> None:
    """Numbers sort as numbers; images beside the folders are left out; val may lack a class."""
    data = drawn("labels")
    numbers = "10", "2", "0", "1", "11", "12"
    for path, number in zip(sorted((data / "train").iterdir()), numbers, strict=True):
        path.rename(path.with_name(number))
        (data / "val" / path.name).rename(data / "val" / number)
    classes = find("labels", data)[2]
    assert classes == sorted(classes, key=int) != sorted(classes)
    image = next((data / "train/2").iterdir())
    moved = image.rename(data / "train/loose, é.JPG")
    (data / "train/2/linked.jpg").symlink_to(moved)
    shutil.rmtree(data / "val" / "2")
    train, _, classes_now = find("labels", data)
    assert len(train) == 53
    assert classes_now == classes


def test_endings(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """What was meant as an image is named once; what usually lies beside images is not."""
    kept = ["a.JPG", "b.jfif", "c.jpe", "d.Tiff", "e.heic", "f.GIF", "g.pgm", "h.jp2"]
    named = ["1.psd", "2.PSD", "3.npy"]
    quiet = ["4", ".hidden.gif", "Thumbs.db", "desktop.ini", "n.txt", "n.json", "n.xml"]
    for name in kept + named + quiet:
        (tmp_path / name).touch()
    folders.say_skipped.cache_clear()
    for _ in range(2):
        assert [Path(path).name for path in folders.list_images(tmp_path)] == kept
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == [".npy", ".psd"]


def test_images_of_one_name() -> None:
    with refusal("folders.index_by_name", "a/1.jpg", "b/1.jpg"):
        folders.index_by_name([("a/1.jpg", "1"), ("b/1.jpg", "1")])


def test_the_split() -> None:
    """It depends on the names below DIR alone, and stays; a path is on one side only."""
    listed = [(f"/d/train/images/{number:02d}.jpg", 0) for number in range(20)]
    train, val = folders.split(listed, Path("/d"))
    assert sorted(train + val) == listed
    # of earlier versions, too
    assert [path[-6:-4] for path, _ in val] == ["02", "03", "17"]
    moved = [(f"/other{path[2:]}", 0) for path, _ in listed[::-1]]
    _, moved_val = folders.split(moved, Path("/other"))
    assert moved_val == [(f"/other{path[2:]}", 0) for path, _ in val]
    train, val = folders.split(listed * 2, Path("/d"))
    assert not set(train) & set(val)
    for count, held in (
        (1, 0),
        (2, 1),
        (6, 1),
    ):
        assert len(folders.hold_out(listed[:count], Path("/d"))) == held


def test_folds_and_groups() -> None:
    """Parts are disjoint, together all of it, and alike in classes; groups are whole."""
    listed = [(f"/d/{number:02d}.jpg", number % 2) for number in range(40)]
    parts = [folders.hold_out(listed, Path("/d"), (part, 4)) for part in range(1, 5)]
    assert sorted(n for part in parts for n in part) == list(range(40))
    assert [sum(listed[n][1] for n in part) for part in parts] == [5, 5, 5, 5]
    grouped = [
        (path, label, f"patient {n % 7}") for n, (path, label) in enumerate(listed)
    ]
    for fold in (
        None,
        (1, 3),
        (2, 3),
        (3, 3),
    ):
        held = folders.hold_out(grouped, Path("/d"), fold)
        others = set(range(40)) - set(held)
        groups_held = {grouped[n][2] for n in held}
        groups_of_others = {grouped[n][2] for n in others}
        assert groups_held
        assert groups_of_others
        assert not groups_held & groups_of_others
    with refusal("folders.split", "fewer folds"):
        folders.split(grouped, Path("/d"), (9, 9))


def series(label: int, groups: range, of_all: str = "") -> list[tuple[str, int, str]]:
    """Three images of each group; of_all: begins the names of groups that classes share."""
    return [
        (f"/d/{label}/{group}-{n}.jpg", label, f"{of_all or label} {group}")
        for group in groups
        for n in range(3)
    ]


def test_groups_by_class() -> None:
    """Of each class as many groups are held out; those of several classes are drawn apart."""
    samples = series(0, range(2)) + series(1, range(5)) + series(2, range(20))
    mixed = series(0, range(10), "mixed") + series(1, range(10), "mixed")
    root = Path("/d")

    def held(fold: tuple[int, int] | None = None) -> Counter:
        _, val = folders.split([*mixed, *samples], root, fold)
        _, same = folders.split([*samples[::-1], *mixed[::-1]], root, fold)
        assert val == same
        return Counter(group.split()[0] for _, _, group in val)

    assert held() == {"0": 3, "1": 3, "2": 9, "mixed": 12}
    folds = [held((part, 5)) for part in range(1, 6)]
    assert [fold["1"] for fold in folds] == [3] * 5
    assert [fold["2"] for fold in folds] == [12] * 5
    assert [fold["mixed"] for fold in folds] == [12] * 5
    # the two groups of a class are in two folds
    assert sorted(fold["0"] for fold in folds) == [0, 0, 0, 3, 3]
    # small classes do not all begin with the first fold
    small = [each for label in range(6) for each in series(label, range(3))]
    folds = [len(folders.hold_out(small, root, (part, 6))) for part in range(1, 7)]
    assert folds == [9] * 6
    # each class is one group: none can have both
    alone = [each for label in range(3) for each in series(label, range(1))]
    words = "9 images for training are too few to split in whole groups; add more of each class, "
    with refusal("folders.split", words):
        folders.split(alone, root)


def name_groups(data: Path, per_group: int) -> None:
    """Write groups.csv: so many images, in turn, are of one group."""
    paths = sorted(data.glob("*/images/*")) or sorted(data.glob("*/*/*"))
    rows = [(p.relative_to(data), n // per_group) for n, p in enumerate(paths)]
    with open(data / "groups.csv", "w", newline="") as file:
        csv.writer(file).writerows([("file", "group"), *rows])


def lines_of(kind: str, data: Path) -> tuple[str, tuple]:
    """What is said while a set is found, and the set."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        parts = find(kind, data)
    return said.getvalue(), parts


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1)
def test_groups_of_folders(drawn: Callable, kind: str) -> None:
    """Of DIR/groups.csv: what is held out is whole groups, and a line says so."""
    data = drawn(kind)
    shutil.rmtree(data / "val")
    said, _ = lines_of(kind, data)
    line = "\nif images belong together (one patient, one video), name their groups in "
    assert f"{line}{data / 'groups.csv'}\n" in said
    name_groups(data, 4)
    said, (train, val, _) = lines_of(kind, data)
    assert f" of 53 images held out in whole groups (no {data / 'val'})\n" in said
    groups = [{sample[2] for sample in part} for part in (train, val)]
    assert len(groups[1]) == (2 if kind == "masks" else 5)
    assert not groups[0] & groups[1]
    assert len(train) + len(val) == 53
    table = data / "groups.csv"
    *rows, last = table.read_text().splitlines()
    table.write_text("\n".join(rows))
    line = f"has no row for 1 images, such as {data / last.split(',')[0]}; add one for each"
    with refusal("folders.add_groups", line):
        find(kind, data)


def test_groups_beside_lists(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """What is not read is named, with what to do, unless the lists have groups."""
    lines = {"groups": ["file,group"], "train": ["file,label"], "both": []}
    lines["both"] = ["file,label,group"]
    for number in range(8):
        (tmp_path / f"{number}.jpg").touch()
        own = f"{number}.jpg", "ab"[number % 2], str(number // 2)
        lines["groups"].append(f"{own[0]},{own[2]}")
        lines["train"].append(f"{own[0]},{own[1]}")
        lines["both"].append(",".join(own))
    (tmp_path / "groups.csv").write_text("\n".join(lines["groups"]))
    words = f"{tmp_path}/groups.csv: not used beside lists; give them a column group instead\n"
    for name, count in ("train", 1), ("both", 0):
        (tmp_path / "train.csv").write_text("\n".join(lines[name]))
        folders.find_labelled(tmp_path)
        assert capsys.readouterr().out.count(words) == count


@on_ranks(1)
def test_what_parts_share(drawn: Callable) -> None:
    """Groups in two parts, and files with two labels, are said at the start."""
    data = heap("labels", drawn("labels"))
    for part in "train", "val":
        path = data / f"{part}.csv"
        header, *rows = path.read_text().splitlines()
        rows = [f"{row},p{n}" for n, row in enumerate(rows)]
        path.write_text("\n".join([f"{header},group", *rows]))
    said, (*_, classes) = lines_of("labels", data)
    assert "23 groups are in the training set and in another part" in said
    assert "p0, p1, p10, p11, ...; move their rows into one" in said
    assert "listed twice" not in said
    path = data / "train.csv"
    file, label, _ = path.read_text().splitlines()[1].split(",")
    other = next(name for name in classes if name != label)
    path.write_text(f"{path.read_text()}\n{file},{other},p0\n")
    line = f"{data / file}: is listed twice, with two labels; remove a row\n"
    assert line in lines_of("labels", data)[0]


def run_recipe(title: str, number: int, folder: Path) -> None:
    """Run a block of shell below a title of own-data.md in a folder."""
    page = (Path(__file__).parents[2] / "docs/own-data.md").read_text()
    section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    block = section.split("```bash\n")[number].partition("```")[0]
    type_in_shell(block, folder)


def test_recipes_of_shell(tmp_path: Path) -> None:
    title = "Lists written by shell commands"
    pets = tmp_path / "pets"
    listed = tmp_path / "listed"
    nuclei = tmp_path / "nuclei"
    patients = tmp_path / "DIR"
    for name in "cat.0", "cat.1", "dog.0", "dog.1":
        for path in (
            pets / f"{name}.jpg",
            listed / f"images/{name}.jpg",
            patients / f"train/{name[:3]}/p{name[-1]}_{name}.jpg",
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8)).save(path)
    run_recipe(title, 1, pets)
    train, val, classes = folders.find_labelled(pets)
    assert classes == ["cat", "dog"]
    for path, label in [*train, *val]:
        assert Path(path).name.startswith(classes[label])
    (listed / "train.txt").write_text("images/cat.0.jpg 0\nimages/dog.0.jpg 1\n")
    run_recipe(title, 2, listed)
    rows = folders.read_list(listed / "train.csv", ["file", "label"])
    assert rows == [
        (str(listed / "images/cat.0.jpg"), "0"),
        (str(listed / "images/dog.0.jpg"), "1"),
    ]
    for name in "ab":
        for kind, number, value in (
            ("images", 0, 9),
            ("masks", 1, 255),
            ("masks", 2, 255),
        ):
            path = nuclei / f"{name}/{kind}/{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image = Image.new("L", (8, 8))
            image.putpixel((number, 0), value)
            image.save(path)
    run_recipe(title, 3, nuclei)
    pairs = folders.read_list(nuclei / "train.csv", ["image", "mask"])
    assert len(pairs) == 2
    for image, mask in pairs:
        assert Path(image).parents[1] == Path(mask).parent
        first = Image.open(mask).crop((0, 0, 4, 1)).tobytes()
        assert [*first] == [0, 255, 255, 0]
    ends = tmp_path / "ends"
    (ends / "train").mkdir(parents=True)
    for name in "1.jpg", "1_mask.png", "2.jpg", "2_mask.png":
        Image.new("L", (8, 8)).save(ends / "train" / name)
    run_recipe(title, 4, ends)
    pairs = folders.read_list(ends / "train.csv", ["image", "mask"])
    names = [[Path(path).name for path in pair] for pair in pairs]
    assert names == [["1.jpg", "1_mask.png"], ["2.jpg", "2_mask.png"]]
    tiny = tmp_path / "tiny"
    for name in "train/n07/images/n07_0", "train/n08/images/n08_0", "val/images/val_0":
        path = tiny / f"{name}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    (tiny / "val/val_annotations.txt").write_text("val_0.JPEG\tn08\t0\t3\t4\t6\n")
    run_recipe(title, 5, tiny)
    train, val, classes = folders.find_labelled(tiny)
    assert classes == ["n07", "n08"]
    images = tiny / "train/n07/images/n07_0.JPEG", tiny / "train/n08/images/n08_0.JPEG"
    assert train == [(str(path), n) for n, path in enumerate(images)]
    assert val == [(str(tiny / "val/images/val_0.JPEG"), 1)]
    page = (ROOT / "docs/own-data.md").read_text()
    several = page.partition("## Multi-label classification")[2]
    (tmp_path / "several/a").mkdir(parents=True)
    (tmp_path / "several/b").mkdir()
    for name in "a/1", "a/2", "b/3":
        (tmp_path / f"several/{name}.jpg").touch()
    text = several.partition("```text\n")[2].partition("```")[0]
    (tmp_path / "several/train.csv").write_text(text)
    train, val, classes = folders.find_labelled(tmp_path / "several")
    assert classes == ["cat", "dog"]
    assert sorted(sample[1:] for sample in train + val) == [
        ("", "camera 2"),
        ("0", "camera 1"),
        ("0;1", "camera 1"),
    ]
    # folders of splits, then class folders in DIR itself; a name without _
    for folder in patients / "train", patients:
        if folder == patients:
            for path in [*patients.glob("train/*")]:
                path.rename(patients / path.name)
            (patients / "train").rmdir()
            (patients / "dog/p0_dog.0.jpg").rename(patients / "dog/c, d.jpg")
            (patients / "dog/p1_dog.1.jpg").rename(patients / "dog/p2_dog.1.jpg")
        run_recipe("Group k-fold", 1, tmp_path)
        train, val, _ = folders.find_labelled(patients)
        names = sorted(Path(sample[0]).name for sample in train + val)
        assert len(names) == 4
        groups = [{sample[2] for sample in part} for part in (train, val)]
        assert groups[0] | groups[1] == {name.split("_")[0] for name in names}
        assert not groups[0] & groups[1]
    # by checksums: two files of each
    for number, path in enumerate(sorted(patients.glob("*/*.jpg"))):
        Image.new("RGB", (8, 8), (60 * (number % 2), 0, 0)).save(path)
    path.rename(path.with_name("a, b.jpg"))
    run_recipe("Group k-fold", 2, tmp_path)
    train, val, _ = folders.find_labelled(patients)
    files = [{Path(sample[0]).read_bytes() for sample in part} for part in (train, val)]
    assert len(train) == len(val) == 2
    assert [len(each) for each in files] == [1, 1]
    assert files[0] != files[1]


class TestLists:
    """train.csv and val.csv."""

    def rows(self, folder: Path, content: str | bytes) -> list[tuple[str, ...]]:
        """What a list of `content` beside the files a.jpg and "b,1.jpg" holds."""
        for name in "a.jpg", "b,1.jpg":
            (folder / name).touch()
        data = content if isinstance(content, bytes) else content.encode()
        (folder / "train.csv").write_bytes(data)
        return folders.read_list(folder / "train.csv", ["file", "label"])

    def test_rows(self, tmp_path: Path) -> None:
        """As spreadsheets write them: a mark, CRLF, quotes, further columns in another order."""
        content = (
            '\ufefflabel,note,file\r\ncät,,a.jpg\r\n\r\n"cät, old",x,"b,1.jpg"\r\n'
        )
        a = str(tmp_path / "a.jpg")
        b = str(tmp_path / "b,1.jpg")
        assert self.rows(tmp_path, content) == [(a, "cät"), (b, "cät, old")]
        loose = 'file, label \na.jpg, cät\n"b,1.jpg","cät, old"\n,\n , \n'
        assert self.rows(tmp_path, loose) == [(a, "cät"), (b, "cät, old")]
        of_excel = 'file;label\na.jpg;"cät;dog"\n'
        assert self.rows(tmp_path, of_excel) == [(a, "cät;dog")]

    def test_columns_not_used(
        self, tmp_path: Path, capsys: pytest.CaptureFixture
    ) -> None:
        """They are named; one that divides the set is refused, unless it says the same."""
        self.rows(tmp_path, "id,file,label,Split\n1,a.jpg,x,Train\n2,a.jpg,x,\n")
        line = f"{tmp_path / 'train.csv'}: columns not used: id, Split (rename one to group "
        assert capsys.readouterr().out.startswith(line)
        with refusal("folders.read_list", "train.csv, line 3: Split is test, "):
            self.rows(tmp_path, "file,label,Split\na.jpg,x,train\na.jpg,x,test\n")

    @pytest.mark.parametrize(
        ("content", "code", "words"),
        [
            (
                "file:label\na.jpg:x\n",
                "folders.read_list",
                "is file:label; it must have file,label",
            ),
            ("file,label\na.jpg,x\na.jpg,\n", "folders.read_row", "line 3: no label"),
            ("file,label\nc.jpg,x\n", "folders.read_row", "train.csv, line 2: "),
            (
                "file,label,note\n,,x\n",
                "folders.read_row",
                "train.csv, line 2: no file",
            ),
            # a label of several in a list with semicolons, without quotes
            ("file;label\na.jpg;x;y\n", "lists.parse_rows", "line 2: more cells than"),
            (
                "file,label,is_valid\na.jpg,x,True\n",
                "lists.part_column",
                "train.csv: column is_valid tells splits apart by yes and no; write a list",
            ),
            (
                "file,label\na.jpg,c\xe4t\n".encode("latin-1"),
                "files.parse",
                "UTF-8",
            ),
        ],
    )
    def test_faults(
        self, tmp_path: Path, content: str | bytes, code: str, words: str
    ) -> None:
        with refusal(code, words):
            self.rows(tmp_path, content)


def heap(kind: str, data: Path) -> Path:
    """Put the images in one heap, and lists beside them that say what they are."""
    for part in "train", "val":
        (data / part).rename(data / f"heap of {part}")
        if kind == "masks":
            lines = [("image", "mask")]
            lines += [
                (
                    f"heap of {part}/images/{path.name}",
                    f"heap of {part}/masks/{path.stem}.png",
                )
                for path in (data / f"heap of {part}/images").iterdir()
            ]
        else:
            lines = [("file", "label")]
            lines += [
                (str(path.relative_to(data)), path.parent.name)
                for path in data.glob(f"heap of {part}/*/*")
            ]
        with open(data / f"{part}.csv", "w", newline="") as file:
            csv.writer(file).writerows(lines)
    return data


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1)
def test_lists_are_the_same_as_folders(drawn: Callable, kind: str) -> None:
    data = drawn(kind)
    before = find(kind, data)
    after = find(kind, heap(kind, data))
    assert after[2] == before[2]
    for then, now in zip(before[:2], after[:2], strict=True):
        found = {name.removeprefix("heap of ") for name in names(now, data)}
        assert found == names(then, data)
    (data / "val.csv").rename(data / "valid.csv")
    assert find(kind, data) == after
    (data / "valid.csv").unlink()
    held_out = {"labels": 6, "masks": 8}[kind]
    train, val, _ = find(kind, data)
    assert len(train) == 53 - held_out
    assert len(val) == held_out
