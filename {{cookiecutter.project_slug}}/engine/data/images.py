"""Images: decoding no more of each than is asked for."""

import contextlib
import io
import math
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.transforms.v2 import functional as F

from engine import files
from engine.data import depth, jpeg, stacks
from engine.data.format import DEFAULT_FORMAT, Format
from engine.errors import UserError
from engine.ranks import distributed

SHRINKS = (8, 4, 2)  # what a JPEG decoder can divide height and width by, at less work
# Of Pillow, which raises TypeError and struct.error for malformed EXIF entries.
READ_ERRORS = OSError, RuntimeError, SyntaxError, TypeError, ValueError, struct.error
Image.MAX_IMAGE_PIXELS = None  # Format.check_size decides instead, in every process that reads


Box = tuple[int, int, int, int]  # top, left, height, width in pixels


@dataclass
class LazyImage:
    """An image or a mask, upright, that is decoded once `read` is called.

    decode: n, rows -> uint8 (H / n, W / n, 3), of a mask (H, W); sizes are rounded up; what lies
    below the first `rows` may be missing. With "channels" in data.json float32 (H, W, channels).
    shrinks: the n that `decode` takes besides 1, in descending order. is_mask: whether (H, W).

        def val_transform(image: engine.LazyImage) -> Tensor:
            return image.read((0, 0, image.height, image.width), (224, 224))
    """

    height: int
    width: int
    decode: Callable[[int, int], np.ndarray]
    shrinks: Sequence[int] = ()
    is_mask: bool = False

    @classmethod
    def of(cls, pixels: np.ndarray) -> "LazyImage":
        """Return pixels (H, W, channels) or (H, W), in memory or mapped from a file."""
        height, width = pixels.shape[:2]
        return cls(height, width, lambda *_: pixels, is_mask=pixels.ndim == 2)

    def read(
        self, box: Box | None = None, size: tuple[int, int] | None = None, fill: int = 0
    ) -> Tensor:
        """Return uint8 (3, H, W), of a mask (H, W): what is in `box`, resized to `size`.

        With "channels" in data.json float32 (channels, H, W).
        box: may reach beyond the edges, where `fill` is; default: the whole image.
        size: (height, width); default: that of `box`. Images are averaged, masks are not.
        """
        box = box or (0, 0, self.height, self.width)
        shrink, (top, left, bottom, right) = self._edges(box, size)
        height, width = bottom - top, right - left
        rows = self.decode(shrink, max(bottom, 1))[max(top, 0) : max(bottom, 0)]
        part = rows[:, max(left, 0) : max(right, 0)]
        # A copy, because augmentation may change it. Its channels are first only by its strides:
        # in memory they stay last, which is faster from here on.
        part = part[None].copy()
        pixels = torch.from_numpy(part[None] if self.is_mask else part.transpose(0, 3, 1, 2))
        if part.shape[1:3] != (height, width):
            before = min(max(-left, 0), width), min(max(-top, 0), height)
            after = width - part.shape[2] - before[0], height - part.shape[1] - before[1]
            pixels = F.pad(pixels, [*before, *after], fill=fill)
        if size and pixels.shape[2:] != size:
            mode = "nearest-exact" if self.is_mask else "bilinear"
            pixels = interpolate(pixels, size, mode=mode, antialias=not self.is_mask)
        return pixels[0, 0] if self.is_mask else pixels[0]

    def snap(self, box: Box, size: tuple[int, int] | None) -> Box:
        """Return the `box` rounded to the decoder's grid, by less than a pixel of the result.

        `read` does the same. A mask needs the box that its image returns here.
        """
        shrink, (top, left, bottom, right) = self._edges(box, size)
        return top * shrink, left * shrink, (bottom - top) * shrink, (right - left) * shrink

    def random_box(self, area: tuple[float, float], ratio: tuple[float, float]) -> Box:
        """Return the part that RandomResizedCrop would take, in a tenth of its time.

        area: the range of its share of the image; ratio: that of its width / height. Python's
        `random` draws both.
        """
        for _ in range(10):
            pixels = self.height * self.width * random.uniform(*area)
            aspect = math.exp(random.uniform(*map(math.log, ratio)))
            rows, columns = round(math.sqrt(pixels / aspect)), round(math.sqrt(pixels * aspect))
            if 0 < rows <= self.height and 0 < columns <= self.width:
                top = random.randint(0, self.height - rows)
                return top, random.randint(0, self.width - columns), rows, columns
        rows = min(self.height, round(self.width / ratio[0]))
        columns = min(self.width, round(self.height * ratio[1]))
        return (self.height - rows) // 2, (self.width - columns) // 2, rows, columns

    def random_square(self, side: int) -> Box:
        """Return a random part of that side, or around a smaller image; torch draws it."""

        def place(length: int) -> int:
            return int(torch.randint(min(0, length - side), max(0, length - side) + 1, ()))

        return place(self.height), place(self.width), side, side

    def _edges(self, box: Box, size: tuple[int, int] | None) -> tuple[int, Box]:
        """Return by how much to shrink, and the top, left, bottom and right edges then."""
        top, left, height, width = box
        least = min(height / size[0], width / size[1]) if size else 1
        shrink = next((shrink for shrink in self.shrinks if shrink <= least), 1)
        edges = top, left, top + height, left + width
        top, left, bottom, right = (round(edge / shrink) for edge in edges)
        return shrink, (top, left, bottom, right)


