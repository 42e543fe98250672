"""Datasets of files: the folders in DIR, or its lists train.csv and val.csv."""

import functools
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ddpkit import files
from ddpkit.data.format import MEAN, STD, Format, read_format
from ddpkit.data.samples import Packed
from ddpkit.errors import UserError, shorten
from ddpkit.ranks import distributed
from ddpkit.run.file_names import EPOCHS, SHOWN, STEPS
from ddpkit.vision import class_counts, lists, masks, pairing, places
from ddpkit.vision.images import LazyImage, is_array, open_image
from ddpkit.vision.names import hint_at_look, refuse_alike
from ddpkit.vision.places import EXTENSIONS, Place

# as are often beside images
NO_IMAGES = {"", ".csv", ".db", ".ini", ".json", ".txt", ".xml"}
# What systems, disks and network storage make by themselves, in small letters.
LEFTOVERS = """#recycle|#snapshot|$extend|$recycle.bin|@__thumb|@eadir|@recently-snapshot|@recycle|
    @sharebin|@tmp|@transcode|__macosx|__pycache__|desktop.ini|ehthumbs.db|found.000|lost+found|
    network trash folder|recycler|system volume information|temporary items|
    thevolumesettingsfolder|thumbs.db|~snapshot"""
LEFT_OUT = {name.strip() for name in LEFTOVERS.split("|")}
# What a folder has to which a run writes: one of these. Without a run the lock is gone.
OF_RUNS = ({".lock"}, {"args.json", "metrics.csv"})
WRITTEN_BY_RUNS = {"eval", EPOCHS, STEPS, *SHOWN}
OF_PREDICTIONS = {"masks", "overlays", "legend.png"}  # what predict.py writes
# the paths of images and their masks, or labels; then a group, if there is one
Pairs = list[tuple]
Fold = tuple[int, int]  # part N of K
Note = Callable[[UserError], None]  # what becomes of an error
COLUMNS = {False: ("file", "label"), True: ("image", "mask")}  # of lists; with masks
FILE_COLUMNS = {"file", "image", "mask"}
SEPARATOR = ";"  # of labels
REMEDY = "names may differ by one ending, the same for all, or list the pairs in DIR/train.csv"


def raise_it(error: UserError) -> None:
    """End at the first error, as training does; `check` notes all of them."""
    raise error


def walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Like os.walk, sorted folders and links to them, each once, but for hidden and system ones."""

    def refuse(error: OSError) -> NoReturn:
        # os.walk would leave out the folder
        raise files.failure(error.filename, error, "read")

    # A link to a folder above would go round for ever.
    seen: set[str] = set()
    for place in folder.resolve(), folder.absolute().parent.resolve():
        seen.update(map(str, (place / "any").parents))  # the place, and those above
    for parent, inner, names in os.walk(folder, onerror=refuse, followlinks=True):
        below = sorted(inner)
        inner.clear()  # os.walk goes on with what is in this list afterwards
        for name in below:
            real = os.path.realpath(os.path.join(parent, name))
            if real not in seen and not name.startswith(".") and not is_leftover(name):
                seen.add(real)
                inner.append(name)
        yield parent, inner, names


def is_leftover(name: str) -> bool:
    """Return whether a file or folder of that name is no data; say so."""
    kind = re.sub(r"\.\d{3}$", ".000", name.lower())  # a disk check counts: found.001
    if kind not in LEFT_OUT:
        return False
    say_skipped("systems make it", name)
    return True


@functools.cache  # one line for all folders
def say_skipped(why: str, what: str) -> None:
    distributed.print0(f"skipped, because {why}: {what}")


def walk_data(
    folder: Path, output: Path | None = None
) -> Iterator[tuple[str, list[str], list[str], bool]]:
    """Like `walk`, but for what runs and predict.py have written, and whether there is any.

    output: where predict.py writes.
    """
    for parent, inner, names in walk(folder):
        there = {*inner, *names}
        made: set[str] = set()
        if any(there >= own for own in OF_RUNS):
            # of what somebody names the rest is meant
            made = there & WRITTEN_BY_RUNS if parent == str(folder) else there
        elif there >= OF_PREDICTIONS or os.path.realpath(parent) == str(output):
            made = there & OF_PREDICTIONS
        if made:
            say_skipped("a run or predict.py writes there", parent)
        # `walk` goes on with what remains
        inner[:] = [name for name in inner if name not in made]
        yield parent, inner, [name for name in names if name not in made], bool(made)


def list_images(folder: Path, output: Path | None = None) -> list[str]:
    """Return the paths of all images below `folder`, sorted.

    output: as of `walk_data`. Raises a UserError if there are none, unless that is because runs or
    predict.py write there.
    """
    paths_of: dict[str, list[str]] = {}  # by the files' endings
    has_output = False
    for parent, _, names, is_output in walk_data(folder, output):
        has_output = has_output or is_output
        for name in names:
            if not name.startswith("."):
                ending = os.path.splitext(name)[1].lower()
                paths_of.setdefault(ending, []).append(os.path.join(parent, name))
    # arrays may be anything, such as embeddings beside the images
    read = (EXTENSIONS & paths_of.keys()) or ({".npy"} & paths_of.keys())
    if not read and not has_output:
        there = shorten(sorted(paths_of)) or "nothing"
        raise UserError(
            f"{folder}: no images in it ({there}); add some, such as .jpg or .png, or remove the "
            "folder"
        )
    for ending in sorted(paths_of.keys() - read - NO_IMAGES):
        say_skipped("their type is not read", ending)
    return sorted(path for ending in read for path in paths_of[ending])


def collect(
    inputs: Sequence[str | Path], output: Path | None = None
) -> list[tuple[str, str]]:
    """Return (path, name) of each image in files and folders; name: below it, without ending.

    output: where predict.py writes; what it has written is left out.
    """
    images = []
    output = output and output.resolve()
    for given in dict.fromkeys(map(Path, inputs)):  # each once
        # a shell's * may have named it
        is_written = given.name in OF_PREDICTIONS and given.parent.resolve() == output
        if len(inputs) > 1 and (is_written or is_leftover(given.name)):
            continue
        if os.path.isfile(given):  # False, too, of a name that is too long
            start = given.parent
            paths = [str(given)]
        else:
            start = given
            paths = list_images(given, output)
        for path in paths:
            images.append((path, os.path.splitext(os.path.relpath(path, start))[0]))
    return images


def index_by_name(
    named: Sequence[tuple[str, str]], note: Note = raise_it
) -> dict[str, str]:
    """Return {name: path} of (path, name) pairs; a UserError if two share a name."""
    path_of: dict[str, str] = {}
    for path, name in named:
        if name in path_of:
            note(
                UserError(f"{path} and {path_of[name]} have the same name; rename one")
            )
        path_of[name] = path
    return path_of


def find_list(root: Path, part: str) -> Path | None:
    """Return the list of a part in `root`, by any of its usual names, if there is one."""
    named = [root / f"{name}.csv" for name in places.PARTS[part]]
    # also a link to nowhere, which is refused when it is read
    found = [path for path in named if os.path.lexists(path)]
    if len(found) > 1:
        raise UserError(f"{found[0]} and {found[1]}: remove or rename one of them")
    if found and found[0] != named[0]:
        distributed.print0(f"no {named[0]}: {found[0]} is used for {part}")
    return found[0] if found else None


def hold_out(
    samples: Sequence[tuple], root: Path, fold: Fold | None = None
) -> list[int]:
    """Return the indices of 15 % of the samples, or of part N of K, by checksums of their paths.

    Of each class as many. Groups stay together: of each class as many of those that have no other.
    """
    labels_of: dict[str, set] = {}  # by group
    for _, label, *group in samples:
        labels_of.setdefault("".join(group), set()).add(label)
    # By class, then by group or path: the indices of what stays together.
    units: dict[int, dict[str, list[int]]] = {}
    for index, (path, label, *group) in enumerate(samples):
        unit = group[0] if group else os.path.relpath(path, root)
        is_mixed = group and len(labels_of[unit]) > 1
        kind = -1 if is_mixed or isinstance(label, str) else label
        units.setdefault(kind, {}).setdefault(unit, []).append(index)
    held = []
    begin = 0
    for _, members in sorted(units.items()):
        # as if by chance, but the same each time and everywhere
        order = sorted(members, key=lambda unit: zlib.crc32(os.fsencode(unit)))
        if fold:  # in turn, so that the folds are of one size
            number, count = fold
            taken = order[(number - 1 - begin) % count :: count]
            # classes may have fewer groups than there are folds
            if has_groups(samples):
                begin += len(order)
        else:
            taken = order[: max(len(order) > 1, round(0.15 * len(order)))]
        for unit in taken:
            held += members[unit]
    return sorted(held)


def has_groups(samples: Sequence[tuple]) -> bool:
    return bool(samples) and len(samples[0]) > 2


def split(
    samples: list, root: Path, fold: Fold | None = None, note: Note = raise_it
) -> tuple[list, list]:
    """Split samples into those for training and those that `hold_out` takes; say so."""
    # by class and path, in whichever order the list or the folders have them
    samples = sorted(samples, key=lambda s: (s[1] if isinstance(s[1], int) else 0, s))
    held = set(hold_out(samples, root, fold))
    place = root / ("val.csv" if has_lists(root) else "val")
    how = " in whole groups" if has_groups(samples) else ""
    if not 0 < len(held) < len(samples):
        note(
            UserError(
                f"{root}: {len(samples)} images for training are too few to split{how}; add more"
                f"{how and ' of each class'}, or {place}, or fewer folds"
            )
        )
        return samples, []
    why = f"--fold {fold[0]}/{fold[1]}" if fold else f"no {place}"
    distributed.print0(
        f"validation: {len(held)} of {len(samples)} images held out{how} ({why})"
    )
    if not how:
        list_of_groups = "train.csv" if has_lists(root) else "groups.csv"
        distributed.print0(
            "if images belong together (one patient, one video), name their groups in "
            f"{root / list_of_groups}"
        )
    others = [sample for n, sample in enumerate(samples) if n not in held]
    return others, [samples[n] for n in sorted(held)]


def has_lists(root: Path) -> bool:
    """Return whether the set is read from lists, not from folders."""
    return os.path.lexists(root / "train.csv")


def find_parts(
    root: Path,
    has_masks: bool,
    part: str = "val",
    fold: Fold | None = None,
    note: Note = raise_it,
) -> tuple[Pairs, Pairs | None]:
    """Return the pairs for training and for `part`, None to `split`; note: gets all errors."""
    # with folds DIR/val is left alone
    wanted = ["train"] if fold and part == "val" else ["train", part]
    parts = read_parts(root, has_masks, wanted, note)
    if part == "test" and part not in parts:
        lacking = root / ("test.csv" if has_lists(root) else "test")
        raise UserError(f"{lacking}: not found; --eval-only test needs it")
    return parts["train"], parts.get(part)


def read_parts(
    root: Path, has_masks: bool, wanted: Sequence[str], note: Note
) -> dict[str, Pairs]:
    """Return the pairs of each part of `wanted` that is there; of lists, else of folders."""
    old = root / "broken.txt"
    if old.exists():
        raise UserError(
            f"{old}: is no longer read; rename it, then python -m ddpkit check {root} "
            "--skip-broken writes lists without broken images; take out what else it names"
        )
    parts = {}
    table = root / "groups.csv"
    if not has_lists(root):
        read = match_pairs if has_masks else read_class_folders
        for part, place in places.find_places(root, has_masks, wanted).items():
            parts[part] = add_groups(read(place, note), table, note)
        return parts
    for part in wanted:
        path = find_list(root, part)
        if path:
            parts[part] = read_list(path, COLUMNS[has_masks], note)
    if table.exists() and not has_groups(parts["train"]):
        distributed.print0(
            f"{table}: not used beside lists; give them a column group instead"
        )
    return parts


def add_groups(pairs: Pairs, path: Path, note: Note) -> Pairs:
    """Return pairs with the group of each image, if there is a list of groups at `path`."""
    if not os.path.lexists(path):
        return pairs
    group_of = dict(read_list(path, ("file", "group"), note))
    lacking = [image for image, *_ in pairs if image not in group_of]
    if lacking:
        line = f"{path}: has no row for {len(lacking)} images, such as {lacking[0]}"
        note(UserError(f"{line}; add one for each"))
    return [(*pair, group_of[pair[0]]) for pair in pairs if pair[0] in group_of]


def find_leaks(root: Path, train: Pairs, others: Pairs) -> list[str]:
    """Return lines about groups that are in two parts, and files that have two labels."""
    lines = []
    groups, groups_of_others = (
        {group for _, _, *own in pairs for group in own} for pairs in (train, others)
    )
    shared = sorted(groups & groups_of_others)
    if shared:
        lines.append(
            f"{root}: {len(shared)} groups are in the training set and in another part, so that "
            f"scores count what was trained on: {shorten(shared)}; move their rows into one"
        )
    label_of: dict[str, object] = {}
    for path, label, *_ in [*train, *others]:
        if label_of.setdefault(path, label) != label:
            lines.append(f"{path}: is listed twice, with two labels; remove a row")
    return lines


def has_several(root: Path, train: Pairs) -> bool:
    """Return whether images have several labels: in lists, for the name of a folder is one."""
    return has_lists(root) and any(SEPARATOR in sample[1] for sample in train)


def class_numbers(label: int | str) -> list[int]:
    """Return the numbers of a sample's classes: one, or those in a text such as "0;2"."""
    if isinstance(label, int):
        return [label]
    return [int(number) for number in label.split(SEPARATOR) if number]


