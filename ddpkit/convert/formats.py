"""Which format a folder of labels has."""

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ddpkit.convert import (
    arrays,
    coco,
    cvat,
    image_labels,
    label_studio,
    labelme,
    mask_files,
    not_taken,
    runs,
    yolo,
)
from ddpkit.convert.labels import LabelledSet
from ddpkit.convert.tree import Tree, ending_of, folder_of
from ddpkit.errors import UserError, shorten
from ddpkit.vision import places


@dataclass
class LabelFormat:
    """A way to write labels.

    name: as --format takes it. needs: what a folder has to have, for the message if it has not.
    find: the files or folders that show the format, or nothing. read: these -> their labels.
    """

    name: str
    what: str
    needs: str
    find: Callable[[Tree], Sequence]
    read: Callable[[Tree, Any], LabelledSet]


NO_LISTS = (
    "no CSV file in it names images that are there, and labels; its first line has to name the "
    "columns, such as file and label"
)
COCO = LabelFormat(
    "coco",
    "COCO JSON",
    f"no JSON file in it has {', '.join(coco.NEEDED)}",
    coco.find_coco,
    coco.read_coco,
)
RUNS = LabelFormat(
    "rle-csv",
    "Kaggle's runs (RLE)",
    f"no CSV file in it has runs in a column named one of {', '.join(runs.RUN_COLUMNS)}",
    runs.find_runs,
    runs.read_runs,
)
YOLO = LabelFormat(
    "yolo",
    "YOLO outlines, data.yaml",
    "no YAML file in it has names, and a train or val; nor is there a classes.txt, a name in each "
    "line",
    yolo.find_yolo,
    yolo.read_yolo,
)
# Those that a file of their own shows
CERTAIN = [
    COCO,
    LabelFormat(
        "labelme",
        "LabelMe JSON",
        "no JSON file in it has LabelMe's shapes",
        labelme.find_labelme,
        labelme.read_labelme,
    ),
    LabelFormat(
        "label-studio",
        "Label Studio's JSON, with PNGs of brushes",
        'no JSON file in it is a list of tasks with data and annotations; export as "JSON", too',
        label_studio.find_label_studio,
        label_studio.read_label_studio,
    ),
    YOLO,
    LabelFormat(
        "cvat-xml",
        "CVAT for images, XML",
        "no XML file in it has CVAT's annotations",
        cvat.find_cvat,
        cvat.read_cvat,
    ),
    LabelFormat(
        "cvat-mask",
        "CVAT Segmentation mask 1.1, labelmap.txt",
        "no labelmap.txt beside SegmentationClass in it",
        mask_files.find_cvat_masks,
        mask_files.read_cvat_masks,
    ),
    LabelFormat(
        "voc",
        "Pascal VOC, JPEGImages and SegmentationClass",
        "no JPEGImages beside SegmentationClass in it",
        mask_files.find_voc,
        mask_files.read_voc,
    ),
    LabelFormat(
        "cityscapes",
        "Cityscapes, gtFine labelIds",
        "no file in it ends with _gtFine_labelIds.png",
        mask_files.find_cityscapes,
        mask_files.read_cityscapes,
    ),
    LabelFormat(
        "camvid",
        "CamVid, trainannot or codes.txt",
        "no trainannot beside train in it, nor codes.txt beside labels",
        mask_files.find_camvid,
        mask_files.read_camvid,
    ),
    LabelFormat(
        "roboflow-mask",
        "Roboflow png-mask-semantic",
        "no _classes.csv in it has a column Pixel Value",
        mask_files.find_roboflow,
        mask_files.read_roboflow,
    ),
    LabelFormat(
        "roboflow-classes",
        "Roboflow _classes.csv, labels of images",
        NO_LISTS,
        image_labels.find_several,
        image_labels.read_lists,
    ),
    RUNS,
    LabelFormat(
        "huggingface",
        "image folder with metadata.csv or .jsonl",
        NO_LISTS,
        image_labels.find_metadata,
        image_labels.read_lists,
    ),
]
# Those that only names show: if there is none of the others
LIKELY = [
    LabelFormat(
        "class-masks",
        "images, and masks/CLASS in black and white",
        "no masks/CLASS beside images in it",
        mask_files.find_class_masks,
        mask_files.read_class_masks,
    ),
    LabelFormat(
        "jpeg-masks",
        "images, and masks of JPEG in black and white",
        "no masks of JPEG beside images in it",
        mask_files.find_jpeg_masks,
        mask_files.read_class_masks,
    ),
    LabelFormat(
        "arrays",
        "masks in .mat or .npy beside images",
        "no .mat or .npy file in it is named as an image",
        arrays.find_arrays,
        arrays.read_arrays,
    ),
    LabelFormat(
        "csv",
        "CSV of images and labels",
        NO_LISTS,
        image_labels.find_lists,
        image_labels.read_lists,
    ),
]


