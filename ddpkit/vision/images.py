"""Images: JPEGs are decoded at a fraction of their size if that is enough; 16 bits if wanted.

Of more than 8 bits, the type decides what becomes 0 and 255: equal values stay equal in all files.
"""

import contextlib
import errno
import functools
import importlib.util
import io
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile
from torch import Tensor
from torch.nn.functional import interpolate, pad

from ddpkit import files
from ddpkit.data.format import DEFAULT_FORMAT, NAME, Format
from ddpkit.errors import LineError, UserError

try:
    import simplejpeg
except ImportError:  # no wheel for this machine: Pillow decodes instead
    simplejpeg = None

SHRINKS = (8, 4, 2)  # what a JPEG decoder can divide height and width by, at less work
# Entries of TIFF, of which EXIF has the first.
ORIENTATION = 274
BITS_PER_SAMPLE = 258
PHOTOMETRIC = 262
SAMPLES_PER_PIXEL = 277
SAMPLE_FORMAT = 339
SIGNED = 2  # a sample format
# Markers in JPEGs: the pixels; what programs note, but for JFIF's and Adobe's, which tell colours.
START_OF_SCAN = b"\xda"
COMMENTS = [bytes([number]) for number in (*range(0xE1, 0xEE), 0xEF, 0xFE)]
# Whatever a file is named, it is opened as one of these: they start no program, as EPS
# starts Ghostscript, and tell their size before anything is decoded.
FORMATS = ["JPEG", "PNG", "TIFF", "WEBP", "BMP", "GIF", "PPM", "JPEG2000"]
if importlib.util.find_spec("PIL.AvifImagePlugin"):  # not in older versions
    FORMATS.append("AVIF")
HEIC_HINT = "; HEIC needs a package: python -m pip install pillow-heif"
with contextlib.suppress(ImportError):  # it reads what phones write
    from pillow_heif import register_heif_opener

    register_heif_opener()
    FORMATS.append("HEIF")
    HEIC_HINT = ""
# at the end, by some cameras
PADDING = re.compile(r"\b\d\d? extraneous bytes before marker 0xd9")
STRETCHED = "stretched"  # in Image.info
LFS = b"version https://git-lfs"
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
GREYS = bytes(np.arange(256, dtype=np.uint8).repeat(3))  # a palette, R G B, ...
RANGES = {"uint8": (0, 255), "uint16": (0, 65535), "float": (0.0, 1.0)}  # black, white
# Format.check_size decides instead, in every process that reads
Image.MAX_IMAGE_PIXELS = None

Box = tuple[int, int, int, int]  # top, left, height, width in pixels


