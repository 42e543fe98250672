"""What the project's own machinery adds to a training step.

Two questions. By default, on the CPU: how much longer is a step of a real network? The cases share
one network, and main.train_one_epoch has its own loader (no workers) over images in memory:

as it is                      no terminal, so no progress bar is drawn; the baseline
--save-every 10               with checkpoints, each flushed to the disk under the temporary folder
--log-every 10                with lines and TensorBoard's curves
progress bar drawn            as on a terminal

Whole epochs are timed and divided by their steps.

With --host: how much longer is the host busy with a step, beside a GPU that has to wait for it? All
weights of the network are single numbers, and images have one pixel. CPU time of the main thread,
against bare loops around DistributedDataParallel that normalise the same batches, with the same
optimizer; one of them divides by the labels of all ranks, as ours does. --profile: in which
functions the steps of ours spend it, which a profiler makes slower.
"""

import contextlib
import cProfile
import io
import os
import pstats
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch
from step import WARM_UP, Bench, Feed, Ours
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

BASELINE = "as it is"
MOST = 40  # functions of a profile
BARE = "bare DDP loop"
WRAPPED = f"{BARE}, our settings of DDP"
COUNTED = f"{WRAPPED}, loss / labels of all ranks"
DEFAULTS = {
    "classification": "--arch resnet18 --image-size 64 --batch-size 16",
    "segmentation": "--encoder resnet18 --image-size 64 --batch-size 4",
}
HOST_DEFAULTS = {
    "classification": "--arch resnet50 --batch-size 32",
    "segmentation": "--arch unet --encoder resnet34 --batch-size 32",
}


class HostFeed(Feed):
    """A Feed that takes the CPU time of the thread that trains, too, and may profile it."""

    profiler: cProfile.Profile | None = None

    def __iter__(self) -> Iterator[tuple]:
        for number, batch in enumerate(super().__iter__()):
            now = time.thread_time()
            step = number / self.passes
            if step == WARM_UP:
                began = now
                if self.profiler:
                    self.profiler.enable()
            elif step == WARM_UP + self.steps:
                if self.profiler:
                    self.profiler.disable()
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

    def bare_ddp(
        self, wrap: Callable[..., nn.Module], is_counted: bool = False
    ) -> Callable[[Feed], None]:
        """Return a loop; is_counted: with a collective of the number of labels in each step."""
        import ddp

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
                kind = "sum" if is_counted else "mean"
                with self.autocast() if has_amp else contextlib.nullcontext():
                    loss = nn.functional.cross_entropy(
                        ddp_model(images), targets, reduction=kind
                    )
                if is_counted:
                    count = ddp.reduce_tensor((targets != -100).sum())
                    loss = loss * torch.distributed.get_world_size() / count
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        return loop


def compare_hosts(flags: Namespace, folder: Path) -> None:
    """Print the host's time for a step of ours and of bare loops; or profile ours."""
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
        if flags.profile:
            profile(Ours(bench), feed)
            continue
        walls: dict[str, list[float]] = {}

        def case(name: str, loop: Callable, walls: dict = walls) -> float:
            walls.setdefault(name, []).append(feed.time(loop))
            return feed.cpu_seconds / feed.steps

        plain = partial(
            DistributedDataParallel,
            device_ids=None if device.index is None else [device],
        )
        loops = {
            BARE: bench.bare_ddp(plain),
            WRAPPED: bench.bare_ddp(project.wrap),
            COUNTED: bench.bare_ddp(project.wrap, is_counted=True),
            BASELINE: Ours(bench),
        }
        cases: common.Cases = {
            name: partial(case, name, loop) for name, loop in loops.items()
        }
        common.interleave(cases, 1)
        walls.clear()
        figures = common.interleave(cases, flags.repeats, flags.seconds)

        for name in cases:
            times = [1e6 * statistics.median(own[name]) for own in (figures, walls)]
            found.setdefault(name, []).append([f"{time:.0f}" for time in times])
        for name in (BARE, WRAPPED, COUNTED):
            more = [difference(own[BASELINE], own[name]) for own in (figures, walls)]
            found.setdefault(f"ours - {name}", []).append(more)
    distributed.teardown()
    if flags.profile:
        return
    weights = sum(1 for _ in bench.network().parameters())
    print(
        "\n| us a step | one layer, CPU | in all | "
        + f"{weights} weights, CPU | in all |"
    )
    print("|---" * 5 + "|")
    for name, cells in found.items():
        print(f"| {name} | {' | '.join(cell for pair in cells for cell in pair)} |")


def profile(ours: Ours, feed: HostFeed) -> None:
    """Print the functions in which the steps of ours spend most time, without what they call."""
    feed.time(ours)  # to warm up
    feed.profiler = cProfile.Profile()
    feed.time(ours)
    stats = pstats.Stats(feed.profiler).stats
    feed.profiler = None
    rows = [("us a step", "calls a step", "function")]
    # of each: calls, of which are no recursion, seconds, with what it calls, callers
    for where, (_, calls, seconds, *_) in sorted(
        stats.items(), key=lambda item: -item[1][2]
    )[:MOST]:
        path, line, name = where
        place = "/".join(Path(path).parts[-2:])
        each = f"{1e6 * seconds / feed.steps:.1f}", f"{calls / feed.steps:.1f}"
        rows.append((*each, f"{place}:{line} {name}" if line else name))
    common.markdown(rows)


def difference(these: list[float], those: list[float]) -> str:
    """Return the median of differences within a turn, in microseconds."""
    return f"{1e6 * statistics.median(a - b for a, b in zip(these, those, strict=True)):.0f}"


class Terminal(io.StringIO):
    """A stream on which a progress bar is drawn."""

    def isatty(self) -> bool:
        return True


def compare(flags: Namespace, folder: Path) -> dict[str, list[float]]:
    from ddpkit.ranks import distributed

    bench = Bench(folder, flags.flags)
    count = flags.steps * bench.args.batch_size
    side = bench.args.image_size
    images = torch.randint(256, (count, side, side, 3), dtype=torch.uint8).movedim(
        -1, 1
    )
    shape = (count, side, side) if flags.task == "segmentation" else (count,)
    targets = torch.randint(common.CLASSES, shape, dtype=torch.uint8)
    dataset = TensorDataset(images, targets)
    ours = Ours(bench)

    def epoch(is_drawn: bool = False, **options: Any) -> float:
        """Return seconds a step; options: of Run."""
        drawn = contextlib.redirect_stderr(Terminal())
        with (
            drawn if is_drawn else contextlib.nullcontext(),
            ours.run(dataset, **options) as run,
        ):
            began = time.perf_counter()
            ours.train(run)
            return (time.perf_counter() - began) / flags.steps

    cases: common.Cases = {
        BASELINE: epoch,
        "--save-every 10": partial(epoch, save_every=10),
        "--log-every 10": partial(epoch, log_every=10),
        "progress bar drawn": partial(epoch, is_drawn=True),
    }
    common.interleave({BASELINE: epoch}, 1)  # to warm up
    figures = common.interleave(cases, flags.repeats, flags.seconds)
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
        "--profile", action="store_true", help="with --host: in which functions"
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
