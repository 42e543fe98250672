"""YOLO's outlines: data.yaml, and a text file per image whose lines are CLASS X Y X Y X Y ..."""

import re

import numpy as np

from ddpkit import files
from ddpkit.convert.labels import LabelledSet, ObjectClasses, Sample, Size, part_of
from ddpkit.convert.shapes import Drawing, Shape, is_outline
from ddpkit.convert.tree import ENDINGS, Json, Tree, ending_of, folder_of, stem_of
from ddpkit.errors import UserError, reason_of

NUMBER = re.compile(r"-?\d*\.?\d+(e-?\d+)?")
KEYS = (("train", "train"), ("val", "val"), ("valid", "val"), ("test", "test"))


def find_yolo(tree: Tree) -> list[str]:
    """Return the YAML files that name classes and a part."""
    found = []
    for name in tree.with_ending(".yaml", ".yml"):
        content = read_yaml(tree, name)
        if not isinstance(content, dict) or not {"names", "nc"} & content.keys():
            continue
        if any(content.get(key) for key, _ in KEYS):
            found.append(name)
    return found or find_class_lists(tree)


def find_class_lists(tree: Tree) -> list[str]:
    """Return the classes.txt of exports without YAML, if an image has outlines or boxes."""
    lists = [name for name in tree.files if name.rpartition("/")[2] == "classes.txt"]
    for image in tree.in_folder("") if lists else ():
        labels = label_file(tree, image)
        words = first_words(tree, labels) if labels else []
        if len(words) >= 5 and all(NUMBER.fullmatch(word) for word in words):
            return lists
    return []


def first_words(tree: Tree, name: str) -> list[str]:
    text = files.read_file(tree.path(name)).decode("utf-8-sig", "replace")
    return text.strip().partition("\n")[0].split()


def read_yaml(tree: Tree, name: str) -> Json:
    try:
        import yaml
    except ImportError:
        raise UserError(
            f"{tree.path(name)}: reading it needs one more package: python -m pip install pyyaml"
        ) from None
    try:
        return yaml.safe_load(files.read_file(tree.path(name)))
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(
            f"{tree.path(name)}: no YAML ({reason_of(error)}); repair or remove it"
        ) from None


def read_yolo(tree: Tree) -> LabelledSet:
    names = find_yolo(tree)
    if not names:
        raise UserError(
            f"{tree.root}: no YAML file in it has names, and a train or val; nor is there a "
            "classes.txt, a name in each line"
        )
    name = names[0]
    if ending_of(name) == ".txt":
        content: Json = {"names": tree.lines(name)}
        for other in names:
            if tree.lines(other) != tree.lines(name):
                raise UserError(
                    f"{tree.path(other)}: has other classes than {name}; convert the folder of "
                    "each by itself"
                )
        parts = parts_by_folder(tree)
    else:
        content = read_yaml(tree, name)
        parts = []
    given = content.get("names") or [str(n) for n in range(int(content["nc"]))]
    if isinstance(given, dict):
        class_of = {int(number): str(text) for number, text in given.items()}
    else:
        class_of = {number: str(text) for number, text in enumerate(given)}
    classes = ObjectClasses(text for _, text in sorted(class_of.items()))
    found = LabelledSet([], classes.names)
    label_of = {n: classes.number(text, name) for n, text in class_of.items()}
    for key, part in KEYS:
        images = images_of(tree, name, content, content.get(key), part, found)
        if content.get(key) and not images:
            found.skipped.leave_out("parts without images", f"{key}: {content[key]}")
        parts.append((part, images))
    label_files = set()
    for part, images in parts:
        for image in images:
            labels = label_file(tree, image)
            if labels is None:
                found.skipped.leave_out("images without a label file", image)
                continue
            label_files.add(labels)
            place = str(tree.path(labels))
            objects = read_outlines(tree, labels, label_of, found)

            def yolo_shapes(size: Size, objects: list = objects) -> list[Shape]:
                scale = np.array(size[::-1], float)
                return [
                    Shape(label, place, [points * scale])
                    for label, points, place in objects
                ]

            draw = Drawing(yolo_shapes, found.skipped, place)
            found.samples.append(Sample(tree.path(image), part, draw))
    used = {sample.image for sample in found.samples}
    for image in tree.in_folder(""):
        labels = label_file(tree, image)
        if labels and tree.path(image) not in used and labels not in label_files:
            label_files.add(labels)
            found.skipped.leave_out(
                f"labelled images that no part of {name} has", image
            )
    for label in tree.with_ending(".txt"):
        is_known = label in label_files or label in names or bool(tree.named)
        if "labels/" in label.lower() and not is_known:
            found.skipped.leave_out("label files without an image", label)
    tree.count_unnamed(found)
    return found


