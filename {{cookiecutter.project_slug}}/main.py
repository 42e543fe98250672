"""Train with DistributedDataParallel: the same code for one process, one node and many nodes.

All GPUs of this node, or two ranks without any:   ./launch.sh
One process:                   python main.py
PyTorch's own launchers:       torchrun --standalone --nproc-per-node 2 main.py
                               python -m torch.distributed.launch --nproc-per-node 2 main.py
Two nodes, on each of them:    NNODES=2 NODE_RANK=<0 or 1> MASTER_ADDR=<node 0> ./launch.sh
SLURM:                         srun ./launch.sh     one task per node
                               srun python main.py  one task per GPU
Own data:                      ./launch.sh --data DIR --epochs 90
Evaluate the best checkpoint:  ./launch.sh --data DIR --eval-only
"""

import contextlib
import itertools
import json
import math
from argparse import SUPPRESS, BooleanOptionalAction, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.ranks import process

if __name__ == "__main__":  # before torch, whose import takes seconds
    process.install_handlers()

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torchmetrics import MetricCollection

import demo_set
from dataset import IMAGE_SIZE, build_dataset, draw_example
from engine.data import loading, seeding
from engine.data.loading import Loader
from engine.errors import UserError
from engine.ranks import debugging, distributed, failures, replicas, stopping
from engine.run import checkpoint, machine
from engine.run.checkpoint import State
from engine.run.flags import Help, Parser, at_least
from engine.run.folder import RunFolder
from engine.run.machine import Settings
from engine.run.metrics import check_logits, compute
from engine.run.progress import Run
from engine.run.reporting import Reporter
from model import BEST, NETWORK_FLAGS, add_arguments, build_criterion, build_metrics, build_model

ROOT = Path(__file__).resolve().parent
RECIPES = {  # by --optimizer: defaults of --lr and --weight-decay
    "adamw": {"lr": 0.001, "weight_decay": 0.05},
    "sgd": {"lr": 0.1, "weight_decay": 0.0001},
}


@dataclass
class Task:
    """What is trained and how it is judged."""

    args: Namespace
    settings: Settings  # what the machine allows: workers, threads, amp
    device: torch.device
    classes: Sequence[str]
    model: nn.Module  # the bare network, which is evaluated and saved
    criterion: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # returns (sum, count)
    metrics: MetricCollection


@dataclass
class Stepper:
    """What takes the optimizer steps."""

    ddp_model: DistributedDataParallel  # the same network, wrapped
    optimizer: Optimizer
    scheduler: LRScheduler
    scaler: GradScaler


