"""Images as people have them: deep, turned, huge, broken, in parts; data.json."""

import errno
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
from deep import save_png, save_tiff
from generated import refusal
from PIL import Image
from torchvision.transforms.v2 import functional as F

from ddpkit import files
from ddpkit.data import images
from ddpkit.data.format import Format, read_format, write_format
from ddpkit.errors import DiskError, UserError

RAMP = (np.arange(40 * 96).reshape(40, 96) * 17).astype(np.uint16)  # 0 to 65263
COLOURS = np.stack([RAMP, RAMP // 2, RAMP // 3], axis=-1)
LAYOUTS = [(order, packed) for order in "<>" for packed in (False, True)]


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
        Image.fromarray(RAMP).save(tmp_path / "grey.png")
        made = [(tmp_path / "grey.png", RAMP)]
        for number, values in enumerate((RAMP, COLOURS)):
            for order, packed in LAYOUTS:
                made.append((tmp_path / f"{number}{order}{packed}.tif", values))
                save_tiff(*made[-1], order, packed)
        made.append((tmp_path / "apart.tif", COLOURS))
        save_tiff(*made[-1], packed=True, planar=True)
        for path, values in made:
            assert (read(path) == steps(values, 0, 65536)).all()
            assert (read(path, (0, 65535)) == read(path)).all()
            assert (read(path, (100, 30000)) == steps(values, 100, 30000)).all()
        for values in COLOURS[..., :2], COLOURS:
            save_png(tmp_path / "colours.png", values)
            with refusal("images.reading", "colours.png", "PNG of 16 bits that is not"):
                read(tmp_path / "colours.png")

    @pytest.mark.parametrize(("order", "packed"), LAYOUTS)
    def test_floats_and_integers(self, tmp_path: Path, order: str, packed: bool) -> None:
        path = tmp_path / "x.tif"
        grey = np.arange(256).reshape(16, 16)
        save_tiff(path, (grey / 255).astype(np.float32), order, packed)
        assert (read(path)[..., 0] == grey).all()
        for kind in np.int16, np.int32:
            save_tiff(path, (grey - 100).astype(kind), order, packed)
            assert (read(path, (-100, 155)) == steps(grey, 0, 255)).all()
            with refusal("images.ends", path, "values of -100 to 155", "value_range"):
                read(path)

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            (RAMP // 17, "uint16 values of 0 to 3839"),
            (COLOURS // 256, "uint16 values of 0 to 254"),
            (RAMP / np.float32(2**20), "float values of 0 to 0.062"),
            (RAMP.astype(np.float32), "float values of 0 to 65263"),
            (RAMP * np.float32("nan"), "NaN or infinite"),
        ],
    )
    def test_what_would_be_black(self, tmp_path: Path, values: np.ndarray, words: str) -> None:
        path = tmp_path / "x.tif"
        save_tiff(path, values)
        with refusal("images.ends", path, words):
            read(path)
        if "3839" in words:  # an explicit range is never too dark, nor is a black image
            assert read(path, (0, 65535)).max() == 14
            save_tiff(path, values * 0)
            assert not read(path).any()

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
        with refusal("images.reading", "deep.tif", "turned"):
            read(tmp_path / "deep.tif")


def test_megapixels(tmp_path: Path) -> None:
    """Limits beyond and below those of Pillow, without its warnings."""
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
        for name in ("x.jpg", "x.png"):
            Image.new("RGB", (1001, 1000)).save(tmp_path / name)
            with refusal("format.check_size", "1001 x 1000"):
                images.open_image(str(tmp_path / name), Format(max_megapixels=1))
            images.open_image(str(tmp_path / name), Format(max_megapixels=2)).read()


class TestFormat:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            (b"{", "Expecting property name"),
            (b"\xff", "can't decode byte"),
            (b"[5]", "no attribute"),
            (b'{"chanels": 5}', "'chanels'"),
            (b'{"channels": "5"}', "str"),
            (b'{"channels": -1}', "wrong number"),
            (b'{"max_megapixels": "5"}', "number"),
            (b'{"value_range": 5}', "int"),
            (b'{"value_range": [5, 5]}', "order of numbers"),
            (b'{"value_range": [0, Infinity]}', "wrong number"),
            (b'{"mean": []}', "wrong number"),
            (b'{"mean": [1, "2", 3]}', "number"),
            (b'{"std": [1, 0, 1]}', "wrong number"),
            (b'{"channels": 4, "mean": [1, 1, 1]}', "wrong number"),
        ],
    )
    def test_mistakes(self, tmp_path: Path, text: bytes, words: str) -> None:
        (tmp_path / "data.json").write_bytes(text)
        with refusal("format.read_format", tmp_path / "data.json", words):
            read_format(tmp_path)

    def test_what_is_written_is_read(self, tmp_path: Path) -> None:
        assert read_format(tmp_path) == read_format(tmp_path / "none") == Format()
        full = Format((-1.5, 3000), 2, 4, (0.1, 0.2, 0.3, 0.4), (1, 2, 3, 4))
        for format in full, Format(channels=5), Format(mean=(0.1, 0.2, 0.3)):
            write_format(tmp_path, format)
            assert read_format(tmp_path) == format
        write_format(tmp_path, Format())
        assert not list(tmp_path.iterdir())


