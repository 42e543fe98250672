"""Images: listing their files, and decoding no more of each than is asked for."""

import contextlib
import io
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms import InterpolationMode as Mode
from torchvision.transforms.v2 import functional as F

from engine.errors import UserError

try:
    import simplejpeg
except ImportError:  # no wheel for this machine: Pillow decodes instead
    simplejpeg = None

EXTENSIONS = {".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
SHRINKS = (8, 4, 2)  # what a JPEG decoder can divide height and width by, at less work
READ_ERRORS = (  # of Pillow, which raises TypeError and struct.error for malformed EXIF entries
    *(OSError, RuntimeError, SyntaxError, TypeError, ValueError),
    *(struct.error, Image.DecompressionBombError),
)


@dataclass(frozen=True)
class Format:
    """How image files become pixels: the flags --value-range and --max-megapixels."""

    value_range: tuple[float, float] | None = None
    max_megapixels: int = 179


DEFAULT_FORMAT = Format()
Box = tuple[int, int, int, int]  # top, left, height, width in pixels


@dataclass
class LazyImage:
    """An image or a mask, upright, that is decoded once `read` is called.

    decode: n -> uint8 (H / n, W / n, 3), of a mask (H, W); sizes are rounded up.
    shrinks: the n that `decode` takes besides 1, in descending order. is_mask: whether (H, W).
    """

    height: int
    width: int
    decode: Callable[[int], np.ndarray]
    shrinks: Sequence[int] = ()
    is_mask: bool = False

    @classmethod
    def of(cls, pixels: np.ndarray) -> "LazyImage":
        """Return uint8 (H, W, 3) or (H, W), in memory or mapped from a file, as a LazyImage."""
        height, width = pixels.shape[:2]
        return cls(height, width, lambda _: pixels, is_mask=pixels.ndim == 2)

    def read(
        self, box: Box | None = None, size: tuple[int, int] | None = None, fill: int = 0
    ) -> Tensor:
        """Return uint8 (3, H, W), of a mask (H, W): what is in `box`, resized to `size`.

        box: may reach beyond the edges, where `fill` is; default: the whole image.
        size: (height, width); default: that of `box`. Images are averaged, masks are not.
        """
        box = box or (0, 0, self.height, self.width)
        shrink = self._shrink(box, size)
        top, left, height, width = (value // shrink for value in self.snap(box, size))
        bottom, right = top + height, left + width
        part = self.decode(shrink)[max(top, 0) : bottom, max(left, 0) : right]
        # A copy, because augmentation may change it. Its channels are first only by its strides:
        # in memory they stay last, which is faster from here on.
        pixels = torch.from_numpy(np.array(part))
        pixels = pixels[None] if self.is_mask else pixels.movedim(2, 0)
        rows, columns = part.shape[:2]
        if (rows, columns) != (height, width):
            before = max(-left, 0), max(-top, 0)
            after = width - columns - before[0], height - rows - before[1]
            pixels = F.pad(pixels, [*before, *after], fill=fill)
        if size and pixels.shape[1:] != size:
            mode = Mode.NEAREST_EXACT if self.is_mask else Mode.BILINEAR
            pixels = F.resize(pixels, list(size), mode, antialias=not self.is_mask)
        return pixels[0] if self.is_mask else pixels

    def snap(self, box: Box, size: tuple[int, int] | None) -> Box:
        """Return the `box` rounded to the decoder's grid, by less than a pixel of the result.

        `read` does the same. A mask needs the box that its image returns here.
        """
        shrink = self._shrink(box, size)
        edges = (box[0], box[1], box[0] + box[2], box[1] + box[3])
        top, left, bottom, right = (round(edge / shrink) * shrink for edge in edges)
        return top, left, bottom - top, right - left

    def _shrink(self, box: Box, size: tuple[int, int] | None) -> int:
        least = min(box[2] / size[0], box[3] / size[1]) if size else 1
        return next((shrink for shrink in self.shrinks if shrink <= least), 1)


def open_image(path: str, format: Format = DEFAULT_FORMAT) -> LazyImage:
    """Return the image at `path`, in RGB; a UserError that names it if it cannot be read."""
    with _reading(path), open(path, "rb", buffering=0) as file:
        data = file.read()
        with Image.open(io.BytesIO(data)) as image:
            kind, mode, (width, height) = image.format, image.mode, image.size
            turned = {"exif", "xmp"} & image.info.keys() and image.getexif().get(0x112, 1) != 1
    if kind not in ("JPEG", "MPO") or mode not in ("RGB", "L") or turned:
        return LazyImage.of(np.array(read_image(path, format=format)))

    def decode(shrink: int) -> np.ndarray:
        rows, columns = -(-height // shrink), -(-width // shrink)
        if simplejpeg:
            # It shrinks as far as these sizes allow. What it refuses Pillow may read, or explain.
            with contextlib.suppress(ValueError):
                return simplejpeg.decode_jpeg(data, min_height=rows, min_width=columns)
        with _reading(path), Image.open(io.BytesIO(data)) as image:
            image.draft("RGB", (width // shrink, height // shrink))
            return np.array(image.convert("RGB"))

    shrinks = [shrink for shrink in SHRINKS if shrink <= min(height, width)]
    return LazyImage(height, width, decode, shrinks)


def decoder() -> str:
    """Return the name of the library that decodes JPEGs here."""
    return "simplejpeg" if simplejpeg else "Pillow"


def read_image(path: str, mode: str | None = "RGB", format: Format = DEFAULT_FORMAT) -> Image.Image:
    """Return the image at `path`, upright and converted to `mode` (None: as it is stored).

    Raises a UserError that names the file if it cannot be read whole.
    """
    with _reading(path), Image.open(path) as file:
        image: Image.Image = ImageOps.exif_transpose(file)
        if mode == "RGB" and image.mode.startswith("I"):  # 16 bits: keep the upper 8
            image = image.point(lambda value: value / 256).convert("L")
        return image.convert(mode) if mode else image.copy()


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
    try:
        yield
    except READ_ERRORS as error:
        if isinstance(error, UnidentifiedImageError):
            reason = "not an image"
        else:
            reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path}: cannot be read ({reason}); replace or remove it") from None


def list_images(folder: Path) -> list[str]:
    """Return the paths of all images below `folder`, sorted; a UserError if there is none."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such file or folder")
    paths = [
        os.path.join(parent, name)
        for parent, _, names in walk(folder)
        for name in names
        if os.path.splitext(name)[1].lower() in EXTENSIONS and not name.startswith(".")
    ]
    if not paths:
        raise UserError(f"{folder}: no images in it; expected {', '.join(sorted(EXTENSIONS))}")
    return sorted(paths)


def walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Like os.walk, sorted and through links, but into each folder once and into no hidden one.

    Links to a parent and what tools leave (.ipynb_checkpoints, __MACOSX) would add duplicates.
    """
    real = os.path.realpath(folder)
    seen = {real, *map(str, Path(real).parents)}
    for parent, folders, names in os.walk(folder, followlinks=True):
        found, folders[:] = sorted(folders), []
        for name in found:
            real = os.path.realpath(os.path.join(parent, name))
            if real not in seen and not name.startswith(".") and name != "__MACOSX":
                seen.add(real)
                folders.append(name)
        yield parent, folders, names


def collect(inputs: Sequence[str | Path]) -> list[tuple[str, str]]:
    """Return (path, name) of each image among `inputs`, which are files and folders.

    The name is the path below the folder that was given, without its extension.
    """
    found = []
    for given in inputs:
        is_file = os.path.isfile(given)
        for path in [str(given)] if is_file else list_images(Path(given)):
            below = os.path.basename(path) if is_file else os.path.relpath(path, given)
            found.append((path, os.path.splitext(below)[0]))
    return found


def by_name(images: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return {name: path} of (path, name) pairs; a UserError if two share a name."""
    found: dict[str, str] = {}
    for path, name in images:
        if name in found:
            raise UserError(
                f"{path} and {found[name]} have the same name; rename one, or pass one at a time"
            )
        found[name] = path
    return found


def split(paths: Sequence[str], root: Path) -> tuple[list[str], list[str]]:
    """Split `paths` into 85 % for training and 15 % for validation, at least one in each.

    The order is by a checksum of the path below `root`: the same on every machine and in every
    run, and adding an image moves few others.
    """
    if len(paths) < 2:
        raise UserError(f"{paths[0]}: too few images to split; add more, or a val folder")
    by_chance = sorted(paths, key=lambda p: zlib.crc32(os.fsencode(os.path.relpath(p, root))))
    count = max(1, round(0.15 * len(paths)))
    return sorted(by_chance[count:]), sorted(by_chance[:count])
