"""Images as people have them: deep, turned, huge, broken, in parts; data.json."""

import contextlib
import copy
import errno
import os
import pickle
import re
import resource
import sys
import textwrap
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import tifffile
import torch
from generated import ROOT, TEMPLATE_FOLDER, Command, refusal
from PIL import Image, ImageOps
from torchvision import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

import ddpkit
from ddpkit import files
from ddpkit.data import normalizing
from ddpkit.data.format import MEAN, STD, Format, read_format
from ddpkit.errors import DiskError, UserError
from ddpkit.vision import folders, images, masks

RAMP = (np.arange(40 * 96).reshape(40, 96) * 17).astype(np.uint16)  # 0 to 65263
COLOURS = np.stack([RAMP, RAMP // 2, RAMP // 3], axis=-1)


def read(path: Path, value_range: tuple[float, float] | None = None) -> np.ndarray:
    """The pixels, uint8 (H, W, 3)."""
    return (
        images.open_image(str(path), Format(value_range)).read().movedim(0, -1).numpy()
    )


def steps(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Grey levels: 256 steps of equal width."""
    values = values if values.ndim == 3 else np.stack([values] * 3, axis=-1)
    return (
        ((values.astype(float) - low) * 256 / (high - low))
        .clip(0, 255)
        .astype(np.uint8)
    )


class TestDepth:
    def test_16_bits(self, tmp_path: Path) -> None:
        """0 to 65535 becomes 0 to 255, the upper byte; or what is given, clipped."""
        grey = tmp_path / "grey.png"
        tiff = tmp_path / "grey.tif"
        colours = tmp_path / "colours.tif"
        Image.fromarray(RAMP).save(grey)
        tifffile.imwrite(tiff, RAMP, byteorder=">")
        tifffile.imwrite(colours, COLOURS, photometric="rgb", compression="zlib")
        for path, values in (
            (grey, RAMP),
            (tiff, RAMP),
            (colours, COLOURS),
        ):
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
    def test_what_would_be_black(
        self, tmp_path: Path, values: np.ndarray, words: str
    ) -> None:
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
            image = grey.convert(mode)
            path = tmp_path / f"{mode}.PNG"
            image.save(path)
            assert (read(path, (0, 9)) == np.asarray(image.convert("RGB"))).all()

    def test_turned(self, tmp_path: Path) -> None:
        """TIFFs not compressed as well, which Pillow turns wrongly where it maps them."""
        values = RAMP.astype(np.uint8)
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.fromarray(values).save(tmp_path / "turned.tif", exif=exif)
        Image.fromarray(values).save(tmp_path / "plain.tif")
        expected = np.rot90(read(tmp_path / "plain.tif"), -1)
        assert np.array_equal(read(tmp_path / "turned.tif"), expected)
        Image.fromarray(RAMP).save(tmp_path / "deep.tif", exif=exif)
        with refusal("images.reading", "deep.tif", "turned"):
            read(tmp_path / "deep.tif")

    @pytest.mark.parametrize(
        ("values", "how", "words"),
        [
            (
                COLOURS[..., [0, 1, 2, 0]],
                {"photometric": "separated"},
                "neither grey nor RGB",
            ),
            (
                COLOURS[..., [0, 1, 2, 0]],
                {"extrasamples": ["assocalpha"]},
                "multiplied by its alpha",
            ),
            (
                COLOURS[..., :2],
                {"planarconfig": "contig", "photometric": "minisblack"},
                "cannot be read",
            ),
            (
                COLOURS.astype(np.uint8)[..., :2],
                {"planarconfig": "contig", "photometric": "minisblack"},
                "2 channels, of which",
            ),
            (COLOURS.astype(np.int8)[..., 0], {}, "8 bits with a sign"),
        ],
    )
    def test_tiffs_of_other_kinds(
        self,
        tmp_path: Path,
        values: np.ndarray,
        how: dict,
        words: str,
    ):
        """Whose values would be taken for others."""
        path = tmp_path / "x.tif"
        tifffile.imwrite(
            path, values, **{"photometric": "rgb"} | how if values.ndim == 3 else how
        )
        with pytest.raises(UserError, match=f"^{path}: .*{words}"):
            images.open_image(str(path))


def test_megapixels(tmp_path: Path) -> None:
    """Beyond the limits of Pillow, without its warnings."""
    path = tmp_path / "x.bmp"  # 20000 x 10000 as it says, and nothing else
    Image.new("L", (4, 4)).save(path)
    content = bytearray(path.read_bytes())
    content[18:26] = (20000).to_bytes(4, "little") + (10000).to_bytes(4, "little")
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with refusal(
            "format.check_size", path, "20000 x 10000", '"max_megapixels": 200'
        ):
            images.open_image(str(path), Format(max_megapixels=179))
        with refusal("images.reading", path):  # read at last: it is cut off
            images.open_image(str(path), Format(max_megapixels=200)).read()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{", "Expecting property name"),
        (b"[" * 100_000, "recursion"),
        (b'{"chanels": 5}', "'chanels'"),
        (b'{"value_range": [5, 5]}', "order of numbers"),
        (b'{"std": [1, 0, 1]}', "wrong number"),
        (b'{"channels": 4, "mean": [1, 1, 1]}', "wrong number"),
    ],
)
def test_mistakes_in_data_json(tmp_path: Path, text: bytes, words: str) -> None:
    (tmp_path / "data.json").write_bytes(text)
    with refusal("files.parse", tmp_path / "data.json", words):
        read_format(tmp_path)


def save_jpeg(
    path: Path, mode: str = "RGB", size: tuple[int, int] = (50, 37), **how
) -> str:
    width, height = size
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(path, "JPEG", **how)
    return str(path)


def test_the_example_of_the_page(tmp_path: Path) -> None:
    """data.json as docs/unusual-images.md has it: four channels of 12 bits."""
    page = (ROOT / "docs/unusual-images.md").read_text()
    (text,) = re.findall(r"^```json\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "data.json").write_text(text)
    format = read_format(tmp_path)
    assert format.max_megapixels == 400
    values = np.array([0, 4095, 2047, 1000], np.uint16).reshape(1, 1, 4)
    np.save(tmp_path / "a.npy", values.repeat(2, 0).repeat(3, 1))
    pixels = images.open_image(str(tmp_path / "a.npy"), format).read()
    assert pixels.shape == (4, 2, 3)
    shown = pixels[:, 0, 0] * 4095
    assert shown.round().tolist() == [0, 4095, 2047, 1000]
    normalised = format.normalize(pixels[None])[0, :, 0, 0]
    means = torch.tensor([0.4, 0.4, 0.3, 0.6])
    torch.testing.assert_close(normalised, (pixels[:, 0, 0] - means) / 0.2)


def test_claims_of_arrays(tmp_path: Path) -> None:
    """A header may claim any size: one line says so, and no memory is used for it."""
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((4, 4, 3), np.uint8))
    small = path.read_bytes()

    def claim(shape: str, kind: str = "|u1") -> None:
        text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"
        text = text.ljust(117) + "\n"
        path.write_bytes(
            small[:8] + (118).to_bytes(2, "little") + text.encode() + small[-48:]
        )

    format = Format(channels=3)
    claim("(4, 4, 3)")
    assert images.open_image(str(path), format).read().shape == (3, 4, 4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for shape in (
        "(1000000, 1000000, 3)",
        "(10, 10, 1000000000000)",
        "(20000, 20000, 3)",
        "(9000, 9000, 3)",
    ):
        claim(shape)
        with refusal("images.reading", path):
            images.open_image(str(path), format)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 2**16  # KiB
    claim("(1000000, 1000000, 3)", "|V0")
    with refusal("format.check_size", path, "1000000 x 1000000"):
        images.open_image(str(path), format)
    claim("(48,)")
    with refusal("images.read_values", path, "values of shape (48,"):
        images.open_image(str(path), format)
    tifffile.imwrite(
        tmp_path / "x.tif", np.zeros((99, 4, 4), np.uint16), photometric="minisblack"
    )
    with refusal("images.reading", "x.tif", "99 channels"):
        images.open_image(str(tmp_path / "x.tif"), format)


def test_memory_that_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names the image, and nobody is told to remove it."""
    path = save_jpeg(tmp_path / "x.jpg")

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(simplejpeg, "decode_jpeg", fail)
    with refusal("images.reading", path, "memory", "--workers") as caught:
        images.open_image(path).read()
    assert "remove" not in str(caught.value)


def test_no_program_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by an image of a type that Pillow hands to Ghostscript, whatever its name."""
    program = tmp_path / "gs"
    path = tmp_path / "x.png"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    head = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
    path.write_text(head)
    for read in images.open_image, images.read_stored:
        with refusal("images.reading", path, "not an image of a type"):
            read(str(path))
    assert not (tmp_path / "started").exists()
    with contextlib.suppress(OSError):  # what Pillow does by itself
        Image.open(path).load()
    assert (tmp_path / "started").exists()


def test_one_place_opens_images() -> None:
    """Or another, which links images, with the list of types, too."""
    folders = ROOT / "ddpkit", ROOT / TEMPLATE_FOLDER
    paths = {path.resolve() for folder in folders for path in folder.rglob("*.py")}
    opened = re.compile(
        r"Image\.open\(|import open\b|imread|\bread_image|decode_image|default_loader"
    )
    # which prints a command that opens some
    paths = {path for path in paths if path.name != "check.py"}
    found = {path: opened.findall(path.read_text()) for path in paths}
    opening = {path.name: hits for path, hits in found.items() if hits}
    once = ["Image.open("]
    expected = {"images.py": once * 2, "labelme.py": once, "crackforest_f1.py": once}
    assert opening == expected
    for path in paths:
        for call in re.findall(r"Image\.open\((.*)", path.read_text()):
            assert re.search(r'formats=(FORMATS|\["PNG"\])\)$', call)
    assert not {"EPS", "FITS", "ICNS", "ICO", "PDF", "PSD", "WMF"} & set(images.FORMATS)


def damages(data: bytes) -> dict[str, bytes]:
    third = len(data) // 3
    half = len(data) // 2
    return {
        "a hole": data[:third] + bytes(4096) + data[third + 4096 :],
        "ones": data[:third] + b"\xff" * 512 + data[third + 512 :],
        "cut, with an end": data[:half] + b"\xff\xd9",
        "two parts": data[:third] + data[half:],
        "zeros, with an end": data[:third] + bytes(len(data) - third) + b"\xff\xd9",
    }


class TestDamagedJpeg:
    """What Pillow decodes without a word, half of it grey."""

    @pytest.mark.parametrize(
        "how",
        [
            {},
            {"mode": "L"},
            {"mode": "CMYK"},
            {"turn": 6},
            {"restart_marker_blocks": 4},
            {"progressive": True},
        ],
    )
    def test_pixels(self, tmp_path: Path, how: dict) -> None:
        exif = Image.Exif()
        exif[0x112] = how.pop("turn", 1)
        path = Path(
            save_jpeg(tmp_path / "x.jpg", size=(240, 180), exif=exif, quality=90, **how)
        )
        whole = path.read_bytes()
        images.open_image(str(path)).read()
        for name, data in damages(whole).items():
            path.write_bytes(data)
            for size in None, (20, 20):
                with refusal("images.reading", path):
                    print(name, images.open_image(str(path)).read(size=size).shape)

    def test_headers(self, tmp_path: Path) -> None:
        """Bytes between its parts, before its end or after it change no pixel."""
        path = Path(save_jpeg(tmp_path / "x.jpg", size=(240, 180)))
        data = path.read_bytes()
        whole = images.open_image(str(path)).read()
        scan = data.index(b"\xff\xda")
        kept = (
            data[:scan] + b"abc" + data[scan:],
            data + b"abc",
            data[:-2] + b"\0\0" + data[-2:],
        )
        for each in kept:
            path.write_bytes(each)
            assert torch.equal(images.open_image(str(path)).read(), whole)

    @pytest.mark.parametrize("how", [{}, {"mode": "L"}, {"mode": "CMYK"}, {"turn": 6}])
    def test_headers_do_not_hide_pixels(self, tmp_path: Path, how: dict) -> None:
        """libjpeg says the first thing alone: that of a profile, of bytes between the parts."""
        exif = Image.Exif()
        exif[0x112] = how.pop("turn", 1)
        profile = {"icc_profile": b"x" * 500, "exif": exif, "quality": 90}
        path = Path(save_jpeg(tmp_path / "x.jpg", size=(240, 180), **how, **profile))
        data = path.read_bytes()
        whole = images.open_image(str(path)).read()
        at = data.index(b"ICC_PROFILE") + 12  # its number, of 1
        scan = data.index(b"\xff\xda")
        for odd in (
            data[:at] + b"\7" + data[at + 1 :],
            data[:scan] + b"abc\xff\xff" + data[scan:],
        ):
            path.write_bytes(odd)
            assert torch.equal(images.open_image(str(path)).read(), whole)
            for damaged in damages(odd).values():
                path.write_bytes(damaged)
                with refusal("images.reading", path):
                    images.open_image(str(path)).read(size=(20, 20))


class TestJpeg:
    def test_sizes(self, tmp_path: Path) -> None:
        """Those that are upright, in RGB or grey, can be decoded at reduced size."""
        kinds = (
            ("RGB", 1, True),
            ("L", 1, True),
            ("CMYK", 1, False),
            ("RGB", 6, False),
        )
        for mode, orientation, shrinks in kinds:
            exif = Image.Exif()
            exif[0x112] = orientation
            image = images.open_image(save_jpeg(tmp_path / "x", mode, exif=exif))
            size = (37, 50) if orientation == 1 else (50, 37)
            assert (image.height, image.width) == size
            assert bool(image.shrinks) == shrinks

    @pytest.mark.parametrize("library", [simplejpeg, None])
    def test_broken(
        self, tmp_path: Path, library: object, monkeypatch: pytest.MonkeyPatch
    ) -> None:
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
    def test_parts(
        self, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
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
            expected = F.crop(whole, *box) if box else whole
            if size:
                expected = F.resize(expected, list(size))
            found = []
            for library in (simplejpeg, None):
                monkeypatch.setattr(images, "simplejpeg", library)
                found.append(images.open_image(path).read(box, size))
            assert torch.equal(found[0], found[1])
            assert found[0].shape == expected.shape
            inner = expected[:, 2:-2, 2:-2].float()

            def off(rows: int, columns: int, image=found[0], inner=inner) -> float:
                moved = image.roll((rows, columns), (1, 2))[:, 2:-2, 2:-2]
                return (moved - inner).abs().mean().item()

            here = off(0, 0)
            # grey levels of 256; shrunk or not
            assert here < (9 if number > 1 else 0.1)
            assert here < 0.7 * min(off(-1, 0), off(1, 0), off(0, -1), off(0, 1))


class TestFilesOfPhones:
    """HEIC, by a package of its own, and AVIF."""

    def save(self, path: Path, **how) -> np.ndarray:
        small = np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)
        image = Image.fromarray(small).resize((64, 48), Image.Resampling.BICUBIC)
        image.save(path, **how)
        return np.asarray(image)

    @pytest.mark.parametrize("kind", ["HEIF", "AVIF"])
    def test_pixels(self, tmp_path: Path, kind: str) -> None:
        """Nearly those that were saved, whatever the file is named."""
        path = tmp_path / "x.jpg"
        expected = self.save(path, format=kind, quality=95)
        off = read(path).astype(int) - expected
        assert abs(off).mean() < 9  # chroma is halved
        with images.open_header(path) as image:
            assert image.format == kind
        with refusal("masks.refuse_changed", path, kind):
            masks.read_mask(str(path), masks.unnamed())

    def test_without_the_package(self, tmp_path: Path) -> None:
        """A line names it; convert leaves such images out, and names it, too."""
        path = tmp_path / "x.heic"
        self.save(path)
        code = """
            import sys
            from pathlib import Path

            sys.modules["pillow_heif"] = None
            from ddpkit.convert import labels, result
            from ddpkit.errors import UserError
            from ddpkit.vision import images

            path = Path(sys.argv[1])
            for read in images.open_image, images.read_stored:
                try:
                    read(str(path))
                except UserError as error:
                    print(error)
            sample = labels.Sample(path, "train", draw=lambda size: 1 / 0)
            labelled = labels.LabelledSet([sample], ["a", "b"])
            result.write_masks(labelled, [(sample, "x")], path.parent)
            print(*labelled.skipped.remarks(path.parent))
            """
        done = Command([sys.executable, "-c", textwrap.dedent(code), str(path)], ROOT)
        lines = done.end().ok().out.splitlines()
        assert len(lines) == 3
        for line in lines:
            assert "HEIC needs a package: python -m pip install pillow-heif)" in line
        of_file = f"{path}: cannot be read (not an image of a type that is read"
        assert [line.startswith(of_file) for line in lines] == [True, True, False]
        assert lines[2].startswith("skipped: 1 images that cannot be opened (")


def on_white(pixels: np.ndarray) -> np.ndarray:
    shares = pixels[..., 3:] / 255
    return pixels[..., :3] * shares + 255 * (1 - shares)


def test_alpha(tmp_path: Path) -> None:
    """White where it is clear, or a channel of its own where data.json asks for it."""
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 4), np.uint8)
    for name, how in ("x.png", {}), ("x.webp", {"lossless": True, "exact": True}):
        path = tmp_path / name
        Image.fromarray(pixels).save(path, **how)
        assert abs(read(path) - on_white(pixels)).max() <= 1
        found = images.open_image(str(path), Format(channels=4)).read()
        expected = torch.from_numpy(pixels).movedim(-1, 0) / 255
        assert torch.equal(found, expected)
    grey = Image.fromarray(pixels[..., 0])
    Image.merge("LA", [grey, grey]).save(tmp_path / "la.png")
    found = images.open_image(str(tmp_path / "la.png"), Format(channels=2)).read()
    assert torch.equal(found[1], torch.from_numpy(pixels[..., 0]) / 255)
    grey.save(tmp_path / "grey.png")
    found = images.open_image(str(tmp_path / "grey.png"), Format(channels=1)).read()
    assert torch.equal(found[0], torch.from_numpy(pixels[..., 0]) / 255)
    # grey ones and palettes as RGBA, beside such; and without a word of Pillow's
    colored = Image.fromarray(pixels).quantize(9)
    colored.save(tmp_path / "palette.png")
    for name, values in (
        ("la.png", np.asarray(Image.open(tmp_path / "la.png").convert("RGBA"))),
        ("palette.png", np.asarray(colored.convert("RGBA"))),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            path = str(tmp_path / name)
            found = images.open_image(path, Format(channels=4)).read()
            assert abs(read(Path(path)) - on_white(values)).max() <= 1
        assert (values[..., 3] < 255).any()
        assert np.array_equal(found, np.moveaxis(values, -1, 0) / np.float32(255))
    Image.fromarray(pixels[..., :3]).save(tmp_path / "rgb.png")
    with refusal("images.read_values", "rgb.png", "(9, 7, 3), not"):
        images.open_image(str(tmp_path / "rgb.png"), Format(channels=4))


def test_turned_without_loss(tmp_path: Path) -> None:
    """PNGs as JPEGs: upright, and it is known where height and width do not show it."""
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x112] = orientation
        path = tmp_path / "x.png"
        Image.fromarray(pixels).save(path, exif=exif)
        image = images.open_image(str(path))
        upright = ImageOps.exif_transpose(Image.open(path))
        assert np.array_equal(image, upright)
        assert image.is_turned == (orientation in (2, 3, 4))


def test_normalised_by_rows() -> None:
    """On a CPU, where that is faster: the bits and the layout are those of each pixel's."""
    mean, std = torch.tensor([MEAN, STD]).mul(255).view(2, 3, 1, 1)
    for shape in (2, 3, 5, 7), (4, 3, 1, 9), (3, 3, 9, 1), (0, 3, 4, 4):
        for layout in torch.contiguous_format, torch.channels_last:
            batch = torch.randint(0, 256, shape, dtype=torch.uint8)
            batch = batch.to(memory_format=layout)
            found = normalizing.normalize_images(batch)
            assert torch.equal(found, (batch.float() - mean) / std)
            assert found.stride() == batch.stride()
    part = torch.randint(0, 256, (2, 3, 8, 9), dtype=torch.uint8)[:, :, ::2, 1:]
    found = normalizing.normalize_images(part)
    assert torch.equal(found, (part.float() - mean) / std)


def test_beyond_the_edges(tmp_path: Path) -> None:
    pixels = np.arange(1, 7, dtype=np.uint8).reshape(2, 3)
    mask = images.LazyImage.of(pixels)
    inside = torch.from_numpy(pixels.copy())
    for rows in range(-4, 5):
        for columns in range(-4, 6):
            whole = torch.full((12, 14), 9, dtype=torch.uint8)
            whole[5:7, 5:8] = inside
            expected = whole[5 + rows :][:2, 5 + columns :][:, :2]
            assert torch.equal(mask.read((rows, columns, 2, 2), fill=9), expected)
    image = images.open_image(save_jpeg(tmp_path / "x.jpg"))
    assert (image.read((-90, -90, 40, 20), (20, 10), fill=9) == 9).all()
    assert image.read((-4, 0, 8, 8), fill=9)[:, :4].eq(9).all()


def open_counted(path: str, counts: list[int]) -> images.LazyImage:
    """Open an image; whenever it is decoded the divisor of its size is added to `counts`."""
    image = images.open_image(path)
    decode = image.decode

    def count(shrink: int) -> np.ndarray:
        counts.append(shrink)
        return decode(shrink)

    image.decode = count
    return image


class TestLazyImage:
    def test_as_an_image(self, tmp_path: Path) -> None:
        """What numpy, PIL's methods and torchvision make of it is what they make of PIL's image."""
        path = save_jpeg(tmp_path / "x.jpg", size=(64, 48))
        whole = Image.open(path).convert("RGB")
        normalised = v2.Compose(
            [
                v2.RandomResizedCrop(24),
                v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize((0.1, 0.2, 0.3), (0.5, 0.6, 0.7)),
            ]
        )
        crop = ddpkit.RandomResizedCrop(24)  # takes any image
        for act in (
            np.asarray,
            np.array,
            normalised,
            v2.PILToTensor(),
            v2.RandomRotation(9),
            crop,
        ):
            torch.manual_seed(0)
            found = act(images.open_image(path))
            torch.manual_seed(0)
            expected = act(whole)
            if isinstance(found, torch.Tensor):
                # which decodes a half
                assert torch.equal(found, expected) or act is crop
            else:
                assert np.array_equal(found, expected)
        for act in (
            lambda image: image.convert("L"),
            lambda image: image.resize((9, 8)),
            lambda image: image.rotate(30),
            lambda image: image.copy(),
        ):
            found = act(images.open_image(path))
            expected = act(whole)
            assert type(found) is Image.Image
            assert np.array_equal(found, expected)
        assert images.open_image(path).size == whole.size
        assert np.array(images.open_image(path)).flags.writeable
        assert np.asarray(images.open_image(path), np.float32).dtype == np.float32

    def test_decoded_once(self, tmp_path: Path) -> None:
        path = save_jpeg(tmp_path / "x.jpg", size=(640, 480))
        counts: list[int] = []
        image = open_counted(path, counts)
        assert image.size == (640, 480)
        assert counts == []
        crop = ddpkit.RandomResizedCrop(32, scale=(0.9, 1))
        assert crop(image).shape == (3, 32, 32)
        assert counts == [8]
        for act in np.asarray, v2.PILToTensor(), images.LazyImage.read, np.array:
            act(image)
        assert counts == [8, 1]
        image.paste((1, 2, 3), (0, 0, 640, 480))  # as PIL changes an image in place
        assert (
            np.asarray(image)[0, 0].tolist()
            == image.read()[:, 0, 0].tolist()
            == [1, 2, 3]
        )
        assert crop(image)[:, 0, 0].tolist() == [1, 2, 3]
        assert counts == [8, 1]

    def test_copies(self, tmp_path: Path) -> None:
        floats = images.LazyImage.of(
            np.random.default_rng(0).random((4, 5, 6), np.float32)
        )
        for image in images.open_image(save_jpeg(tmp_path / "x.jpg")), floats:
            for copied in pickle.loads(pickle.dumps(image)), copy.deepcopy(image):
                assert np.array_equal(copied, image)
                assert type(copied) is images.LazyImage

    def test_masks_are_not_averaged(self) -> None:
        """Of v2, which takes a PIL image for no mask, and of PIL's own methods."""
        numbers = np.random.default_rng(0).choice([0, 9, 255], (4, 5)).astype(np.uint8)
        numbers = numbers.repeat(10, 0).repeat(10, 1)
        image = images.LazyImage.of(numbers[..., None].repeat(3, 2))
        transform = v2.Compose([v2.RandomResizedCrop(60), v2.RandomHorizontalFlip()])
        for number in range(9):
            torch.manual_seed(number)
            pixels, mask = map(
                np.asarray, transform(image, images.LazyImage.of(numbers))
            )
            assert set(np.unique(mask)) <= {0, 9, 255}
            assert len(np.unique(pixels)) > 3
            assert (pixels[..., 0] == mask).mean() > 0.5  # the same part
        for turn in v2.RandomRotation((9, 9)), v2.RandomAffine(0, shear=9):
            with refusal("images.transform", "after the crop"):
                turn(image, images.LazyImage.of(numbers))
        mask = images.LazyImage.of(numbers)
        assert mask.rotate(9, fillcolor=255).getpixel((0, 0)) == 255
        assert np.array_equal(mask.convert("L"), numbers)
        assert set(np.unique(mask.resize((99, 99)))) == {0, 9, 255}

    def test_full_depth(self) -> None:
        """Arrays and tensors are there; what needs a PIL image is refused, or right."""
        values = np.random.default_rng(0).random((40, 50, 5), np.float32)
        image = images.LazyImage.of(values)
        assert np.array_equal(image, values)
        assert image.size == (50, 40)
        assert ddpkit.ResizedCenterCrop(8)(image).shape == (5, 8, 8)
        for transform in (
            v2.RandomResizedCrop(9),
            v2.PILToTensor(),
            v2.ToImage(),
            v1.ToTensor(),
        ):
            with refusal("images.getbands", '"channels": 5', "image.read()"):
                transform(images.LazyImage.of(values))
        grey = v2.PILToTensor()(images.LazyImage.of(values[..., :1]))
        assert torch.equal(grey[0], torch.from_numpy(values[..., 0]))


def test_a_mask_is_read_where_its_image_is(tmp_path: Path) -> None:
    """Though the box is rounded to the grid of the image's decoder."""
    numbers = np.random.default_rng(0).integers(0, 2, (30, 40)).astype(np.uint8)
    numbers = numbers.repeat(16, 0).repeat(16, 1)
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    Image.fromarray(255 * numbers).save(tmp_path / "images/x.jpg", quality=95)
    Image.fromarray(numbers).save(tmp_path / "masks/x.png")
    pair = str(tmp_path / "images/x.jpg"), str(tmp_path / "masks/x.png")
    dataset = ddpkit.MaskFiles(folders.Part([pair], Format()), tuple)
    # of squares of two pixels more lie at an edge
    for scale, most in ((0.2, 0.7), 0.12), ((0.125, 0.13), 0.18):
        crop = ddpkit.RandomScaleCrop(64, scale, mask_fill=255)
        for number in range(20):
            torch.manual_seed(number)
            image, mask = dataset.open(0)
            pixels, mask = crop(image, mask)
            off = (pixels[0].float() / 255 - mask.float())[mask != 255]
            assert off.abs().mean() < most
            assert abs(float(off.mean())) < 0.02


def test_crops_are_those_of_torchvision() -> None:
    """In share and ratio of the part, on average and in their ranges; and it is anywhere."""
    own = ddpkit.RandomResizedCrop(8, (0.25, 1), (0.5, 1.2))
    theirs = v2.RandomResizedCrop(8, (0.25, 1), (0.5, 1.2))
    image = torch.empty(3, 300, 400)
    found = []
    torch.manual_seed(0)
    for draw in (
        lambda: own.place(300, 400),
        lambda: theirs.make_params([image]).values(),
    ):
        boxes = torch.tensor([list(draw()) for _ in range(2000)]).double()
        top, left, rows, columns = boxes.T
        assert (
            (top >= 0) & (left >= 0) & (top + rows <= 300) & (left + columns <= 400)
        ).all()
        parts = rows * columns / 120_000, columns / rows, top / 300, left / 400
        found.append([float(x) for part in parts for x in (part.mean(), part.std())])
    torch.testing.assert_close(found[0], found[1], rtol=0.1, atol=0.01)


@pytest.mark.parametrize("size", [64, 800])
def test_crops_of_a_random_scale(size: int) -> None:
    """Of any factor in the range, and anywhere in the image, or around a smaller one."""
    crop = ddpkit.RandomScaleCrop(size, (0.5, 2))
    torch.manual_seed(0)
    boxes = torch.tensor([crop.place(300, 300) for _ in range(2000)]).double()
    top, left, rows, columns = boxes.T
    assert torch.equal(rows, columns)
    power = (size / rows).log2()
    places = torch.stack([(power + 1) / 2, top / (300 - rows), left / (300 - rows)])
    assert -0.01 < places.min() < places.max() < 1.02
    torch.testing.assert_close(
        places.mean(1), torch.full((3,), 0.5).double(), atol=0.03, rtol=0
    )
    torch.testing.assert_close(
        places.corrcoef(), torch.eye(3).double(), atol=0.1, rtol=0
    )


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
    with pytest.raises(DiskError, match=f"^{path}: the disk does not respond"):
        images.open_image(path)
    monkeypatch.setattr(files, "open", failing(open, 1, errno.EACCES), raising=False)
    with pytest.raises(UserError, match=f"{path}: cannot be read .Permission denied"):
        images.open_image(path)


def test_a_plane_of_floats_and_a_mask_of_integers() -> None:
    """Pickled after PIL has loaded it, a plane stays one; masks may be of any integers."""
    plane = images.LazyImage.of(np.random.default_rng(0).random((6, 5, 1), np.float32))
    plane.load()
    again = pickle.loads(pickle.dumps(plane))
    assert again.mode == "F"
    assert torch.equal(again.read(), plane.read())
    crop = ddpkit.RandomScaleCrop(4, mask_fill=255)
    picture = np.zeros((6, 5, 3), np.uint8)
    _, mask = crop(picture, np.full((6, 5), 7, np.int64))
    assert mask.dtype == torch.uint8
    assert set(mask.unique().tolist()) <= {7, 255}
    with refusal("augment.lazy", "-100", "255"):
        crop(picture, np.full((6, 5), -100))
