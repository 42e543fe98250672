"""Write scikit-learn's digits (1,797 images of 8 x 8 pixels) as folders of classes under data/.

data/digits: the first 1,437 to train, the other 360 for validation.
data/digits-0-3 and data/digits-4-9: of those only these digits; of 4 to 9 ten each to train.
"""

from collections import Counter
from importlib.resources import files
from pathlib import Path

import numpy as np
from PIL import Image

table = np.loadtxt(str(files("sklearn.datasets.data") / "digits.csv.gz"), np.uint8, delimiter=",")
seen: Counter[int] = Counter()
for number, row in enumerate(table):
    pixels, digit, part = row[:64].reshape(8, 8), int(row[64]), "train" if number < 1437 else "val"
    seen[digit] += 1
    names = ["digits"]
    if digit < 4:
        names.append("digits-0-3")
    elif part == "val" or seen[digit] <= 10:
        names.append("digits-4-9")
    # From 0..16 to 0..240, with a margin, as validation looks at the middle 7/8 of an image.
    image = Image.fromarray(np.pad(pixels * 15, 1))
    for name in names:
        folder = Path("data", name, part, str(digit))
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{number:04d}.png")
