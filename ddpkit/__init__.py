"""What lies below a training script that uses DDP. The names in DOOR, such as ddpkit.Run, are all
that a project uses, and follow semantic versions; each says what it takes, returns and raises. What
else is here may change.

The parts; the first line of each file names its subject:

launch      launch.sh: starts the ranks, passes on signals, restarts, exits as a rank did
ranks/      processes that train together: how they meet, stop, fail and end; protocol.py draws it
data/       from files to batches on the device, with random numbers of each sample's own
run/        one training run: flags, checkpoints, the loop, metrics, reports, predict.py
tools/      python -m ddpkit COMMAND: none is imported by training
"""

import importlib
from typing import TYPE_CHECKING

from ddpkit.version import __version__

if TYPE_CHECKING:
    from ddpkit.data.augment import (
        RandomResizedCrop,
        RandomScaleCrop,
        ResizedCenterCrop,
        parse_augment,
    )
    from ddpkit.data.class_counts import class_weights
    from ddpkit.data.demo import demo_classes, demo_masks
    from ddpkit.data.folders import ImageFiles, MaskFiles, find_classes, find_masks
    from ddpkit.data.images import LazyImage
    from ddpkit.data.loading import train_loader, val_loader
    from ddpkit.data.sources import eval_batches
    from ddpkit.errors import NoLabelsError, UserError
    from ddpkit.ranks.distributed import rank, rank_zero_first, rendezvous
    from ddpkit.run.checkpoint import open_model
    from ddpkit.run.criterion import Criterion
    from ddpkit.run.flags import Parser
    from ddpkit.run.folder import RunFolder
    from ddpkit.run.labels import BinaryCrossEntropy, label_metrics
    from ddpkit.run.loop import Run
    from ddpkit.run.machine import configure
    from ddpkit.run.metrics import compute_metrics
    from ddpkit.run.mistakes import TopLosses
    from ddpkit.run.networks import adapt_input
    from ddpkit.run.outputs import to_logits
    from ddpkit.run.pictures import draw_masks
    from ddpkit.run.predicting import Predictor
    from ddpkit.run.pretrained import load_pretrained
    from ddpkit.run.reporting import Reporter
    from ddpkit.run.resuming import Checkpoints, explaining, stopping
    from ddpkit.run.starting import before_imports, run_main
    from ddpkit.run.tiles import sliding_window, sliding_window_rows

# by module, which is imported when one of them is first used: no torch until then
NAMES = {
    "data.augment": "RandomResizedCrop RandomScaleCrop ResizedCenterCrop parse_augment",
    "data.class_counts": "class_weights",
    "data.demo": "demo_classes demo_masks",
    "data.folders": "ImageFiles MaskFiles find_classes find_masks",
    "data.images": "LazyImage",
    "data.loading": "train_loader val_loader",
    "data.sources": "eval_batches",
    "errors": "NoLabelsError UserError",
    "ranks.distributed": "rank rank_zero_first rendezvous",
    "run.checkpoint": "open_model",
    "run.criterion": "Criterion",
    "run.flags": "Parser",
    "run.folder": "RunFolder",
    "run.loop": "Run",
    "run.labels": "BinaryCrossEntropy label_metrics",
    "run.machine": "configure",
    "run.metrics": "compute_metrics",
    "run.mistakes": "TopLosses",
    "run.networks": "adapt_input",
    "run.outputs": "to_logits",
    "run.pictures": "draw_masks",
    "run.predicting": "Predictor",
    "run.pretrained": "load_pretrained",
    "run.reporting": "Reporter",
    "run.resuming": "Checkpoints explaining stopping",
    "run.starting": "before_imports run_main",
    "run.tiles": "sliding_window sliding_window_rows",
}
DOOR = {name: module for module, names in NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in DOOR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(
        importlib.import_module(f"ddpkit.{DOOR[name]}"), name
    )
    return value
