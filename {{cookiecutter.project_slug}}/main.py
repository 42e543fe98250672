"""Train with DistributedDataParallel: the same code for one process, one node and many nodes.

All GPUs, or two CPU ranks:    ./launch.sh
One process:                   python main.py
PyTorch's own launchers:       torchrun --standalone --nproc-per-node 2 main.py
                               python -m torch.distributed.launch --nproc-per-node 2 main.py
Two nodes, on each of them:    NNODES=2 NODE_RANK=<0 or 1> MASTER_ADDR=<node 0> ./launch.sh
SLURM:                         sbatch slurm/train.sbatch
Own data:                      ./launch.sh --data DIR --epochs 90
Evaluate the best checkpoint:  ./launch.sh --data DIR --eval-only
"""

import contextlib
import functools
import json
import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.ranks import process

if __name__ == "__main__":  # before torch, whose import takes seconds
    process.install_handlers()

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MetricCollection

import dataset
import demo_set
import loaders
import recipe
from dataset import IMAGE_SIZE, draw_example, transform_batch
from engine.data import loading, overfit, seeding
from engine.data.images import DEFAULT_FORMAT, Format
from engine.data.loading import Loader
from engine.errors import UserError
from engine.ranks import debugging, distributed, failures, gradients, remedies, replicas, stopping
from engine.run import checkpoint, machine, mistakes, probing, profiling, records, sharded, sizes
from engine.run.checkpoint import State
from engine.run.flags import Help, Parser, add_image_arguments, add_machine_arguments, at_least
from engine.run.folder import RunFolder
from engine.run.metrics import Totals, check_logits, checked, compute
from engine.run.mistakes import Drawing, Mistakes, Worst
from engine.run.progress import Run
from engine.run.replay import Replay, position, read_flags
from engine.run.reporting import Reporter
from loaders import Data
from model import (
    BEST,
    NETWORK_FLAGS,
    add_arguments,
    backbone,
    build_criterion,
    build_metrics,
    build_model,
    infer,
)

ROOT = Path(__file__).resolve().parent
NOT_SAVED = {  # flags that checkpoints leave out because they do not affect what is learned
    *("workers", "prefetch", "pin_memory", "output_dir", "resume", "save_every", "keep", "replay"),
    *("dist_timeout", "debug_rank", "debug_port", "local_rank", "profile", "find_batch_size"),
}
KEPT = ("optimizer", "ema", "overfit", "value_range", "mean", "std")  # as in the checkpoint
OF_CHECKPOINT = object()  # the value of flags that --eval-only takes from the checkpoint


@dataclass
class Task:
    """What is trained and how it is judged."""

    args: Namespace
    settings: machine.Settings  # what machine.set_up chose: workers, threads, amp
    device: torch.device
    classes: Sequence[str]
    model: nn.Module  # the bare network, which is evaluated and saved; with --ema its average
    criterion: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | int]]  # returns (sum, count)
    metrics: MetricCollection
    format: Format = DEFAULT_FORMAT  # of the images


@dataclass
class Stepper:
    """What an optimizer step needs."""

    model: nn.Module  # the bare network that is trained
    ddp_model: replicas.Wrapped  # wraps it
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    scaler: torch.amp.GradScaler
    mean: gradients.Mean
    average: recipe.Average | None = None  # of the weights, with --ema


# fmt: off
def build_parser() -> Parser:
    count, positive = at_least(0), at_least(1)
    parser = Parser(description=__doc__, formatter_class=Help, fromfile_prefix_chars="@",
                    allow_abbrev=False, epilog="@FILE reads flags from a file.")
    add = parser.add_argument_group("data").add_argument
    add("--data", metavar="DIR", type=Path, help="folder with train/ and val/ (default: demo set, with its own --epochs and sizes)")
    add("--image-size", metavar="PIXELS", type=positive, default=IMAGE_SIZE, help="side of the training images")
    add("--overfit", metavar="N", type=positive, help="train and validate on N training images, in the same crops each time: can the network learn them?")
    dataset.add_arguments(parser.add_argument_group("augmentation"))
    add_image_arguments(parser.add_argument_group("images"))
    group = parser.add_argument_group("output")
    add = group.add_argument
    add("--output-dir", metavar="DIR", type=Path, default=ROOT / "runs/default", help="checkpoints, metrics and plots")
    add("--resume", metavar="auto|never|PATH", default="auto", help="auto: continue from last.pt if it exists; never: delete the previous run and start over; PATH: start from that checkpoint")
    add("--save-every", metavar="STEPS", type=count, default=0, help="also save every STEPS optimizer steps; 0: only after each epoch")
    add("--keep", type=positive, default=2, help="how many of the newest checkpoints to keep")
    add = group.add_mutually_exclusive_group().add_argument
    add("--eval-only", action="store_true", help="evaluate best.pt, or --resume PATH, and print JSON")
    add("--find-batch-size", action="store_true", help="print the largest --batch-size that fits into memory")
    add("--replay", metavar="EPOCH:STEP", type=position, help="stop in the debugger (F5, --debug-rank, or pdb in one process) before that step of the run in --output-dir, where nothing changes")
    add("--profile", metavar="STEPS", type=count, default=0, help="trace so many optimizer steps of the first epoch, in --output-dir/profile; 0: none")
    add_arguments(parser.add_argument_group("network and loss"))
    recipe.add_arguments(parser.add_argument_group("recipe"))
    add_machine_arguments(parser.add_argument_group("machine"))
    return parser
