"""What is recognised and not taken: what it is, and what to export or type instead."""

import re
from collections import Counter

from ddpkit import files
from ddpkit.convert.tree import Tree, stem_of
from ddpkit.errors import UserError, shorten

TEXTS = re.compile(r"\.(nd|geo)?json$|\.(jsonl|manifest|xml|txt)$", re.IGNORECASE)
MOST = 100_000  # of a text, which is looked through
SAVE = "save its images as DIR/train/CLASS/NUMBER.png"
# By what a file has in its name, or a text within itself.
KNOWN = {
    '"segments_info"': "COCO panoptic; take instances_*.json in its place",
    '"_via_|"region_attributes"': "VIA; export it as COCO (Export Annotations (COCO format))",
    '"classTitle"|"className"|"label_classes"': "Supervisely, SuperAnnotate, Hasty; export COCO",
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
    r"\.txt(-?\d+[ ,;\t]+){9}": (
        "numbers in rows, as masks in text have; numpy.loadtxt reads it: save it as PNG"
    ),
    r"\.txt\S+\.(jpe?g|png|bmp|tiff?)[ ,\t]+\S": (
        "a list of images and labels; make a CSV file of it, with the line file,label above: "
        "(echo file,label; tr ' ' , < LIST) > list.csv"
    ),
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


# of a folder of masks, or of one beside its image
MASK = re.compile(
    r"(?<![a-z])(masks?|labels?|seg\w*|ann(ot\w*)?|gt|truth|manual|instances?|semantic)"
    r"(?![a-z]).*\.(png|gif|tiff?|bmp)$",
    re.IGNORECASE,
)


def refuse_known(tree: Tree) -> None:
    """Raise a UserError if a file is of a kind that is known, and not taken, or may be a mask."""
    names = [tree.below(tree.named)] if tree.named else tree.files
    for name in names:
        shown = f"/{name}"
        if TEXTS.search(name):
            text = files.read_text(tree.path(name), "replace", files.OF_DATA)
            shown += text[:MOST]
        for pattern, what in KNOWN.items():
            if re.search(pattern, shown, re.IGNORECASE):
                raise UserError(f"{tree.path(name)}: {what}")
    for name in filter(MASK.search, names):
        raise UserError(
            f"{tree.root}: if {name} is a mask, name the folders images and masks, with a mask for "
            "each image; save numbers of classes, such as NUMBER // 1000 of instances, or R // 10 "
            "* 256 + G of ADE20K's colours; if 0 is no data, write void = 0 into classes.txt. If "
            "its folder is a class: python -m ddpkit check takes class folders"
        )


def labels_in_names(tree: Tree) -> str:
    """Return what to do if names may begin with labels, because they begin alike; or nothing."""
    words = Counter(re.split(r"[\W_]", stem_of(x))[0] for x in tree.in_folder(""))
    if not 1 < len(words) <= words.total() / 2:
        return ""
    return (
        f"if names begin with labels, such as {shorten([*words])}, list them in a CSV file with "
        "the columns file and label"
    )
