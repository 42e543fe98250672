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
        # Parse again, with the checkpoint's flags as defaults, except these.
        own = {"output_dir": args.output_dir, "amp": args.amp, "json": args.json}
        args = parse_args(argv, {**best["args"], **own})
    else:
        folder.find_checkpoint()
        ddpkit.Reporter.check_tracker(args.tracker)
        recipe.check_optimizer(args.optimizer)
    args.amp = recipe.choose_amp(args, device)
    # Fail on unknown names before any data is read.
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
        # writes eval/ in the folder; prints a table, or with --json one line of JSON
        report.write_evaluation(found, model, val_loader, args.json)
        return

    # Shuffles anew in each epoch, and resumes in mid-epoch. Drops the last images if
    # they do not fill a step on all ranks. You can also use your own DataLoader.
    train_loader = ddpkit.train_loader(
        train_set,
        args.batch_size,
        classes=classes,
        accumulate=args.accumulate,
        seed=args.seed,
        workers=args.workers,
        virtual_ranks=args.virtual_ranks,
    )
    # The optimizer updates `trained`, which is `model` itself or, with --ema, the
    # network that `model` is the average of. `model` is evaluated and predicts.
    ema = recipe.Ema(model, args.ema) if args.ema else None
    trained = ema.trained if ema else model
    if args.compile:
        trained.compile()  # in place: keeps the names in checkpoints
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
        # The whole state. Add anything else that has a state_dict as name=object.
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
        # One validation batch: a bug in evaluate() shows before the first epoch.
        run.sanity_check(evaluate, criterion, metrics, args)
        frozen = []
        if run.epoch < args.freeze_backbone:
            frozen = recipe.freeze_backbone(trained)
        ddp_model = wrap(trained, args.virtual_ranks)
        # A resumed run does not restore your own variables: counters, lists, tensors (a
        # queue), generators. Use numbers = run.numbers(mine=0), and change numbers.mine
        # before run.end_epoch; instead of it = iter(loader), it = run.forever(loader).
        for epoch in range(run.epoch, args.epochs):
            if run.is_out_of_patience(args.patience):
                break
            if frozen and epoch == args.freeze_backbone:
                for param in frozen:
                    param.requires_grad_(True)
                ddp_model = wrap(trained, args.virtual_ranks)
            means = train_one_epoch(
                run,
                train_loader,
                ddp_model,
                criterion,
                optimizer,
                scheduler,
                scaler,
                ema,
                args,
            )
            run.save()  # an error below does not lose the epoch
            results, confusion, worst = evaluate(
                model, val_loader, criterion, metrics, args
            )
            lr = optimizer.param_groups[-1]["lr"]  # not the backbone's
            # Saves last.pt, and best.pt if BEST (a metric, see model.py) improved. Step
            # your own per-epoch scheduler above this line.
            is_best = run.end_epoch({**means, **results, "lr": lr})
            if is_best:
                run.draw(confusion, worst)


def wrap(
    model: nn.Module, virtual_ranks: int = 0
) -> DistributedDataParallel | ddpkit.VirtualRanks:
    """Wrap `model` so that backward() averages over ranks; wrap again after unfreezing."""
    if virtual_ranks:
        return ddpkit.VirtualRanks(model, virtual_ranks)
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    # Broadcast BatchNorm's statistics once an epoch, in run.means(), not in each
    # forward pass. Set here because newer versions of torch warn about the argument.
    ddp_model.broadcast_buffers = False
    return ddp_model


def train_one_epoch(
    run: ddpkit.Run,
    train_loader: DataLoader,
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
    # Tunes kernels once: all training batches have the same shape.
    torch.backends.cudnn.benchmark = not args.deterministic
    recipe.set_training(ddp_model)  # train(), except frozen modules
    # step: counted within the epoch, also after a resume. batches: --accumulate of
    # them, moved to the device one by one. ddp_model: to check that each step calls it.
    for step, batches in run.steps(train_loader, ddp_model):  # noqa: B007
        # Batches have different numbers of labelled pixels, so a mean of means would be
        # wrong: divide each loss by the number of labels in all batches of the step on
        # all ranks (1e-6 if there are none).
        batch_counts = [criterion.count(targets) for targets in batches.targets]
        count = ddp.reduce_tensor(torch.stack(batch_counts).sum()).clamp(min=1e-6)
        losses = []
        for n, (images, targets, *_) in enumerate(batches, 1):
            rank = run.rank  # noqa: F841  for conditional breakpoints: rank == 1
            # Must keep the number of labels: `count` includes them.
            images, targets = transform_batch(images, targets, args, len(run.classes))
            # DDP averages the gradients over the ranks in backward(), once per step:
            # for all batches but the last this is what no_sync() does.
            ddp_model.require_backward_grad_sync = n == len(batches)
            with recipe.autocast(args.amp, images.device):
                outputs = ddp_model(images)
            logits = ddpkit.to_logits(outputs)
            # sum / count, times world_size because DDP divides by it. To add a loss
            # that is a mean over the batch, add mean / len(batches) below.
            loss = criterion(logits, targets) * world_size / count
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        # Change gradients between this line and scaler.step.
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
        # Counts and logs the step. Your own numbers: correct=(right, seen) is a
        # ratio, n=number a sum, over all steps and ranks, which run.means() returns; a
        # local variable would miss the steps before a resume.
        run.end_step(losses, count, grad_norm)
    # Call it on all ranks. It also gives them rank 0's BatchNorm statistics.
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
    torch.backends.cudnn.benchmark = False  # it would tune for each image size
    metrics.reset()
    place = ddp.sum_device(device)
    losses = []
    batch_counts = []
    worst = ddpkit.TopLosses(device, every=args.eval_only)
    # Switches the model to evaluation mode, and back at the end.
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
