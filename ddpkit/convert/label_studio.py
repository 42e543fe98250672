"""Label Studio's JSON export: outlines, boxes and ellipses, and brushes from its PNG files.

    [{"id": 3, "data": {"image": "/data/upload/1/0123abcd-a.jpg"}, "annotations": [{"id": 5,
      "result": [{"type": "polygonlabels",
                  "value": {"points": [[x, y], ...], "polygonlabels": ["cat"]}}]}]}]

Described at labelstud.io, "Label Studio JSON format of annotated tasks". Brushes have runs of its
own in it, which no page describes; they are taken from the export "Brush labels to PNG".
"""

import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from ddpkit.convert.labels import LabelledSet, LeftOut, ObjectClasses, Size, part_of
from ddpkit.convert.mask_files import read_inside
from ddpkit.convert.objects import Entries, MarkedImage, draw_objects
from ddpkit.convert.shapes import (
    Area,
    Shape,
    Shapes,
    box_outline,
    numbers_of,
    oval,
    to_points,
    turned,
)
from ddpkit.convert.tree import ENDINGS, Tree, ending_of, folder_of, slashes
from ddpkit.errors import UserError

# by the numbers of task and annotation: labels, and the PNGs of what is marked so
Brushes = dict[tuple, list[tuple[str, Path]]]
# as the export "Brush labels to PNG" names them
BRUSH = re.compile(r"task-(\d+)-annotation-(\d+)-by-.*-tag-(.+)-\d+\.png")
KINDS = ("polygonlabels", "rectanglelabels", "ellipselabels", "brushlabels")
CHOICES = ("choices",)  # about the whole image


def find_label_studio(tree: Tree) -> list[str]:
    return [
        name
        for name, content in tree.jsons.items()
        if isinstance(content, list)
        and content
        and isinstance(content[0], dict)
        and {"data", "annotations"} <= content[0].keys()
    ]


def read_label_studio(tree: Tree, names: Sequence[str]) -> LabelledSet:
    brushes = find_brushes(tree)
    tasks = [(name, task) for name in names for task in tree.jsons[name]]
    used = {label for own in brushes.values() for label, _ in own}
    for _, task in tasks:
        used.update(label for result in results_of(task) for label in labels_of(result))
    classes = ObjectClasses(sorted(used))
    choices = [result for _, task in tasks for result in results_of(task, CHOICES)]
    questions = {result.get("from_name") for result in choices}
    entries = (
        read_task(tree, name, task, brushes, classes, len(questions) > 1)
        for name, task in tasks
    )
    others = {tree.below(path) for own in brushes.values() for _, path in own}
    has_objects = used or not choices
    return draw_objects(tree, classes if has_objects else None, entries, others)


def find_brushes(tree: Tree) -> Brushes:
    brushes: Brushes = {}
    for name in tree.files:
        match = BRUSH.fullmatch(name.rpartition("/")[2])
        if match:
            key = (int(match[1]), int(match[2]))
            brushes.setdefault(key, []).append((match[3], tree.path(name)))
    return brushes


def read_task(
    tree: Tree,
    name: str,
    task: dict,
    brushes: Brushes,
    classes: ObjectClasses,
    are_questions: bool,
) -> Entries:
    """Yield a task's image. are_questions: whether several are asked about whole images."""
    where = f"{tree.path(name)}, task {task.get('id')}"
    done = annotations_of(task)
    if not done:
        yield LeftOut("tasks without an annotation", where)
        return
    if len(done) > 1:
        yield LeftOut("second annotations of a task", where)
    image = find_image_of(tree, name, task)
    if image is None:
        yield LeftOut("tasks without an image", where)
        return
    own = brushes.get((task.get("id"), done[0].get("id")), [])
    results = results_of(task)
    if not own and any(result["type"] == "brushlabels" for result in results):
        raise UserError(
            f'{where}: has brush labels; export "Brush labels to PNG" into the same folder, too'
        )
    shapes = partial(studio_shapes, results, own, classes, where)
    labels: set[str] = set()
    for result in results_of(task, CHOICES):
        # "yes" is an answer to any of them
        question = f"{result.get('from_name')} " if are_questions else ""
        labels.update(f"{question}{choice}" for choice in labels_of(result))
    part = tree.part_of_image(image)
    yield MarkedImage(image, part, where, shapes, labels=tuple(sorted(labels)))


def annotations_of(task: dict) -> list[dict]:
    return [each for each in task["annotations"] if not each.get("was_cancelled")]


def results_of(task: dict, kinds: Sequence[str] = KINDS) -> list[dict]:
    """Return what the first annotation of a task has marked in these ways."""
    done = annotations_of(task)
    results = done[0].get("result", []) if done else []
    return [each for each in results if each.get("type") in kinds]


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
        is_elsewhere = value.startswith("/data/upload/") or "://" in value
        # an upload has letters of its own in front
        without_letters = re.sub(r"^[0-9a-f]{8}-", "", last)
        for given in (last if is_elsewhere else value, without_letters):
            image = tree.find_image(given, name, part)
            if image:
                return image
    return None


def studio_shapes(
    results: Sequence[dict],
    brushes: Sequence[tuple[str, Path]],
    classes: ObjectClasses,
    where: str,
    size: Size,
) -> Shapes:
    for result in results:
        kind = result["type"]
        if kind == "brushlabels":  # whose PNG is read below
            continue
        named = f"{where}, {kind}"
        outline = outline_of(result["value"], kind, size, named)
        for label in labels_of(result):
            yield Shape(classes.number(label, named), named, [outline])
    for label, path in brushes:
        inside = read_inside(path, size)
        yield Shape(classes.number(label, where), str(path), Area(0, 0, inside))


def outline_of(value: dict, kind: str, size: Size, where: str) -> np.ndarray:
    """Return the outline in pixels of a result, whose values are in % of the image."""
    numbers = partial(numbers_of, value.get, where)
    scale = np.array(size[::-1]) / 100
    degrees = float(value.get("rotation") or 0)
    if kind == "polygonlabels":
        return to_points(value.get("points"), where) * scale
    if kind == "rectanglelabels":
        left, top, width, height = numbers("x", "y", "width", "height")
        points = box_outline(left, top, left + width, top + height) * scale
        # about its first corner, which stays where it is
        around_middle = turned(points, degrees)
        return around_middle + points[0] - around_middle[0]
    x, y, across, down = numbers("x", "y", "radiusX", "radiusY")
    return turned(oval((x, y), (across, down)) * scale, degrees)
