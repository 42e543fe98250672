"""The sets on which a fresh project trains: small images, drawn on first use.

Each is seeded by its number, so it does not depend on how many there are.
"""

import colorsys
import math
import os
import random
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from ddpkit import files
from ddpkit.data.format import VOID
from ddpkit.errors import print_line
from ddpkit.ranks import process

PATTERNS = ("bricks", "checks", "dots", "rings", "stripes", "waves")
SIDE = 128  # pixels; all images are square
FINE = 4  # cracks are drawn so much larger, then reduced: smooth edges


def demo_set(
    folder: Path | None = None,
    train: int | None = None,
    val: int | None = None,
    masks: bool = False,
) -> Path:
    """Draw small images, and write them as your own data would be; return the folder.

    Six patterns in any colours, size, turn and light, in {train,val}/<class>/*.jpg. masks: thin
    dark cracks in concrete, {train,val}/images/*.jpg, {train,val}/masks/*.png and classes.txt.

    folder: to make, data/demo in the project by default. It appears once it is whole; if it is
        there nothing is done. train, val: how many images; by default 1680 and 300, with masks 400
        and 100.

        data = args.data or ddpkit.demo_set()
    """
    folder = folder or process.project() / "data/demo"
    if folder.is_dir():
        return folder
    counts = {"train": train or (400 if masks else 1680)}
    counts["val"] = val or (100 if masks else 300)
    save = save_cracks if masks else save_pattern
    with files.filling(folder) as partial:
        print_line(f"drawing the demo set in {os.path.relpath(folder)} ...", sys.stdout)
        for part, count in counts.items():
            (partial / part).mkdir()
            for number in range(count):
                save(partial / part, number, random.Random(f"{part} {number}"))
    return folder


def save_pattern(part: Path, number: int, rng: random.Random) -> None:
    name = PATTERNS[number % len(PATTERNS)]
    (part / name).mkdir(exist_ok=True)
    draw_pattern(name, rng).save(part / name / f"{number:04d}.jpg", quality=90)


def save_cracks(part: Path, number: int, rng: random.Random) -> None:
    if not number:
        (part.parent / "classes.txt").write_text("background\ncrack\n", "utf-8")
    image, mask = draw_cracks(rng)
    for kind in "images", "masks":
        (part / kind).mkdir(exist_ok=True)
    image.save(part / "images" / f"{number:04d}.jpg", quality=92)
    mask.save(part / "masks" / f"{number:04d}.png")


def draw_pattern(name: str, rng: random.Random) -> Image.Image:
    """Return one RGB image of the class `name`."""
    noise = np.random.default_rng(rng.getrandbits(32))
    # -1 to 1 from top to bottom, and from left to right, in steps of half a pixel
    steps = np.linspace(-1, 1, 2 * SIDE, dtype=np.float32)
    rows = steps[:, None]
    # coordinates of the pattern: turned, scaled and moved
    turn = rng.uniform(0, 2 * math.pi)
    scale = rng.uniform(10, 18)
    u = scale * (math.cos(turn) * steps + math.sin(turn) * rows) + rng.uniform(0, 9)
    v = scale * (math.cos(turn) * rows - math.sin(turn) * steps) + rng.uniform(0, 9)
    # the share of the second colour in each pixel
    share = pattern(name, u, v).reshape(SIDE, 2, SIDE, 2).mean((1, 3)) / 2 + 0.5

    # the second is the lighter one
    first = second = np.zeros(3)
    while second.mean() < first.mean() + 35:
        first = draw_colour(rng)
        second = draw_colour(rng)
    pixels = first + (second - first) * share[..., None]
    light = 1 + draw_light(rng, 0.3) + rng.uniform(0.02, 0.08) * clouds(noise, 4, 8, 16)
    grain = noise.normal(0, rng.uniform(2, 10), (SIDE, SIDE, 1))
    return to_image(pixels * light[..., None] + grain)


