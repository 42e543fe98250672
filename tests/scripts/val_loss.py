"""Prints val_loss of an untrained network by loss and by batch size."""

import json
import sys

import torch
from snippets.criteria import LOSSES
from torch import nn

import dataset
import main
import model
from engine.data import loading, seeding
from engine.ranks import distributed
from engine.run import machine

data, task, classes = sys.argv[1], sys.argv[2], int(sys.argv[3])
device = torch.device("cpu")
distributed.setup()
seeding.seed(1)
head = [nn.AdaptiveAvgPool2d(1), nn.Flatten()] if task == "classification" else []
net = nn.Sequential(nn.Conv2d(3, 8, 5, padding=2), nn.Tanh(), nn.Conv2d(8, classes, 1), *head)
net[2].weight.data *= 8
weights = ("--class-weights", ",".join(str(1 + number) for number in range(classes)))
for words in LOSSES[task]:
    flags = [*words[:-2], *weights] if "--class-weights" in words else [*words]
    found = []
    for size in ("1", "3", "9"):
        args = main.parse_args(["--data", data, "--batch-size", size, "--workers", "0", *flags])
        _, val, names = dataset.build_dataset(args.data, 32)
        options = loading.Options(0, 2, False, args.seed)
        loader = loading.build_val_loader(val, len(names), args.batch_size, options)
        task_ = main.Task(
            *(args, machine.Settings(0, 1, False, "off"), device, names, net),
            model.build_criterion(args),
            model.build_metrics(names),
        )
        found.append(main.evaluate(task_, loader)[0]["val_loss"])
    distributed.say(json.dumps([*flags, found]))
distributed.teardown()
