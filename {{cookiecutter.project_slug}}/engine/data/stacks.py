"""Images of any number of channels at their files' full depth: "channels" in data.json."""

import io
import logging
import math
from collections.abc import Sequence
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from engine import files
from engine.data import depth
from engine.data.format import Format
from engine.errors import UserError

ORIENTATION = 274  # tag of TIFF
SHOWN = (0.01, 0.99)  # quantiles that become black and white


def read(path: str, format: Format) -> np.ndarray:
    """Return the values in the file, of its own type, as (H, W, format.channels)."""
    ending, file = path.lower().rsplit(".", 1)[-1], io.BytesIO(files.read(path))
    values: np.ndarray
    if ending == "npy":
        values = np.lib.format.read_array(file, allow_pickle=False)
    elif ending in ("tif", "tiff"):
        values = _read_tiff(path, file, format)
    else:
        values = _read_other(path, file, format)
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
    import tifffile  # here, because most sets do without

    with tifffile.TiffFile(content) as file:
        series = file.series[0]
        height, width = (series.shape[series.axes.index(axis)] for axis in "YX")
        return max(len(file.pages), math.prod(series.shape) // max(height * width, 1))


def _read_tiff(path: str, content: BinaryIO, format: Format) -> np.ndarray:
    """Return (H, W) or (H, W, channels); the file may hold the channels as planes or pages."""
    import tifffile  # here, because most sets do without

    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # it logs what it raises
    try:
        with tifffile.TiffFile(content) as file:
            series, tags = file.series[0], file.pages.first.tags
            height, width = (series.shape[series.axes.index(axis)] for axis in "YX")
            format.check_size(path, width, height)
            turned = tags.valueof(ORIENTATION, default=1)
            is_inverted = tags.valueof(depth.PHOTOMETRIC) == 0
            are_pages = 1 < len(file.pages) == format.channels
            values = file.asarray(key=slice(None)) if are_pages else series.asarray()
    except (OSError, UserError):
        raise
    except Exception as error:  # of many types for malformed files
        if "imagecodecs" in str(error):
            raise UserError(
                f"{path}: its compression needs a package: python -m pip install imagecodecs"
            ) from None
        raise ValueError(str(error) or type(error).__name__) from None
    if turned != 1:
        raise UserError(f"{path}: stored with orientation {turned}; save it upright")
    values = depth.invert(values) if is_inverted else values
    is_planes_first = values.ndim == 3 and series.axes.endswith("YX")
    return np.moveaxis(values, 0, -1) if is_planes_first else values


def _read_other(path: str, content: BinaryIO, format: Format) -> np.ndarray:
    """Return (H, W) of a file in grey and (H, W, 3) of one in colour, upright."""
    with Image.open(content) as image:
        format.check_size(path, *image.size)
        if depth.kind_of(image):
            return depth.read_values(path, image, lambda: Image.open(content), True)
        is_grey = image.mode in ("1", "L", "LA")
        upright: Image.Image = ImageOps.exif_transpose(image)
        return np.asarray(upright.convert("L" if is_grey else "RGB"))


def limits(values: np.ndarray, path: str, value_range: depth.Range | None) -> Sequence[float]:
    """Return which of the `values` become 0 and 1; a UserError if that is not known."""
    if values.dtype == np.uint8:
        return 0, 255
    lowest, highest = values.min(), values.max()
    is_float = np.issubdtype(values.dtype, np.floating)
    if is_float and not np.isfinite((lowest, highest)).all():
        raise UserError(f"{path}: some of its values are NaN or infinite; replace them")
    if value_range:
        return value_range
    if values.dtype == np.uint16:
        return depth.RANGES[depth.SHORTS]
    low, high = depth.RANGES[depth.FLOATS]
    if not is_float or lowest < low or highest > high:
        kind = depth.FLOATS if is_float else f"values of type {values.dtype}"
        depth.check_range(lowest, highest, path, kind)
    return low, high


def scale(values: np.ndarray, path: str, value_range: depth.Range | None) -> np.ndarray:
    """Return `values` of any shape as float32, 0 to 1."""
    low, high = limits(values, path, value_range)
    # Integers of 32 bits have more digits than float32.
    exact: np.ndarray = values.astype(np.float32 if values.itemsize <= 2 else np.float64)
    return ((exact - low) / (high - low)).clip(0, 1).astype(np.float32, copy=False)


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
