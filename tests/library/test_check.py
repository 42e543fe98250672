"""python -m ddpkit check on folders with faults of every kind, and on whole ones."""

import shlex
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from generated import (
    Done,
    Project,
    both_but_one_in_soak,
    both_tasks,
)
from PIL import Image

from ddpkit.data.format import DEFAULT_FORMAT
from ddpkit.vision import folders
from ddpkit.vision.images import open_image
from ddpkit.vision.tools import alike, check_picture
from ddpkit.vision.tools.check import Survey, sort_out_broken

RIGHT = 6  # an orientation in EXIF


def check(project: Project, data: Path, *flags: object) -> Done:
    picture = ["--picture", data.with_name(f"{data.name}.png")]
    given = [data, "--workers", 2, *picture, *flags]
    return project.run(*given, script="ddpkit check", on=1)


def holds(done: Done, data: Path, *expected: tuple[str, str]) -> None:
    """Its errors and warnings are these: how each begins, without the folder, and its words."""
    assert done.status == 1, done.err
    lines = done.out.replace(f"{data}/", "").splitlines()
    found = sorted(line for line in lines if line.startswith(("error: ", "warning: ")))
    for line, (start, words) in zip(found, sorted(expected), strict=True):
        assert line.startswith(start), (line, start)
        assert words in line