# fmt: off
def build_parser() -> Parser:
    def by_optimizer(name: str) -> str:
        return "(default: " + ", ".join(f"{r[name]:g} for {o}" for o, r in RECIPES.items()) + ")"

    parser = Parser(description=__doc__, formatter_class=Help, fromfile_prefix_chars="@",
                    allow_abbrev=False, epilog="@FILE reads flags from a file.")
    count, positive, rate = at_least(0), at_least(1), at_least(0, float)
    add = parser.add_argument_group("data").add_argument
    add("--data", metavar="DIR", type=Path, help="folder with train/ and val/ (default: demo set)")
    add("--image-size", metavar="PIXELS", type=positive, default=IMAGE_SIZE, help="side of the training images")
    add("--workers", type=count, help="loader processes per rank (default: CPUs of the job / ranks, at most 16)")
    add("--prefetch", type=positive, default=2, help="batches that each worker prepares ahead")
    add("--pin-memory", action=BooleanOptionalAction, help="(default: on GPUs, if it takes at most 1/4 of the free memory)")
    add = parser.add_argument_group("output").add_argument
    add("--output-dir", metavar="DIR", type=Path, default=ROOT / "runs/default", help="checkpoints, metrics and plots")
    add("--resume", metavar="auto|never|PATH", default="auto", help="continue from last.pt if it exists, start over, or start from PATH")
    add("--save-every", metavar="STEPS", type=count, default=0, help="also save every STEPS optimizer steps; 0: only after each epoch")
    add("--keep", type=positive, default=2, help="how many of the newest checkpoints to keep")
    add("--eval-only", action="store_true", help="evaluate best.pt, or --resume PATH, and print JSON")
    add_arguments(parser.add_argument_group("network"))
    add = parser.add_argument_group("recipe").add_argument
    add("--epochs", type=positive, default=30, help="passes over the training set")
    add("--batch-size", type=positive, default=32, help="images per rank and forward pass")
    add("--accumulate", type=positive, default=1, help="forward passes per optimizer step")
    add("--optimizer", choices=list(RECIPES), default="adamw", help="its name in torch.optim")
    add("--lr", type=rate, help=f"peak learning rate {by_optimizer('lr')}")
    add("--scale-lr", action="store_true", help="multiply --lr by global batch / 256")
    add("--momentum", type=rate, default=0.9, help="of sgd")
    add("--weight-decay", type=rate, help=f"not on biases and norms {by_optimizer('weight_decay')}")
    add("--schedule", choices=("cosine", "step"), default="cosine", help="decay to 0, or by 10x every 30 epochs")
    add("--warmup-epochs", type=rate, default=0.5, help="linear warm-up")
    add("--clip-grad-norm", metavar="NORM", type=rate, default=0.0, help="maximum gradient norm; 0 disables clipping")
    add("--amp", choices=("auto", "off", "bf16", "fp16"), default="auto", help="mixed precision; auto: the best the GPU has, off on CPUs")
    add("--compile", action="store_true", help="torch.compile: minutes at first, faster afterwards")
    add("--seed", type=count, default=0, help="of weights, order, augmentation and dropout")
    add("--deterministic", action="store_true", help="the same bits in every run on GPUs; slower")
    add = parser.add_argument_group("ranks").add_argument
    add("--dist-timeout", metavar="SECONDS", type=at_least(1, float), default=600.0, help="how long a rank waits for the others, unless debugged")
    add("--debug-rank", metavar="R[,R...]", type=debugging.ranks, default=[], help="ranks that wait for a debugger, at --debug-port + R")
    add("--debug-port", metavar="[HOST:]PORT", type=debugging.address, default="127.0.0.1:5678", help="on loopback unless HOST is given")
    add("--threads", type=positive, help="torch CPU threads per rank (default: CPUs / ranks; with a GPU at most 4)")
    add("--local-rank", "--local_rank", type=int, help=SUPPRESS)
    return parser
# fmt: on


def parse_args(argv: Sequence[str] | None = None) -> Namespace:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.eval_only:
        parser.set_defaults(image_size=None)  # the checkpoint's
    elif args.data is None:
        parser.set_defaults(**demo_set.DEFAULTS)
    args = parser.parse_args(argv)
    for name, value in RECIPES[args.optimizer].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def build_optimizer(model: nn.Module, args: Namespace) -> Optimizer:
    lr = args.lr
    if args.scale_lr:  # Goyal et al. 2017, arXiv:1706.02677
        lr *= args.batch_size * args.accumulate * distributed.world_size() / 256
        distributed.say(f"--scale-lr: learning rate {args.lr:g} becomes {lr:g}")
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim <= 1]  # biases and norms
    decay = {"params": matrices, "weight_decay": args.weight_decay}
    groups = [decay, {"params": others, "weight_decay": 0.0}]
    if args.optimizer == "sgd":  # on CPUs its fused form takes twice the time
        return torch.optim.SGD(groups, lr, args.momentum)
    return torch.optim.AdamW(groups, lr, fused=True)


