"""Masks as arrays in .npy and .mat files, and masks in black and white that are JPEGs.

    images/a.jpg   masks/a.npy      (height, width), whole numbers
    images/a.jpg   masks/a.mat      MATLAB's: the array may lie in structures
    images/a.jpg   masks/a.jpg      black and white

These are habits, not formats: classes.txt beside them says what values mean. Of JPEGs two classes
can be told apart, as compression changes values.
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from ddpkit import files
from ddpkit.convert.labels import LabelledSet, LeftOut, Size, part_of
from ddpkit.convert.mask_files import (
    Pair,
    Pairs,
    add_pairs,
    class_line,
    folders_named,
    join,
    match_masks,
    own_lines,
    same_size,
)
from ddpkit.convert.tree import ENDINGS, Tree, folder_of, key_of, stem_of
from ddpkit.data.format import DEFAULT_FORMAT
from ddpkit.errors import UserError, reason_of, shorten
from ddpkit.vision import images, masks

ARRAYS = {".npy", ".mat"}
JPEGS = {".jpg", ".jpeg"}
# of which a .mat file with several arrays has the mask in the first one there is
MASK_FIELDS = ("seg", "mask", "label", "gt", "truth")
GREY = (64, 192)  # between them a pixel is neither black nor white
MOST_GREY = 0.05  # of the pixels, as JPEG leaves at edges


def find_arrays(tree: Tree) -> list[str]:
    """Return the arrays that have the name of an image."""
    pictures = ENDINGS - ARRAYS
    stems = {stem_of(name) for name in tree.in_folder("", pictures)}
    return [name for name in tree.in_folder("", ARRAYS) if stem_of(name) in stems]


def read_arrays(tree: Tree, names: Sequence[str]) -> LabelledSet:
    labelled = LabelledSet([])
    lines = own_lines(tree)
    if not lines:
        values = sorted(
            {value for name in names for value in values_in(tree.path(name))}
        )
        lines = [class_line(f"value {value}", value) for value in values]
        if len(lines) < 2:
            raise UserError(
                f"{tree.root}: the arrays hold {shorten([str(n) for n in values])}, not two "
                "classes or more"
            )
        labelled.notes.append(
            f"the classes are the values {', '.join(map(str, values))}; write lines NAME = VALUE "
            f"and void = VALUE into {tree.root / 'classes.txt'} to name them, or to leave some out"
        )
    labels = masks.parse(lines, tree.root / "classes.txt")
    if labels.kind == 3:
        raise UserError(
            f"{tree.root / 'classes.txt'}: arrays have values, no colours: write NAME = VALUE"
        )
    labelled.names = list(labels)
    return add_pairs(labelled, [array_pairs(tree, names)], partial(draw_values, labels))


def array_pairs(tree: Tree, names: Sequence[str]) -> Pairs:
    used = set()
    for name in names:
        image = picture_of(tree, name)
        if image:
            used.add(image)
            part = part_of(folder_of(name)) or tree.part_of_image(image)
            yield Pair(image, tree.path(name), part)
    for folder in sorted({image.parent for image in used}):
        for other in tree.in_folder(tree.below(folder), ENDINGS - ARRAYS):
            if tree.path(other) not in used:
                yield LeftOut("images without a mask", other)


def picture_of(tree: Tree, name: str) -> Path | None:
    """Return the image of an array: of that name, and no array itself."""
    stem = stem_of(name)
    named = tree.images_by_name.get(stem, [])
    pictures = [each for each in named if not each.endswith(".npy")]
    part = part_of(folder_of(name))
    if part:
        pictures = [x for x in pictures if part_of(folder_of(x)) in ("", part)]
    # drawings of the masks beside them, as LabelMe makes
    if len(pictures) > 1:
        pictures = [x for x in pictures if "/JPEGImages/" in f"/{x}"] or pictures
    if len(pictures) > 1:
        raise UserError(
            f"{tree.path(name)}: {stem} may be {pictures[0]} or {pictures[1]}; remove or rename "
            "one of them"
        )
    return tree.path(pictures[0]) if pictures else None


def values_in(path: Path) -> list[int]:
    """Return what a mask holds, but for what is void by itself: 255, and numbers below 0."""
    values = np.unique(load_values(path)).tolist()
    return [value for value in values if 0 <= value != masks.VOID]


def draw_values(labels: masks.Labels, path: Path, size: Size | None) -> np.ndarray:
    values = same_size(load_values(path), size, path)
    mask = np.full(values.shape, masks.VOID, np.uint8)
    for value in np.unique(values).tolist():
        if value in labels.values:
            mask[values == value] = labels.values[value]
        elif value >= 0:
            count = int((values == value).sum())
            raise UserError(
                f"{path}: value {value} in {count} pixels is no class; write into classes.txt of "
                f"the source: NAME = {value} or void = {value}"
            )
    return mask


def load_values(path: Path) -> np.ndarray:
    """Return the integers of a mask, (H, W)."""
    try:
        if path.suffix.lower() == ".npy":
            with files.open_file(path) as file:
                arrays = [("", np.load(file, allow_pickle=False))]
        else:
            arrays = list(arrays_in(load_mat(path)))
    except UserError:
        raise
    except Exception as error:  # scipy raises many kinds
        raise UserError(f"{path}: cannot be read ({reason_of(error)})") from None
    grids = [(name, each) for name, each in arrays if is_grid(each)]
    named = [
        each for name, each in grids if any(n in name.lower() for n in MASK_FIELDS)
    ]
    for values in [*named, *(each for _, each in grids)]:
        whole = np.nan_to_num(values.astype(np.float64), nan=masks.VOID)
        if (whole == whole.round()).all():
            return whole.astype(np.int64)
    raise UserError(
        f"{path}: no array of height x width whole numbers in it; save the mask so"
    )


def is_grid(values: np.ndarray) -> bool:
    return values.ndim == 2 and min(values.shape) > 1 and values.dtype.kind in "buif"


def load_mat(path: Path) -> dict:
    try:
        from scipy.io import loadmat, whosmat
    except ImportError:
        raise UserError(
            f"{path}: reading it needs one more package: python -m pip install scipy"
        ) from None
    try:
        with files.open_file(path) as file:
            # compressed, a few bytes may stand for any number of pixels
            for _, shape, _ in whosmat(file):
                DEFAULT_FORMAT.check_size(str(path), (math.prod(shape), 1))
            return loadmat(file)
    except NotImplementedError:  # a file of version 7.3
        raise UserError(
            f"{path}: of MATLAB 7.3; save it anew with save(..., '-v7')"
        ) from None


def arrays_in(content: object, name: str = "") -> Sequence[tuple[str, np.ndarray]]:
    """Return the arrays in what a .mat file holds, each with the name of its field."""
    if isinstance(content, dict):
        inner = [(key, each) for key, each in content.items() if key[:2] != "__"]
    elif isinstance(content, np.void) and content.dtype.names:
        inner = [(key, content[key]) for key in content.dtype.names]
    elif isinstance(content, np.ndarray) and (
        content.dtype.names or content.dtype == object
    ):
        inner = [(name, each) for each in content.reshape(-1)]
    elif isinstance(content, np.ndarray):
        return [(name, content)]
    else:
        return []
    return [array for key, each in inner for array in arrays_in(each, key)]


# Masks that are JPEGs


def find_jpeg_masks(tree: Tree) -> list[str]:
    """Return the folders of masks that are all JPEGs with the name of an image."""
    folders = []
    for folder in folders_named(tree, "masks", "labels", "gt", "mask", "label"):
        own = tree.in_folder(folder)
        of_images = image_folder(tree, folder_of(folder))
        there = tree.in_folder(of_images) if of_images else []
        keys = {key_of(name, of_images) for name in there}
        named = [name for name in own if key_of(name, folder) in keys]
        if named and named == tree.in_folder(folder, JPEGS):
            folders.append(folder)
    return folders


def image_folder(tree: Tree, parent: str) -> str:
    for name in ("images", "image", "imgs", "img"):
        if join(parent, name) in tree.folders:
            return join(parent, name)
    return ""


def read_jpeg_masks(tree: Tree, folders: Sequence[str]) -> LabelledSet:
    labelled = LabelledSet([], ["background", "foreground"])
    pairs = (jpeg_pairs(tree, folder) for folder in folders)
    return add_pairs(labelled, pairs, draw_two_tones)


def jpeg_pairs(tree: Tree, folder: str) -> Pairs:
    of_images = image_folder(tree, folder_of(folder))
    image_of = tree.keyed(of_images, tree.in_folder(of_images))
    key_of_mask = {name: key_of(name, folder) for name in tree.in_folder(folder)}
    return match_masks(tree, image_of, key_of_mask, part_of(folder))


def draw_two_tones(path: Path, size: Size | None) -> np.ndarray:
    values = np.array(images.read_stored(str(path)).convert("L"))
    low, high = GREY
    share = ((values > low) & (values < high)).mean()
    if share > MOST_GREY:
        raise UserError(
            f"{path}: {share:.0%} of the pixels are neither black nor white, so that JPEG has "
            "mixed up its classes; get the masks as PNG"
        )
    mask = (values >= sum(GREY) // 2).astype(np.uint8)
    return same_size(mask, size, path)
