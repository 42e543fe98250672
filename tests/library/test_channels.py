"""Images of any number of channels, at their files' full depth: "channels" in data.json."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
import torchvision
from generated import refusal
from timm.models._manipulate import adapt_input_conv
from torch import nn

from ddpkit.data import normalizing
from ddpkit.data.format import MEAN, STD, Format
from ddpkit.vision import folders, images, networks, pretrained

NOISE = np.random.default_rng(0)
# of 65535: dark, and not refused
SHORTS = NOISE.integers(0, 6000, (40, 52, 5)).astype(np.uint16)
FLOATS = NOISE.random((40, 52, 3))
GREY_TIFF = {"photometric": "minisblack"}


def save_tiff(path: Path, values: np.ndarray, kind: str) -> None:
    first = np.moveaxis(values, -1, 0)
    if kind == "planes":
        tifffile.imwrite(path, first, planarconfig="separate", **GREY_TIFF)
    else:
        tifffile.imwrite(path, first, compression="zlib", byteorder=">", **GREY_TIFF)


def read(path: Path, channels: int, **options: object) -> np.ndarray:
    image = images.open_image(str(path), Format(channels=channels, **options)).read()
    assert image.dtype == torch.float32
    return image.movedim(0, -1).numpy()


class TestFiles:
    @pytest.mark.parametrize("kind", ["planes", "pages"])
    def test_tiff(self, tmp_path: Path, kind: str) -> None:
        save_tiff(tmp_path / "x.tif", SHORTS, kind)
        np.testing.assert_allclose(
            read(tmp_path / "x.tif", 5), SHORTS / 65535, atol=1e-7
        )

    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            (SHORTS.astype(">u2"), SHORTS / 65535),
            (FLOATS[..., 0].astype(np.float32), FLOATS[..., :1]),
            ((FLOATS * 255).astype(np.uint8), (FLOATS * 255).astype(np.uint8) / 255),
        ],
    )
    def test_npy(
        self, tmp_path: Path, values: np.ndarray, expected: np.ndarray
    ) -> None:
        np.save(tmp_path / "x.npy", values)
        found = read(tmp_path / "x.npy", expected.shape[2])
        np.testing.assert_allclose(found, expected, atol=1e-7)

    def test_value_range(self, tmp_path: Path) -> None:
        np.save(tmp_path / "x.npy", SHORTS.astype(np.int32) - 100)
        found = read(tmp_path / "x.npy", 5, value_range=(-100, 3900))
        np.testing.assert_allclose(found, (SHORTS / 4000).clip(0, 1), atol=1e-7)

    @pytest.mark.parametrize(
        ("values", "code", "words"),
        [
            (FLOATS, "images.read_values", "(40, 52, 3)"),
            (FLOATS[..., :1] * 2 - np.ones(5), "images.ends", "float values of -0."),
            (np.array([None]), "images.reading", "replace"),
            (np.zeros((2000, 1000, 5)), "format.check_size", "1000 x 2000"),
        ],
    )
    def test_refusals(
        self,
        tmp_path: Path,
        values: np.ndarray,
        code: str,
        words: str,
    ) -> None:
        np.save(tmp_path / "x.npy", values, allow_pickle=True)
        with refusal(code, tmp_path / "x.npy", words):
            read(tmp_path / "x.npy", 5, max_megapixels=1)

    def test_pages(self, tmp_path: Path) -> None:
        """Without "channels" they are refused."""
        path = tmp_path / "x.tif"
        save_tiff(path, SHORTS, "pages")
        with refusal("images.opened", "x.tif: 5 pages", "channels"):
            images.open_image(str(path), Format((0, 6000)))
        with refusal("images.opened", "5 pages"):
            images.read_stored(str(path))

    def test_what_is_no_file(self, tmp_path: Path) -> None:
        """Neither a pipe that nobody writes to nor a device without an end is opened."""
        path = tmp_path / "x.jpg"
        for make in os.mkfifo, lambda path: path.symlink_to("/dev/zero"):
            make(path)
            for read in images.open_image, images.read_stored:
                with refusal("images.reading", path, "not a regular file"):
                    read(str(path))
            path.unlink()

    def test_arrays_in_folders(self, tmp_path: Path) -> None:
        """They are images where there are no others; without "channels" a line says so."""
        np.save(tmp_path / "x.npy", SHORTS)
        assert folders.list_images(tmp_path) == [str(tmp_path / "x.npy")]
        with refusal("images.reading", "x.npy", "channels"):
            images.open_image(str(tmp_path / "x.npy"))


def test_normalization() -> None:
    """Of images with channels by their dataset, to the bit as the device does it; of RGB there."""
    values = torch.rand(5, 8, 8)
    mean = (0.1, 0.2, 0.3, 0.4, 0.5)
    std = (0.5, 0.4, 0.3, 0.2, 0.1)
    found = Format(channels=5, mean=mean, std=std).normalize(values)
    for i in range(5):
        assert torch.equal(
            found[i], (values[i] - torch.tensor(mean[i])) / torch.tensor(std[i])
        )
    assert torch.equal(normalizing.normalize_images(found), found)
    # what dataset.py returns as float32 is taken as is
    assert Format().normalize(values) is values
    assert Format(channels=3).statistics == Format().statistics == (MEAN, STD)
    assert Format(channels=1).statistics[0] == (pytest.approx(0.449),)
    own = (0.1, 0.2, 0.6)
    other = (0.5,) * 5
    assert Format(std=STD).or_else(own, own).statistics == (own, STD)
    assert (
        Format(channels=1).or_else(own, own).statistics == ((pytest.approx(0.3),),) * 2
    )
    assert Format(channels=5).or_else(other, other).statistics == (other, other)
    for values in (0.5,), other, (0.5, 0.5, 0):
        with refusal("format.or_else", "STD in dataset.py", values, "3 numbers"):
            Format().or_else(own, values)
    with refusal("format.statistics", '"channels": 4', '"mean" and "std"'):
        _ = Format(channels=4).or_else(own, own).statistics
    with refusal("format.statistics", '"channels": 4', '"mean" and "std", 4 numbers'):
        _ = Format(channels=4).statistics


def test_what_is_shown() -> None:
    """In grey or the first three channels; a few values that stand out do not darken the rest."""
    values = torch.linspace(0, 1, 1000).view(1, 20, 50)
    values[0, 0, 0] = -100
    values[0, -1, -1] = 100
    shown = images.visible(values)
    assert shown.dtype == torch.uint8
    assert shown.shape == (3, 20, 50)
    assert torch.equal(shown[0], shown[2])
    assert shown.float().std() > 70
    several = values.expand(5, -1, -1) * torch.arange(5)[:, None, None]
    assert images.visible(several)[0].max() == 0
    assert torch.equal(images.visible(several)[2], shown[0])


@pytest.mark.parametrize("channels", [1, 5])
def test_first_convolution(channels: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Pretrained weights of RGB become those that timm makes of them; the rest is copied."""
    source = torchvision.models.shufflenet_v2_x0_5().state_dict()
    net = torchvision.models.shufflenet_v2_x0_5()
    networks.adapt_input(net, 64, channels)
    first = next(m for m in net.modules() if isinstance(m, nn.Conv2d))
    pretrained.copy_matching(net, source)
    said = capsys.readouterr().out.strip()
    assert re.search(r"(\d+) of \1 tensors loaded, 100 % of the model$", said)
    name = next(iter(source))
    torch.testing.assert_close(first.weight, adapt_input_conv(channels, source[name]))
    assert torch.equal(net.fc.weight, source["fc.weight"])
    assert net.eval()(torch.rand(1, channels, 64, 64)).shape == (1, 1000)
