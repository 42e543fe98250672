"""Write the solar cells of the package elpv-dataset (2,624 images of 300 x 300 pixels) as folders.

data/elpv gets 1,968 to train and 656 for validation. A cell whose probability of a defect is above
1/2 is in `defective`, any other in `functional`.
"""

import shutil
from importlib.resources import files
from pathlib import Path

source = Path(str(files("elpv_dataset") / "data"))
# Each line: path, probability (0, 1/3, 2/3 or 1), mono or poly.
cells = [line.split() for line in (source / "labels.csv").read_text().splitlines()]
# By wafer and probability, so that every fourth is a quarter of each: 268 mono, 388 poly.
cells.sort(key=lambda cell: (cell[2], float(cell[1]), cell[0]))
for number, (path, probability, _) in enumerate(cells):
    part = "val" if number % 4 == 2 else "train"
    name = "defective" if float(probability) > 0.5 else "functional"
    folder = Path("data/elpv", part, name)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / path, folder)
