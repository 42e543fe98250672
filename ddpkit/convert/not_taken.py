"""What is recognised and not taken: what it is, and what to do instead."""

import re

from ddpkit import files
from ddpkit.convert.tree import Tree, ending_of
from ddpkit.errors import UserError

BOXES = "boxes alone; segmentation needs outlines or masks"
UNPACK = "unpack it, and name the folder"
# By what is in the name of a file, or between the first letters of a file of text.
KNOWN = {
    '"segments_info"': "COCO panoptic; take instances_*.json, or a PNG of class numbers per image",
    '"_via_|"shape_attributes"': 'VIA; export it as COCO ("Export Annotations, COCO format")',
    '"classTitle"': 'Supervisely; export it as COCO, or by its app "Export as masks"',
    '"predicted_iou"': "SA-1B, whose masks have no classes",
    r'"team"|"darwin|"item": ?\{': 'V7 Darwin; export it as COCO, or as "Semantic mask"',
    '"data_row"|"Labeled Data"': "Labelbox; export it as COCO by labelbox.data.serialization",
    '"coordinates": ?\\{"|<bndbox>|"caption"': BOXES,
}
