"""The sets on which a fresh project trains: small images, drawn on first use.

Each is seeded by its number, so it does not depend on how many there are.
"""

import math
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from ddpkit import files
from ddpkit.data.masks import VOID
from ddpkit.errors import print_line
from ddpkit.ranks import process

PATTERNS = ("bricks", "checks", "dots", "rings", "stripes", "waves")
PATTERN_SIDE = 80  # pixels; all images are square
CRACK_SIDE = 64


def demo_classes(folder: Path | None = None, train: int = 1680, val: int = 360) -> Path:
    """Draw six patterns in any colour, size, turn and light, under noise; return the folder.

    folder: to make, data/demo in the project by default, as one's own data would be: {train,val}/
        <class>/*.jpg. It appears once it is whole; if it is there nothing is done.
    train, val: how many images.

        data = args.data or ddpkit.demo_classes()
    """

    def save_pattern(part: Path, number: int, rng: random.Random) -> None:
        name = PATTERNS[number % len(PATTERNS)]
        (part / name).mkdir(exist_ok=True)
        draw_pattern(name, rng).save(part / name / f"{number:04d}.jpg", quality=90)

    return _draw(folder, train, val, save_pattern)


def demo_masks(folder: Path | None = None, train: int = 1400, val: int = 400) -> Path:
    """Draw thin dark cracks on noisy ground, with their masks; return the folder.

    As `demo_classes`, but {train,val}/images/*.jpg, {train,val}/masks/*.png and classes.txt.

        data = args.data or ddpkit.demo_masks()
    """

    def save_cracks(part: Path, number: int, rng: random.Random) -> None:
        if not number:
            (part.parent / "classes.txt").write_text("background\ncrack\n", "utf-8")
        image, mask = draw_cracks(rng)
        for kind in "images", "masks":
            (part / kind).mkdir(exist_ok=True)
        image.save(part / "images" / f"{number:04d}.jpg", quality=92)
        mask.save(part / "masks" / f"{number:04d}.png")

    return _draw(folder, train, val, save_cracks)


def _draw(
    folder: Path | None,
    train: int,
    val: int,
    save: Callable[[Path, int, random.Random], None],
) -> Path:
    folder = folder or process.project() / "data/demo"
    if folder.is_dir():
        return folder
    with files.filling(folder) as partial:
        print_line(f"drawing the demo set in {os.path.relpath(folder)} ...", sys.stdout)
        for part, count in {"train": train, "val": val}.items():
            (partial / part).mkdir()
            for number in range(count):
                save(partial / part, number, random.Random(f"{part} {number}"))
    return folder


def draw_pattern(name: str, rng: random.Random) -> Image.Image:
    """Return one RGB image of the class `name`."""
    noise = np.random.default_rng(rng.getrandbits(32))
    # -1 to 1 from top to bottom, and from left to right
    rows, columns = np.mgrid[-1 : 1 : PATTERN_SIDE * 1j, -1 : 1 : PATTERN_SIDE * 1j]
    # coordinates of the pattern: turned, scaled and moved
    turn = rng.uniform(0, 2 * math.pi)
    scale = rng.uniform(8, 16)
    u = scale * (math.cos(turn) * columns + math.sin(turn) * rows) + rng.uniform(0, 9)
    v = scale * (math.cos(turn) * rows - math.sin(turn) * columns) + rng.uniform(0, 9)

    ground = np.array([rng.uniform(55, 175) for _ in range(3)])
    contrast = rng.uniform(35, 65) * np.array([rng.uniform(0.4, 1.6) for _ in range(3)])
    pixels = ground + contrast * pattern(name, u, v)[..., None]
    light = 1 + rng.uniform(-0.3, 0.3) * rows + rng.uniform(-0.3, 0.3) * columns
    grain = noise.normal(0, rng.uniform(5, 25), pixels.shape)
    pixels = pixels * light[..., None] + grain
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def pattern(name: str, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return the class's pattern, from -1 to 1, at the coordinates `u`, `v` (radians)."""
    if name == "bricks":
        row = np.floor(v / math.pi)
        # each row is half a brick further than the one before
        joint = (v % math.pi < 0.6) | ((u + row * math.pi) % (2 * math.pi) < 0.6)
        return np.where(joint, 1.0, -1.0)
    if name == "checks":
        return np.sign(np.sin(u) * np.sin(v))
    if name == "dots":
        return np.where(np.cos(u) + np.cos(v) > 1, 1.0, -1.0)
    if name == "rings":
        return np.sin(1.5 * np.hypot(u - u.mean(), v - v.mean()))
    return np.sin(1.5 * u + (2 * np.sin(v) if name == "waves" else 0))  # or stripes


def draw_cracks(rng: random.Random) -> tuple[Image.Image, Image.Image]:
    """Return an RGB image and its mask ("L": class numbers, VOID where a crack ends)."""
    noise = np.random.default_rng(rng.getrandbits(32))
    square = (CRACK_SIDE, CRACK_SIDE)
    coarse = Image.fromarray(noise.integers(0, 255, (8, 8), dtype=np.uint8))
    smooth = coarse.resize(square, Image.Resampling.BICUBIC)
    stains = np.asarray(smooth, dtype=np.float32) - 128
    grain = noise.normal(0, rng.uniform(6, 16), square)
    steps = np.linspace(-1, 1, CRACK_SIDE)
    light = rng.uniform(-25, 25) * steps + rng.uniform(-25, 25) * steps[:, None]
    ground = rng.uniform(110, 180) + rng.uniform(0.1, 0.3) * stains + grain + light

    crack = Image.new("L", square)
    for _ in range(rng.choice((0, 1, 1, 1, 2))):  # some images have none
        draw_crack(ImageDraw.Draw(crack), rng)
    blurred = crack.filter(ImageFilter.GaussianBlur(0.5))
    soft = np.asarray(blurred, dtype=np.float32) / 255
    pixels = ground - rng.uniform(55, 95) * soft
    tint = np.array([rng.uniform(0.9, 1.1) for _ in range(3)])
    image = Image.fromarray((pixels[..., None] * tint).clip(0, 255).astype(np.uint8))

    inside = np.asarray(crack) > 0
    # Nobody can say where a thin crack ends: the pixels around it are void and count
    # for nothing.
    border = np.asarray(crack.filter(ImageFilter.MaxFilter(3))) > 0
    mask = np.where(inside, 1, np.where(border, VOID, 0)).astype(np.uint8)
    return image, Image.fromarray(mask)


def draw_crack(pen: ImageDraw.ImageDraw, rng: random.Random) -> None:
    """Draw a line that wanders from one edge across the image, one to three pixels wide."""
    # from the upper edge downwards, or mirrored: from the left one to the right
    place = rng.uniform(0, CRACK_SIDE), 0.0
    angle = rng.uniform(0.25, 0.75) * math.pi
    if rng.random() < 0.5:
        place = place[::-1]
        angle = math.pi / 2 - angle
    width = rng.randint(1, 3)
    for _ in range(3 * CRACK_SIDE // 4):
        if min(place) < 0 or max(place) > CRACK_SIDE:
            break
        angle += rng.gauss(0, 0.25)
        length = rng.uniform(2, 5)
        x, y = place
        end = x + length * math.cos(angle), y + length * math.sin(angle)
        pen.line([place, end], fill=255, width=width)
        place = end