def find_labelled(
    root: Path,
    part: str = "val",
    fold: Fold | None = None,
    note: Note = raise_it,
) -> tuple[list, list, list[str]]:
    """Return the samples for training and for validation, and the classes.

    If any label in the lists has a SEPARATOR, images have several labels, or none.
    note: as of `find_parts`.
    """
    train, val = find_parts(root, False, part, fold, note)
    several = has_several(root, train)
    known = names_in(train, several)
    refuse_alike(sorted(known), root)
    # 10 comes after 9, not after 1
    are_numbers = all(name.isdecimal() for name in known)
    classes = sorted(known, key=lambda name: (int(name) if are_numbers else 0, name))
    if len(classes) < 2:
        own = f" ({classes[0]})" if classes else ""
        note(
            UserError(
                f"{root}: {len(classes)} class(es) for training{own}; at least two are needed"
            )
        )
    for unknown in sorted(names_in(val or [], several) - known):
        note(
            UserError(
                f"{root}: class {unknown} of {part} is not in the training set"
                f"{hint_at_look(unknown, classes)}"
            )
        )
    train = with_numbers(train, classes, several)
    if val is None:
        train, val = split(train, root, fold, note)
    else:
        val = with_numbers(val, classes, several)
    return train, val, classes


def names_in(samples: Pairs, several: bool) -> set[str]:
    return {name for sample in samples for name in class_names(sample[1], several)}


