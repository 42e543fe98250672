"""YOLO's outlines: data.yaml, and a text file per image.

    train: ../train/images          0 0.1 0.1 0.5 0.1 0.5 0.5     (labels/a.txt of images/a.jpg:
    val: ../valid/images            1 0.2 0.3 0.4 0.3 0.4 0.6      CLASS X Y X Y X Y ..., where
    names: [cat, dog]                                              1 is the width or height)

Described at docs.ultralytics.com, "Instance segmentation datasets". A line of five numbers is a
box, which has no outline.
"""

import re
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from ddpkit import files
from ddpkit.convert.labels import LabelledSet, LeftOut, ObjectClasses, Size, part_of
from ddpkit.convert.objects import Entries, MarkedImage, draw_objects, not_there
from ddpkit.convert.shapes import Shape, Shapes, to_points
from ddpkit.convert.tree import Json, Tree, ending_of, slashes, stem_of
from ddpkit.errors import UserError

NUMBER = r"-?(\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?"
# The first line of a label file: of a box, or of an outline
FIRST = re.compile(rf"\s*({NUMBER}[ \t]+){{4,}}{NUMBER}[ \t\r]*(\n|$)", re.IGNORECASE)
PART_KEYS = ("train", "val", "valid", "test")
# In a YAML file: bytes, of which 2**20 take seconds; brackets, of more in each other hours.
MOST_OF_YAML = 1 << 21
MOST_BRACKETS = 2000


def find_yolo(tree: Tree) -> list[str]:
    """Return the YAML files that name classes and a part."""
    names = []
    for name in tree.with_ending(".yaml", ".yml"):
        content = read_yaml(tree, name)
        has_classes = isinstance(content, dict) and {"names", "nc"} & content.keys()
        if has_classes and any(content.get(key) for key in PART_KEYS):
            names.append(name)
    return names or find_class_lists(tree)


def find_class_lists(tree: Tree) -> list[str]:
    """Return the classes.txt of exports without YAML, if an image has outlines or boxes."""
    lists = tree.files_named("classes.txt")
    for image in tree.in_folder("") if lists else ():
        labels = label_file(tree, image)
        if labels and FIRST.match(tree.start_of(labels)):
            return lists
    return []


def read_yaml(tree: Tree, name: str) -> Json:
    try:
        import yaml
    except ImportError:
        raise UserError(
            f"{tree.path(name)}: reading it needs one more package: python -m pip install pyyaml"
        ) from None

    def read_content(content: bytes) -> Json:
        if content.count(b"[") + content.count(b"{") > MOST_BRACKETS:
            raise ValueError("too many brackets")
        return yaml.safe_load(content)

    path = tree.path(name)
    content = files.parse(path, read_content, "YAML", most=MOST_OF_YAML)
    files.check_size(path, content)  # references to references may stand for gigabytes
    return content


def read_yolo(
    tree: Tree, names: Sequence[str], are_outlines: bool = False
) -> LabelledSet:
    """Return the set. are_outlines: also if all look as oriented boxes (OBB)."""
    name = names[0]
    content = (
        read_list(tree, names) if ending_of(name) == ".txt" else read_yaml(tree, name)
    )
    if "kpt_shape" in content:
        raise UserError(
            f"{tree.path(name)}: key points (kpt_shape), which have no inside; segmentation needs "
            "outlines: export the project's segments"
        )
    given = content.get("names") or range(min(int(content["nc"]), 256))
    if isinstance(given, str):
        raise UserError(f"{tree.path(name)}: names is a text; write names: [{given}]")
    numbered = given.items() if isinstance(given, dict) else enumerate(given)
    class_of = {int(number): text for number, text in numbered}
    classes = ObjectClasses(text for _, text in sorted(class_of.items()))
    label_of = {n: classes.number(text, name) for n, text in class_of.items()}
    entries = marked_images(tree, names, content, label_of, are_outlines)
    return draw_objects(tree, classes, [entries])


def read_list(tree: Tree, names: Sequence[str]) -> Json:
    """Return as of a YAML file what lists of classes say, which have to be the same."""
    classes = tree.lines(names[0])
    for other in names:
        if tree.lines(other) != classes:
            raise UserError(
                f"{tree.path(other)}: has other classes than {names[0]}; convert the folder of "
                "each by itself"
            )
    return {"names": classes}


