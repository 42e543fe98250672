"""What may differ with the number of processes, a case each: networks, losses and loops.

Each case trains for some steps, and returns what it has come to: the same on 1, 2, 4 and 8
processes.
"""

import collections
import copy
import functools
import itertools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import timm.optim
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim import LBFGS, SGD, Adam, AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import ddpkit
from ddpkit.data import samples
from ddpkit.ranks import distributed
from ddpkit.run import states

RANKS = 8
SIZE = 16  # of what a network has in the middle

# Networks with a state, or random numbers, of their own.


class GhostNorm(nn.Module):
    """BatchNorm of halves of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.norm(part) for part in x.chunk(2)])


class Renorm(nn.Module):
    """What training sees depends on running statistics; one buffer is replaced, one changed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(SIZE))
        self.register_buffer("scale", torch.ones(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        seen = x.detach()
        self.mean = 0.9 * self.mean + 0.1 * seen.mean(0)
        self.scale += 0.1 * (seen.std(0) - self.scale)
        return (x - self.mean) / (self.scale + 0.1)


class Attributes(nn.Module):
    """A running state that is in no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(SIZE)
        self.scale = 1.0
        self.calls = 0
        self.sums: list[float] = []
        self.last: collections.deque = collections.deque(maxlen=3)
        self.by_name: dict[str, Any] = {"counted": np.zeros(2)}

    def forward(self, x: Tensor) -> Tensor:
        seen = x.detach()
        if not hasattr(self, "first"):
            self.first = seen.mean()
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * seen.mean(0)
        self.scale = 0.9 * self.scale + 0.1 * seen.abs().mean().item()
        self.sums.append(seen.sum().item())
        self.last.append(seen.mean())
        self.by_name["counted"] += seen.mean().item()
        others = 0.01 * (sum(self.sums[-2:]) + self.calls + self.by_name["counted"][0])
        return (x - self.mean) / self.scale + others + sum(self.last) - self.first


class Generators(nn.Module):
    """One is seeded by the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.of_torch = torch.Generator().manual_seed(distributed.rank())
        self.of_numpy = np.random.default_rng(3)
        self.of_python = random.Random(2)

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand(x.shape, generator=self.of_torch)
        return x + drawn + self.of_numpy.random() + self.of_python.random()


class Chance(nn.Module):
    """Dropout without a look at the mode, noise, stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() < 0.6:
                x = x + layer(x).relu()
        x = F.dropout(x, 0.2) + F.gumbel_softmax(x, dim=1)
        return x + random.random() + np.random.rand() + torch.randn(1)


class Queue(nn.Module):
    """Of features of before, as in contrastive learning."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(6, SIZE))
        self.place = 0

    def forward(self, x: Tensor) -> Tensor:
        self.kept[self.place : self.place + 2] = x.detach()[:2]
        self.place = (self.place + 2) % 6
        kept = self.kept.clone()
        return x + (x @ kept.T).softmax(1) @ kept


class Hooks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)
        self.seen: list[Tensor] = []
        self.layer.register_forward_hook(self._note)
        self.layer.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def _note(self, module: nn.Module, inputs: object, outputs: Tensor) -> None:
        self.seen.append(outputs.detach().mean())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + sum(self.seen)


class Tied(nn.Module):
    """Weights in two layers, and weights that some steps, or none, use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.second = nn.Linear(SIZE, SIZE)
        self.second.weight = self.first.weight
        self.now_and_then = nn.Linear(SIZE, SIZE)
        self.never = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu())
        return x + self.now_and_then(x) if x.sum() > 0 else x


class Checkpointed(nn.Module):
    """Its forward pass is done twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.Dropout(0.3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=False)


class Complex(nn.Module):
    """Weights of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs() + self.bias.float()


class Unregistered(nn.Module):
    """A layer in a list, whose weights the optimizer is given by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(SIZE, SIZE)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


class CentredLoss(nn.Module):
    """A loss with running state, and a weight that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))
        self.scale = nn.Parameter(torch.ones(3))
        self.calls = 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        loss = F.cross_entropy((outputs - self.centre) * self.scale, targets)
        self.centre.mul_(0.9).add_(outputs.detach().mean(0), alpha=0.1)
        return loss * (1 + 0.1 * self.calls)


# Loops.


def network(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, SIZE), *middle, nn.Linear(SIZE, 3))


def add_gradients(model: nn.Module, batches: Any, loss: Callable) -> None:
    for x, y in batches:
        loss(model(x), y).backward()


class Loop:
    """Some steps of networks that are given, with Checkpoints."""

    def __init__(
        self, folder: Path, *networks: nn.Module, accumulate: int = 1, **parts: Any
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(
            torch.rand(96, 8, generator=generator),
            torch.randint(3, (96,), generator=generator),
        )
        self.loader = ddpkit.train_loader(
            data, 4, virtual_ranks=RANKS, workers=0, accumulate=accumulate
        )
        self.networks = [ddpkit.VirtualRanks(each, RANKS) for each in networks]
        self.parts = parts
        for number, each in enumerate(self.networks):
            self.parts[f"network{number}"] = each
        self.checkpoints = ddpkit.Checkpoints(folder, **self.parts)

    def __iter__(self) -> Any:
        """Yield the batches of each step."""
        for _ in self.checkpoints.epochs(1):
            yield from self.checkpoints.steps(self.loader, *self.networks)

    def end(self) -> int:
        return samples.checksum(states.take_states(self.checkpoints.parts))


def train(
    folder: Path,
    model: nn.Module,
    optimizer: Any = None,
    change: Callable = bool,
    loss: Callable = F.cross_entropy,
    **more: Any,
) -> int:
    """Train `model`; `change` is called before each step of the optimizer."""
    optimizer = optimizer or AdamW(model.parameters(), 0.01)
    loop = Loop(folder, model, optimizer=optimizer, **more)
    for batches in loop:
        add_gradients(loop.networks[0], batches, loss)
        change(loop.checkpoints.step)
        optimizer.step()
        optimizer.zero_grad()
    return loop.end()


def own_weights(folder: Path) -> int:
    """The optimizer also has weights that are in no network of virtual ranks."""
    layer = Unregistered()
    model = network(layer)
    criterion = CentredLoss()
    loose = nn.Parameter(torch.zeros(1))
    every = [model, layer.layers[0], criterion]
    weights = [loose, *itertools.chain(*(each.parameters() for each in every))]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return criterion(outputs + loose, targets) + loose.sum() ** 2

    optimizer = AdamW(weights, 0.01)
    return train(folder, model, optimizer, loss=loss, criterion=criterion)


def of_two(folder: Path) -> int:
    """Two networks in turn, with two backward() in a pass, and a penalty of gradients."""
    norm = parametrizations.spectral_norm
    first = nn.Sequential(
        nn.Linear(4, SIZE), nn.BatchNorm1d(SIZE), nn.ReLU(), nn.Linear(SIZE, 8)
    )
    second = nn.Sequential(norm(nn.Linear(8, SIZE)), nn.Tanh(), nn.Linear(SIZE, 1))
    optimizers = [Adam(each.parameters(), 0.01) for each in (first, second)]
    loop = Loop(folder, first, second, first=optimizers[0], second=optimizers[1])
    makes, judges = loop.networks
    for batches in loop:
        for x, _ in batches:
            F.softplus(-judges(x)).mean().backward()
            made = makes(torch.randn(len(x), 4)).detach().requires_grad_()
            found = judges(made)
            (slopes,) = torch.autograd.grad(found.sum(), made, create_graph=True)
            (slopes.norm(dim=1) - 1).square().mean().backward(retain_graph=True)
            F.softplus(found).mean().backward()
        optimizers[1].step()
        for x, _ in batches:
            F.softplus(-judges(makes(torch.randn(len(x), 4)))).mean().backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return loop.end()


def sharpness(folder: Path) -> int:
    """Two loops over the batches of a step."""
    model = network(nn.BatchNorm1d(SIZE))
    weights = list(model.parameters())
    optimizer = SGD(weights, 0.1)
    loop = Loop(folder, model, optimizer=optimizer)
    for batches in loop:
        add_gradients(loop.networks[0], batches, F.cross_entropy)
        nn.utils.clip_grad_norm_(weights, 0.05)
        moves = [weight.grad.clone() for weight in weights]
        optimizer.zero_grad()
        torch._foreach_add_([weight.data for weight in weights], moves)
        add_gradients(loop.networks[0], batches, F.cross_entropy)
        torch._foreach_sub_([weight.data for weight in weights], moves)
        optimizer.step()
        optimizer.zero_grad()
    return loop.end()


def closure(folder: Path) -> int:
    """The loss that LBFGS is told is that of all ranks, rounded once."""
    model = network(nn.Tanh())
    optimizer = LBFGS(model.parameters(), 0.1, 3, line_search_fn="strong_wolfe")
    loop = Loop(folder, model, optimizer=optimizer)
    for batches in loop:

        def evaluate(batches: Any = batches) -> float:
            optimizer.zero_grad()
            losses = []
            for x, y in batches:
                loss = F.cross_entropy(loop.networks[0](x), y)
                loss.backward()
                losses.append(loss.item())
            return math.fsum(itertools.chain(*distributed.gather_objects(losses)))

        optimizer.step(evaluate)
    return loop.end()


def teacher(folder: Path) -> int:
    """A second network that is not trained; it is in training mode."""
    model = network(nn.BatchNorm1d(SIZE), nn.Dropout(0.2))
    other = copy.deepcopy(model)
    optimizer = AdamW(model.parameters(), 0.01)
    average = AveragedModel(
        model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    loop = Loop(folder, model, optimizer=optimizer, teacher=other, average=average)
    for batches in loop:
        for x, y in batches:
            outputs = loop.networks[0](x)
            with torch.no_grad():
                wanted = other(x + 0.1 * torch.randn_like(x))
            (F.cross_entropy(outputs, y) + F.mse_loss(outputs, wanted)).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return loop.end()


def changing(folder: Path) -> int:
    """Frozen and unfrozen, a group added, buffers and attributes changed between steps."""
    model = network(Renorm(), Attributes(), nn.Linear(SIZE, SIZE))
    optimizer = AdamW(model[0].parameters(), 0.01)

    def change(step: int) -> None:
        model[1].scale.mul_(1.01)
        model[2].scale = 1.5
        model[2].sums.clear()
        for weight in model[3].parameters():
            weight.requires_grad_(step % 3 != 1)
        if step == 2:
            optimizer.add_param_group({"params": model[4].parameters(), "lr": 0.02})

    return train(folder, model, optimizer, change)


def added_up(folder: Path) -> int:
    """Gradients of two steps, without zero_grad() between them."""
    model = network(nn.BatchNorm1d(SIZE))
    optimizer = AdamW(model.parameters(), 0.001)
    loop = Loop(folder, model, optimizer=optimizer)
    for batches in loop:
        add_gradients(loop.networks[0], batches, F.cross_entropy)
        optimizer.step()
        if loop.checkpoints.step % 2:
            optimizer.zero_grad()
    return loop.end()


def scaled(folder: Path) -> int:
    """In fp16 one virtual rank has an infinite loss: no rank takes that step."""
    model = network(nn.BatchNorm1d(SIZE))
    optimizer = AdamW(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=2)
    loop = Loop(folder, model, optimizer=optimizer, scaler=scaler)
    for batches in loop:
        for x, y in batches:
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(loop.networks[0](x).float(), y)
            if loop.checkpoints.rank == 5 and loop.checkpoints.step == 2:
                loss = loss * math.inf
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return loop.end()


MIDDLES: dict[str, Callable[[], list[nn.Module]]] = {
    "BatchNorm": lambda: [
        nn.BatchNorm1d(SIZE, momentum=None),
        nn.BatchNorm1d(SIZE).eval(),
    ],
    "ghost and batch renorm": lambda: [GhostNorm(), Renorm()],
    "InstanceNorm, GroupNorm": lambda: [
        nn.Unflatten(1, (4, 4)),
        nn.InstanceNorm1d(4, track_running_stats=True, affine=True),
        nn.Flatten(),
        nn.GroupNorm(4, SIZE),
    ],
    "weight norm, spectral norm": lambda: [
        parametrizations.weight_norm(nn.Linear(SIZE, SIZE)),
        parametrizations.spectral_norm(nn.Linear(SIZE, SIZE)),
        nn.utils.spectral_norm(nn.Linear(SIZE, SIZE)),
    ],
    "attributes": lambda: [Attributes()],
    "generators": lambda: [Generators()],
    "chance": lambda: [Chance()],
    "a queue, hooks": lambda: [Queue(), Hooks()],
    "tied weights": lambda: [Tied()],
    "checkpointing": lambda: [Checkpointed()],
    "dtypes": lambda: [Complex()],
}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "foreach": functools.partial(SGD, lr=0.1, momentum=0.9, foreach=True),
    "fused": functools.partial(AdamW, lr=0.01, fused=True),
    "muon": functools.partial(timm.optim.create_optimizer_v2, opt="muon", lr=0.01),
}


def with_middle(middle: Callable, folder: Path, **how: Any) -> int:
    return train(folder, network(*middle()), **how)


def with_optimizer(make: Callable, folder: Path) -> int:
    model = network(nn.BatchNorm1d(SIZE))
    return train(folder, model, make(model.parameters()))


LOOPS = own_weights, of_two, sharpness, closure, teacher, changing, added_up, scaled


def run_cases(folder: Path, only: str = "") -> dict[str, int]:
    """Return what each case has come to, or each that begins so."""
    cases: dict[str, Callable[[Path], int]] = {}
    for name, middle in MIDDLES.items():
        cases[name] = functools.partial(with_middle, middle)
    for name in "BatchNorm", "attributes":
        cases[f"{name}, accumulated"] = functools.partial(cases[name], accumulate=2)
    for name, make in OPTIMIZERS.items():
        cases[name] = functools.partial(with_optimizer, make)
    cases |= {loop.__name__: loop for loop in LOOPS}
    found = {}
    for name in filter(lambda name: name.startswith(only), cases):
        torch.manual_seed(0)
        found[name] = cases[name](folder / name)
    return found
