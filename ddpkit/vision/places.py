"""Where the parts of a dataset lie: DIR/train/images or DIR/images/train, and by other names.

A line names each folder that is taken for another name than README.md has.
"""

import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, NoReturn

from ddpkit.errors import UserError, shorten
from ddpkit.ranks import distributed

# What is read as an image; .heic and .heif with pillow-heif.
EXTENSIONS = {
    *(".bmp", ".gif", ".jp2", ".j2k", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm"),
    *(".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp", ".avif", ".heic", ".heif"),
}
# In small letters. The first of each goes without a line.
PARTS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
# a word in a name such as seg_train, training_set, "Test Images" or TrainSet
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
IMAGES = ("images", "image", "img", "imgs", "jpegimages", "leftimg8bit")
MASKS = (
    *("masks", "mask", "labels", "label", "annotations", "annotation", "annot"),
    *("gt", "groundtruth", "ground_truth", "segmentationclass", "gtfine"),
    *("1st_manual", "2nd_manual"),  # of DRIVE, whose "mask" is where the eye is
)
PART_OF = {name: part for part, names in PARTS.items() for name in names}
KIND_OF = {**dict.fromkeys(IMAGES, "images"), **dict.fromkeys(MASKS, "masks")}
# a part, a kind, or both
FOLDER = re.compile(rf"(?=[^\W_])({'|'.join(PART_OF)})?[\W_]*({'|'.join(KIND_OF)})?")
# of masks that lie beside their images in one folder
BESIDE = re.compile(
    r".*[\W_](masks?|labels?|labelids|gt|annot|seg|groundtruth|manual1)",
    re.IGNORECASE,
)
EXPECTED = {
    False: "DIR/train/CLASS/*.jpg, or DIR/CLASS/*.jpg",
    True: "DIR/train/images with DIR/train/masks, or DIR/images/train with DIR/masks/train",
}
TASKS = {False: "classification", True: "segmentation"}


class Place(NamedTuple):
    """The folders of a part: of its images or classes, and of its masks, which may be the same.

    is_flat: there are class folders beside those of other parts. root: of the whole set.
    """

    images: Path
    masks: Path | None = None
    is_flat: bool = False
    root: Path = Path("DIR")


class Role(NamedTuple):
    """What the name of a folder says: train, val or test, and images or masks; or nothing."""

    part: str = ""
    kind: str = ""


Roles = dict[Role, list[Path]]  # the folders that have each


def is_part(name: str) -> bool:
    return name.lower() in PART_OF


def part_in_name(name: str) -> str:
    """Return the part that a word in the name of a folder says, as in seg_train, or nothing."""
    words = {word.lower() for word in WORD.findall(name)}
    return next((part for word, part in PART_OF.items() if word in words), "")


def part_of(path: str) -> str:
    """Return the part that the last folder or file of a path that names one says, or nothing."""
    parts = map(part_in_name, reversed(re.split(r"[\\/]", path)))
    return next(filter(None, parts), "")


def role_of(*names: str) -> Role:
    """Return what the names of a folder, and of one in it, say together; nothing if one does not.

    Such as train, JPEGImages, train_images or trainannot; and train, images or images, train.
    """
    matches = [FOLDER.fullmatch(name.lower()) for name in names]
    parts = [PART_OF[each[1]] for each in matches if each and each[1]]
    kinds = [KIND_OF[each[2]] for each in matches if each and each[2]]
    if None in matches or len(parts) > 1 or len(kinds) > 1:
        return Role()
    return Role("".join(parts), "".join(kinds))


def find_roles(root: Path) -> Roles:
    """Return the folders in `root`, and those in them, by what their names say."""
    roles: Roles = {}
    for outer in inner_folders(root):
        role = role_of(outer.name)
        if role == Role():
            continue
        roles.setdefault(role, []).append(outer)
        for inner in inner_folders(outer):
            roles.setdefault(role_of(outer.name, inner.name), []).append(inner)
    return roles


def choose_folder(root: Path, roles: Roles, part: str, kind: str = "") -> Path | None:
    """Return the folder in `root` of a role; a UserError if several may be meant."""
    named = roles.get(Role(part, kind), [])
    # without images, as VOC's Annotations, another one is meant
    filled = [each for each in named if len(named) > 1 and any_image(each)]
    if len(filled) > 1:
        listed = " and ".join(str(each.relative_to(root)) for each in filled)
        raise UserError(
            f"{root}: {listed} are ambiguous; rename or move all but one of them"
        )
    return next(iter(filled or named), None)


def find_places(root: Path, has_masks: bool, wanted: Iterable[str]) -> dict[str, Place]:
    """Return the place of each part of `wanted` that is there; "train" always is.

    Without DIR/train it is DIR itself. A UserError says what `root` has if that is nothing known.
    """
    find = find_masks_of if has_masks else find_classes_of
    roles = find_roles(root)
    place_of: dict[str, Place] = {}
    for part in wanted:
        place = find(root, roles, part)
        if place:
            place_of[part] = place
    whole = None if "train" in place_of else find(root, roles, "")
    if whole:
        place_of["train"] = whole
    if "train" not in place_of:
        refuse_unknown(root, root, has_masks)
    for part, place in place_of.items():
        folder = root / part
        usual = (
            Place(folder / IMAGES[0], folder / MASKS[0]) if has_masks else Place(folder)
        )
        where = f"{part}: images in {place.images}"
        if place.masks:
            where += f", masks in {place.masks}"
        if place[:2] != usual[:2]:
            distributed.print0(where)
    return {part: place._replace(root=root) for part, place in place_of.items()}


def find_masks_of(root: Path, roles: Roles, part: str) -> Place | None:
    """Return where images and masks of a part are, or of none, if they are there."""
    images = choose_folder(root, roles, part, "images")
    masks = choose_folder(root, roles, part, "masks")
    if images and masks:
        return Place(images, masks)
    folder = choose_folder(root, roles, part) if part else None
    # DIR/train with DIR/trainannot
    if folder and masks and folder != masks.parent and any_image(folder):
        return Place(folder, masks)
    alone = folder or images
    if alone and any(map(is_beside, filter(is_image, os.listdir(alone)))):
        return Place(alone, alone)
    if folder:
        refuse_unknown(root, folder, has_masks=True)
    lone = images or masks
    if part and lone and any_image(lone):
        lacking = "masks" if images else "images"
        raise UserError(
            f"{lone}: the folder with its {lacking} is missing; add it, or move this one elsewhere"
        )
    return None


def find_classes_of(root: Path, roles: Roles, part: str) -> Place | None:
    """Return where the class folders of a part are, or of none, if they are there."""
    folder = choose_folder(root, roles, part) if part else root
    if folder:
        kinds = {role_of(each.name) for each in inner_folders(folder)}
        if kinds >= {Role("", "images"), Role("", "masks")}:
            refuse_unknown(root, folder, has_masks=False)
    if part:
        return Place(folder) if folder else None
    names = [each.name for each in inner_folders(root)]
    classes = [name for name in names if not is_part(name)]
    named = list(filter(part_in_name, classes))
    if named:
        raise UserError(
            f"{root}: apparent splits of the dataset: {shorten(named)}; move their class folders "
            f"to {root / 'train'}, {root / 'val'} and {root / 'test'}; if they are classes, move "
            f"all classes into {root / 'train'}"
        )
    if len(classes) < 2 or {"images", "masks"} & {*map(str.lower, classes)}:
        return None
    return Place(root, is_flat=True)


def inner_folders(folder: Path) -> list[Path]:
    """Return the folders in `folder` that are not hidden, sorted."""
    if not folder.exists():
        where = "" if folder.is_absolute() else f" in {Path.cwd()}"
        raise UserError(f"{folder}: no such folder{where}")
    if not folder.is_dir():
        raise UserError(
            f"{folder}: is a file; give its folder, or, for labels: {convert_command(folder)}"
        )
    return sorted(
        each
        for each in folder.iterdir()
        if each.is_dir() and not each.name.startswith(".")
    )


def any_image(folder: Path) -> bool:
    """Return whether there is an image somewhere below `folder`."""
    return any(is_image(name) for _, _, names in os.walk(folder) for name in names)


def is_image(name: str) -> bool:
    ending = os.path.splitext(name)[1].lower()
    return ending in EXTENSIONS and not name.startswith(".")


def is_beside(name: str) -> bool:
    """Return whether an image's name, or path, says that it is a mask, as NAME_mask does."""
    return bool(BESIDE.fullmatch(os.path.splitext(os.path.basename(name))[0]))


def refuse_unknown(root: Path, folder: Path, has_masks: bool) -> NoReturn:
    """Raise a UserError that says what `folder`, in `root`, has, and what is expected."""
    inner = [each.name for each in inner_folders(folder)]
    there = inner + sorted({*os.listdir(folder)} - {*inner})
    raise UserError(
        f"{folder}: unknown layout: it has {shorten(there) or 'nothing'}; {TASKS[has_masks]} "
        f"expects {EXPECTED[has_masks]}; or, for other labels: {convert_command(root)}"
    )


def convert_command(source: Path) -> str:
    """Return what to type, so that labels of another program become a set in this layout."""
    out = f"{os.path.abspath(source)}-converted"
    return f"python -m ddpkit convert {shlex.quote(str(source))} {shlex.quote(out)}"
