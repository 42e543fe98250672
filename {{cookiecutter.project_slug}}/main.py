"""Train with DistributedDataParallel: one process, one node, many nodes, the same code.

All GPUs of this node, or two ranks where there is none:   ./launch.sh
One process:                   python main.py
PyTorch's own launchers:       torchrun --standalone --nproc-per-node 2 main.py
                               python -m torch.distributed.launch --nproc-per-node 2 main.py
Two nodes, on each of them:    NNODES=2 NODE_RANK=<0 or 1> MASTER_ADDR=<node 0> ./launch.sh
SLURM:                         srun ./launch.sh     one task per node
                               srun python main.py  one task per GPU
Own data:                      ./launch.sh --data DIR --epochs 90
The best checkpoint again:     ./launch.sh --data DIR --eval-only
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.ranks import process

if __name__ == "__main__":  # before torch, whose import takes seconds
    process.begin()

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection

import demo_set
from dataset import IMAGE_SIZE, build_dataset, draw_example
from engine.data import loading, seeding
from engine.errors import UserError
from engine.ranks import debugging, distributed, replicas, stopping
from engine.run import checkpoint, machine
from engine.run.metrics import compute, logits
from engine.run.progress import Run
from engine.run.reporting import Reporter
from model import (
    BEST,
    NETWORK_FLAGS,
    add_arguments,
    build_criterion,
    build_metrics,
    build_model,
)

ROOT = Path(__file__).resolve().parent


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are told once, not by each rank; @file takes lines with # remarks."""

    def error(self, message: str) -> Any:
        raise UserError(f"{message} (main.py --help lists the flags)")

    def convert_arg_line_to_args(self, line: str) -> list[str]:
        return shlex.split(line, comments=True)


