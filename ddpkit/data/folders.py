"""Data sets of files: the folders in DIR, or its lists train.csv and val.csv."""

import csv
import functools
import itertools
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import NoReturn

import numpy as np
from torch.utils.data import Dataset

from ddpkit import files
from ddpkit.data import class_counts, masks, prepared
from ddpkit.data.format import Format, read_format
from ddpkit.data.images import LazyImage, open_image
from ddpkit.data.samples import Packed
from ddpkit.errors import UserError
from ddpkit.ranks import distributed

EXTENSIONS = {".bmp", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
NO_IMAGES = {"", ".csv", ".db", ".ini", ".json", ".txt", ".xml"}  # as are often beside images
VAL_NAMES = ("val", "valid", "validation")
NO_CLASSES = {"train", "training", "test", "testing", "images", "masks", *VAL_NAMES}
Pairs = list[tuple[str, str]]  # the paths of images and their masks, or the names of their classes


def walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Like os.walk, sorted folders and links to them, each once, but for hidden ones."""

    def refuse(error: OSError) -> NoReturn:
        raise files.failure(error.filename, error, "read")  # os.walk would leave out the folder

    real = os.path.realpath(folder)
    seen = {real, *map(str, Path(real).parents)}
    for parent, inner, names in os.walk(folder, onerror=refuse, followlinks=True):
        found, inner[:] = sorted(inner), []
        for name in found:
            real = os.path.realpath(os.path.join(parent, name))
            if real not in seen and not name.startswith(".") and name != "__MACOSX":
                seen.add(real)
                inner.append(name)
        yield parent, inner, names


@functools.cache  # one line for all folders
def say_skipped(kind: str) -> None:
    distributed.say(f"skipped, because their type is not read: {kind}")


def list_images(folder: Path) -> list[str]:
    """Return the paths of all images below `folder`, sorted; a UserError if there is none."""
    of_kind: dict[str, list[str]] = {}
    for parent, _, names in walk(folder):
        for name in names:
            if not name.startswith("."):
                kind = os.path.splitext(name)[1].lower()
                of_kind.setdefault(kind, []).append(os.path.join(parent, name))
    kinds = (EXTENSIONS & of_kind.keys()) or ({".npy"} & of_kind.keys())
    if not kinds:
        raise UserError(f"{folder}: no images in it; expected {', '.join(sorted(EXTENSIONS))}")
    for kind in sorted(of_kind.keys() - kinds - NO_IMAGES):
        say_skipped(kind)
    return sorted(path for kind in kinds for path in of_kind[kind])


def collect(inputs: Sequence[str | Path]) -> list[tuple[str, str]]:
    """Return (path, name) of each image in files and folders; name: below it, without ending."""
    found = []
    for given in dict.fromkeys(inputs):
        is_file = os.path.isfile(given)
        for path in [str(given)] if is_file else list_images(Path(given)):
            below = os.path.basename(path) if is_file else os.path.relpath(path, given)
            found.append((path, os.path.splitext(below)[0]))
    return found


def by_name(found: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return {name: path} of (path, name) pairs; a UserError if two share a name."""
    path_of: dict[str, str] = {}
    for path, name in found:
        if (other := path_of.setdefault(name, path)) is not path:
            raise UserError(f"{path} and {other} have the same name; rename one")
    return path_of


def find_val(root: Path) -> Path | None:
    """Return the folder of the validation set below `root`, by any of its usual names, or None."""
    folder = next((root / name for name in VAL_NAMES if (root / name).is_dir()), None)
    if folder and folder.name != "val":
        distributed.say(f"no {root / 'val'}: {folder} is used for validation")
    return folder


def split(samples: list, root: Path) -> tuple[list, list]:
    """Split samples into 85 % for training and 15 % for validation, by checksums of the paths."""
    unique = dict.fromkeys(path for path, _ in samples)
    by_chance = sorted(unique, key=lambda p: zlib.crc32(os.fsencode(os.path.relpath(p, root))))
    held = {*by_chance[: max(len(unique) > 1, round(0.15 * len(unique)))]}
    train, val = ([s for s in samples if (s[0] in held) == is_val] for is_val in (False, True))
    return sorted(train), sorted(val)


def say_split(root: Path, count: int, total: int) -> None:
    if not count:
        raise UserError(f"{root}: too few images to split; add more, or {root / 'val'}")
    place = root / ("val.csv" if (root / "train.csv").is_file() else "val")
    distributed.say(f"no {place}: {count} of {total} images used for validation")


def find_train(root: Path, has_masks: bool) -> Path:
    """Return DIR/train, or DIR if it has none but images and masks, or class folders alone."""
    train = root / "train"
    if train.is_dir():
        return train
    names = {name.lower() for name in next(walk(root))[1]}
    are_classes = len(names) > 1 and not names & NO_CLASSES
    if not ({"images", "masks"} <= names if has_masks else are_classes):
        raise UserError(f"{train}: no such folder; README.md describes the expected folders")
    distributed.say(f"no {train}: the folders in {root} are used")
    return root


def find_parts(
    root: Path, columns: Sequence[str], paths: int, read: Callable
) -> tuple[Pairs, Pairs | None]:
    """Return the pairs for training and validation, or None, of lists, or else of folders."""
    if (root / "train.csv").is_file():
        val = root / "val.csv" if (root / "val.csv").is_file() else None
        train = read_list(root / "train.csv", columns, paths)
        return train, read_list(val, columns, paths) if val else None
    folder, val = find_train(root, paths > 1), find_val(root)
    return read(folder), read(val) if val else None


def find_labelled(root: Path) -> tuple[list, list, list[str]]:
    """Return the samples for training and for validation, and the classes."""
    named = find_parts(root, ("file", "label"), 1, read_class_folders)
    names = {name for _, name in named[0]}
    are_numbers = all(name.isdecimal() for name in names)
    classes = sorted(names, key=lambda name: (int(name) if are_numbers else 0, name))
    if len(classes) < 2:
        raise UserError(f"{root}: {len(classes)} class(es) for training; at least two are needed")
    if unknown := {name for _, name in named[1] or ()} - {*classes}:
        raise UserError(f"{root}: class {min(unknown)} of validation is not in the training set")
    number_of, of_class = {name: number for number, name in enumerate(classes)}, itemgetter(1)
    train, val = (
        sorted(((path, number_of[name]) for path, name in part or ()), key=of_class)
        for part in named
    )
    if named[1] is None:
        parts = [split([*each], root) for _, each in itertools.groupby(train, of_class)]
        train, val = (list(itertools.chain(*part)) for part in zip(*parts, strict=True))
        say_split(root, len(val), len(named[0]))
    return train, val, classes


def read_class_folders(folder: Path) -> Pairs:
    names = next(walk(folder))[1]
    if not names:
        raise UserError(f"{folder}: no class folders in it; README.md describes what is expected")
    if unreadable := [name for name in names if name.encode("utf-8", "ignore").decode() != name]:
        raise UserError(f"{folder / unreadable[0]}: the class name is not UTF-8; rename the folder")
    return [(path, name) for name in names for path in list_images(folder / name)]


def find_pairs(root: Path) -> tuple[Pairs, Pairs]:
    train, val = find_parts(root, ("image", "mask"), 2, match_pairs)
    if val is None:
        train, val = split(train, root)
        say_split(root, len(val), len(train) + len(val))
    return train, val


def match_pairs(folder: Path) -> Pairs:
    """Return (image path, mask path) for each name in `folder`/images and `folder`/masks."""
    image_of, mask_of = (by_name(collect([folder / kind])) for kind in ("images", "masks"))
    if unmatched := min(image_of.keys() ^ mask_of.keys(), default=""):
        path = image_of.get(unmatched) or mask_of[unmatched]
        lack = folder / ("masks" if unmatched in image_of else "images")
        line = "names must be equal but for their endings"
        raise UserError(f"{path}: nothing of that name in {lack}; {line}")
    return [(image_of[name], mask_of[name]) for name in sorted(image_of)]


def read_list(path: Path, columns: Sequence[str], count: int) -> list[tuple]:
    """Return the values of `columns` in each row of a CSV file; the first `count` are paths."""
    found = []
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            if missing := [name for name in columns if name not in (table.fieldnames or ())]:
                line = f"{path}: no column {missing[0]} in its first line, which must name"
                raise UserError(f"{line} the columns {','.join(columns)}")
            for row in table:
                line = f"{path}, line {table.line_num}"
                values = [(row[name] or "").strip() for name in columns]
                if "" in values:
                    raise UserError(f"{line}: no {columns[values.index('')]}; add it")
                paths = [os.path.join(path.parent, value) for value in values[:count]]
                if lost := [each for each in paths if not os.path.isfile(each)]:
                    raise UserError(f"{line}: {lost[0]} does not exist; correct the line")
                found.append((*paths, *values[count:]))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read ({error}); save it as CSV in UTF-8") from None
    if not found:
        raise UserError(f"{path}: no rows; list the samples in it, or remove the file")
    return found


@dataclass
class Part:
    """The samples for training, or those for validation."""

    samples: Sequence[tuple]  # begin with the path of an image
    format: Format
    stored: Sequence[tuple[LazyImage, ...]] | None = None  # by `prepare`
    labels: masks.Labels = field(default_factory=lambda: masks.UNNAMED)  # what the masks mean


class Files(Dataset):
    """Samples that are files; transform: what `__getitem__` in dataset.py applies."""

    def __init__(self, part: Part, transform: Callable) -> None:
        self.samples = Packed(part.samples)
        self.format, self.stored, self.labels = part.format, part.stored, part.labels
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def open(self, index: int) -> tuple[LazyImage, ...]:
        """Return what a sample has, decoded once it is read."""
        return self.stored[index] if self.stored else self.open_files(index)  # type: ignore


class ImageFiles(Files):
    """Images with class numbers: `samples[index]` is (path, number), `open` returns (image,).

    The image is a LazyImage, decoded once it is read.

        class ImageDataset(ddpkit.ImageFiles):
            def __getitem__(self, index: int) -> tuple[Tensor, int]:
                (image,) = self.open(index)
                return self.transform(image), self.samples[index][1]
    """

    def open_files(self, index: int) -> tuple[LazyImage]:
        return (open_image(self.samples[index][0], self.format),)

    def count_labels(self, index: int) -> dict[int, int]:
        """Return how often each class occurs in a sample, for --class-weights auto and others."""
        return {self.samples[index][1]: 1}


class MaskFiles(Files):
    """Images with masks: `samples[index]` is a pair of paths, `open` returns (image, mask).

    The mask has class numbers, whatever values or colours the file has, and 255 where it is void.

    Raises a UserError if image and mask differ in size.

        class SegmentationDataset(ddpkit.MaskFiles):
            def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
                return self.transform(*self.open(index))
    """

    def open_files(self, index: int) -> tuple[LazyImage, LazyImage]:
        image_path, mask_path = self.samples[index]
        image, mask = open_image(image_path, self.format), self.open_mask(index)
        if (image.height, image.width) != (mask.height, mask.width):
            line = f"{mask_path}: the mask has {mask.width} x {mask.height} pixels, its image"
            raise UserError(f"{line} {image.width} x {image.height}: they must be equal")
        return image, mask

    def open_mask(self, index: int) -> LazyImage:
        if self.stored:
            return self.stored[index][1]
        return LazyImage.of(masks.read_mask(self.samples[index][1], self.labels, self.format))

    def count_labels(self, index: int) -> dict[int, int]:
        """Return the pixels of each class in a mask, for --class-weights auto and others."""
        pixels = class_counts.histogram(self.open_mask(index).read().numpy())
        return {n: int(pixels[n]) for n in np.flatnonzero(pixels).tolist() if n != masks.VOID}


def find_classes(data: Path) -> tuple[Part, Part, Sequence[str]]:
    """Return the parts for training and for validation, for ImageFiles, and the class names.

    data: a folder as README.md describes it, or one that `prepare` has made. Every rank has
    to call it. Says how many images each class has. Raises a UserError for any other folder.

        train, val, classes = ddpkit.find_classes(Path("data/demo"))
        train_set = ImageDataset(train, train_transform)
    """
    train, val, classes = _find(data, find_labelled, 1)
    class_counts.say_images(classes, *([n for _, n in part.samples] for part in (train, val)))
    return train, val, classes


def find_masks(data: Path) -> tuple[Part, Part, Sequence[str]]:
    """Return the parts for training and for validation, for MaskFiles, and the class names.

    As `find_classes`; says which share of the pixels each class has. Without DIR/classes.txt it
    reads all training masks for the class numbers. Raises a UserError if they cannot be such.

        train, val, classes = ddpkit.find_masks(Path("data/demo"))
        train_set = SegmentationDataset(train, train_transform)
    """

    def find(root: Path) -> tuple[Pairs, Pairs, masks.Labels]:
        return *find_pairs(root), masks.read_classes(root / "classes.txt")

    train, val, names = _find(data, find, 2)
    train.labels = names if isinstance(names, masks.Labels) else masks.parse(names, data)
    train.labels = val.labels = distributed.await_rank_zero(survey, data, train)
    return train, val, train.labels


def _find(
    data: Path, find: Callable[[Path], tuple[list, list, list[str]]], each: int
) -> tuple[Part, Part, list[str]]:
    """Return what `find` lists in `data`, or what is prepared there; samples have `each` paths."""
    format = read_format(data)
    if store := prepared.open_store(data, find, each, format):
        (train, train_images), (val, val_images), classes = store
        return Part(train, format, train_images), Part(val, format, val_images), classes
    train, val, classes = find(data)
    _ = format.statistics, open_image(train[0][0], format)  # an error on all ranks
    return Part(train, format), Part(val, format), classes


def survey(data: Path, train: Part) -> masks.Labels:
    """Print the classes' shares of the pixels in some masks; return the classes."""
    labels, path, total = train.labels, data / "classes.txt", len(train.samples)
    if not labels:
        distributed.say(f"no {path}, which saves time: reading {total} masks for the class numbers")
    dataset = MaskFiles(train, transform=tuple)
    counts, count = class_counts.count_pixels(
        lambda index: dataset.open_mask(index).read().numpy(), total, has_to_read_all=not labels
    )
    values = np.flatnonzero(counts).tolist()
    if count == total and (fault := masks.explain_values(values, bool(labels))):
        raise UserError(f"{data}: {fault}")
    labels = labels or masks.parse([str(value) for value in values if value != masks.VOID], path)
    known, head = counts[: len(labels)], f"in % of the pixels of {count} of {total} training masks"
    texts = [f"{share:.3g}" for share in 100 * known / max(known.sum(), 1)]
    class_counts.say_line(head, labels, texts)
    class_counts.warn(labels, known, f"none of these {count} masks")
    return labels
