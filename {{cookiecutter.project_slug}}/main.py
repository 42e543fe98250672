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
from argparse import Namespace
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import ddpkit
from flags import parse_args

if __name__ == "__main__":  # before torch, whose import takes seconds
    ddpkit.prepare(parse_args, needs="1.1")

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MetricCollection

import distributed
import recipe
from dataset import build_datasets, draw_example, transform_batch
from model import BEST, build_criterion, build_metrics, build_model, infer

Criterion = Callable[..., tuple[Tensor, Tensor | int]]  # (outputs, targets) -> sum, count


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    device = distributed.setup(args.seed, args.deterministic)  # joins the other ranks
    folder = ddpkit.Folder(args.output_dir, args.resume)
    if args.eval_only:  # flags that are not given are those of the training
        own = {"output_dir": args.output_dir, "amp": args.amp}  # of this start and machine
        args = parse_args(argv, {**folder.best()["args"], **own})
    else:
        folder.find_checkpoint()
    args.amp = recipe.choose_amp(args, device)

    train_set, val_set, classes = build_datasets(args)
    seeded = ddpkit.Seeded(val_set, classes, args.seed)  # samples have random numbers of their own
    val_loader: DataLoader = DataLoader(
        seeded,
        batch_sampler=ddpkit.ValSampler(val_set, args.batch_size),
        collate_fn=ddpkit.Collate(),
        **ddpkit.workers(args.workers, device),
    )

    weights = None if folder.state else args.weights
    model = build_model(args, classes, seeded.channels, weights)
    folder.load(model, classes, vars(args))  # the checkpoint's weights, if there is one
    model = model.to(device).to(memory_format=torch.channels_last)
    if args.sync_bn and device.type == "cpu":
        raise ddpkit.UserError("--sync-bn: torch has it on GPUs only; omit the flag")
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    criterion = ddpkit.criterion(build_criterion(args, train_set, classes), device)
    metrics = build_metrics(args, classes).to(device)
    judge = functools.partial(evaluate, criterion=criterion, metrics=metrics, args=args)
    if args.eval_only:
        results, found = judge(model, val_loader)
        predict = functools.partial(infer, args=args)
        folder.write(found, model, val_loader, classes, predict, draw_example)
        distributed.say(json.dumps({k: v if isfinite(v) else None for k, v in results.items()}))
    else:
        train(args, folder, train_set, val_loader, classes, model, criterion, judge)


def train(
    args: Namespace,
    folder: ddpkit.Folder,
    train_set: Dataset,
    val_loader: DataLoader,
    classes: Sequence[str],
    model: nn.Module,
    criterion: Criterion,
    judge: Callable[..., tuple[dict[str, float], Any]],
) -> None:
    """Train until --epochs, continuing from the checkpoint that `folder` has found."""
    device = next(model.parameters()).device
    sampler = ddpkit.TrainSampler(train_set, args.batch_size, args.accumulate, args.seed)
    train_loader: DataLoader = DataLoader(
        ddpkit.Seeded(train_set, classes, args.seed),
        args.batch_size,
        sampler=sampler,
        collate_fn=ddpkit.Collate(),
        **ddpkit.workers(args.workers, device),
    )

    # `model` is evaluated, saved and predicted with; `trained` is what the optimizer changes.
    ema = recipe.Ema(model, args.ema) if args.ema else None
    trained = ema.trained if ema else model
    if args.compile:
        trained.compile()
    optimizer = recipe.build_optimizer(trained, args)
    scheduler = recipe.build_scheduler(optimizer, args, sampler.steps)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    run = ddpkit.Run(
        *(folder, train_loader, val_loader, classes),
        model=model,
        trained=trained,
        optimizer=optimizer,  # what else has a state_dict is saved, too: name=part
        scheduler=scheduler,
        scaler=scaler,
        epochs=args.epochs,
        accumulate=args.accumulate,
        save_every=args.save_every,
        best=BEST,
        flags=vars(args),
        predict=functools.partial(infer, args=args),
        draw=draw_example,
        tracker=args.tracker,
    )
    with run:  # after a signal all ranks stop at the same step, save, and exit with status 75
        run.rehearse(judge)  # on one batch: a mistake in it costs no epoch
        while not run.is_over(args.patience):
            if run.epoch in (run.began, args.freeze_backbone):
                recipe.freeze(trained, run.epoch < args.freeze_backbone)
                ddp_model = ddpkit.wrap(trained, device)  # after changing what is trained
            train_loss = train_one_epoch(
                run, ddp_model, criterion, optimizer, scheduler, scaler, ema, args
            )
            run.save()  # whatever fails from here on costs no epoch
            results, found = judge(model, val_loader)
            lr = optimizer.param_groups[-1]["lr"]  # not the backbone's
            if run.end_epoch({"train_loss": train_loss, **results, "lr": lr}):  # the best so far
                run.draw(found)