def variant(format: LabelFormat, name: str, what: str, **options: bool) -> LabelFormat:
    """Return a format of which nothing shows how it is meant, read with these options."""
    return replace(
        format,
        name=f"{format.name}-{name}",
        what=f"{format.what}, {what}",
        read=partial(format.read, **options),
    )


# Those that have to be named
NAMED = [
    variant(COCO, "objects", "with crowds as objects", are_objects=True),
    variant(COCO, "void", "with crowds as void", are_objects=False),
    variant(YOLO, "outlines", "of boxes, too", are_outlines=True),
    variant(RUNS, "rows", "along the rows", by_columns=False),
    variant(RUNS, "columns", "down the columns", by_columns=True),
]
FORMATS = {format.name: format for format in (*CERTAIN, *LIKELY, *NAMED)}


def find_label_format(tree: Tree) -> LabelFormat:
    """Return the format of a folder; a UserError if it has none, or several."""
    for group in CERTAIN, LIKELY:
        fitting = []
        for format in group:
            shown = format.find(tree)
            # of a named file, what lies beside it is not asked for
            if tree.below(tree.named) in shown if tree.named else shown:
                fitting.append(format)
        if len(fitting) > 1:
            names = [format.name for format in fitting]
            raise UserError(
                f"{tree.root}: has {' and '.join(names)}; add --format {names[0]}, or name the "
                "folder of one of them"
            )
        if fitting:
            return fitting[0]
    tree.refuse_broken()
    known = not_taken.find_known(tree)
    refuse_layout(tree, has_masks=True)
    image_labels.refuse_unclear(tree)
    if known:
        raise UserError(known)
    refuse_layout(tree, has_masks=False)
    endings = Counter(ending_of(name) or "without ending" for name in tree.files)
    listed = [f"{count} {ending}" for ending, count in endings.most_common()]
    hint = (
        not_taken.labels_in_names(tree) or f"--format takes one of {', '.join(FORMATS)}"
    )
    raise UserError(
        f"{tree.named or tree.root}: unknown format ({shorten(listed) or 'no files'}); "
        f"{hint}"
    )


def read_labels(format: LabelFormat, tree: Tree) -> LabelledSet:
    """Return the labels in a folder; a UserError if it has none of this format."""
    shown = format.find(tree)
    if not shown or ending_of(str(shown[0])) == ".json":
        tree.refuse_broken()
    if not shown:
        raise UserError(f"{tree.root}: {format.needs}")
    return format.read(tree, shown)


def refuse_layout(tree: Tree, has_masks: bool) -> None:
    """Raise a UserError if training takes the folder in which all images are as it is."""
    around = [folder_of(name) for name in tree.in_folder("")]
    root = tree.path(os.path.commonpath(around or [""]))
    try:
        with contextlib.redirect_stdout(None):  # what it says of folders
            place = places.find_places(root, has_masks, places.PARTS)["train"]
    except UserError:
        return
    folders = places.inner_folders(place.images)
    condition = f"if {shorten([each.name for each in folders])} are classes, it "
    if has_masks:
        folders = [place.images, place.masks or root]
        condition = ""
    if len(folders) > 1 and all(map(places.any_image, folders)):
        raise UserError(
            f"{root}: {condition}needs no conversion: python -m ddpkit check {root}"
        )
