"""Images of any number of channels, at their files' full depth: "channels" in data.json."""

import json
import os
import re
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import tifffile
import torch
import torchvision
from PIL import Image
from running import Project, flags, rows
from timm.models._manipulate import adapt_input_conv
from torch import nn

from ddpkit.data import folders, images, loading
from ddpkit.data.format import MEAN, STD, Format
from ddpkit.errors import UserError
from ddpkit.run import predicting, pretrained
from ddpkit.tools.check import look

NOISE = np.random.default_rng(0)
SHORTS = NOISE.integers(0, 6000, (40, 52, 5)).astype(np.uint16)  # of 65535: dark, and not refused
FLOATS = NOISE.random((40, 52, 3))
GREY_TIFF = {"photometric": "minisblack"}


def save_tiff(path: Path, values: np.ndarray, kind: str) -> None:
    first = np.moveaxis(values, -1, 0)
    if kind == "contig":
        tifffile.imwrite(path, values, planarconfig="contig", **GREY_TIFF)
    elif kind == "planes":
        tifffile.imwrite(path, first, planarconfig="separate", **GREY_TIFF)
    else:
        tifffile.imwrite(path, first, compression="zlib", byteorder=">", **GREY_TIFF)


def read(path: Path, channels: int, **options: object) -> np.ndarray:
    image = images.open_image(str(path), Format(channels=channels, **options)).read()
    assert image.dtype == torch.float32
    return image.movedim(0, -1).numpy()