def open_image(path: str, format: Format = DEFAULT_FORMAT) -> LazyImage:
    """Return the image at `path`, in RGB or with the channels that `format` asks for.

    Raises a UserError that names the file if it cannot be read.
    """
    if format.channels:
        with _reading(path):
            return LazyImage.of(stacks.scale(stacks.read(path, format), path, format.value_range))
    data = _read_file(path)
    frame = jpeg.frame(data)
    if frame and frame.is_plain:
        format.check_size(path, frame.width, frame.height)
    else:
        with _reading(path), _opened(path, data, format) as image:
            size = jpeg.upright_size(image)
        if not size:
            return LazyImage.of(np.array(_read_image(path, data, "RGB", format)))
        frame = frame or jpeg.Frame(*size)
    height, width = frame[:2]

    def decode(shrink: int, rows: int) -> np.ndarray:
        if jpeg.simplejpeg:
            with contextlib.suppress(ValueError):  # Pillow may read it, or explain
                return jpeg.decode(data, frame, shrink, rows)
        with _reading(path), Image.open(io.BytesIO(data)) as image:
            image.draft("RGB", (width // shrink, height // shrink))
            return np.array(image.convert("RGB"))

    shrinks = [shrink for shrink in SHRINKS if shrink <= min(height, width)]
    return LazyImage(height, width, decode, shrinks)


def decoder() -> str:
    """Return the name of the library that decodes JPEGs here."""
    return "simplejpeg" if jpeg.simplejpeg else "Pillow"


def read_image(path: str, mode: str | None = "RGB", format: Format = DEFAULT_FORMAT) -> Image.Image:
    """Return the image at `path`, upright and converted to `mode` (None: as it is stored).

    Raises a UserError that names the file if it cannot be read whole.
    """
    return _read_image(path, _read_file(path), mode, format)


def _read_image(path: str, data: bytes, mode: str | None, format: Format) -> Image.Image:
    """Do the same with the file's content at hand."""
    with _reading(path), _opened(path, data, format) as file:
        kind = depth.kind_of(file) if mode == "RGB" else None
        if not kind:
            image: Image.Image = ImageOps.exif_transpose(file)
            image.format = file.format
            return image.convert(mode) if mode else image
        limits = format.value_range
        values = depth.read_values(path, file, lambda: Image.open(io.BytesIO(data)), bool(limits))
        return Image.fromarray(depth.to_uint8(values, path, kind, limits)).convert(mode)


def say_depth(path: str, format: Format) -> None:
    """Print which values become 0 and 255 if the image at `path` has more than 8 bits.

    With "channels" in data.json: which become 0 and 1. Raises a UserError if it lacks mean or std.
    """
    _ = format.statistics
    if format.channels:
        with _reading(path):
            values = stacks.read(path, format)
            low, high = stacks.limits(values, path, format.value_range)
        return distributed.say(f"{path}: {values.dtype}, {low:.9g} to {high:.9g} becomes 0 to 1")
    with _reading(path), _opened(path, _read_file(path), format) as image:
        kind = depth.kind_of(image)
    if kind:
        read_image(path, format=format)  # a UserError here, on all ranks, is the sooner seen
        low, high = format.value_range or depth.RANGES[kind]
        distributed.say(f"{path}: {kind}, {low:.9g} to {high:.9g} becomes 0 to 255")


def _read_file(path: str) -> bytes:
    """Return the file's content. Pillow, if it maps the file, turns some TIFFs wrongly."""
    with _reading(path):
        return files.read(path)


@contextlib.contextmanager
def _opened(path: str, data: bytes, format: Format) -> Iterator[ImageFile.ImageFile]:
    """Open the image in `data`, of which only the header is read; refuse too large ones."""
    if path.lower().endswith(".npy"):
        raise UserError(f'{path}: .npy files can only be images, with "channels" in data.json')
    with Image.open(io.BytesIO(data)) as image:
        format.check_size(path, *image.size)
        depth.check_pages(path, image)
        yield image


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
    """Name the file in what is raised within the block."""
    try:
        yield
    except READ_ERRORS as error:
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, UnidentifiedImageError):
            reason = "not an image, or of a kind that Pillow does not read"
            if path.lower().endswith((".tif", ".tiff")):
                reason += '; more channels need "channels" in data.json (check_data.py --write)'
        raise UserError(f"{path}: cannot be read ({reason}); replace or remove it") from None
