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

import functools
import math
from argparse import Namespace
from collections.abc import Sequence

import ddpkit
from flags import parse_args

if __name__ == "__main__":  # before torch, whose import takes seconds
    ddpkit.before_imports(parse_args, needs="3.0")

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection

import ddp
import recipe
from dataset import build_datasets, draw_example, transform_batch
from model import (
    BEST,
    build_criterion,
    build_metrics,
    build_model,
    check_flags,
    infer,
)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    local_rank = args.local_rank  # of this process on its node: 0, 1, ...
    device = ddp.setup(local_rank, args)  # its GPU; joins the other ranks
    folder = ddpkit.RunFolder(args.output_dir, args.resume)
    # Either sets folder.state: best.pt, or the checkpoint to continue from, if there is one.
    if args.eval_only:
        best = folder.best()
        # Parse again, with the checkpoint's flags as defaults, but for these.
        own = {"output_dir": args.output_dir, "amp": args.amp, "json": args.json}
        args = parse_args(argv, {**best["args"], **own})
    else:
        folder.find_checkpoint()
        ddpkit.Reporter.check_tracker(args.tracker)
        recipe.check_optimizer(args.optimizer)
    args.amp = recipe.choose_amp(args, device)
    # Unknown names and missing weights fail here, before data is read.
    pretrained = None if folder.state else args.weights
    check_flags(args, pretrained)

    # The data. Each sample has random numbers of its own, whichever rank and worker reads
    # it. For validation each image is on one rank, once: nothing is padded or repeated.
    train_set, val_set, classes = build_datasets(args)
    val_loader = ddpkit.val_loader(
        val_set, args.batch_size, classes=classes, seed=args.seed, workers=args.workers
    )

    # The network, with the weights of --weights. Those of a checkpoint come last, by Run.
    model = build_model(args, classes, val_loader.channels, pretrained)
    model = model.to(device).to(memory_format=ddp.memory_layout(device))
    # criterion(outputs, targets) is the sum of the losses of a batch's labels, and
    # criterion.count(targets) their number.
    loss_module = build_criterion(args, train_set, classes)
    criterion = ddpkit.Criterion(loss_module, classes).to(device)
    metrics = build_metrics(args, classes).to(ddp.sum_device(device))
    report = ddpkit.Reporter(  # lines, TensorBoard, metrics.csv, drawings
        args.output_dir,
        args.epochs,
        classes,
        log_every=args.log_every,
        predict=functools.partial(infer, args=args),
        draw=draw_example,
        tracker=args.tracker,
    )

    if args.eval_only:
        folder.load(model, val_loader, classes, vars(args))
        found = evaluate(model, val_loader, criterion, metrics, args)
        # to eval/ in the folder; prints a table, or with --json a line for programs
        report.write_evaluation(found, model, val_loader, args.json)
        return

    # Another order in each epoch, from which a run also resumes within an epoch; the last
    # images, too few for a step of all ranks, are left out. Or a DataLoader of your own.
    train_loader = ddpkit.train_loader(
        train_set,
        args.batch_size,
        classes=classes,
        accumulate=args.accumulate,
        seed=args.seed,
        workers=args.workers,
        virtual_ranks=args.virtual_ranks,
    )
    # The optimizer changes `trained`; `model` is evaluated, saved and used by predict.py. They
    # differ only with --ema, where `model` is the average of `trained`.
    ema = recipe.Ema(model, args.ema) if args.ema else None
    trained = ema.trained if ema else model
    if args.compile:
        trained.compile()  # in place: the names in checkpoints stay
    optimizer = recipe.build_optimizer(trained, args)
    # Optimizer steps; len(train_loader) is the number of this rank's batches.
    steps = ddpkit.Run.steps_per_epoch(train_loader, args.accumulate)
    scheduler = recipe.build_scheduler(optimizer, args, steps)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    run = ddpkit.Run(  # continues from the checkpoint
        folder,
        train_loader,
        val_loader,
        classes,
        model=model,
        trained=trained,
        criterion=criterion,
        # All parts of the state; what else has a state_dict is saved as name=part.
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
        report=report,
        accumulate=args.accumulate,
        save_every=args.save_every,
        best=BEST,
        flags=vars(args),
    )

    # After a signal all ranks stop at the same step, save, and exit with status 75.
    with run:
        # On one batch: a mistake in evaluate() costs no epoch.
        run.sanity_check(evaluate, criterion, metrics, args)
        frozen = []
        if run.epoch < args.freeze_backbone:
            frozen = recipe.freeze_backbone(trained)
        ddp_model = wrap(trained, args.virtual_ranks)
        # On resume all variables start anew: counts, lists, tensors (a queue, averaged
        # weights), generators. Keep them in numbers = run.numbers(mine=0), and change
        # numbers.mine before run.end_epoch; for next(it), it = run.forever(loader).
        for epoch in range(run.epoch, args.epochs):
            if run.is_out_of_patience(args.patience):
                break
            if frozen and epoch == args.freeze_backbone:
                for param in frozen:
                    param.requires_grad_(True)
                ddp_model = wrap(trained, args.virtual_ranks)
            means = train_one_epoch(
                run, ddp_model, criterion, optimizer, scheduler, scaler, ema, args
            )
            run.save()  # whatever fails from here on costs no epoch
            results, confusion, worst = evaluate(
                model, val_loader, criterion, metrics, args
            )
            lr = optimizer.param_groups[-1]["lr"]  # not the backbone's
            # Saves last.pt, and best.pt if BEST of model.py is better than ever. What you
            # step once in an epoch goes above this line.
            is_best = run.end_epoch({**means, **results, "lr": lr})
            if is_best:
                run.draw(confusion, worst)


