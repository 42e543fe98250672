"""The training step: the project's train_one_epoch against other loops around the same network.

Every loop gets the same uint8 batch on the device again and again and normalises it there, has the
same network (channels last), precision (--amp) and number of threads, and torch's fused AdamW. The
clock runs from one batch to another, after some that do not count, with the device at rest at
either end. Its cases, in turn in one process:

ours              main.train_one_epoch as it is, with Run, Reporter, schedule and stop watcher
bare loop         forward, loss, backward, step, zero_grad; nothing is reported, nothing is wrapped
bare DDP loop     the same around DistributedDataParallel with its defaults, a group of one
timm              the bare loop with its LabelSmoothingCrossEntropy, and its AdamW as --opt-kwargs
                  fused=True of its train script makes it; classification only
Accelerate        Accelerator.prepare for network and optimizer, accelerator.backward
Lightning         Trainer.fit, automatic optimization; logger, progress bar and checkpoints off

CPU, small, by default. With `--device gpu`: ResNet-50 at 224 pixels, or U-Net with ResNet-34 at
512, in bf16, batches of 128 or 16. With `--compile`: only ours, without that flag of main.py and
with it.
"""

import contextlib
import importlib.util
import math
import os
import sys
import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, Subset, TensorDataset

LR = 0.001  # the project's own
WARM_UP = 5  # batches before the clock starts
SETTINGS = {  # (device, task): flags of main.py, and steps in a figure
    ("cpu", "classification"): ("--arch resnet18 --image-size 64 --batch-size 16", 20),
    ("cpu", "segmentation"): ("--encoder resnet18 --image-size 64 --batch-size 4", 20),
    ("gpu", "classification"): (
        "--arch resnet50 --image-size 224 --batch-size 128",
        50,
    ),
    ("gpu", "segmentation"): (
        "--encoder resnet34 --image-size 512 --batch-size 16",
        50,
    ),
}


class Feed:
    """Like a loader that yields one batch for `steps` steps, and some before; it times them.

    passes: batches in a step.
    """

    def __init__(self, batch: tuple, steps: int, passes: int = 1) -> None:
        self.batch = batch
        self.steps = steps
        self.passes = passes

    def __len__(self) -> int:
        return (WARM_UP + self.steps + 1) * self.passes

    def __iter__(self) -> Iterator[tuple]:
        for number in range(len(self)):
            step = number / self.passes
            if step in (WARM_UP, WARM_UP + self.steps):
                if self.batch[0].device.type != "cpu":
                    torch.accelerator.synchronize()
                now = time.perf_counter()
                if step == WARM_UP:
                    began = now
                self.seconds = now - began if step > WARM_UP else 0.0
            yield self.batch

    def time(self, loop: "Loop") -> float:
        """Return the seconds that a step of `loop` takes."""
        self.seconds = math.nan  # of a loop that does not read to the end
        loop(self)
        return self.seconds / self.steps


Loop = Callable[[Feed], Any]


