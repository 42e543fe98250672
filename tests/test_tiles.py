"""Large images: the same in tiles as whole; one line where memory does not suffice."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from running import Project, small
from torch import Tensor, nn

from ddpkit.errors import UserError
from ddpkit.run import predicting

SEGMENTATION = pytest.mark.parametrize("project", ["segmentation"], indirect=True)


class TestTiles:
    @pytest.mark.parametrize("side", [64, 96, 128, 160, 480, 1024])
    @pytest.mark.parametrize("tile", [128, 256])
    def test_where_they_lie(self, side: int, tile: int) -> None:
        """On the grid, overlapping by half; each pixel is of one, in which it lies well inside."""
        found = predicting.arrange(side, tile, 32)
        assert [begin for _, begin, _ in found] == [0, *(end for _, _, end in found[:-1])]
        assert found[-1][2] == side
        for start, begin, end in found:
            assert start % 32 == 0
            assert begin == 0 or begin >= start + tile // 4
            assert end == side or end <= start + tile - tile // 4
        starts = [start for start, _, _ in found]
        assert all(0 < b - a <= tile // 2 for a, b in itertools.pairwise(starts))
        assert (starts[0], starts[-1]) == (0, max(side - tile, 0))

    @pytest.mark.parametrize(("height", "width"), [(512, 512), (128, 480), (320, 96), (96, 128)])
    def test_a_network_that_sees_little(self, height: int, width: int) -> None:
        """Of 15 pixels: less than the edges of tiles that do not count. The rest is rounding."""
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 15, padding=7), nn.ReLU(), nn.Conv2d(4, 3, 1))
        images = torch.randn(2, 3, height, width)
        with torch.inference_mode():
            expected = net(images)
            assert torch.allclose(predicting.in_tiles(net, images, 128, 32), expected, atol=1e-5)
            ((rows, logits),) = predicting.bands(net, images[0], 0, 32)
        assert rows == slice(0, height)
        assert torch.allclose(logits, expected[0], atol=1e-5)  # alone, not in a batch of two

    def test_bands(self) -> None:
        """Each row once, in order, and none of more than a tile's height."""
        seen: list[tuple[int, ...]] = []

        def predict(part: Tensor) -> Tensor:
            seen.append(tuple(part.shape))
            return part.bfloat16()

        image = torch.rand(3, 320, 416)
        found = list(predicting.bands(predict, image, 128, 32))
        assert {*seen} == {(1, 3, 128, 128)}
        assert [rows.start for rows, _ in found] == [0, *(rows.stop for rows, _ in found[:-1])]
        assert max(logits.shape[1] for _, logits in found) <= 128
        logits = torch.cat([logits for _, logits in found], dim=1)
        assert logits.dtype == torch.float32
        assert torch.allclose(logits, image, atol=0.01)

    @pytest.mark.parametrize("tile", [64, 130])
    def test_sides_that_are_refused(self, tile: int) -> None:
        words = f"--tile {tile} is not 0 or a multiple of 32 from 128 up"
        with pytest.raises(UserError, match=words):
            predicting.in_tiles(nn.Identity(), torch.zeros(1, 3, 32, 32), tile, 32)
        with pytest.raises(UserError, match=words):
            next(predicting.bands(nn.Identity(), torch.zeros(3, 32, 32), tile, 32))


@SEGMENTATION
def test_a_trained_network(project: Project, trained: Path) -> None:
    """On 512 pixels, in nine tiles of 256."""
    found = project.call("tiling.compared", trained / "best.pt", 512, 256)
    assert found["seen"] == [256] * 9 + [512]
    assert found["differ"]
    assert found["others"] < 0.001
    assert found["mean"] < 0.00005  # tiles that all count alike: 0.0007


@SEGMENTATION
def test_large_images_among_small_ones(
    project: Project, data: Path, trained: Path, tmp_path: Path
) -> None:
    """Predicted in tiles and whole, evaluated on one rank and on two."""
    noise = np.random.default_rng(0).integers(0, 255, (330, 500, 3), dtype=np.uint8)
    big = Image.fromarray(noise).resize((700, 260), Image.Resampling.BICUBIC)
    big.save(tmp_path / "big.png")
    own = tmp_path / "own"
    project.call("tiling.with_large", data, own, tmp_path / "big.png")
    Image.open(data / "val" / "images" / "0000.jpg").save(tmp_path / "small.png")
    masks = {}
    for tile in (0, 128, 256):
        more = ["--checkpoint", trained / "best.pt", "--output", tmp_path / f"{tile}"]
        names = [tmp_path / "big.png", tmp_path / "small.png"]
        project.alone(*names, *more, "--tile", tile, script="predict.py").ok()
        folder = tmp_path / f"{tile}" / "masks"
        masks[tile] = {path.stem: np.asarray(Image.open(path)) for path in folder.iterdir()}
        assert masks[tile]["big"].shape == (260, 700)
        assert (masks[tile]["small"] == masks[0]["small"]).all()
        assert (masks[tile]["big"] != masks[0]["big"]).mean() < 0.05  # of noise
    results = []
    for ranks, tile in (1, 128), (2, 128), (1, 0):
        evaluate = ["--data", own, "--resume", trained / "best.pt", "--eval-only", "--tile", tile]
        done = project.fork(*small(data), *evaluate, ranks=ranks, draws=False).ok()
        results.append(json.loads(done.out.splitlines()[-1]))
    assert results[0] == pytest.approx(results[1], rel=1e-12)
    assert results[0]["val_loss"] != pytest.approx(results[2]["val_loss"], rel=1e-9)  # not in tiles


@SEGMENTATION
def test_too_large_for_the_memory(project: Project, trained: Path, tmp_path: Path) -> None:
    """predict.py does it in tiles."""
    noise = np.random.default_rng(0).integers(0, 255, (1500, 1500, 3), dtype=np.uint8)
    folder = tmp_path / "images"
    folder.mkdir()
    Image.fromarray(noise).save(folder / "big.png", compress_level=1)
    Image.fromarray(noise[:64, :64]).save(folder / "small.png")

    def predict(tile: int) -> list:
        call = ("tiling.in_little_memory", folder, trained / "best.pt", tmp_path / "p", tile)
        return project.call(*call)

    lacking, *_ = predict(0)
    assert lacking.startswith("memory (asked for ")
    status, out, _ = predict(256)
    assert (status, out[:25]) == (0, "2 of 2 images predicted: ")
