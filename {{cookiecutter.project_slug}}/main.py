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
from collections.abc import Sequence

import ddpkit
from flags import parse_args

if __name__ == "__main__":  # before torch, whose import takes seconds
    ddpkit.prepare(parse_args, needs="2.0")

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection

import distributed
import recipe
from dataset import build_datasets, draw_example, transform_batch
from model import BEST, build_criterion, build_metrics, build_model, infer


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    device = distributed.setup(args.seed, args.deterministic)  # joins the other ranks
    folder = ddpkit.Folder(args.output_dir, args.resume)
    if args.eval_only:
        best = folder.best()  # the flags that are not given are those of its training,
        # but for those of this machine
        own = {"output_dir": args.output_dir, "amp": args.amp}
        args = parse_args(argv, {**best["args"], **own})
    else:
        folder.find_checkpoint()  # to continue from
    args.amp = recipe.choose_amp(args, device)

    # The data: samples have random numbers of their own, whichever rank and worker
    # reads them.
    train_set, val_set, classes = build_datasets(args)
    val_seeded = ddpkit.Seeded(val_set, classes, args.seed)
    val_loader: DataLoader = DataLoader(
        val_seeded,
        # each sample on one rank
        batch_sampler=ddpkit.ValSampler(val_set, args.batch_size),
        collate_fn=ddpkit.Collate(),  # a batch for each size of image
        **ddpkit.workers(args.workers, device),
    )

    # The network, with the weights of the checkpoint, or else of --weights.
    pretrained = None if folder.state else args.weights
    model = build_model(args, classes, val_seeded.channels, pretrained)
    folder.load(model, classes, vars(args))
    model = model.to(device).to(memory_format=torch.channels_last)
    if args.sync_bn:
        if device.type == "cpu":
            raise ddpkit.UserError(
                "--sync-bn: torch has it on GPUs only; omit the flag"
            )
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    # The sum of the losses, to be divided by the number of labels on all ranks.
    criterion = ddpkit.Criterion(build_criterion(args, train_set, classes), classes).to(
        device
    )
    metrics = build_metrics(args, classes).to(device)
    predict = functools.partial(infer, args=args)

    if args.eval_only:
        results, confusion, worst = evaluate(
            model, val_loader, criterion, metrics, args
        )
        folder.write(
            confusion, worst, model, val_loader, classes, predict, draw_example
        )
        finite = {name: x if math.isfinite(x) else None for name, x in results.items()}
        distributed.say(json.dumps(finite))
        return

    # Training changes `trained`. With --ema, `model` is its average; `model` is what is
    # evaluated, saved and predicted with.
    train_loader: DataLoader = DataLoader(
        ddpkit.Seeded(train_set, classes, args.seed),
        args.batch_size,
        sampler=ddpkit.TrainSampler(
            train_set, args.batch_size, args.accumulate, args.seed
        ),
        collate_fn=ddpkit.Collate(),
        **ddpkit.workers(args.workers, device),
    )
    ema = recipe.Ema(model, args.ema) if args.ema else None
    trained = ema.trained if ema else model
    if args.compile:
        trained.compile()  # in place: the names in checkpoints stay
    optimizer = recipe.build_optimizer(trained, args)
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
        optimizer=optimizer,  # what else has a state_dict is saved, too: name=part
        scheduler=scheduler,
        scaler=scaler,
        epochs=args.epochs,
        accumulate=args.accumulate,
        save_every=args.save_every,
        log_every=args.log_every,
        best=BEST,
        flags=vars(args),
        predict=predict,
        draw=draw_example,
        tracker=args.tracker,
    )

    # after a signal all ranks stop at the same step, save, and exit with status 75
    with run:
        # On one batch: a mistake in it costs no epoch.
        run.sanity_check(evaluate, criterion, metrics, args)
        frozen = (
            recipe.freeze_backbone(trained) if run.epoch < args.freeze_backbone else []
        )
        ddp_model = wrap(trained)
        for epoch in range(run.epoch, args.epochs):
            if run.is_out_of_patience(args.patience):
                break
            if frozen and epoch == args.freeze_backbone:
                for param in frozen:
                    param.requires_grad_(True)
                ddp_model = wrap(trained)
            train_loss = train_one_epoch(
                run, ddp_model, criterion, optimizer, scheduler, scaler, ema, args
            )
            run.save()  # whatever fails from here on costs no epoch
            results, confusion, worst = evaluate(
                model, val_loader, criterion, metrics, args
            )
            lr = optimizer.param_groups[-1]["lr"]  # not the backbone's
            # saves
            is_best = run.end_epoch({"train_loss": train_loss, **results, "lr": lr})
            if is_best:
                run.draw(confusion, worst)


