"""What benchmarks/gpu.py measures."""

import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"


def measured(name: str, *words: str) -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    import gpu

    gpu.SECONDS = 0.1
    return getattr(gpu, name)(*words)
