"""COCO's JSON: outlines, runs (RLE), and crowds, which are void."""

import numpy as np

from ddpkit.convert.labels import LabelledSet, ObjectClasses, Sample, Size, to_color
from ddpkit.convert.shapes import (
    Area,
    Drawing,
    Shape,
    fill_counts,
    is_outline,
    to_points,
    unpack_counts,
)
from ddpkit.convert.tree import Json, Tree
from ddpkit.data.format import VOID
from ddpkit.errors import UserError

NEEDED = ("images", "annotations", "categories")


def find_coco(tree: Tree) -> list[str]:
    """Return the JSON files that are COCO's; of COCO's own ones those of instances."""
    found = [name for name, content in tree.jsons.items() if is_coco(content)]
    # captions have no categories; key points are of the same images
    own = [name for name in found if name.rpartition("/")[2].startswith("instances")]
    return own or found


def is_coco(content: Json) -> bool:
    return isinstance(content, dict) and all(
        isinstance(content.get(key), list) for key in NEEDED
    )


def read_coco(tree: Tree) -> LabelledSet:
    tree.refuse_broken()
    names = find_coco(tree)
    if not names:
        raise UserError(f"{tree.root}: no JSON file in it has {', '.join(NEEDED)}")
    found = LabelledSet([])
    categories: dict[str, Json] = {}
    for name in names:
        for category in sorted(tree.jsons[name]["categories"], key=lambda c: c["id"]):
            categories.setdefault(str(category["name"]), category.get("color"))
    colors = {name: to_color(color) for name, color in categories.items()}
    classes = ObjectClasses(categories, colors)
    found.names = classes.names
    found.colors = classes.colors
    for name in names:
        read_annotations(tree, name, classes, found)
    tree.count_unnamed(found)
    return found


def read_annotations(
    tree: Tree, name: str, classes: ObjectClasses, found: LabelledSet
) -> None:
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
                f"{image['id']}, so that nobody knows whose the annotations are; export it anew"
            )
    objects: dict[Json, list[dict]] = {key: [] for key in name_of}
    for annotation in content["annotations"]:
        place = f"{tree.path(name)}, annotation {annotation.get('id')}"
        if annotation["category_id"] not in label_of:
            raise UserError(
                f"{place}: category {annotation['category_id']} is not among its categories; add "
                "it there, or remove the annotation"
            )
        if annotation["image_id"] not in objects:
            found.skipped.leave_out("annotations of no image in the file", place)
        elif not annotation.get("segmentation"):
            found.skipped.leave_out("annotations without an outline", place)
        else:
            objects[annotation["image_id"]].append(annotation)
    for image in content["images"]:
        given = str(image["file_name"])
        path, part = tree.find_sample(given, name)
        if path is None:
            found.skipped.leave_out(f"images of {name} that are not there", given)
            continue
        own = objects[image["id"]]

        def coco_shapes(size: Size, own: list[dict] = own) -> list[Shape]:
            return [
                to_shape(each, label_of, size, f"{tree.path(name)}, annotation "
                    f"{each.get('id')}", found)
                for each in own
            ]  # fmt: skip

        stated = None
        if image.get("height") and image.get("width"):
            stated = (int(image["height"]), int(image["width"]))
        draw = Drawing(coco_shapes, found.skipped, str(path), stated)
        found.samples.append(Sample(path, part, draw))


def to_shape(
    annotation: dict,
    label_of: dict[Json, int],
    size: Size,
    place: str,
    found: LabelledSet,
) -> Shape:
    label = label_of[annotation["category_id"]]
    if annotation.get("iscrowd"):
        label = VOID
    segmentation = annotation["segmentation"]
    shape = Shape(label, place)
    if isinstance(segmentation, dict):
        counts = segmentation.get("counts", ())
        if isinstance(counts, str):
            counts = unpack_counts(counts, place)
        stated = segmentation.get("size")
        if stated and tuple(stated) != size:
            raise UserError(
                f"{place}: its runs (RLE) are of {stated[1]} x {stated[0]} pixels, the image has "
                f"{size[1]} x {size[0]}; export it anew"
            )
        shape.area = Area(0, 0, fill_counts(counts, size, place))
        return shape
    if not isinstance(segmentation[0], list):  # some write one outline as it is
        segmentation = [segmentation]
    outlines: list[np.ndarray] = [to_points(each, place) for each in segmentation]
    shape.outlines = [
        points for points in outlines if is_outline(points, place, found.skipped)
    ]
    return shape