def wrap(model: nn.Module) -> DistributedDataParallel:
    """Have backward() average the gradients over the ranks. Wrap again after unfreezing weights."""
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    # BatchNorm's statistics become those of rank 0 at the end of an epoch, not in each
    # pass. newer versions of torch warn of it as an argument
    ddp_model.broadcast_buffers = False
    return ddp_model


def train_one_epoch(
    run: ddpkit.Run,
    ddp_model: DistributedDataParallel,
    criterion: ddpkit.Criterion,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    scaler: torch.amp.GradScaler,
    ema: recipe.Ema | None,
    args: Namespace,
) -> float:
    """Train on this rank's share of the rest of the epoch; return the mean loss of all ranks."""
    rank = ddpkit.rank()  # noqa: F841  for conditions of breakpoints, such as rank == 1
    world_size = torch.distributed.get_world_size()
    # all batches have one shape
    torch.backends.cudnn.benchmark = not args.deterministic
    recipe.set_training(ddp_model)  # train(), but for what is frozen
    # the --accumulate batches of an optimizer step
    for batches in run.steps(ddp_model):
        batches = [
            transform_batch(images, targets, args, len(run.classes))
            for images, targets, *_ in batches
        ]
        # Batches hold unequal numbers of labelled pixels, and a mean of means would be
        # wrong: all losses of a step are divided by the number of labels in all its
        # batches on all ranks.
        counts = torch.stack([criterion.count(targets) for _, targets in batches])
        # not 0, if all is void
        count = distributed.reduce_tensor(counts.sum()).clamp(min=1e-6)
        losses: list[Tensor] = []
        for i, (images, targets) in enumerate(batches, 1):
            # DDP averages the gradients over the ranks in backward(); a step needs that
            # once.
            with contextlib.nullcontext() if i == len(batches) else ddp_model.no_sync():
                with recipe.autocast(args.amp, images.device):
                    outputs = ddp_model(images)
                # A sum / count; times world_size, because DDP divides by that.
                loss = (
                    criterion(ddpkit.to_logits(outputs), targets) * world_size / count
                )
                scaler.scale(loss).backward()
            losses.append(loss.detach())
        grad_norm = None
        if args.clip_grad_norm or run.is_logged:
            scaler.unscale_(optimizer)
            # inf: only measured, for the log
            max_norm = args.clip_grad_norm or math.inf
            grad_norm = nn.utils.clip_grad_norm_(ddp_model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        if ema:
            ema.update(run.step)
        # saves if due; stops here after a signal
        run.end_step(sum(losses), count, grad_norm)
    return run.mean_loss()  # gives all ranks the BatchNorm statistics of rank 0


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
    model.eval()
    metrics.reset()
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    worst = ddpkit.Worst(device)
    for images, targets, *_, indices in ddpkit.batches(loader, device):
        with recipe.autocast(args.amp, device):
            logits = infer(model, images, args)
        totals[0] += criterion(logits, targets)
        totals[1] += criterion.count(targets)
        metrics.update(logits, targets)
        worst.update(logits, targets, indices)
    # sums first, then one division
    loss_sum, count = distributed.reduce_tensor(totals).tolist()
    results, confusion = ddpkit.compute(metrics)  # after a signal all ranks stop here
    if not count:
        raise ddpkit.NoLabelsError(
            "the validation set has no labelled samples (all are void)"
        )
    return {"val_loss": loss_sum / count, **results}, confusion, worst.compute()


if __name__ == "__main__":
    ddpkit.start(main)
