"""Images and folders as people have them: deep, huge, or named and laid out otherwise."""

import json
import os
import re
import shutil
import warnings
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from deep import save_png, save_tiff
from PIL import Image
from running import SAME_FOR_BOTH, Project, flags

from ddpkit.data import folders, images
from ddpkit.data.format import Format, read_format, write_format
from ddpkit.errors import UserError
from ddpkit.run import checkpoint

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
    @pytest.fixture(params=["grey.png", "grey.tif", "colour.tif"])
    def shorts(self, request: pytest.FixtureRequest, tmp_path: Path) -> list[tuple]:
        """Files of 16 bits with the values in them."""
        path, values = tmp_path / request.param, COLOURS if "grey" not in request.param else RAMP
        if request.param == "grey.png":
            Image.fromarray(RAMP).save(path)
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
            with pytest.raises(
                UserError,
                match=r"x.tif: int.* values of -100 to 155 .*; write .*value_r",
            ):
                read(path)

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            (RAMP // 17, "uint16 values of 0 to 3839 would be nearly black or white; write"),
            (COLOURS // 256, "uint16 values of 0 to 254 would be nearly black"),
            (RAMP / np.float32(2**20), "float values of 0 to 0.062.* would be nearly black"),
            (RAMP.astype(np.float32), "float values of 0 to 65263 would be nearly black or white"),
            (RAMP * np.float32("nan"), "NaN or infinite; replace them"),
        ],
    )
    def test_what_would_be_black(self, tmp_path: Path, values: np.ndarray, words: str) -> None:
        path = tmp_path / "x.tif"
        save_tiff(path, values)
        with pytest.raises(UserError, match=f"^{path}: .*{words}"):
            read(path)
        if "3839" in words:  # an explicit range is never too dark
            assert read(path, (0, 65535)).max() == 14
            assert read(path, (0, 4095)).max() == 239

    def test_black_images(self, tmp_path: Path) -> None:
        for number, kind in enumerate((np.uint16, np.float32)):
            save_tiff(tmp_path / f"{number}.tif", np.zeros((4, 5, 3 - 2 * number), kind))
            assert not read(tmp_path / f"{number}.tif").any()

    def test_kinds_of_16_bits(self, tmp_path: Path) -> None:
        """Channels that are compressed apart are read; PNGs of more than grey are refused."""
        save_tiff(tmp_path / "x", COLOURS, packed=True, planar=True)
        assert (read(tmp_path / "x") == steps(COLOURS, 0, 65536)).all()
        assert (read(tmp_path / "x", (0, 4095)) == steps(COLOURS, 0, 4095)).all()
        for values in COLOURS[..., :2], COLOURS:
            save_png(tmp_path / "y", values)
            with pytest.raises(UserError, match=r"y: cannot be read .a PNG of 16 bits that is not"):
                read(tmp_path / "y")

    def test_eight_bits_stay(self, tmp_path: Path) -> None:
        """A range is for images of more than 8 bits alone."""
        grey = Image.fromarray((RAMP >> 8).astype(np.uint8))
        for mode in ("1", "L", "LA", "P", "RGB", "RGBA"):
            image, path = grey.convert(mode), tmp_path / f"{mode}.PNG"
            image.save(path)
            assert (read(path, (0, 9)) == np.asarray(image.convert("RGB"))).all()

    @pytest.mark.parametrize("orientation", [3, 6, 8])
    def test_turned(self, tmp_path: Path, orientation: int) -> None:
        """TIFFs not compressed as well, which Pillow turns wrongly where it maps them."""
        values = RAMP.astype(np.uint8)
        exif, turns = Image.Exif(), {3: 2, 6: -1, 8: 1}
        exif[0x0112] = orientation
        Image.fromarray(values).save(tmp_path / "turned.tif", exif=exif)
        Image.fromarray(values).save(tmp_path / "plain.tif")
        expected = np.rot90(read(tmp_path / "plain.tif"), turns[orientation])
        assert np.array_equal(read(tmp_path / "turned.tif"), expected)
        Image.fromarray(RAMP).save(tmp_path / "deep.tif", exif=exif)
        with pytest.raises(UserError, match=r"deep.tif: cannot be read .turned"):
            read(tmp_path / "deep.tif")


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