def class_names(label: str, several: bool) -> list[str]:
    """Return the classes in a label: one, or those in "cat; dog" if there are several."""
    return lists.labels_in(label, SEPARATOR) if several else [label]


def with_numbers(samples: Pairs, classes: Sequence[str], several: bool) -> Pairs:
    """Return the samples, by class, with its number in place of its name, or a text of several."""
    number_of = {name: number for number, name in enumerate(classes)}
    numbered = []
    for path, label, *group in samples:
        # without doubles, such as "cat; cat"; unknown ones come in `check` alone
        known = number_of.keys() & set(class_names(label, several))
        own = sorted(number_of[name] for name in known)
        if several:
            numbered.append((path, SEPARATOR.join(map(str, own)), *group))
        elif own:
            numbered.append((path, own[0], *group))
    return sorted(numbered, key=itemgetter(1))


def read_class_folders(place: Place, note: Note = raise_it) -> Pairs:
    """Return (path, class name) of all images in the class folders of a place."""
    folder = place.images
    _, names, _, _ = next(walk_data(folder))
    if place.is_flat:  # beside the folders of other parts
        names = [name for name in names if not places.is_part(name)]
    if not names:
        raise UserError(
            f"{folder}: no class folders in it; expected is {places.EXPECTED[False]}, in which no "
            "class has the name of a part, such as train"
        )
    samples: Pairs = []
    for name in names:
        try:
            if name.encode("utf-8", "ignore").decode() != name:
                raise UserError(
                    f"{folder / name}: the class name is not UTF-8; rename the folder"
                )
            paths = list_images(folder / name)
            samples += [(path, name) for path in paths]
        except UserError as error:
            note(error)
    inside = [path[len(str(folder)) + 1 :] for path, _ in samples]
    refuse_splits(inside, folder, place.is_flat, has_classes=True)
    return samples


