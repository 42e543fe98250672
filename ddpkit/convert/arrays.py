"""Masks as arrays in .npy and .mat files.

    images/a.jpg   masks/a.npy      (height, width), whole numbers
    images/a.jpg   masks/a.mat      MATLAB's: the array may lie in structures

These are habits, not formats: classes.txt beside them says what values mean.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ddpkit import files
from ddpkit.convert.labels import LabelledSet, part_of
from ddpkit.convert.mask_files import (
    Pair,
    Pairs,
    read_pairs,
)
from ddpkit.convert.tree import ENDINGS, Tree, folder_of, stem_of
from ddpkit.data.format import DEFAULT_FORMAT
from ddpkit.errors import UserError, reason_of, shorten
from ddpkit.vision import images, masks

ARRAYS = {".npy", ".mat"}
# of which a .mat file with several arrays has the mask in the first one there is
MASK_FIELD = re.compile("seg|mask|label|gt|truth", re.IGNORECASE)


def find_arrays(tree: Tree) -> list[str]:
    """Return the arrays that have the name of an image."""
    stems = {stem_of(name) for name in tree.in_folder("", ENDINGS - ARRAYS)}
    return [name for name in tree.in_folder("", ARRAYS) if stem_of(name) in stems]


def read_arrays(tree: Tree, names: Sequence[str]) -> LabelledSet:
    in_folder: dict[str, list[str]] = {}
    for name in names:
        in_folder.setdefault(folder_of(name), []).append(name)
    values: list[int] = []  # of all arrays, if any folder has no list of classes

    def name_values(*_: object) -> list[str]:
        if not values:
            each = (load_values(str(tree.path(name))) for name in names)
            values.extend(sorted(set().union(*map(values_in, each))))
        if len(values) < 2:
            raise UserError(
                f"{tree.root}: the arrays hold {shorten([str(n) for n in values])}, not two "
                "classes or more"
            )
        return [f"value {value} = {value}" for value in values]

    pairs = {folder: array_pairs(tree, own) for folder, own in in_folder.items()}
    labelled = read_pairs(
        tree, pairs, lambda _, folder: pairs[folder], name_values, read_values
    )
    tree.count_unnamed(labelled, names)
    if values:
        labelled.notes.append(
            f"the classes are the values {', '.join(map(str, values))}; write lines NAME = VALUE "
            f"and void = VALUE into {tree.root / 'classes.txt'} to name them, or to leave some out"
        )
    return labelled


def array_pairs(tree: Tree, names: Sequence[str]) -> Pairs:
    for name in names:
        image = picture_of(tree, name)
        if image:
            part = part_of(folder_of(name)) or tree.part_of_image(image)
            yield Pair(image, tree.path(name), part)


def picture_of(tree: Tree, name: str) -> Path | None:
    """Return the image of an array: of that name, and no array itself."""
    stem = stem_of(name)
    named = tree.named_as(stem)
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


def values_in(values: np.ndarray) -> list[int]:
    """Return what a mask holds, but for what is void by itself: 255, and numbers below 0."""
    return [value for value in np.unique(values).tolist() if 0 <= value != masks.VOID]


def read_values(path: str, labels: masks.Labels) -> np.ndarray:
    """Return the class numbers in an array, uint8 (H, W); numbers below 0 are void."""
    values = load_values(path)
    is_meant = (values >= 0) | np.isin(values, list(labels.values))
    mask = np.full(values.shape, masks.VOID, np.uint8)
    mask[is_meant] = masks.Legend(path, labels).translate(values[is_meant])
    return mask


def load_values(path: Path | str) -> np.ndarray:
    """Return the integers of a mask, (H, W)."""
    try:
        if images.is_array(str(path)):
            with files.open_file(path) as file:
                arrays = [("", np.load(file, allow_pickle=False))]
        else:
            arrays = list(arrays_in(load_mat(path)))
    except UserError:
        raise
    except Exception as error:  # scipy raises many kinds
        raise UserError(f"{path}: cannot be read ({reason_of(error)})") from None
    arrays.sort(key=lambda each: not MASK_FIELD.search(each[0]))
    for _, values in arrays:
        is_grid = values.ndim == 2 and min(values.shape) > 1
        if not is_grid or values.dtype.kind not in "buif":
            continue
        # within structures
        height, width = values.shape
        DEFAULT_FORMAT.check_size(str(path), (width, height))
        whole = np.nan_to_num(values.astype(np.float64), nan=masks.VOID)
        if (whole == whole.round()).all():
            return whole.astype(np.int64)
    raise UserError(
        f"{path}: no array (height, width) of integers in it; save the mask as one"
    )


def load_mat(path: Path | str) -> dict:
    try:
        from scipy.io import loadmat, whosmat
    except ImportError:
        raise UserError(
            f"{path}: reading it needs one more package: python -m pip install scipy"
        ) from None
    try:
        with files.open_file(path) as file:
            # compressed, a few bytes may stand for any number of pixels
            pixels = sum(math.prod(shape) for _, shape, _ in whosmat(file))
            DEFAULT_FORMAT.check_size(str(path), (pixels, 1))
            # structures as dicts
            return loadmat(file, simplify_cells=True)
    except NotImplementedError:  # a file of version 7.3
        raise UserError(
            f"{path}: of MATLAB 7.3; save it again with save(..., '-v7')"
        ) from None


def arrays_in(content: object, name: str = "") -> Sequence[tuple[str, np.ndarray]]:
    """Return the arrays in what a .mat file holds, each with the name of its field."""
    if isinstance(content, dict):
        inner = [(key, each) for key, each in content.items() if key[:2] != "__"]
    elif isinstance(content, np.ndarray) and content.dtype != object:
        return [(name, content)]
    elif isinstance(content, list | np.ndarray):
        inner = [(name, each) for each in content]
    else:
        return []
    return [array for key, each in inner for array in arrays_in(each, key)]
