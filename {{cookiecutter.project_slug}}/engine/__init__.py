"""The machinery. `import engine` is its door: the names in DOOR, such as engine.Run, are all that a
project uses; each says what it takes, returns and raises. What else is here may change.

In the order in which a run meets it:

errors                a mistake of the user's, or a disk that does not answer, printed as one line
files                 files and folders that appear whole or not at all; disks are tried again
replay                python -m engine.replay EPOCH:STEP: a step of a run again, in a debugger

ranks/                processes that train together
  process             signals, debugger and loader workers of one process
  launcher            torchrun for launch.sh: passes on signals, restarts, exits as a rank did
  environment         the variables that launchers and SLURM set
  names               what a rank is called in messages
  logs                LOG_DIR: a file for each rank
  copying             the process that fills these files
  requeue             what a batch job leaves for its next start: where it saved, which node failed
  reaching            the store at MASTER_ADDR: nobody answers, or another has its port
  joining             ranks and nodes meet there: who is missing, or there twice
  agreeing            launchers of several nodes agree: to start, to start again, or to end
  gpus                how many GPUs a rank will see, counted without torch
  devices             which GPU is a rank's, and what carries its collectives
  distributed         the process group and its collectives: reduce_tensor, from_rank_zero, say, ...
  lockstep            which collectives each rank has started
  positions           where each rank is, asked while they wait for each other
  explaining          why they wait: the block that a hang or a lost rank prints
  answering           a thread that says where this rank is; a block before an abort of C++
  where               the same block of a running job, as a command
  memory              how much of a GPU's memory was used; errors for want of it
  failures            an error on one rank ends all, and is printed once
  debugging           --debug-rank: a rank that waits for a debugger; holding an error for one
  gradients           of a step: divided by the counts of all ranks and passes
  replicas            DDP around the network, and the check that all ranks' weights are the same
  remedies            what DDP and nccl say of common mistakes, in plainer words
  stopping            a signal stops all ranks after the same step; a rank that hangs is shown
  protocol            statuses, store keys and files by which ranks and launcher agree on all that

data/                 from files to batches on the device
  seeding             random numbers that depend on seed, epoch and sample alone
  listing             which images a folder holds, and which are for validation
  folders             which samples that makes: classes, or pairs of image and mask
  format              DIR/data.json: what kind of images, and how they are normalised
  images              decoding no more of each image than is needed
  jpeg                the header of a JPEG; decoding it without its lower rows
  depth               images of more than 8 bits
  stacks              images of any number of channels at full depth
  masks               which class each value or colour of a mask means: classes.txt
  prepared            what prepare_data.py writes: all images decoded, in one file
  mapped              that file, read
  datasets            the data sets of all these files: ImageFiles, MaskFiles
  shares              which share each class has: said before training
  counts              how often each class occurs in each sample
  balance             classes of unequal size: weights, balanced draws
  samples             a data set with seeded samples; says at which one a loader worker failed
  handover            batches from loader workers, in memory that is used again
  loading             who loads which sample; loader workers; normalisation
  sources             batches of our sampler, or of any other loader, for Run

run/                  one training run, its files and its reports
  starting            the first and the last line of a script: errors of ranks as one line
  flags               argparse: errors on one rank only, defaults in the help
  palette             colours of classes
  machine             CPUs, threads, loader workers
  folder              --output-dir: which checkpoint to continue from, which saves stay
  checkpoint          the file format: plain types and a checksum
  transfer            its tensors, copied from the GPU to the CPU with a single wait
  pretrained          --weights
  sizes               which image sizes a network takes
  sharded             --fsdp: each rank trains a part of the weights
  progress            epoch, step and best score; saves and resumes them
  loop                class Run: what a training loop calls
  optimizers          optimizers and schedules in checkpoints
  metrics             torchmetrics over all ranks
  mistakes            what the model gets wrong: per_class.csv, confusion.png, worst.png
  predicting          images for predict.py, without those that cannot be read
  tiles               large images in overlapping tiles
  replay              the folder of a run of which a step is done again; where a debugger stops
  reporting           start lines, progress bar, metrics.csv, TensorBoard
  waiting             how long a GPU, or a CPU, has waited for batches
  stragglers          a rank that computes slower than the others
  records             metrics.csv, and a tracker if you add one
  plots               curves.png and confusion.png
  gallery             images with predictions, examples.png and worst.png, and the legend

check/                what check_data.py does; preflight.py; and lockstep, a check of the code
  command             flags, findings and exit status
  reading             what is in the files of a sample, and what is wrong with them
  survey              the same of a whole data set: duplicates, statistics
  report              the lines that it prints
  plots               check.png
  preflight           ./launch.sh --check: the table of what the ranks have found, and its verdict
  nodes               what each node has: versions, code, memory, an output folder
  inputs              whether each has the same data, and how fast it is read and decoded
  network             clocks, all-reduce, pairs of nodes, nccl's interface
  lockstep            python -m engine.check.lockstep: collectives that not all ranks reach
  calls               what it knows of names: which calls are collectives, what differs by rank
  meta                for tests/: what reads a value off the device in a step
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.data.balance import class_weights as class_weights
    from engine.data.datasets import ImageFiles as ImageFiles
    from engine.data.datasets import MaskFiles as MaskFiles
    from engine.data.datasets import find_classes as find_classes
    from engine.data.datasets import find_masks as find_masks
    from engine.data.handover import Collate as Collate
    from engine.data.images import LazyImage as LazyImage
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
    from engine.run.metrics import compute as compute
    from engine.run.metrics import criterion as criterion
    from engine.run.mistakes import Worst as Worst
    from engine.run.palette import draw_masks as draw_masks
    from engine.run.predicting import Predictor as Predictor
    from engine.run.pretrained import load_weights as load_weights
    from engine.run.sharded import shard as shard
    from engine.run.sizes import fit_input as fit_input
    from engine.run.sizes import freeze_unused as freeze_unused
    from engine.run.starting import prepare as prepare
    from engine.run.starting import start as start
    from engine.run.tiles import bands as bands
    from engine.run.tiles import in_tiles as in_tiles

DOOR = {  # the module of each name, imported when it is first used: no torch until then
    "Collate": "data.handover",
    "Folder": "run.folder",
    "ImageFiles": "data.datasets",
    "LazyImage": "data.images",
    "MaskFiles": "data.datasets",
    "Parser": "run.flags",
    "Predictor": "run.predicting",
    "Run": "run.loop",
    "Seeded": "data.samples",
    "TrainSampler": "data.loading",
    "UserError": "errors",
    "ValSampler": "data.loading",
    "Worst": "run.mistakes",
    "at_least": "run.flags",
    "bands": "run.tiles",
    "batches": "data.loading",
    "class_weights": "data.balance",
    "compute": "run.metrics",
    "criterion": "run.metrics",
    "draw_masks": "run.palette",
    "filling": "files",
    "find_classes": "data.datasets",
    "find_masks": "data.datasets",
    "fit_input": "run.sizes",
    "freeze_unused": "run.sizes",
    "in_tiles": "run.tiles",
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
