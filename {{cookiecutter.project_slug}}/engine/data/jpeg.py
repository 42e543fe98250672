"""JPEGs: their header, and decoding no more of them than is asked for."""

import struct
from typing import NamedTuple

import numpy as np
from PIL import Image

try:
    import simplejpeg
except ImportError:  # no wheel for this machine: Pillow decodes instead
    simplejpeg = None

PLAIN = {0xC4, 0xDB, 0xDD, 0xE0, 0xE2, 0xED, 0xFE}  # segments that change neither size nor colours
OTHERS = {*range(0xE0, 0xF0)} - PLAIN  # which may, such as EXIF and Adobe's
FRAMES = 0xC0, 0xC1, 0xC2  # baseline, extended, progressive
PROGRESSIVE, SCAN = 0xC2, 0xDA
BEGIN, END = b"\xff\xd8", b"\xff\xd9"
SEGMENT, FRAME = struct.Struct(">BBH"), struct.Struct(">BHHB")
MARGIN = 2  # rows: the colours of a row depend on those of the next
# What libjpeg says of rows that were left out. It says one thing of a file: the first.
LEFT_OVER = tuple(f"extraneous bytes before marker 0xd{digit}" for digit in "012345679")


class Frame(NamedTuple):
    """What the header says."""

    height: int  # in pixels
    width: int
    at: int = 0  # the byte at which the height stands; 0: rows cannot be left out
    is_plain: bool = False  # whether upright for sure, in RGB or grey


def frame(data: bytes) -> Frame | None:
    """Return the frame of a JPEG of 8 bits in a tenth of Pillow's time; None for all else.

    If it is not plain, Pillow has to look, such as into EXIF, which may turn the image.
    """
    if not data.startswith(BEGIN):
        return None
    found, channels, at, is_plain = None, 0, 2, True
    while at + 10 <= len(data):
        mark, kind, length = SEGMENT.unpack_from(data, at)
        if mark != 0xFF:
            return None
        if kind == SCAN:
            if found and data[at + 4] < channels:  # more scans follow, each of all rows
                found = found._replace(at=0)
            return found and found._replace(is_plain=is_plain)
        if kind in FRAMES:
            bits, height, width, channels = FRAME.unpack_from(data, at + 4)
            if bits != 8 or channels not in (1, 3) or not height or not width:
                return None
            found = Frame(height, width, 0 if kind == PROGRESSIVE else at + 5)
        elif kind in OTHERS:
            is_plain = False
        elif kind not in PLAIN:  # such as a byte that only fills
            return None
        at += 2 + length
    return None


def upright_size(image: Image.Image) -> tuple[int, int] | None:
    """Return height and width of what Pillow has opened; None: no such JPEG, or EXIF turns it."""
    is_turned = {"exif", "xmp"} & image.info.keys() and image.getexif().get(0x112, 1) != 1
    is_plain = image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L") and not is_turned
    return image.size[::-1] if is_plain else None


def decode(data: bytes, frame: Frame, shrink: int, rows: int) -> np.ndarray:
    """Return uint8 (H / shrink, W / shrink, 3), without most of what is below the first `rows`.

    Most of the time goes into reading the bits, which has to begin with the first. It ends earlier
    if the header announces fewer rows; libjpeg then says how many bytes there are before the next
    marker. A truncated file, which lacks the last one, is found all the same.

    Raises ValueError for what simplejpeg refuses.
    """
    height, width = -(-frame.height // shrink), -(-frame.width // shrink)
    fewer = max(rows + MARGIN, 8)  # with less than 8 it might shrink further
    if frame.at and fewer < height:
        part, pixels = bytearray(data), np.empty((fewer, width, 3), np.uint8)
        part[frame.at : frame.at + 2] = (fewer * shrink).to_bytes(2, "big")
        try:
            return simplejpeg.decode_jpeg(part, min_height=fewer, min_width=width, buffer=pixels)
        except ValueError as error:
            if str(error).endswith(LEFT_OVER) and data.rfind(END, frame.at) > 0:
                return pixels
    # It shrinks as far as these sizes allow.
    return simplejpeg.decode_jpeg(data, min_height=height, min_width=width)
