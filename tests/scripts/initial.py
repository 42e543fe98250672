"""Leaves a rank's initial network: initial.py DIR FLAG..."""

import sys
from pathlib import Path

import torch

import ddpkit
import distributed
import model
from ddpkit.ranks import failures
from flags import parse_args

with failures.one_line_errors():
    args = parse_args(sys.argv[2:])
    distributed.setup(args.seed)
    net = model.build_model(args, ["one", "two"], weights=args.weights)
    Path(sys.argv[1]).mkdir(exist_ok=True)
    torch.save({"model": net.state_dict()}, Path(sys.argv[1], f"{ddpkit.rank()}.pt"))
    torch.distributed.destroy_process_group()
