"""Check the nodes of a job before it trains: ./launch.sh [flags of main.py] --check

In place of main.py on its very nodes and ranks; without launch.sh:
torchrun ... preflight.py [flags], or srun python preflight.py [flags]

Prints a table in less than a minute: versions, code, memory, data, output folder and network of all
ranks, and in the last line whether they are ready. The exit status is 0 if they are, or else 2.
Nothing is trained, downloaded or left in --output-dir, where a run may be at work.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from engine.ranks import process

if __name__ == "__main__":  # before torch, whose import takes seconds
    process.install_handlers()

import demo_set
from dataset import find_samples
from engine.check import inputs, network, nodes, preflight
from engine.data import loading
from engine.data.images import Format
from engine.errors import UserError
from engine.ranks import distributed, remedies
from engine.ranks.failures import one_line_errors
from engine.run import machine
from main import parse_args
from model import build_model

ROOT = Path(__file__).resolve().parent


def weigh(args: Namespace) -> int:
    """Return the bytes of the network's weights."""
    model = build_model(args, ["some", "classes"])
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def main(argv: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else argv
    args = parse_args([word for word in words if word != "--check"])
    if args.eval_only or args.replay:
        raise UserError("--check is for training: leave out --eval-only and --replay")
    record = network.record_nccl()
    device = distributed.setup(args.local_rank, min(args.dist_timeout, preflight.LIMIT))
    preflight.end_with_others()
    table = preflight.Table()
    nodes.check_software(table, ROOT, device)
    network.check_clocks(table)

    workers = machine.default_workers() if args.workers is None else args.workers
    batch = (args.prefetch + 2) * (args.batch_size or loading.BATCH_SIZE)
    nodes.check_machine(table, workers, 4 * (args.channels or 1) * batch * args.image_size**2)
    if args.data is None:
        args.data = ROOT / "data" / "demo"
        if distributed.local_rank() == 0:
            demo_set.draw(args.data)
    images = inputs.check_data(table, args.data, find_samples)
    format = Format(args.value_range, args.max_megapixels, args.channels, args.mean, args.std)
    if images:
        inputs.check_reading(table, images, workers, args.image_size, format)
    weights = nodes.check_network(table, weigh, args)
    # A checkpoint holds the weights, two numbers for each from Adam, and their average (--ema).
    nodes.check_output(table, args.output_dir, weights * (4 if args.ema else 3), args.keep)
    network.check_all_reduce(table, device, weights)
    network.check_pairs(table, device)
    network.check_nccl(table, record)
    status = table.verdict()
    distributed.teardown()
    process.exit_now(status)  # a thread may still be in the store


if __name__ == "__main__":
    with one_line_errors(loading.explain, remedies.explain):
        main()