@SAME_FOR_BOTH
def test_evaluated_as_it_was_trained(project: Project, own_data: Path, trained: Path) -> None:
    """Another mean would give other numbers."""
    (own_data / "data.json").write_text('{"mean": [0.1, 0.2, 0.3]}')
    words = ["--data", own_data, "--output-dir", trained, "--eval-only"]
    project.alone(*words).refused("best.pt was trained with mean None", "use the same data.json")


def test_a_checkpoint_keeps_the_range(project: Project, own_data: Path, tmp_path: Path) -> None:
    """Of 12 bits in 16: refused without; predicted and prepared as they were trained."""
    where = {"classification": "train/*", "segmentation": "train/images"}[project.task]
    paths = [path for path in sorted(own_data.glob(f"{where}/*")) if path.is_file()]
    for path in paths:
        grey = np.asarray(Image.open(path).convert("L")).astype(np.uint16) << 4
        Image.fromarray(grey).save(path.with_suffix(".tif"))
        path.unlink()
    out, store, said = tmp_path / "out", tmp_path / "store", own_data / "data.json"
    wanted = '"value_range": [BLACK, WHITE] into data.json'
    project.fork(*flags(own_data, out)).refused(".tif", "nearly black", wanted)
    said.write_text('{"value_range": [0, 4095]}')
    project.fork(*flags(own_data, out), draws=False).ok()
    more = ("--checkpoint", out / "best.pt", "--output", tmp_path / "p")
    project.alone(paths[0].with_suffix(".tif"), *more, script="predict.py").ok()
    if project.task == "segmentation":
        return  # what follows is the library's
    words = ("--data", own_data, "--output", store, "--workers", 0)
    project.alone(*words, script="ddpkit prepare").ok()
    assert json.loads((store / "data.json").read_text()) == {"value_range": [0, 4095]}
    project.alone(*flags(store, tmp_path / "two"), draws=False).ok()
    (store / "data.json").unlink()
    refused = project.alone(*flags(store, tmp_path / "two"))
    refused.refused("store/data.json is not what it was prepared with; prepare it anew")
    shutil.copy(said, store)
    said.write_text('{"value_range": [0, 8191]}')
    other = project.alone(*words, script="ddpkit prepare")
    other.refused("there already, and not made of", "name another folder")


class TestFormat:
    @pytest.mark.parametrize(
        "text, words",
        [
            ("{", "Expecting property name"),
            (b"\xff", "can't decode byte"),
            ("[5]", "no attribute"),
            ('{"chanels": 5}', "unexpected keyword argument 'chanels'"),
            ('{"channels": "5"}', "str"),
            ('{"channels": -1}', "a wrong number or order of numbers"),
            ('{"max_megapixels": "5"}', "number"),
            ('{"value_range": 5}', "int"),
            ('{"value_range": [5, 5]}', "a wrong number or order of numbers"),
            ('{"value_range": [0, Infinity]}', "a wrong number or order of numbers"),
            ('{"mean": []}', "a wrong number or order of numbers"),
            ('{"mean": [1, "2", 3]}', "number"),
            ('{"std": [1, 0, 1]}', "a wrong number or order of numbers"),
            ('{"channels": 4, "mean": [1, 1, 1]}', "a wrong number or order of numbers"),
        ],
    )
    def test_mistakes(self, tmp_path: Path, text: str | bytes, words: str) -> None:
        path = tmp_path / "data.json"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(UserError, match=f"^{re.escape(str(path))}: not JSON such as ") as error:
            read_format(tmp_path)
        assert words in str(error.value)
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
        """What was meant as an image is named once; what usually lies beside images is not."""
        names = ["a.JPG", "b.jfif", "c.jpe", "d.Tiff", "1.heic", "2.HEIC", "3.npy"]
        quiet = ["4", ".hidden.gif", "Thumbs.db", "desktop.ini", "n.txt", "n.json", "n.xml"]
        for name in names + quiet:
            (tmp_path / name).touch()
        folders.say_skipped.cache_clear()
        found = folders.list_images(tmp_path)
        assert [os.path.basename(path) for path in found] == names[:4]
        assert folders.list_images(tmp_path) == found
        assert capsys.readouterr().out == "".join(
            f"skipped, because their type is not read: {kind}\n" for kind in (".heic", ".npy")
        )
        for path in [*found, tmp_path / "3.npy"]:  # which is an image where there are no others
            os.remove(path)
        with pytest.raises(UserError, match=r"no images in it; expected \.bmp"):
            folders.list_images(tmp_path)

    def test_the_split_stays(self) -> None:
        listed = [(f"/d/train/images/{number:02d}.jpg", 0) for number in range(20)]
        held_out = folders.split(listed, Path("/d"))[1]
        assert [path[-6:-4] for path, _ in held_out] == ["02", "03", "17"]

    def test_classes_in_another_order(self) -> None:
        words = r"a.pt .* in another order"
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
    assert said == [f"no {own_data}/val: {len(parts[1])} of 53 images used for validation"]