def refuse_splits(
    names: Iterable[str],
    folder: Path,
    is_whole: bool = False,
    has_classes: bool = False,
) -> None:
    """Raise a UserError if `names`, paths in `folder`, lie in folders of several parts.

    is_whole: the folder is that of no part, but of all there is. has_classes: the outermost folders
    are classes, whose names may have any words, but for that of a part alone.
    """
    part_of: dict[str, str] = {}  # by the names of folders that name one
    for parent in {os.path.dirname(name) for name in names}:
        for depth, name in enumerate(Path(parent).parts):
            part = places.part_in_name(name)
            if part and (depth or not has_classes or places.is_part(name)):
                part_of[name] = part
    parts = {*part_of.values()}
    if len(parts) > 1 or (is_whole and parts - {"train"}):
        raise UserError(
            f"{folder}: folders of parts lie in it ({shorten(sorted(part_of))}), and all would be "
            "trained on; they have to be the outermost: DIR/train, DIR/val, DIR/test"
        )


def find_mask_pairs(
    root: Path, part: str = "val", fold: Fold | None = None, note: Note = raise_it
) -> tuple[Pairs, Pairs]:
    """Return the pairs of paths for training and for validation; note: as of `find_parts`."""
    train, val = find_parts(root, True, part, fold, note)
    if val is None:
        return split(train, root, fold, note)
    return train, val


def match_pairs(place: Place, note: Note = raise_it) -> Pairs:
    """Return (image path, mask path) of the images in a place; a line says how names differ."""
    folder = place.images
    folder_of_masks = place.masks or folder
    or_convert = f"; or, for other labels: {places.convert_command(place.root)}"
    try:
        images = collect([folder])
        masks_there = collect([folder_of_masks])
    except UserError as error:
        raise UserError(f"{error.line}{or_convert}", error.code) from None
    if folder_of_masks == folder:  # the names tell
        masks_there = [each for each in images if places.is_beside(each[0])]
        images = [each for each in images if not places.is_beside(each[0])]
    image_of = index_by_name(images, note)
    mask_of = index_by_name(masks_there, note)
    for names, parent in (image_of, folder), (mask_of, folder_of_masks):
        # DIR/images/train2 beside DIR/images/val2 would all be for training
        is_whole = not any(map(places.is_part, parent.parts[-2:]))
        refuse_splits(names, parent, is_whole)
    arrays = [path for path in mask_of.values() if is_array(path)]
    if arrays:
        raise UserError(
            f"{arrays[0]}: an array, not an image; save masks as PNG, as "
            f"{places.convert_command(place.root)} does"
        )
    mask_with, rule = pairing.match_names(image_of, mask_of)
    if rule.describe():
        distributed.print0(f"{folder_of_masks}: {rule.describe()}")
    lone_masks = sorted(mask_of.keys() - set(mask_with.values()))
    there = f", which has {mask_of[lone_masks[0]]}" if lone_masks else ""
    remedy = f"{REMEDY}{or_convert}"
    for name in sorted(image_of.keys() - mask_with.keys()):
        note(
            UserError(
                f"{image_of[name]}: no mask of that name in {folder_of_masks}{there}; {remedy}"
            )
        )
    for name in lone_masks:
        note(UserError(f"{mask_of[name]}: no image of that name in {folder}; {remedy}"))
    return [
        (image_of[image], mask_of[mask]) for image, mask in sorted(mask_with.items())
    ]


def read_list(path: Path, columns: Sequence[str], note: Note = raise_it) -> Pairs:
    """Return the values of `columns` in each row of a CSV file, and of `group`, if it has that."""
    rows = list(lists.read_rows(path))
    if not rows:
        raise UserError(f"{path}: no rows; list the samples in it, or remove the file")
    there = rows[0][1].keys()
    if not there >= {*columns}:
        raise UserError(
            f"{path}: the first line is {shorten([*there])}; it must have {','.join(columns)}: "
            f"rename the columns, or run: {places.convert_command(path.parent)}"
        )
    wanted = list(dict.fromkeys([*columns, *({"group"} & there)]))
    others = [name for name in there if name and name not in wanted]
    if others:
        distributed.print0(
            f"{path}: columns not used: {', '.join(others)} (rename one "
            "to group to keep images of a patient or a video together)"
        )
    column = lists.part_column(rows, path)
    own = places.part_in_name(path.stem)
    pairs = []
    for number, row in rows:
        line = f"{path}, line {number}"
        other = places.part_in_name(row.get(column, "")) or own
        if own and other != own:
            raise UserError(
                f"{line}: {column} is {row[column]}, but all rows of this list are for {own}; move "
                f"those of {other} into {other}.csv"
            )
        try:
            pairs.append(_read_row(line, row, wanted, path.parent))
        except UserError as error:
            note(error)
    return pairs


