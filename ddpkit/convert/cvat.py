"""CVAT's XML for images."""

from collections.abc import Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from ddpkit import files
from ddpkit.convert.labels import (
    Color,
    LabelledSet,
    ObjectClasses,
    Sample,
    Size,
    part_of,
    to_color,
)
from ddpkit.convert.shapes import (
    Area,
    Drawing,
    Shape,
    box_outline,
    fill_counts,
    is_outline,
    numbers_of,
    oval,
    to_points,
    turned,
)
from ddpkit.convert.tree import Tree, folder_of
from ddpkit.errors import UserError, reason_of

HEAD = b"<annotations"


def find_cvat(tree: Tree) -> list[str]:
    """Return the XML files that begin as CVAT's do."""
    return [
        name
        for name in tree.with_ending(".xml")
        if HEAD in files.read_file(tree.path(name))[:500]
    ]


def read_cvat(tree: Tree) -> LabelledSet:
    names = find_cvat(tree)
    if not names:
        raise UserError(f"{tree.root}: no XML file in it has CVAT's annotations")
    found = LabelledSet([])
    roots = {}
    order: dict[str, Color | None] = {}
    for name in names:
        try:
            roots[name] = ElementTree.fromstring(files.read_file(tree.path(name)))
        except (ElementTree.ParseError, ValueError) as error:
            raise UserError(
                f"{tree.path(name)}: no XML ({reason_of(error)}); repair or remove it"
            ) from None
        for label in roots[name].findall(".//meta//labels/label"):
            text = (label.findtext("name") or "").strip()
            order.setdefault(text, to_color(label.findtext("color") or ""))
    if not order:  # an export without a head
        used = {
            shape.get("label", "")
            for root in roots.values()
            for image in root.findall("image")
            for shape in image
        }
        order = dict.fromkeys(sorted(used))
    classes = ObjectClasses(order, order)
    found.names = classes.names
    found.colors = classes.colors
    for name, root in roots.items():
        for track in root.findall("track"):
            found.skipped.leave_out("tracks of videos", f"{name}, {track.get('label')}")
        for image in root.findall("image"):
            add_image(tree, name, image, classes, found)
    tree.count_unnamed(found)
    return found


def add_image(
    tree: Tree, name: str, image: Element, classes: ObjectClasses, found: LabelledSet
) -> None:
    given = image.get("name", "")
    stated = part_of(image.get("subset", "")) or part_of(folder_of(given))
    path, part = tree.find_sample(given, name, stated)
    if path is None:
        found.skipped.leave_out(f"images of {name} that are not there", given)
        return

    def cvat_shapes(size: Size) -> list[Shape]:
        place = f"{tree.path(name)}, {given}"
        shapes = [element_shape(each, classes, place, found) for each in image]
        return [shape for shape in shapes if shape]

    size = None
    if image.get("height") and image.get("width"):
        size = (int(image.get("height", 0)), int(image.get("width", 0)))
    draw = Drawing(cvat_shapes, found.skipped, f"{tree.path(name)}, {given}", size)
    found.samples.append(Sample(path, part, draw))


def element_shape(
    given: Element,
    classes: ObjectClasses,
    place: str,
    found: LabelledSet,
) -> Shape | None:
    """Return the object of an element of <image>, or None if it has no inside."""
    kind = given.tag
    label = given.get("label", "")
    place = f"{place}, a {kind} of {label}"

    if kind == "tag":
        return None
    if kind not in ("polygon", "box", "ellipse", "mask"):
        found.skipped.leave_out("points and lines, which have no inside", place)
        return None
    shape = Shape(classes.number(label, place), place)
    shape.order = float(given.get("z_order", 0))
    degrees = float(given.get("rotation", 0))
    if kind == "polygon":
        pairs = [pair.split(",") for pair in given.get("points", "").split(";")]
        points = to_points(pairs, place)
        shape.outlines = [points] if is_outline(points, place, found.skipped) else []
    elif kind == "box":
        corners = box_outline(*numbers_of(given.get, place, "xtl", "ytl", "xbr", "ybr"))
        shape.outlines = [turned(corners, degrees)]
    elif kind == "ellipse":
        x, y, width, height = numbers_of(given.get, place, "cx", "cy", "rx", "ry")
        shape.outlines = [turned(oval((x, y), (width, height)), degrees)]
    else:
        box = [
            int(value)
            for value in numbers_of(given.get, place, "left", "top", "width", "height")
        ]
        shape.area = boxed_area(given.get("rle", ""), box, place)
    return shape


def boxed_area(text: str, box: Sequence[int], place: str) -> Area:
    """Return the area of runs along the rows of a box: left, top, width, height."""
    left, top, width, height = box
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        raise UserError(
            f"{place}: its runs (RLE) are no numbers; export it anew"
        ) from None
    inside = fill_counts(counts, (height, width), place, by_columns=False)
    return Area(top, left, inside)
