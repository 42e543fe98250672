"""libjpeg-turbo 3, where the machine has it: decodes only the part of a JPEG that is asked for.

Packages: libjpeg-turbo of conda-forge, Homebrew, Fedora and others; no Python package exposes
decoding in parts. LD_LIBRARY_PATH may point to it. Names and numbers are those of its turbojpeg.h.
"""

import ctypes
import functools
import os
import sys

import torch
from torch import Tensor

TJINIT_DECOMPRESS = 1
TJPARAM_SUBSAMP = 4
TJPF_RGB = 0
MCU_WIDTH = (8, 16, 16, 8, 8, 32, 8)  # tjMCUWidth, by TJPARAM_SUBSAMP
END = b"\xff\xd9"


class Region(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("x", "y", "w", "h")]


class ScalingFactor(ctypes.Structure):
    _fields_ = [("num", ctypes.c_int), ("denom", ctypes.c_int)]


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library, or None if this machine has none or one before version 3."""
    names = ("libturbojpeg.so.0", "libturbojpeg.0.dylib", "turbojpeg.dll")
    folders = ("", os.path.join(sys.prefix, "lib"), "/opt/homebrew/lib")  # the second: of conda
    for path in (os.path.join(folder, name) for folder in folders for name in names):
        try:
            found = ctypes.CDLL(path)
            found.tj3Init.restype = ctypes.c_void_p
            handle, buffer = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_size_t)
            found.tj3Get.argtypes = (handle, ctypes.c_int)
            found.tj3DecompressHeader.argtypes = (handle, *buffer)
            found.tj3SetScalingFactor.argtypes = (handle, ScalingFactor)
            found.tj3SetCroppingRegion.argtypes = (handle, Region)
            found.tj3Decompress8.argtypes = (handle, *buffer, handle, ctypes.c_int, ctypes.c_int)
            found.tj3Destroy.argtypes = (handle,)
            return found
        except (AttributeError, OSError):
            continue
    return None


def decode(source: Tensor, box: tuple[int, int, int, int], shrink: int) -> Tensor | None:
    """Return uint8 (H, W, 3): the part in `box` of a JPEG that is shrunk by 1, 2, 4 or 8.

    source: uint8 (bytes,). box: (top, left, height, width), in pixels of the shrunk picture.
    None if that is not possible: no library, or not a whole file of a usual kind.
    """
    tj = library()
    if tj is None or source[-2:].numpy().tobytes() != END:
        return None
    handle = tj.tj3Init(TJINIT_DECOMPRESS)
    try:
        data = source.data_ptr(), len(source)
        if tj.tj3DecompressHeader(handle, *data):
            return None
        kind = tj.tj3Get(handle, TJPARAM_SUBSAMP)
        if not 0 <= kind < len(MCU_WIDTH):
            return None
        top, left, height, width = box
        before = left % max(MCU_WIDTH[kind] // shrink, 1)  # it has to begin at a whole block
        region = Region(left - before, top, width + before, height)
        pixels = torch.empty(height, width + before, 3, dtype=torch.uint8)
        if (
            tj.tj3SetScalingFactor(handle, ScalingFactor(1, shrink))
            or tj.tj3SetCroppingRegion(handle, region)
            or tj.tj3Decompress8(handle, *data, pixels.data_ptr(), 0, TJPF_RGB)
        ):
            return None
        return pixels[:, before:]
    finally:
        tj.tj3Destroy(handle)
