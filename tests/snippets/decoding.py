"""Parts of pictures, read by either decoder and compared with a decode of the whole."""

from collections.abc import Callable

import torch
from torchvision.transforms.v2 import functional as F

from engine.data import images, turbojpeg
from engine.errors import UserError

BOXES = (  # with the size of the result: whole; a part as it is; shrunk by less and more than 2
    *((None, None), ((13, 7, 101, 93), None), ((33, 51, 177, 123), (100, 90))),
    *((None, (64, 80)), ((8, 16, 256, 320), (64, 80)), ((33, 51, 313, 347), (60, 60))),
    *(((-20, -10, 400, 560), None), ((-20, -10, 400, 560), (80, 112))),
)


def read(path: str, library: Callable) -> tuple:
    kept, turbojpeg.library = turbojpeg.library, library
    picture = images.open_picture(path)
    found = [picture.read(*box) for box in BOXES]
    turbojpeg.library = kept
    return picture, found


def compare(path: str) -> list[list[float]]:
    """For each of BOXES: how far off, how far if moved by a pixel, mean and most between the two.

    In grey levels of 256.
    """
    whole = F.pil_to_tensor(images.read_image(path))
    picture, plain = read(path, lambda: None)
    _, best = read(path, turbojpeg.library)
    assert (picture.height, picture.width) == whole.shape[1:]
    report = []
    for (box, size), one, other in zip(BOXES, plain, best, strict=True):
        expected = F.crop(whole, *(box or (0, 0, *whole.shape[1:])))
        expected = F.resize(expected, list(size)) if size else expected
        assert one.dtype == other.dtype == torch.uint8
        assert one.shape == expected.shape
        inner = expected[:, 2:-2, 2:-2].float()

        def off(rows: int, columns: int, one: torch.Tensor = one, inner=inner) -> float:
            moved = one.roll((rows, columns), (1, 2))[:, 2:-2, 2:-2]
            return (moved - inner).abs().mean().item()

        moved = min(off(-1, 0), off(1, 0), off(0, -1), off(0, 1))
        between = (one.float() - other.float()).abs()
        report.append([off(0, 0), moved, between.mean().item(), between.max().item()])
    return report


def compared(*paths: str) -> list:
    """For each picture what `compare` finds, and how often the JPEG library took it."""
    calls: list = []
    decode = turbojpeg.decode
    turbojpeg.decode = lambda *args: calls.append(decode(*args)) or calls[-1]
    found = []
    for path in paths:
        calls.clear()
        found.append([compare(path), sum(call is not None for call in calls)])
    return found


def parts(*paths: str) -> list[str]:
    """Whether the upper left of each picture can be read, or what is said."""
    assert turbojpeg.library()
    said = []
    for path in paths:
        try:
            images.open_picture(path).read((0, 0, 50, 50))
            said.append("read")
        except UserError as error:
            said.append(str(error))
    return said


def extrema(path: str) -> tuple:
    """The least and the most of each channel."""
    return images.read_image(path).getextrema()
