"""Starts emulate.py in each Python of a machine with made-up GPUs, once torch is imported."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from after_torch import AfterTorch

sys.path.pop()


def start() -> None:
    import emulate

    emulate.start()


sys.meta_path.insert(0, AfterTorch(start))