def save_jpeg(path: Path, mode: str = "RGB", size: tuple[int, int] = (50, 37), **how) -> str:
    pixels = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(path, "JPEG", **how)
    return str(path)


class TestJpeg:
    @pytest.mark.parametrize(
        ("mode", "how", "shrinks"),
        [
            ("RGB", {}, True),
            ("L", {"comment": b"grey"}, True),
            ("RGB", {"progressive": True, "quality": 95, "subsampling": 0}, True),
            ("RGB", {"icc_profile": bytes(70_000)}, True),
            ("RGB", {"restart_marker_rows": 1, "dpi": (300, 300)}, True),
            ("CMYK", {}, False),
        ],
    )
    def test_sizes(self, tmp_path: Path, mode: str, how: dict, shrinks: bool) -> None:
        image = images.open_image(save_jpeg(tmp_path / "x", mode, **how))
        assert (image.height, image.width) == (37, 50)
        assert bool(image.shrinks) == shrinks

    def test_a_byte_between_segments(self, tmp_path: Path) -> None:
        """What looks like the next one's length leads anywhere, here into a comment."""
        data = Path(save_jpeg(tmp_path / "x.jpg")).read_bytes()
        other = simplejpeg.encode_jpeg(np.zeros((16, 16, 3), np.uint8))
        begin, frame = data.index(b"\xff\xdb\x00"), data.index(b"\xff\xc0")
        comment = bytes(begin + 0xDB00 - frame - 3) + other[other.index(b"\xff\xc0") :]
        comment = b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment
        parts = data[:begin], b"\xff", data[begin:frame], comment, data[frame:]
        (tmp_path / "x.jpg").write_bytes(b"".join(parts))
        image = images.open_image(str(tmp_path / "x.jpg"))
        assert (image.height, image.width) == (37, 50)

    def test_turned(self, tmp_path: Path) -> None:
        exif = Image.Exif()
        exif[0x112] = 6
        image = images.open_image(save_jpeg(tmp_path / "x.jpg", exif=exif))
        assert (image.height, image.width, image.shrinks) == (50, 37, ())

    @pytest.mark.parametrize("library", [simplejpeg, None])
    def test_broken(self, tmp_path: Path, library: object, monkeypatch: pytest.MonkeyPatch) -> None:
        """A missing end is an error, whichever part is asked for and whoever decodes it."""
        monkeypatch.setattr(images, "simplejpeg", library)
        path = Path(save_jpeg(tmp_path / "x.jpg", size=(200, 160)))
        data = path.read_bytes()
        for size in None, (20, 20):
            images.open_image(str(path)).read((0, 0, 50, 50), size)
        for end in (data.index(b"\xff\xda") + 100, len(data) // 2, len(data) - 2):
            path.write_bytes(data[:end])
            for size in None, (20, 20):
                with refusal("images.reading", path):
                    images.open_image(str(path)).read((0, 0, 20, 20), size)
            path.write_bytes(data)

    @pytest.mark.parametrize(
        "how", [{}, {"subsampling": 0, "quality": 95}, {"progressive": True}, None]
    )
    def test_parts(self, tmp_path: Path, how: dict | None, monkeypatch: pytest.MonkeyPatch) -> None:
        """As a decode of the whole, cropped and resized, and not off by a pixel.

        Pillow and simplejpeg agree to the bit.
        """
        rng = np.random.default_rng(1)
        small = Image.fromarray(rng.integers(0, 256, (24, 32, 3), np.uint8))
        path = str(tmp_path / "x.jpg")
        large = small.resize((613, 487), Image.Resampling.BICUBIC)
        (large.convert("L") if how is None else large).save(path, **(how or {}))
        whole = F.pil_to_tensor(images.read_stored(path).convert("RGB"))
        boxes = (
            (None, None),
            ((13, 7, 101, 93), None),
            ((33, 51, 177, 123), (100, 90)),
            (None, (64, 80)),
            ((8, 16, 256, 320), (64, 80)),
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
            assert here < (9 if number > 2 else 0.1)  # grey levels of 256; shrunk or not
            assert here < 0.7 * min(off(-1, 0), off(1, 0), off(0, -1), off(0, 1))


class TestParts:
    @pytest.mark.parametrize(
        ("box", "size", "snapped"),
        [
            ((3, 5, 50, 60), None, (3, 5, 50, 60)),
            ((3, 5, 50, 60), (25, 30), (4, 4, 48, 60)),
            ((3, 5, 50, 60), (26, 30), (3, 5, 50, 60)),
            ((-3, 0, 90, 90), (10, 10), (0, 0, 88, 88)),
        ],
    )
    def test_boxes(self, box: tuple, size: tuple | None, snapped: tuple) -> None:
        decode = lambda n: np.zeros((100 // n, 200 // n, 3))  # noqa: E731
        assert images.LazyImage(100, 200, decode, (8, 4, 2)).snap(box, size) == snapped

    def test_beyond_the_edges(self, tmp_path: Path) -> None:
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


def test_visible() -> None:
    """Three channels, or one in grey, each from dark to bright; RGB of 8 bits as it is."""
    rgb = torch.randint(256, (3, 20, 30), dtype=torch.uint8)
    assert images.visible(rgb) is rgb
    ramp = torch.linspace(0, 0.01, 600).view(20, 30)
    for image in ramp[None], torch.stack([ramp, ramp.flip(0), 9 * ramp, ramp * 0]):
        shown = images.visible(image)
        assert (shown.dtype, shown.shape) == (torch.uint8, (3, 20, 30))
        assert (shown.amin((1, 2)) == 0).all() and (shown.amax((1, 2)) == 255).all()
        assert shown.float().mean() == pytest.approx(127.5, abs=2)


def failing(function: Callable, times: int, number: int) -> Callable:
    """As `function`, but its first calls raise an OSError, as of a disk."""
    left = [times]

    def call(*args: object, **kwargs: object) -> object:
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number), str(args[0]))
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EHOSTDOWN])
@pytest.mark.parametrize("channels", [None, 3])
def test_network_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, channels: int | None
) -> None:
    """Read at the third try, or an error that a restart may find mended."""
    monkeypatch.setattr(files, "WAITS", (1e-6, 1e-6))
    path, format = str(tmp_path / "x.png"), Format(channels=channels)
    Image.new("RGB", (8, 8)).save(path)
    monkeypatch.setattr(files, "open", failing(open, 2, number), raising=False)
    assert images.open_image(path, format).read().shape == (3, 8, 8)
    monkeypatch.setattr(files, "open", failing(open, 3, number), raising=False)
    with pytest.raises(DiskError, match=f"^{path}: the disk does not answer"):
        images.open_image(path, format)
    monkeypatch.setattr(files, "open", failing(open, 1, errno.EACCES), raising=False)
    with pytest.raises(UserError, match=f"{path}: cannot be read .Permission denied"):
        images.open_image(path, format)
