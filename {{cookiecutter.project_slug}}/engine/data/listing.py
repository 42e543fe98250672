"""Which images a folder holds, and which of them are for validation."""

import os
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from engine import files
from engine.errors import UserError, shorten
from engine.ranks import distributed

EXTENSIONS = {".bmp", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
ARRAY = ".npy"  # an image where there are no others; with --channels
NO_IMAGES = {".csv", ".db", ".ini", ".json", ".txt", ".xml"}  # as are often beside images
VAL_NAMES = ("val", "valid", "validation")


def list_images(folder: Path, skipped: Counter[str] | None = None) -> list[str]:
    """Return the paths of all images below `folder`, sorted; a UserError if there is none.

    Arrays (.npy) are taken for images if there are no others.

    skipped: files of other types are added to it, by their endings.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such file or folder")
    paths: list[str] = []
    arrays: list[str] = []
    others = Counter[str]()
    for parent, _, names in walk(folder):
        for name in names:
            ending = os.path.splitext(name)[1].lower()
            if is_image(name):
                (arrays if ending == ARRAY else paths).append(os.path.join(parent, name))
            elif not name.startswith(".") and ending not in NO_IMAGES:
                others[ending or "without ending"] += 1
    if paths and arrays:
        others[ARRAY] = len(arrays)
    paths = paths or arrays
    if not paths:
        found = f" but {_count(others)}" if others else ""
        raise UserError(
            f"{folder}: no images in it{found}; expected {', '.join(sorted(EXTENSIONS))}"
        )
    if skipped is not None:
        skipped.update(others)
    return sorted(paths)


def is_image(name: str) -> bool:
    """Return whether a file of that name is read as an image."""
    ending = os.path.splitext(name)[1].lower()
    return ending in {*EXTENSIONS, ARRAY} and not name.startswith(".")


def say_skipped(skipped: Counter[str]) -> None:
    """Print how many files `list_images` has skipped, if any."""
    if skipped:
        distributed.say(
            f"skipped, because their type is not read: {_count(skipped)}; "
            "convert them to JPEG or PNG"
        )


def _count(endings: Counter[str]) -> str:
    ordered = sorted(endings.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{number} {ending}" for ending, number in ordered)


def walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Like os.walk, sorted and through links, but into each folder once and into no hidden one.

    Links to a parent and what tools leave (.ipynb_checkpoints, __MACOSX) would add duplicates.
    """
    real = os.path.realpath(folder)
    seen = {real, *map(str, Path(real).parents)}
    for parent, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        found, folders[:] = sorted(folders), []
        for name in found:
            real = os.path.realpath(os.path.join(parent, name))
            if real not in seen and not name.startswith(".") and name != "__MACOSX":
                seen.add(real)
                folders.append(name)
        yield parent, folders, names


def _refuse(error: OSError) -> NoReturn:
    raise files.failure(error.filename, error, "read")  # os.walk would leave out the folder


def collect(
    inputs: Sequence[str | Path], skipped: Counter[str] | None = None
) -> list[tuple[str, str]]:
    """Return (path, name) of each image among `inputs`, which are files and folders.

    The name is the path below the folder that was given, without its extension.

    skipped: as of `list_images`; without it, what is skipped is said.
    """
    found, others = [], Counter[str]()
    for given in inputs:
        is_file = os.path.isfile(given)
        for path in [str(given)] if is_file else list_images(Path(given), others):
            below = os.path.basename(path) if is_file else os.path.relpath(path, given)
            found.append((path, os.path.splitext(below)[0]))
    if skipped is None:
        say_skipped(others)
    else:
        skipped.update(others)
    return found


def by_name(images: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return {name: path} of (path, name) pairs; a UserError if two share a name."""
    found: dict[str, str] = {}
    for path, name in images:
        if name in found:
            raise UserError(
                f"{path} and {found[name]} have the same name; rename one, or pass one at a time"
            )
        found[name] = path
    return found


def composed(name: str) -> str:
    """Return the form in which names are compared: macOS may store e and an accent for é."""
    return unicodedata.normalize("NFC", name)


def val_folder(root: Path) -> Path | None:
    """Return the folder of the validation set below `root`, by any of its usual names, or None."""
    for name in VAL_NAMES:
        if (root / name).is_dir():
            if name != "val":
                distributed.say(f"no {root / 'val'}: {root / name} is used for validation")
            return root / name
    return None


def say_split(
    root: Path, count: int, total: int, name: str = "val", whole: Sequence[str] = ()
) -> None:
    """Print that `count` of `total` images are held out because `root` has no `name`.

    whole: classes of which none is. Raises a UserError if that leaves nothing.
    """
    if not count:
        raise UserError(f"{root}: too few images to split; add more, or {root / name}")
    line = f"no {root / name}: {count} of {total} images used for validation"
    if whole:
        line += f"; {shorten(whole)}: a single image, used for training"
    has_test = (root / "test").is_dir()
    distributed.say(f"{line}; {root / 'test'} is not used" if has_test else line)


def split(paths: Sequence[str], root: Path) -> tuple[list[str], list[str]]:
    """Split `paths` into 85 % for training and 15 % for validation, of two at least one in each.

    The order is by a checksum of the path below `root`: the same on every machine and in every
    run, and adding an image moves few others. A path that a list has twice is not in both.
    """
    unique = dict.fromkeys(paths)
    by_chance = sorted(unique, key=lambda p: zlib.crc32(os.fsencode(os.path.relpath(p, root))))
    held = {*by_chance[: max(len(unique) > 1, round(0.15 * len(unique)))]}
    train, val = ([path for path in paths if (path in held) == is_val] for is_val in (False, True))
    return sorted(train), sorted(val)
