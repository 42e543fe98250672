"""The runtime library for PyTorch DDP training scripts: launching, exact resume, hang reports.

The names in DOOR, such as ddpkit.Run, are all that a project uses, and follow semantic versions;
each says what it takes, returns and raises. What else is here may change.

Three layers; each imports those above it alone. The first line of each file names its subject.

The core, for any script that uses DDP; torch and numpy are enough:
launch      launch.sh: starts the ranks, passes on signals, restarts, exits as a rank did
ranks/      processes that train together: how they meet, stop, fail and end; protocol.py draws it
data/       from a dataset to batches on the device, with random numbers of each sample's own
run/        one training run: flags, checkpoints, the loop over steps and epochs, metrics

vision/     images, masks, networks, what a run reports and draws, predict.py; in tools/ commands,
            which training does not import
convert/    labels of other programs, to the folders that vision reads
"""

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from ddpkit.version import __version__

if TYPE_CHECKING:
    from ddpkit.data.loading import train_loader, val_loader
    from ddpkit.data.sources import eval_batches
    from ddpkit.errors import NoLabelsError, UserError
    from ddpkit.ranks.distributed import rank_zero_first, rendezvous
    from ddpkit.ranks.explaining import on_all_ranks
    from ddpkit.ranks.virtual import VirtualRanks
    from ddpkit.run.criterion import Criterion
    from ddpkit.run.flags import Parser
    from ddpkit.run.folder import RunFolder
    from ddpkit.run.loop import Run
    from ddpkit.run.outputs import to_logits
    from ddpkit.run.resuming import Checkpoints
    from ddpkit.run.settings import configure
    from ddpkit.run.starting import before_imports, run_main
    from ddpkit.vision.augment import (
        RandomResizedCrop,
        RandomScaleCrop,
        ResizedCenterCrop,
        parse_augment,
    )
    from ddpkit.vision.class_counts import class_weights
    from ddpkit.vision.demo import demo_set
    from ddpkit.vision.folders import ImageFiles, MaskFiles, find_classes, find_masks
    from ddpkit.vision.images import LazyImage
    from ddpkit.vision.metrics import compute_metrics
    from ddpkit.vision.mistakes import TopLosses
    from ddpkit.vision.multilabel import BinaryCrossEntropy, label_metrics
    from ddpkit.vision.networks import adapt_input
    from ddpkit.vision.pictures import draw_masks
    from ddpkit.vision.predicting import Predictor, open_model
    from ddpkit.vision.pretrained import load_pretrained
    from ddpkit.vision.reporting import Reporter
    from ddpkit.vision.tiles import sliding_window

# By name, the module that is imported when it is first used: no torch until then. It is read here,
# from the lines above, which type checkers read.
DOOR = {
    alias.name: node.module or ""
    for block in ast.parse(Path(__file__).read_text("utf-8")).body
    if isinstance(block, ast.If)
    for node in block.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = [*DOOR]


def __getattr__(name: str) -> object:
    if name not in DOOR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(DOOR[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