class Bench:
    """What the loops share. Each gets a network and an optimizer of its own."""

    def __init__(self, folder: Path, words: str) -> None:
        """words: flags of the project's main.py, in one string."""
        import ddp
        import ddpkit
        import recipe
        from flags import parse_args
        from model import build_criterion

        own = ["--data", str(folder), "--output-dir", str(folder / "run")]
        self.args = args = parse_args(own + words.split())
        self.device = device = ddp.setup(args.local_rank, args)
        torch.backends.cudnn.benchmark = True  # as main.train_one_epoch sets it

        args.amp = recipe.choose_amp(args, device)
        args.batch_size = args.batch_size or 32
        self.classes = [f"class{number}" for number in range(common.CLASSES)]
        self.autocast = partial(recipe.autocast, args.amp, device)
        self.to_device = partial(common.on_device, device=device)
        # Its samples are counted, and never read.
        image = torch.zeros(3, 1, 1, dtype=torch.uint8)
        target = torch.zeros((), dtype=torch.uint8)
        self.samples = TensorDataset(image.expand(10**6, 3, 1, 1), target.expand(10**6))
        loss = build_criterion(args, self.samples, self.classes)
        self.criterion = ddpkit.Criterion(loss, self.classes).to(device)

    def loops(self) -> dict[str, Callable[[], Loop] | None]:
        """Return what builds each loop, by name; None for what is not installed."""
        device_ids = None if self.device.type == "cpu" else [self.device]
        made: dict[str, Callable[[], Loop] | None] = {
            "bare loop": partial(self.bare, lambda model: model),
            "bare DDP loop": partial(
                self.bare, partial(DistributedDataParallel, device_ids=device_ids)
            ),
            "ours": partial(Ours, self),
            "ours, --compile": partial(Ours, self, is_compiled=True),
        }
        for name in ("timm", "accelerate", "lightning"):
            if name != "timm" or "encoder" not in self.args:
                installed = importlib.util.find_spec(name)
                made[name] = getattr(self, name) if installed else None
        return made

    def network(self) -> nn.Module:
        from model import build_model

        torch.manual_seed(0)
        model = build_model(self.args, self.classes).to(self.device)
        return model.to(memory_format=torch.channels_last)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), LR, weight_decay=0.05, fused=True)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return uint8 images, channels last in memory, and targets."""
        count = self.args.batch_size
        side = self.args.image_size
        images = torch.randint(256, (count, side, side, 3), dtype=torch.uint8).movedim(
            -1, 1
        )
        shape = (count, side, side) if "encoder" in self.args else (count,)
        targets = torch.randint(common.CLASSES, shape, dtype=torch.uint8)
        return images.to(self.device), targets.to(self.device)

    def mean_loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.criterion(outputs, targets) / self.criterion.count(targets)

    def bare(
        self,
        wrap: Callable[[nn.Module], nn.Module],
        build_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        criterion: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ) -> Loop:
        model = wrap(self.network())
        criterion = criterion or self.mean_loss
        optimizer = (build_optimizer or self.optimizer)(model)

        def loop(feed: Feed) -> None:
            model.train()
            for images, targets in self.to_device(feed):
                with self.autocast():
                    outputs = model(images)
                criterion(outputs, targets).backward()
                optimizer.step()
                optimizer.zero_grad()

        return loop

    def timm(self) -> Loop:
        from timm.loss import LabelSmoothingCrossEntropy
        from timm.optim import create_optimizer_v2

        return self.bare(
            lambda model: model,
            partial(
                create_optimizer_v2, opt="adamw", lr=LR, weight_decay=0.05, fused=True
            ),
            LabelSmoothingCrossEntropy(0.1),
        )

    def accelerate(self) -> Loop:
        from accelerate import Accelerator

        accelerator = Accelerator(
            cpu=self.device.type == "cpu",
            mixed_precision="no" if self.args.amp == "off" else self.args.amp,
        )
        net = self.network()
        model, optimizer = accelerator.prepare(net, self.optimizer(net))

        def loop(feed: Feed) -> None:
            model.train()
            for images, targets in self.to_device(feed):
                loss = self.mean_loss(model(images), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

        return loop

    def lightning(self) -> Loop:
        import lightning

        bench = self

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = bench.network()

            def training_step(self, batch: tuple) -> torch.Tensor:
                return bench.mean_loss(self.net(batch[0]), batch[1])

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return bench.optimizer(self)

        class Normalized(Feed):
            def __iter__(self) -> Iterator[tuple]:
                return bench.to_device(super().__iter__())

        module = Module()
        names = {"off": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
        precision = names[self.args.amp]

        def loop(feed: Feed) -> None:
            trainer = lightning.Trainer(
                accelerator="cpu" if self.device.type == "cpu" else "auto",
                devices=1,
                max_epochs=1,
                precision=precision,
                logger=False,
                enable_progress_bar=False,
                enable_checkpointing=False,
                enable_model_summary=False,
            )
            normalized = Normalized(feed.batch, feed.steps)
            trainer.fit(module, normalized)
            feed.seconds = normalized.seconds

        return loop


class Ours:
    """The project's own loop: a network with what belongs to it, and a Run for each epoch."""

    def __init__(self, bench: Bench, is_compiled: bool = False) -> None:
        import main
        import recipe

        self.bench = bench
        args = bench.args
        self.model = bench.network()
        if is_compiled:
            self.model.compile()
        optimizer = recipe.build_optimizer(self.model, args)
        amp = torch.amp.GradScaler(bench.device.type, enabled=args.amp == "fp16")
        self.parts = {
            "optimizer": optimizer,
            "scheduler": recipe.build_scheduler(optimizer, args, 10**6),
            "scaler": amp,
        }
        self.ddp_model = main.wrap(self.model)

    def __call__(self, feed: Feed, **options: Any) -> None:
        """Train an epoch on the batches of `feed`; options: of Run."""
        with self.run(feed, **options) as run:
            self.train(run)

    @contextlib.contextmanager
    def run(
        self, feed: Feed | Dataset, log_every: int = 0, **options: Any
    ) -> Iterator[Any]:
        """Yield a Run of one epoch; what it says goes to stderr. options: of Run."""
        import ddpkit

        bench = self.bench
        args = bench.args
        how = {"classes": bench.classes, "seed": args.seed, "workers": 0}
        dataset: Any = feed
        if isinstance(feed, Feed):
            dataset = Subset(bench.samples, range(len(feed) * args.batch_size))
        loader = ddpkit.train_loader(
            dataset, args.batch_size, accumulate=args.accumulate, **how
        )
        if isinstance(feed, Feed):  # in place of what it would read
            loader.raw = lambda *_: iter(feed)
        args.output_dir.mkdir(exist_ok=True)
        folder = ddpkit.RunFolder(tempfile.mkdtemp(dir=args.output_dir))
        folder.find_checkpoint()
        with contextlib.redirect_stdout(sys.stderr):
            made = ddpkit.Run(
                folder,
                loader,
                ddpkit.val_loader(dataset, args.batch_size, **how),
                bench.classes,
                model=self.model,
                **self.parts,
                report=ddpkit.Reporter(folder.path, 1, log_every=log_every),
                accumulate=args.accumulate,
                best="top1",
                flags=vars(args),
                **options,
            )
            with made as run:
                yield run

    def train(self, run: Any) -> None:
        """As main.py trains an epoch."""
        import main

        criterion = self.bench.criterion
        args = self.bench.args
        main.train_one_epoch(
            run,
            run.train_loader,
            self.ddp_model,
            criterion,
            **self.parts,
            ema=None,
            args=args,
        )


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--device", choices=("cpu", "gpu"), default="cpu", help="default: cpu"
    )
    parser.add_argument(
        "--steps", type=int, help="in a figure; default: 20, on a GPU 50"
    )
    parser.add_argument(
        "--flags", help="of main.py, in quotes; default: by device and task"
    )
    parser.add_argument(
        "--compile", action="store_true", help="ours only, without it and with it"
    )
    flags = parser.parse_args()
    defaults, steps = SETTINGS[flags.device, flags.task]
    flags.flags = flags.flags or defaults
    flags.steps = flags.steps or steps
    if flags.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.filterwarnings("ignore")
    with common.generated(flags.task) as folder:
        common.say_machine(flags)
        figures = compare(flags, folder)
    common.table(figures, "ms a step", next(iter(figures)), scale=1000)


def compare(flags: Namespace, folder: Path) -> dict[str, list[float]]:
    from ddpkit.ranks import distributed

    bench = Bench(folder, flags.flags)
    if (bench.device.type == "cpu") != (flags.device == "cpu"):
        sys.exit(f"--device {flags.device}: torch finds only {bench.device}")
    feed = Feed(bench.batch(), flags.steps, bench.args.accumulate)
    ours = ("ours", "ours, --compile")
    loops = {
        name: build and build()
        for name, build in bench.loops().items()
        if (name in ours if flags.compile else name != ours[1])
    }
    cases = {name: loop and partial(feed.time, loop) for name, loop in loops.items()}
    common.interleave(cases, 1)  # to warm up
    figures = common.interleave(cases, flags.repeats, flags.seconds)
    distributed.teardown()
    return figures


if __name__ == "__main__":
    main()
