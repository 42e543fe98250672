"""Where the parts of a data set lie: DIR/train/images or DIR/images/train, and by other names.

A line names each folder that is taken for another name than README.md has.
"""

import os
import re
from collections.abc import Collection, Sequence
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
# of masks that lie beside their images in one folder
BESIDE = re.compile(
    r".*[\W_](masks?|labels?|labelids|gt|annot|seg|groundtruth|manual1)",
    re.IGNORECASE,
)
EXPECTED = {
    False: "DIR/train/CLASS/*.jpg, or DIR/CLASS/*.jpg",
    True: "DIR/train/images with DIR/train/masks, or DIR/images/train with DIR/masks/train",
}
OTHER_TASK = {
    False: "images with masks, which are for a segmentation project",
    True: "if these are classes, they are for a classification project",
}


class Place(NamedTuple):
    """The folders of a part: of its images or classes, and of its masks, which may be the same.

    is_flat: there are class folders beside those of other parts.
    """

    images: Path
    masks: Path | None = None
    is_flat: bool = False


def is_part(name: str) -> bool:
    return any(name.lower() in names for names in PARTS.values())


def part_in_name(name: str) -> str:
    """Return the part that a word in the name of a folder says, as in seg_train, or nothing."""
    words = {word.lower() for word in WORD.findall(name)}
    for part, names in PARTS.items():
        if not words.isdisjoint(names):
            return part
    return ""


def find_places(
    root: Path, has_masks: bool, wanted: Collection[str]
) -> dict[str, Place]:
    """Return the place of each part of `wanted` that is there; "train" always is.

    Without DIR/train it is DIR itself. A UserError says what `root` has if that is nothing known.
    """
    found = _find_places(root, has_masks, wanted)
    for part, place in found.items():
        folder = root / part
        usual = Place(folder / IMAGES[0], folder / MASKS[0])
        if place.masks and place != usual:
            distributed.print0(
                f"{part}: images in {place.images}, masks in {place.masks}"
            )
        elif not place.masks and place.images != folder:
            distributed.print0(f"{part}: images in {place.images}")
    return found


def _find_places(
    root: Path, has_masks: bool, wanted: Collection[str]
) -> dict[str, Place]:
    found: dict[str, Place] = {}
    for part in wanted:
        folder = choose_folder(root, PARTS[part])
        if has_masks:
            folder = folder or find_sibling(root, part, IMAGES)
        if folder:
            found[part] = place_of_part(root, folder, part, has_masks)
    if "train" in found:
        return found
    if has_masks:
        place = find_kinds(root)
        if not place:
            refuse_unknown(root, has_masks)
        parts = places_in_kinds(place, wanted)
        return {**found, **(parts or {"train": place})}
    own_names = explain_parts(root)
    if own_names:
        raise UserError(
            f"{root}: {own_names}; if they are classes, move all into {root / 'train'}"
        )
    inner = [each for each in inner_folders(root) if not is_part(each.name)]
    if len(inner) < 2 or any(is_kind(each) for each in inner) or has_kinds(root):
        refuse_unknown(root, has_masks)
    return {"train": Place(root, is_flat=True), **found}


def is_kind(folder: Path) -> bool:
    """Return whether it is named as README.md names folders of images and masks, and no class."""
    return folder.name.lower() in (IMAGES[0], MASKS[0])


def place_of_part(root: Path, folder: Path, part: str, has_masks: bool) -> Place:
    """Return where the images of a part are that lies in `folder`, and their masks."""
    if not has_masks:
        if has_kinds(folder):
            refuse_unknown(folder, has_masks)
        inner = inner_folders(folder)
        # DIR/train/images/CLASS
        if len(inner) == 1 and is_kind(inner[0]) and inner_folders(inner[0]):
            return Place(inner[0])
        return Place(folder)
    place = find_kinds(folder)
    if place:
        return place
    images = images_in(folder)
    beside = find_sibling(root, part, MASKS)
    if beside and any_image(folder):
        return Place(folder, beside)
    if any(is_beside(name) for name in images):
        return Place(folder, folder)
    refuse_unknown(folder, has_masks)


def places_in_kinds(place: Place, wanted: Collection[str]) -> dict[str, Place]:
    """Return the places of parts that lie in the folders of the kinds, as images/train."""
    assert place.masks
    found: dict[str, Place] = {}
    for part in wanted:
        images = choose_folder(place.images, PARTS[part])
        masks = choose_folder(place.masks, PARTS[part])
        if images and masks:
            found[part] = Place(images, masks)
        elif images or masks:
            lack = place.masks if images else place.images
            raise UserError(
                f"{images or masks}: no folder of that name in {lack}; add it, or move this one "
                "elsewhere"
            )
    stray = [
        file
        for folder in (place.images, place.masks)
        for file in images_in(folder)
        if found
    ]
    if stray:
        raise UserError(
            f"{place.images}: folders of parts, and {shorten(stray)} beside them; move these "
            "into one of the folders"
        )
    if found and "train" not in found:
        raise UserError(
            f"{place.images}: no folder train; the images for training have to lie in it"
        )
    return found


def find_kinds(folder: Path) -> Place | None:
    """Return the folders of images and of masks in `folder`, if both are there."""
    images = choose_folder(folder, IMAGES)
    masks = choose_folder(folder, MASKS)
    return Place(images, masks) if images and masks else None