class TestFiles:
    @pytest.mark.parametrize("kind", ["contig", "planes", "pages"])
    def test_tiff(self, tmp_path: Path, kind: str) -> None:
        save_tiff(tmp_path / "x.tif", SHORTS, kind)
        np.testing.assert_allclose(read(tmp_path / "x.tif", 5), SHORTS / 65535, atol=1e-7)

    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            (SHORTS.astype(">u2"), SHORTS / 65535),
            (FLOATS, FLOATS),
            (FLOATS[..., 0].astype(np.float32), FLOATS[..., :1]),
            ((FLOATS * 255).astype(np.uint8), (FLOATS * 255).astype(np.uint8) / 255),
        ],
    )
    def test_npy(self, tmp_path: Path, values: np.ndarray, expected: np.ndarray) -> None:
        np.save(tmp_path / "x.npy", values)
        found = read(tmp_path / "x.npy", expected.shape[2])
        np.testing.assert_allclose(found, expected, atol=1e-7)

    def test_other_types(self, tmp_path: Path) -> None:
        Image.fromarray(SHORTS[..., 0]).save(tmp_path / "x.png")
        np.testing.assert_allclose(read(tmp_path / "x.png", 1), SHORTS[..., :1] / 65535, atol=1e-7)
        pixels = (FLOATS * 255).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "y.png")
        np.testing.assert_allclose(read(tmp_path / "y.png", 3), pixels / 255, atol=1e-7)

    def test_value_range(self, tmp_path: Path) -> None:
        np.save(tmp_path / "x.npy", SHORTS.astype(np.int32) - 100)
        found = read(tmp_path / "x.npy", 5, value_range=(-100, 3900))
        np.testing.assert_allclose(found, (SHORTS / 4000).clip(0, 1), atol=1e-7)

    def test_parts(self, tmp_path: Path) -> None:
        """Cropped beyond the edges and resized as images of 8 bits are, but unrounded."""
        pixels = (FLOATS * 255).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "x.png")
        box, size = (-5, 4, 50, 40), (32, 24)
        parts = [
            images.open_image(str(tmp_path / "x.png"), Format(channels=channels)).read(box, size)
            for channels in (None, 3)
        ]
        assert parts[0].shape == parts[1].shape == (3, 32, 24)
        assert (parts[1] * 255 - parts[0]).abs().max() <= 1

    @pytest.mark.parametrize(
        ("name", "values", "words"),
        [
            ("x.npy", FLOATS, r"shape \(40, 52, 3\), not \(height, width, 5\)"),
            (
                "x.npy",
                FLOATS[..., :1] * 2 - np.ones(5),
                "float values of -0.* would be nearly black or white",
            ),
            (
                "x.npy",
                SHORTS.astype(np.int16),
                "int16 values of 0 to 5999 .*; write .value",
            ),
            ("x.npy", np.full((4, 4, 5), np.nan), "NaN or infinite; replace them"),
            ("x.npy", np.array([None]), r"cannot be read \(.*\); replace or remove it"),
            ("x.npy", np.zeros((2000, 1000, 5)), "1000 x 2000 pixels are more than max_mega"),
            ("x.png", SHORTS[..., 0], r"shape \(40, 52, 1\), not \(height, width, 5\)"),
        ],
    )
    def test_refusals(self, tmp_path: Path, name: str, values: np.ndarray, words: str) -> None:
        path = tmp_path / name
        if path.suffix == ".npy":
            np.save(path, values, allow_pickle=True)
        else:
            Image.fromarray(values).save(path)
        with pytest.raises(UserError, match=f"^{re.escape(str(path))}: .*({words})") as error:
            read(path, 5, max_megapixels=1)
        assert "\n" not in str(error.value)

    def test_white_is_zero(self, tmp_path: Path) -> None:
        """Pillow turns such a TIFF of 8 bits over, so that 0 is black; others are refused."""
        path, grey = tmp_path / "x.tif", np.arange(0, 240, dtype=np.uint8).reshape(12, 20)
        for kind in np.uint8, np.uint16:
            values = grey.astype(kind) * (np.iinfo(kind).max // 255)
            tifffile.imwrite(path, values, photometric="miniswhite")
            if kind is np.uint8:
                assert (images.open_image(str(path)).read().numpy() == 255 - grey).all()
            with pytest.raises(UserError, match="or 0 is white in it"):
                read(path, 1)

    def test_pages(self, tmp_path: Path) -> None:
        """Without "channels", pages are refused; with, those that are smaller are left out."""
        path = tmp_path / "x.tif"
        for values in SHORTS, (SHORTS // 32).astype(np.uint8):
            save_tiff(path, values, "pages")
            with pytest.raises(UserError, match=r"x.tif: 5 pages; .* .channels. into data"):
                images.open_image(str(path), Format((0, 6000)))
            with pytest.raises(UserError, match="5 pages"):
                images.read_stored(str(path))
            (finding,) = look(str(path), Format((0, 6000))).findings
            assert finding.text.startswith("5 pages")
            assert read(path, 5).shape == SHORTS.shape
        first = (SHORTS[..., 0] // 32).astype(np.uint8)
        with tifffile.TiffWriter(path) as writer:
            writer.write(first, contiguous=False, **GREY_TIFF)
            writer.write(first[::2, ::2], contiguous=False, subfiletype=1, **GREY_TIFF)
        np.testing.assert_allclose(read(path, 1)[..., 0], first / 255, atol=1e-6)

    @pytest.mark.parametrize("name", ["x.jpg", "x.tif", "x.npy", "x.png"])
    def test_what_is_no_file(self, tmp_path: Path, name: str) -> None:
        """Neither a pipe that nobody writes to nor a device without an end is opened."""
        path = tmp_path / name
        for make in os.mkfifo, lambda path: path.symlink_to("/dev/zero"):
            make(path)
            for format in Format(), Format(channels=5):
                with pytest.raises(UserError, match=f"^{path}: cannot be read .not a regular file"):
                    images.open_image(str(path), format)
                (finding,) = look(str(path), format).findings
                assert finding.text == "not a regular file"
            with pytest.raises(UserError, match="not a regular file"):
                images.read_stored(str(path))
            path.unlink()

    def test_broken_tiff(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = tmp_path / "x.tif"
        save_tiff(path, SHORTS, "contig")
        whole = path.read_bytes()
        for content in b"", b"II*\0garbage", whole[: len(whole) // 2]:
            path.write_bytes(content)
            with pytest.raises(UserError, match=r"x.tif: cannot be read \(.*\); replace or remove"):
                read(path, 5)
        assert not caplog.records

    def test_missing_decoder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object, **__: object) -> None:
            raise ValueError("<COMPRESSION.LZW: 5> requires the 'imagecodecs' package")

        save_tiff(tmp_path / "x.tif", SHORTS, "contig")
        monkeypatch.setattr(tifffile.TiffPageSeries, "asarray", fail)
        with pytest.raises(UserError, match=r"x.tif: .*requires the .imagecodecs. package"):
            read(tmp_path / "x.tif", 5)

    def test_arrays_in_folders(self, tmp_path: Path) -> None:
        """They are images where there are no others; without "channels" a line says so."""
        np.save(tmp_path / "x.npy", SHORTS)
        assert folders.list_images(tmp_path) == [str(tmp_path / "x.npy")]
        with pytest.raises(UserError, match=r"x.npy: .*need .channels. in data.json"):
            images.open_image(str(tmp_path / "x.npy"))
        Image.fromarray(SHORTS[..., 0]).save(tmp_path / "y.png")
        assert folders.list_images(tmp_path) == [str(tmp_path / "y.png")]


def test_normalization() -> None:
    """Of images with channels by their data set, to the bit as the device does it; of RGB there."""
    values = torch.rand(5, 8, 8)
    mean, std = (0.1, 0.2, 0.3, 0.4, 0.5), (0.5, 0.4, 0.3, 0.2, 0.1)
    found = Format(channels=5, mean=mean, std=std).normalize(values)
    for i in range(5):
        assert torch.equal(found[i], (values[i] - torch.tensor(mean[i])) / torch.tensor(std[i]))
    assert torch.equal(loading.normalize(found), found)
    assert Format().normalize(values) is values  # what dataset.py returns as float32 is taken as is
    assert Format(channels=3).statistics == Format().statistics == (MEAN, STD)
    assert Format(channels=1).statistics[0] == (pytest.approx(0.449),)
    grey = torch.full((1, 3, 2, 2), 51, dtype=torch.uint8)
    assert loading.normalize(grey, Format(mean=(0.2,) * 3, std=(1,) * 3)).abs().max() < 1e-6
    with pytest.raises(
        UserError,
        match=r'^data\.json: "channels": 4 needs "mean" and "std", 4 numbers each; pyth',
    ):
        _ = Format(channels=4).statistics


def test_visible() -> None:
    """Three channels, or one in grey, each from dark to bright; RGB of 8 bits as it is."""
    rgb = torch.randint(256, (3, 20, 30), dtype=torch.uint8)
    assert images.visible(rgb) is rgb
    ramp = torch.linspace(0, 0.01, 600).view(20, 30)
    for image in ramp[None], torch.stack([ramp, ramp.flip(0), 9 * ramp, ramp * 0]):
        shown = images.visible(image)
        assert shown.dtype == torch.uint8
        assert shown.shape == (3, 20, 30)
        assert (shown.amin((1, 2)) == 0).all()
        assert (shown.amax((1, 2)) == 255).all()
        assert shown.float().mean() == pytest.approx(127.5, abs=2)


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_first_convolution(channels: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Pretrained weights of RGB become those that timm makes of them; the rest is copied."""
    source = torchvision.models.shufflenet_v2_x0_5().state_dict()
    net = predicting.fit_input(torchvision.models.shufflenet_v2_x0_5, 64, channels)
    first = next(m for m in net.modules() if isinstance(m, nn.Conv2d))
    assert first.weight.std() > 0
    pretrained.copy_matching(net, source)
    assert re.search(r"(\d+) of \1 tensors loaded$", capsys.readouterr().out.strip())
    name = next(iter(source))
    torch.testing.assert_close(first.weight, adapt_input_conv(channels, source[name]))
    assert torch.equal(net.fc.weight, source["fc.weight"])
    assert net.eval()(torch.rand(1, channels, 64, 64)).shape == (1, 1000)


def draw(root: Path, task: str) -> Path:
    """A set of TIFF files of five channels, whose last tells the classes."""
    kinds = ["contig", "planes", "pages"]
    for part, count in ("train", 12), ("val", 5):
        for i in range(count):
            mask = np.zeros((40, 52), np.uint8)
            mask[10:30, i : i + 20] = 1
            values = SHORTS.copy()
            values[..., 4] += 3000 * (mask.astype(np.uint16) if task == "segmentation" else i % 2)
            folder = "images" if task == "segmentation" else f"class {i % 2}"
            path = root / part / folder / f"{i}.tif"
            path.parent.mkdir(parents=True, exist_ok=True)
            save_tiff(path, values + np.uint16(i + count), kinds[i % 3])  # no image comes twice
            if task == "segmentation":
                path = root / part / "masks" / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(mask).save(path)
    return root


def test_a_run(project: Project, tmp_path: Path) -> None:
    """What the check prints trains, resumes, evaluates, predicts and is exported."""
    data, out = draw(tmp_path / "set", project.task), tmp_path / "out"
    net = ["--arch", "squeezenet1_1"] if project.task == "classification" else []
    run = flags(data, out, "--batch-size", 3, *net)
    project.alone(*run).refused("0.tif: cannot be read", 'more channels need "channels" in data.js')
    words = [data, "--workers", 0, "--output", tmp_path]
    (data / "data.json").write_text('{"channels": 5}')
    said = project.alone(*words, script="ddpkit check").ok().out
    (proposed,) = re.findall(r"^data.json ({.*}) \(--write writes it\)$", said, re.MULTILINE)
    project.alone(*words, "--write", script="ddpkit check").ok()
    given = json.loads((data / "data.json").read_text())
    assert given == json.loads(proposed)
    said = project.alone(*words, script="ddpkit check").ok().out
    assert "data.json as it should be" in said
    found = [given["mean"], given["std"]]
    paths = (data / "train").rglob("*.tif")
    values = np.concatenate([read(path, 5).reshape(-1, 5) for path in paths])
    np.testing.assert_allclose(found, [values.mean(0), values.std(0)], rtol=1e-3)

    def write(**changes: object) -> None:
        (data / "data.json").write_text(json.dumps({**given, **changes}))

    (data / "data.json").write_text('{"channels": 5}')
    project.alone(*run).refused('"channels": 5 needs "mean"', "ddpkit check DIR --write")
    write()
    project.fork(*run).ok()
    project.fork(*run, "--epochs", 2, draws=False).ok()
    assert len(rows(out)) == 2
    write(mean=[0.5] * 5)
    project.alone(*run, "--epochs", 3).refused("was trained with mean (")
    (data / "data.json").write_text('{"channels": 3}')
    project.alone(*run).refused("values of shape (40, 52, 5)")
    write()
    assert (out / "examples.png").is_file()
    only = project.fork(*run, "--eval-only", draws=False).ok().out
    best = json.loads(only.strip().splitlines()[-1])
    assert any(float(row["val_loss"]) == pytest.approx(best["val_loss"]) for row in rows(out))
    folder = data / "val" / ("images" if project.task == "segmentation" else "")
    words = [folder, "--checkpoint", out / "best.pt", "--output", tmp_path / "predicted"]
    project.alone(*words, script="predict.py").ok()
    words = ["--data", data, "--output", tmp_path / "fast", "--workers", 0]
    project.alone(*words, script="ddpkit prepare").refused("prepared data is RGB of 8 bits")
    if project.task == "segmentation":
        return
    # The exported network takes float32 of as many channels, and normalises it.
    words = ["--checkpoint", out / "best.pt", "--output", tmp_path, "--data", data]
    project.alone(*words, script="ddpkit export").ok()
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    held = session.get_modelmeta().custom_metadata_map
    assert held["channels"] == "5"
    assert [json.loads(held[name]) for name in ("mean", "std")] == found
    images = np.random.default_rng(0).random((4, 5, 64, 64), np.float32)
    (logits,) = session.run(["logits"], {"images": images})
    assert logits.shape == (4, 2)
