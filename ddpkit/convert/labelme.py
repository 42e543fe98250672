"""LabelMe's JSON, one file per image."""

import base64
import binascii
import io

import numpy as np
from PIL import Image, UnidentifiedImageError

from ddpkit.convert.labels import LabelledSet, ObjectClasses, Sample, Size, part_of
from ddpkit.convert.shapes import (
    Area,
    Shape,
    box_outline,
    drawing,
    is_outline,
    oval,
    to_points,
)
from ddpkit.convert.tree import ENDINGS, Json, Tree
from ddpkit.errors import UserError

NO_AREAS = ("line", "linestrip", "point", "points")


def find_labelme(tree: Tree) -> list[str]:
    return [name for name, content in tree.jsons.items() if is_labelme(content)]


def is_labelme(content: Json) -> bool:
    return isinstance(content, dict) and isinstance(content.get("shapes"), list)


def read_labelme(tree: Tree) -> LabelledSet:
    tree.refuse_broken()
    names = find_labelme(tree)
    if not names:
        raise UserError(f"{tree.root}: no JSON file in it has LabelMe's shapes")
    found = LabelledSet([])
    used = {
        str(shape.get("label"))
        for name in names
        for shape in tree.jsons[name]["shapes"]
    }
    # LabelMe's own list gives the order
    lists = [name for name in tree.files if name.rpartition("/")[2] == "labels.txt"]
    listed = tree.lines(lists[0]) if lists else []
    classes = ObjectClasses([*listed, *sorted(used - set(listed))])
    found.names = classes.names
    taken = set()
    for name in names:
        content = tree.jsons[name]
        part = part_of(name) or "train"
        given = str(content.get("imagePath") or "")
        # renamed images have the name of their labels
        path = tree.find_image(given, name, part) if given else None
        path = path or tree.find_image(name[: -len(".json")], name, part)
        if path is None:
            found.skipped.leave_out("labels without an image", name)
            continue
        taken.add(path.resolve())
        shapes = content["shapes"]

        def labelme_shapes(
            size: Size, shapes: list = shapes, name: str = name
        ) -> list[Shape]:
            place = str(tree.path(name))
            made = [object_of(each, classes, place, found) for each in shapes]
            return [shape for shape in made if shape]

        stated = None
        if content.get("imageHeight") and content.get("imageWidth"):
            stated = (int(content["imageHeight"]), int(content["imageWidth"]))
        draw = drawing(labelme_shapes, found.skipped, str(tree.path(name)), stated)
        found.samples.append(Sample(path, part, draw))
    folders = {name.rpartition("/")[0] for name in names}
    for folder in sorted(folders):
        for image in tree.in_folder(folder, ENDINGS):
            is_beside = image.rpartition("/")[0] == folder
            if is_beside and tree.path(image).resolve() not in taken:
                found.skipped.leave_out("images without labels", image)
    return found


def object_of(
    given: dict, classes: ObjectClasses, place: str, found: LabelledSet
) -> Shape | None:
    """Return the object, or None if it has no inside."""
    kind = given.get("shape_type") or "polygon"
    place = f"{place}, a {kind} of {given.get('label')}"
    shape = Shape(classes.number(str(given.get("label")), place), place)
    if kind in NO_AREAS:
        found.skipped.leave_out("points and lines, which have no inside", place)
        return None
    points = to_points(given.get("points"), place)
    if kind == "polygon":
        shape.outlines = [points] if is_outline(points, place, found.skipped) else []
    elif len(points) == 2 and kind == "rectangle":
        shape.outlines = [box_outline(*points[0], *points[1])]
    elif len(points) == 2 and kind == "circle":
        radius = float(np.hypot(*(points[1] - points[0])))
        shape.outlines = [oval(points[0], (radius, radius))]
    elif kind == "mask":
        shape.area = unpack_mask(given.get("mask"), points, place)
    else:
        raise UserError(f"{place}: {len(points)} points are none such; draw it anew")
    return shape


def unpack_mask(text: Json, points: np.ndarray, place: str) -> Area:
    """Return the pixels of a PNG in base64 that lies in a box."""
    try:
        image = Image.open(io.BytesIO(base64.b64decode(text)), formats=["PNG"])
        inside = np.array(image.convert("L")) > 0
    except (TypeError, ValueError, binascii.Error, OSError, UnidentifiedImageError):
        raise UserError(
            f"{place}: its mask is no PNG in base64; draw it anew"
        ) from None
    left, top = np.round(points.min(0)).astype(int)
    return Area(int(top), int(left), inside)
