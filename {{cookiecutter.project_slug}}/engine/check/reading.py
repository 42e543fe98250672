"""Reads the files of a sample, whatever they are: what is in them, and what is wrong with them."""

import contextlib
import functools
import hashlib
import io
import math
import re
import warnings
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, UnidentifiedImageError

from engine import files
from engine.data import depth, stacks
from engine.data.format import Format
from engine.data.images import open_image
from engine.errors import UserError

PARTS = ("train", "val")
ORIENTATION = 0x112  # the EXIF entry
ERRORS = {  # training would refuse these, or learn or measure something else than is meant
    "layout": "folders that training refuses",
    "broken": "files that cannot be read",
    "no mask": "images without a mask",
    "no image": "masks without an image",
    "size": "masks of another size than their image",
    "label": "masks with values that are no class",
    "range": "images that need another value_range in data.json",
    "rotation": "pairs of which EXIF turns only one (some are in check.png, in red)",
    "few": "too few images for an optimizer step",
    "leak": "the same image in train and in val",
    "label clash": "the same image with two labels",
}
UNUSABLE = {"broken", "size", "label", "range"}
WARNINGS = {
    "twice": "the same image more than once in a part",
    "absent": "classes that never come",
    "imbalance": "rare classes",
}


@dataclass(frozen=True)
class Finding:
    """Something that is wrong. kind: a key of ERRORS or WARNINGS. other: a second file."""

    kind: str
    file: str
    text: str = ""
    other: str = ""


@dataclass
class Facts:
    """What reading a sample has shown, without its pixels.

    kind: file format and mode. size, stored: (height, width) upright and as in the file; (0, 0) if
    it cannot be read. turn: the orientation in EXIF. file, pixels, target: digests, of 16 bytes.
    histogram: int64 (3, 256), of what training sees. moments: instead, with "channels" in
    data.json: float64 (3, channels), the number of pixels and the sums of their values and squares.
    span: lowest and highest value, if there are more than 8 bits. counts: pixels of each value in
    the mask without void, or {class: 1}.
    """

    kind: str = ""
    size: tuple[int, int] = (0, 0)
    stored: tuple[int, int] = (0, 0)
    turn: int = 1
    file: bytes = b""
    pixels: bytes = b""
    target: bytes = b""
    histogram: np.ndarray | None = None
    moments: np.ndarray | None = None
    span: tuple[float, float] | None = None
    counts: dict[int, int] = field(default_factory=dict)
    void: int = 0  # pixels
    findings: list[Finding] = field(default_factory=list)


def look(path: str, format: Format) -> Facts:
    """Read the image at `path`. Whatever is wrong with it becomes a finding."""
    facts = Facts()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, about files that it can read
            _look(path, format, facts)
    except Exception as error:  # Pillow raises errors of many kinds for malformed files
        kind = "range" if facts.span and isinstance(error, UserError) else "broken"
        text = reason(error, path).removesuffix(f" {depth.SET}")
        facts.findings.append(Finding(kind, path, text))
    return facts


def _look(path: str, format: Format, facts: Facts) -> None:
    data = files.read(path)
    facts.file = digest(data)
    if format.channels:
        return _look_deep(path, format, facts)
    values = None
    with Image.open(io.BytesIO(data)) as image:
        kind = depth.kind_of(image)
        facts.kind = f"{image.format} {image.mode}" + (f" ({kind})" if kind else "")
        facts.stored = image.size[::-1]
        if kind and math.prod(image.size) <= format.max_megapixels * 1e6:
            with contextlib.suppress(UserError):  # open_image says what is wrong
                reopen = functools.partial(Image.open, io.BytesIO(data))
                values = depth.read_values(path, image, reopen, is_exact=True)
        facts.turn = image.getexif().get(ORIENTATION, 1)  # decodes a PNG, so it comes last
    if values is not None and np.isfinite(values).all():
        facts.span = float(values.min()), float(values.max())
        facts.pixels = digest(values)
    lazy = open_image(path, format)
    decoded = np.ascontiguousarray(lazy.decode(1, lazy.height))
    facts.histogram = np.array(Image.fromarray(decoded).histogram()).reshape(3, 256)
    facts.pixels = facts.pixels or digest(decoded)
    facts.size = lazy.height, lazy.width


def _look_deep(path: str, format: Format, facts: Facts) -> None:
    """Do the same for an image with "channels" in data.json."""
    values = stacks.read(path, format)
    facts.kind = f"{values.dtype} with {values.shape[2]} channel" + "s" * (values.shape[2] > 1)
    facts.stored = facts.size = values.shape[:2]
    if values.dtype != np.uint8 and np.isfinite(values).all():
        facts.span = float(values.min()), float(values.max())
    facts.pixels = digest(values)
    pixels = stacks.scale(values, path, format.value_range).reshape(-1, values.shape[2])
    sums = pixels.sum(0, np.float64), np.square(pixels, dtype=np.float64).sum(0)
    facts.moments = np.stack([np.full(len(sums[0]), len(pixels), np.float64), *sums])


def orientation(path: str) -> int:
    """Return the orientation in the EXIF data of the image at `path`; 1 means upright."""
    with Image.open(io.BytesIO(files.read(path))) as image:
        return image.getexif().get(ORIENTATION, 1)


def digest(data: bytes | np.ndarray) -> bytes:
    """Return a hash of the bytes, or of the shape and values of an array, in 16 bytes."""
    if isinstance(data, bytes):
        return hashlib.blake2b(data, digest_size=16).digest()
    shape = hashlib.blake2b(repr(data.shape).encode(), digest_size=16)
    shape.update(np.ascontiguousarray(data).data)
    return shape.digest()


def reason(error: Exception, path: str) -> str:
    """Return what is wrong with the file at `path`, in one line."""
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    text = " ".join(text.split()).removeprefix(f"{path}: ")
    unread = re.fullmatch(r"cannot be read \((.*)\); replace or remove it", text)  # images.py's
    return unread[1] if unread else text