# fmt: on


def parse_args(argv: Sequence[str] | None = None, **then: Any) -> Namespace:
    parser = build_parser()
    args = parser.parse_args(argv)
    if then or args.eval_only or args.data is None:  # with other defaults
        names = vars(checkpoint.read_flags({"args": {}}, add_arguments))
        eval_only = dict.fromkeys(("image_size", "batch_size", *names), OF_CHECKPOINT)
        parser.set_defaults(**(then or (eval_only if args.eval_only else demo_set.DEFAULTS)))
        args = parser.parse_args(argv)
    recipe.set_defaults(args)
    return args


def train_one_epoch(
    task: Task, stepper: Stepper, loader: Loader, report: Reporter, run: Run
) -> float:
    """Train on this rank's share of the rest of the epoch; return the mean loss over all ranks."""
    args, ddp_model = task.args, stepper.ddp_model
    optimizer, scaler = stepper.optimizer, stepper.scaler
    rank, local_rank = distributed.rank(), distributed.local_rank()  # noqa: F841  for breakpoints
    torch.backends.cudnn.benchmark = not args.deterministic  # all batches have one shape
    recipe.set_training(ddp_model)
    batches = loading.to_device(report.progress(loader, run.epoch), task.device, task.format)
    for i, (images, targets) in enumerate(batches, start=run.passes):
        seeding.seed(args.seed, run.epoch, i, rank)  # dropout differs by rank and pass
        images, targets = transform_batch(images, targets, args, len(task.classes))
        if run.is_due(i):  # the step of --replay begins
            breakpoint()
        is_last = (i + 1) % args.accumulate == 0  # of the passes that make up an optimizer step
        # DDP averages the gradients over the ranks in backward(). A step needs that only in its
        # last pass; no_sync() saves the traffic in the others.
        with contextlib.nullcontext() if is_last else replicas.no_sync(ddp_model):
            with profiling.mark("forward"), machine.autocast(task.settings.amp, task.device):
                outputs = ddp_model(images)
            loss_sum, count = task.criterion(machine.to_float32(outputs), targets)
            with profiling.mark("backward"):
                stepper.mean.backward(scaler.scale(loss_sum), count, targets, is_last)
        # The sums stay on the device and are reduced once per epoch: reading or reducing them at
        # every step would make the device, or every rank, wait.
        run.totals.add(loss_sum, count)
        report.loss(run.totals, optimizer.param_groups[-1]["lr"])
        if is_last:
            # DDP has averaged over the ranks, whose numbers of samples (labelled pixels) may differ.
            stepper.mean.finish(ddp_model)
            recipe.clip_gradients(ddp_model.parameters(), optimizer, scaler, args)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            stepper.scheduler.step()
            if stepper.average:
                stepper.average.update(stepper.model)
            run.end_step()  # saves if a save is due, and stops here after a signal
    return run.mean_loss()


