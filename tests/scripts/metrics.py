"""Prints loss, metrics and mistakes of an untrained network on the first 1, 5 and 53 pictures."""

import json
import sys

import torch
from torch.utils.data import Subset

import dataset
import main
import model
from engine.data import loading, seeding
from engine.ranks import distributed
from engine.run import machine

args = main.parse_args(["--data", sys.argv[1], "--batch-size", "2", "--workers", "0"])
options = loading.Options(0, 2, False, args.seed)
settings = machine.Settings(0, 1, False, "off")
device = torch.device("cpu")
distributed.setup()
_, val, classes = dataset.build_dataset(args.data, 32)
seeding.seed(1)
net = model.build_model(args, classes)
criterion = model.build_criterion(args)
for size in (1, 5, 53):
    part = Subset(val, list(range(0, 53, 53 // size))[:size])
    loader = loading.build_val_loader(part, len(classes), 2, options)
    metrics = model.build_metrics(classes)
    task = main.Task(args, settings, device, classes, net, criterion, metrics)
    found, mistakes = main.evaluate(task, loader)
    distributed.say(json.dumps([found, mistakes.confusion.tolist(), mistakes.worst]))
distributed.teardown()