class Painter:
    """Draws images and masks below a folder."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.noise = np.random.default_rng(0)

    def image(self, name: str, size: tuple[int, int] = (20, 30), turn: int = 1) -> None:
        height, width = size
        values = self.noise.integers(0, 256, (height, width, 3), dtype=np.uint8)
        self.save(name, values, turn)

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
    data = tmp_path / "set"
    painter = Painter(data)
    for name in "ab":
        for part, count in ("train", 5), ("val", 2):
            for number in range(count):
                painter.image(f"{part}/{name}/{number}.png")
    painter.image("train/c/0.png", (40, 40))
    painter.image("val/c/0.png")
    painter.image("spare.jpg", (60, 60))
    jpeg = (data / "spare.jpg").read_bytes()
    (data / "train/a/cut.jpg").write_bytes(jpeg[:900])
    (data / "train/b/text.png").write_bytes(b"text")
    (data / "val/a/none.tif").write_bytes(b"")
    painter.copy("train/a/0.png", "val/a/leak.png")
    with Image.open(data / "train/b/1.png") as image:
        image.save(data / "val/b/saved again.bmp")
    painter.copy("train/a/2.png", "train/b/clash.png")
    painter.copy("train/a/3.png", "train/a/twice.png")
    (data / "train/empty").mkdir()
    painter.image("val/unknown/0.png")
    painter.image("test/zebra/0.png")
    painter.image("test/a/0.png")
    painter.copy("train/a/1.png", "test/a/leak.png")
    painter.copy("val/a/1.png", "test/b/leak.png")
    (data / "test/b/cut.jpg").write_bytes(jpeg[:900])
    done = check(project, data)
    holds(
        done,
        data,
        ("error: train/empty: ", "no images in it"),
        (f"error: {data}: ", "class unknown of val is"),
        ("error: train/a/cut.jpg: ", "cannot be read"),
        ("error: train/b/text.png: ", "cannot be read"),
        ("error: val/a/none.tif: ", "empty file"),
        ("error: val/a/leak.png: ", "train/a/0.png; remove one, or, if the split is"),
        (f"error: {data}: ", "class zebra of test is not"),
        ("error: test/a/leak.png: ", "is in train, train/a/1.png"),
        ("error: test/b/leak.png: ", "is in val, val/a/1.png"),
        ("error: test/b/cut.jpg: ", "cannot be read"),
        ("error: val/b/saved again.bmp: ", "train/b/1.png"),
        ("error: train/b/clash.png: ", "train/a/2.png, with another label"),
        ("warning: train/a/twice.png: ", "train/a/3.png"),
    )
    assert "train     13 images; " in done.out
    assert "test      3 images; " in done.out
    assert "classes   images, % of images: train, val, test\n" in done.out
    assert done.out.splitlines()[-1] == "12 errors, 1 warnings"


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
def test_faults_of_segmentation(project: Project, tmp_path: Path) -> None:
    data = tmp_path / "set"
    painter = Painter(data)
    for part, count in ("train", 6), ("val", 3):
        for number in range(count):
            painter.image(f"{part}/images/{number}.png")
            painter.mask(f"{part}/masks/{number}.png", top=3)
    (data / "classes.txt").write_text("ground\ncrack\nstain\nnever\n")

    def pair(
        name: str, size: tuple[int, int], turn: int, of_mask: tuple[int, int]
    ) -> None:
        painter.image(f"train/images/{name}.png", size, turn)
        painter.mask(f"train/masks/{name}.png", of_mask)

    pair("fine", (20, 30), RIGHT, (30, 20))
    pair("as stored", (20, 30), RIGHT, (20, 30))
    pair("half turned", (20, 30), 3, (20, 30))
    pair("unknown", (20, 30), 1, (20, 30))
    painter.save("train/masks/unknown.png", np.full((20, 30), 9, np.uint8))
    # of one line: the same value in another number of pixels; numbers of objects
    pair("unknown too", (20, 30), 1, (20, 30))
    painter.save("train/masks/unknown too.png", np.eye(20, 30, dtype=np.uint8) * 9)
    for name in "objects", "objects too":
        pair(name, (20, 30), 1, (20, 30))
        numbers = painter.noise.integers(0, 999, (20, 30), dtype=np.uint16)
        painter.save(f"train/masks/{name}.png", numbers)
    pair("broken mask", (20, 30), 1, (20, 30))
    (data / "train/masks/broken mask.png").write_bytes(b"text")
    pair("broken", (20, 30), 1, (20, 30))
    cut = (data / "train/images/0.png").read_bytes()[:300]
    (data / "train/images/broken.png").write_bytes(cut)
    painter.image("train/images/alone.png")
    painter.mask("val/masks/alone.png")
    painter.image("test/images/0.png")
    painter.save("test/masks/0.png", np.full((20, 30), 8, np.uint8))
    for kind in "images", "masks":
        painter.copy(f"train/{kind}/0.png", f"val/{kind}/leak.png")
        painter.copy(f"train/{kind}/1.png", f"train/{kind}/twice.png")
    painter.copy("train/images/2.png", "train/images/two masks.png")
    painter.mask("train/masks/two masks.png")
    painter.image("train/images/two tones.png")
    Image.new("1", (30, 20), 1).save(data / "train/masks/two tones.png")

    done = check(project, data)
    holds(
        done,
        data,
        ("error: train/masks/as stored.png: ", "EXIF"),
        (
            "error: train/masks/two tones.png: ",
            "black and white means 0 and 1, but other numbers",
        ),
        (
            "warning: train/images/half turned.png: ",
            "EXIF turns this image and 0 others",
        ),
        ("error: test/masks/0.png: ", "value 8 in 600 pixels is not a class; "),
        (
            "error: train/masks/unknown too.png: ",
            "value 9 in 20 pixels is not a class; correct the mask, or write into classes.txt: "
            "NAME = 9 or void = 9 (1 more masks likewise)",
        ),
        (
            "error: train/masks/objects too.png: ",
            "its edges may be smoothed, or its objects numbered (1 more masks likewise)",
        ),
        ("error: train/masks/broken mask.png: ", "cannot be read"),
        ("error: train/images/broken.png: ", "cannot be read"),
        ("error: train/images/alone.png: ", "no mask of that name"),
        ("error: val/masks/alone.png: ", "no image of that name"),
        ("error: val/images/leak.png: ", "train/images/0.png"),
        ("warning: train/images/twice.png: ", "train/images/1.png"),
        ("warning: train/images/two masks.png: ", "train/images/2.png"),
    )
    assert done.out.splitlines()[-1] == "12 errors, 3 warnings"


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
def test_names_that_never_match(project: Project, tmp_path: Path) -> None:
    """Each is named, also if nothing is left to be divided."""
    painter = Painter(tmp_path / "set")
    for number in range(3):
        painter.image(f"train/images/a{number}.png")
        painter.mask(f"train/masks/{number}1.png")
    painter.image("test/1.png")  # as Kaggle's, without masks
    done = check(project, tmp_path / "set")
    assert done.status == 1
    assert "warning: the test set is not read: " in done.out
    for number in range(3):
        assert f"images/a{number}.png: no mask of that name in " in done.out
        assert f"masks/{number}1.png: no image of that name in " in done.out


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
def test_values_of_validation_alone(project: Project, tmp_path: Path) -> None:
    """Without classes.txt the training masks say how many classes there are."""
    data = tmp_path / "set"
    painter = Painter(data)
    for part, top in ("train", 2), ("val", 4):
        for number in range(4):
            painter.image(f"{part}/images/{number}.png")
            painter.mask(f"{part}/masks/{number}.png", top=top)
    words = "masks of val have 2, 3, no training mask has"
    holds(check(project, data), data, (f"error: {data}: ", words))


def test_lists_that_contradict(tmp_path: Path) -> None:
    """Errors: groups in two parts, a file with two labels, and one picture with two labels."""
    for n, color in enumerate((0, 50, 100, 150, 150, 200)):
        Image.new("RGB", (8, 8), (color,) * 3).save(tmp_path / f"{n}.png")
    head = "file,label,group\n"
    rows = "0.png,a,p\n0.png,a,p\n1.png,b,q\n1.png,a,q\n3.png,a,r\n4.png,b,s\n"
    (tmp_path / "train.csv").write_text(f"{head}{rows}")
    (tmp_path / "val.csv").write_text(f"{head}2.png,a,p\n5.png,b,t\n")
    survey = Survey(tmp_path, has_masks=False)
    survey.read_all(DEFAULT_FORMAT, workers=0)
    errors = [line.partition(";")[0] for line in survey.errors]
    assert errors == [
        f"{tmp_path}: 1 groups are in the training set and in another part, so that scores count "
        "what was trained on: p",
        f"{tmp_path / '1.png'}: is listed twice, with two labels",
        f"{tmp_path / '4.png'}: the same image as {tmp_path / '3.png'}, with another label",
    ]
    # a row that comes twice counts twice
    twice = [tmp_path / "0.png", tmp_path / "1.png"]
    assert survey.warnings == [f"{path}: the same image as {path}" for path in twice]


def test_masks_that_say_nothing(tmp_path: Path) -> None:
    """Parts that are void everywhere, which training needs or not; numbers of objects."""
    painter = Painter(tmp_path)
    for part in "train", "val", "test":
        for number in range(1, 5):
            painter.image(f"{part}/images/{number}.png")
            values = np.arange(600, dtype=np.uint8).reshape(20, 30) % (number + 1)
            is_train = part == "train"
            mask = values if is_train else np.full_like(values, 255)
            painter.save(f"{part}/masks/{number}.png", mask)
    survey = Survey(tmp_path, True)
    survey.read_all(DEFAULT_FORMAT, 0)
    assert survey.errors == [f"{tmp_path}: the masks of val are void everywhere"]
    objects, void = survey.warnings
    assert "as if they numbered objects" in objects
    assert void == f"{tmp_path}: the masks of test are void everywhere"
    values[0] = 4
    values[1:] = 2
    painter.save("train/masks/4.png", values)
    survey = Survey(tmp_path, True)
    survey.read_all(DEFAULT_FORMAT, 0)
    assert survey.warnings == [void]


@pytest.mark.parametrize("project", both_but_one_in_soak, indirect=True)
def test_broken_ones_are_skipped(project: Project, few: Path, tmp_path: Path) -> None:
    """--skip-broken writes lists without them: the same set for training, in the same order."""
    data = shutil.copytree(few, tmp_path / "own")
    has_masks = project.task == "segmentation"
    find = folders.find_mask_pairs if has_masks else folders.find_labelled
    before = find(data)
    check(project, data, "--skip-broken").ok()
    assert not list(data.glob("*.csv"))  # nothing is broken
    broken = [before[0][3][0], before[0][9][0], before[1][1][0]]
    for path in map(Path, broken):
        path.write_bytes(path.read_bytes()[:300])
    done = check(project, data)
    # the only validation image of a class is broken
    lacking = 0 if has_masks else 1
    assert done.out.splitlines()[-1] == f"3 errors, {lacking} warnings"
    done = check(project, data, "--skip-broken").ok()
    assert done.out.count("\nwarning: left out: ") == 3
    assert done.out.splitlines()[-2] == f"0 errors, {3 + lacking} warnings"
    after = find(data)
    for number in 0, 1:
        kept = [each for each in before[number] if each[0] not in broken]
        assert after[number] == kept
    assert after[2:] == before[2:]
    check(project, data, "--skip-broken").ok()
    assert find(data) == after
    project.train(data, tmp_path / "run", on=2).ok()
    # rows are left out of a list that is there, with all its columns
    table = data / "train.csv"
    header, *rows = table.read_text().splitlines()
    noted = [f" {header} ,note", *(f"{row},x" for row in rows), "gone.png,a,b"]
    table.write_text("\n".join(noted), encoding="utf-8-sig")
    first = after[0][0][0]
    Path(first).write_bytes(b"text")
    done = check(project, data, "--skip-broken").ok()
    name = str(Path(first).relative_to(data))
    kept = [line for line in noted[:-1] if name not in line]
    kept[0] = f"{header},note"  # without the blanks
    assert table.read_text().splitlines() == kept
    assert "left out: " in done.out
    assert "gone.png does not exist" in done.out
    done = project.train(data, tmp_path / "run", "--epochs", 2, on=1).ok()
    assert "the training images have changed since the stop\n" in done.out


def test_what_no_list_can_say(tmp_path: Path) -> None:
    """It is refused, and nothing is written: the set would be another one."""

    def refused(*words: str) -> None:
        survey = Survey(tmp_path, has_masks=False)
        survey.read_all(DEFAULT_FORMAT, workers=0)
        sort_out_broken(survey, skip=True)
        assert all(word in survey.errors[0] for word in words)
        assert not (tmp_path / "train.csv").exists()

    painter = Painter(tmp_path)
    for name in "cat/1", "cat/2", "dog/1":
        painter.image(f"train/{name}.png")
    painter.image("val/cat/3.png")
    cut = tmp_path / "train/cat/1.png"
    whole = cut.read_bytes()
    cut.write_bytes(b"text")
    (tmp_path / "train/eel").mkdir()
    refused("first")
    (tmp_path / "train/eel").rmdir()
    for other in "val.csv", "training.csv":
        (tmp_path / other).touch()
        refused(other, "rename")
        (tmp_path / other).unlink()
    for other in "cat;dog", " cat":
        for part in "train", "val":
            (tmp_path / part / "cat").rename(tmp_path / part / other)
        refused(other, "rename")
        for part in "train", "val":
            (tmp_path / part / other).rename(tmp_path / part / "cat")
    cut.write_bytes(whole)
    (tmp_path / "train/dog/1.png").write_bytes(b"text")
    refused("class dog")
    painter.image("train/dog/1.png")
    (tmp_path / "val/cat/3.png").write_bytes(b"text")
    refused("all images of val")


class TestThePicture:
    """check.png."""

    @pytest.mark.parametrize("project", ["segmentation"], indirect=True)
    def test_of_masks(self, project: Project, tmp_path: Path) -> None:
        """Tinted in the user's colours, the image and what dataset.py makes of it."""
        painter = Painter(tmp_path / "set")
        for number in range(8):
            mask = np.zeros((64, 64), np.uint8)
            mask[20:40, 16:48] = 1
            painter.save(
                f"train/images/{number}.png", np.full((64, 64, 3), 90, np.uint8)
            )
            painter.save(f"train/masks/{number}_mask.png", mask)
        text = "ground = 0 0 0\nhole = 3 250 7\n"
        (tmp_path / "set/classes.txt").write_text(text)
        for path in (tmp_path / "set/train/masks").iterdir():
            mask = np.asarray(Image.open(path))
            Image.fromarray(mask[..., None] * np.uint8([3, 250, 7])).save(path)
        (tmp_path / "set/train/images/5.png").write_bytes(b"text")
        done = check(project, tmp_path / "set", "--image-size", 64)
        assert done.status == 1
        assert "set.png: 6 training images" in done.out
        drawn = np.asarray(Image.open(tmp_path / "set.png").convert("RGB")).astype(int)
        colors = np.array([3, 250, 7])
        is_tinted = np.abs(drawn - (0.6 * 90 + 0.4 * colors)).max(2) < 20
        assert 0.05 < is_tinted.mean() < 0.2
        assert (np.abs(drawn - colors).max(2) < 20).any()  # in the legend
        void = "of the training pixels are void and"
        assert void not in done.out
        large = ["--image-size", 256]
        assert check(project, tmp_path / "set", *large).out.count(void) == 1

    def test_flags(self, project: Project, data: Path, tmp_path: Path) -> None:
        """Those of main.py decide what is drawn; a wrong one is said before a file is read."""
        plain = tmp_path / "plain.png"
        black = tmp_path / "erased.png"
        for path, flags in (plain, []), (black, ["--augment", "erasing,vflip"]):
            given = [data, "--workers", 0, "--image-size", 32, "--picture", path]
            project.run(*given, *flags, script="ddpkit check", on=1).ok()
        first = np.asarray(Image.open(plain).convert("RGB"))
        second = np.asarray(Image.open(black).convert("RGB"))
        assert first.shape == second.shape
        assert (first != second).any()
        check(project, data, "--augmnt", "x").refused("flags.error", "--augmnt")