def _read_row(
    line: str, row: dict[str, str], columns: Sequence[str], root: Path
) -> tuple:
    """Return the values of `columns` in a row, of files their paths."""
    values = []
    for name in columns:
        value = row[name]
        if not value:
            raise UserError(f"{line}: no {name}; add it")
        lists.refuse_missing(line, name, lists.labels_in(value, SEPARATOR))
        if name in FILE_COLUMNS:
            value = os.path.join(root, value)  # one from the root stays as it is
            if not os.path.isfile(value):
                folder, file = os.path.split(value)
                there = os.listdir(folder) if os.path.isdir(folder) else ()
                raise UserError(
                    f"{line}: {value} does not exist, or is not a file; correct the line"
                    f"{hint_at_look(file, there)}"
                )
        values.append(value)
    return tuple(values)


@dataclass
class Part:
    """The samples for training, or those for validation."""

    samples: Sequence[tuple]  # begin with the path of an image
    format: Format
    labels: masks.Labels = field(default_factory=masks.unnamed)  # what the masks mean
    classes: int = 0  # without masks
    # for validation: the side of the middle, as a share of the shorter side
    crop: float = 0.875

    @property
    def several(self) -> bool:
        """Whether images have several labels, or none."""
        return isinstance(self.samples[0][1], str)


class Files(Dataset):
    """Samples that are files; transform: what `__getitem__` in dataset.py applies."""

    def __init__(self, part: Part, transform: Callable) -> None:
        self.samples = Packed(part.samples)  # which forked workers do not copy
        self.format = part.format
        self.labels = part.labels
        self.classes = part.classes
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)


class ImageFiles(Files):
    """Images with class numbers: `open` returns (image,), a LazyImage, decoded once it is read.

    label(index): the class number; of a dataset whose images have several labels or none, float32
        (classes,), 0 or 1.

        class ImageDataset(ddpkit.ImageFiles):
            def __getitem__(self, index: int) -> tuple[Tensor, int | Tensor]:
                (image,) = self.open(index)
                return self.transform(image), self.label(index)
    """

    def label(self, index: int) -> int | Tensor:
        label = self.samples[index][1]
        if isinstance(label, int):
            return label
        numbers = torch.tensor(class_numbers(label), dtype=torch.int64)
        return torch.zeros(self.classes).index_fill(0, numbers, 1)

    def open(self, index: int) -> tuple[LazyImage]:
        return (open_image(self.samples[index][0], self.format),)

    def count_labels(self, index: int) -> dict[int, int]:
        """Return how often each class occurs in a sample, for --class-weights auto and others."""
        return dict.fromkeys(class_numbers(self.samples[index][1]), 1)


class MaskFiles(Files):
    """Images with masks: `samples[index]` is a pair of paths, `open` returns (image, mask).

    The mask has class numbers, whatever values or colours the file has, and 255 where it is void.

    Raises a UserError if image and mask differ in size.

        class SegmentationDataset(ddpkit.MaskFiles):
            def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
                return self.transform(*self.open(index))
    """

    def open(self, index: int) -> tuple[LazyImage, LazyImage]:
        image_path, mask_path = self.samples[index][:2]
        image = open_image(image_path, self.format)
        mask = self.open_mask(index)
        if image.size != mask.size:
            hint = ""
            if image.size == (mask.height, mask.width):
                hint = "; if EXIF turns the image, save the mask upright, too"
            raise UserError(
                f"{mask_path}: the mask has {mask.width} x {mask.height} pixels, its image "
                f"{image.width} x {image.height}: they must be equal{hint}"
            )
        mask.grid = image.shrinks  # so that the parts of both are the same
        return image, mask

    def open_mask(self, index: int) -> LazyImage:
        path = self.samples[index][1]
        return masks.lazy_mask(path, self.labels, self.format)

    def count_labels(self, index: int) -> dict[int, int]:
        """Return the pixels of each class in a mask, for --class-weights auto and others."""
        counts = class_counts.histogram(self.open_mask(index).pixels).tolist()
        return {n: c for n, c in enumerate(counts) if c and n != masks.VOID}


