"""COCO's JSON: outlines, runs (RLE), and crowds, which are void.

    {"images": [{"id": 1, "file_name": "a.jpg", "height": 480, "width": 640}],
     "categories": [{"id": 7, "name": "cat"}],
     "annotations": [{"image_id": 1, "category_id": 7, "segmentation": [[x, y, x, y, ...]]}]}

Described at cocodataset.org, "Data format", 1. Object Detection.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from operator import itemgetter

import numpy as np

from ddpkit.convert.labels import (
    Color,
    LabelledSet,
    LeftOut,
    ObjectClasses,
    Size,
    to_color,
)
from ddpkit.convert.objects import (
    Entries,
    MarkedImage,
    draw_objects,
    not_there,
    stated_size,
)
from ddpkit.convert.shapes import Area, Shape, fill_counts, to_points, unpack_counts
from ddpkit.convert.tree import Json, Tree
from ddpkit.data.format import VOID
from ddpkit.errors import UserError, shorten

NEEDED = ("images", "annotations", "categories")


def find_coco(tree: Tree) -> list[str]:
    """Return the JSON files that are COCO's; of COCO's own ones those of instances."""
    # annotations of panoptic ones have no category
    names = [
        name
        for name, content in tree.jsons.items()
        if isinstance(content, dict)
        and all(isinstance(content.get(key), list) for key in NEEDED)
        and not any("segments_info" in each for each in content["annotations"])
    ]
    # captions have no categories; key points are of the same images
    own = [name for name in names if name.rpartition("/")[2].startswith("instances")]
    return own or names


def read_coco(
    tree: Tree, names: Sequence[str], are_objects: bool | None = None
) -> LabelledSet:
    """Return the set. are_objects: whether crowds are objects of their class, or void.

    None: void; but a UserError asks if a class has nothing else.
    """
    colors: dict[str, Color | None] = {}
    for name in names:
        # ids may have gaps: their order is that of the classes
        for category in sorted(tree.jsons[name]["categories"], key=itemgetter("id")):
            colors.setdefault(category["name"], to_color(category.get("color")))
    classes = ObjectClasses(colors, colors)
    crowds: list[int] = []  # their class numbers
    others: set[int] = set()
    label_files = (
        read_coco_file(tree, name, classes, crowds, others, are_objects)
        for name in names
    )
    labelled = draw_objects(tree, classes, label_files)
    alone = [classes.names[number] for number in {*crowds} - others - {VOID}]
    if are_objects is None and alone:
        raise UserError(
            f"{tree.path(names[0])}: all objects of {shorten(alone)} are crowds (iscrowd 1), as "
            "CVAT and datumaro write brushes; add --format coco-objects to draw them, or "
            "--format coco-void to have them void"
        )
    if crowds and not are_objects:
        labelled.notes.append(f"{len(crowds)} objects are crowds (iscrowd 1), so void")
    return labelled


def read_coco_file(
    tree: Tree,
    name: str,
    classes: ObjectClasses,
    crowds: list[int],
    others: set[int],
    are_objects: bool | None,
) -> Entries:
    """Yield the images of a file, and note which classes have crowds, and which other objects."""
    content = tree.jsons[name]
    label_of = {
        category["id"]: classes.number(category["name"], name)
        for category in content["categories"]
    }
    name_of: dict[Json, str] = {}
    for image in content["images"]:
        other = name_of.setdefault(image["id"], image["file_name"])
        if other != image["file_name"]:
            raise UserError(
                f"{tree.path(name)}: {other} and {image['file_name']} have the same id "
                f"{image['id']}, so annotations cannot be assigned; export it again"
            )
    # by image: class, place in the file, and segmentation
    marked: dict[Json, list[tuple[int, str, Json]]] = {key: [] for key in name_of}
    for annotation in content["annotations"]:
        where = f"{tree.path(name)}, annotation {annotation.get('id')}"
        if annotation["category_id"] not in label_of:
            raise UserError(
                f"{where}: category {annotation['category_id']} is not among its categories; add "
                "it there, or remove the annotation"
            )
        if annotation["image_id"] not in marked:
            yield LeftOut("annotations of no image in the file", where)
            continue
        if not annotation.get("segmentation"):
            yield LeftOut("annotations without an outline", where)
            continue
        label = label_of[annotation["category_id"]]
        if not annotation.get("iscrowd"):
            others.add(label)
        else:
            crowds.append(label)
            # many objects that nobody has told apart: no class is right or wrong there
            label = label if are_objects else VOID
        own = marked[annotation["image_id"]]
        own.append((label, where, annotation["segmentation"]))
    for image in content["images"]:
        given = str(image["file_name"])
        path, part = tree.find_sample(given, name)
        if path is None:
            yield not_there(name, given)
            continue
        shapes = partial(coco_shapes, marked[image["id"]])
        size = stated_size(image.get("height"), image.get("width"))
        yield MarkedImage(path, part, str(path), shapes, size)


def coco_shapes(marked: Sequence[tuple[int, str, Json]], size: Size) -> Iterator[Shape]:
    for label, where, segmentation in marked:
        yield Shape(label, where, coco_cover(segmentation, where, size))


def coco_cover(segmentation: Json, where: str, size: Size) -> Area | list[np.ndarray]:
    """Return the pixels of runs, or the outlines of an object in several pieces."""
    if isinstance(segmentation, dict):
        counts = segmentation.get("counts", ())
        if isinstance(counts, str):
            counts = unpack_counts(counts, where)
        height, width = segmentation.get("size") or size
        if (height, width) != size:
            raise UserError(
                f"{where}: its runs (RLE) are of {width} x {height} pixels, the image has "
                f"{size[1]} x {size[0]}; export it again"
            )
        return Area(0, 0, fill_counts(counts, size, where))
    if not isinstance(segmentation[0], list):  # some write one outline as it is
        segmentation = [segmentation]
    return [to_points(each, where) for each in segmentation]
