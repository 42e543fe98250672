"""Leaves a rank's initial network, and the name of its weights: initial.py DIR FLAG..."""

import sys
from pathlib import Path

import torch

import main
from engine.data import seeding
from engine.ranks import distributed, failures

with failures.one_line_errors():
    args = main.parse_args(sys.argv[2:])
    distributed.setup()
    seeding.seed(args.seed)
    net = main.build_model(args, ["one", "two"], args.weights)
    Path(sys.argv[1]).mkdir(exist_ok=True)
    state = {"model": net.state_dict(), "args": {"weights": args.weights}}
    torch.save(state, Path(sys.argv[1], f"{distributed.rank()}.pt"))
    distributed.teardown()
