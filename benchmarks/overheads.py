"""What the project's own machinery adds to a training step: with and without it.

Two questions. By default, on the CPU: how much longer is a step of a real network? The cases share
one network, and main.train_one_epoch has its own loader (no workers) over images in memory:

as it is                      no terminal, so no progress bar is drawn; the baseline
--save-every 10               with checkpoints, each flushed to the disk under the temporary folder
progress bar drawn            as on a terminal
no reporting                  no loss shown, no progress bar, no time taken of the waits
no keyed random numbers       samples.seed does nothing, neither in a pass nor for a sample
no stop watcher               signals are not watched, nor whether the training hangs

Whole epochs are timed and divided by their steps. Speeds above 1: that much faster without it.

With --host: how much longer is the host busy with a step, beside a GPU that has to wait for it? All
weights of the network are single numbers, and images have one pixel. CPU time of the main thread,
against a bare loop around DistributedDataParallel that normalises the same batches, with the same
optimizer. --parts: what a step saves without one part of it.
"""

import contextlib
import os
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import common
import torch
from step import WARM_UP, Bench, Feed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

BASELINE = "as it is"
BARE = "bare DDP loop"
WRAPPED = f"{BARE}, our settings of DDP"
DEFAULTS = {
    "classification": "--arch resnet18 --image-size 64 --batch-size 16",
    "segmentation": "--encoder resnet18 --image-size 64 --batch-size 4",
}
HOST_DEFAULTS = {
    "classification": "--arch resnet50 --batch-size 32",
    "segmentation": "--arch unet --encoder resnet34 --batch-size 32",
}


class HostFeed(Feed):
    """A Feed that takes the CPU time of the thread that trains, too."""

    def __iter__(self) -> Iterator[tuple]:
        for number, batch in enumerate(super().__iter__()):
            now = time.thread_time()
            step = number / self.passes
            if step == WARM_UP:
                began = now
            elif step == WARM_UP + self.steps:
                self.cpu_seconds = now - began
            yield batch


class Shrunk(nn.Module):
    """The modules and weights of `net`, each weight a single number, and hardly any computing.

    (N, C, 1, 1) -> logits (N, classes), or (N, classes, 1, 1) if `is_dense`.
    """

    def __init__(self, net: nn.Module, classes: int, is_dense: bool) -> None:
        super().__init__()
        self.net = net
        self.classes = classes
        self.is_dense = is_dense
        for module in net.modules():
            for name, weight in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.zeros((1,) * weight.ndim)))
        self.own = list(net.parameters())

    def forward(self, images: Tensor) -> Tensor:
        sum = torch.cat([weight.view(1) for weight in self.own]).sum()
        logits = (images[:, :1] + sum).expand(-1, self.classes, -1, -1)
        return logits if self.is_dense else logits.flatten(1)