def find_classes(
    data: Path | str,
    fold: Fold | None = None,
    part: str = "val",
    arch: str = "",
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
) -> tuple[Part, Part, Sequence[str]]:
    """Return the parts for training and for validation, for ImageFiles, and the class names.

    data: a folder as README.md describes it. Every rank has to call it. Says how many images each
    class has. Raises a UserError for any other folder.
    fold: (N, K): validate on part N of K of the training set, and train on the others.
    part: "test" takes DIR/test or DIR/test.csv in place of the part for validation.
    mean, std: of each channel, by which images are normalised, unless data.json has its own.
    arch: a network timm/NAME has its own, too, and `crop`.

        train, val, classes = ddpkit.find_classes(Path("data/demo"))
        train_set = ImageDataset(train, train_transform)
    """
    data = Path(data)
    samples, val_samples, classes = find_labelled(data, part, fold)
    train, val = _make_parts(data, samples, val_samples, mean, std, arch)
    labels = []
    for each in train, val:
        each.classes = len(classes)
        labels.append([n for sample in each.samples for n in class_numbers(sample[1])])
    class_counts.say_images(classes, labels[0], labels[1], part)
    return train, val, classes


def find_masks(
    data: Path | str,
    fold: Fold | None = None,
    part: str = "val",
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
) -> tuple[Part, Part, Sequence[str]]:
    """Return the parts for training and for validation, for MaskFiles, and the class names.

    As `find_classes`; says which share of the pixels each class has. Without DIR/classes.txt it
    reads all training masks for the class numbers. Raises a UserError if they cannot be such.

        train, val, classes = ddpkit.find_masks(Path("data/demo"))
        train_set = SegmentationDataset(train, train_transform)
    """
    data = Path(data)
    pairs, val_pairs = find_mask_pairs(data, part, fold)
    labels = masks.read_classes(data / "classes.txt")
    train, val = _make_parts(data, pairs, val_pairs, mean, std)
    train.labels = labels
    # rank 0 reads masks, and all others get what it has found
    labels = distributed.await_rank_zero(survey, data, train)
    train.labels = labels
    val.labels = labels
    return train, val, labels


def _make_parts(
    data: Path,
    train: Pairs,
    val: Pairs,
    mean: Sequence[float],
    std: Sequence[float],
    arch: str = "",
) -> tuple[Part, Part]:
    """Return the two parts of `data`, with the format of their images."""
    for line in find_leaks(data, train, val):
        distributed.print0(line)
    format = read_format(data)
    crop = Part.crop
    if arch.startswith("timm/"):
        import timm

        own = timm.get_pretrained_cfg(arch.removeprefix("timm/"))
        if own:  # what timm says of the network
            crop = own.crop_pct
            # data.json knows better what its images need
            if format.channels in (None, 3) and not (format.mean or format.std):
                mean = own.mean
                std = own.std
    format = format.or_else(mean, std)
    # What is wrong with these is an error on all ranks, before they wait for another.
    _ = format.statistics
    open_image(train[0][0], format)
    return Part(train, format, crop=crop), Part(val, format, crop=crop)


def survey(data: Path, train: Part) -> masks.Labels:
    """Print the classes' shares of the pixels in some masks; return the classes."""
    labels = train.labels
    path = data / "classes.txt"
    total = len(train.samples)
    if not labels:
        distributed.print0(
            f"no {path}, which saves time: reading {total} masks for the class numbers"
        )
    dataset = MaskFiles(train, transform=tuple)
    counts, count = class_counts.count_pixels(
        lambda index: dataset.open_mask(index).pixels, total, has_to_read_all=not labels
    )
    values = np.flatnonzero(counts).tolist()
    if count == total:  # of some of them it would not be known
        fault = masks.explain_values(values, labels)
        if fault:
            raise UserError(f"{data}: {fault}")
    if not labels:
        names = [str(value) for value in values if value != masks.VOID]
        meant = labels.meant
        labels = masks.parse(names, path)
        labels.meant = meant  # what all masks have agreed on
    known = counts[: len(labels)]
    texts = [f"{share:.3g}" for share in 100 * known / max(known.sum(), 1)]
    title = f"in % of the pixels of {count} of {total} training masks"
    class_counts.say_line(title, labels, texts)
    class_counts.warn(labels, known, "pixels", f" in these {count} masks")
    return labels