@both_tasks
def test_a_whole_set(project: Project, data: Path) -> None:
    """No finding; counts as numpy has them."""
    done = check(project, data).ok()
    next_one = (
        f"next: ./launch.sh --data {shlex.quote(str(data))} --output-dir runs/first"
    )
    assert f"0 errors, 0 warnings\n{next_one}\n" in done.out
    assert "train     53 images; " in done.out
    if project.task == "segmentation":
        files = (data / "train/masks").iterdir()
        masks = np.stack([np.asarray(Image.open(path)) for path in files])
        images = (masks == 1).any(axis=(1, 2)).sum()
        void = (masks == 255).any(axis=(1, 2)).sum()
        assert (
            f"{'crack':10}  {images:9} {100 * (masks == 1).mean():8.3g} %" in done.out
        )
        assert f"{'void':10}  {void:9} {100 * (masks == 255).mean():8.3g} %" in done.out
    else:
        count = len(list((data / "train/dots").iterdir()))
        assert f"dots     {count:9} {100 * count / 53:8.3g} %" in done.out


def test_parts_that_are_nearly_alike(tmp_path: Path) -> None:
    """Saved anew, at another size, or numbered on: a warning each, of the other part alone."""
    paint = Painter(tmp_path)
    for name in "012345":
        for place in f"train/{'ab'[int(name) % 2]}/", f"val/{'ab'[int(name) % 2]}/1":
            # coarse, as what photographs show
            noise = paint.noise.integers(0, 256, (8, 12, 3), dtype=np.uint8)
            shown = Image.fromarray(noise).resize((96, 64))
            paint.save(f"{place}{name}.png", np.asarray(shown))
    grey = np.full((40, 60, 3), 90, np.uint8)
    paint.save("train/a/flat.png", grey)
    paint.save("val/a/even.png", grey + 1)

    def warnings() -> list[str]:
        survey = Survey(tmp_path, has_masks=False)
        survey.read_all(DEFAULT_FORMAT, 0)
        assert not survey.errors
        return survey.warnings

    assert not warnings()
    first = Image.open(tmp_path / "train/a/0.png")
    first.save(tmp_path / "val/a/anew.jpg", quality=80)
    first.resize((150, 100)).save(tmp_path / "val/a/larger.png")
    (line,) = warnings()
    assert line.startswith("2 of 9 images look almost like training images")
    assert f"val/a/anew.jpg like {tmp_path}/train/a/0.png" in line
    for name in "train/b/p12_3", "val/b/p12_4", "val/b/p13_1":
        paint.image(f"{name}.png")
    line, names = sorted(warnings(), key=len, reverse=True)
    assert names.startswith("1 of 11 images are numbered like training images")
    assert "p12_4.png" in names