def marked_images(
    tree: Tree,
    names: Sequence[str],
    content: Json,
    label_of: dict[int, int],
    are_outlines: bool,
) -> Entries:
    used = set()
    for each in images_in_parts(tree, names[0], content):
        if isinstance(each, LeftOut):
            yield each
            continue
        image, part = each
        labels = label_file(tree, image)
        if labels is None:
            # one without objects has an empty file
            yield LeftOut("images without a label file", image)
            continue
        used.add(labels)
        shapes = partial(yolo_shapes, tree, labels, label_of)
        yield MarkedImage(tree.path(image), part, str(tree.path(labels)), shapes)
    counts = (len(line.split()) for own in used for line in tree.lines(own))
    if not are_outlines and next(counts, 0) == 9 and all(n == 9 for n in counts):
        raise UserError(
            f"{tree.path(names[0])}: all outlines have four points, as oriented boxes (OBB) have; "
            "if they are such, export outlines (segmentation), else add --format yolo-outlines"
        )
    for image in tree.in_folder(""):
        labels = label_file(tree, image)
        if labels and labels not in used:
            used.add(labels)
            yield LeftOut(f"labelled images that no part of {names[0]} has", image)
    for labels in tree.with_ending(".txt"):
        is_known = labels in used or labels in names or bool(tree.named)
        if "labels/" in labels.lower() and not is_known:
            yield LeftOut("label files without an image", labels)


def images_in_parts(
    tree: Tree, name: str, content: Json
) -> Iterator[tuple[str, str] | LeftOut]:
    """Yield each image with its part: by the keys of the YAML file, or by its folders."""
    if ending_of(name) == ".txt":
        for image in tree.in_folder(""):
            yield image, tree.part_of_image(tree.path(image))
    for key in PART_KEYS:
        part = part_of(key)
        given = content.get(key) or []
        images: list[str | LeftOut] = []
        for path in given if isinstance(given, list) else [given]:
            images += images_at(tree, name, content, str(path), part)
        if given and not any(isinstance(image, str) for image in images):
            yield LeftOut("parts without images", f"{key}: {given}")
        for each in images:
            yield (each, part) if isinstance(each, str) else each


def images_at(
    tree: Tree, name: str, content: Json, given: str, part: str
) -> Sequence[str | LeftOut]:
    """Return the images of a folder or a list of images, as the YAML file names it."""
    given = slashes(given)
    beside = tree.path(name).parent
    base = beside / str(content.get("path") or "")
    # of exports that somebody has moved: below the YAML file
    within = given.removeprefix("../").rstrip("/")
    for path in (base / given, beside / given, beside / within, base / within):
        # Roboflow's say ../train/images, with the folder beside the file
        below = tree.below(path)
        if below.startswith(".."):
            continue
        if path.is_dir():
            return tree.in_folder("" if below == "." else below)
        if path.is_file() and ending_of(below) == ".txt":
            return listed_images(tree, below, part)
    return []


def listed_images(tree: Tree, name: str, part: str) -> list[str | LeftOut]:
    images: list[str | LeftOut] = []
    for line in tree.lines(name):
        image = tree.find_image(line, name, part)
        images.append(tree.below(image) if image else not_there(name, line))
    return images


def label_file(tree: Tree, image: str) -> str | None:
    """Return the label file of an image: in labels for images, or beside it."""
    beside = image[: -len(ending_of(image))] + ".txt"
    choices = [beside]
    match = re.fullmatch("(.*/)images(/.*)", f"/{beside}", re.IGNORECASE)
    if match:
        words = ("labels", "Labels", "LABELS")
        choices = [f"{match[1]}{word}{match[2]}"[1:] for word in words] + choices
    return next((name for name in choices if name in tree.names), None)


def yolo_shapes(
    tree: Tree, labels: str, label_of: dict[int, int], size: Size
) -> Shapes:
    """Yield the objects of the lines, whose values are shares of width and height."""
    scale = np.array(size[::-1], float)
    for number, line in enumerate(tree.lines(labels), 1):
        where = f"{tree.path(labels)}, line {number}"
        try:
            values = [float(word) for word in line.split()]
            label = int(values[0])
            points = to_points(values[1:], where)
        except (ValueError, OverflowError, UserError):
            raise UserError(
                f"{where}: expected CLASS X Y X Y X Y ...; repair or remove it"
            ) from None
        if values[0] not in label_of:
            raise UserError(
                f"{where}: class {values[0]:g} is not among the names of data.yaml; add it there"
            )
        if len(values) == 5:  # CLASS, middle, width and height
            yield LeftOut("boxes without an outline", f"{stem_of(labels)}.txt")
        else:
            yield Shape(label_of[label], where, [points * scale])
