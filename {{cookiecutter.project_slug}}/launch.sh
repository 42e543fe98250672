#!/usr/bin/env bash
# Usage: [NAME=value ...] ./launch.sh [flags of main.py]
#
# Starts one process of main.py for each GPU of this machine, or two if it has no GPU.
#
#   NPROC           processes on this node     (default: one per GPU, or 2 without GPUs)
#   NNODES          number of nodes            (default: 1)
#   NODE_RANK       this node's number, from 0 (required if NNODES > 1)
#   MASTER_ADDR     address of node 0          (required if NNODES > 1)
#   MASTER_PORT     free port on node 0        (default: 29500; not used if NNODES is 1)
#   PYTHON          interpreter                (default: python, else python3)
#   MAX_RESTARTS    restarts after a failure   (default: 0), each from the last checkpoint
#   OMP_NUM_THREADS CPU threads per process    (default: its share of the CPUs; with GPUs at most 4)
#
# Started once on each node by SLURM's srun, it knows the nodes without NNODES and what follows it.
# Every node has the same NPROC, and MAX_RESTARTS is for one node.
#
# Exit status: 0 done, 75 stopped by a signal and saved, 2 a mistake of the user's, else a failure.
#
# One node:        ./launch.sh --epochs 90
# Two of its GPUs: CUDA_VISIBLE_DEVICES=0,1 ./launch.sh
# CPU only:        CUDA_VISIBLE_DEVICES= ./launch.sh
# Two nodes:       NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 ./launch.sh     on node0
#                  NNODES=2 NODE_RANK=1 MASTER_ADDR=node0 ./launch.sh     on node1
# SLURM:           srun --nodes 2 --ntasks-per-node 1 --cpus-per-task 32 --gpus-per-node 8 ./launch.sh
# A step again:    ./launch.sh -m ddpkit.replay 3:120 --debug-rank 0     see ddpkit/replay.py
# Check the nodes: the same with --check; see preflight.py
set -euo pipefail

case ${1-} in
-h | --help)
    sed -n '2,/^set /{/^#/!d; s/^# \{0,1\}//; p;}' "${BASH_SOURCE[0]}"
    exit
    ;;
esac

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-$(command -v python || command -v python3)} || {
    echo "error: no python found: set PYTHON" >&2
    exit 2
}
exec "$python" "$here/ddpkit/ranks/launcher.py" "$here/main.py" "$@"