def test_names_of_a_word_and_a_number() -> None:
    """They are series if there are many more words than classes: cat_0 is that of a class."""

    def found(words: list[str], classes: int) -> list[str]:
        numbers = [
            [(f"d/{word}_{n}.png", torch.zeros(4)) for word in words] for n in (1, 3)
        ]
        return alike.find_alike(numbers[0], numbers[1][:1], classes)

    specimens = [f"{one}-{other}" for one in ("archer", "guard") for other in "abcdef"]
    (line,) = found(specimens, 3)
    assert line.startswith(
        "1 of 1 images are numbered like training images: d/archer-a_3.png"
    )
    assert not found(specimens, 4)
    assert not found(["cat", "dog"], 2)
    # of masks the number of classes is not known yet
    assert not found(["img"], 0)
    assert found(specimens, 0)


def test_classes_that_a_split_leaves_out(tmp_path: Path) -> None:
    """Of groups: an error for training, a warning for validation; and for what none can split."""

    def survey(groups: dict[str, str]) -> Survey:
        """groups: the classes of their images."""
        shutil.rmtree(tmp_path / "set", ignore_errors=True)
        paint = Painter(tmp_path / "set")
        rows = ["file,label,group"]
        for group, classes in groups.items():
            for number, name in enumerate(classes):
                paint.image(f"{group}{number}.png")
                rows.append(f"{group}{number}.png,{name},{group}")
        (tmp_path / "set/train.csv").write_text("\n".join(rows))
        found = Survey(tmp_path / "set", has_masks=False)
        found.read_all(DEFAULT_FORMAT, 0)
        sort_out_broken(found, skip=False)
        return found

    whole = {"p": "aaa", "q": "aaa", "r": "bbb", "s": "bbb"}
    assert not survey(whole).errors + survey(whole).warnings
    found = survey(whole | {"t": "ccc"})
    assert not found.errors
    words = "no validation images of c: their accuracy is not measured"
    assert found.warnings == [words]
    # of two groups of several classes the one that is held out
    first = min("xy", key=lambda name: zlib.crc32(name.encode()))
    other = "xy".replace(first, "")
    found = survey(whole | {first: "abc", other: "abb"})
    assert found.errors == [
        f"{tmp_path}/set: class c of val is not in the training set; add images of it, or choose "
        "those of val"
    ]
    found = survey({"x": "aaa", "y": "bbb", "z": "ccc"})
    (line,) = found.errors
    assert (
        "9 images for training are too few to split in whole groups; add more" in line
    )
    assert not found.warnings


