"""The header of a JPEG: whether it can be decoded in parts, and its size."""

import struct

from PIL import Image

PLAIN = {0xC4, 0xDB, 0xDD, 0xE0, 0xE2, 0xED, 0xFE}  # segments that change neither size nor colours
FRAMES = {0xC0, 0xC1, 0xC2}  # baseline, extended and progressive
SCAN = 0xDA


def size(data: bytes) -> tuple[int, int] | None:
    """Return height and width of an upright JPEG in RGB or grey, in a tenth of Pillow's time.

    None: Pillow has to look, such as into EXIF, which may turn the image.
    """
    found, at = None, 2
    while data[:2] == b"\xff\xd8" and at + 10 <= len(data) and data[at] == 0xFF:
        kind = data[at + 1]
        if kind == SCAN:
            return found
        if kind in FRAMES:
            bits, height, width, channels = struct.unpack_from(">BHHB", data, at + 4)
            if bits != 8 or channels not in (1, 3) or not height or not width:
                return None
            found = height, width
        elif kind not in PLAIN:
            return None
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


def upright_size(image: Image.Image) -> tuple[int, int] | None:
    """Return the same of what Pillow has opened; None: no such JPEG, or one that EXIF turns."""
    is_turned = {"exif", "xmp"} & image.info.keys() and image.getexif().get(0x112, 1) != 1
    is_plain = image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L") and not is_turned
    return image.size[::-1] if is_plain else None
