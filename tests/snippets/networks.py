"""Two training steps of any network on the demo set, by main.py's own functions."""

import itertools
import json

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import dataset
import ddpkit
import main
import model
import recipe
from ddpkit.data import loading
from flags import parse_args
from snippets.criteria import DEVICE, Run


class Step(Run):
    """A step of one pass, and its loss."""

    def loss(self, loss_sum: Tensor, count: Tensor | int) -> Tensor:
        self.found = float(loss_sum) / float(count)
        return super().loss(loss_sum, count)


def first_steps(data: str, *networks: str) -> list[dict]:
    """What becomes of networks, given by their flags, one after another."""
    main.distributed.setup(seed=0)
    return [train(data, words.split()) for words in networks]


def train(data: str, words: list[str]) -> dict:
    words = ["--data", data, "--batch-size", "2", "--amp", "off", *words]
    args = parse_args([*words, "--optimizer", "sgd", "--lr", "0.001"])
    train_set, _, classes = dataset.build_datasets(args)
    loader: DataLoader = DataLoader(
        ddpkit.Seeded(train_set, classes, args.seed),
        args.batch_size,
        sampler=ddpkit.TrainSampler(train_set, args.batch_size, 1, args.seed),
        collate_fn=ddpkit.Collate(),
    )
    net = model.build_model(args, classes)
    before = {name: weight.detach().clone() for name, weight in net.named_parameters()}
    optimizer = recipe.build_optimizer(net, args)
    parts = (
        ddpkit.wrap(net, DEVICE),
        ddpkit.criterion(model.build_criterion(args, train_set, classes)),
        optimizer,
        recipe.build_scheduler(optimizer, args, 2),
        torch.amp.GradScaler("cpu", enabled=False),
    )
    for batch in itertools.islice(loader, 2):
        step = Step([loading.move(batch, DEVICE, train_set.format)])
        main.train_one_epoch(step, *parts, None, args)
    backbone = {*model.backbone(net)}
    changed = [not torch.equal(weight, before[name]) for name, weight in net.named_parameters()]
    return {
        "loss": step.found,
        "changed": sum(changed) / len(changed),
        "others": [list(weight.shape) for weight in net.parameters() if weight not in backbone],
        "classes": len(classes),
    }


def flags(*words: str) -> dict:
    return json.loads(json.dumps(vars(parse_args(list(words))), default=str))


def rates(words: str, steps: int) -> list[float]:
    """The learning rate of each step, in epochs of so many."""
    args = parse_args([words])
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], args.lr)
    factor = recipe.build_scheduler(optimizer, args, steps).lr_lambdas[0]
    return [args.lr * factor(step) for step in range(args.epochs * steps)]
