"""Parts of images, read by either decoder and compared with a decode of the whole."""

import torch
from torchvision.io import ImageReadMode, decode_jpeg, read_file
from torchvision.transforms.v2 import functional as F

from ddpkit.data import images
from ddpkit.data.format import Format
from ddpkit.errors import UserError

BOXES = (  # with the size of the result: whole; a part as it is; shrunk by less and more than 2
    *((None, None), ((13, 7, 101, 93), None), ((33, 51, 177, 123), (100, 90))),
    *((None, (64, 80)), ((8, 16, 256, 320), (64, 80)), ((33, 51, 313, 347), (60, 60))),
    *(((-20, -10, 400, 560), None), ((-20, -10, 400, 560), (80, 112))),
)


simplejpeg = images.simplejpeg
calls = []


class Counted:
    """simplejpeg, with each of its calls noted."""

    @staticmethod
    def decode_jpeg(*args: object, **options: object) -> object:
        calls.append(simplejpeg.decode_jpeg(*args, **options))
        return calls[-1]

    decode_jpeg_header = staticmethod(simplejpeg.decode_jpeg_header)


def read(path: str, library: object) -> tuple:
    images.simplejpeg = library
    image = images.open_image(path)
    return image, [image.read(*box) for box in BOXES]


def compare(path: str) -> list[list[float]]:
    """For each of BOXES: how far off, and how far if moved by a pixel, in grey levels of 256.

    Pillow and simplejpeg agree to the bit, and with torchvision on the whole image.
    """
    whole = F.pil_to_tensor(images.read_stored(path).convert("RGB"))
    image, plain = read(path, None)
    _, best = read(path, Counted)
    assert (image.height, image.width) == whole.shape[1:]
    report = []
    for (box, size), one, other in zip(BOXES, plain, best, strict=True):
        expected = F.crop(whole, *(box or (0, 0, *whole.shape[1:])))
        expected = F.resize(expected, list(size)) if size else expected
        assert one.dtype == other.dtype == torch.uint8
        assert one.shape == expected.shape
        assert torch.equal(one, other)
        inner = expected[:, 2:-2, 2:-2].float()

        def off(rows: int, columns: int, one: torch.Tensor = one, inner=inner) -> float:
            moved = one.roll((rows, columns), (1, 2))[:, 2:-2, 2:-2]
            return (moved - inner).abs().mean().item()

        report.append([off(0, 0), min(off(-1, 0), off(1, 0), off(0, -1), off(0, 1))])
    if calls:
        assert torch.equal(best[0], decode_jpeg(read_file(path), ImageReadMode.RGB))
    return report


def compared(*paths: str) -> list:
    """For each image what `compare` finds, and how often simplejpeg decoded it."""
    found = []
    for path in paths:
        calls.clear()
        found.append([compare(path), len(calls)])
    return found


def parts(*paths: str) -> dict[str, list]:
    """By decoder: whether the upper left of each image can be read, whole and shrunk."""
    said = {}
    for images.simplejpeg in (simplejpeg, None):
        lines = said[images.decoder()] = []
        for path in paths:
            for size in (None, (20, 20)):
                try:
                    images.open_image(path).read((0, 0, 50, 50), size)
                    lines.append([path, "read"])
                except UserError as error:
                    lines.append([path, str(error)])
    return said


def extrema(path: str) -> tuple:
    """The least and the most of an image as it is read."""
    image = images.open_image(path, Format()).read()
    return int(image.min()), int(image.max())