class LazyImage(Image.Image):
    """An image or a mask, upright, that is decoded once its pixels are asked for.

    It is a PIL image, so that PIL's methods and the transforms of torchvision take it, and
    np.asarray(image) is uint8 (H, W, 3), which albumentations takes; of a mask (H, W). `read`
    returns a part at another size, as a tensor, and decodes a JPEG no larger than that needs.

    With "channels" in data.json pixels are float32 (H, W, channels); more than one are no PIL
    image: a UserError, but from np.asarray and `read`.

    decode: n -> the pixels at 1 / n of height and width, rounded up. shrinks: the n that `decode`
    takes besides 1, in descending order. grid: those of the image that a mask belongs to: its parts
    begin and end where the image's do. is_turned: whether EXIF has turned it, which its height and
    width do not show.

        def val_transform(image: ddpkit.LazyImage) -> Tensor:
            return image.read((0, 0, image.height, image.width), (224, 224))
    """

    def __init__(
        self,
        height: int,
        width: int,
        decode: Callable[[int], np.ndarray],
        shrinks: Sequence[int] = (),
        mode: str = "RGB",
    ) -> None:
        super().__init__()
        self._size = (width, height)  # as PIL's own classes do
        self._mode = mode
        self.decode = decode
        self.shrinks = shrinks
        self.grid: Sequence[int] = ()
        self.is_turned = False
        self.is_loaded = False  # into memory of PIL, where its methods may change it

    @classmethod
    def of(cls, pixels: np.ndarray) -> "LazyImage":
        """Return pixels (H, W, channels) or (H, W), in memory or mapped from a file."""
        if pixels.ndim == 2:
            return LazyMask(pixels, lambda part: part)
        if pixels.dtype == np.uint8 and pixels.shape[2] == 3:
            mode = "RGB"
        else:
            # PIL has no images of several floats: such a mode is none of its own
            mode = "F" if pixels.shape[2] == 1 else f"F;{pixels.shape[2]}"
        return cls(pixels.shape[0], pixels.shape[1], lambda _: pixels, mode=mode)

    @functools.cached_property
    def pixels(self) -> np.ndarray:
        """All of them, as they were decoded."""
        return self.decode(1)

    def load(self) -> Any:
        """Decode the image for PIL, whose methods call it."""
        if not self.is_loaded:
            self.getbands()  # an error for what is no PIL image
            pixels = self.pixels
            if self.mode == "F":
                pixels = pixels[..., 0]
            plain = Image.fromarray(pixels)
            if self.mode == "P":
                plain.putpalette(GREYS)
            self.im = plain.im
            self.palette = plain.palette
            self.is_loaded = True
            self.shrinks = ()
        return super().load()

    def getbands(self) -> tuple[str, ...]:
        if self.mode.startswith("F;"):
            raise UserError(
                f'"channels": {self.mode[2:]} in {NAME}: an image is no PIL image then, which a '
                "transform in dataset.py needs: begin with image.read(), a tensor, or with "
                "np.asarray(image)"
            )
        return super().getbands()

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if self.is_loaded:
            return super().__array_interface__
        # a view, not to be written to, as Pillow's
        interface = self.pixels.__array_interface__
        return {**interface, "data": (interface["data"][0], True)}

    def __reduce__(self) -> tuple:
        # for another process, which cannot get the function `decode`
        return LazyImage.of, (np.array(self._decoded(1)),)

    def read(
        self,
        box: Box | None = None,
        size: tuple[int, int] | None = None,
        fill: int = 0,
    ) -> Tensor:
        """Return uint8 (3, H, W): what is in `box`, resized to `size`, as the mean of its pixels.

        With "channels" in data.json float32 (channels, H, W).
        box: may reach beyond the edges, where `fill` is; default: the whole image. With a size it
        is rounded to the decoder's grid, by less than a pixel of the result.
        size: (height, width); default: that of `box`.
        """
        box = box or (0, 0, self.height, self.width)
        shrink, (top, left, bottom, right) = self._edges(box, size)
        # what of it the image has
        rows = slice(max(top, 0), max(bottom, 0))
        columns = slice(max(left, 0), max(right, 0))
        # A copy, because augmentation may change it. Its channels are first only by its
        # strides: in memory they stay last, which is faster from here on.
        part = torch.from_numpy(self._decoded(shrink)[rows, columns][None].copy())
        pixels = part.permute(0, 3, 1, 2)
        missing_rows = bottom - top - pixels.shape[2]
        missing_columns = right - left - pixels.shape[3]
        if missing_rows or missing_columns:
            # how much of that is at the left and above; the rest is at the others
            x = min(max(-left, 0), right - left)
            y = min(max(-top, 0), bottom - top)
            edges = [x, missing_columns - x, y, missing_rows - y]
            pixels = pad(pixels, edges, value=fill)
        if size and pixels.shape[2:] != size:
            pixels = interpolate(pixels, size, mode="bilinear", antialias=True)
        return pixels[0]

    def _decoded(self, shrink: int) -> np.ndarray:
        if self.is_loaded:  # PIL may have changed it
            pixels = np.asarray(self)
            return pixels[..., None] if self.mode == "F" else pixels
        return self.decode(shrink) if shrink > 1 else self.pixels

    def _edges(
        self,
        box: Box,
        size: tuple[int, int] | None,
    ) -> tuple[int, Box]:
        """Return by how much to shrink, and the top, left, bottom and right edges then."""
        top, left, height, width = box
        # by how much it has to shrink at least; more than that would lose pixels
        least = min(height / size[0], width / size[1]) if size else 1
        cell = next((n for n in self.shrinks or self.grid if n <= least), 1)
        # a mask is read whole, but its parts begin and end where the image's do
        shrink = cell if self.shrinks else 1
        edges = [top, left, top + height, left + width]
        top, left, bottom, right = [round(n / cell) * (cell // shrink) for n in edges]
        return shrink, (top, left, bottom, right)


class LazyMask(LazyImage):
    """A mask, of mode P, whose class numbers PIL never averages.

    stored: its pixels as the file has them, (H, W). translate: makes class numbers of a part of
    them, so that only what is read has to be looked up.
    """

    def __init__(
        self,
        stored: np.ndarray,
        translate: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        height, width = stored.shape
        super().__init__(height, width, lambda _: translate(stored), mode="P")
        self.stored = stored
        self.translate = translate

    def transform(
        self,
        *how: Any,
        **options: Any,
    ) -> Image.Image:
        """As PIL's, which rotations and shears call, but not filled with a class."""
        if options.get("fillcolor") in (None, 0, (0,)):
            raise UserError(
                "a mask that is rotated or sheared before it is cropped gets 0, a class, at its "
                "edges: do it after the crop, whose masks are tv_tensors.Mask, with fill="
                '{tv_tensors.Mask: 255, "others": 0}'
            )
        return super().transform(*how, **options)

    def read(
        self,
        box: Box | None = None,
        size: tuple[int, int] | None = None,
        fill: int = 0,
    ) -> Tensor:
        """Return uint8 (H, W), as `LazyImage.read`, but of single pixels."""
        box = box or (0, 0, self.height, self.width)
        _, (top, left, bottom, right) = self._edges(box, size)
        size = size or (bottom - top, right - left)
        stored = self._decoded(1) if self.is_loaded else self.stored
        y, rows = _nearest(top, bottom, size[0], self.height)
        x, columns = _nearest(left, right, size[1], self.width)
        if isinstance(columns, slice):
            part = stored[rows, columns].copy()
        else:  # a row at a time: at once takes six times as long
            part = stored[rows].take(columns, axis=1)
        if part.size and not self.is_loaded:
            part = self.translate(part)
        height, width = part.shape
        if (height, width) == size:
            return torch.from_numpy(part)
        filled = np.full(size, fill, np.uint8)
        if part.size:
            filled[y : y + height, x : x + width] = part
        return torch.from_numpy(filled)


def _nearest(
    first: int,
    end: int,
    count: int,
    length: int,
) -> tuple[int, slice | np.ndarray]:
    """Return which rows, or columns, nearest-exact of torch takes if it resizes those from `first`
    to `end` to `count`; of them, how many lie before the first of the `length` that there are.
    """
    if count == end - first:
        return max(-first, 0), slice(max(first, 0), max(end, 0))
    numbers = torch.arange(first, end, dtype=torch.float32)
    taken = interpolate(numbers[None, None], count, mode="nearest-exact")
    places = taken.flatten().int().numpy()
    is_inside = (places >= 0) & (places < length)
    return int(np.count_nonzero(places < 0)), places[is_inside]


def open_image(
    path: str,
    format: Format = DEFAULT_FORMAT,
) -> LazyImage:
    """Return the image at `path`, in RGB or with the channels that `format` asks for.

    In RGB of 8 bits what is transparent is white.

    Raises a UserError that names the file if it cannot be read.
    """
    with _reading(path):
        data = files.read_file(path)
        if format.channels:
            values = read_values(path, data, format)
            return LazyImage.of(_to_floats(path, values, format))
        with _opened(path, data, format) as file:
            if is_deep(file):
                values = read_values(path, data, format)
                return LazyImage.of(_to_rgb(path, values, format))
            size = file.size
            orientation = file.getexif().get(ORIENTATION, 1)
            if file.format in ("JPEG", "MPO") and file.mode in ("RGB", "L"):
                image = _open_jpeg(path, data, size)
                if orientation == 1:
                    return image
                # turned as Pillow does it: the pixels get the entry, then lose it
                pixels = Image.fromarray(image.decode(1))
                pixels.getexif()[ORIENTATION] = orientation
                image = LazyImage.of(np.array(ImageOps.exif_transpose(pixels)))
            else:
                upright = _upright(file, data)
                if is_clear(upright):  # not the colours that are hidden there
                    white = Image.new("RGBA", upright.size, "white")
                    upright = Image.alpha_composite(white, upright.convert("RGBA"))
                # to convert RGB would copy it
                if upright.mode != "RGB":
                    upright = upright.convert("RGB")
                image = LazyImage.of(np.array(upright))
            # a quarter turn shows by the size
            image.is_turned = orientation in range(2, 9) and size == image.size
            return image


def _divide(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the segments of a JPEG's header, without what lies between them, and the rest."""
    header = []
    at = data.find(b"\xff", 2)
    while at >= 0 and data[at + 1 : at + 2] != START_OF_SCAN:
        end = at + 1
        if data[end : end + 1] not in (b"", b"\0", b"\xff"):  # else it is no segment
            end += 1 + int.from_bytes(data[at + 2 : at + 4], "big")
            header.append(data[at:end])
        at = data.find(b"\xff", end)
    return header, data[at:]


def _open_jpeg(
    path: str,
    data: bytes,
    size: tuple[int, int],
) -> LazyImage:
    width, height = size

    def decode(shrink: int) -> np.ndarray:
        rows = -(-height // shrink)  # rounded up
        columns = -(-width // shrink)
        with _reading(path):
            pixels = _decode_strictly(data, "RGB", rows, columns)
            if pixels is not None:
                return pixels
            # without simplejpeg, or what it has failed at: Pillow may read it, or explain
            with _open_bytes(data) as image:
                image.draft("RGB", (width // shrink, height // shrink))
                return np.array(image.convert("RGB"))

    shrinks = [n for n in SHRINKS if n <= min(height, width)]
    return LazyImage(height, width, decode, shrinks)


def _decode_strictly(
    data: bytes,
    kind: str,
    rows: int,
    columns: int,
) -> np.ndarray | None:
    """Return the pixels of a JPEG, at least so many rows and columns; None if Pillow has to try.

    Raises what simplejpeg says of the pixels, which Pillow keeps to itself. It says one thing
    alone, the first: so it gets nothing of the header but what decides the pixels.
    """
    if not simplejpeg:
        return None
    header, rest = _divide(data)
    kept = [segment for segment in header if segment[1:2] not in COMMENTS]
    bare = b"".join([data[:2], *kept, rest])
    try:
        return simplejpeg.decode_jpeg(bare, kind, min_height=rows, min_width=columns)
    except ValueError as error:
        text = str(error)
        # of padding: the pixels are whole
        if text.startswith("Corrupt") and not PADDING.search(text):
            raise
    return None


def _upright(
    file: ImageFile.ImageFile,
    data: bytes,
) -> Image.Image:
    """Return the image in `data`, which `file` has opened, as EXIF turns it; of a palette RGBA."""
    if file.format in ("JPEG", "MPO"):
        kind = "CMYK" if file.mode == "CMYK" else "RGB"
        _decode_strictly(data, kind, 1, 1)  # read whole, at an eighth of its size
    # in place, because a copy takes a third of the time of decoding
    ImageOps.exif_transpose(file, in_place=True)
    # of a palette, of which Pillow warns if it becomes anything else, or of one colour
    return file.convert("RGBA") if "transparency" in file.info else file


def is_clear(image: Image.Image) -> bool:
    """Return whether an image with an alpha channel has pixels that are not opaque."""
    return image.mode in ("LA", "RGBA") and image.getchannel("A").getextrema()[0] != 255


def read_stored(
    path: str,
    format: Format = DEFAULT_FORMAT,
) -> Image.Image:
    """Return the image at `path`, upright and otherwise as it is stored; for masks."""
    with _reading(path, is_mask=True):
        # Its content, because Pillow, if it maps the file, turns some TIFFs wrongly.
        data = files.read_file(path)
        with _opened(path, data, format, is_mask=True) as file:
            if is_deep(file) and len(file.getbands()) > 1:
                raise ValueError(
                    "colours or alpha of 16 bits, of which 8 would be read"
                )
            # greys of 2 or 4 bits, which Pillow stretches to 0 to 255
            file.info[STRETCHED] = bool(re.search("L;[24]", str(file.tile)))
            ImageOps.exif_transpose(file, in_place=True)
            return file


def is_deep(file: ImageFile.ImageFile) -> bool:
    """Return whether the values in a file, not decoded yet, have more than 8 bits."""
    if isinstance(file, TiffImageFile):
        return max(file.tag_v2.get(BITS_PER_SAMPLE, (1,))) > 8
    # I: integers of 16 or 32 bits, F: floats. Of a PNG in colour only its tiles say so.
    return file.mode[0] in "IF" or (file.format == "PNG" and ";16B" in str(file.tile))


def read_values(
    path: str,
    data: bytes,
    format: Format,
) -> np.ndarray:
    """Return the values of a file, of their own type: (H, W, channels)."""
    if is_array(path):
        # whatever size the header claims, no memory is touched beyond the data
        values = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    elif data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):  # TIFF, and BigTIFF
        values = _read_tiff(path, data, format)
    else:
        with _opened(path, data, format) as file:
            if is_deep(file):
                mode = file.mode
                if mode[0] not in "IF":  # Pillow would read 8 of the bits
                    raise ValueError(
                        "a PNG of 16 bits that is not grey; save it as TIFF"
                    )
            else:
                is_grey = file.mode in ("1", "L", "LA") and format.channels != 4
                mode = "L" if is_grey else "RGB"
                if file.has_transparency_data and format.channels in (2, 4):
                    mode += "A"
            values = np.asarray(_upright(file, data).convert(mode))
    if values.ndim == 2:
        values = values[..., None]
    if values.ndim != 3 or values.shape[2] != (format.channels or values.shape[2]):
        raise UserError(
            f"{path}: values of shape {values.shape}, not (height, width, "
            f"{format.channels}); save it so, or correct data.json"
        )
    format.check_size(path, (values.shape[1], values.shape[0]))  # that of an array
    return values


def _read_tiff(
    path: str,
    data: bytes,
    format: Format,
) -> np.ndarray:
    """Return (H, W) or (H, W, channels); pages of one size are channels."""
    try:
        import tifffile
    except ImportError:
        raise UserError(
            f"{path}: needs a package: python -m pip install tifffile"
        ) from None
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # it logs what it raises
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        series = file.series[0]
        height = series.shape[series.axes.index("Y")]
        width = series.shape[series.axes.index("X")]
        format.check_size(path, (width, height))
        tags = file.pages.first.tags
        photometric = tags.valueof(PHOTOMETRIC)
        if tags.valueof(ORIENTATION, default=1) != 1 or photometric == 0:
            raise ValueError(
                "turned, or 0 is white in it; save it upright, with 0 as black"
            )
        # 1: grey, 2: RGB. Of extra samples 1 is an alpha that multiplies the others.
        is_multiplied = 1 in file.pages.first.extrasamples
        is_other = photometric not in (None, 1, 2) or is_multiplied
        if is_other and not format.channels:
            raise ValueError(
                "neither grey nor RGB, or multiplied by its alpha; save it as RGB"
            )
        channels = math.prod(series.shape) // (height * width)
        if channels > (format.channels or 4):
            raise ValueError(
                f'{channels} channels, not the "channels" in {NAME}, or 1 to 4'
            )
        values = series.asarray()
    # each channel, or page, apart
    is_planar = values.ndim == 3 and series.axes.endswith("YX")
    return np.moveaxis(values, 0, -1) if is_planar else values


def _ends(
    path: str,
    values: np.ndarray,
    format: Format,
    may_be_dark: bool,
) -> Sequence[float]:
    """Return which of the `values` become black and white; a UserError if that is not known."""
    type = "float" if values.dtype.kind == "f" else values.dtype.name
    lowest = float(values.min())
    highest = float(values.max())
    if not math.isfinite(lowest + highest):
        raise UserError(f"{path}: some of its values are NaN or infinite; replace them")
    if format.value_range and type != "uint8":
        return format.value_range
    low, high = RANGES.get(type, (0, -1))  # of other types none is known
    if lowest < low or highest > high or (0 < highest < high / 8 and not may_be_dark):
        raise UserError(
            f"{path}: {type} values of {lowest:.6g} to {highest:.6g} would be nearly black "
            f'or white; write "value_range": [BLACK, WHITE] into {NAME}'
        )
    return low, high


def _to_rgb(
    path: str,
    values: np.ndarray,
    format: Format,
) -> np.ndarray:
    """Return `values` as uint8 (H, W, 3), in 256 steps of equal width: of 16 bits the upper 8."""
    height, width, channels = values.shape
    values = values[..., : 3 if channels > 2 else 1]  # without alpha
    low, high = _ends(path, values, format, may_be_dark=False)
    pixels = ((values.astype(np.float64) - low) * 256 / (high - low)).clip(0, 255)
    return np.broadcast_to(pixels.astype(np.uint8), (height, width, 3))


def _to_floats(
    path: str,
    values: np.ndarray,
    format: Format,
) -> np.ndarray:
    """Return `values` as float32, 0 to 1."""
    low, high = _ends(path, values, format, may_be_dark=True)
    # Integers of 32 bits have more digits than float32.
    exact = np.float32 if values.itemsize <= 2 else np.float64
    pixels: np.ndarray = values.astype(exact)
    shares = ((pixels - low) / (high - low)).clip(0, 1)
    return shares.astype(np.float32, copy=False)


def visible(image: Tensor) -> Tensor:
    """Return uint8 (3, H, W) for display; floats without their darkest and brightest 1 %."""
    if image.dtype == torch.uint8 and len(image) == 3:
        return image
    # of two channels, or of one, the first in grey
    shown = image[: 3 if len(image) > 2 else 1].float()
    # torch's quantile takes no more than 2^24 values
    ends = np.quantile(shown.numpy(), (0.01, 0.99), axis=(1, 2), keepdims=True)
    low, high = torch.from_numpy(ends).float()
    stretched = (shown - low) / (high - low).clamp(min=1e-6) * 255
    return stretched.clamp(0, 255).byte().expand(3, -1, -1)


def is_array(path: str) -> bool:
    return path.lower().endswith(".npy")


@contextlib.contextmanager
def open_header(path: Path | str) -> Iterator[ImageFile.ImageFile]:
    """Give the block an image file, of which only the header is read."""
    with files.open_file(path) as file:
        yield Image.open(file, formats=FORMATS)


def _open_bytes(data: bytes) -> ImageFile.ImageFile:
    return Image.open(io.BytesIO(data), formats=FORMATS)


@contextlib.contextmanager
def _opened(
    path: str,
    data: bytes,
    format: Format,
    is_mask: bool = False,
) -> Iterator[ImageFile.ImageFile]:
    """Open the image in `data`, of which only the header is read; refuse what is too large."""
    if data.startswith(LFS):
        raise UserError(f"{path}: a Git LFS pointer, not the image; run: git lfs pull")
    or_channels = "" if is_mask else f', or write the number of "channels" into {NAME}'
    with _open_bytes(data) as image:
        format.check_size(path, image.size)
        # Pillow reads the following without a word, and not as it is meant.
        if isinstance(image, TiffImageFile):
            samples = image.tag_v2.get(SAMPLES_PER_PIXEL, 1)
            read = len(image.getbands())
            if image.n_frames > 1:
                raise UserError(
                    f"{path}: {image.n_frames} pages; save one per file{or_channels}"
                )
            if samples != read:
                raise UserError(
                    f"{path}: {samples} channels, of which {read} would be read; save it "
                    f"with {read}{or_channels}"
                )
            if image.mode == "L" and SIGNED in image.tag_v2.get(SAMPLE_FORMAT, ()):
                raise ValueError("8 bits with a sign; save it with 16")
        if image.format == "BMP":
            bits = data[24 if data[14] == 12 else 28]  # 12: the short header of OS/2
            if bits != {"1": 1, "L": 8}.get(image.mode, bits):
                raise ValueError(
                    "a grey palette of other bits, misread by Pillow; save it as PNG"
                )
        yield image


@contextlib.contextmanager
def _reading(
    path: str,
    is_mask: bool = False,
) -> Iterator[None]:
    """Name the file in what is raised within the block."""
    try:
        yield
    except LineError:
        raise
    # libraries raise errors of many kinds for malformed files
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        number = getattr(error, "errno", None)
        remedy = "replace or remove it"
        if os.path.isfile(path) and not os.path.getsize(path):
            reason = "empty file"
        elif isinstance(error, UnidentifiedImageError):
            reason = f"not an image of a type that is read{HEIC_HINT}"
            if is_mask:
                remedy = (
                    "masks are PNG, or without loss BMP, WebP or TIFF of 8 to 32 bits"
                )
            elif path.lower().endswith((".npy", ".tif", ".tiff")):
                remedy = f'if it is whole, it needs the number of "channels" in {NAME}'
        elif isinstance(error, MemoryError) or number in EXHAUSTED:
            reason = f"memory or file handles ran out: {reason}"
            remedy = "lower --workers or --batch-size, or shrink it"
        elif isinstance(error, ImportError) or "imagecodecs" in reason:
            # tifffile asks for it
            remedy = (
                "its compression needs a package: python -m pip install imagecodecs"
            )
        reason = " ".join(reason.split())  # some have several lines
        raise UserError(f"{path}: cannot be read ({reason}); {remedy}") from None