@pytest.mark.parametrize(
    ("one", "other", "are_alike"),
    [
        ("p12_3", "p12_4", True),
        ("case1a_frame03", "case1a_frame17", True),
        ("p1_b2", "p1_b3", True),
        # numbers of base 16, whole ones and the last of several
        ("26a0", "26a1", False),
        ("1F3A0", "1F3A1", False),
        ("1f9d1-1f3a0", "1f9d1-1f3a7", False),
        ("img3", "img4", True),
    ],
)
def test_names_in_a_series(one: str, other: str, are_alike: bool) -> None:
    starts = [alike.series_of(f"/d1/{name}.tar.png") for name in (one, other)]
    assert starts == ["", ""]  # tar is no number
    starts = [alike.series_of(f"/d1/{name}.png") for name in (one, other)]
    assert (starts[0] == starts[1] != "") == are_alike


def test_transparent_images(tmp_path: Path) -> None:
    """What is transparent is white, in each kind of file; the rest is as it is."""
    noise = np.random.default_rng(0)
    pixels = noise.integers(0, 256, (20, 30, 4), dtype=np.uint8)
    pixels[10:, :, 3] = 255
    found = {}
    for alpha in 0, 128, 255:
        pixels[:10, :, 3] = alpha
        image = Image.fromarray(pixels)
        image.save(tmp_path / "rgba.png")
        image.save(tmp_path / "rgba.WEBP", lossless=True, exact=True)
        image.convert("LA").save(tmp_path / "la.png")
        for name in "rgba.png", "rgba.WEBP", "la.png":
            found[name, alpha] = np.asarray(open_image(str(tmp_path / name)))
    for (name, alpha), read in found.items():
        opaque = found[name, 255].astype(int)
        assert (read[10:] == opaque[10:]).all()
        wanted = (opaque[:10] * alpha + 255 * (255 - alpha)) / 255
        assert abs(read[:10] - wanted).max() <= 1
    hidden = Image.fromarray(pixels).quantize(50)
    hidden.info["transparency"] = 3
    hidden.save(tmp_path / "palette.png")
    clear = np.asarray(hidden) == 3
    assert clear.any()
    assert (np.asarray(open_image(str(tmp_path / "palette.png")))[clear] == 255).all()


