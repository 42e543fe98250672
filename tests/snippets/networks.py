"""Two training steps of any network on the demo set, by main.py's own functions."""

import itertools
import json
from types import SimpleNamespace

import torch

import main
import recipe
from dataset import build_dataset
from engine.data import loading
from engine.ranks import distributed, gradients, replicas
from engine.run.metrics import Totals


def first_steps(data: str, *networks: str) -> list[dict]:
    """What becomes of networks, given by their flags, one after another."""
    distributed.setup()
    return [train(data, words.split()) for words in networks]


def train(data: str, words: list[str]) -> dict:
    words = ["--data", data, "--workers", "0", "--batch-size", "2", "--amp", "off", *words]
    args = main.parse_args([*words, "--optimizer", "sgd", "--lr", "0.001"])
    device = torch.device("cpu")
    train_set, _, classes = build_dataset(args.data, args.image_size)
    options = loading.Options(args.workers, args.prefetch, False, args.seed)
    loader = loading.build_train_loader(train_set, len(classes), args.batch_size, 1, options)
    model = main.build_model(args, classes)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = recipe.build_optimizer(model, args)
    stepper = main.Stepper(
        *(model, replicas.wrap(model, device), optimizer),
        recipe.build_scheduler(optimizer, args, 2),
        torch.amp.GradScaler("cpu", enabled=False),
        gradients.Mean(device),
    )
    settings, criterion = SimpleNamespace(amp="off"), main.build_criterion(args)
    task = main.Task(args, settings, device, classes, model, criterion, None)
    totals = Totals(device)
    run = SimpleNamespace(epoch=0, passes=0, totals=totals, end_step=lambda: None)
    run.mean_loss, run.is_due = lambda: float(totals.loss / totals.compute()[1]), lambda _: False
    report = SimpleNamespace(
        progress=lambda loader, _: itertools.islice(loader, 2), loss=lambda *_: None
    )
    loss = main.train_one_epoch(task, stepper, loader, report, run)
    backbone = {*main.backbone(model)}
    changed = [not torch.equal(weight, before[name]) for name, weight in model.named_parameters()]
    return {
        "loss": loss,
        "changed": sum(changed) / len(changed),
        "others": [list(weight.shape) for weight in model.parameters() if weight not in backbone],
        "classes": len(classes),
    }


def flags(*words: str) -> dict:
    return json.loads(json.dumps(vars(main.parse_args(list(words))), default=str))


def rates(words: str, steps: int) -> list[float]:
    """The learning rate of each step, in epochs of so many."""
    args = main.parse_args([words])
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], args.lr)
    factor = recipe.build_scheduler(optimizer, args, steps).lr_lambdas[0]
    return [args.lr * factor(step) for step in range(args.epochs * steps)]