@torch.inference_mode()
def evaluate(task: Task, loader: Loader) -> tuple[dict[str, float], Mistakes]:
    """Return loss and metrics over the validation set, each sample counted once, and mistakes.

    Evaluates the bare model: ranks may have unequal numbers of batches, for which DDP would wait.
    Sums and counts are reduced over the ranks, then divided: a mean of means would be wrong.
    """
    device, model, metrics = task.device, task.model, task.metrics
    torch.backends.cudnn.benchmark = False  # takes seconds for each image size
    model.eval()
    metrics.reset()
    totals, worst, stop = Totals(device), Worst(device), False
    apply = functools.partial(infer, model, args=task.args)
    batches = (batch for group in loader for batch in group)  # one for each image size
    for images, targets, indices in loading.to_device(batches, device, task.format):
        with failures.naming(loader.dataset.name, indices):  # if memory runs out
            with machine.autocast(task.settings.amp, device):
                outputs = apply(images)
            outputs = check_logits(outputs)
            loss_sum, count = task.criterion(outputs, targets)
            totals.add(loss_sum, count)
            with seeding.in_any_order():
                metrics.update(outputs, targets)
            worst.update(outputs, targets, indices)
        if stopping.stop_requested():
            stop = True
            break
    total_loss, total_count, stops = distributed.reduce_tensor(totals.compute(stop)).tolist()
    if stops:
        stopping.stop()
    if not total_count:
        raise UserError("the validation set has no labelled samples (all are void)")
    results, confusion = compute(metrics)
    drawing = Drawing(apply, device, loader.dataset, task.classes, draw_example, task.format)
    found = Mistakes(confusion, worst.compute(), drawing, model)
    return {"val_loss": total_loss / total_count, **results}, found


def train(
    task: Task, train_loader: Loader, val_loader: Loader, folder: RunFolder, state: State | None
) -> None:
    """Train until --epochs, continuing from the checkpoint `state` if there is one."""
    args, device, model = task.args, task.device, task.model
    averaged: dict[str, Any] = {}  # saved besides the network that is evaluated
    if average := recipe.Average(model, args.ema) if args.ema else None:
        averaged = {"trained": model}
        task = replace(task, model=average.module)
    if args.strategy == "fsdp":
        model = sharded.share(model, args.image_size, args.channels or 3)
    if args.compile:
        machine.compile_network(model)
    frozen = [weight for weight in backbone(model) if weight.requires_grad]
    optimizer = recipe.build_optimizer(model, args)
    scheduler = recipe.build_scheduler(optimizer, args, train_loader.sampler.steps)
    scaler = torch.amp.GradScaler(device.type, enabled=task.settings.amp == "fp16")
    flags = {**vars(args), **vars(task.settings)}  # with what the machine chose
    run = Run(
        *(folder, train_loader, val_loader),
        classes=task.classes,
        epochs=args.epochs,
        save_every=args.save_every,
        score=BEST,
        flags={name: value for name, value in flags.items() if name not in NOT_SAVED},
        model=task.model if average else model,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
        **averaged,
    )
    run.resume(state)
    if average:
        average.step = run.step
    mean = gradients.Mean(device)
    recipe.freeze(frozen, run.epoch < args.freeze_backbone)
    wrap = functools.partial(replicas.wrap, model, device, args.strategy)
    stepper = Stepper(model, wrap(), optimizer, scheduler, scaler, mean, average)
    report = Reporter(folder.path, device, args.epochs, run.epoch, profile=args.profile)
    report.start(task.settings, task.classes, train_loader, val_loader, vars(args))
    report.catch_up(run.history)
    first = run.epoch
    with run.stoppable(), report:
        if best := distributed.from_rank_zero(report.undrawn):  # a kill came before its images
            network = build_model(args, task.classes)
            checkpoint.load_weights(network, best)
            network = network.to(device).to(memory_format=torch.channels_last)
            report.images(evaluate(replace(task, model=network), val_loader)[1])
        while run.epoch < args.epochs and not recipe.is_over(
            run.history, BEST, run.best, args.patience
        ):
            if run.epoch == args.freeze_backbone > first:
                recipe.freeze(frozen, False)
                stepper.ddp_model = wrap()  # DDP keeps to what it was given
            train_loader.sampler.set_epoch(run.epoch, run.seen)
            train_loss = train_one_epoch(task, stepper, train_loader, report, run)
            speed = report.speed()
            replicas.sync_networks(run.parts.values())
            run.save()  # whatever fails from here on costs no epoch
            if args.strategy == "fsdp":
                sharded.gather(model, task.model)
            results, found = evaluate(task, val_loader)
            found.check(run.model)
            lr = optimizer.param_groups[-1]["lr"]  # not the backbone's
            is_best = run.end_epoch({"train_loss": train_loss, **results, "lr": lr, **speed})
            run.save(is_best)
            report.end_epoch(run.history, is_best)
            if is_best:
                report.images(found)
    report.finish(BEST, run.best)
    if args.overfit:
        overfit.say_learnt(args.overfit, BEST, run.history)


