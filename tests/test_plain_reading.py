"""Reading without a project: batches of loader workers, parts of JPEGs."""

import gc
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image
from torch.utils.data import DataLoader

from ddpkit.data import images, loading, samples
from ddpkit.errors import UserError


def loader() -> DataLoader:
    listed = [
        (torch.full((3, 8, 8), n, dtype=torch.uint8), torch.full((8, 8), n), n) for n in range(16)
    ]
    sampler = loading.TrainSampler(listed, 2, accumulate=1, seed=0)
    how = {"collate_fn": loading.Collate(), **loading.workers(2, torch.device("cpu"))}
    return DataLoader(samples.Seeded(listed, 99, 0), 2, sampler=sampler, **how)


class TestBatches:
    def test_batches_that_are_kept(self) -> None:
        """All of two epochs keep their values, channels last in memory."""
        found = loader()
        expected = [key.draw for key in found.sampler] * 2
        whole = [batch for _ in range(2) for batch in found]
        assert torch.cat([numbers for *_, numbers in whole]).tolist() == expected
        for pixels, masks, numbers in whole:
            assert pixels.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(pixels[:, 0, 0, 0].long(), numbers)
            assert torch.equal(masks[:, 7, 7], numbers)

    def test_loaders_that_are_gone(self) -> None:
        """A rank keeps nothing of them."""
        known = {*samples.Seeded.in_use}
        found = loader()
        assert len([*found]) == 8
        assert len({*samples.Seeded.in_use} - known) == 1
        del found
        gc.collect()
        assert {*samples.Seeded.in_use} <= known

    def test_types_that_differ(self) -> None:
        """They become one type."""
        several = [(torch.zeros(3, 4, 4), torch.tensor(n)) for n in (2**40, 1.5)]
        assert loading.Collate()(several)[1].tolist() == [2**40, 1.5]


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
        image = images.open_image(str(self.save(tmp_path / "x", mode, **options)))
        assert (image.height, image.width) == (37, 50)
        assert bool(image.shrinks) == found

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
        exif = Image.Exif()
        exif[0x112] = orientation
        path = self.save(tmp_path / "x.jpg", "RGB", exif=exif)
        image = images.open_image(str(path))
        assert (image.height, image.width) == ((37, 50) if orientation == 1 else (50, 37))
        assert bool(image.shrinks) == (orientation == 1)

    def test_broken(self, tmp_path: Path) -> None:
        """A missing end is an error, whichever part is asked for."""
        path = self.save(tmp_path / "x.jpg", "RGB")
        data = path.read_bytes()
        for end in (data.index(b"\xff\xda") + 100, len(data) // 2, len(data) - 2):
            path.write_bytes(data[:end])
            with pytest.raises(UserError, match=r"x.jpg: cannot be read"):
                images.open_image(str(path)).read((0, 0, 20, 20))
