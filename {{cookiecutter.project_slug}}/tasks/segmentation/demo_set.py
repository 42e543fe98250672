"""Draws the demo set: thin dark cracks on noisy ground, with their masks.

A fresh project trains on it when --data is not given, and the tests draw theirs with it.
"""

import math
import os
import random
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

import ddpkit

FOLDER = Path(__file__).resolve().parent / "data" / "demo"
SIDE = 64  # pixels; every image is SIDE x SIDE, RGB
CLASSES = ("background", "crack")
VOID = 255


def draw(folder: Path = FOLDER, train: int = 1400, val: int = 400) -> Path:
    """Write `train` + `val` pairs below `folder`, laid out as a user's own data would be.

    The folder, which is returned, appears at once and whole; if it is there nothing is done.
    """
    if folder.is_dir():
        return folder
    with ddpkit.filling(folder) as partial:
        print(f"drawing the demo set in {os.path.relpath(folder)} ...", flush=True)
        (partial / "classes.txt").write_text("\n".join(CLASSES) + "\n")
        for part, count in ("train", train), ("val", val):
            for kind in "images", "masks":
                (partial / part / kind).mkdir(parents=True)
            for number in range(count):
                # Seeded one by one: an image does not depend on how many there are.
                image, mask = draw_pair(random.Random(f"{part} {number}"))
                image.save(partial / part / "images" / f"{number:04d}.jpg", quality=92)
                mask.save(partial / part / "masks" / f"{number:04d}.png")
    return folder


def draw_pair(rng: random.Random) -> tuple[Image.Image, Image.Image]:
    """Return an RGB image and its mask ("L": class numbers, VOID where a crack ends)."""
    noise = np.random.default_rng(rng.getrandbits(32))
    coarse = Image.fromarray(noise.integers(0, 255, (8, 8), dtype=np.uint8))
    stains = np.asarray(coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC), dtype=np.float32)
    grain = noise.normal(0, rng.uniform(6, 16), (SIDE, SIDE))
    steps = np.linspace(-1, 1, SIDE)
    light = rng.uniform(-25, 25) * steps[None, :] + rng.uniform(-25, 25) * steps[:, None]
    ground = rng.uniform(110, 180) + rng.uniform(0.1, 0.3) * (stains - 128) + grain + light

    crack = Image.new("L", (SIDE, SIDE))
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        draw_crack(ImageDraw.Draw(crack), rng)
    soft = np.asarray(crack.filter(ImageFilter.GaussianBlur(0.5)), dtype=np.float32) / 255
    pixels = ground - rng.uniform(55, 95) * soft
    tint = np.array([rng.uniform(0.9, 1.1) for _ in range(3)])
    image = Image.fromarray((pixels[..., None] * tint).clip(0, 255).astype(np.uint8))

    inside = np.asarray(crack) > 0
    # Nobody can say where a thin crack ends: the pixels around it are void and count for nothing.
    border = np.asarray(crack.filter(ImageFilter.MaxFilter(3))) > 0
    mask = np.where(inside, 1, np.where(border, VOID, 0)).astype(np.uint8)
    return image, Image.fromarray(mask)


def draw_crack(pen: ImageDraw.ImageDraw, rng: random.Random) -> None:
    """Draw a line that wanders from one edge across the image, one to three pixels wide."""
    x, y, angle = rng.uniform(0, SIDE), 0.0, rng.uniform(0.25, 0.75) * math.pi
    if rng.random() < 0.5:
        x, y, angle = y, x, math.pi / 2 - angle
    width = rng.randint(1, 3)
    for _ in range(3 * SIDE // 4):
        if not (0 <= x <= SIDE and 0 <= y <= SIDE):
            break
        angle += rng.gauss(0, 0.25)
        length = rng.uniform(2, 5)
        end = x + length * math.cos(angle), y + length * math.sin(angle)
        pen.line((x, y, *end), fill=255, width=width)
        x, y = end
