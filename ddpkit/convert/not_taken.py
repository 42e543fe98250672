"""What is recognised and not taken: what it is, and what to export or type instead."""

import re
from collections import Counter

from ddpkit.convert.tree import ENDINGS, Tree, ending_of, stem_of
from ddpkit.errors import UserError, shorten

TEXTS = re.compile(
    r"\.(nd|geo)?json$|\.(jsonl|manifest|xml|txt|csv|odgt|lst)$", re.IGNORECASE
)
# within limits, here and below: texts may be made so that a search in them takes hours
IMAGE = r"\S{1,999}\.(jpe?g|png|bmp|tiff?)"
SAVE = "save its images as DIR/train/CLASS/NUMBER.png"
# By what a text has in its name and within itself. Beside images and masks, too:
LISTS = {
    rf"\.(txt|lst){IMAGE}[ ,\t]+{IMAGE}\s": (
        "a list of images and masks; with each list as a CSV file training reads them: "
        "(echo image,mask; sed -E 's/[[:space:]]+/,/' FILE) > train.csv"
    ),
}
OF_TEXTS = {
    **LISTS,
    rf"\.lst(\d+\t[\d.-]+\t)?{IMAGE}": (
        "a list of MXNet's im2rec, or of images and labels; make a CSV file of each: (echo "
        'file,label; awk \'{print (NF > 2 ? $3 "," $2 + 0 : $1 "," $2)}\' FILE) > train.csv'
    ),
    '"(manualShape|box2d|poly2d|timeofday)"': (
        "BDD100K's, whose boxes have no outline; for its masks link images/10k as DIR/images and "
        "labels/sem_seg/masks as DIR/masks; a CSV file of an attribute, such as weather: python "
        "-c \"import json; print('file,label', *[x['name'] + ',' + x['attributes']['weather'] for "
        "x in json.load(open('FILE'))], sep='\\n')\" > train.csv"
    ),
    '"segments_info"': "COCO panoptic; take instances_*.json in its place",
    '"_via_|"region_attributes"': "VIA; export it as COCO (Export Annotations (COCO format))",
    '"classTitle"|"className"|"label_classes"': "Supervisely, SuperAnnotate, Hasty; export COCO",
    '"predicted_iou"': "SA-1B, whose masks have no classes",
    '"schema_ref"|"workview_url"': "V7 Darwin; export it as COCO, or as semantic masks",
    '"data_row"|"Labeled Data"': "Labelbox; convert it to COCO with the package labelbox",
    '"dm_format_version"|"label_id"': "Datumaro; datum convert -if datumaro -i . -f coco",
    '"annotation_id"': "Label Studio's JSON_MIN; export it as JSON",
    '"source-ref"|"image_url"': "a manifest; write columns file, label into a CSV file",
    r'\.json{\s*"classes": *\[[^]]{0,9999}\], *"labels": *{': (
        "FiftyOne; export it as ImageClassificationDirectoryTree"
    ),
    '"FeatureCollection"': "GeoJSON; export an image of class numbers for each image",
    r'"asset"|"coordinates": ?{|<bndbox>|"gtboxes"|\.txtimagesource|\.lst\d+(\t[\d.]+){5}': (
        "boxes, which have no outline; export polygons as COCO"
    ),
    '"caption"': "captions, which are no labels",
    r"\.txt(-?\d+[ ,;\t]+){9}": (
        "numbers in rows, as masks in text have; numpy.loadtxt reads it: save it as PNG"
    ),
    r"/train_test_split\.txt": (
        "lists as CUB-200-2011 has them; make a CSV file of them: (echo file,label,split; paste "
        "-d ' ' images.txt image_class_labels.txt train_test_split.txt | awk '{print $2 \",\" $4 "
        '"," ($6 ? "train" : "test")}\') > list.csv'
    ),
    r"/val_annotations\.txt": (
        "the validation images of Tiny ImageNet; make a CSV file of them: (echo file,label; awk "
        "'{print $1 \",\" $2}' FILE) > val.csv"
    ),
    rf"\.txt\s*\d+\s[^\n]{{1,9999}}\n{IMAGE}\s": (
        "a list with its length and names of columns, as CelebA's; make a CSV file of it: tail -n "
        "+2 FILE | sed -E 's/[[:space:]]+/,/g' > list.csv; if its first line does not name the "
        "images, add file, in front; if labels are -1 or 1, write 0 for -1"
    ),
    rf"\.txt{IMAGE}[ ,\t]+(?!([\d.]+\s+){{3}})\S|/images_\w+\.txt\d+ ": (
        "a list of images and labels; make a CSV file of each, with the line file,label above: "
        "(echo file,label; sed -E 's/[[:space:]]+/,/' FILE) > train.csv"
    ),
    r"/meta/(train|test)\.txt": (
        "lists as Food-101 has them; training reads them as CSV files: for p in train test; do "
        "(echo file,label; sed -E 's|(.*)/.*|images/&.jpg,\\1|' meta/$p.txt) > $p.csv; done"
    ),
    r"\.csv\ufffd\ufffd": "UTF-16; save it as UTF-8: iconv -f UTF-16 -t UTF-8 FILE > labels.csv",
    "<polygon>": "LabelMe's XML of 2012; only its JSON is read",
}
# By the names of other files
OF_NAMES = {
    r"/imagelabels\.mat$": (
        'lists as Flowers102 has them; make a CSV file of them: python -c "from scipy.io import '
        "loadmat; y = loadmat('imagelabels.mat')['labels'][0]; s = loadmat('setid.mat'); "
        "print('file,label,split', *[f'image_{n:05}.jpg,{y[n - 1]},{p}' for p, k in (('train', "
        "'trnid'), ('val', 'valid'), ('test', 'tstid')) for n in s[k][0]], sep='\\n')\" > list.csv"
    ),
    r"/cars_(train_)?annos\.mat$": (
        "lists as Stanford Cars has them; make a CSV file of each, with relative_im_path in place "
        "of fname in cars_annos.mat: python -c \"from scipy.io import loadmat; print('file,label', "
        "*map('{fname},{class}'.format_map, loadmat('FILE', simplify_cells=True)['annotations']), "
        "sep='\\n')\" > train.csv"
    ),
    r"_32x32\.mat$": f"SVHN's arrays; torchvision.datasets.SVHN reads them: {SAVE}",
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
    # in a folder of masks, or beside its image
    r"(?<![a-z])(masks?|labels?|seg\w*|ann(ot\w*)?|gt|truth|manual|instances?|semantic)"
    r"(?![a-z]).*\.(png|gif|tiff?|bmp)$": (
        "if it is a mask, name the folders images and masks, with a mask for each image; save "
        "numbers of classes, such as NUMBER // 1000 of instances, or R // 10 * 256 + G of ADE20K's "
        "colours; if 0 is no data, write void = 0 into classes.txt. If its folder is a class: "
        "python -m ddpkit check takes class folders"
    ),
}


def find_known(tree: Tree) -> str:
    """Return a line about a file that is known and not taken, of images last; or nothing.

    Raises a UserError of one of LISTS.
    """
    found = ""
    names = [tree.below(tree.named)] if tree.named else tree.files
    for name in sorted(names, key=lambda each: ending_of(each) in ENDINGS):
        shown = f"/{name}"
        kinds = OF_NAMES
        if TEXTS.search(name):
            shown += tree.start_of(name)
            kinds = LISTS if found else OF_TEXTS
        for pattern, what in kinds.items():
            if re.search(pattern, shown, re.IGNORECASE):
                line = f"{tree.path(name)}: {what}"
                if pattern in LISTS:
                    raise UserError(line)
                found = found or line
    return found


def labels_in_names(tree: Tree) -> str:
    """Return what to do if names may begin with labels, because they begin alike; or nothing."""
    words = Counter(re.split(r"[\W_]", stem_of(x))[0] for x in tree.in_folder(""))
    if not 1 < len(words) <= words.total() / 2:
        return ""
    return (
        f"if names begin with labels, such as {shorten([*words])}, list them in a CSV file with "
        "the columns file and label"
    )
