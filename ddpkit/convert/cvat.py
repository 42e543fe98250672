"""CVAT's XML for images.

    <annotations><meta>... <label><name>cat</name><color>#ff0000</color></label> ...</meta>
      <image name="a.jpg" subset="Train" width="640" height="480">
        <polygon label="cat" points="x,y;x,y;..." z_order="0"/></image></annotations>

Described in CVAT's documentation, "Annotation formats", CVAT for image. Videos have <track> in
place of <image>: their frames are not in the export, so that there is nothing to draw on.
"""

from collections.abc import Sequence
from functools import partial
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np

from ddpkit import files
from ddpkit.convert.labels import (
    Color,
    LabelledSet,
    LeftOut,
    ObjectClasses,
    Size,
    part_of,
    to_color,
)
from ddpkit.convert.objects import (
    Entries,
    MarkedImage,
    draw_objects,
    not_there,
    stated_size,
)
from ddpkit.convert.shapes import (
    Area,
    Shape,
    Shapes,
    box_outline,
    fill_counts,
    numbers_of,
    oval,
    to_points,
    turned,
)
from ddpkit.convert.tree import Tree, folder_of

KINDS = ("polygon", "box", "ellipse", "mask")


def find_cvat(tree: Tree) -> list[str]:
    """Return the XML files that begin as CVAT's do."""
    return [
        name
        for name in tree.with_ending(".xml")
        if "<annotations" in tree.start_of(name)[:500]
    ]


def read_cvat(tree: Tree, names: Sequence[str]) -> LabelledSet:
    roots = {
        name: files.parse(tree.path(name), ElementTree.fromstring, "XML")
        for name in names
    }
    colors: dict[str, Color | None] = {}
    for root in roots.values():
        for label in root.findall(".//meta//labels/label"):
            text = (label.findtext("name") or "").strip()
            colors.setdefault(text, to_color(label.findtext("color") or ""))
    marks = [mark for root in roots.values() for mark in root.iterfind("image/*")]
    if not colors:  # an export without a head
        colors = dict.fromkeys(sorted({mark.get("label", "") for mark in marks}))
    classes = ObjectClasses(colors, colors)
    label_files = (read_root(tree, name, root, classes) for name, root in roots.items())
    kinds = {mark.tag for mark in marks}
    has_objects = "tag" not in kinds or not kinds.isdisjoint(KINDS)
    return draw_objects(tree, classes if has_objects else None, label_files)


def read_root(tree: Tree, name: str, root: Element, classes: ObjectClasses) -> Entries:
    for track in root.findall("track"):
        yield LeftOut("tracks of videos", f"{name}, {track.get('label')}")
    for image in root.findall("image"):
        given = image.get("name", "")
        stated = part_of(image.get("subset", "")) or part_of(folder_of(given))
        path, part = tree.find_sample(given, name, stated)
        if path is None:
            yield not_there(name, given)
            continue
        where = f"{tree.path(name)}, {given}"
        shapes = partial(cvat_shapes, image, classes, where)
        size = stated_size(image.get("height"), image.get("width"))
        tags = {mark.get("label", "") for mark in image.iterfind("tag")}
        yield MarkedImage(path, part, where, shapes, size, tuple(sorted(tags)))


def cvat_shapes(
    image: Element, classes: ObjectClasses, where: str, size: Size
) -> Shapes:
    for mark in image:
        kind = mark.tag
        label = mark.get("label", "")
        named = f"{where}, a {kind} of {label}"
        if kind in KINDS:
            number = classes.number(label, named)
            order = float(mark.get("z_order", 0))
            yield Shape(number, named, cvat_cover(mark, named), order)
        elif kind != "tag":
            yield LeftOut("points and lines, which have no inside", named)


def cvat_cover(mark: Element, where: str) -> Area | list[np.ndarray]:
    """Return the pixels of <mask>, or the outline of the other elements that have an inside."""
    numbers = partial(numbers_of, mark.get, where)
    if mark.tag == "mask":
        left, top, width, height = map(int, numbers("left", "top", "width", "height"))
        counts = mark.get("rle", "").split(",")
        return Area(top, left, fill_counts(counts, (height, width), where, False))
    if mark.tag == "polygon":
        pairs = [pair.split(",") for pair in mark.get("points", "").split(";")]
        return [to_points(pairs, where)]
    if mark.tag == "box":
        points = box_outline(*numbers("xtl", "ytl", "xbr", "ybr"))
    else:
        x, y, across, down = numbers("cx", "cy", "rx", "ry")
        points = oval((x, y), (across, down))
    return [turned(points, float(mark.get("rotation", 0)))]