def test_shares_of_several_labels(tmp_path: Path) -> None:
    """They are of the images, not of their labels."""
    paint = Painter(tmp_path)
    rows = {"0": "a;b", "1": "a;b;c", "2": "a", "3": "c", "4": ";"}
    for part in "train", "val":
        for name in rows:
            paint.image(f"{part}{name}.png")
        text = "".join(f"{part}{name}.png,{label}\n" for name, label in rows.items())
        (tmp_path / f"{part}.csv").write_text(f"file,label\n{text}")
    survey = Survey(tmp_path, has_masks=False)
    survey.read_all(DEFAULT_FORMAT, 0)
    _, _, head, *lines = survey.lines()
    assert head.endswith("% of images: train, val")
    assert [line.split()[:3] for line in lines] == [
        ["a", "3", "60"],
        ["b", "2", "40"],
        ["c", "2", "40"],
    ]


def test_small_images(capsys: pytest.CaptureFixture) -> None:
    """A smaller --image-size is named if training enlarges most images twice; which depends."""
    check_picture.say_small([200, 28, 64], 224)
    line = capsys.readouterr().out
    assert "most images are at most 64 pixels wide or high: from scratch" in line
    assert "--image-size 64, up to 12 times as fast as 224;" in line
    assert "with pretrained weights try 128 first" in line
    check_picture.say_small([200, 120, 30], 224)
    check_picture.say_small([], 0)
    assert not capsys.readouterr().out
