"""What the project's own machinery adds to a training step: with and without it, on the CPU.

main.train_one_epoch of the project, with its own loader (no workers) over images in memory, so
that everything happens in one process. The cases share one network:

as it is                      no terminal, so no progress bar is drawn; the baseline
--save-every 10               with checkpoints, each flushed to the disk under the temporary folder
progress bar drawn            as on a terminal
no reporting                  no loss shown, no progress bar, no time taken of the waits
no keyed random numbers       seeding.seed does nothing, neither in a pass nor for a sample
no stop watcher               signals are not watched, nor whether the training hangs

Whole epochs are timed and divided by their steps. Speeds above 1: that much faster without it.
"""

import contextlib
import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import common
import torch
from torch.utils.data import TensorDataset
from torchmetrics import MetricCollection

BASELINE = "as it is"
DEFAULTS = {
    "classification": "--arch resnet18 --image-size 64 --batch-size 16",
    "segmentation": "--encoder resnet18 --image-size 64 --batch-size 4",
}


def compare(flags: Namespace, folder: Path) -> dict[str, list[float]]:
    import main as project
    import recipe
    from engine.data import loading, seeding
    from engine.ranks import distributed, gradients, replicas
    from engine.run import machine, reporting
    from engine.run.folder import RunFolder
    from engine.run.progress import Run
    from model import build_criterion, build_model

    own = ["--data", str(folder), "--output-dir", str(folder / "run"), "--workers", "0"]
    args = project.parse_args([*own, *flags.flags.split()])
    device = distributed.setup()
    settings = machine.set_up(device, 0, args.threads, False, args.amp, bytes_per_worker=0)
    classes = [f"class{number}" for number in range(common.CLASSES)]
    count, side = flags.steps * args.batch_size, args.image_size
    images = torch.randint(256, (count, side, side, 3), dtype=torch.uint8).movedim(-1, 1)
    shape = (count, side, side) if flags.task == "segmentation" else (count,)
    targets = torch.randint(common.CLASSES, shape, dtype=torch.uint8)
    loader = loading.build_train_loader(
        *(TensorDataset(images, targets), len(classes), args.batch_size, args.accumulate),
        loading.Options(0, args.prefetch, pin_memory=False, seed=args.seed),
    )

    model = build_model(args, classes).to(memory_format=torch.channels_last)
    optimizer = recipe.build_optimizer(model, args)
    parts = {
        "optimizer": optimizer,
        "scheduler": recipe.build_scheduler(optimizer, args, flags.steps),
        "scaler": torch.amp.GradScaler("cpu", enabled=False),
    }
    stepper = project.Stepper(
        *(model, replicas.wrap(model, device)), **parts, mean=gradients.Mean(device)
    )
    criterion, judged = build_criterion(args), MetricCollection({})
    task = project.Task(args, settings, device, classes, model, criterion, judged)
    args.output_dir.mkdir()
    folder = RunFolder(args.output_dir, "never", args.keep)

    def epoch(*without: Callable[[], Any], save_every: int = 0) -> float:
        """Return seconds a step, in the contexts that `without` make."""
        run = Run(
            *(folder, loader, loader),
            classes=classes,
            epochs=1,
            save_every=save_every,
            score="top1",
            flags=vars(args),
            model=model,
            **parts,
        )
        report = reporting.Reporter(args.output_dir, device, 1, 0)
        with contextlib.ExitStack() as stack:
            for make in without:
                stack.enter_context(make())
            stack.enter_context(run.stoppable())
            stack.enter_context(report)
            began = time.perf_counter()
            project.train_one_epoch(task, stepper, loader, report, run)
            return (time.perf_counter() - began) / flags.steps

    def silent(_: Any, loader: Iterator, *__: Any) -> Iterator:
        return loader

    null = open(os.devnull, "w")  # noqa: SIM115  as long as the process
    drawn = lambda **o: reporting_tqdm(**{**o, "disable": False, "file": null})  # noqa: E731
    reporting_tqdm, Reporter = reporting.tqdm, reporting.Reporter
    unwatched = lambda *_: contextlib.nullcontext()  # noqa: E731
    cases: common.Cases = {
        BASELINE: epoch,
        "--save-every 10": partial(epoch, save_every=10),
        "progress bar drawn": partial(epoch, lambda: mock.patch.object(reporting, "tqdm", drawn)),
        "no reporting": partial(
            epoch,
            lambda: mock.patch.object(Reporter, "progress", silent),
            lambda: mock.patch.object(Reporter, "loss", lambda *_: None),
        ),
        "no keyed random numbers": partial(
            epoch, lambda: mock.patch.object(seeding, "seed", lambda *_: None)
        ),
        "no stop watcher": partial(epoch, lambda: mock.patch.object(Run, "stoppable", unwatched)),
    }
    common.interleave({BASELINE: epoch}, 1)  # to warm up
    figures = common.interleave(cases, flags.repeats)
    distributed.teardown()
    return figures


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=40, help="in a figure; default: 40")
    parser.add_argument("--flags", help="of main.py, in quotes; default: by task")
    flags = parser.parse_args()
    flags.flags = flags.flags or DEFAULTS[flags.task]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with common.generated(flags.task) as folder:
        common.say_machine(flags)
        figures = compare(flags, folder)
    common.table(figures, "ms a step", BASELINE, scale=1000)


if __name__ == "__main__":
    main()
