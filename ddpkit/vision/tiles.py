"""Large images in overlapping tiles, which need less memory than the whole."""

import math
from collections.abc import Callable
from itertools import pairwise, product

import torch
from torch import Tensor

from ddpkit.errors import UserError
from ddpkit.run.outputs import to_logits

Predict = Callable[[Tensor], Tensor]  # (1, 3, h, w) -> logits (1, classes, h, w)


def sliding_window(predict: Predict, images: Tensor, tile: int, step: int) -> Tensor:
    """Return the logits of `images` (N, 3, H, W), float32 (N, classes, H, W).

    predict: takes images of any size, as a network's `forward` does. Class numbers in place of
        logits, logits.argmax(1, keepdim=True), need less memory for a large image.
    tile: side in pixels of the overlapping tiles in which larger images are predicted, one after
        another; smaller ones are predicted whole, all at once. 0: always whole. Where tiles
        overlap, each pixel's logits are those of the tile in which it lies further from the edge.
    step: tiles begin at multiples of it, as the cells of a network of that stride do.

        logits = ddpkit.sliding_window(model.forward, images, args.tile, STRIDE)
    """
    if not is_tiled(images, tile, step):
        return to_logits(predict(images))
    height, width = images.shape[2:]
    tiles = list(product(arrange(height, tile, step), arrange(width, tile, step)))
    # One tensor for all, as soon as the number of classes is known: a list of parts,
    # joined in the end, would need twice the memory.
    joined = torch.empty(0)
    for number, image in enumerate(images.split(1)):
        for (top, above, below), (left, begin, end) in tiles:
            window = image[..., top : top + tile, left : left + tile]
            logits = to_logits(predict(window))[0]
            if not joined.numel():
                joined = logits.new_empty(len(images), len(logits), height, width)
            rows = slice(above - top, below - top)
            columns = slice(begin - left, end - left)
            joined[number, :, above:below, begin:end] = logits[:, rows, columns]
    return joined


def is_tiled(images: Tensor, tile: int, step: int) -> bool:
    if tile and (tile % step or tile < 4 * step):
        raise UserError(
            f"--tile {tile}: use 0 or a multiple of {step}, at least {4 * step}; if you "
            "did not give it, it is the checkpoint's"
        )
    return 0 < tile < max(images.shape[-2:])


def arrange(side: int, tile: int, step: int) -> list[tuple[int, int, int]]:
    """Return of each tile along a `side` its start, and the pixels, from and to, that it is for."""
    # They overlap at =; in the middle of that, at b and c, the next one takes over:
    #
    #   a----------==b==                          start a, for the pixels from a to b
    #              ==b==------==c==               b to c
    #                         ==c==----------d    c to d, which is `side`
    last = max(side - tile, 0)
    overlap = min(256, tile // 2)  # or more, for the last one ends at the edge
    gaps = math.ceil(last / (tile - overlap))
    starts = [last * i // gaps // step * step for i in range(gaps)]
    starts.append(last)
    begins = [0]
    for before, start in pairwise(starts):
        begins.append((before + tile + start) // 2)
    ends = begins[1:]
    ends.append(side)
    return list(zip(starts, begins, ends, strict=True))
