"""Images of two parts that look nearly alike, as those of one patient or video do."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ddpkit.errors import shorten
from ddpkit.vision.images import LazyImage

SIDE = 16  # of the thumbnails that are compared
ALIKE = 0.998  # correlation of thumbnails, as after another JPEG or another size
# of each image: path and thumbnail
Thumbnails = Sequence[tuple[str, Tensor]]


def thumbnail(image: LazyImage) -> Tensor:
    """Return an image in grey, float32 (SIDE * SIDE,), of mean 0 and length 1; 0 of one colour."""
    grey = image.read(size=(SIDE, SIDE)).float().mean(0).flatten()
    return torch.nn.functional.normalize(grey - grey.mean(), dim=0)


def find_alike(train: Thumbnails, others: Thumbnails) -> list[str]:
    """Return a line about the images of another part that look like training images."""
    if not train or not others:
        return []
    of_train = torch.stack([small for _, small in train])
    pairs = []
    for path, small in others:
        score, index = (of_train @ small).max(0)
        if score > ALIKE:
            pairs.append(f"{path} like {train[int(index)][0]}")
    if not pairs:
        return []
    return [
        f"{len(pairs)} of {len(others)} images look nearly as training images do: "
        f"{shorten(pairs)}; if these belong together, as those of a patient or a video, name their "
        "groups"
    ]
