"""Images of more than 8 bits per channel: their values, and which of them become 0 and 255.

The type of a file's values decides, not their extent in one image: equal values stay equal in the
whole set. What would come out nearly black, or cannot be meant, is refused.
"""

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageFile, ImageOps
from PIL.TiffImagePlugin import TiffImageFile

from engine.errors import UserError

Range = Sequence[float]  # low, high
SHORTS, FLOATS = "16-bit values", "floats"
RANGES = {SHORTS: (0.0, 65535.0), FLOATS: (0.0, 1.0)}  # integers of other types have none
SET = "(check_data.py prints the range of the whole set)"
SUBFILE, BITS_PER_SAMPLE, PHOTOMETRIC, PLANAR = 254, 258, 262, 284  # tags of TIFF
OF_ANOTHER = 0b101  # bits of SUBFILE: a smaller version, or the transparency, of another page


def kind_of(file: Image.Image) -> str | None:
    """Return of which type the values in the file are; None for 8 bits or fewer.

    file: as Image.open returns it: once it is decoded, Pillow has forgotten.
    """
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


def to_uint8(values: np.ndarray, path: str, kind: str, value_range: Range | None) -> np.ndarray:
    """Return `values`, of any shape, in 256 steps of equal width: of 16 bits the upper 8."""
    lowest, highest = values.min(), values.max()
    if not np.isfinite((lowest, highest)).all():
        raise UserError(f"{path}: some of its values are NaN or infinite; replace them")
    if value_range is None:
        check_range(lowest, highest, path, kind)
        if kind == SHORTS:  # the same as below, in a tenth of the time
            return (values >> 8).astype(np.uint8)
    low, high = value_range or RANGES[kind]
    steps = (values.astype(np.float64) - low) * 256 / (high - low)
    return steps.clip(0, 255).astype(np.uint8)


def check_range(lowest: float, highest: float, path: str, kind: str) -> None:
    """Raise a UserError if the range of an image's values does not fit that of their type."""
    low, high = RANGES.get(kind, (0.0, 0.0))
    remedy = 'write "value_range": [{:.6g}, {:.6g}] into data.json'
    if kind not in RANGES or lowest < low or highest > high:
        known = f", not over {low:g},{high:g}" if kind in RANGES else ""
        raise UserError(
            f"{path}: {kind} that range over {lowest:.6g},{highest:.6g}{known}; "
            f"{remedy.format(lowest, highest)} {SET}"
        )
    if 0 < highest < high / 8:
        top = 2 ** int(highest).bit_length() - 1 if kind == SHORTS else float(f"{highest:.2g}")
        raise UserError(
            f"{path}: {kind} that reach only {highest:.6g} of {high:g}, the image would be nearly "
            f"black; {remedy.format(0, top)}, or [0, {high:g}] if it is meant to be {SET}"
        )


def read_values(
    path: str, file: ImageFile.ImageFile, reopen: Callable[[], ImageFile.ImageFile], is_exact: bool
) -> np.ndarray:
    """Return the values in a file that has a kind, upright: (H, W), or uint16 (H, W, 3).

    In colour Pillow keeps the upper 8 of 16 bits, or the lower ones if it is told the other byte
    order. reopen: opens the file again. is_exact: whether the lower bits matter.
    """
    tags = file.tag_v2 if isinstance(file, TiffImageFile) else None
    by_libtiff = "libtiff" in str(file.tile)
    if len(file.getbands()) == 1:
        if by_libtiff:  # has swapped the bytes already, which Pillow knows for 16 bits alone
            _set_raw_mode(file, lambda mode: re.sub("B([SF])$", r"N\1", mode))
        values = np.asarray(ImageOps.exif_transpose(file))
        return invert(values) if tags and tags.get(PHOTOMETRIC) == 0 else values
    is_planar = by_libtiff and tags is not None and tags.get(PLANAR) == 2
    if is_planar or not re.match("(RGB)?[RGBAX]?(;|$)", _args(file.tile[0])[0]):
        if is_exact:
            raise UserError(
                f"{path}: only the upper 8 of its 16 bits can be read, too few for value_range; "
                "save it as a PNG in grey or RGB"
            )
        return np.asarray(ImageOps.exif_transpose(file).convert("RGB")).astype(np.uint16) << 8
    is_little = tags is not None and tags.prefix == b"II"
    if by_libtiff:
        is_little = sys.byteorder == "little"
    own, other = "LB" if is_little else "BL"
    upper = _read_bytes(file, own) << 8
    if upper.any() and not is_exact:
        return upper | 255
    with reopen() as again:
        return upper | _read_bytes(again, other)


def invert(values: np.ndarray) -> np.ndarray:
    """Return the values of a TIFF in which 0 is white so that 0 is black, as Pillow does of 8 bits.

    There is no opposite of floats and signed integers, which stay as they are.
    """
    return ~values if values.dtype.kind == "u" else values


def _read_bytes(file: ImageFile.ImageFile, order: str) -> np.ndarray:
    """Return uint16 (H, W, 3): of each value the upper byte if `order` is the file's, L or B."""
    _set_raw_mode(file, lambda mode: f"{mode.split(';')[0]};16{order}")
    return np.asarray(ImageOps.exif_transpose(file))[..., :3].astype(np.uint16)


def _set_raw_mode(file: ImageFile.ImageFile, change: Callable[[str], str]) -> None:
    """Change how Pillow takes the bytes of each tile of the file."""
    for number, tile in enumerate(file.tile):
        mode, *rest = _args(tile)
        file.tile[number] = tile._replace(args=(change(mode), *rest))


def _args(tile: Any) -> tuple:
    return tile.args if isinstance(tile.args, tuple) else (tile.args,)