class HostBench(Bench):
    """Loops around a network of almost no size: of one layer, or with all layers of --arch."""

    is_whole = False  # whether with all layers

    def network(self) -> nn.Module:
        net = super().network() if self.is_whole else nn.Linear(1, 1)
        return Shrunk(net, len(self.classes), "encoder" in self.args).to(self.device)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        import recipe

        return recipe.build_optimizer(model, self.args)

    def bare_ddp(self, wrap: Callable[..., nn.Module]) -> Callable[[Feed], None]:
        model = self.network()
        ddp_model = wrap(model)
        optimizer = self.optimizer(model)
        mean = torch.rand(3, 1, 1, device=self.device)
        std = torch.rand(3, 1, 1, device=self.device)
        has_amp = self.args.amp != "off"

        def loop(feed: Feed) -> None:
            ddp_model.train()
            for images, targets in feed:
                images = images.to(self.device, non_blocking=True)
                targets = targets.to(self.device, non_blocking=True).long()
                images = images.float().div_(255).sub_(mean).div_(std)
                with self.autocast() if has_amp else contextlib.nullcontext():
                    loss = nn.functional.cross_entropy(ddp_model(images), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        return loop


def parts() -> dict[str, Callable[[], Any]]:
    """Return, by name of a part of the step, what makes the context in which it does nothing."""
    import main as project
    import recipe
    from ddpkit.data import normalizing, samples
    from ddpkit.ranks import stopping
    from ddpkit.run import criterion
    from ddpkit.run.loop import Run
    from ddpkit.run.reporting import Reporter

    def end_step(run: Run, *_: object) -> None:
        run.progress.step += 1
        run.progress.seen += run.source.global_batch

    def without(place: object, name: str, do: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: mock.patch.object(place, name, do)

    null = contextlib.nullcontext()
    scaler = torch.amp.GradScaler
    scheduler = torch.optim.lr_scheduler.LambdaLR
    return {
        "samples.seed": without(samples, "seed", lambda *_: None),
        "normalizing.normalize_images": without(
            normalizing, "normalize_images", lambda images, _: images.float()
        ),
        "transform_batch": without(project, "transform_batch", lambda x, y, *_: (x, y)),
        "recipe.autocast": without(recipe, "autocast", lambda *_: null),
        "to_float32": without(criterion, "to_float32", lambda outputs: outputs),
        "criterion.count": without(
            criterion.Criterion,
            "count",
            lambda _, targets: torch.tensor(targets.numel()),
        ),
        "reduce_tensor": without(project.ddp, "reduce_tensor", lambda tensor: tensor),
        "report.progress": without(
            Reporter, "progress", lambda _, batches, *__: batches
        ),
        "the log": without(Run, "_log", lambda *_: None),
        "scaler.scale": without(scaler, "scale", lambda _, loss: loss),
        "scaler.update": without(scaler, "update", lambda _: None),
        "scheduler.step": without(scheduler, "step", lambda _: None),
        "run.end_step": without(Run, "end_step", end_step),
        "of it the stop watcher": without(stopping, "end_step", lambda: None),
    }


def compare_hosts(flags: Namespace, folder: Path) -> None:
    """Print the host's time for a step of ours and of bare loops, and what each part takes."""
    import main as project
    from ddpkit.ranks import distributed

    bench = HostBench(folder, flags.flags)
    torch.set_num_threads(1)
    args = bench.args
    device = bench.device
    side = (1, 1) if flags.task == "segmentation" else ()
    images = torch.randint(256, (args.batch_size, 3, 1, 1), dtype=torch.uint8)
    targets = torch.randint(common.CLASSES, (len(images), *side))
    feed = HostFeed(
        (images.to(device), targets.to(device)), flags.steps, args.accumulate
    )
    found: dict[str, list[list[str]]] = {}  # cells of a row, by name
    for bench.is_whole in (False, True):
        walls: dict[str, list[float]] = {}

        def case(
            name: str, loop: Callable, made: Callable, walls: dict = walls
        ) -> float:
            with made():
                walls.setdefault(name, []).append(feed.time(loop))
            return feed.cpu_seconds / feed.steps

        nothing = contextlib.nullcontext
        plain = partial(
            DistributedDataParallel,
            device_ids=None if device.index is None else [device],
        )
        ours = bench.ours()
        bare = bench.bare_ddp(plain)
        wrapped = bench.bare_ddp(project.wrap)
        cases: common.Cases = {
            BARE: partial(case, BARE, bare, nothing),
            WRAPPED: partial(case, WRAPPED, wrapped, nothing),
            BASELINE: partial(case, BASELINE, ours, nothing),
        }
        for name, made in parts().items() if flags.parts else ():
            cases[name] = partial(case, name, ours, made)
        common.interleave(cases, 1)
        walls.clear()
        figures = common.interleave(cases, flags.repeats)

        for name in list(cases)[:3]:
            times = [1e6 * statistics.median(own[name]) for own in (figures, walls)]
            found.setdefault(name, []).append([f"{time:.0f}" for time in times])
        for name in list(cases)[3:]:
            saved = [difference(own[BASELINE], own[name]) for own in (figures, walls)]
            found.setdefault(name, []).append(saved)
        for name in (BARE, WRAPPED):
            more = [difference(own[BASELINE], own[name]) for own in (figures, walls)]
            found.setdefault(f"ours - {name}", []).append(more)
    distributed.teardown()
    weights = sum(1 for _ in bench.network().parameters())
    print(
        "\n| us a step | one layer, CPU | in all | "
        + f"{weights} weights, CPU | in all |"
    )
    print("|---" * 5 + "|")
    for name, cells in found.items():
        print(f"| {name} | {' | '.join(cell for pair in cells for cell in pair)} |")


def difference(these: list[float], those: list[float]) -> str:
    """Return the median of differences within a turn, in microseconds."""
    return f"{1e6 * statistics.median(a - b for a, b in zip(these, those, strict=True)):.0f}"


def compare(flags: Namespace, folder: Path) -> dict[str, list[float]]:
    from ddpkit.data import samples
    from ddpkit.ranks import distributed, stopping
    from ddpkit.run import reporting
    from ddpkit.run.loop import Run

    bench = Bench(folder, flags.flags)
    count = flags.steps * bench.args.batch_size
    side = bench.args.image_size
    images = torch.randint(256, (count, side, side, 3), dtype=torch.uint8).movedim(
        -1, 1
    )
    shape = (count, side, side) if flags.task == "segmentation" else (count,)
    targets = torch.randint(common.CLASSES, shape, dtype=torch.uint8)
    run, train = bench.run_and_epoch(TensorDataset(images, targets))

    def epoch(
        *without: Callable[[], Any], save_every: int = 0, is_watched: bool = True
    ) -> float:
        """Return seconds a step, in the contexts that `without` make."""
        run.save_every = save_every
        with contextlib.ExitStack() as stack:
            for make in without:
                stack.enter_context(make())
            if is_watched:
                stack.enter_context(stopping.on_signals(str))
            began = time.perf_counter()
            train()
            return (time.perf_counter() - began) / flags.steps

    def silent(_: Any, batches: Iterator, *__: Any) -> Iterator:
        return batches

    null = open(os.devnull, "w")  # noqa: SIM115  as long as the process
    reporting_tqdm = reporting.tqdm

    def drawn(**options: Any) -> Any:
        return reporting_tqdm(**options | {"disable": False, "file": null})

    Reporter = reporting.Reporter
    cases: common.Cases = {
        BASELINE: epoch,
        "--save-every 10": partial(epoch, save_every=10),
        "progress bar drawn": partial(
            epoch, lambda: mock.patch.object(reporting, "tqdm", drawn)
        ),
        "no reporting": partial(
            epoch,
            lambda: mock.patch.object(Reporter, "progress", silent),
            lambda: mock.patch.object(Run, "_log", lambda *_: None),
            lambda: mock.patch.object(Reporter, "speed", lambda _: {}),
        ),
        "no keyed random numbers": partial(
            epoch, lambda: mock.patch.object(samples, "seed", lambda *_: None)
        ),
        "no stop watcher": partial(epoch, is_watched=False),
    }
    common.interleave({BASELINE: epoch}, 1)  # to warm up
    figures = common.interleave(cases, flags.repeats)
    distributed.teardown()
    return figures


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--steps", type=int, help="in a figure; default: 40, with --host 100"
    )
    parser.add_argument("--flags", help="of main.py, in quotes; default: by task")
    parser.add_argument(
        "--host", action="store_true", help="the host's time for a step"
    )
    parser.add_argument(
        "--parts", action="store_true", help="with --host: by part, too"
    )
    parser.add_argument(
        "--device", choices=("cpu", "gpu"), default="cpu", help="with --host"
    )
    flags = parser.parse_args()
    flags.flags = flags.flags or (HOST_DEFAULTS if flags.host else DEFAULTS)[flags.task]
    flags.steps = flags.steps or (100 if flags.host else 40)
    if flags.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with common.generated(flags.task) as folder:
        common.say_machine(flags)
        if flags.host:
            return compare_hosts(flags, folder)
        figures = compare(flags, folder)
    common.table(figures, "ms a step", BASELINE, scale=1000)


if __name__ == "__main__":
    main()
