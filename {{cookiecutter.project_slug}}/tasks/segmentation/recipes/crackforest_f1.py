"""Print precision, recall and F1 of the cracks in validation images, with tolerances in pixels.

    ./launch.sh --eval-only --data data/crackforest --output-dir runs/crackforest
    python recipes/crackforest_f1.py runs/crackforest

The first command writes eval/predictions.csv, whose images this one segments with best.pt. A
predicted pixel is right if a labelled one is at most so many pixels away; a labelled pixel is found
if a predicted one is. Pixels of all images count together. Needs scipy.
"""

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.ndimage import distance_transform_edt

CRACK = 1  # its class number
TOLERANCES = 0, 2, 5  # pixels, in a straight line


def distances(cracks: np.ndarray) -> np.ndarray:
    """Return how far each pixel is from the nearest crack, in pixels."""
    if not cracks.any():
        return np.full(cracks.shape, np.inf)
    return distance_transform_edt(~cracks)


def cracks_in(path: Path) -> np.ndarray:
    """Return where a mask has cracks, (H, W)."""
    mask = Image.open(path, formats=["PNG"])
    return np.array(mask) == CRACK


run = Path(sys.argv[1])
with open(run / "eval" / "predictions.csv", encoding="utf-8") as file:
    images = [Path(row["path"]) for row in csv.DictReader(file)]
options = ["--checkpoint", str(run / "best.pt"), "--output", str(run / "f1")]
command = [sys.executable, "predict.py", *map(str, images), *options]
subprocess.run(command, check=True)
counts = np.zeros((len(TOLERANCES), 4), np.int64)
for image in images:
    name = f"{image.stem}.png"
    labelled = cracks_in(image.parents[1] / "masks" / name)
    predicted = cracks_in(run / "f1" / "masks" / name)
    for row, tolerance in zip(counts, TOLERANCES, strict=True):
        right = predicted & (distances(labelled) <= tolerance)
        found = labelled & (distances(predicted) <= tolerance)
        row += [right.sum(), predicted.sum(), found.sum(), labelled.sum()]
for (right, predicted, found, labelled), tolerance in zip(
    counts, TOLERANCES, strict=True
):
    precision = right / max(predicted, 1)
    recall = found / max(labelled, 1)
    f1 = 2 * precision * recall / max(precision + recall, 1e-9)
    figures = f"precision {precision:.3f}, recall {recall:.3f}, F1 {f1:.3f}"
    print(f"{tolerance} pixels: {figures}")