def at_least(low: float, kind: Callable[[str], Any] = int) -> Callable[[str], Any]:
    """Return an argparse type: a finite number of `low` or more."""

    def number(text: str) -> Any:
        if not low <= (value := kind(text)) < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a number of {low} or more")
        return value

    return number


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        fromfile_prefix_chars="@",
        allow_abbrev=False,
        epilog="@FILE reads flags from a file.",
    )
    add = parser.add_argument_group("data").add_argument
    add("--data", metavar="DIR", type=Path, help="folder with train/ and val/; default: demo set")
    add(
        "--image-size",
        metavar="PIXELS",
        type=at_least(1),
        help=f"side of the training pictures; default: {IMAGE_SIZE}",
    )
    add(
        "--workers",
        type=at_least(0),
        help="loader processes per rank; default: the CPUs that a job may use / ranks, up to 16",
    )
    add("--prefetch", type=at_least(1), default=2, help="batches ahead, per worker; default: 2")
    add(
        "--pin-memory",
        action=argparse.BooleanOptionalAction,
        help="default: on GPUs, if it takes no more than a quarter of the free memory",
    )

    add = parser.add_argument_group("output").add_argument
    add(
        "--output-dir",
        metavar="DIR",
        type=Path,
        default=ROOT / "runs" / "default",
        help="default: runs/default beside main.py",
    )
    add(
        "--resume",
        metavar="auto|never|PATH",
        default="auto",
        help="auto: go on from last.pt if there is one; never: remove the former run's files; "
        "PATH: begin with that checkpoint; default: auto",
    )
    add(
        "--save-every",
        metavar="STEPS",
        type=at_least(0),
        default=0,
        help="save each STEPS optimizer steps, too; default: 0, at the end of each epoch alone",
    )
    add("--keep", type=at_least(1), default=2, help="last checkpoints kept; default: 2")
    add("--eval-only", action="store_true", help="evaluate best.pt, or --resume PATH; print JSON")

    add_arguments(parser.add_argument_group("network"))

    add = parser.add_argument_group("recipe").add_argument
    add("--epochs", type=at_least(1), default=30, help="default: 30")
    add(
        "--batch-size", type=at_least(1), default=32, help="pictures per rank and pass; default: 32"
    )
    add("--accumulate", type=at_least(1), default=1, help="passes per optimizer step; default: 1")
    add("--optimizer", choices=("adamw", "sgd"), default="adamw", help="default: adamw")
    add("--lr", type=at_least(0, float), help="peak; default: 0.001 for adamw, 0.1 for sgd")
    add("--scale-lr", action="store_true", help="multiply --lr by global batch / 256")
    add("--momentum", type=at_least(0, float), default=0.9, help="of sgd; default: 0.9")
    add("--weight-decay", type=at_least(0, float), help="default: 0.05 for adamw, 0.0001 for sgd")
    add(
        "--schedule",
        choices=("cosine", "step"),
        default="cosine",
        help="to zero, or / 10 every 30 epochs; default: cosine",
    )
    add("--warmup-epochs", type=at_least(0, float), default=0.5, help="linear rise; default: 0.5")
    add(
        "--clip-grad-norm",
        metavar="NORM",
        type=at_least(0, float),
        default=0,
        help="0, the default: not",
    )
    add(
        "--amp",
        choices=("auto", "off", "bf16", "fp16"),
        default="auto",
        help="compute in 16 bits; default: auto, the best that a GPU has, and off on CPUs",
    )
    add("--compile", action="store_true", help="torch.compile: minutes at first, then faster")
    add("--seed", type=at_least(0), default=0, help="default: 0")
    add("--deterministic", action="store_true", help="the same bits in each run on GPUs; slower")

    add = parser.add_argument_group("ranks").add_argument
    add(
        "--dist-timeout",
        metavar="SECONDS",
        type=at_least(1, float),
        default=600,
        help="how long a rank waits for the others, unless debugged; default: 600",
    )
    add(
        "--debug-rank",
        metavar="R[,R...]",
        type=debugging.ranks,
        default=[],
        help="ranks that wait for a debugger, at --debug-port + R",
    )
    add(
        "--debug-port",
        metavar="[HOST:]PORT",
        type=debugging.address,
        default=("127.0.0.1", 5678),
        help="default: 5678 on loopback",
    )
    add(
        "--threads",
        type=at_least(1),
        help="of torch, per rank; default: CPUs / ranks, beside a GPU up to 4",
    )
    add("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)

    args = parser.parse_args(argv)
    if args.data is None and not args.eval_only:
        parser.set_defaults(**demo_set.DEFAULTS)
        args = parser.parse_args(argv)
    if args.lr is None:
        args.lr = {"adamw": 0.001, "sgd": 0.1}[args.optimizer]
    if args.resume not in ("auto", "never"):
        args.resume = os.path.abspath(args.resume)
    if args.weight_decay is None:
        args.weight_decay = {"adamw": 0.05, "sgd": 0.0001}[args.optimizer]
    return args


def build_optimizer(model: nn.Module, args: argparse.Namespace) -> Optimizer:
    lr = args.lr
    if args.scale_lr:  # Goyal et al. 2017, arXiv:1706.02677
        lr *= args.batch_size * args.accumulate * distributed.world_size() / 256
        distributed.say(f"--scale-lr: learning rate {args.lr:g} becomes {lr:g}")
    if args.optimizer == "sgd":  # fused, it takes twice the time on CPUs
        return torch.optim.SGD(
            model.parameters(), lr, momentum=args.momentum, weight_decay=args.weight_decay
        )
    return torch.optim.AdamW(model.parameters(), lr, weight_decay=args.weight_decay, fused=True)


def build_scheduler(optimizer: Optimizer, args: argparse.Namespace, steps: int) -> LRScheduler:
    """Return the schedule, to be stepped after each optimizer step; an epoch has `steps`."""
    warmup = args.warmup_epochs * steps

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if args.schedule == "step":
            return 0.1 ** (step // (30 * steps))
        share = (step - warmup) / max(args.epochs * steps - warmup, 1)
        return 0.5 * (1 + math.cos(math.pi * min(share, 1)))

    return LambdaLR(optimizer, factor)


def train_one_epoch(
    ddp_model: DistributedDataParallel,
    criterion: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    optimizer: Optimizer,
    scheduler: LRScheduler,
    scaler: GradScaler,
    loader: DataLoader,
    device: torch.device,
    args: argparse.Namespace,
    report: Reporter,
    run: Run,
) -> float:
    """Train on this rank's share of what is left of the epoch; return all ranks' mean loss."""
    rank = distributed.rank()
    local_rank = distributed.local_rank()  # noqa: F841  for breakpoints
    autocast = machine.autocast(args.amp, device)
    torch.backends.cudnn.benchmark = not args.deterministic  # all batches have one shape
    ddp_model.train()
    batches = loading.to_device(report.progress(loader, run.epoch), device)
    for i, (images, targets) in enumerate(batches, start=run.passes):
        seeding.seed(args.seed, run.epoch, i, rank)  # dropout: another on each rank, at each pass
        is_last = (i + 1) % args.accumulate == 0  # of the passes that make up an optimizer step
        # Gradients are averaged over the ranks once a step, in its last backward pass.
        with contextlib.nullcontext() if is_last else ddp_model.no_sync():
            with autocast:
                outputs = ddp_model(images)
            loss_sum, count = criterion(machine.to_float32(outputs), targets)
            scaler.scale(loss_sum / count.clamp(min=1) / args.accumulate).backward()
        run.totals += torch.stack((loss_sum.detach().double(), count.double()))
        report.loss(run.totals, optimizer.param_groups[0]["lr"])
        if is_last:
            if args.clip_grad_norm:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(ddp_model.parameters(), args.clip_grad_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            run.end_step()  # where it saves, and where a signal stops it
    return run.mean_loss()


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    criterion: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    metrics: MetricCollection,
    loader: DataLoader,
    device: torch.device,
    amp: str,
) -> dict[str, float]:
    """Return loss and metrics over the whole validation set, each sample counted once.

    Takes the bare model: ranks may hold unequal numbers of batches, and DDP would wait.
    """
    autocast = machine.autocast(amp, device)
    torch.backends.cudnn.benchmark = False  # for each size of picture it would take seconds
    model.eval()
    metrics.reset()
    # Loss sum, count, ranks that were asked to stop.
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    for images, targets in loading.to_device(itertools.chain.from_iterable(loader), device):
        with autocast:
            outputs = model.forward(images)  # --compile would compile anew for each size
        outputs = logits(outputs)
        loss_sum, count = criterion(outputs, targets)
        totals[:2] += torch.stack((loss_sum.double(), count.double()))
        with seeding.in_any_order():
            metrics.update(outputs, targets)
        if stopping.is_asked():
            totals[2] = 1
            break
    total_loss, total_count, asked = distributed.reduce_tensor(totals).tolist()
    if asked:
        stopping.stop()
    if not total_count:
        raise UserError("the validation set has no label to compare with: all is void")
    return {"val_loss": total_loss / total_count, **compute(metrics)}


def train(
    args: argparse.Namespace,
    device: torch.device,
    model: nn.Module,
    metrics: MetricCollection,
    train_loader: loading.Loader,
    val_loader: loading.Loader,
    classes: Sequence[str],
    state: dict[str, Any] | None,
) -> None:
    """Train for the epochs that are left, from `state` (a checkpoint) on if there is one."""
    if args.compile:
        model.compile()  # in place: its checkpoints fit an uncompiled one
    ddp_model = replicas.wrap(model, device)
    criterion = build_criterion(args)
    steps = len(train_loader) // args.accumulate
    optimizer = build_optimizer(model, args)
    scheduler = build_scheduler(optimizer, args, steps)
    pictures = len(train_loader.dataset)
    scaler = GradScaler(device.type, enabled=args.amp == "fp16")
    validated_on = loading.fingerprint(val_loader)
    run = Run(
        *(args, classes, pictures, device, BEST, validated_on),
        *(model, optimizer, scheduler),
        scaler=scaler,
    )
    if args.resume == "never" and not state:
        checkpoint.clear(args.output_dir)
    run.restore(state)
    if state:
        del state["model"], state["optimizer"]  # as much memory as they take again
    checkpoint.begin(args.output_dir)
    report = Reporter(args, device, run.epoch)
    report.start(train_loader, val_loader, steps)
    with run.stoppable(), report:
        while run.epoch < args.epochs:
            train_loader.sampler.set_epoch(run.epoch, run.seen)
            train_loss = train_one_epoch(
                ddp_model,
                criterion,
                optimizer,
                scheduler,
                scaler,
                train_loader,
                device,
                args,
                report,
                run,
            )
            speed = report.speed()
            replicas.sync_buffers(model)
            replicas.check_same(model)
            run.save()  # whatever fails from here on costs no epoch
            results = evaluate(model, criterion, metrics, val_loader, device, args.amp)

            lr = optimizer.param_groups[0]["lr"]
            row = {"epoch": run.epoch + 1, "step": run.step, "train_loss": train_loss, **results}
            is_best = run.end_epoch({**row, "lr": lr, **speed})
            run.save(is_best)
            report.epoch(run.history, is_best)
            if is_best:
                report.examples(model, val_loader.dataset, classes, draw_example)
    report.finish(BEST, run.best)


def evaluate_checkpoint(args: argparse.Namespace, device: torch.device) -> None:
    """Print the metrics of best.pt, or of --resume PATH, as JSON; that says which network."""
    path = args.output_dir / "best.pt" if args.resume in ("auto", "never") else args.resume
    model, known_classes, flags = checkpoint.load_model(path, build_model, add_arguments, device)
    args.image_size = args.image_size or flags.image_size
    machine.set_up(args, device)
    _, val_set, classes = build_dataset(args.data, args.image_size)
    checkpoint.check_classes(path, known_classes, classes)
    options = loading.Options(args.workers, args.prefetch, args.pin_memory, args.seed)
    val_loader = loading.build_val_loader(val_set, len(classes), args.batch_size, options)
    metrics = build_metrics(classes).to(device)
    results = evaluate(model, build_criterion(args), metrics, val_loader, device, args.amp)
    distributed.say(json.dumps({k: v if math.isfinite(v) else None for k, v in results.items()}))


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    device = distributed.setup(args.local_rank, args.dist_timeout, bool(args.debug_rank))
    debugging.wait_for_debugger(args.debug_rank, args.debug_port)
    seeding.seed(args.seed)
    if args.deterministic:
        seeding.be_deterministic()
    if args.data is None:
        args.data = ROOT / "data" / "demo"
        with distributed.rank_zero_first():
            demo_set.draw(args.data)
    if args.eval_only:
        evaluate_checkpoint(args, device)
        return distributed.teardown()

    args.image_size = args.image_size or IMAGE_SIZE
    machine.set_up(args, device)
    train_set, val_set, classes = build_dataset(args.data, args.image_size)
    options = loading.Options(args.workers, args.prefetch, args.pin_memory, args.seed)
    train_loader = loading.build_train_loader(
        train_set, len(classes), args.batch_size, args.accumulate, options
    )
    val_loader = loading.build_val_loader(val_set, len(classes), args.batch_size, options)
    state = checkpoint.open_run(args, classes, NETWORK_FLAGS, add_arguments)
    model = build_model(args, classes, weights=None if state else args.weights)
    if state:
        checkpoint.load_network(model, state)
    if state and state["epoch"] >= args.epochs:
        distributed.say("nothing left to do: --epochs N for more, --resume never to start afresh")
    else:
        metrics = build_metrics(classes).to(device)
        model = model.to(device).to(memory_format=torch.channels_last)
        train(args, device, model, metrics, train_loader, val_loader, classes, state)
    distributed.teardown()


if __name__ == "__main__":
    with distributed.one_line_errors(loading.explain, replicas.explain):
        main()
