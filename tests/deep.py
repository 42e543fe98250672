"""Writes images of more than 8 bits per channel, of kinds that Pillow reads but does not write."""

import struct
import zlib
from pathlib import Path

import numpy as np


def save_png(path: Path, pixels: np.ndarray) -> None:
    """Save uint16 (H, W, C) as a PNG of 16 bits: C is 2 (grey, alpha), 3 or 4."""
    height, width, channels = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 16, {2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)


def save_tiff(
    path: Path, pixels: np.ndarray, order: str = "<", packed: bool = False, planar: bool = False
) -> None:
    """Save (H, W) or (H, W, 3) as a TIFF in that byte order, compressed or not."""
    pixels = pixels if pixels.ndim == 3 else pixels[..., None]
    height, width, channels = pixels.shape
    parts = np.moveaxis(pixels, 2, 0) if planar else [pixels]
    strips = [part.astype(pixels.dtype.newbyteorder(order)).tobytes() for part in parts]
    strips = [zlib.compress(strip) if packed else strip for strip in strips]
    kind = {"u": 1, "i": 2, "f": 3}[pixels.dtype.kind]
    tags: dict[int, tuple[str, list[int]]] = {
        256: ("I", [width]),
        257: ("I", [height]),
        258: ("H", [8 * pixels.dtype.itemsize] * channels),
        259: ("H", [8 if packed else 1]),
        262: ("H", [2 if channels == 3 else 1]),
        273: ("I", [0] * len(strips)),  # where the strips are
        277: ("H", [channels]),
        278: ("I", [height]),
        279: ("I", [*map(len, strips)]),
        284: ("H", [2 if planar else 1]),
        339: ("H", [kind] * channels),
    }
    end = 8 + 2 + 12 * len(tags) + 4  # of the directory; values of more than 4 bytes follow
    size = sum(struct.calcsize(f"{len(v)}{f}") for f, v in tags.values() if len(v) * len(f) > 1)
    starts = end + size + np.cumsum([0, *map(len, strips)])
    tags[273] = "I", [*map(int, starts[:-1])]
    entries, more = b"", b""
    for tag, (form, values) in tags.items():
        data = struct.pack(f"{order}{len(values)}{form}", *values)
        if len(data) > 4:
            more += data
            data = struct.pack(f"{order}I", end + len(more) - len(data))
        entries += struct.pack(f"{order}HHI", tag, {"H": 3, "I": 4}[form], len(values))
        entries += data.ljust(4, b"\0")
    more = more.ljust(size, b"\0")
    head = struct.pack(f"{order}2sHIH", b"II" if order == "<" else b"MM", 42, 8, len(tags))
    path.write_bytes(head + entries + b"\0\0\0\0" + more + b"".join(strips))
