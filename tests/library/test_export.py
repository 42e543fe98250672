"""The examples of docs/export.md: as predict.py, and with integers of 8 bits."""

import csv
import re
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from generated import ROOT, Command, Project, in_soak
from PIL import Image

from ddpkit.vision import augment, images


def odd_images(folder: Path, paths: list[Path]) -> list[Path]:
    """Photographs of the validation set, turned by cameras, deep, grey, with alpha and so on."""
    folder.mkdir()
    turned = Image.Exif()
    turned[0x0112] = 6
    for number, path in enumerate(paths[:8]):
        image = Image.open(path).convert("RGB")
        grey = image.convert("L")
        deep = np.asarray(grey).astype(np.uint16) * 257
        name = str(folder / f"{number}")
        image.transpose(Image.Transpose.ROTATE_90).save(f"{name}a.png", exif=turned)
        for kind, made in {
            "b": grey,
            "c": Image.fromarray(deep),
            "d": image.quantize(200),
            "e": Image.merge("RGBA", (*image.split(), grey)),
        }.items():
            made.save(f"{name}{kind}.png")
        image.convert("CMYK").save(f"{name}f.jpg", quality=95)
    # edges at the borders of the centre, where a resize of a box would look beyond it
    stripes = np.zeros((160, 240, 3), np.uint8)
    stripes[:10] = stripes[-10:] = 255
    stripes[:, :50] = stripes[:, -50:] = 255
    Image.fromarray(stripes).save(folder / "edges.png")
    return sorted(folder.iterdir())


def compare_with_predicted(path: Path, scope: dict) -> None:
    """scope: what an example has left behind."""
    pixels = images.open_image(str(path)).read().movedim(0, -1).numpy()
    difference = np.abs(np.asarray(scope["read"](path), int) - pixels)
    assert difference.mean() < 0.3, path
    if "mask" in scope:
        mask = Image.open(f"predicted/masks/{path.stem}.png")
        assert (np.asarray(mask) == scope["mask"]).mean() > 0.99, path
        return
    with open("predicted/predictions.csv", newline="") as file:
        (row,) = [each for each in csv.DictReader(file) if each["file"] == str(path)]
    size = tuple(scope["info"]["size"])
    crop = augment.ResizedCenterCrop(size[0], scope["info"]["crop"])
    expected = crop(images.open_image(str(path))).movedim(0, -1).numpy()
    if path.suffix == ".png":  # a JPEG may be decoded at a fraction of its size
        assert np.abs(np.asarray(scope["image"], int) - expected).max() <= 2, path
    shares = np.exp(scope["logits"][0] - scope["logits"][0].max())
    shares /= shares.sum()
    for name, share in zip(scope["info"]["classes"], shares, strict=True):
        assert abs(float(row[f"probability_{name}"]) - share) < 0.03, path


# exporting a network of free sizes takes minutes
SEGMENTATION = in_soak("segmentation")


@pytest.mark.parametrize("project", ["classification", SEGMENTATION], indirect=True)
def test_examples(
    project: Project,
    data: Path,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All run as they stand in the page.

    With onnxruntime alone: what predict.py says of images of all kinds. Integers: weights by
    channel, a smaller file, the same classes.
    """
    exported = tmp_path / "exported"
    words = "--checkpoint", trained / "best.pt", "--output", exported
    project.run(words, script="ddpkit export", on=1).ok()
    page = (ROOT / "docs" / "export.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    odd = odd_images(tmp_path / "odd", sorted(data.glob("val/**/*.jpg")))
    words = tmp_path / "odd", "--output", tmp_path / "predicted"
    words += "--checkpoint", trained / "best.pt"
    project.run(words, script="predict.py", on=1).ok()
    begin, classify, segment, *_ = blocks
    monkeypatch.chdir(tmp_path)
    for path in odd:
        Path("image.jpg").unlink(missing_ok=True)
        Path("image.jpg").symlink_to(path)
        scope: dict = {}
        example = segment if project.task == "segmentation" else classify
        exec(begin + example, scope)
        compare_with_predicted(path, scope)
    (code,) = [each for each in blocks if "quantize_static" in each]
    (tmp_path / "DIR").symlink_to(data)
    # images are read by the first example, which is compared with predict.py above
    assert "Image.open" not in code
    done = Command([sys.executable, "-c", begin + code], tmp_path).end().ok()
    shares = re.findall(r"([\d.]+)% of the classes are as before", done.out)
    assert len(shares) == 10
    assert sum(map(float, shares)) / 10 > 85
    small = onnx.load(exported / "model_int8.onnx")
    nodes = small.graph.node
    by_channel = [n for n in nodes if n.op_type == "DequantizeLinear" and n.attribute]
    assert len(by_channel) >= sum(node.op_type == "Conv" for node in nodes) > 9
    held = {prop.key for prop in small.metadata_props}
    assert held >= {"classes", "size", "mean", "std"}
    sizes = [
        (exported / f"{name}.onnx").stat().st_size for name in ("model_int8", "model")
    ]
    assert sizes[0] < 0.7 * sizes[1]
