"""Large images in overlapping tiles: a network then needs memory for one tile at a time."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from engine.errors import UserError
from engine.run.metrics import first

OVERLAP = 256  # pixels that neighbouring tiles share at least; half a tile if that is less
Predict = Callable[[Tensor], Tensor]  # (1, 3, h, w) -> logits (1, classes, h, w)


def in_tiles(predict: Predict, images: Tensor, tile: int, step: int) -> Tensor:
    """Return the logits of `images` (N, 3, H, W), float32 (N, classes, H, W).

    predict: takes images of any size, as a network's `forward` does.
    tile: side in pixels of the overlapping tiles in which larger images are predicted, one after
        another; smaller ones are predicted whole, all at once. 0: always whole.
    step: tiles begin at multiples of it, as the cells of a network of that stride do.

        logits = engine.in_tiles(model.forward, images, args.tile, STRIDE)
    """
    check(tile, step)
    if not 0 < tile < max(images.shape[-2:]):
        return predict(images)
    found: Tensor | None = None
    for number, image in enumerate(images):
        for rows, logits in bands(predict, image, tile, step):
            if found is None:
                found = logits.new_empty(len(images), len(logits), *image.shape[1:])
            found[number, :, rows] = logits
    assert found is not None
    return found


def bands(predict: Predict, image: Tensor, tile: int, step: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows, their logits) of `image` (3, H, W), from the top to the last row.

    tile: side of the tiles in pixels, at most that of the image; 0: the whole image at once.
    step: tiles begin at multiples of it, as the cells of a network of that stride do.
    The logits are float32 (classes, rows, W); where tiles overlap, a weighted mean of theirs.

        for rows, logits in engine.bands(model.forward, image, 1024, STRIDE):
            mask[rows] = logits.argmax(0)
    """
    check(tile, step)
    height, width = image.shape[1:]
    rows, columns = (arrange(side, tile or side, step) for side in (height, width))
    if len(rows) == len(columns) == 1:
        yield slice(0, height), first(predict(image[None]))[0]
        return
    ends = [top for top, _ in rows[1:]] + [height]
    rest: Tensor | None = None  # logits below the last band, as far as tiles have reached
    for (top, down), end in zip(rows, ends, strict=True):
        band: Tensor | None = None
        for left, across in columns:
            part = image[None, :, top : top + len(down), left : left + len(across)]
            logits = first(predict(part))[0]
            if band is None:
                band = logits.new_zeros(len(logits), len(down), width)
            weights = (down[:, None] * across).to(logits.device)
            band[:, :, left : left + len(across)] += logits * weights
        assert band is not None
        if rest is not None:
            band[:, : rest.shape[1]] += rest
        rest = band[:, end - top :].clone()
        yield slice(top, end), band[:, : end - top]


def check(tile: int, step: int) -> None:
    """Raise a UserError unless tiles of that side overlap on a grid of `step` pixels."""
    if tile and (tile % step or tile < 4 * step):
        raise UserError(f"--tile {tile} is not 0 or a multiple of {step} from {4 * step} up")


def arrange(side: int, tile: int, step: int) -> list[tuple[int, Tensor]]:
    """Return (start, weights) of the tiles along a `side`; the weights of a pixel add up to 1.

    Tiles have one size and are spread evenly. Within a quarter of the overlap from a tile's edge,
    where the network lacks the surroundings, its neighbour counts alone; further in, weights rise.
    """
    tile = min(tile, side)
    overlap = min(OVERLAP, tile // 2)
    gaps = -(-(side - tile) // (tile - overlap))
    starts = [(side - tile) * i // gaps // step * step for i in range(gaps)] + [side - tile]
    to_edge = torch.arange(1.0, tile + 1)
    to_edge = torch.minimum(to_edge, to_edge.flip(0))
    weights = (to_edge - overlap / 4).clamp(min=1e-6)  # not 0: the image's own edges need it
    total = torch.zeros(side)
    for start in starts:
        total[start : start + tile] += weights
    return [(start, weights / total[start : start + tile]) for start in starts]
