"""Write photographs of hands that sign a digit (2,062 of 100 x 100 pixels) as folders of classes.

data/signs gets 69 or 70 of each digit to train and 342 for validation, data/signs10 ten of each
and 171. The argument is the folder of the clone. Each of 218 students signed all ten digits, so
hands of many are in both parts: the figures compare flags, not this network with others.
"""

import shutil
import sys
from pathlib import Path

source = Path(sys.argv[1], "Dataset")
val = []
for folder in sorted(source.iterdir()):
    photos = sorted(folder.glob("*.JPG"))
    val += photos[2::3]
    others = [photo for number, photo in enumerate(photos) if number % 3 != 2]
    few = others[:: len(others) // 10][:10]
    for name, chosen in (("signs", others[::2]), ("signs10", few)):
        to = Path("data", name, "train", folder.name)
        to.mkdir(parents=True, exist_ok=True)
        for photo in chosen:
            shutil.copy(photo, to)
for name, step in (("signs", 2), ("signs10", 4)):
    for photo in val[::step]:
        to = Path("data", name, "val", photo.parent.name)
        to.mkdir(parents=True, exist_ok=True)
        shutil.copy(photo, to)
