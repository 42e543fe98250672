"""The machinery. `import engine` is its door: the names in DOOR, such as engine.Run, are all that a
project uses; each says what it takes, returns and raises. What else is here may change.

In the order in which a run meets it:

errors                a mistake of the user's, or a disk that does not answer, printed as one line
files                 files and folders that appear whole or not at all; disks are tried again
replay                python -m engine.replay EPOCH:STEP: a step of a run again, in a debugger

ranks/                processes that train together
  process             how a process ends, with its launcher, debugger or rank; its one thread
  launcher            launch.sh: starts the ranks, passes on signals, restarts, exits as a rank did
  environment         the variables that launchers and SLURM set; how many GPUs there are
  meeting             the store of the ranks, and their meeting there: who is missing, or twice
  devices             which GPU is a rank's, and what carries its collectives
  distributed         the process group and its collectives: reduce_tensor, from_rank_zero, say, ...
  explaining          where all ranks are, and why they wait: the block that a hang prints
  where               asks a running job for that block, as a command
  failures            an error on one rank ends all, and is printed once, in a line if it is known
  replicas            exact mean gradients; DDP around the network; equal weights on all ranks
  stopping            a signal stops all ranks after the same step; a rank that hangs is shown
  protocol            all that ranks and launcher agree on: statuses, keys, seconds, variables

data/                 from files to batches on the device
  samples             random numbers that depend on seed, epoch and sample alone; seeded samples
  folders             which samples a folder holds, and the data sets of them: ImageFiles, MaskFiles
  format              DIR/data.json: what kind of images, and how they are normalised
  images              decoding no more of each image than is needed
  bit_depth           images of more than 8 bits, or of any number of channels
  masks               which class each value or colour of a mask means: classes.txt
  prepared            what prepare_data.py writes: all images decoded, in one file
  class_counts        how often each class occurs: said before training; weights, balanced draws
  loading             who loads which sample; loader workers; batches in shared memory

run/                  one training run, its files and its reports
  starting            the first and the last line of a script: errors of ranks as one line
  flags               argparse: errors on one rank only, defaults in the help
  machine             CPUs, threads, loader workers
  folder              --output-dir: which checkpoint to continue from, which saves stay
  checkpoint          plain types and a checksum; states of optimizers, by names of weights
  pretrained          --weights
  sharded             --fsdp: each rank trains a part of the weights
  loop                class Run: what a training loop calls; counts, saves, resumes
  metrics             loss and torchmetrics over all ranks; what the model gets wrong
  pictures            colours of classes, and all that is drawn: curves.png, examples.png, ...
  predicting          image sizes that a network takes, tiles of large ones; predict.py's images
  reporting           lines, progress bar, metrics.csv, TensorBoard, a tracker, waiting for batches

check/                tools beside training
  survey              check_data.py: every file of a data set, and what is wrong with it
  report              the lines that it prints, check.png and check.csv
  preflight           ./launch.sh --check: the table of what the ranks have found, and its verdict
  lockstep            python -m engine.check.lockstep: collectives that not all ranks reach
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.data.class_counts import class_weights as class_weights
    from engine.data.folders import ImageFiles as ImageFiles
    from engine.data.folders import MaskFiles as MaskFiles
    from engine.data.folders import find_classes as find_classes
    from engine.data.folders import find_masks as find_masks
    from engine.data.images import LazyImage as LazyImage
    from engine.data.loading import Collate as Collate
    from engine.data.loading import TrainSampler as TrainSampler
    from engine.data.loading import ValSampler as ValSampler
    from engine.data.loading import batches as batches
    from engine.data.loading import workers as workers
    from engine.data.samples import Seeded as Seeded
    from engine.errors import UserError as UserError
    from engine.files import filling as filling
    from engine.ranks.distributed import rank as rank
    from engine.ranks.distributed import rank_zero_first as rank_zero_first
    from engine.ranks.distributed import reduce_tensor as reduce_tensor
    from engine.ranks.distributed import say as say
    from engine.ranks.distributed import teardown as teardown
    from engine.ranks.replicas import wrap as wrap
    from engine.run.checkpoint import open_model as open_model
    from engine.run.flags import Parser as Parser
    from engine.run.flags import at_least as at_least
    from engine.run.folder import Folder as Folder
    from engine.run.loop import Run as Run
    from engine.run.machine import setup as setup
    from engine.run.machine import zeros as zeros
    from engine.run.metrics import Worst as Worst
    from engine.run.metrics import compute as compute
    from engine.run.metrics import criterion as criterion
    from engine.run.pictures import draw_masks as draw_masks
    from engine.run.predicting import Predictor as Predictor
    from engine.run.predicting import bands as bands
    from engine.run.predicting import fit_input as fit_input
    from engine.run.predicting import freeze_unused as freeze_unused
    from engine.run.predicting import in_tiles as in_tiles
    from engine.run.pretrained import load_weights as load_weights
    from engine.run.sharded import shard as shard
    from engine.run.starting import prepare as prepare
    from engine.run.starting import start as start

DOOR = {  # the module of each name, imported when it is first used: no torch until then
    "Collate": "data.loading",
    "Folder": "run.folder",
    "ImageFiles": "data.folders",
    "LazyImage": "data.images",
    "MaskFiles": "data.folders",
    "Parser": "run.flags",
    "Predictor": "run.predicting",
    "Run": "run.loop",
    "Seeded": "data.samples",
    "TrainSampler": "data.loading",
    "UserError": "errors",
    "ValSampler": "data.loading",
    "Worst": "run.metrics",
    "at_least": "run.flags",
    "bands": "run.predicting",
    "batches": "data.loading",
    "class_weights": "data.class_counts",
    "compute": "run.metrics",
    "criterion": "run.metrics",
    "draw_masks": "run.pictures",
    "filling": "files",
    "find_classes": "data.folders",
    "find_masks": "data.folders",
    "fit_input": "run.predicting",
    "freeze_unused": "run.predicting",
    "in_tiles": "run.predicting",
    "load_weights": "run.pretrained",
    "open_model": "run.checkpoint",
    "prepare": "run.starting",
    "rank": "ranks.distributed",
    "rank_zero_first": "ranks.distributed",
    "reduce_tensor": "ranks.distributed",
    "say": "ranks.distributed",
    "setup": "run.machine",
    "shard": "run.sharded",
    "start": "run.starting",
    "teardown": "ranks.distributed",
    "workers": "data.loading",
    "wrap": "ranks.replicas",
    "zeros": "run.machine",
}
__all__ = [*DOOR]


def __getattr__(name: str) -> object:
    if name not in DOOR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"engine.{DOOR[name]}"), name)
    return value