def test_without_train(project: Project, own_data: Path) -> None:
    """The folders in DIR are split as those in DIR/train would be; a mistyped DIR is refused."""
    for path in (own_data / "train").iterdir():
        shutil.move(path, own_data)
    shutil.rmtree(own_data / "train")
    if project.task == "classification":
        line = project.call("data.refusal", own_data)
        assert f"{own_data}/train: no such folder" in line
    shutil.rmtree(own_data / "val")
    (train, val), said = found(project, own_data)
    assert len(val) == {"classification": 6, "segmentation": 8}[project.task]
    assert len({*train, *val}) == len(train) + len(val) == 53
    assert said[0].startswith(f"no {own_data}/train: ")
    assert said[1:] == [f"no {own_data}/val: {len(val)} of 53 images used for validation"]
    for mistyped in (own_data.parent, own_data / "none", next(own_data.glob("[di]*"))):
        line = project.call("data.refusal", mistyped).lower()
        assert line.startswith(str(mistyped).lower())
        assert "no such f" in line


@SAME_FOR_BOTH
def test_class_folders(project: Project, own_data: Path) -> None:
    """Numbers sort as numbers; images beside the folders are left out; val may lack a class."""
    numbers = iter(("10", "2", "0", "1", *map(str, range(11, 99))))
    for path in sorted((own_data / "train").iterdir()):
        number = next(numbers)
        path.rename(path.with_name(number))
        (own_data / "val" / path.name).rename(own_data / "val" / number)
    classes = project.call("data.found", own_data).split()[2:]
    assert classes == sorted(classes, key=int) != sorted(classes)
    shutil.copy(next((own_data / "train" / "2").iterdir()), own_data / "train" / "loose, é.JPG")
    assert [len(part) for part in found(project, own_data)[0]] == [53, 23]
    shutil.rmtree(own_data / "val" / "2")
    assert project.call("data.found", own_data).split()[2:] == classes


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
def test_names_of_masks(project: Project, own_data: Path) -> None:
    """With accents and commas, linked; classes.txt as Windows writes it."""
    for kind, ending in ("images", ".jpg"), ("masks", ".png"):
        folder, name = own_data / "train" / kind, f"é, 1{ending}"
        (folder / f"0002{ending}").rename(own_data / name)
        (folder / name).symlink_to(own_data / name)
    (own_data / "classes.txt").write_bytes("\ufeffground\r\nfissüre\r\n".encode())
    assert project.call("data.found", own_data) == "53 23 ground fissüre"


def test_what_is_skipped(project: Project, own_data: Path) -> None:
    """One line each for all folders."""
    folder = {"classification": "dots", "segmentation": "images"}[project.task]
    for name in ("a.heic", "b.HEIC", "c.gif", "Thumbs.db"):
        for part in ("train", "val"):
            (own_data / part / folder / name).touch()
    lines = [f"skipped, because their type is not read: {kind}" for kind in (".gif", ".heic")]
    assert found(project, own_data)[1] == lines
