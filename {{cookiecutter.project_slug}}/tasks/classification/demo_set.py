"""Draws the demo set: six patterns in any colour, size, turn and light, under noise.

A fresh project trains on it when --data is not given, and the tests draw theirs with it.
"""

import math
import os
import random
from pathlib import Path

import numpy as np
from PIL import Image

import ddpkit

FOLDER = Path(__file__).resolve().parent / "data" / "demo"
SIDE = 80  # pixels; every image is SIDE x SIDE, RGB
CLASSES = ("bricks", "checks", "dots", "rings", "stripes", "waves")


def draw(folder: Path = FOLDER, train: int = 1680, val: int = 360) -> Path:
    """Write `train` + `val` images as `folder`/{train,val}/<class>/<number>.jpg.

    The folder, which is returned, appears at once and whole; if it is there nothing is done.
    """
    if folder.is_dir():
        return folder
    with ddpkit.filling(folder) as partial:
        print(f"drawing the demo set in {os.path.relpath(folder)} ...", flush=True)
        for part, count in ("train", train), ("val", val):
            for number in range(count):
                name = CLASSES[number % len(CLASSES)]
                path = partial / part / name / f"{number:04d}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                # Seeded one by one: an image does not depend on how many there are.
                draw_image(name, random.Random(f"{part} {number}")).save(path, quality=90)
    return folder


def draw_image(name: str, rng: random.Random) -> Image.Image:
    """Return one RGB image of SIDE x SIDE pixels of the class `name`."""
    noise = np.random.default_rng(rng.getrandbits(32))
    rows, columns = np.mgrid[-1 : 1 : SIDE * 1j, -1 : 1 : SIDE * 1j]
    turn, scale = rng.uniform(0, 2 * math.pi), rng.uniform(8, 16)
    u = scale * (math.cos(turn) * columns + math.sin(turn) * rows) + rng.uniform(0, 9)
    v = scale * (math.cos(turn) * rows - math.sin(turn) * columns) + rng.uniform(0, 9)

    ground = np.array([rng.uniform(55, 175) for _ in range(3)])
    contrast = rng.uniform(35, 65) * np.array([rng.uniform(0.4, 1.6) for _ in range(3)])
    pixels = ground + contrast * pattern(name, u, v)[..., None]
    light = 1 + rng.uniform(-0.3, 0.3) * rows + rng.uniform(-0.3, 0.3) * columns
    pixels = pixels * light[..., None] + noise.normal(0, rng.uniform(5, 25), pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def pattern(name: str, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return the class's pattern, from -1 to 1, at the coordinates `u`, `v` (radians)."""
    if name == "bricks":
        row = np.floor(v / math.pi)
        joint = (v % math.pi < 0.6) | ((u + row * math.pi) % (2 * math.pi) < 0.6)
        return np.where(joint, 1.0, -1.0)
    if name == "checks":
        return np.sign(np.sin(u) * np.sin(v))
    if name == "dots":
        return np.where(np.cos(u) + np.cos(v) > 1, 1.0, -1.0)
    if name == "rings":
        return np.sin(1.5 * np.hypot(u - u.mean(), v - v.mean()))
    if name == "stripes":
        return np.sin(1.5 * u)
    return np.sin(1.5 * u + 2 * np.sin(v))  # waves
