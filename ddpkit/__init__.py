"""What lies below a training script that uses DDP. The names in DOOR, such as ddpkit.Run, are all
that a project uses, and follow semantic versions; each says what it takes, returns and raises. What
else is here may change.

In the order in which a run meets it:

errors                a mistake of the user's, or a disk that does not answer, printed as one line
files                 files and folders that appear whole or not at all; disks are tried again
launch                launch.sh: starts the ranks, passes on signals, restarts, exits as a rank did
copying               python -m ddpkit copy: the installed library into a project, and out again
replay                ./launch.sh -m ddpkit.replay EPOCH:STEP: a step of a run again, in a debugger

ranks/                processes that train together
  process             how a process ends, with its launcher, debugger or rank; its one thread
  environment         the variables that launchers and SLURM set; how many GPUs there are
  meeting             the store of the ranks, and their meeting there: who is missing, or twice
  devices             which GPU is a rank's, and what carries its collectives
  distributed         the process group and its collectives: meet, gather, from_rank_zero, ...
  explaining          where all ranks are, and why they wait: the block that a hang prints
  failures            an error on one rank ends all, and is printed once, in a line if it is known
  replicas            exact mean gradients; DDP around the network; equal weights on all ranks
  stopping            a signal stops all ranks after the same step; a rank that hangs is shown
  protocol            all that ranks and launcher agree on: statuses, keys, seconds, variables

data/                 from files to batches on the device
  samples             random numbers that depend on seed, epoch and sample alone; seeded samples
  folders             which samples a folder holds, and the data sets of them: ImageFiles, MaskFiles
  format              DIR/data.json: what kind of images, and how they are normalised
  images              decoding, JPEGs at a fraction of their size; at full depth if wanted
  masks               which class each value or colour of a mask means: classes.txt
  prepared            what prepare_data.py writes: all images decoded, in one file
  class_counts        how often each class occurs: said before training; weights, balanced draws
  loading             who loads which sample; loader workers; batches on the device, normalised

run/                  one training run, its files and its reports
  starting            the first and the last line of a script: errors of ranks as one line
  flags               argparse: errors on one rank only, defaults in the help
  machine             CPUs, threads, loader workers
  folder              --output-dir: which checkpoint to continue from, which saves stay
  checkpoint          plain types, checked before they are read; optimizers, by names of weights
  pretrained          --weights
  sharded             --fsdp: each rank trains a part of the weights
  loop                class Run: what a training loop calls; counts, saves, resumes
  metrics             loss and torchmetrics over all ranks; what the model gets wrong
  pictures            colours of classes, and all that is drawn: curves.png, examples.png, ...
  predicting          image sizes that a network takes, tiles of large ones; predict.py's images
  reporting           lines, progress bar, metrics.csv, TensorBoard, a tracker, waiting for batches

check/                tools beside training
  survey              check_data.py: every file of a data set; check.png and check.csv
  preflight           ./launch.sh --check: the table of what the ranks have found, and its verdict
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpkit.data.class_counts import class_weights
    from ddpkit.data.folders import ImageFiles, MaskFiles, find_classes, find_masks
    from ddpkit.data.images import LazyImage
    from ddpkit.data.loading import Collate, TrainSampler, ValSampler, batches, workers
    from ddpkit.data.samples import Seeded
    from ddpkit.errors import UserError
    from ddpkit.files import filling
    from ddpkit.ranks.distributed import rank, rank_zero_first
    from ddpkit.ranks.replicas import wrap
    from ddpkit.run.checkpoint import open_model
    from ddpkit.run.flags import Parser, at_least
    from ddpkit.run.folder import Folder
    from ddpkit.run.loop import Run
    from ddpkit.run.machine import configure, meet, zeros
    from ddpkit.run.metrics import Worst, compute, criterion
    from ddpkit.run.pictures import draw_masks
    from ddpkit.run.predicting import Predictor, bands, fit_input, freeze_unused, in_tiles
    from ddpkit.run.pretrained import load_weights
    from ddpkit.run.sharded import shard
    from ddpkit.run.starting import prepare, start

__version__ = "1.0.0"

NAMES = {  # by module, which is imported when one of them is first used: no torch until then
    "data.class_counts": "class_weights",
    "data.folders": "ImageFiles MaskFiles find_classes find_masks",
    "data.images": "LazyImage",
    "data.loading": "Collate TrainSampler ValSampler batches workers",
    "data.samples": "Seeded",
    "errors": "UserError",
    "files": "filling",
    "ranks.distributed": "rank rank_zero_first",
    "ranks.replicas": "wrap",
    "run.checkpoint": "open_model",
    "run.flags": "Parser at_least",
    "run.folder": "Folder",
    "run.loop": "Run",
    "run.machine": "configure meet zeros",
    "run.metrics": "Worst compute criterion",
    "run.pictures": "draw_masks",
    "run.predicting": "Predictor bands fit_input freeze_unused in_tiles",
    "run.pretrained": "load_weights",
    "run.sharded": "shard",
    "run.starting": "prepare start",
}
DOOR = {name: module for module, names in NAMES.items() for name in names.split()}
__all__ = [*DOOR]


def __getattr__(name: str) -> object:
    if name not in DOOR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"ddpkit.{DOOR[name]}"), name)
    return value
