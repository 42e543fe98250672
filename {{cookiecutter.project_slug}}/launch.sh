#!/usr/bin/env bash
# Usage: [NAME=value ...] ./launch.sh [flags of main.py]
#
# Starts one process of main.py for each GPU of this machine, or two if it has no GPU.
#
#   NPROC           processes on this node     (default: one per GPU, or 2 without GPUs)
#   NNODES          number of nodes            (default: 1)
#   NODE_RANK       this node's number, from 0 (required if NNODES > 1)
#   MASTER_ADDR     address of node 0          (required if NNODES > 1)
#   MASTER_PORT     free port on node 0        (default: 29500; with one node, any free port)
#   PYTHON          interpreter                (default: python, else python3)
#   MAX_RESTARTS    restarts after a failure   (default: 0), each from the last checkpoint
#   OMP_NUM_THREADS CPU threads per process    (ignored unless 2 or more; see --threads)
#
# PET_NNODES, PET_NPROC_PER_NODE and so on, set for torchrun by Kubernetes operators, are read, too.
#
# Exit status: 0 done, 75 stopped by a signal and saved, 2 a mistake of the user's, else a failure.
#
# One node:        ./launch.sh --epochs 90
# Two of its GPUs: CUDA_VISIBLE_DEVICES=0,1 ./launch.sh
# CPU only:        CUDA_VISIBLE_DEVICES= ./launch.sh
# Two nodes:       NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 ./launch.sh     on node0
#                  NNODES=2 NODE_RANK=1 MASTER_ADDR=node0 ./launch.sh     on node1
# SLURM:           srun --nodes 2 --ntasks-per-node 1 --cpus-per-task 32 --gpus-per-node 8 ./launch.sh
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

die() {
    echo "error: $*" >&2
    exit 2
}

# Prints the number of GPUs that main.py will see.
count_gpus() {
    local listed=${CUDA_VISIBLE_DEVICES-all}
    case $listed in
    all)
        if command -v nvidia-smi >/dev/null; then
            { nvidia-smi --list-gpus 2>/dev/null || true; } | grep -c '^GPU' || true
        elif [[ -e /dev/nvidia0 || -e /dev/kfd ]]; then # some containers; AMD
            "$python" -c 'import torch; print(torch.cuda.device_count())'
        else
            echo 0
        fi
        ;;
    '' | -1) echo 0 ;;
    *) tr ',' '\n' <<<"$listed" | grep -c . ;;
    esac
}

case ${1-} in
-h | --help)
    sed -n '2,/^set /{/^#/!d; s/^# \{0,1\}//; p;}' "${BASH_SOURCE[0]}"
    exit
    ;;
esac

# Kubernetes operators set these for torchrun, which would read more flags from other PET_ variables.
: "${NNODES:=${PET_NNODES-}}" "${NODE_RANK:=${PET_NODE_RANK-}}"
: "${MASTER_ADDR:=${PET_MASTER_ADDR-}}" "${MASTER_PORT:=${PET_MASTER_PORT-}}"
[[ ${PET_NPROC_PER_NODE-} == [0-9]* ]] && : "${NPROC:=$PET_NPROC_PER_NODE}" # not: auto
unset "${!PET_@}"

# A job step of srun knows its nodes; a batch script alone is not such a step.
if [[ -n ${SLURM_STEP_NUM_NODES-} && -z ${NNODES-} ]]; then
    [[ $SLURM_STEP_NUM_TASKS == "$SLURM_STEP_NUM_NODES" ]] ||
        die "srun started $SLURM_STEP_NUM_TASKS copies of launch.sh on $SLURM_STEP_NUM_NODES node(s): use --ntasks-per-node 1"
    NNODES=$SLURM_STEP_NUM_NODES
    NODE_RANK=$SLURM_NODEID
    : "${MASTER_ADDR:=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)}"
    : "${MASTER_PORT:=$((20000 + (SLURM_JOB_ID * 7 + SLURM_STEP_ID) % 10000))}"
fi

python=${PYTHON:-$(command -v python || command -v python3)} || die "no python found: set PYTHON"
NPROC=${NPROC:-$(count_gpus)}
[[ $NPROC == 0 ]] && NPROC=2
NNODES=${NNODES:-1}
for name in NPROC NNODES; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || die "$name=${!name} is not an integer of 1 or more"
done

[[ ${MAX_RESTARTS:=0} =~ ^[0-9]+$ ]] || die "MAX_RESTARTS=$MAX_RESTARTS is not an integer of 0 or more"
export MAX_RESTARTS

if ((NNODES == 1)); then
    where=(--standalone --local-addr 127.0.0.1) # even if this host's name does not resolve
else
    for name in NODE_RANK MASTER_ADDR; do
        [[ -n ${!name-} ]] || die "NNODES=$NNODES also requires $name; see ./launch.sh --help"
    done
    where=(--nnodes "$NNODES" --node-rank "$NODE_RANK"
        --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
fi

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # as torchrun does, with a warning; main.py sets the threads
if [[ ${NODE_RANK:-0} == 0 ]]; then
    (echo "starting $((NPROC * NNODES)) rank(s) ...") 2>/dev/null || true # a closed pipe
fi
exec "$python" "$here/engine/ranks/launcher.py" "${where[@]}" --nproc-per-node "$NPROC" "$here/main.py" "$@"
