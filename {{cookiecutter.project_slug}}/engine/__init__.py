"""The machinery, in the order in which a run meets it.

errors                a mistake of the user's, or a disk that does not answer, printed as one line
files                 files and folders that appear whole or not at all; disks are tried again

ranks/                processes that train together
  process             signals, debugger and loader workers of one process
  launcher            torchrun for launch.sh: passes on signals, restarts, exits as a rank did
  environment         the variables that launchers and SLURM set
  names               what a rank is called in messages
  logs                LOG_DIR: a file for each rank; copying, the process that fills them
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
  replicas            DDP around the network, and the check that all ranks' weights are the same
  remedies            what DDP and nccl say of common mistakes, in plainer words
  stopping            a signal stops all ranks after the same step; a rank that hangs is shown
  protocol            statuses, store keys and files by which ranks and launcher agree on all that

data/                 from files to batches on the device
  seeding             random numbers that depend on seed, epoch and sample alone
  listing             which images a folder holds, and which are for validation
  images              decoding no more of each image than is needed
  jpeg                the header of a JPEG; decoding it without its lower rows
  depth               images of more than 8 bits
  stacks              images of any number of channels at full depth: --channels
  lists               samples listed in a CSV file
  prepared            what prepare_data.py writes: all images decoded, in one file
  mapped              that file, read
  shares              which share each class has: said before training
  counts              how often each class occurs in each sample
  balance             classes of unequal size: weights, balanced draws
  overfit             --overfit: a few images, always in the same crops
  samples             a data set with seeded samples; says at which one a loader worker failed
  handover            batches from loader workers, in memory that is used again
  loading             who loads which sample; loader workers; normalization

run/                  one training run, its files and its reports
  flags               argparse: errors on one rank only, defaults in the help
  palette             colours of classes
  machine             CPUs, threads, workers, mixed precision
  folder              --output-dir: which checkpoint to continue from, which saves stay
  checkpoint          the file format: plain types and a checksum
  transfer            its tensors, copied from the GPU to the CPU with a single wait
  pretrained          --weights
  sizes               which image sizes a network takes
  sharded             --strategy fsdp: each rank trains a part of the weights
  progress            class Run: epoch, step and best score; saves and resumes them
  optimizers          optimizers and schedules in checkpoints
  metrics             torchmetrics over all ranks
  mistakes            what the model gets wrong: per_class.csv, confusion.png, worst.png
  predicting          images for predict.py, without those that cannot be read
  tiles               large images in overlapping tiles
  replay              --replay: a step of a run again, in a debugger
  reporting           start lines, progress bar, metrics.csv, TensorBoard
  waiting             how long a GPU, or a CPU, has waited for batches
  stragglers          a rank that computes slower than the others
  records             metrics.csv, and a tracker if you add one
  profiling           --profile: a trace of some steps
  probing             --find-batch-size
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
"""
