"""Which format a folder of labels has."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddpkit.convert import (
    arrays,
    coco,
    cvat,
    image_labels,
    label_studio,
    labelme,
    mask_files,
    runs,
    yolo,
)
from ddpkit.convert.labels import LabelledSet
from ddpkit.convert.tree import Tree, ending_of
from ddpkit.errors import UserError, shorten


@dataclass
class LabelFormat:
    """name: as --format takes it. find: what of it lies in a folder, or nothing."""

    name: str
    what: str
    find: Callable[[Tree], Sequence]
    read: Callable[[Tree], LabelledSet]
    # whether it is named alone, because nothing shows it
    is_hidden: bool = False


def nothing(tree: Tree) -> Sequence:
    return ()


# Those that a file of their own shows
CERTAIN = [
    LabelFormat("coco", "COCO JSON", coco.find_coco, coco.read_coco),
    LabelFormat("labelme", "LabelMe JSON", labelme.find_labelme, labelme.read_labelme),
    LabelFormat(
        "label-studio",
        "Label Studio's JSON, with PNGs of brushes",
        label_studio.find_label_studio,
        label_studio.read_label_studio,
    ),
    LabelFormat("yolo", "YOLO outlines, data.yaml", yolo.find_yolo, yolo.read_yolo),
    LabelFormat("cvat-xml", "CVAT for images, XML", cvat.find_cvat, cvat.read_cvat),
    LabelFormat(
        "cvat-mask",
        "CVAT Segmentation mask 1.1, labelmap.txt",
        mask_files.find_cvat_masks,
        mask_files.read_cvat_masks,
    ),
    LabelFormat(
        "voc",
        "Pascal VOC, JPEGImages and SegmentationClass",
        mask_files.find_voc,
        mask_files.read_voc,
    ),
    LabelFormat(
        "cityscapes",
        "Cityscapes, gtFine labelIds",
        mask_files.find_cityscapes,
        mask_files.read_cityscapes,
    ),
    LabelFormat(
        "camvid",
        "CamVid, trainannot or codes.txt",
        mask_files.find_camvid,
        mask_files.read_camvid,
    ),
    LabelFormat(
        "roboflow-mask",
        "Roboflow png-mask-semantic",
        mask_files.find_roboflow,
        mask_files.read_roboflow,
    ),
    LabelFormat(
        "roboflow-classes",
        "Roboflow _classes.csv, labels of images",
        image_labels.find_several,
        image_labels.read_several,
    ),
    LabelFormat(
        "rle-csv",
        "Kaggle's runs (RLE) down the columns",
        runs.find_runs,
        runs.read_runs,
    ),
    LabelFormat(
        "rle-csv-rows",
        "the same along the rows",
        nothing,
        runs.read_runs_by_rows,
        is_hidden=True,
    ),
    LabelFormat(
        "huggingface",
        "image folder with metadata.csv or .jsonl",
        image_labels.find_metadata,
        image_labels.read_metadata,
    ),
]
# Those that only names show: if there is none of the others
LIKELY = [
    LabelFormat(
        "class-masks",
        "images, and masks/CLASS in black and white",
        mask_files.find_class_masks,
        mask_files.read_class_masks,
    ),
    LabelFormat(
        "jpeg-masks",
        "images, and masks of JPEG in black and white",
        arrays.find_jpeg_masks,
        arrays.read_jpeg_masks,
    ),
    LabelFormat(
        "arrays",
        "masks in .mat or .npy beside images",
        arrays.find_arrays,
        arrays.read_arrays,
    ),
    LabelFormat(
        "csv",
        "CSV of images and labels",
        image_labels.find_lists,
        image_labels.read_kaggle_lists,
    ),
]
FORMATS = {format.name: format for format in (*CERTAIN, *LIKELY)}


def find_label_format(tree: Tree) -> LabelFormat:
    """Return the format of a folder; a UserError if it has none, or several."""
    for group in CERTAIN, LIKELY:
        found = [format for format in group if is_there(format, tree)]
        if len(found) > 1:
            names = [format.name for format in found]
            raise UserError(
                f"{tree.root}: has {' and '.join(names)}; add --format {names[0]}, or name the "
                "folder of one of them"
            )
        if found:
            return found[0]
    tree.refuse_broken()
    if as_training_takes_it(tree):
        raise UserError(
            f"{tree.root}: is as training takes it: python -m ddpkit check {tree.root}"
        )
    image_labels.refuse_unclear(tree)
    endings = Counter(ending_of(name) or "without ending" for name in tree.files)
    there = [f"{count} {ending}" for ending, count in endings.most_common()]
    raise UserError(
        f"{tree.named or tree.root}: no format that is known ({shorten(there) or 'no files'}); "
        f"--format takes one of {', '.join(FORMATS)}"
    )


def is_there(format: LabelFormat, tree: Tree) -> bool:
    found = format.find(tree)
    # of a named file, what lies beside it is not asked for
    return tree.below(tree.named) in found if tree.named else bool(found)


def as_training_takes_it(tree: Tree) -> bool:
    places = set(tree.folders) | set(tree.files)
    has_pairs = any({f"{p}images", f"{p}masks"} <= places for p in ("", "train/"))
    has_list = "train.csv" in places and "file" in tree.first_row("train.csv")
    return has_pairs or has_list