def find_batch_size(task: Task, *both: Loader) -> None:
    """Print the largest --batch-size with which training and validation fit into memory."""
    args, device, model = task.args, task.device, task.model
    optimizer = recipe.build_optimizer(model, args)
    average = recipe.Average(model, args.ema) if args.ema else None

    def try_step(size: int) -> None:
        """Do what train_one_epoch and evaluate do; gradients stay in memory, as DDP's do."""
        train, val = (probing.batch(each, size, device, task.format) for each in both)
        images, targets = transform_batch(*train, args, len(task.classes))
        recipe.set_training(model)
        with machine.autocast(task.settings.amp, device):
            outputs = model(images)
        task.criterion(machine.to_float32(outputs), targets)[0].backward()
        optimizer.step()
        model.eval()
        with torch.inference_mode(), machine.autocast(task.settings.amp, device):
            infer(average.module if average else model, val[0], args)

    images = both[0].sampler.total // args.accumulate
    distributed.say(f"--batch-size {probing.find_batch_size(try_step, device, images)}")


def build_task(args: Namespace, device: torch.device, data: Data, model: nn.Module) -> Task:
    criterion, metrics = checked(build_criterion(args)), build_metrics(data.classes).to(device)
    return Task(args, data.settings, device, data.classes, model, criterion, metrics, data.format)


def evaluate_checkpoint(args: Namespace, device: torch.device) -> None:
    """Evaluate best.pt, or --resume PATH, and print its metrics as JSON."""
    path = args.output_dir / "best.pt" if args.resume in ("auto", "never") else args.resume
    model, known_classes, flags = checkpoint.open_model(path, build_model, add_arguments, device)
    for name, value in vars(args).items():
        if value is OF_CHECKPOINT:
            setattr(args, name, getattr(flags, name))
    data = loaders.build_data(args, device)
    checkpoint.check_classes(path, known_classes, data.classes)
    val_loader = loaders.build_val_loader(data, args)
    results, found = evaluate(build_task(args, device, data, model), val_loader)
    mistakes.report(found, args.output_dir / "eval")
    distributed.say(json.dumps({k: v if math.isfinite(v) else None for k, v in results.items()}))


def train_or_resume(args: Namespace, device: torch.device, folder: RunFolder) -> None:
    """Build loaders, network and metrics; train from the checkpoint to resume, or from scratch."""
    data = loaders.build_data(args, device)
    train_loader = loaders.build_train_loader(data, args)
    val_loader = loaders.build_val_loader(data, args)
    state = None if args.find_batch_size else folder.find_checkpoint()
    if state:
        checkpoint.check_flags(state, args, (*NETWORK_FLAGS, *KEPT), build_parser())
        checkpoint.check_classes(state["path"], state["classes"], data.classes)
        args.weights = state["args"]["weights"]  # with which it began
    model = build_model(args, data.classes, weights=None if state else args.weights)
    if state:
        checkpoint.load_weights(model, state)
        if state["epoch"] >= args.epochs and records.are_complete(folder.path, args.epochs):
            line = f"{state['path']}: {state['epoch']} epochs done, nothing left to do"
            return distributed.say(f"{line}; use --epochs N for more, --resume never to start over")
    model = model.to(device).to(memory_format=torch.channels_last)
    if args.sync_bn and not args.find_batch_size:
        model = replicas.sync_batchnorm(model, device)
    task = build_task(args, device, data, model)
    if args.find_batch_size:
        return find_batch_size(task, train_loader, val_loader)
    train(task, train_loader, val_loader, folder, state)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    is_debugged = bool(args.debug_rank or args.replay)
    device = distributed.setup(args.local_rank, args.dist_timeout, is_debugged)
    debugging.wait_for_debugger(args.debug_rank, args.debug_port)
    if args.replay:
        args = parse_args(argv, **read_flags(args.output_dir, NOT_SAVED))
    seeding.seed(args.seed)
    if args.deterministic:
        seeding.be_deterministic()
    if args.data is None:
        args.data = ROOT / "data" / "demo"
        with distributed.rank_zero_first():
            demo_set.draw(args.data)
    if args.eval_only:
        evaluate_checkpoint(args, device)
    elif args.replay:
        again = Replay(args.output_dir, args.resume, args.replay)
        again.run(functools.partial(train_or_resume, args, device), args.seed)
    else:
        train_or_resume(args, device, RunFolder(args.output_dir, args.resume, args.keep))
    distributed.teardown()


if __name__ == "__main__":
    with failures.one_line_errors(loading.explain, remedies.explain, sizes.explain):
        main()
