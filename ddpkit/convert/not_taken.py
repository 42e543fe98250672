"""What is recognised and not taken: what it is, and what to export or type instead."""

import re

from ddpkit import files
from ddpkit.convert.tree import Tree
from ddpkit.errors import UserError

TEXTS = re.compile(r"\.(nd|geo)?json$|\.(jsonl|manifest|xml)$", re.IGNORECASE)
MOST = 100_000  # of a text, which is looked through
SAVE = "save its images as DIR/train/CLASS/NUMBER.png"
# By what a file has in its name, or a text within itself.
KNOWN = {
    '"segments_info"': "COCO panoptic; take instances_*.json in its place",
    '"_via_|"region_attributes"': "VIA; export it as COCO (Export Annotations (COCO format))",
    '"classTitle"': "Supervisely; export it as COCO, or as masks",
    '"predicted_iou"': "SA-1B, whose masks have no classes",
    '"schema_ref"|"workview_url"': "V7 Darwin; export it as COCO, or as semantic masks",
    '"data_row"|"Labeled Data"': "Labelbox; convert it to COCO with the package labelbox",
    '"dm_format_version"|"label_id"': "Datumaro; datum convert -if datumaro -i . -f coco",
    '"annotation_id"': "Label Studio's JSON_MIN; export it as JSON",
    '"source-ref"|"image_url"': "a manifest; write columns file, label into a CSV file",
    r'"classes": *\[.*"labels": *\{': "FiftyOne; export it as ImageClassificationDirectoryTree",
    '"FeatureCollection"': "GeoJSON; export an image of class numbers for each image",
    '"asset"|"coordinates": ?{|<bndbox>': "boxes, which have no outline; export polygons as COCO",
    '"caption"': "captions, which are no labels",
    "<polygon>": "LabelMe's XML of 2012; only its JSON is read",
    r"-idx[13]-ubyte|\.idx[13]": f"MNIST's files; torchvision.datasets.MNIST reads them: {SAVE}",
    r"/(data_batch_\d|test_batch|batches\.meta|cifar-\S+)$": (
        f"CIFAR's files; torchvision.datasets.CIFAR10 reads them: {SAVE}"
    ),
    r"\.parquet$": f"Parquet; datasets.load_dataset reads it: {SAVE}",
    r"\.npz$": f"arrays in one file; numpy.load reads it: {SAVE}, masks as DIR/masks/NUMBER.png",
    r"\.(nii|nii\.gz|dcm|nrrd|mha)$": "a volume; save its slices as PNG or TIFF",
    r"\.(mp4|avi|mov|mkv|webm)$": "a video; save its frames: ffmpeg -i VIDEO DIR/%06d.png",
    r"\.zip$": "an archive; unzip it, and name its folder",
    r"\.(tar|tgz|tar\.\w+)$": "an archive; unpack it with tar xf, and name its folder",
    r"\.(gz|7z|rar)$": "an archive; unpack it, and name its folder",
    r"\.(tfrecords?|h5|hdf5|mdb|pkl|pickle|rec)$": "no images; save images and masks as PNG",
}


def refuse_known(tree: Tree) -> None:
    """Raise a UserError if a file is of a kind that is known, and not taken."""
    names = [tree.below(tree.named)] if tree.named else tree.files
    for name in names:
        shown = f"/{name}"
        if TEXTS.search(name):
            content = files.read_file(tree.path(name))[:MOST]
            shown += content.decode("utf-8", "replace")
        for pattern, what in KNOWN.items():
            if re.search(pattern, shown, re.IGNORECASE):
                raise UserError(f"{tree.path(name)}: {what}")
