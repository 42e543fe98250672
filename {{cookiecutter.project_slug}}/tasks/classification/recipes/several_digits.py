"""Write images of one to three digits of scikit-learn, with all their labels: data/several_digits.

2,000 to train and 500 for validation, of 24 x 24 pixels; train.csv and val.csv have the labels.
Digits of the package's first 1,437 are in training images alone, others in validation alone.
"""

import csv
import random
from importlib.resources import files
from pathlib import Path

import numpy as np
from PIL import Image

CELLS = [(top, left) for top in (0, 12) for left in (0, 12)]
table = np.loadtxt(
    str(files("sklearn.datasets.data") / "digits.csv.gz"), np.uint8, delimiter=","
)
rng = random.Random(0)
folder = Path("data/several_digits")
for part, count, rows in (("train", 2000, table[:1437]), ("val", 500, table[1437:])):
    (folder / part).mkdir(parents=True, exist_ok=True)
    with open(folder / f"{part}.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file", "label"])
        for number in range(count):
            pixels = np.zeros((24, 24), np.uint8)
            labels = set()
            for top, left in rng.sample(CELLS, rng.randrange(1, 4)):
                row = rows[rng.randrange(len(rows))]
                # anywhere in its quarter of the image
                y = top + rng.randrange(5)
                x = left + rng.randrange(5)
                # from 0..16 to 0..240
                pixels[y : y + 8, x : x + 8] = row[:64].reshape(8, 8) * 15
                labels.add(str(row[64]))
            name = f"{part}/{number:04d}.png"
            Image.fromarray(pixels).save(folder / name)
            writer.writerow([name, ";".join(sorted(labels))])