def has_kinds(folder: Path) -> bool:
    """Return whether there are folders of images and of masks, whichever is meant."""
    names = {each.name.lower() for each in inner_folders(folder)}
    return not names.isdisjoint(IMAGES) and not names.isdisjoint(MASKS)


def find_sibling(root: Path, part: str, kinds: Sequence[str]) -> Path | None:
    """Return a folder such as train_images or trainannot in `root`."""
    names = set()
    for folder in inner_folders(root):
        name = folder.name.lower()
        for start in PARTS[part]:
            rest = re.sub(r"^[\W_]*", "", name.removeprefix(start))
            if name.startswith(start) and rest in kinds:
                names.add(name)
    return choose_folder(root, names)


def choose_folder(folder: Path, names: Sequence[str] | set[str]) -> Path | None:
    """Return the folder in `folder` with one of the names; a UserError if several may be meant."""
    found = [each for each in inner_folders(folder) if each.name.lower() in names]
    if len(found) > 1:
        # without images, as VOC's Annotations, it is not meant
        found = [each for each in found if any_image(each)] or found[:1]
    if len(found) > 1:
        listed = " and ".join(each.name for each in found)
        raise UserError(
            f"{folder}: {listed} may each be meant; rename or move all but one of them"
        )
    return found[0] if found else None


def inner_folders(folder: Path) -> list[Path]:
    """Return the folders in `folder` that are not hidden, sorted."""
    if not folder.is_dir():
        if folder.exists():
            raise UserError(
                f"{folder}: a file, not a folder: name the one that it is in, or have python -m "
                "ddpkit convert read it"
            )
        raise UserError(f"{folder}: no such folder")
    inner = sorted(each for each in folder.iterdir() if each.is_dir())
    return [each for each in inner if not each.name.startswith(".")]


def images_in(folder: Path) -> list[str]:
    """Return the names of the image files in `folder` itself, sorted."""
    names = sorted(os.listdir(folder))
    return [name for name in names if is_image(name)]


def looks_like_class(folder: Path) -> bool:
    """Return whether there are images below `folder`, and nowhere folders of images and masks."""
    below = [Path(at) for at, _, _ in os.walk(folder)]
    return any(map(images_in, below)) and not any(map(has_kinds, below))


def any_image(folder: Path) -> bool:
    """Return whether there is an image somewhere below `folder`."""
    return any(is_image(name) for _, _, names in os.walk(folder) for name in names)


def is_image(name: str) -> bool:
    ending = os.path.splitext(name)[1].lower()
    return ending in EXTENSIONS and not name.startswith(".")


def is_beside(name: str) -> bool:
    """Return whether an image's name, or path, says that it is a mask, as NAME_mask does."""
    return bool(BESIDE.fullmatch(os.path.splitext(os.path.basename(name))[0]))


def explain_parts(root: Path) -> str:
    """Return which folders in `root` are to be named DIR/train and DIR/test, as seg_test is.

    Nothing unless their names have the words of two parts.
    """
    named: dict[str, Path] = {}
    for folder in inner_folders(root):
        part = part_in_name(folder.name)
        if part:
            named.setdefault(part, folder)
    if len(named) < 2:
        return ""
    names = " and ".join(sorted(folder.name for folder in named.values()))
    moves = []
    for part, folder in named.items():
        inner = inner_folders(folder)
        # the archive's folder in a folder of that name
        while len(inner) == 1 and part_in_name(inner[0].name) == part:
            folder = inner[0]
            inner = inner_folders(folder)
        if folder != root / part:
            moves.append(f"{folder.relative_to(root)} to {root / part}")
    return f"{names} are named as parts of the set; move {', and '.join(moves)}"


def find_whole(root: Path, has_masks: bool, depth: int = 1) -> Path | None:
    """Return the only folder below `root` that looks as if it were meant as DIR."""
    found = []
    for folder in inner_folders(root):
        if part_in_name(folder.name):
            continue
        try:
            inner: Path | None = folder
            if not looks_whole(folder, has_masks):
                inner = find_whole(folder, has_masks, depth - 1) if depth else None
        except OSError:  # of another user
            continue
        if inner:
            found.append(inner)
    return found[0] if len(found) == 1 else None


def looks_whole(folder: Path, has_masks: bool) -> bool:
    """Return whether a folder has one for training, or those of images and masks, or of classes."""
    if choose_folder(folder, PARTS["train"]):
        return True
    if has_masks:
        return bool(find_kinds(folder))
    return sum(bool(images_in(each)) for each in inner_folders(folder)) > 1


def refuse_unknown(folder: Path, has_masks: bool) -> NoReturn:
    """Raise a UserError that says what `folder` has, and what is expected."""
    inner = inner_folders(folder)
    there = [each.name for each in inner]
    there += [name for name in sorted(os.listdir(folder)) if name not in there]
    hint = ""
    own_names = explain_parts(folder)
    whole = find_whole(folder, has_masks)
    if not has_masks and has_kinds(folder):
        hint = f": {OTHER_TASK[has_masks]}"
    elif own_names:
        hint = f": {own_names}"
    elif whole:
        hint = f": name {whole} instead"
    elif has_masks and len(inner) > 1 and all(map(looks_like_class, inner)):
        hint = f": {OTHER_TASK[has_masks]}"
    raise UserError(
        f"{folder}: unknown layout: it has {shorten(there) or 'nothing'}{hint}; expected "
        f"{EXPECTED[has_masks]}; python -m ddpkit convert takes other formats"
    )
