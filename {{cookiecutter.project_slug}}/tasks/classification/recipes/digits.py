"""Write scikit-learn's digits (1,797 images of 8 x 8 pixels) as folders of classes, data/digits.

The first 1,437 are to train, the other 360 for validation.
"""

from importlib.resources import files
from pathlib import Path

import numpy as np
from PIL import Image

table = np.loadtxt(
    str(files("sklearn.datasets.data") / "digits.csv.gz"), np.uint8, delimiter=","
)
for number, row in enumerate(table):
    folder = Path("data/digits", "train" if number < 1437 else "val", str(row[64]))
    folder.mkdir(parents=True, exist_ok=True)
    # From 0..16 to 0..240, with a margin, as validation looks at the middle 7/8 of an
    # image.
    image = Image.fromarray(np.pad(row[:64].reshape(8, 8) * 15, 1))
    image.save(folder / f"{number:04d}.png")
