"""Masks that mean classes by values or colours."""

import contextlib
import io
import time
import zlib
from pathlib import Path

import numpy as np
from forked import run
from PIL import Image

from ddpkit.data import folders, masks
from ddpkit.errors import UserError
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
        survey = folders.survey
        folders.survey = lambda *args: time.sleep(6) or survey(*args)

    flags = ["--data", data, "--output-dir", f"{folder}/out", *words, "--dist-timeout", 4]
    return run(2, *flags, patch=patch, draws=False)
