"""The folder that is written: images, masks or class folders, and the names of the classes."""

import csv
import io
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import UnidentifiedImageError
from tqdm import tqdm

from ddpkit import files
from ddpkit.convert.labels import (
    BACKGROUND,
    PARTS,
    Color,
    LabelledSet,
    Sample,
    Size,
    unused_classes,
)
from ddpkit.data import folders, images, masks
from ddpkit.errors import UserError, shorten
from ddpkit.ranks.cpus import cpus
from ddpkit.run import pictures

# Colours for void, of which the first is taken that no class has
OF_VOID = [(255, 255, 255), (224, 224, 192), (128, 128, 128)]
OF_VOID += [(n, 0, n) for n in range(1, 256)]


def write_set(found: LabelledSet, out: Path) -> list[str]:
    """Write the folder `out`, whole or not at all; return lines about it."""
    lines = []
    parts = {sample.part for sample in found.samples}
    if parts and "train" not in parts and len(parts) == 1:
        lines.append(f"all images are of {parts.pop()}: they become train")
        for sample in found.samples:
            sample.part = "train"
    has_masks = any(sample.draw for sample in found.samples)
    if not found.samples:
        raise UserError(
            f"{out}: no image with labels was found, so nothing is written; see the lines above"
        )
    named = name_samples(found, is_by_class=not has_masks and not found.several)
    if has_masks:
        # which refuses what cannot be written
        text = classes_text(found)
        masks.parse(text.splitlines(), out / "classes.txt")
    with files.filling(out) as partial:
        if has_masks:
            counts = write_masks(found, named, partial)
            write_text(partial / "classes.txt", text)
        else:
            counts = write_images(found, named, partial)
    sizes = [f"{count} in {part}" for part, count in counts.items() if count]
    lines.append(f"{out}: {', '.join(sizes)}; {len(found.names)} classes")
    return lines


def name_samples(found: LabelledSet, is_by_class: bool) -> list[tuple[Sample, str]]:
    """Return each sample with the name that its image gets in its folder, without an ending.

    Images of the same name in a folder get that of their folder, too. The same image with the same
    labels is taken once.
    """
    places: dict[tuple, dict[Path, Sample]] = {}
    for sample in sorted(found.samples, key=lambda each: str(each.image)):
        key = (sample.part, sample.labels if is_by_class else (), sample.image.stem)
        own = places.setdefault(key, {})
        path = sample.image.resolve()
        if path in own:
            found.skipped.leave_out("images that come twice", sample.image)
        own.setdefault(path, sample)
    named = []
    for (_, _, stem), own in places.items():
        for path, sample in own.items():
            name = stem if len(own) == 1 else f"{path.parent.name}/{stem}"
            named.append((sample, name))
    seen: dict[tuple, Path] = {}
    for sample, name in named:
        key = (sample.part, sample.labels if is_by_class else (), name)
        other = seen.setdefault(key, sample.image)
        if other != sample.image:
            raise UserError(
                f"{sample.image} and {other} have the same name; rename one, or its folder"
            )
    return named


def write_masks(
    found: LabelledSet, named: list[tuple[Sample, str]], folder: Path
) -> dict[str, int]:
    """Write images and masks; return the number of each part."""
    painted = masks.Classes(found.names)
    if found.colors:
        painted.colors = np.array([*found.colors, void_color(found.colors)], np.uint8)
        # `paint` fills the colours that are missing by white, and void is the last
        missing = masks.VOID + 1 - len(painted.colors)
        fill = np.full((missing, 3), 255, np.uint8)
        painted.colors = np.concatenate(
            [painted.colors[:-1], fill, painted.colors[-1:]]
        )

    def store(item: tuple[Sample, str]) -> tuple[str, list[int]]:
        sample, name = item
        draw = sample.draw
        try:
            size = size_of(sample.image)
        except (OSError, ValueError, UnidentifiedImageError) as error:
            reason = f"images that cannot be opened ({type(error).__name__})"
            found.skipped.leave_out(reason, sample.image)
            return sample.part, []
        if draw is None:
            return sample.part, []
        mask = draw(size)
        used = np.flatnonzero(np.bincount(mask.reshape(-1), minlength=256)).tolist()
        if used == [masks.VOID]:
            found.skipped.leave_out(
                "images whose masks are void everywhere", sample.image
            )
            return sample.part, []
        target = folder / sample.part / "masks" / f"{name}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        pictures.paint(mask, painted).save(target)
        put_image(sample.image, folder / sample.part / "images" / name)
        return sample.part, used

    counts = dict.fromkeys(PARTS, 0)
    there: set[int] = set()
    for part, used in in_threads(store, named):
        counts[part] += bool(used)
        there.update(used)
    if there <= {0, masks.VOID} and found.names[0] == BACKGROUND:
        raise UserError(
            "no object has an outline, so all masks would be background alone: segmentation needs "
            "outlines, not boxes or points"
        )
    unused = unused_classes(found.names, there)
    if unused:
        found.notes.append(f"classes that no mask has: {shorten(unused)}")
    return counts


