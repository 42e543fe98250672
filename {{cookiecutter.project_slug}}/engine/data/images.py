"""Pictures: listing them, and decoding no more of each than is asked for."""

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
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import InterpolationMode as Mode
from torchvision.transforms.v2 import functional as F

from engine.data import turbojpeg
from engine.errors import UserError

EXTENSIONS = {".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
SHRINKS = (8, 4, 2)  # what a JPEG decoder can divide height and width by, at less work
READ_ERRORS = (  # of Pillow, whose TypeErrors and struct.errors are of odd EXIF entries
    *(OSError, RuntimeError, SyntaxError, TypeError, ValueError),
    *(struct.error, Image.DecompressionBombError),
)

Box = tuple[int, int, int, int]  # top, left, height, width in pixels


@dataclass
class Picture:
    """A picture or a mask, upright, of which `read` decodes a part.

    decode: (box within the picture, shrunk by n; n) -> uint8 (H, W, 3), of a mask (H, W).
    shrinks: the n that it takes beside 1, from the greatest on. is_mask: whether (H, W).
    """

    height: int
    width: int
    decode: Callable[[Box, int], Tensor]
    shrinks: Sequence[int] = ()
    is_mask: bool = False

    @classmethod
    def of(cls, pixels: np.ndarray) -> "Picture":
        """Return uint8 (H, W, 3) or (H, W) in memory, or mapped there, as a Picture."""

        def decode(box: Box, shrink: int) -> Tensor:
            top, left, height, width = box  # a copy: augmentation may change it
            return torch.from_numpy(np.array(pixels[top : top + height, left : left + width]))

        return cls(pixels.shape[0], pixels.shape[1], decode, is_mask=pixels.ndim == 2)

    def read(
        self, box: Box | None = None, size: tuple[int, int] | None = None, fill: int = 0
    ) -> Tensor:
        """Return uint8 (3, H, W), of a mask (H, W): what is in `box`, resized to `size`.

        box: may reach beyond the edges, where `fill` is; default: the whole picture.
        size: (height, width); default: that of `box`. Pictures are averaged, masks are not.
        """
        box = box or (0, 0, self.height, self.width)
        shrink = self._shrink(box, size)
        top, left, height, width = (value // shrink for value in self.snap(box, size))
        bottom, right = top + height, left + width
        first_row, first_column = max(top, 0), max(left, 0)
        rows = min(bottom, -(-self.height // shrink)) - first_row
        columns = min(right, -(-self.width // shrink)) - first_column
        pixels = self.decode((first_row, first_column, rows, columns), shrink)
        # Channels first, but only in name: in memory they stay last, which is faster from here on.
        pixels = pixels[None] if self.is_mask else pixels.contiguous().movedim(2, 0)
        if (rows, columns) != (height, width):
            edges = [first_column - left, first_row - top]
            edges += [width - columns - edges[0], height - rows - edges[1]]
            pixels = F.pad(pixels, edges, fill=fill)
        if size and pixels.shape[1:] != size:
            mode = Mode.NEAREST_EXACT if self.is_mask else Mode.BILINEAR
            pixels = F.resize(pixels, list(size), mode, antialias=not self.is_mask)
        return pixels[0] if self.is_mask else pixels

    def snap(self, box: Box, size: tuple[int, int] | None) -> Box:
        """Return the `box` that `read` takes: that one, moved by less than a pixel of the result.

        A mask is to be read with what its picture returns here.
        """
        shrink = self._shrink(box, size)
        edges = (box[0], box[1], box[0] + box[2], box[1] + box[3])
        top, left, bottom, right = (round(edge / shrink) * shrink for edge in edges)
        return top, left, bottom - top, right - left

    def _shrink(self, box: Box, size: tuple[int, int] | None) -> int:
        least = min(box[2] / size[0], box[3] / size[1]) if size else 1
        return next((shrink for shrink in self.shrinks if shrink <= least), 1)


def open_picture(path: str) -> Picture:
    """Return the picture at `path`, in RGB; a UserError that names it if it cannot be read."""
    with _reading(path), open(path, "rb", buffering=0) as file:
        data = bytearray(file.read())
        with Image.open(io.BytesIO(data)) as image:
            kind, mode, (width, height) = image.format, image.mode, image.size
            turned = {"exif", "xmp"} & image.info.keys() and image.getexif().get(0x112, 1) != 1
    if kind not in ("JPEG", "MPO") or mode not in ("RGB", "L") or turned:
        return Picture.of(np.array(read_image(path)))
    source = torch.frombuffer(data, dtype=torch.uint8)

    def decode(box: Box, shrink: int) -> Tensor:
        top, left, rows, columns = box
        if (pixels := turbojpeg.decode(source, box, shrink)) is not None:
            return pixels
        with _reading(path):
            if shrink == 1:
                pixels = decode_jpeg(source, ImageReadMode.RGB).movedim(0, 2)
            else:
                image = Image.open(io.BytesIO(data))
                image.draft("RGB", (max(width // shrink, 1), max(height // shrink, 1)))
                pixels = torch.from_numpy(np.array(image.convert("RGB")))
        return pixels[top : top + rows, left : left + columns]

    return Picture(height, width, decode, SHRINKS)


def decoder() -> str:
    """Return the name of what decodes JPEGs here."""
    return "libjpeg-turbo, in parts" if turbojpeg.library() else "torchvision"


def read_image(path: str, mode: str | None = "RGB") -> Image.Image:
    """Return the picture at `path`, upright and converted to `mode` (None: as it is stored).

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
            reason = "not a picture"
        elif isinstance(error, RuntimeError):  # torchvision's begins with its own source file
            reason = str(error).rsplit(", ", 1)[-1]
        else:
            reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path}: cannot be read ({reason}); replace or remove it") from None


def list_images(folder: Path) -> list[str]:
    """Return the paths of all pictures below `folder`, sorted; a UserError if there is none."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such file or folder")
    paths = [
        os.path.join(parent, name)
        for parent, _, names in walk(folder)
        for name in names
        if os.path.splitext(name)[1].lower() in EXTENSIONS and not name.startswith(".")
    ]
    if not paths:
        raise UserError(f"{folder}: no pictures in it; expected {', '.join(sorted(EXTENSIONS))}")
    return sorted(paths)


def walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """As os.walk, through links, with folders sorted; into each folder once, into no hidden one.

    Links back up and what tools leave (.ipynb_checkpoints, __MACOSX) would add copies of pictures.
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
    """Return (path, name) of each picture that `inputs`, files and folders, hold.

    The name is the path below the folder that was given, without its ending.
    """
    found = []
    for given in inputs:
        is_file = os.path.isfile(given)
        for path in [str(given)] if is_file else list_images(Path(given)):
            below = os.path.basename(path) if is_file else os.path.relpath(path, given)
            found.append((path, os.path.splitext(below)[0]))
    return found


def by_name(pictures: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return {name: path} of (path, name) pairs; a UserError if two share a name."""
    found: dict[str, str] = {}
    for path, name in pictures:
        if name in found:
            raise UserError(
                f"{path} and {found[name]}: the same name; rename one, or take one at a time"
            )
        found[name] = path
    return found


def split(paths: Sequence[str], root: Path) -> tuple[list[str], list[str]]:
    """Deal `paths` into 85 % for training and 15 % for validation, one at least in each.

    The order is by a checksum of the path below `root`: the same on every machine and in every
    run, and a picture added later moves few others.
    """
    if len(paths) < 2:
        raise UserError(
            f"{paths[0]}: too few pictures to set some aside; add more, or a val folder"
        )
    by_chance = sorted(paths, key=lambda p: zlib.crc32(os.fsencode(os.path.relpath(p, root))))
    count = max(1, round(0.15 * len(paths)))
    return sorted(by_chance[count:]), sorted(by_chance[:count])
