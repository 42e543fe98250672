"""Images of more than 8 bits, or of other channels than RGB: which values become 0 and 255.

The type of a file's values decides, not their extent in one image: equal values stay equal in the
whole set. What would come out nearly black, or cannot be meant, is refused.
"""

import io
import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from PIL.TiffImagePlugin import TiffImageFile
from torch import Tensor

from engine import files
from engine.data.format import Format
from engine.errors import UserError

Range = Sequence[float]  # low, high
SHORTS, FLOATS = "16-bit values", "floats"
RANGES = {SHORTS: (0.0, 65535.0), FLOATS: (0.0, 1.0)}  # integers of other types have none
SET = "(check_data.py prints the range of the whole set)"
SUBFILE, BITS_PER_SAMPLE, PHOTOMETRIC, ORIENTATION = 254, 258, 262, 274  # tags of TIFF
OF_ANOTHER = 0b101  # bits of SUBFILE: a smaller version, or the transparency, of another page
SHOWN = (0.01, 0.99)  # quantiles that become black and white


def kind_of(file: Image.Image) -> str | None:
    """Return of which type the values in a file are, not decoded yet; None for 8 bits or fewer."""
    if file.mode == "F":
        return FLOATS
    if file.mode == "I" and file.format != "PNG":
        return "32-bit or signed integers"
    if isinstance(file, TiffImageFile):
        is_deep = 16 in file.tag_v2.get(BITS_PER_SAMPLE, ())
    else:
        is_deep = file.format == "PNG" and ";16B" in str(getattr(file, "tile", ""))
    return SHORTS if is_deep or file.mode.startswith("I") else None


def check_pages(path: str, file: Image.Image) -> None:
    """Raise a UserError if a TIFF has a further page that is no thumbnail or mask of the first."""
    if not isinstance(file, TiffImageFile):
        return
    for page in range(1, file.n_frames):
        file.seek(page)
        if not file.tag_v2.get(SUBFILE, 0) & OF_ANOTHER:
            raise UserError(
                f"{path}: {file.n_frames} pages, of which only the first would be read; save one "
                f'page per file, or, if they are an image\'s channels, write "channels": '
                f"{file.n_frames} into data.json"
            )
    file.seek(0)


def read_values(path: str, file: Any, data: bytes, format: Format) -> np.ndarray:
    """Return the values in a file that has a kind, upright: (H, W), or (H, W, 3) in colour."""
    is_color = len(file.getbands()) > 1
    if is_color and (not file.mode.startswith("RGB") or "LA;" in str(file.tile)):
        raise UserError(f"{path}: 16 bits that are neither grey nor RGB; save them as such")
    if isinstance(file, TiffImageFile):
        values = _read_tiff(path, data, format)
        return values[..., :3] if is_color else values
    if not is_color:
        return np.asarray(ImageOps.exif_transpose(file))
    # Pillow keeps the upper 8 of 16 bits, or the lower ones if it is told the other byte order.
    upper, lower = (_read_bytes(data, f"{file.mode};16{order}") for order in "BL")
    return upper << 8 | lower


def _read_bytes(data: bytes, raw_mode: str) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as file:
        file.tile = [tile._replace(args=(raw_mode,)) for tile in file.tile]
        return np.asarray(ImageOps.exif_transpose(file))[..., :3].astype(np.uint16)


def _read_tiff(path: str, data: bytes, format: Format) -> np.ndarray:
    """Return (H, W) or (H, W, channels), upright; without format.channels of the first page."""
    import tifffile  # here, because most sets do without

    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # it logs what it raises
    try:
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            part = file.series[0] if format.channels else file.pages.first
            tags = file.pages.first.tags
            height, width = (part.shape[part.axes.index(axis)] for axis in "YX")
            format.check_size(path, width, height)
            turned = tags.valueof(ORIENTATION, default=1)
            is_inverted = tags.valueof(PHOTOMETRIC) == 0
            are_pages = 1 < len(file.pages) == format.channels
            values = file.asarray(key=slice(None)) if are_pages else part.asarray()
    except (OSError, UserError):
        raise
    except Exception as error:  # of many types for malformed files
        if "imagecodecs" in str(error):
            raise UserError(
                f"{path}: its compression needs a package: python -m pip install imagecodecs"
            ) from None
        raise ValueError(str(error) or type(error).__name__) from None
    if is_inverted and values.dtype.kind == "u":  # 0 is white, and will be black as Pillow has it
        values = ~values
    if values.ndim == 3 and part.axes.endswith("YX"):
        values = np.moveaxis(values, 0, -1)
    if turned > 4:
        values = values.swapaxes(0, 1)
    values = values[:, ::-1] if turned in (2, 3, 6, 7) else values
    return values[::-1] if turned in (3, 4, 7, 8) else values


