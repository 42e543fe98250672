"""Images as people have them: deep, turned, huge, broken, in parts; data.json."""

import errno
import os
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import tifffile
import torch
from generated import refusal
from PIL import Image
from torchvision.transforms.v2 import functional as F

from ddpkit import files
from ddpkit.data import images
from ddpkit.data.format import Format, read_format
from ddpkit.errors import DiskError, UserError

RAMP = (np.arange(40 * 96).reshape(40, 96) * 17).astype(np.uint16)  # 0 to 65263
COLOURS = np.stack([RAMP, RAMP // 2, RAMP // 3], axis=-1)


def read(path: Path, value_range: tuple[float, float] | None = None) -> np.ndarray:
    """The pixels, uint8 (H, W, 3)."""
    return images.open_image(str(path), Format(value_range)).read().movedim(0, -1).numpy()


def steps(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Grey levels: 256 steps of equal width."""
    values = values if values.ndim == 3 else np.stack([values] * 3, axis=-1)
    return ((values.astype(float) - low) * 256 / (high - low)).clip(0, 255).astype(np.uint8)


class TestDepth:
    def test_16_bits(self, tmp_path: Path) -> None:
        """0 to 65535 becomes 0 to 255, the upper byte; or what is given, clipped."""
        grey, tiff, colours = (tmp_path / name for name in ("grey.png", "grey.tif", "colours.tif"))
        Image.fromarray(RAMP).save(grey)
        tifffile.imwrite(tiff, RAMP, byteorder=">")
        tifffile.imwrite(colours, COLOURS, photometric="rgb", compression="zlib")
        for path, values in (grey, RAMP), (tiff, RAMP), (colours, COLOURS):
            assert (read(path) == steps(values, 0, 65536)).all()
            assert (read(path, (0, 65535)) == read(path)).all()
            assert (read(path, (100, 30000)) == steps(values, 100, 30000)).all()

    def test_colours_of_16_bits(self, tmp_path: Path) -> None:
        """Of PNGs, which Pillow would read as 8 bits; it does not write them."""
        path = tmp_path / "colours.png"
        Image.new("RGB", (4, 4)).save(path)
        content = bytearray(path.read_bytes())
        content[24] = 16
        content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
        path.write_bytes(content)
        with refusal("images.reading", path, "PNG of 16 bits that is not"):
            read(path)

    def test_floats_and_integers(self, tmp_path: Path) -> None:
        path = tmp_path / "x.tif"
        grey = np.arange(256).reshape(16, 16)
        tifffile.imwrite(path, (grey / 255).astype(np.float32))
        assert (read(path)[..., 0] == grey).all()
        tifffile.imwrite(path, (grey - 100).astype(np.int16))
        assert (read(path, (-100, 155)) == steps(grey, 0, 255)).all()
        with refusal("images.ends", path, "values of -100 to 155", "value_range"):
            read(path)

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            (RAMP // 17, "uint16 values of 0 to 3839"),
            (RAMP.astype(np.float32), "float values of 0 to 65263"),
            (RAMP * np.float32("nan"), "NaN or infinite"),
        ],
    )
    def test_what_would_be_black(self, tmp_path: Path, values: np.ndarray, words: str) -> None:
        path = tmp_path / "x.tif"
        tifffile.imwrite(path, values)
        with refusal("images.ends", path, words):
            read(path)
        if "3839" in words:  # an explicit range is never too dark, nor is a black image
            assert read(path, (0, 65535)).max() == 14
            tifffile.imwrite(path, values * 0)
            assert not read(path).any()

    def test_eight_bits_stay(self, tmp_path: Path) -> None:
        """A range is for images of more than 8 bits alone."""
        grey = Image.fromarray((RAMP >> 8).astype(np.uint8))
        for mode in ("1", "L", "LA", "P", "RGB", "RGBA"):
            image, path = grey.convert(mode), tmp_path / f"{mode}.PNG"
            image.save(path)
            assert (read(path, (0, 9)) == np.asarray(image.convert("RGB"))).all()

    def test_turned(self, tmp_path: Path) -> None:
        """TIFFs not compressed as well, which Pillow turns wrongly where it maps them."""
        values, exif = RAMP.astype(np.uint8), Image.Exif()
        exif[0x0112] = 6
        Image.fromarray(values).save(tmp_path / "turned.tif", exif=exif)
        Image.fromarray(values).save(tmp_path / "plain.tif")
        expected = np.rot90(read(tmp_path / "plain.tif"), -1)
        assert np.array_equal(read(tmp_path / "turned.tif"), expected)
        Image.fromarray(RAMP).save(tmp_path / "deep.tif", exif=exif)
        with refusal("images.reading", "deep.tif", "turned"):
            read(tmp_path / "deep.tif")


def test_megapixels(tmp_path: Path) -> None:
    """Beyond the limits of Pillow, without its warnings."""
    path = tmp_path / "x.bmp"  # 20000 x 10000 as it says, and nothing else
    Image.new("L", (4, 4)).save(path)
    content = bytearray(path.read_bytes())
    content[18:26] = (20000).to_bytes(4, "little") + (10000).to_bytes(4, "little")
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with refusal("format.check_size", path, "20000 x 10000", '"max_megapixels": 200'):
            images.open_image(str(path), Format(max_megapixels=179))
        with refusal("images.reading", path):  # read at last: it is cut off
            images.open_image(str(path), Format(max_megapixels=200)).read()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{", "Expecting property name"),
        (b'{"chanels": 5}', "'chanels'"),
        (b'{"value_range": [5, 5]}', "order of numbers"),
        (b'{"std": [1, 0, 1]}', "wrong number"),
        (b'{"channels": 4, "mean": [1, 1, 1]}', "wrong number"),
    ],
)
def test_mistakes_in_data_json(tmp_path: Path, text: bytes, words: str) -> None:
    (tmp_path / "data.json").write_bytes(text)
    with refusal("format.read_format", tmp_path / "data.json", words):
        read_format(tmp_path)


def save_jpeg(path: Path, mode: str = "RGB", size: tuple[int, int] = (50, 37), **how) -> str:
    pixels = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(path, "JPEG", **how)
    return str(path)


class TestJpeg:
    def test_sizes(self, tmp_path: Path) -> None:
        """Those that are upright, in RGB or grey, can be decoded at reduced size."""
        kinds = (("RGB", 1, True), ("L", 1, True), ("CMYK", 1, False), ("RGB", 6, False))
        for mode, orientation, shrinks in kinds:
            exif = Image.Exif()
            exif[0x112] = orientation
            image = images.open_image(save_jpeg(tmp_path / "x", mode, exif=exif))
            size = (37, 50) if orientation == 1 else (50, 37)
            assert (image.height, image.width, bool(image.shrinks)) == (*size, shrinks)

    @pytest.mark.parametrize("library", [simplejpeg, None])
    def test_broken(self, tmp_path: Path, library: object, monkeypatch: pytest.MonkeyPatch) -> None:
        """A missing end is an error, whichever part is asked for and whoever decodes it."""
        monkeypatch.setattr(images, "simplejpeg", library)
        path = Path(save_jpeg(tmp_path / "x.jpg", size=(200, 160)))
        data = path.read_bytes()
        for end in (data.index(b"\xff\xda") + 100, len(data) // 2, len(data) - 2):
            path.write_bytes(data[:end])
            for size in None, (20, 20):
                with refusal("images.reading", path):
                    images.open_image(str(path)).read((0, 0, 20, 20), size)

    @pytest.mark.parametrize("mode", ["RGB", "L"])
    def test_parts(self, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """As a decode of the whole, cropped and resized, and not off by a pixel.

        Pillow and simplejpeg agree to the bit.
        """
        small = np.random.default_rng(1).integers(0, 256, (24, 32, 3), np.uint8)
        large = Image.fromarray(small).resize((613, 487), Image.Resampling.BICUBIC)
        path = str(tmp_path / "x.jpg")
        large.convert(mode).save(path)
        whole = F.pil_to_tensor(images.read_stored(path).convert("RGB"))
        boxes = (
            (None, None),
            ((33, 51, 177, 123), (100, 90)),
            (None, (64, 80)),
            ((33, 51, 313, 347), (60, 60)),
            ((-20, -10, 400, 560), (80, 112)),
        )
        for number, (box, size) in enumerate(boxes):
            expected = F.crop(whole, *(box or (0, 0, *whole.shape[1:])))
            expected = F.resize(expected, list(size)) if size else expected
            found = []
            for library in (simplejpeg, None):
                monkeypatch.setattr(images, "simplejpeg", library)
                found.append(images.open_image(path).read(box, size))
            assert torch.equal(*found)
            assert found[0].shape == expected.shape
            inner = expected[:, 2:-2, 2:-2].float()

            def off(rows: int, columns: int, image=found[0], inner=inner) -> float:
                moved = image.roll((rows, columns), (1, 2))[:, 2:-2, 2:-2]
                return (moved - inner).abs().mean().item()

            here = off(0, 0)
            assert here < (9 if number > 1 else 0.1)  # grey levels of 256; shrunk or not
            assert here < 0.7 * min(off(-1, 0), off(1, 0), off(0, -1), off(0, 1))


def test_beyond_the_edges(tmp_path: Path) -> None:
    pixels = np.arange(1, 7, dtype=np.uint8).reshape(2, 3)
    mask, inside = images.LazyImage.of(pixels), torch.from_numpy(pixels.copy())
    for rows in range(-4, 5):
        for columns in range(-4, 6):
            whole = torch.full((12, 14), 9, dtype=torch.uint8)
            whole[5:7, 5:8] = inside
            expected = whole[5 + rows :][:2, 5 + columns :][:, :2]
            assert torch.equal(mask.read((rows, columns, 2, 2), fill=9), expected)
    image = images.open_image(save_jpeg(tmp_path / "x.jpg"))
    assert (image.read((-90, -90, 40, 20), (20, 10), fill=9) == 9).all()
    assert image.read((-4, 0, 8, 8), fill=9)[:, :4].eq(9).all()


def failing(function: Callable, times: int, number: int) -> Callable:
    """As `function`, but its first calls raise an OSError, as of a disk."""
    left = [times]

    def call(*args: object, **kwargs: object) -> object:
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number), str(args[0]))
        return function(*args, **kwargs)

    return call


def test_network_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read at the third try, or an error that a restart may find mended."""
    monkeypatch.setattr(files, "WAITS", (1e-6, 1e-6))
    path = str(tmp_path / "x.png")
    Image.new("RGB", (8, 8)).save(path)
    monkeypatch.setattr(files, "open", failing(open, 2, errno.ESTALE), raising=False)
    assert images.open_image(path).read().shape == (3, 8, 8)
    monkeypatch.setattr(files, "open", failing(open, 3, errno.EIO), raising=False)
    with pytest.raises(DiskError, match=f"^{path}: the disk does not answer"):
        images.open_image(path)
    monkeypatch.setattr(files, "open", failing(open, 1, errno.EACCES), raising=False)
    with pytest.raises(UserError, match=f"{path}: cannot be read .Permission denied"):
        images.open_image(path)
