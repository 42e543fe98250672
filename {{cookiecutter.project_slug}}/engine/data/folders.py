"""What a data set consists of: the folders in DIR, or its lists train.csv and val.csv."""

import csv
import os
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from engine.data import listing
from engine.errors import UserError, shorten
from engine.ranks import distributed

Labelled = list[tuple[str, int]]  # the paths of images and their class numbers
Pairs = list[tuple[str, str]]  # the paths of images and their masks


def find_classes(root: Path) -> tuple[Labelled, Labelled, list[str]]:
    """Return the samples for training and for validation, and the classes.

    They are those of DIR/train.csv, if there is such a list, or else of the class folders. Without
    a validation set, 15 % of each class is held out, always the same images.
    """
    has_lists = (root / "train.csv").is_file()
    train_of, val_of = read_class_lists(root) if has_lists else read_class_folders(root)
    train: Labelled = []
    val: Labelled = []
    for label, (name, train_paths) in enumerate(train_of.items()):
        if val_of is None:
            train_paths, val_paths = listing.split(train_paths, root)
        else:
            val_paths = val_of.get(name, [])
        train += [(path, label) for path in train_paths]
        val += [(path, label) for path in val_paths]
    if val_of is None:
        name = "val.csv" if has_lists else "val"
        whole = [each for each, paths in train_of.items() if len({*paths}) == 1]
        listing.say_split(root, len(val), len(train) + len(val), name, whole)
    return train, val, list(train_of)


def read_class_folders(root: Path) -> tuple[dict[str, list[str]], dict[str, list[str]] | None]:
    """Return the images of each class for training, and for validation; None without DIR/val.

    Without DIR/train, the folders in DIR are the classes.
    """
    train_folder, val_folder = find_train(root), listing.val_folder(root)
    classes, skipped = class_folders(train_folder), Counter[str]()
    if len(classes) < 2:
        raise UserError(
            f"{train_folder}: {len(classes)} class folder(s) found; at least two are needed"
        )
    val_classes = class_folders(val_folder) if val_folder else {}
    if val_folder and (unmatched := sorted(val_classes.keys() ^ classes.keys())):
        where = val_folder if unmatched[0] in classes else train_folder
        raise UserError(
            f"{where}: class folder {unmatched[0]} is missing; train and val need the same"
        )
    train_of, val_of = (
        {name: listing.list_images(folder, skipped) for name, folder in folders.items()}
        for folders in (classes, val_classes)
    )
    listing.say_skipped(skipped)
    return train_of, val_of if val_folder else None


def read_class_lists(root: Path) -> tuple[dict[str, list[str]], dict[str, list[str]] | None]:
    """Return what `read_class_folders` does, from DIR/train.csv and, if it exists, DIR/val.csv.

    Their columns are `file`, a path below DIR or absolute, and `label`, the name of a class.
    """
    found = []
    for rows in read_lists(root, ("file", "label"), 1):
        paths_of: dict[str, list[str]] = {}
        for file, name in rows or ():
            paths_of.setdefault(name, []).append(file)
        found.append({name: paths_of[name] for name in sort_names(paths_of)})
    train_of, val_of = found
    if len(train_of) < 2:
        raise UserError(f"{root / 'train.csv'}: one class only; at least two are needed")
    if unknown := sorted(val_of.keys() - train_of.keys()):
        raise UserError(f"{root / 'val.csv'}: label {unknown[0]} is not in train.csv")
    return train_of, val_of or None


def find_train(root: Path) -> Path:
    """Return DIR/train, or DIR if it has none and all its folders look like those of classes."""
    train = root / "train"
    if train.is_dir() or not root.is_dir():
        return train
    names = next(listing.walk(root))[1]
    others = {"train", "training", "test", "testing", "images", "masks", *listing.VAL_NAMES}
    no_class = [
        str(root / name)
        for name in names
        if name.lower() in others or not any(map(listing.is_image, os.listdir(root / name)))
    ]
    if no_class or len(names) < 2:
        found = f"{shorten(no_class)} cannot be classes" if no_class else "no class folders"
        raise UserError(
            f"{train}: no such folder; expected {train}/<class>/* or {root}/<class>/*, but {found}"
        )
    distributed.say(f"no {train}: the class folders in {root} are used")
    return root


