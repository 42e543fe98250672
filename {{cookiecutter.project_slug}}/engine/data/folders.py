"""Data sets of files: the folders in DIR, or its lists train.csv and val.csv.

dataset.py has a class that says what becomes of a sample that `open` returns.
"""

import csv
import os
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
from torch.utils.data import Dataset

from engine import files
from engine.data import class_counts, masks, prepared
from engine.data.format import Format, read_format
from engine.data.images import LazyImage, open_image
from engine.data.samples import Packed
from engine.errors import UserError, shorten
from engine.ranks import distributed

EXTENSIONS = {".bmp", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
ARRAY = ".npy"  # an image where there are no others; with "channels" in data.json
NO_IMAGES = {".csv", ".db", ".ini", ".json", ".txt", ".xml"}  # as are often beside images
VAL_NAMES = ("val", "valid", "validation")
LAYOUT = "no such folder; README.md describes the expected folders"
MOST_READ = 256  # masks, for the line about the classes' shares
Labelled = list[tuple[str, int]]  # the paths of images and their class numbers
Pairs = list[tuple[str, str]]  # the paths of images and their masks, or the names of their classes


def walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Like os.walk, sorted and through links, but into each folder once and into no hidden one.

    Links to a parent and what tools leave (.ipynb_checkpoints, __MACOSX) would add duplicates.
    """

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


def ending(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def is_image(name: str) -> bool:
    """Return whether a file of that name is read as an image."""
    return ending(name) in {*EXTENSIONS, ARRAY} and not name.startswith(".")


_skipped: Counter[str] = Counter()  # endings of files that list_images skipped, until it is said


def list_images(folder: Path) -> list[str]:
    """Return the paths of all images below `folder`, sorted; a UserError if there is none.

    Arrays (.npy) are taken for images if there are no others.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such file or folder")
    paths: list[str] = []
    others = Counter[str]()
    for parent, _, names in walk(folder):
        paths += [os.path.join(parent, name) for name in names if is_image(name)]
        endings = (ending(name) for name in names if not (is_image(name) or name.startswith(".")))
        others.update(each or "without ending" for each in endings if each not in NO_IMAGES)
    pictures = [path for path in paths if ending(path) != ARRAY]
    if pictures and len(pictures) < len(paths):
        others[ARRAY] = len(paths) - len(pictures)
    if not paths:
        found = f" but {_count(others)}" if others else ""
        kinds = ", ".join(sorted(EXTENSIONS))
        raise UserError(f"{folder}: no images in it{found}; expected {kinds}")
    _skipped.update(others)
    return sorted(pictures or paths)


def say_skipped() -> None:
    """Print how many files `list_images` has skipped since the last time, if any."""
    if _skipped:
        line = f"skipped, because their type is not read: {_count(_skipped)}"
        distributed.say(f"{line}; convert them to JPEG or PNG")
    _skipped.clear()


def _count(endings: Counter[str]) -> str:
    ordered = sorted(endings.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{number} {ending}" for ending, number in ordered)


def collect(inputs: Sequence[str | Path]) -> list[tuple[str, str]]:
    """Return (path, name) of each image among `inputs`, which are files and folders.

    The name is the path below the folder that was given, without its extension.
    """
    found = []
    for given in inputs:
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
            raise UserError(
                f"{path} and {other} have the same name; rename one, or pass one at a time"
            )
    return path_of


def composed(name: str) -> str:
    """Return the form in which names are compared: macOS may store e and an accent for é."""
    return unicodedata.normalize("NFC", name)


def find_val(root: Path) -> Path | None:
    """Return the folder of the validation set below `root`, by any of its usual names, or None."""
    folder = next((root / name for name in VAL_NAMES if (root / name).is_dir()), None)
    if folder and folder.name != "val":
        distributed.say(f"no {root / 'val'}: {folder} is used for validation")
    return folder


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


def say_split(root: Path, count: int, total: int, is_list: bool, whole: Sequence[str] = ()) -> None:
    """Print that `count` of `total` images are held out; none of the classes `whole`."""
    place = root / ("val.csv" if is_list else "val")
    if not count:
        raise UserError(f"{root}: too few images to split; add more, or {place}")
    line = f"no {place}: {count} of {total} images used for validation"
    if whole:
        line += f"; {shorten(whole)}: a single image, used for training"
    has_test = (root / "test").is_dir()
    distributed.say(f"{line}; {root / 'test'} is not used" if has_test else line)


def find_labelled(root: Path) -> tuple[Labelled, Labelled, list[str]]:
    """Return the samples for training and for validation, and the classes.

    They are those of DIR/train.csv, if there is such a list, with the columns `file`, a path below
    DIR or absolute, and `label`, the name of a class; or else of the class folders. Without a
    validation set, 15 % of each class is held out, always the same images.
    """
    is_list = (root / "train.csv").is_file()
    if is_list:
        named = read_lists(root, ("file", "label"), 1)
    else:
        places = find_train(root), find_val(root)
        named = [read_class_folders(place) if place else None for place in places]
        say_skipped()
    train_of, val_of = map(group, named)
    classes = sort_names(train_of)
    if len(classes) < 2:
        where: Path | None = root / "train.csv" if is_list else places[0]
        raise UserError(f"{where}: {len(classes)} class(es) found; at least two are needed")
    where = root / "val.csv" if is_list else places[1]
    if unknown := sorted(val_of.keys() - train_of.keys()):
        raise UserError(f"{where}: class {unknown[0]} is not in the training set")
    if not is_list and where and (lacking := sorted(train_of.keys() - val_of.keys())):
        raise UserError(f"{where}: class folder {lacking[0]} is missing; train has it")
    if named[1] is None:
        total = len(named[0] or ())
        for name in classes:
            train_of[name], val_of[name] = split(train_of[name], root)
        whole = [name for name in classes if not val_of[name]]
        say_split(root, sum(map(len, val_of.values())), total, is_list, whole)
    train, val = (
        [(path, number) for number, name in enumerate(classes) for path in of.get(name, ())]
        for of in (train_of, val_of)
    )
    return train, val, classes


def group(named: Pairs | None) -> dict[str, list[str]]:
    """Return the paths of each class."""
    paths_of: dict[str, list[str]] = {}
    for path, name in named or ():
        paths_of.setdefault(name, []).append(path)
    return paths_of


def read_class_folders(folder: Path) -> Pairs:
    """Return (path, class) of all images in the class folders in `folder`."""
    found = class_folders(folder).items()
    return [(path, name) for name, each in found for path in list_images(each)]


def find_train(root: Path) -> Path:
    """Return DIR/train, or DIR if it has none and all its folders look like those of classes."""
    train = root / "train"
    if train.is_dir() or not root.is_dir():
        return train
    names = next(walk(root))[1]
    others = {"train", "training", "test", "testing", "images", "masks", *VAL_NAMES}
    no_class = [
        str(root / name)
        for name in names
        if name.lower() in others or not any(map(is_image, os.listdir(root / name)))
    ]
    if no_class or len(names) < 2:
        found = f"{shorten(no_class)} cannot be classes" if no_class else "no class folders"
        raise UserError(
            f"{train}: no such folder; expected {train}/<class>/* or {root}/<class>/*, but {found}"
        )
    distributed.say(f"no {train}: the class folders in {root} are used")
    return root


def class_folders(folder: Path) -> dict[str, Path]:
    """Return the folder of each class in `folder`, in the order of the class numbers."""
    if not folder.is_dir():
        raise UserError(f"{folder}: {LAYOUT}")
    _, names, loose = next(walk(folder))
    if unreadable := [name for name in names if name.encode("utf-8", "ignore").decode() != name]:
        raise UserError(f"{folder / unreadable[0]}: the class name is not UTF-8; rename the folder")
    if count := sum(map(is_image, loose)):
        distributed.say(f"{folder}: {count} image(s) beside the class folders are not used")
    found = by_name([(str(folder / name), composed(name)) for name in names])
    return {name: Path(found[name]) for name in sort_names(found)}


def sort_names(names: Collection[str]) -> list[str]:
    """Return `names` sorted, by number if all of them are numbers."""
    are_numbers = all(name.isdecimal() for name in names)
    return sorted(names, key=lambda name: (int(name) if are_numbers else 0, name))


def find_pairs(root: Path) -> tuple[Pairs, Pairs]:
    """Return the samples for training and for validation.

    They are those of DIR/train.csv, if there is such a list, with the columns `image` and `mask`,
    paths below DIR or absolute, or else of the folders. Without DIR/train, DIR/images and DIR/masks
    are taken. Without a validation set, 15 % of the pairs are held out, always the same.
    """
    if is_list := (root / "train.csv").is_file():
        train, val = read_lists(root, ("image", "mask"), 2)
    else:
        train_folder, val_folder = root / "train", find_val(root)
        if not train_folder.is_dir() and (root / "images").is_dir() and (root / "masks").is_dir():
            distributed.say(f"no {train_folder}: {root / 'images'} and {root / 'masks'} are used")
            train_folder = root
        train, val = match_pairs(train_folder), match_pairs(val_folder) if val_folder else None
        say_skipped()
    assert train is not None
    if val is None:
        train, val = split_pairs(train, root)
        say_split(root, len(val), len(train) + len(val), is_list)
    return train, val


def split_pairs(pairs: Pairs, root: Path) -> tuple[Pairs, Pairs]:
    """Return the pairs for training and those that are held out for validation."""
    mask_of = dict(pairs)
    train, val = split(list(mask_of), root)
    return [(path, mask_of[path]) for path in train], [(path, mask_of[path]) for path in val]


def match_pairs(folder: Path) -> Pairs:
    """Return (image path, mask path) for each name in `folder`/images and `folder`/masks."""
    if not folder.is_dir():
        raise UserError(f"{folder}: {LAYOUT}")
    image_of, mask_of = (
        by_name([(path, composed(name)) for path, name in collect([folder / kind])])
        for kind in ("images", "masks")
    )
    if unmatched := sorted(image_of.keys() ^ mask_of.keys()):
        path = image_of.get(unmatched[0]) or mask_of[unmatched[0]]
        lack, there = ("masks", mask_of) if unmatched[0] in image_of else ("images", image_of)
        raise UserError(
            f"{path}: nothing of that name in {folder / lack}, which has "
            f"{Path(next(iter(there.values()))).name}; names must be equal but for their endings"
        )
    return [(image_of[name], mask_of[name]) for name in sorted(image_of)]


def read_lists(root: Path, columns: Sequence[str], files: int) -> list[Pairs | None]:
    """Return what `read_list` does of DIR/train.csv and of DIR/val.csv; None if there is none."""
    paths = (root / "train.csv", root / "val.csv")
    return [read_list(path, columns, files) if path.is_file() else None for path in paths]


def read_list(path: Path, columns: Sequence[str], files: int) -> list[tuple]:
    """Return the values of `columns` in each row of the CSV file `path`; its first line names them.

    The first `files` of them are file names relative to the folder of `path`, returned as paths.
    Raises a UserError if a column or a value is missing, or a file does not exist.
    """
    found = []
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            if missing := [name for name in columns if name not in (table.fieldnames or ())]:
                has = ",".join(table.fieldnames or ())[:80]
                raise UserError(
                    f"{path}: no column {missing[0]} in its first line, {has!r}; it must name the "
                    f"columns {','.join(columns)}. Rename it if folders are to be used instead"
                )
            for row in table:
                line = f"{path}, line {table.line_num}"
                values = [(row[name] or "").strip() for name in columns]
                if "" in values:
                    raise UserError(f"{line}: no {columns[values.index('')]}; add it")
                paths = [os.path.join(path.parent, value) for value in values[:files]]
                if lost := [each for each in paths if not os.path.isfile(each)]:
                    raise UserError(f"{line}: {lost[0]} does not exist; correct the line")
                found.append((*paths, *values[files:]))
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8; save it as UTF-8") from None
    except csv.Error as error:
        raise UserError(f"{path}: cannot be read ({error}); save it as CSV") from None
    if not found:
        raise UserError(f"{path}: no rows; list the samples in it, or remove the file")
    return found


@dataclass
class Part:
    """The samples for training, or those for validation."""

    samples: Sequence[tuple]  # begin with the path of an image
    format: Format
    stored: Sequence[tuple[LazyImage, ...]] | None = None  # by prepare_data.py
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

        class ImageDataset(engine.ImageFiles):
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

        class SegmentationDataset(engine.MaskFiles):
            def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
                return self.transform(*self.open(index))
    """

    def open_files(self, index: int) -> tuple[LazyImage, LazyImage]:
        image_path, mask_path = self.samples[index]
        image, mask = open_image(image_path, self.format), self.open_mask(index)
        if (image.height, image.width) != (mask.height, mask.width):
            raise UserError(
                f"{mask_path}: the mask has {mask.width} x {mask.height} pixels, "
                f"{image_path} has {image.width} x {image.height}: they must be equal"
            )
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

    data: a folder as README.md describes it, or one that prepare_data.py has made. Every rank has
    to call it. Says how many images each class has. Raises a UserError for any other folder.

        train, val, classes = engine.find_classes(Path("data/demo"))
        train_set = ImageDataset(train, train_transform)
    """
    train, val, classes = _find(data, find_labelled, 1)
    class_counts.say_images(classes, *([n for _, n in part.samples] for part in (train, val)))
    return train, val, classes


def find_masks(data: Path) -> tuple[Part, Part, Sequence[str]]:
    """Return the parts for training and for validation, for MaskFiles, and the class names.

    As `find_classes`; says which share of the pixels each class has. Without DIR/classes.txt it
    reads all training masks for the class numbers. Raises a UserError if they cannot be such.

        train, val, classes = engine.find_masks(Path("data/demo"))
        train_set = SegmentationDataset(train, train_transform)
    """

    def find(root: Path) -> tuple[Pairs, Pairs, masks.Labels]:
        return *find_pairs(root), masks.read_classes(root / "classes.txt")

    train, val, names = _find(data, find, 2)
    labels = names if isinstance(names, masks.Labels) else masks.parse(names, data)
    train.labels = val.labels = labels
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
    """Print the classes' shares of the pixels; return the classes.

    Reads some masks, or all for training if there is no classes.txt. Raises a UserError if the
    masks cannot be meant so: fewer than two classes, or class numbers with a gap.
    """
    labels, path, total = train.labels, data / "classes.txt", len(train.samples)
    if not labels:
        distributed.say(f"no {path}, which saves time: reading {total} masks for the class numbers")
    dataset = MaskFiles(train, transform=tuple)

    def read(index: int) -> np.ndarray:
        return dataset.open_mask(index).read().numpy()

    counts, count = class_counts.count_pixels(read, total, masks.VOID, MOST_READ if labels else 0)
    values = np.flatnonzero(counts).tolist()
    found = [value for value in values if value != masks.VOID]
    if not labels and len(values) > 1 and (len(found) < 2 or found[-1] >= len(found)):
        names = ["background", "object"] if len(values) == 2 else ["NAME"] * len(values)
        lines = [f"{name} = {value}" for name, value in zip(names, values, strict=True)]
        raise UserError(
            f"{data}: the values of the training masks ({shorten(list(map(str, values)))}) are not "
            f"class numbers from 0 without a gap; write what they mean into {path}, one class per "
            f"line: {shorten(lines)}"
        )
    if len(found) < 2:
        reason = masks.explain_lack(labels, found, total, masks.VOID in values)
        raise UserError(f"{data}: {reason}")
    labels = labels or masks.parse([*map(str, found)], path)
    known, some = counts[: len(labels)], f"{count} of {total}" if count < total else total
    texts = [f"{p:.1f}" if p >= 0.1 or not p else f"{p:.1g}" for p in 100 * known / known.sum()]
    head = f"in % of the pixels of {some} training masks"
    class_counts.say_line(head, labels, known, texts)
    class_counts.warn(labels, known, f"none of these {count} masks")
    return labels
