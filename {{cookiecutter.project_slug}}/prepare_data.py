"""Decode a data set once, for training that is slowed down by reading its images.

python prepare_data.py --data DIR --output FAST
./launch.sh --data FAST

FAST appears once it is whole.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from ddpkit.ranks import process

if __name__ == "__main__":  # before torch, whose import takes seconds
    process.install_handlers()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # leave GPUs to those who need one

from dataset import SHORT_SIDE, build_datasets
from ddpkit.data import loading, prepared
from ddpkit.data.folders import VAL_NAMES, Files
from ddpkit.data.format import NAME
from ddpkit.errors import UserError
from ddpkit.ranks import distributed
from ddpkit.ranks.failures import one_line_errors
from ddpkit.run import machine
from ddpkit.run.flags import Parser
from flags import parse_args


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", metavar="DIR", type=Path, required=True)
    parser.add_argument("--output", metavar="FAST", type=Path, required=True)
    parser.add_argument(
        "--short-side",
        metavar="PIXELS",
        type=int,
        default=SHORT_SIDE,
        help=f"shrink images to this; 0 keeps their size; default: {SHORT_SIDE}",
    )
    parser.add_argument("--workers", type=int, help="processes; default: one per CPU")
    args = parser.parse_args(argv)
    workers = machine.cpus() if args.workers is None else args.workers
    if min(workers, args.short_side) < 0:
        raise UserError("--workers and --short-side must be 0 or more")
    distributed.setup(alone=True)
    if prepared.is_store(args.data):
        raise UserError(f"--data {args.data} is prepared already; pass it to main.py")
    data = args.data.resolve()  # the paths of its files are those that training will find
    places = [data / name for name in ("train", *VAL_NAMES)]
    if not places[0].is_dir():
        places = [data]
    if any(map(args.output.resolve().is_relative_to, places)):
        raise UserError(f"{args.output}: inside the data set {data}; name a folder elsewhere")
    train, val, classes = build_datasets(parse_args(["--data", str(data)]))
    if not (isinstance(train, Files) and isinstance(val, Files)):
        kind = type(train).__name__
        raise UserError(f"dataset.py returns {kind}, whose samples are no files to be prepared")
    if train.format.channels:
        raise UserError(
            f'{data / NAME}: "channels": prepared data is RGB of 8 bits; train on {data} itself'
        )
    prepared.write(args.output, data, [train, val], classes, args.short_side, workers)
    distributed.teardown()


if __name__ == "__main__":
    with one_line_errors(loading.explain):
        main()