def pattern(name: str, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return the class's pattern, from -1 to 1, at the coordinates `u`, `v` (radians)."""
    if name == "bricks":
        row = np.floor(v / math.pi)
        # each row is half a brick further than the one before
        joint = (v % math.pi < 0.45) | ((u + row * math.pi) % (2 * math.pi) < 0.45)
        return np.where(joint, 1.0, -1.0)
    if name == "checks":
        return np.sign(np.sin(u) * np.sin(v))
    if name == "dots":
        return np.where(np.cos(u) + np.cos(v) > 0.8, 1.0, -1.0)
    if name == "rings":
        return np.sin(1.5 * np.hypot(u - u.mean(), v - v.mean()))
    return np.sin(1.5 * u + (2 * np.sin(v) if name == "waves" else 0))  # or stripes


def draw_colour(rng: random.Random) -> np.ndarray:
    """Return (3,) RGB, 0 to 255: any hue, neither dark nor glaring."""
    rgb = colorsys.hsv_to_rgb(
        rng.random(), rng.uniform(0.1, 0.6), rng.uniform(0.35, 0.85)
    )
    return 255 * np.array(rgb)


def draw_light(rng: random.Random, most: float) -> np.ndarray:
    """Return (SIDE, SIDE) of a slope across the image, of at most +-`most` in each direction."""
    steps = np.linspace(-1, 1, SIDE)
    return rng.uniform(-most, most) * steps + rng.uniform(-most, most) * steps[:, None]


def clouds(noise: np.random.Generator, *cells: int) -> np.ndarray:
    """Return (SIDE, SIDE) of smooth noise; each of `cells` adds so many blots a side."""
    total = np.zeros((SIDE, SIDE), np.float32)
    for count in cells:
        grid = Image.fromarray(noise.normal(size=(count, count)).astype(np.float32))
        smooth = grid.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        total += np.asarray(smooth) * math.sqrt(4 / count)  # finer ones are fainter
    return total


def to_image(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def shrink(image: Image.Image) -> np.ndarray:
    """Return (SIDE, SIDE) float32 of an image that is some times larger: the means."""
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX), np.float32)


def draw_cracks(rng: random.Random) -> tuple[Image.Image, Image.Image]:
    """Return an RGB image and its mask ("L": class numbers, VOID where a crack ends)."""
    noise = np.random.default_rng(rng.getrandbits(32))
    stains = rng.uniform(5, 11) * clouds(noise, 4, 8, 16, 32, 64)
    grain = noise.normal(0, rng.uniform(2, 6), (SIDE, SIDE))
    ground = (
        rng.uniform(120, 185) + draw_light(rng, 20) + stains + draw_stones(rng) + grain
    )

    canvas = Image.new("L", (FINE * SIDE, FINE * SIDE))
    pen = ImageDraw.Draw(canvas)
    for _ in range(rng.choice((0, 1, 1, 1, 2))):  # some images have none
        draw_crack(pen, rng)
    share = shrink(canvas) / 255  # of each pixel
    depth = rng.uniform(35, 90)
    lit = (np.roll(share, (1, 1), (0, 1)) - share).clip(0)  # the edge towards the light
    pixels = ground - depth * share + depth / 4 * lit
    tint = np.array([rng.uniform(1, 1.08), 1, rng.uniform(0.88, 1.02)])

    # Nobody can say where a thin crack ends: the pixels around it are void and count
    # for nothing.
    touched = Image.fromarray(np.uint8(share > 0.1)).filter(ImageFilter.MaxFilter(3))
    mask = np.where(share >= 0.5, 1, VOID * np.asarray(touched)).astype(np.uint8)
    return to_image(pixels[..., None] * tint), Image.fromarray(mask)


def draw_stones(rng: random.Random) -> np.ndarray:
    """Return (SIDE, SIDE): how much lighter or darker small stones in the concrete are."""
    canvas = Image.new("L", (2 * SIDE, 2 * SIDE), 128)
    pen = ImageDraw.Draw(canvas)
    for _ in range(rng.randint(0, 150)):
        x = rng.uniform(0, 2 * SIDE)
        y = rng.uniform(0, 2 * SIDE)
        radius = rng.uniform(1, 4)
        height = rng.uniform(0.6, 1) * radius
        box = (x - radius, y - height, x + radius, y + height)
        pen.ellipse(box, fill=128 + rng.randint(-40, 40))
    return shrink(canvas) - 128


def draw_crack(pen: ImageDraw.ImageDraw, rng: random.Random) -> None:
    """Draw a line with branches that wanders from one edge across the image."""
    # from the upper edge downwards, or mirrored: from the left one to the right
    is_mirrored = rng.random() < 0.5
    end = FINE * SIDE
    # (x, y, direction, width, may branch) of the lines to be drawn
    lines = [
        (
            rng.uniform(0.1, 0.9) * end,
            0.0,
            rng.uniform(0.25, 0.75) * math.pi,
            rng.uniform(1.5, 5) * FINE,
            True,
        )
    ]
    while lines:
        x, y, direction, width, is_trunk = lines.pop()
        for _ in range(2 * SIDE):
            if min(x, y) < 0 or max(x, y) > end:
                break
            direction += rng.gauss(0, 0.08)
            angle = direction + rng.gauss(0, 0.5)
            length = rng.uniform(1.5, 4) * FINE
            width = min(max(width + rng.gauss(0, 0.12 * FINE), FINE), 6 * FINE)
            before = (y, x) if is_mirrored else (x, y)
            x += length * math.cos(angle)
            y += length * math.sin(angle)
            after = (y, x) if is_mirrored else (x, y)
            pen.line([before, after], fill=255, width=round(width))
            pen.circle(after, width / 2, fill=255)  # a round joint
            if is_trunk and rng.random() < 0.012:
                turned = direction + rng.choice((-1, 1)) * rng.uniform(0.4, 1)
                lines.append((x, y, turned, 0.6 * width, False))
