"""What a run writes to its output folder: the names of its files."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

# The folders of TensorBoard's files, and these
EPOCHS = "epochs"
STEPS = "steps"
EVENTS = "events.out.tfevents.*"
# of best.pt
IMAGES = ("examples.png", "per_class.csv", "confusion.png", "worst.png", "worst.csv")
SHOWN = ("curves.png", *IMAGES)
EVALUATED = (*IMAGES, "predictions.csv", "thresholds.csv")  # in eval/
SAVES = ("last.pt", "last-1.pt")  # newest first
NAMES = "best.pt best-1.pt *.pt.corrupt metrics.csv tracker.json args.json curves.png"
OWN_FILES = [  # what `--resume never` removes
    *SAVES,
    *NAMES.split(),
    *IMAGES,
    *(f"eval/{name}" for name in EVALUATED),
    f"{EPOCHS}/{EVENTS}",
    f"{STEPS}/{EVENTS}",
    EVENTS,  # of earlier versions
]


def remove_images(folder: Path, names: Iterable[str] = IMAGES) -> None:
    """Remove the images of best.pt, before another file gets that name."""
    for name in names:
        with contextlib.suppress(PermissionError):  # on Windows, of one that is open
            (folder / name).unlink(missing_ok=True)