def parts_by_folder(tree: Tree) -> list[tuple[str, list[str]]]:
    """Return the parts and their images, by the names of the folders."""
    found: dict[str, list[str]] = {}
    for image in tree.in_folder(""):
        part = part_of(folder_of(image)) or "train"
        found.setdefault(part, []).append(image)
    return sorted(found.items())


def images_of(
    tree: Tree, name: str, content: dict, given: Json, part: str, found: LabelledSet
) -> list[str]:
    """Return the images of a part, which is a folder, a list of images, or several of these."""
    if not given:
        return []
    if isinstance(given, list):
        several = [images_of(tree, name, content, x, part, found) for x in given]
        return [image for each in several for image in each]
    given = str(given).replace("\\", "/")
    place = tree.path(name).parent
    base = place / str(content.get("path") or "")
    # Of exports that somebody has moved: below the YAML file.
    within = given.removeprefix("../").removeprefix("./").rstrip("/")
    for path in (base / given, place / given, place / within, base / within):
        # Roboflow's say ../train/images, with the folder beside the file
        below = tree.below(path)
        if below.startswith(".."):
            continue
        if path.is_dir():
            folder = "" if below == "." else below
            return tree.in_folder(folder, ENDINGS)
        if path.is_file() and ending_of(below) == ".txt":
            return listed_images(tree, below, part, found)
    return []


def listed_images(tree: Tree, name: str, part: str, found: LabelledSet) -> list[str]:
    """Return the images that a list names; those that are not there are counted."""
    listed = []
    for line in tree.lines(name):
        path = tree.find_image(line, name, part)
        if path:
            listed.append(tree.below(path))
        else:
            found.skipped.leave_out(f"images of {name} that are not there", line)
    return listed


def label_file(tree: Tree, image: str) -> str | None:
    """Return the label file of an image: in labels for images, or beside it."""
    beside = image[: -len(ending_of(image))] + ".txt"
    places = [beside]
    match = re.fullmatch("(.*/)images(/.*)", f"/{beside}", re.IGNORECASE)
    if match:
        words = ("labels", "Labels", "LABELS")
        places = [f"{match[1]}{word}{match[2]}"[1:] for word in words] + places
    return next((name for name in places if name in tree.names), None)


def read_outlines(
    tree: Tree, name: str, label_of: dict[int, int], found: LabelledSet
) -> list[tuple[int, np.ndarray, str]]:
    """Return class number, outline in shares of width and height, and place of each line."""
    objects = []
    for number, line in enumerate(tree.lines(name), 1):
        place = f"{tree.path(name)}, line {number}"
        try:
            values = [float(word) for word in line.split()]
            label = int(values[0])
            points = np.array(values[1:]).reshape(-1, 2)
            if not np.isfinite(points).all():
                raise ValueError(line)
        except (ValueError, OverflowError):
            raise UserError(
                f"{place}: expected CLASS X Y X Y X Y ...; repair or remove it"
            ) from None
        if label not in label_of:
            raise UserError(
                f"{place}: class {label} is not among the names of data.yaml; add it there"
            )
        if len(values) == 5:
            found.skipped.leave_out("boxes without an outline", f"{stem_of(name)}.txt")
        elif is_outline(points, place, found.skipped):
            objects.append((label_of[label], points, place))
    return objects
