"""Prints loss, metrics and mistakes of an untrained network on the first 1, 5 and 53 pictures."""

import json
import sys

import torch
from torch.utils.data import DataLoader, Subset

import dataset
import ddpkit
import distributed
import main
import model
from ddpkit.data import samples
from flags import parse_args

args = parse_args(["--data", sys.argv[1], "--image-size", "32"])
args.amp = "off"
distributed.setup(args.seed)
_, val, classes = dataset.build_datasets(args)
samples.seed(1)
net = model.build_model(args, classes)
criterion = ddpkit.criterion(model.build_criterion(args, val, classes))
for size in (1, 5, 53):
    part = Subset(val, list(range(0, 53, 53 // size))[:size])
    loader = DataLoader(
        ddpkit.Seeded(part, classes, args.seed),
        batch_sampler=ddpkit.ValSampler(part, 2),
        collate_fn=ddpkit.Collate(),
    )
    metrics = model.build_metrics(classes)
    found, (confusion, worst) = main.evaluate(net, loader, criterion, metrics, args)
    distributed.say(json.dumps([found, confusion.tolist(), worst]))
torch.distributed.destroy_process_group()