def in_threads(function: Callable, items: list) -> Iterator:
    """Yield what `function` returns for each, in order; at an error drop what has not begun."""
    pool = ThreadPoolExecutor(cpus())
    try:
        results = pool.map(function, items)
        yield from tqdm(results, total=len(items), unit="image", disable=None)
    finally:
        pool.shutdown(cancel_futures=True)


def write_images(
    found: LabelledSet, named: list[tuple[Sample, str]], folder: Path
) -> dict[str, int]:
    """Put images into class folders, or beside lists if they have several labels."""
    counts = dict.fromkeys(PARTS, 0)
    rows: dict[str, list[list[str]]] = {part: [] for part in PARTS}
    for sample, name in tqdm(named, unit="image", disable=None):
        place = folder / sample.part
        if not found.several:
            place = place / folder_name(sample.labels[0])
        path = put_image(sample.image, place / name)
        # an image without any label has the separator alone
        label = folders.SEPARATOR.join(sample.labels) or folders.SEPARATOR
        rows[sample.part].append([path.relative_to(folder).as_posix(), label])
        counts[sample.part] += 1
    for part, listed in rows.items():
        if found.several and listed:
            text = io.StringIO()
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(["file", "label"])
            writer.writerows(listed)
            write_text(folder / f"{part}.csv", text.getvalue())
    return counts


def folder_name(label: str) -> str:
    """Return a class name that a folder can have."""
    return label.replace("/", "_").replace("\\", "_").lstrip(".") or "unnamed"


def write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def classes_text(found: LabelledSet) -> str:
    """Return what classes.txt says: names, with colours if the source has them."""
    if not found.colors:
        return "".join(f"{name}\n" for name in found.names)
    lines = []
    for name, color in zip(found.names, found.colors, strict=True):
        lines.append("{} = {} {} {}\n".format(name, *color))
    lines.append("void = {} {} {}\n".format(*void_color(found.colors)))
    return "".join(lines)


def void_color(colors: list[Color]) -> Color:
    return next(color for color in OF_VOID if color not in colors)


def size_of(path: Path) -> Size | None:
    """Return height and width of an image, upright; None of a TIFF that Pillow does not read."""
    if path.suffix.lower() == ".npy":
        height, width = np.load(path, mmap_mode="r").shape[:2]
        return height, width
    try:
        with images.open_header(path) as file:
            width, height = file.size
            is_turned = file.getexif().get(images.ORIENTATION, 1) >= 5
            return (width, height) if is_turned else (height, width)
    except UnidentifiedImageError:
        if path.suffix.lower() in (".tif", ".tiff"):
            return None
        raise


def put_image(source: Path, target: Path) -> Path:
    """Link an image, or copy it to another disk; return its path. target: without an ending."""
    target.parent.mkdir(parents=True, exist_ok=True)
    path = target.with_name(target.name + source.suffix)
    real = os.path.realpath(source)  # of a link, what it leads to
    try:
        os.link(real, path)
    except OSError:  # another disk, or one without hard links
        shutil.copyfile(real, path)
    return path