def wrap(
    model: nn.Module, virtual_ranks: int = 0
) -> DistributedDataParallel | ddpkit.VirtualRanks:
    """Have backward() average the gradients over the ranks; after unfreezing wrap again."""
    if virtual_ranks:
        return ddpkit.VirtualRanks(model, virtual_ranks)
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    # BatchNorm's statistics become those of rank 0 at the end of an epoch, not in each
    # pass. Not an argument above, of which newer versions of torch warn.
    ddp_model.broadcast_buffers = False
    return ddp_model


def train_one_epoch(
    run: ddpkit.Run,
    ddp_model: DistributedDataParallel | ddpkit.VirtualRanks,
    criterion: ddpkit.Criterion,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    scaler: torch.amp.GradScaler,
    ema: recipe.Ema | None,
    args: Namespace,
) -> dict[str, float]:
    """Train on this rank's share of the rest of the epoch; return train_loss, of all ranks."""
    world_size = run.ranks  # as torch.distributed's, or --virtual-ranks
    # Pays off, because all batches have the same shape.
    torch.backends.cudnn.benchmark = not args.deterministic
    recipe.set_training(ddp_model)  # train(), but for what is frozen
    # step: of this epoch, also after a resume. batches: the --accumulate of the step, each on
    # the device when its turn comes. Given ddp_model to check that this is what is trained.
    for step, batches in run.steps(ddp_model):  # noqa: B007
        # Batches hold unequal numbers of labelled pixels, and a mean of means would be
        # wrong: all losses of a step are divided by the number of labels in all its
        # batches on all ranks, or 1e-6 if there are none.
        batch_counts = [criterion.count(targets) for targets in batches.targets]
        count = ddp.reduce_tensor(torch.stack(batch_counts).sum()).clamp(min=1e-6)
        losses = []
        for n, (images, targets, *_) in enumerate(batches, 1):
            rank = run.rank  # noqa: F841  for conditions of breakpoints, as rank == 1
            # As many labels as before: `count` has them.
            images, targets = transform_batch(images, targets, args, len(run.classes))
            # DDP averages the gradients over the ranks in backward(), once in a step: before
            # its last batch this does what no_sync() does.
            ddp_model.require_backward_grad_sync = n == len(batches)
            with recipe.autocast(args.amp, images.device):
                outputs = ddp_model(images)
            logits = ddpkit.to_logits(outputs)
            # A sum / count; times world_size, because DDP divides by that.
            # A mean over the batch that you add to it, below, is mean / len(batches).
            loss = criterion(logits, targets) * world_size / count
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        # What changes gradients comes between this line and scaler.step.
        scaler.unscale_(optimizer)
        grad_norm = None
        if args.clip_grad_norm or run.is_logged:
            grad_norm = nn.utils.clip_grad_norm_(
                ddp_model.parameters(), args.clip_grad_norm or math.inf
            )
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        if ema:
            ema.update(run.step)
        # Counts and logs the step. Add up more over steps and ranks by name: a number for its
        # sum, correct=(right, len(targets)) for the ratio. run.means() returns them.
        # A sum in a local variable misses the steps before a resume.
        run.end_step(losses, count, grad_norm)
    # All ranks call this. It also gives them the BatchNorm statistics of rank 0.
    return run.means()


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    loader: DataLoader,
    criterion: ddpkit.Criterion,
    metrics: MetricCollection,
    args: Namespace,
) -> tuple[dict[str, float], Tensor | None, Sequence[tuple[float, int]]]:
    """Return loss and metrics over the validation set, the confusion matrix, and the worst images.

    Each sample counts once. Takes the bare model: ranks may have unequal numbers of batches, for
    which DDP would wait.
    """
    device = next(model.parameters()).device
    torch.backends.cudnn.benchmark = False  # takes seconds for each image size
    metrics.reset()
    place = ddp.sum_device(device)
    losses = []
    batch_counts = []
    worst = ddpkit.TopLosses(device, every=args.eval_only)
    # Meanwhile the network is in evaluation mode.
    for images, targets, *_, indices in ddpkit.eval_batches(loader, model):
        with recipe.autocast(args.amp, device):
            logits = infer(model, images, args)
        losses.append(criterion(logits, targets))
        batch_counts.append(criterion.count(targets))
        metrics.update(logits.to(place), targets.to(place))
        worst.update(logits, targets, indices)
    loss_sum, count = ddp.sum_exactly(losses, batch_counts)
    # Exact over all ranks; after a signal all of them stop here.
    results, confusion = ddpkit.compute_metrics(metrics)
    if not count:
        raise ddpkit.NoLabelsError(
            "the validation set has no labelled samples (all are void)"
        )
    return {"val_loss": loss_sum / count, **results}, confusion, worst.compute()


if __name__ == "__main__":
    ddpkit.run_main(main)
