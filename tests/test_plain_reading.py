"""Reading without a project: batches in shared memory that is used again, parts of JPEGs."""

import functools
import gc
import os
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from engine.data import images, loading, samples
from engine.errors import UserError

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
    return loading.stack([Samples()[2 * index], Samples()[2 * index + 1]])


@pytest.fixture
def loader() -> DataLoader:
    return DataLoader(
        Samples(range(48)),
        batch_size=2,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
        collate_fn=loading.Collate(MOST),
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
            collate_fn=loading.Collate(MOST),
        )
        for number, batch in enumerate([batch for _ in range(3) for batch in one]):
            check(batch, number % 4)

    def test_loaders_that_are_gone(self) -> None:
        """A rank keeps nothing of them: neither blocks nor their data sets."""
        before, known = {*loading.BLOCKS}, {*samples.Seeded.in_use}
        listed = [(torch.zeros(3, 8, 8, dtype=torch.uint8), 0)] * 16
        sampler = loading.TrainSampler(listed, 2, accumulate=1, seed=0)
        how = {"collate_fn": loading.Collate(), **loading.workers(2, torch.device("cpu"))}
        loader = DataLoader(samples.Seeded(listed, 2, 0), 2, sampler=sampler, **how)
        assert len([*loader]) == 8
        assert len({*loading.BLOCKS} - before) >= 2
        assert len({*samples.Seeded.in_use} - known) == 1
        del loader, sampler, how
        gc.collect()
        assert {*loading.BLOCKS} <= before
        assert {*samples.Seeded.in_use} <= known

    def test_who_frees_a_block(self) -> None:
        """The rank does, also one that got it in inference mode; no process forked from it."""
        block = torch.ones(loading.ALIGNMENT + 3, dtype=torch.uint8).share_memory_()
        flag = block.numpy()
        parts = [loading.Place(loading.ALIGNMENT, (1, 1, 1, 3), torch.uint8)]
        with torch.inference_mode():
            batch = loading._receive((-1, 0, 0), torch.from_numpy(flag), parts)
        if not (child := os.fork()):
            batch.clear()
            os._exit(0)
        os.waitpid(child, 0)
        assert flag[0] == 1
        batch.clear()
        assert flag[0] == 0
        del loading.BLOCKS[-1, 0, 0]

    def test_types_that_differ(self) -> None:
        """They become one type, as in a batch without blocks."""
        several = [(torch.zeros(3, 4, 4), torch.tensor(n)) for n in (2**40, 1.5)]
        assert loading.Collate(MOST)(several)[1].tolist() == [2**40, 1.5]


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
    def test_sizes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, options: dict, found: bool
    ) -> None:
        """The header alone says them; Pillow has to look at all else."""
        opened, own = [], images._opened
        monkeypatch.setattr(images, "_opened", lambda *args: opened.append(args) or own(*args))
        path = self.save(tmp_path / "x", mode, **options)
        image = images.open_image(str(path))
        assert (image.height, image.width) == (37, 50)
        assert bool(image.shrinks) == (not opened) == found
        data = path.read_bytes()
        for end in range(2, data.index(b"\xff\xda"), 7):
            assert images._jpeg_size(data[:end]) is None
        assert images._jpeg_size(data) == ((37, 50) if found else None)

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
        assert images._jpeg_size(path.read_bytes()) is None
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
