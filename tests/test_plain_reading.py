"""Reading without a project: batches in shared memory that is used again, parts of JPEGs."""

import functools
import gc
import io
import os
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from engine.data import handover, images, jpeg, loading, samples

MOST = 3


def sample(index: int) -> tuple[Tensor, Tensor, int, str]:
    generator = torch.Generator().manual_seed(index)
    pixels, mask = (
        torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        for shape in ((20, 30, 3), (20, 30))
    )
    return pixels.movedim(-1, 0), mask, index, f"name {index}"


class Samples(list):
    """Of which the last are larger, so that they need blocks of their own."""

    def __getitem__(self, index: int) -> tuple:  # type: ignore[override]
        image, *others = sample(index)
        return (image.repeat(1, 1 + index // 40, 1), *others)


@functools.cache
def expected(index: int) -> list:
    return handover.stack([Samples()[2 * index], Samples()[2 * index + 1]])


@pytest.fixture
def loader() -> DataLoader:
    return DataLoader(
        Samples(range(48)),
        batch_size=2,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
        collate_fn=handover.Collate(MOST),
    )


def check(batch: list, index: int) -> None:
    images, masks, numbers, names = expected(index)
    assert torch.equal(batch[0], images)
    assert batch[0].stride() == images.stride()
    assert torch.equal(batch[1], masks)
    assert torch.equal(batch[2], numbers)
    assert batch[3] == names


class TestHandover:
    def test_memory_is_used_again(self, loader: DataLoader) -> None:
        """As long as batches are dropped in time, there are no more blocks than that."""
        places = set()
        for _ in range(3):
            for index, batch in enumerate(loader):
                check(batch, index)
                if index < 20:
                    places.add(batch[0].untyped_storage().data_ptr())
        assert 2 <= len(places) <= 2 * MOST

    def test_batches_that_are_kept(self, loader: DataLoader) -> None:
        """All of two epochs, whole or in part, keep their values."""
        whole = [batch for _ in range(2) for batch in loader]
        for number, batch in enumerate(whole):
            check(batch, number % 24)
        rows = [batch[0][1, :, 3] for batch in whole]
        masks = [batch[1].numpy()[0] for batch in whole]
        del whole, batch
        for _ in loader:
            pass
        for number, (row, mask) in enumerate(zip(rows, masks, strict=True)):
            assert torch.equal(row, expected(number % 24)[0][1, :, 3])
            assert np.array_equal(mask, expected(number % 24)[1].numpy()[0])

    def test_an_epoch_that_is_left(self, loader: DataLoader) -> None:
        for _ in range(3):
            for index, batch in enumerate(loader):
                check(batch, index)
                if index == 5:
                    break

    def test_workers_that_are_gone(self) -> None:
        """The next ones have other blocks: batches that are kept stay as they are."""
        one = DataLoader(
            Samples(range(8)),
            batch_size=2,
            num_workers=1,
            multiprocessing_context="fork",
            collate_fn=handover.Collate(MOST),
        )
        for number, batch in enumerate([batch for _ in range(3) for batch in one]):
            check(batch, number % 4)

    def test_loaders_that_are_gone(self) -> None:
        """A rank keeps nothing of them: neither blocks nor their data sets."""
        before, known = {*handover.BLOCKS}, {*samples.Seeded.in_use}
        listed = [(torch.zeros(3, 8, 8, dtype=torch.uint8), 0)] * 16
        sampler = loading.TrainSampler(listed, 2, accumulate=1, seed=0)
        how = {"collate_fn": handover.Collate(), **loading.workers(2, torch.device("cpu"))}
        loader = DataLoader(samples.Seeded(listed, 2, 0), 2, sampler=sampler, **how)
        assert len([*loader]) == 8
        assert len({*handover.BLOCKS} - before) >= 2
        assert len({*samples.Seeded.in_use} - known) == 1
        del loader, sampler, how
        gc.collect()
        assert {*handover.BLOCKS} <= before
        assert {*samples.Seeded.in_use} <= known

    def test_who_frees_a_block(self) -> None:
        """The rank does, also one that got it in inference mode; no process forked from it."""
        block = torch.ones(handover.ALIGNMENT + 3, dtype=torch.uint8).share_memory_()
        flag = block.numpy()
        parts = [handover.Place(handover.ALIGNMENT, (1, 1, 1, 3), torch.uint8)]
        with torch.inference_mode():
            batch = handover._receive((-1, 0, 0), torch.from_numpy(flag), parts)
        if not (child := os.fork()):
            batch.clear()
            os._exit(0)
        os.waitpid(child, 0)
        assert flag[0] == 1
        batch.clear()
        assert flag[0] == 0
        del handover.BLOCKS[-1, 0, 0]

    def test_types_that_differ(self) -> None:
        """They become one type, as in a batch without blocks."""
        several = [(torch.zeros(3, 4, 4), torch.tensor(n)) for n in (2**40, 1.5)]
        assert handover.Collate(MOST)(several)[1].tolist() == [2**40, 1.5]


class TestJpegHeader:
    def save(self, path: Path, mode: str, **options: object) -> Path:
        pixels = np.random.default_rng(0).integers(0, 256, (37, 50, 3), np.uint8)
        Image.fromarray(pixels).convert(mode).save(path, "JPEG", **options)
        return path

    @pytest.mark.parametrize(
        ("mode", "options", "found"),
        [
            ("RGB", {}, True),
            ("L", {"comment": b"grey"}, True),
            ("RGB", {"progressive": True, "quality": 95, "subsampling": 0}, True),
            ("RGB", {"icc_profile": bytes(70_000)}, True),
            ("RGB", {"restart_marker_rows": 1, "dpi": (300, 300)}, True),
            ("CMYK", {}, False),
        ],
    )
    def test_sizes(self, tmp_path: Path, mode: str, options: dict, found: bool) -> None:
        data = self.save(tmp_path / "x", mode, **options).read_bytes()
        frame = jpeg.frame(data)
        assert (frame and (*frame[:2], frame.is_plain)) == ((37, 50, True) if found else None)
        with Image.open(tmp_path / "x") as image:
            assert jpeg.upright_size(image) == (frame and frame[:2])
        head = data.index(b"\xff\xda")
        for end in range(0, head, 7):
            assert jpeg.frame(data[:end]) is None

    def test_a_byte_between_segments(self, tmp_path: Path) -> None:
        """What looks like the next one's length leads anywhere, here into a comment."""
        data = self.save(tmp_path / "x.jpg", "RGB").read_bytes()
        other = simplejpeg.encode_jpeg(np.zeros((16, 16, 3), np.uint8))
        begin, frame = data.index(b"\xff\xdb\x00"), data.index(b"\xff\xc0")
        comment = bytes(begin + 0xDB00 - frame - 3) + other[other.index(b"\xff\xc0") :]
        comment = b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment
        parts = data[:begin], b"\xff", data[begin:frame], comment, data[frame:]
        (tmp_path / "x.jpg").write_bytes(b"".join(parts))
        image = images.open_image(str(tmp_path / "x.jpg"))
        assert (image.height, image.width) == (37, 50)

    @pytest.mark.parametrize("orientation", [1, 6])
    def test_exif(self, tmp_path: Path, orientation: int) -> None:
        """Pillow has to say whether it turns the image."""
        exif = Image.Exif()
        exif[0x112] = orientation
        path = self.save(tmp_path / "x.jpg", "RGB", exif=exif)
        data = path.read_bytes()
        assert jpeg.frame(data).is_plain is False
        end = data.index(b"\xff\xdb")
        assert jpeg.frame(data[:end] + b"\xff" + data[end:]) is None  # a byte that only fills
        image = images.open_image(str(path))
        assert (image.height, image.width) == ((37, 50) if orientation == 1 else (50, 37))
        assert bool(image.shrinks) == (orientation == 1)


class TestJpegRows:
    """The rows that are asked for are the same, to the bit, as in the whole image."""

    def pixels(self, height: int, width: int) -> np.ndarray:
        rng = np.random.default_rng(0)
        coarse = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
        smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        return np.clip(np.array(smooth) + rng.normal(0, 20, (height, width, 3)), 0, 255)

    def check(self, data: bytes, is_cut: bool = True) -> None:
        frame = jpeg.frame(data)
        for shrink in (1, 2, 4, 8):
            height, width = -(-frame.height // shrink), -(-frame.width // shrink)
            whole = simplejpeg.decode_jpeg(data, min_height=height, min_width=width)
            assert whole.shape[:2] == (height, width)
            for rows in (-3, 0, 1, *range(5, len(whole) + 9, 7 + len(whole) // 9)):
                part = jpeg.decode(data, frame, shrink, rows)
                left = max(rows + jpeg.MARGIN, 8)
                assert len(part) == (left if is_cut and left < len(whole) else len(whole))
                end = max(rows, 0)
                assert np.array_equal(part[:end], whole[:end]), (shrink, rows)

    @pytest.mark.parametrize("colors", ["444", "422", "420", "440", "411", "Gray"])
    @pytest.mark.parametrize("size", [(203, 301), (64, 48), (9, 7), (301, 3)])
    def test_sizes(self, colors: str, size: tuple[int, int]) -> None:
        pixels = np.ascontiguousarray(self.pixels(*size).astype(np.uint8))
        if colors == "Gray":
            pixels = np.ascontiguousarray(pixels[..., :1])
            options = {"colorspace": "GRAY", "colorsubsampling": "Gray"}
        else:
            options = {"colorsubsampling": colors}
        self.check(simplejpeg.encode_jpeg(pixels, quality=90, **options))

    @pytest.mark.parametrize(
        ("options", "is_cut"),
        [
            ({"restart_marker_rows": 1}, True),
            ({"restart_marker_blocks": 3}, True),
            ({"optimize": True, "quality": 98}, True),
            ({"exif": Image.Exif()}, True),
            ({"progressive": True}, False),
        ],
    )
    def test_kinds(self, options: dict, is_cut: bool, tmp_path: Path) -> None:
        image = Image.fromarray(self.pixels(203, 301).astype(np.uint8))
        image.save(tmp_path / "x.jpg", **options)
        data = (tmp_path / "x.jpg").read_bytes()
        self.check(data, is_cut)
        self.check(data + b"more" + data, is_cut)

    def test_a_scan_for_each_color(self) -> None:
        """A baseline file may have three; nothing can be left out of it."""
        planes = np.moveaxis(self.pixels(203, 301).astype(np.uint8), -1, 0)[..., None]
        grey = [
            simplejpeg.encode_jpeg(np.ascontiguousarray(plane), 90, "GRAY", "Gray")
            for plane in planes
        ]
        at = jpeg.frame(grey[0]).at
        scan = grey[0].index(b"\xff\xda")
        colors = b"".join(bytes([number, 0x11, 0]) for number in (1, 2, 3))
        data = grey[0][: at - 3] + b"\x00\x11" + grey[0][at - 1 : at + 4] + b"\x03" + colors
        data += grey[0][at + 8 : scan]
        for number, of_color in enumerate(grey, start=1):
            bits = of_color[of_color.index(b"\xff\xda") + 10 : -2]
            data += b"\xff\xda\x00\x08\x01" + bytes([number, 0, 0, 63, 0]) + bits
        data += b"\xff\xd9"
        frame = jpeg.frame(data)
        assert frame == (203, 301, 0, True)
        whole = simplejpeg.decode_jpeg(data)
        assert np.ptp(whole) > 100
        assert np.array_equal(jpeg.decode(data, frame, 1, 50), whole)

    def test_broken(self) -> None:
        """What is wrong with the rows that are asked for, or a missing end, is an error."""
        pixels = self.pixels(203, 301).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", restart_marker_rows=1)
        for data in file.getvalue(), simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), 90):
            frame, begin = jpeg.frame(data), data.index(b"\xff\xda") + 100
            for end in (begin, len(data) // 2, len(data) - 2, len(data) - 1):
                with pytest.raises(ValueError, match=r"Premature end|Corrupt|Invalid"):
                    jpeg.decode(data[:end], frame, 1, 20)
        bad = data[:begin] + b"\xff\xd9" + data[begin:]
        with pytest.raises(ValueError, match=r"Premature end|Corrupt|Invalid"):
            jpeg.decode(bad, frame, 1, 100)
