"""LabelMe's JSON, one file per image."""

import base64
import binascii
import io

import numpy as np
from PIL import Image, UnidentifiedImageError

from ddpkit.convert.labels import LabelledSet, ObjectClasses, Sample, Size, part_of
from ddpkit.convert.shapes import (
    Area,
    Drawing,
    Shape,
    box_outline,
    is_outline,
    oval,
    to_points,
)
from ddpkit.convert.tree import Json, Tree, folder_of, stem_of
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
    for name in names:
        content = tree.jsons[name]
        part = part_of(name)
        given = str(content.get("imagePath") or "")
        path = tree.find_image(given, name, part) if given else None
        if path is None or path.stem != stem_of(name):
            # renamed images have the name of their labels
            of_name = tree.find_image(stem_of(name), name, part)
            if path and of_name:
                raise UserError(
                    f"{tree.path(name)}: imagePath names {given}, but {tree.below(of_name)} has "
                    "the file's own name; correct imagePath, or rename the file"
                )
            path = path or of_name
        if path is None:
            found.skipped.leave_out("labels without an image", name)
            continue
        part = part or part_of(folder_of(tree.below(path))) or "train"
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
        draw = Drawing(labelme_shapes, found.skipped, str(tree.path(name)), stated)
        found.samples.append(Sample(path, part, draw))
    tree.count_unnamed(found)
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
    # a box that has been turned has four points
    if kind == "polygon" or (kind == "rectangle" and len(points) == 4):
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
