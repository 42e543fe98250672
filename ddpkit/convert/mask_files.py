"""Formats whose masks are image files: VOC, CVAT, Cityscapes, CamVid, Roboflow, one per class."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from ddpkit.convert.labels import (
    VOID_NAMES,
    LabelledSet,
    ObjectClasses,
    Sample,
    Size,
    Skipped,
    clean_name,
    part_of,
    plain_name,
)
from ddpkit.convert.shapes import Area, Drawing, Shape
from ddpkit.convert.tree import ENDINGS, Tree, key_of, stem_of
from ddpkit.errors import UserError
from ddpkit.vision import images, masks

Pair = tuple[Path, Path, str]  # image, mask, part

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


def class_line(name: object, key: object) -> str:
    """Return the line of classes.txt for a class, or for what is void by its name."""
    text = clean_name(name)
    return f"{'void' if plain_name(text) in VOID_NAMES else text} = {key}"


def own_lines(tree: Tree) -> list[str]:
    """Return the lines of the classes.txt that lies in the folder, as training takes them."""
    return tree.lines("classes.txt") if "classes.txt" in tree.files else []


def read_pairs(
    lines: Sequence[str], where: Path, pairs: Iterable[Pair], skipped: Skipped
) -> LabelledSet:
    """Return the set of these masks. lines: as in classes.txt. where: what they come from."""
    labels = masks.parse(lines, where)
    found = LabelledSet([], list(labels), skipped=skipped)
    if labels.colors is not None:
        found.colors = [(int(r), int(g), int(b)) for r, g, b in labels.colors]
    for image, mask, part in pairs:
        draw = reading(mask, labels)
        found.samples.append(Sample(image, part, draw))
    return found


def reading(path: Path, labels: masks.Labels) -> Callable[[Size | None], np.ndarray]:
    """Return what Sample.draw is for a mask in a file."""

    def draw_file(size: Size | None) -> np.ndarray:
        return same_size(masks.read_mask(str(path), labels), size, path)

    return draw_file


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


def count_left(
    images_there: Iterable[str], pairs: Iterable[Pair], tree: Tree
) -> Skipped:
    """Return which of the images have no mask."""
    skipped = Skipped()
    used = {image for image, _, _ in pairs}
    for name in images_there:
        if tree.path(name) not in used:
            skipped.leave_out("images without a mask", name)
    return skipped


# Pascal VOC, and CVAT's "Segmentation mask 1.1"


def find_voc_folders(tree: Tree) -> list[str]:
    """Return the folders that have JPEGImages and masks."""
    found = []
    for folder in folders_named(tree, "JPEGImages"):
        parent = folder.rpartition("/")[0]
        if any(join(parent, each) in tree.folders for each in VOC_MASKS):
            found.append(parent)
    return found


def find_voc(tree: Tree) -> list[str]:
    parents = find_voc_folders(tree)
    return [each for each in parents if join(each, "labelmap.txt") not in tree.files]


def find_cvat_masks(tree: Tree) -> list[str]:
    """Return the lists of colours that lie beside masks."""
    found = []
    for name in tree.files:
        parent = name.rpartition("/")[0]
        is_list = name.rpartition("/")[2] == "labelmap.txt"
        if is_list and join(parent, VOC_MASKS[0]) in tree.folders:
            found.append(name)
    return found


def read_voc(tree: Tree) -> LabelledSet:
    parents = find_voc(tree)
    if not parents:
        raise UserError(f"{tree.root}: no JPEGImages beside SegmentationClass in it")
    lines = own_lines(tree)
    names = join(parents[0], "class_names.txt")  # LabelMe writes it
    if not lines and names in tree.files:
        lines = [class_line(each, n) for n, each in enumerate(tree.lines(names))]
    if not lines:
        listed = VOC_NAMES.split()
        lines = [class_line(each, n) for n, each in enumerate(listed)]
        first = next(iter(tree.in_folder(voc_mask_folder(tree, parents[0]))), "")
        if first and images.read_stored(str(tree.path(first))).mode == "RGB":
            colors = [voc_color(n) for n in (*range(len(listed)), masks.VOID)]
            texts = ["{} {} {}".format(*color) for color in colors]
            named = zip([*listed, "void"], texts, strict=True)
            lines = [class_line(name, text) for name, text in named]
    return read_voc_folders(tree, parents, lines, names)


def voc_color(number: int) -> tuple[int, int, int]:
    """Return VOC's colour of a class: its bits go to red, green and blue in turn, highest first."""
    channels = [0, 0, 0]
    for bit in range(8):
        channels[bit % 3] |= (number >> bit & 1) << (7 - bit // 3)
    red, green, blue = channels
    return red, green, blue


def voc_mask_folder(tree: Tree, parent: str) -> str:
    places = [join(parent, each) for each in VOC_MASKS]
    return next(place for place in places if place in tree.folders)


def read_cvat_masks(tree: Tree) -> LabelledSet:
    maps = find_cvat_masks(tree)
    if not maps:
        raise UserError(f"{tree.root}: no labelmap.txt beside SegmentationClass in it")
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
    parents = [name.rpartition("/")[0] for name in maps]
    return read_voc_folders(tree, parents, lines, maps[0])


def read_voc_folders(
    tree: Tree, parents: Sequence[str], lines: Sequence[str], where: str
) -> LabelledSet:
    pairs: list[Pair] = []
    skipped = Skipped()
    for parent in parents:
        lists = voc_lists(tree, parent, skipped)
        place = voc_mask_folder(tree, parent)
        start = len(place) + 1
        mask_of = {
            name[start:].rpartition(".")[0]: name for name in tree.in_folder(place)
        }
        if not lists:
            lists = [("train", sorted(mask_of))]
        for part, listed in lists:
            for name in listed:
                image = find_voc_image(tree, parent, name)
                if name not in mask_of:
                    skipped.leave_out("images of the lists without a mask", name)
                elif image is None:
                    skipped.leave_out("masks without an image", mask_of[name])
                else:
                    pairs.append((image, tree.path(mask_of[name]), part))
        if len(lists) == 1:
            there = tree.in_folder(join(parent, "JPEGImages"))
            for reason, names in count_left(there, pairs, tree).names.items():
                for name in names:
                    skipped.leave_out(reason, name)
    return read_pairs(lines, tree.path(where), pairs, skipped)


def find_voc_image(tree: Tree, parent: str, name: str) -> Path | None:
    for ending in sorted(ENDINGS):
        for folder in ("JPEGImages", "."):
            for written in (ending, ending.upper()):
                path = tree.path(parent) / folder / f"{name}{written}"
                if path.is_file():
                    return path
    return None


def voc_lists(tree: Tree, parent: str, skipped: Skipped) -> list[tuple[str, list[str]]]:
    """Return each part with the names that its list in ImageSets has.

    Beside train, val and test there may be trainval, of which what neither train nor val has is the
    other one. Further lists, as of single classes, are counted.
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
    found: dict[str, list[str]] = {}
    both = names_in.pop("trainval", [])
    for stem in [stem for stem in names_in if stem.isalpha() and part_of(stem)]:
        found.setdefault(part_of(stem), []).extend(names_in.pop(stem))
    used = {name for names in found.values() for name in names}
    rest = [name for name in both if name not in used]
    if rest:
        found.setdefault("val" if "train" in found else "train", []).extend(rest)
        used.update(rest)
    parts = set(found)
    for stem, names in names_in.items():
        # such as train_aug, or CVAT's default
        part = part_of(stem) or "train"
        if part in parts:
            place = f"{folder}/{stem}.txt"
            skipped.leave_out("lists besides train, val, test and trainval", place)
        else:
            own = [name for name in names if name not in used]
            found.setdefault(part, []).extend(own)
    return sorted((part, names) for part, names in found.items() if names)


# Cityscapes


def find_cityscapes(tree: Tree) -> list[str]:
    return [name for name in tree.files if CITY_MASK.fullmatch(name)]


def read_cityscapes(tree: Tree) -> LabelledSet:
    names = find_cityscapes(tree)
    if not names:
        raise UserError(f"{tree.root}: no file in it ends with _gtFine_labelIds.png")
    kinds = {name.rpartition("_")[2] for name in names}
    kind = "labelIds.png" if "labelIds.png" in kinds else "labelTrainIds.png"
    if kind == "labelIds.png":
        numbers = [int(number) for number, *_ in CITY_CLASSES]
    else:
        numbers = list(range(len(CITY_CLASSES)))
    lines = []
    for number, (_, name, *_) in zip(numbers, CITY_CLASSES, strict=True):
        lines.append(class_line(name, number))
    others = set(range(CITY_IDS)) - set(numbers)
    lines += [f"void = {number}" for number in (*sorted(others), masks.VOID)]
    skipped = Skipped()
    pairs = []
    for name in names:
        match = CITY_MASK.fullmatch(name)
        if not match or not name.endswith(f"_{kind}"):
            continue
        part = part_of(name.rpartition("/")[0]) or "train"
        stem = match[1].rpartition("/")[2]
        image = tree.find_image(f"{stem}_leftImg8bit", name, part)
        image = image or tree.find_image(stem, name, part)
        if image:
            pairs.append((image, tree.path(name), part))
        else:
            skipped.leave_out("masks without an image", name)
    found = read_pairs(lines, tree.root, pairs, skipped)
    found.colors = [(int(r), int(g), int(b)) for _, _, r, g, b in CITY_CLASSES]
    return found


# CamVid: train beside trainannot, or codes.txt with images and labels


def find_camvid(tree: Tree) -> list[str]:
    found = []
    for folder in tree.folders:
        of_images = folder.removesuffix("annot")
        if (
            folder.endswith("annot")
            and of_images in tree.folders
            and part_of(of_images)
        ):
            found.append(folder)
    if not found and {"codes.txt"} <= set(tree.files) and "labels" in tree.folders:
        found = ["labels"]
    return found


def read_camvid(tree: Tree) -> LabelledSet:
    places = find_camvid(tree)
    if not places:
        raise UserError(
            f"{tree.root}: no trainannot beside train in it, nor codes.txt beside labels"
        )
    names = CAMVID_NAMES.split()
    if "codes.txt" in tree.files:
        names = tree.lines("codes.txt")
    lines = own_lines(tree) or [class_line(each, n) for n, each in enumerate(names)]
    val = set()
    if "valid.txt" in tree.files:
        val = {stem_of(line) for line in tree.lines("valid.txt")}
    skipped = Skipped()
    pairs: list[Pair] = []
    there: list[str] = []
    for place in places:
        of_images = place.removesuffix("annot") if place != "labels" else "images"
        image_of = tree.keyed(of_images, tree.in_folder(of_images))
        there += image_of.values()
        for name in tree.in_folder(place):
            key = key_of(name, place)
            if key not in image_of:
                key = key.removesuffix("_P").removesuffix("_L")
            is_val = key in val or stem_of(key) in val
            part = "val" if is_val else part_of(of_images) or "train"
            if key in image_of:
                pairs.append((tree.path(image_of[key]), tree.path(name), part))
            else:
                skipped.leave_out("masks without an image", name)
    skipped.names |= count_left(there, pairs, tree).names
    return read_pairs(lines, tree.root / "classes.txt", pairs, skipped)


# Roboflow's "png-mask-semantic": x.jpg, x_mask.png and _classes.csv


def find_roboflow(tree: Tree) -> list[str]:
    return tree.tables("_classes.csv", "Pixel Value")


def read_roboflow(tree: Tree) -> LabelledSet:
    names = find_roboflow(tree)
    if not names:
        raise UserError(f"{tree.root}: no _classes.csv in it has a column Pixel Value")
    value_of: dict[str, str] = {}
    for name in names:
        for row in tree.rows(name):
            value_of[row.get("Pixel Value", "")] = row.get("Class", "")
    lines = [class_line(label, value) for value, label in value_of.items()]
    skipped = Skipped()
    pairs: list[Pair] = []
    there: list[str] = []
    for name in names:
        folder = name.rpartition("/")[0]
        own = tree.in_folder(folder)
        pictures = [each for each in own if not is_mask_name(each)]
        image_of = tree.keyed(folder, pictures)
        there += image_of.values()
        for mask in filter(is_mask_name, own):
            key = key_of(mask, folder).removesuffix("_mask")
            if key in image_of:
                part = part_of(folder) or "train"
                pairs.append((tree.path(image_of[key]), tree.path(mask), part))
            else:
                skipped.leave_out("masks without an image", mask)
    skipped.names |= count_left(there, pairs, tree).names
    return read_pairs(lines, tree.path(names[0]), pairs, skipped)


def is_mask_name(name: str) -> bool:
    return stem_of(name).endswith("_mask")


# images, and masks with a folder per class


def find_class_masks(tree: Tree) -> list[tuple[str, list[str]]]:
    """Return each folder of images and masks, with the names of the classes."""
    found = []
    for folder in folders_named(tree, "masks"):
        parent = folder.rpartition("/")[0]
        images_there = join(parent, "images")
        start = len(folder) + 1
        inner = {each[start:].partition("/")[0] for each in tree.in_folder(folder)}
        classes = sorted(each for each in inner if join(folder, each) in tree.folders)
        # else the masks lie in folders as the images do
        shared = any(join(images_there, each) in tree.folders for each in classes)
        are_all = len(classes) == len(inner) and not any(map(part_of, classes))
        if classes and are_all and not shared and images_there in tree.folders:
            found.append((parent, classes))
    return found


def read_class_masks(tree: Tree) -> LabelledSet:
    places = find_class_masks(tree)
    if not places:
        raise UserError(f"{tree.root}: no masks/CLASS beside images in it")
    classes = ObjectClasses(sorted({name for _, names in places for name in names}))
    found = LabelledSet([], classes.names)
    for parent, names in places:
        of_images = join(parent, "images")
        image_of = tree.keyed(of_images, tree.in_folder(of_images))
        own: dict[str, list[tuple[int, str]]] = {key: [] for key in image_of}
        for name in names:
            of_class = join(parent, f"masks/{name}")
            for mask in tree.in_folder(of_class):
                key = key_of(mask, of_class)
                if key in own:
                    own[key].append((classes.number(name, mask), mask))
                else:
                    found.skipped.leave_out("masks without an image", mask)
        for key, image in image_of.items():
            if not own[key]:
                found.skipped.leave_out("images without a mask", image)
                continue

            def class_shapes(size: Size, own: list = own[key]) -> list[Shape]:
                return [
                    Shape(number, mask, area=Area(0, 0, read_inside(tree.path(mask), size)))
                    for number, mask in own
                ]  # fmt: skip

            draw = Drawing(class_shapes, found.skipped, image)
            part = part_of(parent) or "train"
            found.samples.append(Sample(tree.path(image), part, draw))
    return found
