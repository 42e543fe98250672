"""Print precision, recall and F1 of cracks, with tolerances of 0, 2 and 5 pixels.

    python recipes/crack_f1.py PREDICTED LABELLED

Folders of masks with the same names, in which 1 is a crack. A predicted pixel is right if a
labelled one is no farther than the tolerance; a labelled one is found if a predicted one is no
farther. Pixels of all images count together.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

TOLERANCES = 0, 2, 5  # pixels


def near(mask: np.ndarray, distance: int) -> np.ndarray:
    """Return which pixels are at most so far from one of the mask."""
    height, width = mask.shape
    padded = np.pad(mask, distance)
    found = np.zeros_like(mask)
    for y in range(-distance, distance + 1):
        for x in range(-distance, distance + 1):
            if x * x + y * y <= distance * distance:
                top = distance + y
                left = distance + x
                found |= padded[top : top + height, left : left + width]
    return found


def main() -> None:
    predicted, labelled = map(Path, sys.argv[1:])
    counts = np.zeros((len(TOLERANCES), 4), np.int64)
    for path in sorted(predicted.glob("*.png")):
        found = np.array(Image.open(path)) == 1
        truth = np.array(Image.open(labelled / path.name)) == 1
        for row, tolerance in zip(counts, TOLERANCES, strict=True):
            right = found & near(truth, tolerance)
            hit = truth & near(found, tolerance)
            row += [right.sum(), found.sum(), hit.sum(), truth.sum()]
    for (right, found, hit, truth), tolerance in zip(counts, TOLERANCES, strict=True):
        precision = right / max(found, 1)
        recall = hit / max(truth, 1)
        f1 = 2 * precision * recall / max(precision + recall, 1e-9)
        line = f"precision {precision:.3f}, recall {recall:.3f}, F1 {f1:.3f}"
        print(f"{tolerance} pixels: {line}")


if __name__ == "__main__":
    main()
