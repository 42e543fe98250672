#!/usr/bin/env bash
# Usage: [PYTHON=...] benchmarks/gpu.sh [--quick] [--list] [PART ...]
#
# Measures on one GPU what benchmarks/README.md has no figures for: all parts, or those named.
# Prints Markdown for that page; progress and errors go to a folder that it names on stderr.
#
#   step         600 s  a training step: ours, the bare loop and peers; both tasks, batches of 32 and 128
#   training     330 s  from files to weights, against torchvision's reference script
#   input        300 s  images per second with 2, 4, 8 and 16 workers
#   nvjpeg       100 s  decoding on the GPU, alone and beside training
#   memory       200 s  peak of GPU memory, both tasks, batches of 32 and 128
#   compile      300 s  a step with --compile, both tasks
#   checkpoint   120 s  time of a save, and what it holds up
#   determinism  270 s  two runs with --deterministic, and without: the same bits? both tasks
#   resume       180 s  stopped and started again, or not: the same bits? both tasks
#
# No part takes longer: it is ended then, counts as failed, and the next one begins. --list prints this.
# --quick: tiny sizes and no figures worth having, to see that everything runs; also without a GPU.
# Exit status: 0 if all parts succeeded, 1 if one failed, 2 for a mistake of the user's.
set -uo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
usage=$(sed -n '2,/^set /{/^#/!d; s/^# \{0,1\}//; p;}' "${BASH_SOURCE[0]}")
python=${PYTHON:-python}
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-0}

parts=() quick='' device=gpu
for word in "$@"; do
    case $word in
    -h | --help | --list)
        echo "$usage"
        exit
        ;;
    --quick) quick=1 ;;
    *)
        grep -qE "^  $word +[0-9]+ s  " <<< "$usage" || {
            echo "error: $word: no such part; see --list" >&2
            exit 2
        }
        parts+=("$word")
        ;;
    esac
done
[[ ${parts[*]-} ]] || mapfile -t parts < <(sed -nE 's/^  ([a-z]+) +[0-9]+ s  .*/\1/p' <<< "$usage")

machine=$("$python" -c "
import sys; sys.path.insert(0, '$here')
import common, torch
print(common.machine())
sys.exit(0 if torch.accelerator.is_available() else 3)")
case $?$quick in
0 | 01) ;;
31) device=cpu ;;
3)
    echo "error: torch finds no GPU here; --quick runs without one" >&2
    exit 2
    ;;
*) exit 2 ;;
esac
logs=$(mktemp -d "${TMPDIR:-/tmp}/benchmark-gpu-XXXXXX")
echo "progress and errors: $logs" >&2
echo "Machine: $machine"

trap 'kill "$!" 2> /dev/null; wait; exit 143' INT TERM
count=0 status=0
measure() { # PART SHARE SCRIPT [FLAG ...]: run it for SHARE percent of the part's time at most
    local part=$1 seconds result log began=$SECONDS word why
    [[ " ${parts[*]} " == *" $part "* ]] || return 0
    seconds=$(($(sed -nE "s/^  $part +([0-9]+) s  .*/\1/p" <<< "$usage") * $2 / 100))
    [[ $quick ]] && seconds=600
    log="$logs/$part-$((++count)).log"
    shift 2
    printf '\n%s:\n\n    python benchmarks/%s' "$part" "$1"
    for word in "${@:2}"; do
        if [[ $word == *" "* ]]; then printf ' "%s"' "$word"; else printf ' %s' "$word"; fi
    done
    printf '\n\n'
    timeout --kill-after 10 "$seconds" "$python" "$here/$1" --seconds $((seconds * 6 / 10)) "${@:2}" \
        > "$log.out" 2> "$log" &
    wait "$!"
    result=$?
    if ((result)); then
        status=1
        why=$(grep . "$log" | tail -n 1)
        ((result == 124)) && why="out of time"
        echo "$part failed with status $result after $((SECONDS - began)) of $seconds s: $why" | tee /dev/stderr
    else
        sed -n '/^speed: \|^|/,$p' "$log.out" # the tables
        echo "$part: $((SECONDS - began)) of $seconds s" >&2
    fi
}

resnet="--arch resnet50 --image-size 224" unet="--encoder resnet34 --image-size 256"
other="--arch convnext_base --image-size 224" # 1 GB with its optimizer
batches=(32 128) turns=(--repeats 3) steps=(--steps 50) workers=(2 4 8 16) few=1000 many=10000
whole=(--arch resnet50 --batch-size 128 --amp bf16)
if [[ $quick ]]; then
    resnet="--arch shufflenet_v2_x0_5 --image-size 32" unet="--encoder mobilenet_v2 --image-size 32"
    other=''
    batches=(8 16) turns=(--repeats 1) steps=(--steps 2) workers=(1 2) few=32 many=32
    whole=(--arch shufflenet_v2_x0_5 --batch-size 16 --image-size 32)
fi
small="--batch-size ${batches[0]}" large="--batch-size ${batches[1]}"
masks=(--task segmentation)

for batch in "$small" "$large"; do
    measure step 25 step.py --device $device "${turns[@]}" "${steps[@]}" --flags "$resnet $batch"
    measure step 25 step.py --device $device "${turns[@]}" "${steps[@]}" "${masks[@]}" --flags "$unet $batch"
done
measure training 100 training.py "${turns[@]}" --images $many "${whole[@]}"
measure input 100 gpu.py input "${turns[@]}" --images $few --workers "${workers[@]}"
measure nvjpeg 100 gpu.py nvjpeg "${turns[@]}" --images $few --flags "$resnet $large"
measure memory 50 gpu.py memory --flags "$resnet $small" "$resnet $large"
measure memory 50 gpu.py memory "${masks[@]}" --flags "$unet $small" "$unet $large"
measure compile 50 step.py --device $device "${turns[@]}" "${steps[@]}" --compile --flags "$resnet $large"
measure compile 50 step.py --device $device "${turns[@]}" "${steps[@]}" --compile "${masks[@]}" --flags "$unet $large"
measure checkpoint 100 gpu.py checkpoint --flags "$resnet $small" ${other:+"$other $small"}
for part in determinism resume; do
    measure $part 50 gpu.py $part --images $few --flags "$resnet $small"
    measure $part 50 gpu.py $part "${masks[@]}" --images $few --flags "$unet $small"
done
exit $status
