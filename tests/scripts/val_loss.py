"""Prints val_loss of an untrained network by loss and by batch size."""

import json
import sys

import torch
from snippets.criteria import LOSSES
from torch import nn
from torch.utils.data import DataLoader

import dataset
import ddpkit
import distributed
import main
import model
from flags import parse_args

data, task, classes = sys.argv[1], sys.argv[2], int(sys.argv[3])
distributed.setup(seed=1)
head = [nn.AdaptiveAvgPool2d(1), nn.Flatten()] if task == "classification" else []
net = nn.Sequential(nn.Conv2d(3, 8, 5, padding=2), nn.Tanh(), nn.Conv2d(8, classes, 1), *head)
net[2].weight.data *= 8
weights = ("--class-weights", ",".join(str(1 + number) for number in range(classes)))
for words in LOSSES[task]:
    flags = [*words[:-2], *weights] if "--class-weights" in words else [*words]
    args = parse_args(["--data", data, "--image-size", "32", "--amp", "off", *flags])
    train, val, names = dataset.build_datasets(args)
    found = []
    for size in (1, 3, 9):
        loader: DataLoader = DataLoader(
            ddpkit.Seeded(val, names, args.seed),
            batch_sampler=ddpkit.ValSampler(val, size),
            collate_fn=ddpkit.Collate(),
        )
        criterion = ddpkit.criterion(model.build_criterion(args, train, names))
        metrics = model.build_metrics(names)
        with torch.inference_mode():
            found.append(main.evaluate(net, loader, criterion, metrics, args)[0]["val_loss"])
    distributed.say(json.dumps([*flags, found]))
torch.distributed.destroy_process_group()
