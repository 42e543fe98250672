"""A training step: what it costs, what it learns, in which portions; half precision; compiled."""

import inspect
import json
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from digest import digest
from generated import Project, after_step, both_tasks, rows, run
from ranks import on_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import ddpkit
from ddpkit.data import folders
from ddpkit.data.format import Format
from ddpkit.run import loop as loops


def weights(folder: Path) -> dict[str, Tensor]:
    return torch.load(folder / "last.pt", weights_only=True)["model"]


def test_nothing_waits_in_a_step(project: Project, data: Path, tmp_path: Path) -> None:
    """No collective but the gradients', once a step; no number is read off the device."""
    profile = torch.profiler.profile()

    def profiled() -> None:
        loops.SECONDS_BETWEEN_CHECKS = math.inf  # the loss is read by time
        after_step(2, profile.start)()
        after_step(5, stop)()

    def stop() -> None:
        profile.stop()
        counts = {event.key: event.count for event in profile.key_averages()}
        (tmp_path / f"rank{ddpkit.rank()}.json").write_text(json.dumps(counts))

    sums = set()
    for accumulate, batch_size in (1, 4), (2, 2):
        # AdamW reads its count of steps, which lies on the CPU here.
        words = ["--clip-grad-norm", 1, "--optimizer", "sgd", "--image-size", 32]
        words += ["--accumulate", accumulate, "--batch-size", batch_size]
        project.train(data, tmp_path / str(accumulate), *words, patch=profiled).ok()
        for rank in (0, 1):
            counts = json.loads((tmp_path / f"rank{rank}.json").read_text())
            assert counts["DistributedDataParallel.forward"] == 3 * accumulate
            collectives = {name: n for name, n in counts.items() if name.startswith("c10d::")}
            assert collectives.keys() == {"c10d::allreduce_"}
            sums.add(collectives["c10d::allreduce_"])
            assert not {"aten::_local_scalar_dense", "aten::item", "aten::nonzero"} & counts.keys()
    assert len(sums) == 1  # the buckets of the gradients, whatever is accumulated


PLANTS = ["loss_sum.item()", "outputs.cpu()", "loss_sum > 9 and 0", "outputs[targets > 0]"]
PLANTS += ["print(loss_sum)", "f'{loss_sum:.3f}'", "str({'loss': loss_sum})"]


@pytest.mark.parametrize("plant", [*PLANTS, "print(i, loss_sum.shape)"])
@on_ranks(1, group=False)
def test_the_projects_own_test_of_a_step(project: Project, few: Path, plant: str) -> None:
    """It finds what would make the device wait, and names the line."""
    sys.path.insert(0, "tests")
    import test_project

    import main

    code = main.train_one_epoch.__code__
    source = "\n" * (code.co_firstlineno - 1) + inspect.getsource(main.train_one_epoch)
    planted = source.replace("loss = run.loss(", f"{plant}; loss = run.loss(")
    exec(compile(planted, code.co_filename, "exec"), vars(main))
    with pytest.MonkeyPatch.context() as patch:
        try:
            test_project.test_a_step_reads_nothing_off_the_device(few, patch)
            found = ""
        except pytest.fail.Exception as error:
            found = str(error)
    if plant in PLANTS:
        assert found.startswith("main.py:") and "run.loss(" in found
    else:
        assert not found


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


@both_tasks
@on_ranks(1, group=False)
def test_what_a_step_costs_the_host(project: Project, tmp_path: Path) -> None:
    """Operations of torch, and calls of functions, more than in a bare loop with the same network.

    On a GPU each operation is a kernel to launch, for which the device may have to wait.
    """
    import distributed
    import main
    import model
    import recipe
    from flags import parse_args

    args, classes = parse_args(["--amp", "off"]), ["a", "b", "c"]
    device, is_dense = distributed.setup(0), project.task == "segmentation"
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
    place = ddpkit.Folder(tmp_path), loader, loader, classes
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
    more = []
    with run:
        for measure in operations_of, calls_of:
            each = []
            for loop in ours, bare:
                loop(3)
                each.append((measure(loop, 13) - measure(loop, 3)) / 10)
            more.append(each[0] - each[1])
    assert 0 <= more[0] <= (20 if is_dense else 6)  # labelled pixels have to be counted
    assert 0 < more[1] <= 300  # to search the network at each step takes 500
    torch.distributed.destroy_process_group()


def test_accumulation_equals_a_large_batch(project: Project, data: Path, tmp_path: Path) -> None:
    """And so do ranks; gradients are clipped once they are whole."""

    def plain() -> None:
        import recipe

        nn.Dropout.forward = lambda self, x: x
        recipe.build_optimizer = lambda net, args: torch.optim.SGD(net.parameters(), args.lr)

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
        words = ["--image-size", 32, "--warmup-epochs", 0, "--arch", "squeezenet1_1", "--lr", 0.01]
        words += ["--batch-size", batch_size, "--accumulate", accumulate, *rest]
        project.train(data, tmp_path / name, *words, on=ranks, patch=plain).ok()
    start, one = weights(tmp_path / "start"), weights(tmp_path / "one")

    def way(name: str, origin: dict[str, Tensor] = start) -> float:
        now = weights(tmp_path / name)
        return sum((now[key] - origin[key]).square().sum().item() for key in origin) ** 0.5

    assert way("one") > 1e-3
    for name in "four", "ranks":
        assert way(name, one) < 1e-4 * way("one")
    assert way("twice", one) > 0.1 * way("one")
    for name in "clipped", "bf16":
        assert 1e-6 < way(name) < 6.01e-6


