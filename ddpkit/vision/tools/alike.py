"""Images of two parts that look or are named nearly alike, as those of one patient or video are."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ddpkit.errors import shorten
from ddpkit.vision.images import LazyImage

SIDE = 16  # of the thumbnails that are compared
ALIKE = 0.998  # correlation of thumbnails, as after another JPEG or another size
FLAT = 2  # of 255: thumbnails that vary less are of one colour, and show nothing
# What comes before the last number of a name: p12_ of p12_3, but not 26a of 26a1, a number
# of base 16 as checksums and characters have it
SERIES = re.compile(
    r"(?!(.*[\W_])?[a-f]*\d[\da-f]*[a-f][\da-f]*$)(?P<start>.*\D)\d+", re.I
)
FEW = 3  # starts for each class, without a number: cat.0 and dog.0 are in no series
# of each image: path and thumbnail
Thumbnails = Sequence[tuple[str, Tensor]]


def thumbnail(image: LazyImage) -> Tensor:
    """Return an image in grey, float32 (SIDE * SIDE,), of mean 0 and length 1; 0 of one colour."""
    grey = image.read(size=(SIDE, SIDE)).float().mean(0).flatten()
    scale = 1 if image.mode.startswith("F") else 255
    if grey.std() * 255 / scale < FLAT:
        return torch.zeros_like(grey)
    return torch.nn.functional.normalize(grey - grey.mean(), dim=0)


def find_alike(train: Thumbnails, others: Thumbnails, classes: int) -> list[str]:
    """Return lines about images of another part that look, or are named, like training images.

    classes: their number; 0 if it is not known.
    """
    if not train or not others:
        return []
    of_train = torch.stack([small for _, small in train])
    looks = []
    for path, small in others:
        score, index = (of_train @ small).max(0)
        if score > ALIKE:
            looks.append(f"{path} like {train[int(index)][0]}")
    known = {series_of(path) for path, _ in train} - {""}
    plain = {start for start in known if not re.search(r"\d", start)}
    if len(plain) <= FEW * max(classes, 2):
        known -= plain
    names = [path for path, _ in others if series_of(path) in known]
    lines = []
    for what, found in ("look almost like", looks), ("are numbered like", names):
        if found:
            lines.append(
                f"{len(found)} of {len(others)} images {what} training images: {shorten(found)}; "
                "if they belong together, such as those of a patient or a video, give their groups"
            )
    return lines


def series_of(path: str) -> str:
    """Return the file's name before its last number, or nothing if that has none."""
    match = SERIES.fullmatch(Path(path).stem)
    return match["start"] if match else ""