def train_one_epoch(
    run: ddpkit.Run,
    ddp_model: DistributedDataParallel,
    criterion: Criterion,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    scaler: torch.amp.GradScaler,
    ema: recipe.Ema | None,
    args: Namespace,
) -> float:
    """Train on this rank's share of the rest of the epoch; return the mean loss of all ranks."""
    rank = ddpkit.rank()  # noqa: F841  for conditions of breakpoints, such as rank == 1
    torch.backends.cudnn.benchmark = not args.deterministic  # all batches have one shape
    recipe.set_training(ddp_model)
    for i, (images, targets, *_) in run.batches():
        images, targets = transform_batch(images, targets, args, len(run.classes))
        is_last = (i + 1) % args.accumulate == 0  # of the passes that make up an optimizer step
        # DDP averages the gradients over the ranks in backward(); a step needs that once.
        with contextlib.nullcontext() if is_last else ddp_model.no_sync():
            with recipe.autocast(args.amp, images.device):
                outputs = ddp_model(images)
            loss_sum, count = criterion(outputs, targets)
            loss = run.loss(loss_sum, count)  # the mean, over the samples of all ranks
            scaler.scale(loss).backward()
        if is_last:
            # Passes hold unequal numbers of labelled pixels: a mean of means would be wrong.
            run.divide_gradients(ddp_model)
            if args.clip_grad_norm:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(ddp_model.parameters(), args.clip_grad_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            if ema:
                ema.update(run.step)
            run.end_step()  # saves if that is due; stops here after a signal
    return run.mean_loss()


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    loader: DataLoader,
    criterion: Criterion,
    metrics: MetricCollection,
    args: Namespace,
) -> tuple[dict[str, float], Any]:
    """Return loss and metrics over the validation set, each sample counted once, and mistakes.

    Takes the bare model: ranks may have unequal numbers of batches, for which DDP would wait.
    """
    device = next(model.parameters()).device
    torch.backends.cudnn.benchmark = False  # takes seconds for each image size
    model.eval()
    metrics.reset()
    totals, worst = torch.zeros(2, dtype=torch.float64, device=device), ddpkit.Worst(device)
    for images, targets, *_, indices in ddpkit.batches(loader, device):
        with recipe.autocast(args.amp, device):
            outputs = infer(model, images, args)
        loss_sum, count = criterion(outputs, targets)
        totals[0] += loss_sum
        totals[1] += count
        logits = ddpkit.first(outputs)  # of a network with several outputs
        metrics.update(logits, targets)
        worst.update(logits, targets, indices)
    loss_sum, count = distributed.reduce_tensor(totals).tolist()  # sums first, then one division
    results, confusion = ddpkit.compute(metrics)  # after a signal all ranks stop here
    if not count and isinstance(loader, DataLoader):  # a rehearsal's two samples may be void
        raise ddpkit.UserError("the validation set has no labelled samples (all are void)")
    return {"val_loss": loss_sum / (count or 1), **results}, (confusion, worst.compute())


if __name__ == "__main__":
    ddpkit.start(main)