def test_half_precision(project: Project, data: Path, tmp_path: Path) -> None:
    """fp16 skips steps until its scale fits, resumes with that scale, and does not go astray."""
    words = ["--arch", "squeezenet1_1", "--image-size", 32, "--optimizer", "sgd", "--lr", 0.01]
    killed = after_step(4, lambda: os.kill(os.getpid(), signal.SIGKILL))
    found = {}
    for name, kind in ("whole", "fp16"), ("stop", "fp16"), ("bf16", "bf16"), ("off", "off"):
        out, more = tmp_path / name, ["--amp", kind, "--save-every", 1]
        if name == "stop":
            first = project.train(data, out, *words, *more, patch=killed)
            assert first.statuses == [-9, -9]
        project.train(data, out, *words, *more).ok()
        found[name] = digest(out)
    assert found["whole"] == found["stop"]
    assert len({*found.values()}) == 3
    state = torch.load(tmp_path / "whole" / "last.pt", weights_only=True)
    assert state["scaler"]["scale"] < 2**16
    assert float(rows(tmp_path / "whole")[0]["train_loss"]) < 2


def test_compiled(project: Project, few: Path, tmp_path: Path) -> None:
    """Its checkpoints fit an uncompiled network."""

    def tiny() -> None:
        import model

        def build_model(args: object, classes: list[str], *_: object) -> nn.Module:
            ends = [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
            return nn.Sequential(nn.Conv2d(3, 8, 3, 4), *ends, nn.Linear(8, len(classes)))

        model.build_model = build_model

    def counting() -> None:
        from torch._dynamo.utils import counters

        tiny()
        end = loops.Run.end_epoch

        def told(*args: object, **more: object) -> object:
            print(f"compiled {counters['stats']['unique_graphs']} graph(s)", flush=True)
            return end(*args, **more)

        loops.Run.end_epoch = told

    done = project.train(few, tmp_path, "--compile", on=1, patch=counting).ok()
    assert "compiled 1 graph(s)" in done.out
    assert "1 of 2 epochs done" in project.train(few, tmp_path, "--epochs", 2, patch=tiny).ok().out


def test_workers_do_not_copy_the_list_of_samples() -> None:
    """What a forked worker's own memory grows by, in kilobytes, while it looks at each sample."""

    def private() -> int:
        text = Path("/proc/self/smaps_rollup").read_text()
        return int(text.split("Private_Dirty:")[1].split()[0])

    def grown(samples: Any) -> int:
        receive, send = os.pipe()
        if not (pid := os.fork()):
            before = private()
            for index in range(len(samples)):
                _path, _mask = samples[index]
            os.write(send, str(private() - before).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        return int(os.read(receive, 99))

    samples = [(f"train/{number:050}.jpg", f"{number:050}.png") for number in range(100_000)]
    packed = folders.Files(folders.Part(samples, Format()), None).samples
    assert list(packed) == samples
    assert grown(samples) > 20_000  # what it is that the test would see
    assert grown(packed) < 2_000


NOT_FORKED = """
import multiprocessing, sys

def main(source, store):
    multiprocessing.set_start_method("forkserver")
    import torch
    from torch.utils.data import DataLoader
    import dataset, ddpkit, distributed
    from ddpkit.ranks import process
    from ddpkit.tools import prepare
    from flags import parse_args

    process.worker_context = lambda workers: None  # Python's default, on Linux too
    prepare.main(["--data", source, "--output", store, "--short-side", "0", "--workers", "1"])
    device = distributed.setup(3)
    train, _, classes = dataset.build_datasets(parse_args(["--data", store, "--image-size", "32"]))
    found = []
    for workers in 0, 1:
        options = {"collate_fn": ddpkit.Collate(), **ddpkit.workers(workers, device)}
        sampler = ddpkit.TrainSampler(train, 4, accumulate=1, seed=3)
        seeded = ddpkit.Seeded(train, classes, seed=3)
        found.append(list(DataLoader(seeded, 4, sampler=sampler, **options)))
    for one, other in zip(*found, strict=True):
        assert all(map(torch.equal, one, other))

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def test_workers_that_are_not_forked(project: Project, few: Path, tmp_path: Path) -> None:
    """Under forkserver, the default of Python 3.14: the same store, and the same samples."""
    script, store = tmp_path / "script.py", tmp_path / "store"
    script.write_text(NOT_FORKED)
    command = [sys.executable, script, few, store]
    run(command, cwd=project.folder, PYTHONPATH=str(project.folder)).ok()
    words = ["--data", few, "--output", tmp_path / "other", "--short-side", 0]
    project.run(*words, script="ddpkit prepare", on=1).ok()
    for name in "pixels.bin", "rows.bin", "index.json":
        assert (store / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
