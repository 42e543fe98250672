"""The folder that is written: images, masks or class folders, and the names of the classes."""

import csv
import dataclasses
import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import UnidentifiedImageError

from ddpkit import files
from ddpkit.convert.labels import (
    BACKGROUND,
    Color,
    LabelledSet,
    Sample,
    Size,
    part_of,
)
from ddpkit.convert.objects import Drawing
from ddpkit.errors import UserError, shorten
from ddpkit.ranks.cpus import cpus
from ddpkit.vision import folders, images, masks, pictures, places
from ddpkit.vision.bars import tqdm

# Colours for void, of which the first is taken that no class has
OF_VOID = [(255, 255, 255), (224, 224, 192), (128, 128, 128)]
OF_VOID += [(n, 0, n) for n in range(1, 256)]


def write_set(labelled: LabelledSet, out: Path) -> list[str]:
    """Write the folder `out`, whole or not at all; return lines about it."""
    lines = []
    parts = {sample.part for sample in labelled.samples}
    if len(parts) == 1 and "train" not in parts:
        lines.append(f"all images are of {parts.pop()}: they become train")
        for sample in labelled.samples:
            sample.part = "train"
    has_masks = any(sample.draw for sample in labelled.samples)
    if not labelled.samples:
        raise UserError(
            f"{out}: no image with labels was found, so nothing is written; see the lines above"
        )
    by_folder = (
        not has_masks
        and not labelled.several
        # each can have a folder of its own, on any disk
        and count_different(map(folder_name, labelled.names)) == len(labelled.names)
    )
    named = name_samples(labelled, by_folder)
    if has_masks:
        if len(labelled.names) < 2:
            raise UserError(
                f"{out}: the only class is {shorten(labelled.names)}; segmentation needs two: name "
                "what is marked otherwise than background"
            )
        # which refuses what cannot be written
        text = classes_text(labelled)
        masks.parse(text.splitlines(), out / "classes.txt")
    with files.filling(out) as partial:
        if has_masks:
            counts = write_masks(labelled, named, partial)
            files.save_text(partial / "classes.txt", text)
        else:
            counts = write_images(named, partial, by_folder)
    sizes = [f"{count} in {part}" for part, count in counts.items() if count]
    lines.append(f"{out}: {', '.join(sizes)}; {len(labelled.names)} classes")
    return lines


def name_samples(labelled: LabelledSet, is_by_class: bool) -> list[tuple[Sample, str]]:
    """Return each sample with the name that its image gets in its folder, without an ending.

    Images of the same name in a folder get those of their folders, too, as far as is needed, and a
    number if that is not enough. Capital letters make no other name, as on some disks. The same
    image is taken once in a part, with all its objects.
    """
    # by folder and name: samples by the files that their images are
    samples_of: dict[tuple, dict[Path, Sample]] = {}
    parts_of: dict[Path, set[str]] = {}
    for sample in sorted(labelled.samples, key=lambda each: str(each.image)):
        place = (sample.part, sample.labels if is_by_class else ())
        own = samples_of.setdefault((place, sample.image.stem.lower()), {})
        path = sample.image.resolve()
        parts_of.setdefault(path, set()).add(sample.part)
        if path in own:
            labelled.skipped.leave_out(
                "more entries of an image that is there, which are taken as one",
                sample.image,
            )
            own[path] = both_of(own[path], sample)
        else:
            own[path] = sample
    shared = [path.name for path, parts in parts_of.items() if len(parts) > 1]
    if shared:
        labelled.notes.append(
            f"{len(shared)} images go into two parts, so that scores count what was trained on: "
            f"{shorten(shared)}"
        )
    taken: set[tuple] = set()
    result = []
    for (place, _), own in samples_of.items():
        for sample, name in zip(own.values(), names_apart(list(own)), strict=True):
            number = 1
            new = name
            while (place, new.lower()) in taken:
                number += 1
                new = f"{name}-{number}"
            taken.add((place, new.lower()))
            result.append((sample, new))
    return result


def names_apart(paths: Sequence[Path]) -> list[str]:
    """Return names of images: with as many folders as tell them apart, but for those of parts."""
    folders_of = []
    for path in paths:
        folders_of.append([each for each in path.parent.parts if not part_of(each)])
    best = [path.stem for path in paths]
    for count in range(1, max(map(len, folders_of))):
        names = [
            "/".join([*own[-count:], path.stem])
            for own, path in zip(folders_of, paths, strict=True)
        ]
        if count_different(names) > count_different(best):
            best = names
    return best


def count_different(names: Iterable[str]) -> int:
    return len({name.lower() for name in names})


def both_of(first: Sample, second: Sample) -> Sample:
    """Return one sample of two with the same image: with the objects of both."""
    one = first.draw
    other = second.draw
    if isinstance(one, Drawing) and isinstance(other, Drawing):
        both = Drawing([*one.entries, *other.entries], one.skipped)
        return dataclasses.replace(first, draw=both)
    if one or other:
        raise UserError(
            f"{first.image}: has two masks in {first.part}; remove one of them"
        )
    return first