def limits(values: np.ndarray, path: str, value_range: Range | None, may_be_dark: bool) -> Range:
    """Return which of the `values` become black and white; a UserError if that is not known."""
    if values.dtype == np.uint8:
        return 0, 255
    others = FLOATS if values.dtype.kind == "f" else f"values of type {values.dtype}"
    kind = SHORTS if values.dtype.name == "uint16" else others
    lowest, highest = values.min(), values.max()
    if kind == FLOATS and not np.isfinite((lowest, highest)).all():
        raise UserError(f"{path}: some of its values are NaN or infinite; replace them")
    if value_range:
        return value_range
    low, high = RANGES.get(kind, (0.0, 0.0))
    remedy = 'write "value_range": [{:.6g}, {:.6g}] into data.json'
    if kind not in RANGES or lowest < low or highest > high:
        known = f", not over {low:g},{high:g}" if kind in RANGES else ""
        raise UserError(
            f"{path}: {kind} that range over {lowest:.6g},{highest:.6g}{known}; "
            f"{remedy.format(lowest, highest)} {SET}"
        )
    if not may_be_dark and 0 < highest < high / 8:
        top = 2 ** int(highest).bit_length() - 1 if kind == SHORTS else float(f"{highest:.2g}")
        raise UserError(
            f"{path}: {kind} that reach only {highest:.6g} of {high:g}, the image would be nearly "
            f"black; {remedy.format(0, top)}, or [0, {high:g}] if it is meant to be {SET}"
        )
    return low, high


def to_uint8(values: np.ndarray, path: str, value_range: Range | None) -> np.ndarray:
    """Return `values`, of any shape, in 256 steps of equal width: of 16 bits the upper 8."""
    low, high = limits(values, path, value_range, may_be_dark=False)
    if values.dtype.name == "uint16" and value_range is None:  # as below, in a tenth of the time
        return (values >> 8).astype(np.uint8)
    steps = (values.astype(np.float64) - low) * 256 / (high - low)
    return steps.clip(0, 255).astype(np.uint8)


def scale(values: np.ndarray, path: str, value_range: Range | None) -> np.ndarray:
    """Return `values` of any shape as float32, 0 to 1."""
    low, high = limits(values, path, value_range, may_be_dark=True)
    # Integers of 32 bits have more digits than float32.
    exact: np.ndarray = values.astype(np.float32 if values.itemsize <= 2 else np.float64)
    return ((exact - low) / (high - low)).clip(0, 1).astype(np.float32, copy=False)


def read(path: str, format: Format) -> np.ndarray:
    """Return the values in the file, of its own type, as (H, W, format.channels)."""
    ending, data = path.lower().rsplit(".", 1)[-1], files.read(path)
    if ending == "npy":
        values = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    elif ending in ("tif", "tiff"):
        values = _read_tiff(path, data, format)
    else:
        with Image.open(io.BytesIO(data)) as image:
            format.check_size(path, *image.size)
            if kind_of(image):
                values = read_values(path, image, data, format)
            else:
                mode = "L" if image.mode in ("1", "L", "LA") else "RGB"
                values = np.asarray(ImageOps.exif_transpose(image).convert(mode))
    values = values[..., None] if values.ndim == 2 else values
    if values.ndim != 3 or values.shape[2] != format.channels:
        raise UserError(
            f"{path}: values of shape {values.shape}, not (height, width, {format.channels}); save "
            'it with as many channels, or correct "channels" in data.json'
        )
    if values.dtype.kind not in "biuf":
        raise UserError(f"{path}: values of type {values.dtype}; save it as integers or floats")
    format.check_size(path, values.shape[1], values.shape[0])
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def count_channels(path: str) -> int | None:
    """Return how many channels a .npy or TIFF file has, its pages counted as such; else None."""
    ending, content = path.lower().rsplit(".", 1)[-1], io.BytesIO(files.read(path))
    if ending == "npy":
        shape = np.lib.format.read_array(content, allow_pickle=False).shape
        return shape[2] if len(shape) == 3 else 1
    if ending not in ("tif", "tiff"):
        return None
    import tifffile

    with tifffile.TiffFile(content) as file:
        series = file.series[0]
        height, width = (series.shape[series.axes.index(axis)] for axis in "YX")
        return max(len(file.pages), math.prod(series.shape) // max(height * width, 1))


def visible(image: Tensor) -> Tensor:
    """Return the image as uint8 (3, H, W), for display: its first three channels, or one in grey.

    image: uint8 (3, H, W), which stays as it is, or float32 (channels, H, W), whose channels are
    stretched over 0 to 255, each by its own quantiles.
    """
    if image.dtype == torch.uint8 and len(image) == 3:
        return image
    shown = image[:3].float() if len(image) > 2 else image[:1].float()
    ends = np.quantile(shown.numpy(), SHOWN, axis=(1, 2))  # torch's takes up to 2^24 values
    low, high = (torch.from_numpy(end).float().view(-1, 1, 1) for end in ends)
    stretched = (shown - low) / (high - low).clamp(min=1e-6) * 255
    return stretched.clamp(0, 255).byte().expand(3, -1, -1)
