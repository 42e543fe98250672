"""YOLO's outlines: data.yaml, and a text file per image whose lines are CLASS X Y X Y X Y ..."""

import numpy as np

from ddpkit import files
from ddpkit.convert.labels import LabelledSet, ObjectClasses, Sample, Size
from ddpkit.convert.shapes import Shape, drawing, is_outline
from ddpkit.convert.tree import ENDINGS, Json, Tree, ending_of, stem_of
from ddpkit.errors import UserError, reason_of

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
    return found


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
            f"{tree.root}: no YAML file in it has names, and a train or val"
        )
    name = names[0]
    content = read_yaml(tree, name)
    given = content.get("names") or [str(n) for n in range(int(content["nc"]))]
    if isinstance(given, dict):
        class_of = {int(number): str(text) for number, text in given.items()}
    else:
        class_of = {number: str(text) for number, text in enumerate(given)}
    classes = ObjectClasses(text for _, text in sorted(class_of.items()))
    found = LabelledSet([], classes.names)
    label_of = {n: classes.number(text, name) for n, text in class_of.items()}
    label_files = set()
    for key, part in KEYS:
        images = images_of(tree, name, content, content.get(key))
        if content.get(key) and not images:
            found.skipped.leave_out("parts without images", f"{key}: {content[key]}")
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

            draw = drawing(yolo_shapes, found.skipped, place)
            found.samples.append(Sample(tree.path(image), part, draw))
    for label in tree.with_ending(".txt"):
        if "labels/" in label and label not in label_files and not tree.named:
            found.skipped.leave_out("label files without an image", label)
    return found


def images_of(tree: Tree, name: str, content: dict, given: Json) -> list[str]:
    """Return the images of a part, which is a folder, a list of images, or several of these."""
    if not given:
        return []
    if isinstance(given, list):
        return [each for one in given for each in images_of(tree, name, content, one)]
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
            return listed_images(tree, below)
    return []


def listed_images(tree: Tree, name: str) -> list[str]:
    """Return the images that a list names; those that are not there are left out."""
    found = [tree.find_image(line, name) for line in tree.lines(name)]
    return [tree.below(path) for path in found if path]


def label_file(tree: Tree, image: str) -> str | None:
    """Return the label file of an image: in labels for images, or beside it."""
    folder, _, last = f"/{image}".rpartition("/images/")
    beside = image[: -len(ending_of(image))] + ".txt"
    swapped = f"{folder}/labels/{last}"[1:]
    swapped = swapped[: -len(ending_of(image))] + ".txt"
    for name in (swapped, beside) if last != f"/{image}" else (beside,):
        if tree.path(name).is_file():
            return name
    return None


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
        except ValueError:
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
