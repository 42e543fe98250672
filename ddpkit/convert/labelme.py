"""LabelMe's JSON, one file per image.

    {"imagePath": "a.jpg", "imageHeight": 480, "imageWidth": 640, "shapes": [
      {"label": "cat", "shape_type": "polygon", "points": [[x, y], [x, y], ...]},
      {"label": "cat", "shape_type": "mask", "points": [[left, top], ...], "mask": "(a PNG)"}]}

It has no description; labelme's own examples, and `labelme/_label_file.py`, show what it writes.
"""

import base64
import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from ddpkit.convert.labels import LabelledSet, LeftOut, ObjectClasses, Size, part_of
from ddpkit.convert.objects import Entries, MarkedImage, draw_objects, stated_size
from ddpkit.convert.shapes import Area, Shape, Shapes, box_outline, oval, to_points
from ddpkit.convert.tree import Json, Tree, stem_of
from ddpkit.data.format import DEFAULT_FORMAT
from ddpkit.errors import UserError

NO_AREAS = ("line", "linestrip", "point", "points")
BOXES = ("rectangle", "oriented_rectangle")


def find_labelme(tree: Tree) -> list[str]:
    return [
        name
        for name, content in tree.jsons.items()
        if isinstance(content, dict) and isinstance(content.get("shapes"), list)
    ]


def read_labelme(tree: Tree, names: Sequence[str]) -> LabelledSet:
    used = {
        shape.get("label") for name in names for shape in tree.jsons[name]["shapes"]
    }
    # LabelMe's own list gives the order
    lists = tree.files_named("labels.txt")
    listed = tree.lines(lists[0]) if lists else []
    classes = ObjectClasses([*listed, *sorted(used - set(listed))])
    label_files = (read_labelme_file(tree, name, classes) for name in names)
    has_objects = used or not any(flags_in(tree.jsons[name]) for name in names)
    return draw_objects(tree, classes if has_objects else None, label_files)


def flags_in(content: Json) -> tuple[str, ...]:
    """Return the flags that are set for the whole image, which are its labels."""
    given = content.get("flags") or {}
    return tuple(sorted(str(name) for name, is_set in given.items() if is_set))


def read_labelme_file(tree: Tree, name: str, classes: ObjectClasses) -> Entries:
    content = tree.jsons[name]
    where = str(tree.path(name))
    part = part_of(name)
    image = find_image_of(tree, name, str(content.get("imagePath") or ""), part)
    if image is None:
        yield LeftOut("labels without an image", name)
        return
    shapes = partial(labelme_shapes, content["shapes"], classes, where)
    size = stated_size(content.get("imageHeight"), content.get("imageWidth"))
    part = part or tree.part_of_image(image)
    yield MarkedImage(image, part, where, shapes, size, flags_in(content))


def find_image_of(tree: Tree, name: str, given: str, part: str) -> Path | None:
    """Return the image of a label file, whose imagePath is `given`."""
    image = tree.find_image(given, name, part) if given else None
    if image and image.stem == stem_of(name):
        return image
    # renamed images have the name of their labels
    of_name = tree.find_image(stem_of(name), name, part)
    if image and of_name:
        raise UserError(
            f"{tree.path(name)}: imagePath names {given}, but {tree.below(of_name)} has the file's "
            "own name; correct imagePath, or rename the file"
        )
    return image or of_name


def labelme_shapes(
    marks: Sequence[dict], classes: ObjectClasses, where: str, size: Size
) -> Shapes:
    for mark in marks:
        kind = mark.get("shape_type") or "polygon"
        label = str(mark.get("label"))
        named = f"{where}, a {kind} of {label}"
        if kind in NO_AREAS:
            yield LeftOut("points and lines, which have no inside", named)
        else:
            yield Shape(
                classes.number(label, named), named, labelme_cover(mark, kind, named)
            )


def labelme_cover(mark: dict, kind: str, where: str) -> Area | list[np.ndarray]:
    """Return the pixels of a mask, or the outline of what has another kind with an inside."""
    points = to_points(mark.get("points"), where)
    if kind == "mask":
        return unpack_mask(mark.get("mask"), points, where)
    # a box that has been turned, as LabelMe 6's oriented_rectangle, has four points
    if kind == "polygon" or (kind in BOXES and len(points) == 4):
        return [points]
    if kind in BOXES and len(points) == 2:
        return [box_outline(*points[0], *points[1])]
    if kind == "circle" and len(points) == 2:
        # its centre, and a point on it
        radius = float(np.hypot(*(points[1] - points[0])))
        return [oval(points[0], (radius, radius))]
    raise UserError(f"{where}: {len(points)} points are none such; draw it again")


def unpack_mask(text: Json, points: np.ndarray, where: str) -> Area:
    """Return the pixels of a PNG in base64 that lies in a box."""
    try:
        image = Image.open(io.BytesIO(base64.b64decode(text)), formats=["PNG"])
        DEFAULT_FORMAT.check_size(where, image.size)
        inside = np.array(image.convert("L")) > 0
    except (TypeError, ValueError, OSError):
        raise UserError(
            f"{where}: its mask is not a PNG in base64; draw it again"
        ) from None
    left, top = np.round(points.min(0)).astype(int)
    return Area(int(top), int(left), inside)
