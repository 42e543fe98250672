"""Check the nodes of a job before it trains: ./launch.sh [flags of main.py] --check

In place of main.py on its very nodes and ranks; without launch.sh:
torchrun ... preflight.py [flags], or srun python preflight.py [flags]

Prints a table in less than a minute: versions, code, memory, data, output folder and network of all
ranks, and in the last line whether they are ready. The exit status is 0 if they are, or else 2.
Nothing is trained, downloaded or left in --output-dir, where a run may be at work.
"""

import sys
from argparse import Namespace
from pathlib import Path

import engine
from flags import parse_args

if __name__ == "__main__":  # before torch, whose import takes seconds
    sys.argv[1:] = [word for word in sys.argv[1:] if word != "--check"]
    engine.prepare(parse_args)

import demo_set
from engine.check import inputs, network, nodes, preflight
from engine.data import handover, loading
from engine.data.format import read_format
from engine.ranks import distributed, process
from engine.run import machine
from engine.run.flags import launch
from model import build_model

ROOT = Path(__file__).resolve().parent


def weigh(args: Namespace) -> int:
    """Return the bytes of the network's weights."""
    model = build_model(args, ["some", "classes"])
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def main() -> None:
    args = parse_args()
    if args.eval_only:
        raise engine.UserError("--check is for training: leave out --eval-only")
    record = network.record_nccl()
    device = distributed.setup(launch.local_rank, min(launch.dist_timeout, preflight.LIMIT))
    preflight.end_with_others()
    table = preflight.Table()
    nodes.check_software(table, ROOT, device)
    network.check_clocks(table)

    if args.data is None:
        args.data = demo_set.FOLDER
        if distributed.local_rank() == 0:
            demo_set.draw()
    format = read_format(args.data)
    workers = machine.default_workers() if args.workers is None else args.workers
    batch = handover.BLOCKS_PER_WORKER * (args.batch_size or loading.BATCH_SIZE)
    nodes.check_machine(table, workers, 4 * (format.channels or 1) * batch * args.image_size**2)
    if images := inputs.check_data(table, args.data):
        inputs.check_reading(table, images, workers, args.image_size, format)
    weights = nodes.check_network(table, weigh, args)
    # A checkpoint holds the weights, two numbers for each from Adam, and their average (--ema).
    nodes.check_output(table, args.output_dir, weights * (4 if args.ema else 3))
    network.check_all_reduce(table, device, weights)
    network.check_pairs(table, device)
    network.check_nccl(table, record)
    status = table.verdict()
    distributed.teardown()
    process.exit_now(status)  # a thread may still be in the store


if __name__ == "__main__":
    engine.start(main)
