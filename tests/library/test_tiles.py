"""Large images: the same in tiles as whole; one line where memory does not suffice."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from generated import Project, refusal
from PIL import Image
from torch import Tensor, nn

from ddpkit.vision import tiles

SEGMENTATION = pytest.mark.parametrize("project", ["segmentation"], indirect=True)


def test_a_network_that_sees_little() -> None:
    """Of 31 pixels around: each pixel is taken where it is 32 from a tile's edge, or further."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 1, 15, padding=7),
        nn.MaxPool2d((49, 1), 1, (24, 0)),
        nn.MaxPool2d((1, 49), 1, (0, 24)),
        nn.Conv2d(1, 3, 1),
    )
    for height, width in (
        (320, 352),
        (128, 480),
        (96, 128),
    ):
        images = torch.randn(2, 3, height, width)
        with torch.inference_mode():
            whole = net(images)
            tiled = tiles.sliding_window(net, images, 128, 32)
        assert torch.allclose(tiled, whole, atol=1e-5)


def test_tiles() -> None:
    """Each pixel once, of tiles of one size."""
    seen: list[tuple[int, ...]] = []

    def predict(part: Tensor) -> Tensor:
        seen.append(tuple(part.shape))
        return part.bfloat16()

    image = torch.rand(3, 320, 416)
    logits = tiles.sliding_window(predict, image[None], 128, 32)
    assert set(seen) == {(1, 3, 128, 128)}
    assert logits.dtype == torch.float32
    assert torch.allclose(logits[0], image, atol=0.01)
    numbers = tiles.sliding_window(
        lambda part: part.argmax(1, keepdim=True), image[None], 128, 32
    )
    assert (numbers == image.argmax(0)).all()
    for tile in 64, 130:
        with refusal("tiles.is_tiled", f"--tile {tile}", "32, at least 128"):
            tiles.sliding_window(nn.Identity(), torch.zeros(1, 3, 32, 32), tile, 32)


@SEGMENTATION
def test_large_images_among_small_ones(
    project: Project, data: Path, trained: Path, tmp_path: Path
) -> None:
    """Predicted and evaluated, whole on one rank and in tiles on two."""
    noise = np.random.default_rng(0).integers(0, 255, (330, 500, 3), dtype=np.uint8)
    own = shutil.copytree(data, tmp_path / "own")
    big = own / "val/images/big.png"
    small = own / "val/images/0000.jpg"
    Image.fromarray(noise).resize((700, 260), Image.Resampling.BICUBIC).save(big)
    labels = (np.arange(700 * 260).reshape(260, 700) % 2).astype(np.uint8)
    Image.fromarray(labels).save(own / "val/masks/big.png")
    masks = {}
    losses = []
    for tile, ranks in (0, 1), (128, 2):
        out = tmp_path / f"{tile}"
        words = ["--checkpoint", trained / "best.pt", "--output", out, "--tile", tile]
        project.run(big, small, words, script="predict.py", on=1).ok()
        masks[tile] = {
            path.stem: np.asarray(Image.open(path)) for path in out.glob("masks/*")
        }
        assert masks[tile]["big"].shape == (260, 700)
        assert (masks[tile]["0000"] == masks[0]["0000"]).all()
        assert (masks[tile]["big"] != masks[0]["big"]).mean() < 0.05  # of noise
        more = [
            "--resume",
            trained / "best.pt",
            "--eval-only",
            "--json",
            "--tile",
            tile,
        ]
        done = project.train(own, tmp_path / "eval", more, on=ranks).ok()
        losses.append(json.loads(done.out.splitlines()[-1])["val_loss"])
    assert losses[0] != pytest.approx(losses[1], rel=1e-9)  # in tiles
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
