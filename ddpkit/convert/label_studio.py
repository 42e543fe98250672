"""Label Studio's JSON export: outlines, boxes and ellipses, and brushes from its PNG files."""

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ddpkit.convert.labels import LabelledSet, ObjectClasses, Sample, Size, part_of
from ddpkit.convert.mask_files import read_inside
from ddpkit.convert.shapes import (
    Area,
    Drawing,
    Shape,
    box_outline,
    is_outline,
    numbers_of,
    oval,
    to_points,
    turned,
)
from ddpkit.convert.tree import ENDINGS, Json, Tree, ending_of, folder_of, slashes
from ddpkit.errors import UserError

# as the export "Brush labels to PNG" names them
BRUSH = re.compile(r"task-(\d+)-annotation-(\d+)-by-.*-tag-(.+)-\d+\.png")
KINDS = ("polygonlabels", "rectanglelabels", "ellipselabels", "brushlabels")


def find_label_studio(tree: Tree) -> list[str]:
    return [name for name, content in tree.jsons.items() if is_export(content)]


def is_export(content: Json) -> bool:
    return (
        isinstance(content, list)
        and bool(content)
        and isinstance(content[0], dict)
        and {"data", "annotations"} <= content[0].keys()
    )


def read_label_studio(tree: Tree) -> LabelledSet:
    tree.refuse_broken()
    names = find_label_studio(tree)
    if not names:
        raise UserError(
            f"{tree.root}: no JSON file in it is a list of tasks with data and annotations; export "
            'as "JSON", too'
        )
    found = LabelledSet([])
    brushes: dict[tuple, list[tuple[str, str]]] = {}
    for name in tree.files:
        match = BRUSH.fullmatch(name.rpartition("/")[2])
        if match:
            key = int(match[1]), int(match[2])
            brushes.setdefault(key, []).append((match[3], name))
    tasks = [(name, task) for name in names for task in tree.jsons[name]]
    used = {label for own in brushes.values() for label, _ in own}
    for _, task in tasks:
        used.update(label for each in results_of(task) for label in labels_of(each))
    classes = ObjectClasses(sorted(used))
    found.names = classes.names
    for name, task in tasks:
        place = f"{tree.path(name)}, task {task.get('id')}"
        done = annotations_of(task)
        if not done:
            found.skipped.leave_out("tasks without an annotation", place)
            continue
        if len(done) > 1:
            found.skipped.leave_out("second annotations of a task", place)
        path = find_image_of(tree, name, task)
        if path is None:
            found.skipped.leave_out("tasks without an image", place)
            continue
        own = brushes.get((task.get("id"), done[0].get("id")), [])
        results = results_of(task)

        def studio_shapes(
            size: Size, results: list = results, own: list = own, place: str = place
        ) -> list[Shape]:
            shapes = []
            for each in results:
                shapes += result_shapes(each, size, classes, place, found)
            for label, png in own:
                inside = read_inside(tree.path(png), size)
                number = classes.number(label, place)
                shapes.append(Shape(number, png, area=Area(0, 0, inside)))
            return shapes

        if not own and any(each.get("type") == "brushlabels" for each in results):
            raise UserError(
                f'{place}: has brush labels; export "Brush labels to PNG" into the same folder, too'
            )
        draw = Drawing(studio_shapes, found.skipped, place)
        part = part_of(folder_of(tree.below(path))) or "train"
        found.samples.append(Sample(path, part, draw))
    brush_files = {png for own in brushes.values() for _, png in own}
    tree.count_unnamed(found, brush_files)
    return found


def annotations_of(task: dict) -> list[dict]:
    return [each for each in task["annotations"] if not each.get("was_cancelled")]


def results_of(task: dict) -> list[dict]:
    """Return what the first annotation of a task has marked."""
    done = annotations_of(task)
    results = done[0].get("result", []) if done else []
    return [each for each in results if each.get("type") in KINDS]


def labels_of(result: dict) -> Iterable[str]:
    return result.get("value", {}).get(result["type"], ())


def find_image_of(tree: Tree, name: str, task: dict) -> Path | None:
    for value in task["data"].values():
        if not isinstance(value, str) or ending_of(value) not in ENDINGS:
            continue
        # uploads lie in folders of Label Studio's own; local files and buckets have theirs
        value = slashes(value.rpartition("?d=")[2])
        last = value.rpartition("/")[2]
        part = part_of(folder_of(value))
        # an upload has letters of its own in front
        own = re.sub(r"^[0-9a-f]{8}-", "", last)
        is_elsewhere = value.startswith("/data/upload/") or "://" in value
        for given in (last if is_elsewhere else value, own):
            path = tree.find_image(given, name, part)
            if path:
                return path
    return None


def result_shapes(
    result: dict, size: Size, classes: ObjectClasses, place: str, found: LabelledSet
) -> list[Shape]:
    """Return the object of a result with an outline, whose values are in % of the image."""
    value = result["value"]
    kind = result["type"]
    place = f"{place}, {kind}"
    scale = np.array(size[::-1]) / 100

    if kind == "brushlabels":
        return []
    if kind == "polygonlabels":
        points = to_points(value.get("points"), place)
        if not is_outline(points, place, found.skipped):
            return []
        points = points * scale
    elif kind == "rectanglelabels":
        left, top, width, height = numbers_of(
            value.get, place, "x", "y", "width", "height"
        )
        points = box_outline(left, top, left + width, top + height) * scale
        # about its first corner
        corner = points[0].copy()
        points = turned(points, float(value.get("rotation") or 0))
        points += corner - points[0]
    else:
        x, y, across, down = numbers_of(
            value.get, place, "x", "y", "radiusX", "radiusY"
        )
        points = oval((x, y), (across, down)) * scale
        points = turned(points, float(value.get("rotation") or 0))
    return [
        Shape(classes.number(label, place), place, [points])
        for label in labels_of(result)
    ]