def write_masks(
    labelled: LabelledSet, named: list[tuple[Sample, str]], folder: Path
) -> dict[str, int]:
    """Write images and masks; return the number of each part."""
    colors = labelled.colors
    if colors:
        # white for numbers that are no class; void is the last one
        white = [(255, 255, 255)] * (masks.VOID - len(colors))
        colors = [*colors, *white, void_color(colors)]
    painted = masks.Classes(labelled.names, colors)

    def store(item: tuple[Sample, str]) -> tuple[str, list[int]]:
        sample, name = item
        draw = sample.draw
        try:
            size = size_of(sample.image)
        except (OSError, ValueError) as error:
            what = f"{type(error).__name__}{images.HEIC_HINT}"
            reason = f"images that cannot be opened ({what})"
            labelled.skipped.leave_out(reason, sample.image)
            return sample.part, []
        if draw is None:
            return sample.part, []
        mask = draw(size)
        used = np.flatnonzero(np.bincount(mask.reshape(-1), minlength=256)).tolist()
        if used == [masks.VOID]:
            labelled.skipped.leave_out(
                "images whose masks are void everywhere", sample.image
            )
            return sample.part, []
        target = folder / sample.part / "masks" / f"{name}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        pictures.paint(mask, painted).save(target)
        put_image(sample.image, folder / sample.part / "images" / name)
        return sample.part, used

    counts = dict.fromkeys(places.PARTS, 0)
    there: set[int] = set()
    for part, used in in_threads(store, named):
        counts[part] += bool(used)
        there.update(used)
    if there <= {0, masks.VOID} and labelled.names[0] == BACKGROUND:
        raise UserError(
            "no object has an outline, so all masks would be background alone: segmentation needs "
            "outlines, not boxes or points; write labels of images into a CSV file, file and label"
        )
    unused = [x for n, x in enumerate(labelled.names) if n not in there]
    if unused:
        labelled.notes.append(f"classes that no mask has: {shorten(unused)}")
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
    named: list[tuple[Sample, str]], folder: Path, by_folder: bool
) -> dict[str, int]:
    """Put images into class folders; or beside lists of them and their labels."""
    columns = ["file"]
    if not by_folder:
        columns.append("label")
    if any(sample.group for sample, _ in named):
        columns.append("group")
    counts = dict.fromkeys(places.PARTS, 0)
    lists: dict[str, list[list[str]]] = {}
    for sample, name in tqdm(named, unit="image", disable=None):
        place = folder / sample.part
        if by_folder:
            place = place / folder_name(sample.labels[0])
        path = put_image(sample.image, place / name)
        name = path.relative_to(folder).as_posix()
        label = "" if by_folder else as_cell(sample)
        cells = {"file": name, "label": label, "group": sample.group or name}
        listed = lists.setdefault("groups" if by_folder else sample.part, [columns])
        listed.append([cells[column] for column in columns])
        counts[sample.part] += 1
    if len(columns) > 1:
        for name, rows in lists.items():
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(rows)
            files.save_text(folder / f"{name}.csv", text.getvalue())
    return counts


def as_cell(sample: Sample) -> str:
    """Return the labels of an image in a list; of one without any the separator alone."""
    for label in sample.labels:
        if folders.SEPARATOR in label:
            raise UserError(
                f"{sample.image}: the label {label} has {folders.SEPARATOR}, which stands between "
                "labels in a list; rename it"
            )
    return folders.SEPARATOR.join(sample.labels) or folders.SEPARATOR


def folder_name(label: str) -> str:
    """Return a class name that a folder can have."""
    return label.replace("/", "_").replace("\\", "_").lstrip(".") or "unnamed"


def classes_text(labelled: LabelledSet) -> str:
    """Return what classes.txt says: names, with colours if the source has them."""
    if not labelled.colors:
        return "".join(f"{name}\n" for name in labelled.names)
    lines = []
    for name, color in zip(labelled.names, labelled.colors, strict=True):
        lines.append("{} = {} {} {}\n".format(name, *color))
    lines.append("void = {} {} {}\n".format(*void_color(labelled.colors)))
    return "".join(lines)


def void_color(colors: list[Color]) -> Color:
    return next(color for color in OF_VOID if color not in colors)


def size_of(path: Path) -> Size | None:
    """Return height and width of an image, upright; None of a TIFF that Pillow does not read."""
    if path.suffix.lower() == ".npy":
        with files.open_file(path) as file:
            height, width = np.load(file).shape[:2]
        return height, width
    try:
        with images.open_header(path) as file:
            width, height = file.size
            # of a PNG, EXIF may come behind the pixels, which are read then
            images.DEFAULT_FORMAT.check_size(str(path), file.size)
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
        try:
            os.link(real, path)
        except OSError:  # it is there, or another disk, or one without hard links
            # never into a file that is there: it may be a link to an image of the source
            with files.open_file(real) as image, open(path, "xb") as copy:
                shutil.copyfileobj(image, copy)
    except FileExistsError:
        raise UserError(
            f"{source}: another image has become {path.name} already; rename one of them"
        ) from None
    return path
