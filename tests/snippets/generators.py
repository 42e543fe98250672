"""The project's own test of its loader, with a dataset.py that has a generator for augmentation."""

import os
import sys
from pathlib import Path

import pytest

MADE = "    def __getitem__("
USED = "        pixels, labels = self.transform(*self.open(index))\n"
FLIPPED = "        pixels = pixels.flip([-1] if RNG.random() < 0.5 else [])\n"


def statuses(copy: str) -> list[int]:
    """The test's status in a copy of the project, for segmentation.

    With dataset.py as it is, with a generator of the data set's, and with one for each sample.
    """
    os.chdir(copy)
    sys.path.insert(0, copy)
    for name in "main", "model", "dataset":  # to be imported from the copy
        del sys.modules[name]
    text = Path("dataset.py").read_text()
    assert text.count(MADE) == text.count(USED) == 1
    everywhere = text.replace("import torch\n", "import numpy as np\nimport torch\n", 1)
    everywhere = everywhere.replace(USED, USED + FLIPPED)
    once = everywhere.replace(MADE, "    rng = np.random.default_rng(0)\n\n" + MADE)
    each = "np.random.default_rng(torch.initial_seed())"
    found = []
    for changed in text, once.replace("RNG", "self.rng"), everywhere.replace("RNG", each):
        if not (pid := os.fork()):
            Path("dataset.py").write_text(changed)
            os._exit(pytest.main(["-q", "-k", "loader_workers", "-p", "no:cacheprovider"]))
        found.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return found