def build_scheduler(optimizer: Optimizer, args: Namespace, steps: int) -> LRScheduler:
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
    task: Task, stepper: Stepper, loader: Loader, report: Reporter, run: Run
) -> float:
    """Train on this rank's share of what is left of the epoch; return all ranks' mean loss."""
    args, ddp_model = task.args, stepper.ddp_model
    optimizer, scaler = stepper.optimizer, stepper.scaler
    rank, local_rank = distributed.rank(), distributed.local_rank()  # noqa: F841  for breakpoints
    autocast = machine.autocast(task.settings.amp, task.device)
    torch.backends.cudnn.benchmark = not args.deterministic  # all batches have one shape
    ddp_model.train()
    batches = loading.to_device(report.progress(loader, run.epoch), task.device)
    for i, (images, targets) in enumerate(batches, start=run.passes):
        seeding.seed(args.seed, run.epoch, i, rank)  # dropout differs by rank and pass
        is_last = (i + 1) % args.accumulate == 0  # of the passes that make up an optimizer step
        # DDP averages the gradients over the ranks in backward(). While passes accumulate they
        # stay local: once a step, in its last pass, is enough and saves the traffic.
        with contextlib.nullcontext() if is_last else ddp_model.no_sync():
            with autocast:
                outputs = ddp_model(images)
            loss_sum, count = task.criterion(machine.to_float32(outputs), targets)
            scaler.scale(loss_sum / count.clamp(min=1) / args.accumulate).backward()
        # Sums stay on the device, and the ranks add them up once an epoch: reading a number or
        # reducing it at every step would make the device, and every rank, wait.
        run.totals += torch.stack((loss_sum.detach().double(), count.double()))
        report.loss(run.totals, optimizer.param_groups[0]["lr"])
        if is_last:
            if args.clip_grad_norm:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(ddp_model.parameters(), args.clip_grad_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            stepper.scheduler.step()
            run.end_step()  # saves if it is time, and stops here on a signal
    return run.mean_loss()


@torch.inference_mode()
def evaluate(task: Task, loader: Loader) -> dict[str, float]:
    """Return loss and metrics over the whole validation set, each sample counted once.

    Evaluates the bare model: ranks may have unequal numbers of batches, for which DDP would wait.
    Sums and counts are reduced over the ranks and then divided: a mean of the ranks' means would
    be wrong as soon as they have unequal numbers of samples.
    """
    device, model, metrics = task.device, task.model, task.metrics
    autocast = machine.autocast(task.settings.amp, device)
    torch.backends.cudnn.benchmark = False  # it would take seconds for each image size
    model.eval()
    metrics.reset()
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # loss sum, count, stop requests
    for images, targets in loading.to_device(itertools.chain.from_iterable(loader), device):
        with autocast:
            outputs = model.forward(images)  # --compile would compile again for each size
        outputs = check_logits(outputs)
        loss_sum, count = task.criterion(outputs, targets)
        totals[:2] += torch.stack((loss_sum.double(), count.double()))
        with seeding.in_any_order():
            metrics.update(outputs, targets)
        if stopping.stop_requested():
            totals[2] = 1
            break
    total_loss, total_count, stopped = distributed.reduce_tensor(totals).tolist()
    if stopped:
        stopping.stop()
    if not total_count:
        raise UserError("the validation set has no labelled samples (all are void)")
    return {"val_loss": total_loss / total_count, **compute(metrics)}


def train(
    task: Task, train_loader: Loader, val_loader: Loader, folder: RunFolder, state: State | None
) -> None:
    """Train for the epochs that are left, from `state` (a checkpoint) on if there is one."""
    args, model = task.args, task.model
    if args.compile:
        machine.compile_network(model)
    optimizer = build_optimizer(model, args)
    scheduler = build_scheduler(optimizer, args, len(train_loader) // args.accumulate)
    scaler = GradScaler(task.device.type, enabled=task.settings.amp == "fp16")
    stepper = Stepper(replicas.wrap(model, task.device), optimizer, scheduler, scaler)
    run = Run(
        *(folder, train_loader, val_loader),
        classes=task.classes,
        epochs=args.epochs,
        save_every=args.save_every,
        score=BEST,
        flags={k: v for k, v in vars(args).items() if k not in ("local_rank", "resume")},
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
    )
    run.resume(state)
    report = Reporter(folder.path, task.device, args.epochs, run.epoch)
    report.start(task.settings, train_loader, val_loader, vars(args))
    with run.stoppable(), report:
        while run.epoch < args.epochs:
            train_loader.sampler.set_epoch(run.epoch, run.seen)
            train_loss = train_one_epoch(task, stepper, train_loader, report, run)
            speed = report.speed()
            replicas.sync_buffers(model)
            replicas.check_same(model)
            run.save()  # whatever fails from here on costs no epoch
            results = evaluate(task, val_loader)
            lr = optimizer.param_groups[0]["lr"]
            is_best = run.end_epoch({"train_loss": train_loss, **results, "lr": lr, **speed})
            run.save(is_best)
            report.end_epoch(run.history, is_best)
            if is_best:
                report.examples(model, val_loader.dataset, task.classes, draw_example)
    report.finish(BEST, run.best)


def evaluate_checkpoint(args: Namespace, device: torch.device, settings: Settings) -> None:
    """Print the metrics of best.pt, or of --resume PATH, as JSON, with the network it names."""
    path = args.output_dir / "best.pt" if args.resume in ("auto", "never") else args.resume
    model, known_classes, flags = checkpoint.open_model(path, build_model, add_arguments, device)
    _, val_set, classes = build_dataset(args.data, args.image_size or flags.image_size)
    checkpoint.check_classes(path, known_classes, classes)
    options = loading.Options(settings.workers, args.prefetch, settings.pin_memory, args.seed)
    val_loader = loading.build_val_loader(val_set, len(classes), args.batch_size, options)
    metrics = build_metrics(classes).to(device)
    task = Task(args, settings, device, classes, model, build_criterion(args), metrics)
    results = evaluate(task, val_loader)
    distributed.say(json.dumps({k: v if math.isfinite(v) else None for k, v in results.items()}))


def train_or_resume(args: Namespace, device: torch.device, settings: Settings) -> None:
    """Build what is trained and train it, from the checkpoint in --output-dir if there is one."""
    train_set, val_set, classes = build_dataset(args.data, args.image_size)
    options = loading.Options(settings.workers, args.prefetch, settings.pin_memory, args.seed)
    train_loader = loading.build_train_loader(
        train_set, len(classes), args.batch_size, args.accumulate, options
    )
    val_loader = loading.build_val_loader(val_set, len(classes), args.batch_size, options)
    folder = RunFolder(args.output_dir, args.resume, args.keep)
    state = folder.find_checkpoint()
    if state:
        checkpoint.check_flags(state, args, (*NETWORK_FLAGS, "optimizer"), add_arguments)
        checkpoint.check_classes(state["path"], state["classes"], classes)
    model = build_model(args, classes, weights=None if state else args.weights)
    if state:
        checkpoint.load_weights(model, state)
        if state["epoch"] >= args.epochs:
            return distributed.say(
                "nothing left to do: --epochs N for more, --resume never to start over"
            )
    model = model.to(device).to(memory_format=torch.channels_last)
    metrics = build_metrics(classes).to(device)
    task = Task(args, settings, device, classes, model, build_criterion(args), metrics)
    train(task, train_loader, val_loader, folder, state)


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
    settings = machine.set_up(
        *(device, args.workers, args.threads, args.pin_memory, args.amp),
        bytes_per_worker=4 * args.prefetch * args.batch_size * (args.image_size or IMAGE_SIZE) ** 2,
    )
    if args.eval_only:
        evaluate_checkpoint(args, device, settings)
    else:
        train_or_resume(args, device, settings)
    distributed.teardown()


if __name__ == "__main__":
    with failures.one_line_errors(loading.explain, replicas.explain):
        main()
