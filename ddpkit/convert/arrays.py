"""Masks as arrays in .npy and .mat files, and masks in black and white that are JPEGs."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ddpkit.convert.labels import LabelledSet, Sample, Size, part_of
from ddpkit.convert.mask_files import (
    class_line,
    folders_named,
    join,
    own_lines,
    same_size,
)
from ddpkit.convert.tree import ENDINGS, Tree, folder_of, key_of, stem_of
from ddpkit.errors import UserError, reason_of, shorten
from ddpkit.vision import images, masks

ARRAYS = {".npy", ".mat"}
JPEGS = {".jpg", ".jpeg"}
# of which a .mat file with several arrays has the mask in the first one there is
NAMES = ("seg", "mask", "label", "gt", "truth")
GREY = (64, 192)  # between them a pixel is neither black nor white
MOST_GREY = 0.05  # of the pixels, as JPEG leaves at edges


def find_arrays(tree: Tree) -> list[str]:
    """Return the arrays that have the name of an image."""
    pictures = ENDINGS - ARRAYS
    stems = {stem_of(name) for name in tree.in_folder("", pictures)}
    found = tree.in_folder("", ARRAYS)
    return [name for name in found if stem_of(name) in stems]


def read_arrays(tree: Tree) -> LabelledSet:
    names = find_arrays(tree)
    if not names:
        raise UserError(f"{tree.root}: no .mat or .npy file in it is named as an image")
    found = LabelledSet([])
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
        found.notes.append(
            f"the classes are the values {', '.join(map(str, values))}; write lines NAME = VALUE "
            f"and void = VALUE into {tree.root / 'classes.txt'} to name them, or to leave some out"
        )
    labels = masks.parse(lines, tree.root / "classes.txt")
    if labels.kind == 3:
        raise UserError(
            f"{tree.root / 'classes.txt'}: arrays have values, no colours: write NAME = VALUE"
        )
    found.names = list(labels)
    used = set()
    for name in names:
        path = picture_of(tree, name)
        if path is None:
            continue
        used.add(path)
        part = part_of(folder_of(name)) or part_of(folder_of(tree.below(path)))
        part = part or "train"
        draw = from_values(tree.path(name), labels)
        found.samples.append(Sample(path, part, draw))
    for folder in sorted({path.parent for path in used}):
        for image in tree.in_folder(tree.below(folder), ENDINGS - ARRAYS):
            if tree.path(image) not in used:
                found.skipped.leave_out("images without a mask", image)
    return found


def picture_of(tree: Tree, name: str) -> Path | None:
    """Return the image of an array: of that name, and no array itself."""
    stem = stem_of(name)
    found = tree.images_by_name.get(stem, [])
    found = [each for each in found if not each.endswith(".npy")]
    part = part_of(folder_of(name))
    if part:
        others = {part_of(folder_of(each)) for each in found} - {"", part}
        found = [each for each in found if part_of(folder_of(each)) not in others]
    # drawings of the masks beside them, as LabelMe makes
    if len(found) > 1:
        found = [each for each in found if "/JPEGImages/" in f"/{each}"] or found
    if len(found) > 1:
        raise UserError(
            f"{tree.path(name)}: {stem} may be {found[0]} or {found[1]}; remove or rename one of "
            "them"
        )
    return tree.path(found[0]) if found else None


def values_in(path: Path) -> list[int]:
    """Return what a mask holds, but for what is void by itself: 255, and numbers below 0."""
    values = np.unique(load_values(path)).tolist()
    return [value for value in values if 0 <= value != masks.VOID]


def from_values(
    path: Path, labels: masks.Labels
) -> Callable[[Size | None], np.ndarray]:
    def draw_values(size: Size | None) -> np.ndarray:
        values = same_size(load_values(path), size, path)
        found = np.full(values.shape, masks.VOID, np.uint8)
        for value in np.unique(values).tolist():
            if value in labels.values:
                found[values == value] = labels.values[value]
            elif value >= 0:
                count = int((values == value).sum())
                raise UserError(
                    f"{path}: value {value} in {count} pixels is no class; write into "
                    f"classes.txt of the source: NAME = {value} or void = {value}"
                )
        return found

    return draw_values


def load_values(path: Path) -> np.ndarray:
    """Return the integers of a mask, (H, W)."""
    try:
        if path.suffix.lower() == ".npy":
            found = [("", np.load(path, allow_pickle=False))]
        else:
            found = list(arrays_in(load_mat(path)))
    except UserError:
        raise
    except Exception as error:  # scipy raises many kinds
        raise UserError(f"{path}: cannot be read ({reason_of(error)})") from None
    grids = [(name, each) for name, each in found if is_grid(each)]
    named = [each for name, each in grids if any(n in name.lower() for n in NAMES)]
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
        from scipy.io import loadmat
    except ImportError:
        raise UserError(
            f"{path}: reading it needs one more package: python -m pip install scipy"
        ) from None
    try:
        return loadmat(path)
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
    return [found for key, each in inner for found in arrays_in(each, key)]


# Masks that are JPEGs


def find_jpeg_masks(tree: Tree) -> list[str]:
    """Return the folders of masks that are all JPEGs with the name of an image."""
    found = []
    for folder in folders_named(tree, "masks", "labels", "gt", "mask", "label"):
        own = tree.in_folder(folder)
        parent = folder.rpartition("/")[0]
        of_images = image_folder(tree, parent)
        there = tree.in_folder(of_images) if of_images else []
        keys = {key_of(name, of_images) for name in there}
        named = [name for name in own if key_of(name, folder) in keys]
        if named and named == tree.in_folder(folder, JPEGS):
            found.append(folder)
    return found


def image_folder(tree: Tree, parent: str) -> str:
    for name in ("images", "image", "imgs", "img"):
        if join(parent, name) in tree.folders:
            return join(parent, name)
    return ""


def read_jpeg_masks(tree: Tree) -> LabelledSet:
    places = find_jpeg_masks(tree)
    if not places:
        raise UserError(f"{tree.root}: no masks of JPEG beside images in it")
    found = LabelledSet([], ["background", "foreground"])
    for folder in places:
        of_images = image_folder(tree, folder.rpartition("/")[0])
        image_of = tree.keyed(of_images, tree.in_folder(of_images))
        for name in tree.in_folder(folder):
            image = image_of.pop(key_of(name, folder))
            part = part_of(folder) or "train"
            draw = two_tones(tree.path(name))
            found.samples.append(Sample(tree.path(image), part, draw))
        for image in image_of.values():
            found.skipped.leave_out("images without a mask", image)
    return found


def two_tones(path: Path) -> Callable[[Size | None], np.ndarray]:
    def draw_tones(size: Size | None) -> np.ndarray:
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

    return draw_tones
