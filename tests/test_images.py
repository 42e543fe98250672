"""Images and folders as people have them: deep, huge, or named and laid out otherwise."""

import json
import os
import re
import shutil
import unicodedata
import warnings
from collections import Counter
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from deep import save_png, save_tiff
from PIL import Image
from running import SAME_FOR_BOTH, Project, flags

from engine.data import images, listing
from engine.data.format import Format, read_format, write_format
from engine.errors import UserError
from engine.run import checkpoint

RAMP = (np.arange(40 * 96).reshape(40, 96) * 17).astype(np.uint16)  # 0 to 65263
COLOURS = np.stack([RAMP, RAMP // 2, RAMP // 3], axis=-1)
LATER = [(order, packed) for order in "<>" for packed in (False, True)]


def read(path: Path, value_range: tuple[float, float] | None = None) -> np.ndarray:
    """The pixels, uint8 (H, W, 3)."""
    return images.open_image(str(path), Format(value_range)).read().movedim(0, -1).numpy()


def steps(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Grey levels: 256 steps of equal width."""
    values = values if values.ndim == 3 else np.stack([values] * 3, axis=-1)
    return ((values.astype(float) - low) * 256 / (high - low)).clip(0, 255).astype(np.uint8)


class TestDepth:
    @pytest.fixture(params=["grey.png", "colour.png", "alpha.png", "grey.tif", "colour.tif"])
    def shorts(self, request: pytest.FixtureRequest, tmp_path: Path) -> list[tuple]:
        """Files of 16 bits with the values in them."""
        path, values = tmp_path / request.param, COLOURS if "grey" not in request.param else RAMP
        if request.param == "grey.png":
            Image.fromarray(RAMP).save(path)
        elif path.suffix == ".png":
            alpha = [RAMP[..., None]] if "alpha" in request.param else []
            save_png(path, np.concatenate([values, *alpha], axis=-1))
        else:
            paths = [tmp_path / f"{n}.tif" for n in range(5)]
            for each, (order, packed) in zip(paths, LATER, strict=False):
                save_tiff(each, values, order, packed)
            save_tiff(paths[4], values, planar=values.ndim == 3)
            return [(each, values) for each in paths]
        return [(path, values)]

    def test_shorts(self, shorts: list[tuple]) -> None:
        """0 to 65535 becomes 0 to 255, the upper byte; or what is given, clipped."""
        for path, values in shorts:
            assert (read(path) == steps(values, 0, 65536)).all()
            assert (read(path, (0, 65535)) == read(path)).all()
            assert (read(path, (100, 30000)) == steps(values, 100, 30000)).all()

    @pytest.mark.parametrize(("order", "packed"), LATER)
    def test_floats_and_integers(self, tmp_path: Path, order: str, packed: bool) -> None:
        path = tmp_path / "x.tif"
        grey = np.arange(256).reshape(16, 16)
        save_tiff(path, (grey / 255).astype(np.float32), order, packed)
        assert (read(path)[..., 0] == grey).all()
        for kind in np.int16, np.int32:
            save_tiff(path, (grey - 100).astype(kind), order, packed)
            assert (read(path, (-100, 155)) == steps(grey, 0, 255)).all()
            with pytest.raises(UserError, match=r"x.tif: .*; write .*: .-100, 155. into data.json"):
                read(path)

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            (
                RAMP // 17,
                "16-bit values that reach only 3839 .*black; .*: .0, 4095. into data",
            ),
            (COLOURS // 256, "16-bit values that reach only 254 .*write .*: .0, 255. into .*, or"),
            (RAMP / np.float32(2**20), "floats that reach only 0.0622.*: .0, 0.062. into data"),
            (RAMP.astype(np.float32), "floats that range over 0,65263, .*: .0, 65263. into data"),
            (RAMP * np.float32("nan"), "NaN or infinite; replace them"),
        ],
    )
    def test_what_would_be_black(self, tmp_path: Path, values: np.ndarray, words: str) -> None:
        path = tmp_path / "x.tif"
        save_tiff(path, values)
        with pytest.raises(UserError, match=f"^{path}: .*{words}"):
            read(path)
        if "black" in words:  # an explicit range is never too dark
            assert read(path, (0, 65535)).max() == 14
            assert read(path, (0, 4095)).max() == 239

    def test_black_images(self, tmp_path: Path) -> None:
        for number, kind in enumerate((np.uint16, np.float32)):
            save_tiff(tmp_path / f"{number}.tif", np.zeros((4, 5, 3 - 2 * number), kind))
            assert not read(tmp_path / f"{number}.tif").any()

    def test_upper_bytes_alone(self, tmp_path: Path) -> None:
        """Of grey with alpha, and of channels that are compressed apart, Pillow reads no more."""
        save_png(tmp_path / "0", COLOURS[..., :2])
        save_tiff(tmp_path / "1", COLOURS, packed=True, planar=True)
        for name, values in ("0", RAMP), ("1", COLOURS):
            assert (read(tmp_path / name) == steps(values, 0, 65536)).all()
            with pytest.raises(UserError, match=f"{name}: only the upper 8 of its 16 bits"):
                read(tmp_path / name, (0, 4095))

    def test_eight_bits_stay(self, tmp_path: Path) -> None:
        """A range is for images of more than 8 bits alone."""
        grey = Image.fromarray((RAMP >> 8).astype(np.uint8))
        for mode in ("1", "L", "LA", "P", "RGB", "RGBA"):
            image, path = grey.convert(mode), tmp_path / f"{mode}.PNG"
            image.save(path)
            assert (read(path, (0, 9)) == np.asarray(image.convert("RGB"))).all()

    @pytest.mark.parametrize("orientation", [3, 6, 8])
    @pytest.mark.parametrize("values", [RAMP, RAMP.astype(np.uint8), RAMP / np.float32(65536)])
    def test_turned(self, tmp_path: Path, values: np.ndarray, orientation: int) -> None:
        """TIFFs not compressed as well, which Pillow turns wrongly where it maps them."""
        exif, turns = Image.Exif(), {3: 2, 6: -1, 8: 1}
        exif[0x0112] = orientation
        Image.fromarray(values).save(tmp_path / "turned.tif", exif=exif)
        Image.fromarray(values).save(tmp_path / "plain.tif")
        expected = np.rot90(read(tmp_path / "plain.tif"), turns[orientation])
        assert np.array_equal(read(tmp_path / "turned.tif"), expected)

    def test_what_is_said(self, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        path = str(tmp_path / "x.png")
        Image.fromarray(RAMP).save(path)
        images.say_depth(path, Format())
        images.say_depth(path, Format((0, 4095)))
        Image.fromarray((RAMP >> 8).astype(np.uint8)).save(path)
        images.say_depth(path, Format())
        assert capsys.readouterr().out == (
            f"{path}: 16-bit values, 0 to 65535 becomes 0 to 255\n"
            f"{path}: 16-bit values, 0 to 4095 becomes 0 to 255\n"
        )


def complaint(path: str, megapixels: int) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            images.open_image(path, Format(max_megapixels=megapixels))
    except UserError as error:
        return str(error)
    return "read"


class TestMegapixels:
    def test_limits(self, tmp_path: Path) -> None:
        """Beyond and below those of Pillow, without its warnings, in processes of each kind."""
        path = str(tmp_path / "x.bmp")  # 20000 x 10000 as it says, and nothing else
        Image.new("L", (4, 4)).save(path)
        with open(path, "r+b") as file:
            file.seek(18)
            file.write((20000).to_bytes(4, "little") + (10000).to_bytes(4, "little"))
        limit = "20000 x 10000 pixels are more than max_megapixels, {0}; .*.max_megapixels.: 200"
        assert re.search(f"^{path}: {limit.format(179)}", complaint(path, 179))
        assert re.search("truncated|not enough|buffer", complaint(path, 200))
        with get_context("spawn").Pool(1) as pool:
            assert pool.apply(complaint, (path, 200)) == complaint(path, 200)

    def test_small_limits(self, tmp_path: Path) -> None:
        for name in ("x.jpg", "x.png"):
            Image.new("RGB", (1001, 1000)).save(tmp_path / name)
            assert "1001 x 1000" in complaint(str(tmp_path / name), 1)
            assert complaint(str(tmp_path / name), 2) == "read"

    def test_runs(self, project: Project, own_data: Path, trained: Path, tmp_path: Path) -> None:
        """In training by a worker, masks too; predict.py takes what a folder of images allows."""
        folder = {"classification": "train/dots", "segmentation": "train/masks"}[project.task]
        large = min((own_data / folder).iterdir())
        Image.new("L", (1001, 1000), 1).save(large, large.suffix.replace(".jpg", ".jpeg")[1:])
        words = (large.name, "1001 x 1000", 'more than max_megapixels, 1; shrink it, or write "')
        (own_data / "data.json").write_text('{"max_megapixels": 1}')
        project.fork(*flags(own_data, tmp_path / "out", "--workers", 1)).refused(*words)
        state = torch.load(trained / "best.pt", weights_only=True)
        state["format"]["max_megapixels"] = 1
        torch.save(state, tmp_path / "small.pt")
        more = ("--checkpoint", tmp_path / "small.pt", "--output", tmp_path / "p")
        (large.parent / "data.json").write_text('{"max_megapixels": 1}')
        project.alone(large, *more, script="predict.py").refused(*words)
        (large.parent / "data.json").write_text('{"max_megapixels": 2}')
        project.alone(large, *more, script="predict.py").ok()


def test_a_checkpoint_keeps_the_range(project: Project, own_data: Path, tmp_path: Path) -> None:
    """Of 12 bits in 16: refused without; predicted and prepared as they were trained."""
    where = {"classification": "train/*", "segmentation": "train/images"}[project.task]
    paths = [path for path in sorted(own_data.glob(f"{where}/*")) if path.is_file()]
    for path in paths:
        grey = np.asarray(Image.open(path).convert("L")).astype(np.uint16) << 4
        Image.fromarray(grey).save(path.with_suffix(".tif"))
        path.unlink()
    out, store, said = tmp_path / "out", tmp_path / "store", own_data / "data.json"
    wanted = '"value_range": [0, 4095] into data.json'
    project.fork(*flags(own_data, out)).refused(".tif", "nearly black", wanted)
    words = [own_data, "--write", "--output", tmp_path, "--workers", 0]
    assert project.alone(*words, script="check_data.py").status == 1
    low, high = json.loads(said.read_text())["value_range"]
    assert 0 <= low < 300 < 3800 < high <= 4080
    said.write_text('{"value_range": [0, 4095]}')
    done = project.fork(*flags(own_data, out), draws=False).ok()
    assert "16-bit values, 0 to 4095 becomes 0 to 255" in done.out
    more = ("--checkpoint", out / "best.pt", "--output", tmp_path / "p")
    project.alone(paths[0].with_suffix(".tif"), *more, script="predict.py").ok()
    if project.task == "segmentation":
        return  # what follows is the engine's
    words = ("--data", own_data, "--output", store, "--workers", 0)
    project.alone(*words, script="prepare_data.py").ok()
    assert json.loads((store / "data.json").read_text()) == {"value_range": [0, 4095]}
    project.alone(*flags(store, tmp_path / "two"), draws=False).ok()
    (store / "data.json").unlink()
    refused = project.alone(*flags(store, tmp_path / "two"))
    refused.refused("store/data.json: no value_range, but prepared with value_range [0, 4095]")
    said.write_text('{"value_range": [0, 4095], "mean": [0.1, 0.2, 0.3]}')  # needs no new pixels
    project.alone(*flags(store, tmp_path / "two")).refused("data.json")
    done = project.alone(*words, script="prepare_data.py").ok()
    assert "prepared already" in done.out
    project.alone(*flags(store, tmp_path / "three"), draws=False).ok()
    said.write_text('{"value_range": [0, 4095]}')
    project.alone(*flags(store, tmp_path / "two")).refused(f"{said} differs from {store}")
    said.write_text('{"value_range": [0, 8191]}')
    other = project.alone(*words, script="prepare_data.py")
    other.refused("made from", "value_range [0, 4095]; name another folder")


class TestFormat:
    @pytest.mark.parametrize(
        "text, words",
        [
            ("{", r"data.json: not JSON \(.*\); correct it, or remove it"),
            (b"\xff", "data.json: not JSON"),
            ("[5]", "not a JSON object; expected such as"),
            ('{"chanels": 5}', 'unknown key "chanels"; the keys are value_range, max_megapixels, '),
            ('{"channels": "5"}', '"channels": "5": expected an integer of 1 or more'),
            ('{"channels": true}', '"channels": true: expected an integer'),
            ('{"channels": 0}', '"channels": 0: expected an integer'),
            ('{"max_megapixels": 1.5}', '"max_megapixels": 1.5: expected an integer'),
            ('{"value_range": 5}', r'"value_range": 5: expected \[LOW, HIGH\]'),
            ('{"value_range": [5, 5]}', r"\[5, 5\]: expected .* LOW < HIGH"),
            ('{"value_range": [0, Infinity]}', r"\[0, Infinity\]: expected"),
            ('{"mean": []}', r'"mean": \[\]: expected a list of numbers'),
            ('{"mean": [1, "2", 3]}', "expected a list of numbers"),
            ('{"std": [1, 0, 1]}', "expected a list of numbers above 0"),
            ('{"std": [1, 1]}', '"std": 2 numbers for 3 channels'),
            ('{"channels": 4, "mean": [1, 1, 1]}', '"mean": 3 numbers for 4 channels'),
        ],
    )
    def test_mistakes(self, tmp_path: Path, text: str | bytes, words: str) -> None:
        path = tmp_path / "data.json"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(UserError, match=f"^{re.escape(str(path))}: .*") as error:
            read_format(tmp_path)
        assert re.search(words, str(error.value))
        assert "\n" not in str(error.value)

    def test_what_is_written_is_read(self, tmp_path: Path) -> None:
        assert read_format(tmp_path) == read_format(tmp_path / "none") == Format()
        full = Format((-1.5, 3000), 2, 4, (0.1, 0.2, 0.3, 0.4), (1, 2, 3, 4))
        for format in full, Format(channels=5), Format(mean=(0.1, 0.2, 0.3)):
            write_format(tmp_path, format)
            assert read_format(tmp_path) == format
        write_format(tmp_path, Format())
        assert not list(tmp_path.iterdir())


class TestListing:
    def test_endings(self, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        """What was meant as an image is counted; what usually lies beside images is not."""
        names = ["a.JPG", "b.jfif", "c.jpe", "d.Tiff", "1.heic", "2.HEIC", "3.npy", "4"]
        quiet = [".hidden.gif", "Thumbs.db", "desktop.ini", "n.txt", "n.json", "n.xml", "n.csv"]
        for name in names + quiet:
            (tmp_path / name).touch()
        skipped = Counter[str]()
        found = listing.list_images(tmp_path, skipped)
        assert [os.path.basename(path) for path in found] == names[:4]
        listing.say_skipped(skipped)
        listing.say_skipped(Counter())
        assert capsys.readouterr().out == (
            "skipped, because their type is not read: 2 .heic, 1 .npy, 1 without ending; "
            "convert them to JPEG or PNG\n"
        )
        for path in [*found, tmp_path / "3.npy"]:  # which is an image where there are no others
            os.remove(path)
        with pytest.raises(UserError, match=r"no images in it but 2 \.heic, .*; expected \.bmp"):
            listing.list_images(tmp_path)

    def test_the_split_stays(self) -> None:
        paths = [f"/d/train/images/{number:02d}.jpg" for number in range(20)]
        held_out = listing.split(paths, Path("/d"))[1]
        assert [path[-6:-4] for path in held_out] == ["02", "03", "17"]

    def test_classes_in_another_order(self) -> None:
        words = r"a.pt .* in another order \(class 1 is 10 there, 2 in the data\)"
        with pytest.raises(UserError, match=words):
            checkpoint.check_classes("a.pt", ["0", "10", "2"], ["0", "2", "10"])
        checkpoint.check_classes("a.pt", ["0", "2"], ["0", "2"])


def found(project: Project, folder: Path) -> tuple[list[list[str]], list[str]]:
    """The files of training and validation, and what is said."""
    result = project.call("data.parts", folder)
    lines = result["said"].splitlines()
    return result["parts"], [line for line in lines if not line.startswith("classes")]


@pytest.mark.parametrize("name", ["valid", "validation"])
def test_names_of_val(project: Project, own_data: Path, name: str) -> None:
    (train, val), _ = found(project, own_data)
    (own_data / "val").rename(own_data / name)
    (train_now, val_now), said = found(project, own_data)
    assert train_now == train
    assert val_now == [path.replace("val/", f"{name}/", 1) for path in val]
    assert said == [f"no {own_data}/val: {own_data}/{name} is used for validation"]


def test_test_is_not_val(project: Project, own_data: Path) -> None:
    (own_data / "val").rename(own_data / "test")
    parts, said = found(project, own_data)
    used = f"{len(parts[1])} of 53 images used for validation"
    assert said == [f"no {own_data}/val: {used}; {own_data}/test is not used"]


def test_without_train(project: Project, own_data: Path) -> None:
    """The folders in DIR are split as those in DIR/train would be; a mistyped DIR is refused."""
    for path in (own_data / "train").iterdir():
        shutil.move(path, own_data)
    shutil.rmtree(own_data / "train")
    if project.task == "classification":
        line = project.call("data.refusal", own_data)
        assert f"expected {own_data}/train/<class>/* or {own_data}/<class>/*, but" in line
        assert line.endswith(f"{own_data}/val cannot be classes")
    shutil.rmtree(own_data / "val")
    if project.task == "classification":
        Image.new("L", (9, 9)).save(own_data / "loose.png")
    (train, val), said = found(project, own_data)
    if project.task == "classification":
        assert said.pop(1) == f"{own_data}: 1 image(s) beside the class folders are not used"
    assert len(val) == {"classification": 6, "segmentation": 8}[project.task]
    assert len({*train, *val}) == len(train) + len(val) == 53
    assert said[0].startswith(f"no {own_data}/train: ")
    assert said[1:] == [f"no {own_data}/val: {len(val)} of 53 images used for validation"]
    for mistyped in (own_data.parent, own_data / "none", next(own_data.glob("[di]*"))):
        assert f"{mistyped}/train: no such folder" in project.call("data.refusal", mistyped)


@SAME_FOR_BOTH
def test_class_folders(project: Project, own_data: Path) -> None:
    """Numbers sort as numbers; names in either form of Unicode match; loose images are said."""
    numbers = iter(("10", "2", "0", "1", *map(str, range(11, 99))))
    for path in sorted((own_data / "train").iterdir()):
        number = next(numbers)
        path.rename(path.with_name(number))
        (own_data / "val" / path.name).rename(own_data / "val" / number)
    classes = project.call("data.found", own_data).split()[2:]
    assert classes == sorted(classes, key=int) != sorted(classes)
    shutil.copy(next((own_data / "train" / "2").iterdir()), own_data / "train" / "loose, é.JPG")
    parts, said = found(project, own_data)
    assert [len(part) for part in parts] == [53, 23]
    assert said == [f"{own_data}/train: 1 image(s) beside the class folders are not used"]
    (own_data / "train" / "2").rename(own_data / "train" / unicodedata.normalize("NFD", "é"))
    (own_data / "val" / "2").rename(own_data / "val" / "é")
    assert "é" in project.call("data.found", own_data).split()[2:]
    assert [len(part) for part in found(project, own_data)[0]] == [53, 23]


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
def test_names_of_masks(project: Project, own_data: Path) -> None:
    """In either form of Unicode, with commas, linked; classes.txt as Windows writes it."""
    for kind, form, ending in ("images", "NFC", ".jpg"), ("masks", "NFD", ".png"):
        folder = own_data / "train" / kind
        name = unicodedata.normalize(form, "é, 1") + ending
        (folder / f"0002{ending}").rename(own_data / name)
        (folder / name).symlink_to(own_data / name)
    (own_data / "classes.txt").write_bytes("\ufeffground\r\nfissüre\r\n".encode())
    assert project.call("data.found", own_data) == "53 23 ground fissüre"


def test_what_is_skipped(project: Project, own_data: Path) -> None:
    """One line for all folders."""
    folder = {"classification": "dots", "segmentation": "images"}[project.task]
    for name in ("a.heic", "b.HEIC", "c.gif", "Thumbs.db"):
        for part in ("train", "val"):
            (own_data / part / folder / name).touch()
    line = "skipped, because their type is not read: 4 .heic, 2 .gif; convert them to JPEG or PNG"
    assert found(project, own_data)[1] == [line]