def class_folders(folder: Path) -> dict[str, Path]:
    """Return the folder of each class in `folder`: the position is the class number.

    They are sorted by name, by number if all names are numbers.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; README.md describes the expected folders")
    _, names, files = next(listing.walk(folder))
    if unreadable := [name for name in names if name.encode("utf-8", "ignore").decode() != name]:
        raise UserError(f"{folder / unreadable[0]}: the class name is not UTF-8; rename the folder")
    if loose := sum(map(listing.is_image, files)):
        distributed.say(f"{folder}: {loose} image(s) beside the class folders are not used")
    folders = listing.by_name([(str(folder / name), listing.composed(name)) for name in names])
    return {name: Path(folders[name]) for name in sort_names(folders)}


def sort_names(names: Collection[str]) -> list[str]:
    """Return `names` sorted, by number if all of them are numbers."""
    are_numbers = all(name.isdecimal() for name in names)
    return sorted(names, key=lambda name: (int(name) if are_numbers else 0, name))


def find_pairs(root: Path) -> tuple[Pairs, Pairs]:
    """Return the samples for training and for validation.

    They are those of DIR/train.csv, if there is such a list, with the columns `image` and `mask`,
    paths below DIR or absolute, or else of the folders. Without a validation set, 15 % of the pairs
    are held out, always the same.
    """
    has_lists = (root / "train.csv").is_file()
    columns = ("image", "mask")
    train, val = read_lists(root, columns, 2) if has_lists else read_pair_folders(root)
    assert train is not None
    if val is None:
        train, val = split_pairs(train, root)
        total = len(train) + len(val)
        listing.say_split(root, len(val), total, "val.csv" if has_lists else "val")
    return train, val


def split_pairs(pairs: Pairs, root: Path) -> tuple[Pairs, Pairs]:
    """Return the pairs for training and those that are held out for validation."""
    mask_of = dict(pairs)
    train, val = listing.split(list(mask_of), root)
    return [(path, mask_of[path]) for path in train], [(path, mask_of[path]) for path in val]


def read_pair_folders(root: Path) -> tuple[Pairs, Pairs | None]:
    """Return the pairs for training and for validation; None without DIR/val.

    Without DIR/train, DIR/images and DIR/masks are taken.
    """
    train_folder, val_folder = root / "train", listing.val_folder(root)
    if not train_folder.is_dir() and (root / "images").is_dir() and (root / "masks").is_dir():
        distributed.say(f"no {train_folder}: {root / 'images'} and {root / 'masks'} are used")
        train_folder = root
    skipped = Counter[str]()
    train = match_pairs(train_folder, skipped)
    val = match_pairs(val_folder, skipped) if val_folder else None
    listing.say_skipped(skipped)
    return train, val


def match_pairs(folder: Path, skipped: Counter[str]) -> Pairs:
    """Return (image path, mask path) for each name in `folder`/images and `folder`/masks.

    skipped: files whose type is not read are added to it, by their endings.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; README.md describes the expected folders")

    def paths(kind: str) -> dict[str, str]:
        found = listing.collect([folder / kind], skipped)
        return listing.by_name([(path, listing.composed(name)) for path, name in found])

    image_of, mask_of = paths("images"), paths("masks")
    if unmatched := sorted(image_of.keys() ^ mask_of.keys()):
        path = image_of.get(unmatched[0]) or mask_of[unmatched[0]]
        lack = "masks" if unmatched[0] in image_of else "images"
        other = next(iter((mask_of if lack == "masks" else image_of).values()))
        raise UserError(
            f"{path}: nothing of that name in {folder / lack}, which has {Path(other).name}; names "
            "must be equal but for their endings"
        )
    return [(image_of[name], mask_of[name]) for name in sorted(image_of)]


def read_lists(root: Path, columns: Sequence[str], files: int) -> list[list[tuple] | None]:
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
                values = [(row[name] or "").strip() for name in columns]
                if "" in values:
                    empty = columns[values.index("")]
                    raise UserError(f"{path}, line {table.line_num}: no {empty}; add it")
                for number in range(files):
                    values[number] = os.path.join(path.parent, values[number])
                    if not os.path.isfile(values[number]):
                        line = f"{path}, line {table.line_num}"
                        raise UserError(
                            f"{line}: {values[number]} does not exist; correct the line"
                        )
                found.append(tuple(values))
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8; save it as UTF-8") from None
    except csv.Error as error:
        raise UserError(f"{path}: cannot be read ({error}); save it as CSV") from None
    if not found:
        raise UserError(f"{path}: no rows; list the samples in it, or remove the file")
    return found
