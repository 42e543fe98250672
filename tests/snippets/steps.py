"""What a training step does, in which portions, and how fast its pictures come."""

import inspect
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from forked import run
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import ddpkit
import main
import model
import recipe
from ddpkit.run import loop as loops
from ddpkit.run.loop import Run
from flags import parse_args


def profiled() -> None:
    """Leave rank<n>.json: how often each thing was done in three optimizer steps."""
    loops.SECONDS_BETWEEN_CHECKS = (
        math.inf
    )  # the loss is read by time, and this machine may be slow
    end_step = Run.end_step
    profile = torch.profiler.profile()

    def patched(self: Run) -> None:
        end_step(self)
        if self.step == 2:
            profile.start()
        elif self.step == 5:
            profile.stop()
            counts = {event.key: event.count for event in profile.key_averages()}
            path = Path(self.folder.path, f"rank{os.environ['RANK']}.json")
            path.write_text(json.dumps(counts))

    Run.end_step = patched


def profiles(data: str, folder: str) -> None:
    """With and without accumulation."""
    flags = ["--data", data, "--weights", "none", "--epochs", 1, "--image-size", 32, "--workers", 1]
    # AdamW reads its count of steps, which lies on the CPU here.
    flags += ["--clip-grad-norm", 1, "--optimizer", "sgd"]
    for accumulate, batch_size in (1, 4), (2, 2):
        more = "--accumulate", accumulate, "--batch-size", batch_size
        out = "--output-dir", f"{folder}/{accumulate}"
        assert run(2, *flags, *more, *out, patch=profiled, draws=False) == [0, 0]


def readings(data: str, plants: list[str]) -> list[str]:
    """What the project's own test says of a step with each of `plants` in it; "" if nothing."""
    sys.path.insert(0, "tests")
    import test_project

    found = []
    code = main.train_one_epoch.__code__
    source = "\n" * (code.co_firstlineno - 1) + inspect.getsource(main.train_one_epoch)
    for plant in plants:
        planted = source.replace("loss = run.loss(", f"{plant}; loss = run.loss(")
        exec(compile(planted, code.co_filename, "exec"), vars(main))
        with pytest.MonkeyPatch.context() as patch:
            try:
                test_project.test_a_step_reads_nothing_off_the_device(Path(data), patch)
                found.append("")
            except pytest.fail.Exception as error:
                found.append(str(error))
    return found


def portions(data: str, folder: str) -> None:
    """Train from the same weights in other portions; without dropout, BatchNorm and momentum."""

    def plain() -> None:
        torch.nn.Dropout.forward = lambda self, x: x
        recipe.build_optimizer = lambda net, args: torch.optim.SGD(net.parameters(), args.lr)

    flags = ["--data", data, "--weights", "none", "--image-size", 32, "--epochs", 1, "--workers", 0]
    flags += ["--warmup-epochs", 0, "--arch", "squeezenet1_1"]
    clipped = ("--clip-grad-norm", 1e-6, "--lr", 1)
    for name, ranks, batch_size, accumulate, *rest in (
        ("start", 1, 48, 1, "--lr", 0),
        ("one", 1, 48, 1),
        ("four", 1, 12, 4),
        ("ranks", 2, 12, 2),
        ("twice", 1, 48, 1, "--lr", 0.02),
        ("clipped", 2, 2, 2, *clipped),
        ("bf16", 2, 2, 2, *clipped, "--amp", "bf16"),
    ):
        words = "--batch-size", batch_size, "--accumulate", accumulate, "--lr", 0.01, *rest
        out = "--output-dir", f"{folder}/{name}"
        assert run(ranks, *flags, *words, *out, patch=plain, draws=False) == [0] * ranks


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Operations(TorchDispatchMode):
    """Counts what torch has a device do, and views, which it is not asked for."""

    count = 0

    def __torch_dispatch__(
        self, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def calls_of(loop: Callable[[int], object], steps: int) -> int:
    """How many functions of Python and C this thread calls meanwhile."""
    count = 0

    def called(_: FrameType, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        loop(steps)
    finally:
        sys.setprofile(None)
    return count


def operations_of(loop: Callable[[int], object], steps: int) -> int:
    with Operations() as operations:
        loop(steps)
    return operations.count


def more_than_bare(folder: str, *words: str) -> list[float]:
    """Operations and calls of a step of train_one_epoch, less those of a bare loop."""
    args = parse_args(["--data", folder, "--amp", "off", *words])
    device, classes = main.distributed.setup(0), ["a", "b", "c"]
    is_dense = "encoder" in args  # segmentation
    images = torch.randint(256, (8, 3, 1, 1), dtype=torch.uint8)
    targets = torch.randint(3, (8, 1, 1) if is_dense else (8,))
    samples = TensorDataset(images[:1].expand(10**6, 3, 1, 1), torch.zeros(10**6, dtype=int))
    criterion = ddpkit.criterion(model.build_criterion(args, samples, classes))

    def parts() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
        head = [nn.Conv2d(3, 3, 1)] + ([] if is_dense else [nn.Flatten()])
        net = nn.Sequential(*(Scale() for _ in range(40)), *head)
        return net, ddpkit.wrap(net, device), recipe.build_optimizer(net, args)

    net, ddp_model, optimizer = parts()
    sampler = ddpkit.TrainSampler(samples, 8, accumulate=1, seed=0)
    loader = DataLoader(ddpkit.Seeded(samples, classes, 0), 8, sampler=sampler)
    own = {"optimizer": optimizer, "scheduler": recipe.build_scheduler(optimizer, args, 10**6)}
    own |= {"scaler": torch.amp.GradScaler("cpu", enabled=False)}
    Path(folder).mkdir()
    place = ddpkit.Folder(folder), loader, loader, classes
    run = ddpkit.Run(*place, model=net, **own, epochs=1, best="top1", flags=vars(args))

    def ours(steps: int) -> None:
        run.seen = 0
        run.source.batches = lambda *_: [(images, targets)] * steps
        main.train_one_epoch(run, ddp_model, criterion, **own, ema=None, args=args)

    _, bare_model, bare_optimizer = parts()
    mean, std = torch.rand(2, 3, 1, 1)

    def bare(steps: int) -> None:
        bare_model.train()
        for x, y in [(images, targets)] * steps:
            x = x.to(device).float().div_(255).sub_(mean).div_(std)
            nn.functional.cross_entropy(bare_model(x), y.to(device).long()).backward()
            bare_optimizer.step()
            bare_optimizer.zero_grad()

    loops.SECONDS_BETWEEN_CHECKS = math.inf
    found = []
    with run:
        for measure in operations_of, calls_of:
            each = []
            for loop in ours, bare:
                loop(3)
                each.append((measure(loop, 13) - measure(loop, 3)) / 10)
            found += [each[0] - each[1]]
    torch.distributed.destroy_process_group()
    return found
