"""Masks that mean classes by values or colours."""

import contextlib
import io
import time
import zlib
from pathlib import Path

import numpy as np
from forked import run
from PIL import Image

from engine.data import datasets, masks
from engine.errors import UserError
from snippets.data import build


def parsed(folder: str, text: str) -> list | str:
    """What a classes.txt says: names and colours; or what is wrong with it."""
    path = Path(folder, "classes.txt")
    path.write_bytes(text.encode("utf-8-sig"))
    try:
        found = masks.read_classes(path)
    except UserError as error:
        return str(error).removeprefix(str(path))
    return [list(found), None if found.colors is None else found.colors.tolist()]


def all_parsed(folder: str, texts: list[str]) -> list:
    return [parsed(folder, text) for text in texts]


def read(folder: str, cases: list[dict]) -> list:
    """The first row of each mask once it is read, or what is wrong with it."""
    found = []
    for case in cases:
        path = str(Path(folder, f"mask{case.get('ending', '.png')}"))
        pixels = np.array(case["pixels"], case.get("dtype", "uint8"))
        if case.get("mode") == "1":
            image = Image.fromarray(pixels.astype(bool))
        elif case.get("mode") == "P":
            image = Image.fromarray(pixels)
            image.putpalette(case["palette"])
        else:
            image = Image.fromarray(pixels, case.get("mode"))
        image.save(path, format=case.get("format"), **case.get("save", {}))
        labels = masks.parse(case["classes"], Path("classes.txt"))
        try:
            found.append(masks.read_mask(path, labels)[0].tolist())
        except UserError as error:
            found.append(str(error).removeprefix(path))
    return found


def jpegs(folder: str) -> list:
    """Whether masks that were saved as JPEG are as they were, or what is said of them."""
    rng = np.random.default_rng(0)
    lines = np.zeros((90, 110), bool)
    for row, column in rng.integers(0, 80, (40, 2)):
        lines[row : row + 3, column : column + 9] = True
    lines[40:, 60:] = True
    found = []
    for low, high, third in (0, 255, 0), (255, 0, 0), (0, 128, 0), (0, 255, 128), (0, 1, 0):
        pixels = np.where(lines, high, low).astype(np.uint8)
        if third:
            pixels[70:86, 20:36] = third
        path = str(Path(folder, "mask.jpg"))
        Image.fromarray(pixels).convert("RGB").save(path, quality=60)
        labels = masks.parse([f"a = {low}", f"b = {high}"], Path())
        try:
            found.append(bool((masks.read_mask(path, labels) == lines).all()))
        except UserError as error:
            found.append(str(error).removeprefix(path))
    return found


def digest(folder: str) -> dict:
    """The classes of a set, what is said of it, and its masks; or why it is refused."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            train, val, classes = build(folder)
        except UserError as error:
            return {"refused": str(error)}
    found = [part.open_mask(n).read().numpy() for part in (train, val) for n in range(len(part))]
    return {
        "classes": list(classes),
        "colors": None if classes.colors is None else classes.colors.tolist(),
        "masks": zlib.crc32(b"".join(mask.tobytes() for mask in found)),
        "said": said.getvalue(),
    }


def read_slowly(data: str, folder: str, *words: object) -> list[int]:
    """Statuses of two ranks with a --dist-timeout shorter than rank 0 takes for the masks."""

    def patch() -> None:
        survey = datasets.survey
        datasets.survey = lambda *args: time.sleep(6) or survey(*args)

    flags = ["--data", data, "--output-dir", f"{folder}/out", *words, "--dist-timeout", 4]
    return run(2, *flags, patch=patch, draws=False)
