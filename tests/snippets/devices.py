"""Runs whose ranks claim devices that are not there."""

import os
from pathlib import Path

from forked import run

from ddpkit.ranks import devices


def claimed(folder: str, *names: str) -> list:
    """Statuses of ranks that claim to have the GPUs `names`, and what they print."""

    def claim() -> None:
        name = names[int(os.environ["RANK"])]
        note = {"device": "cuda" if name else "cpu", "gpu": name, "mistake": "", "place": "n"}
        devices.pick = lambda **_: (devices.CPU, note)

    output = f"{folder}/claimed"
    statuses = run(len(names), "--output-dir", f"{output}.run", patch=claim, output=output)
    return [statuses, *(Path(f"{output}.{end}").read_text() for end in ("out", "err"))]
