"""The recipe: flags, optimizer, learning rate, averaged weights and frozen layers."""

import copy
import math
from argparse import Namespace, _ArgumentGroup
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.optim.swa_utils import get_ema_multi_avg_fn

from engine.errors import UserError
from engine.ranks import distributed
from engine.run.flags import at_least, below_one
from engine.run.optimizers import Combined, fill_momenta
from model import backbone

DEFAULTS = {  # of --lr and --weight-decay for each --optimizer
    "adamw": {"lr": 0.001, "weight_decay": 0.05},
    "sgd": {"lr": 0.1, "weight_decay": 0.0001},
    "adafactor": {"lr": 0.01, "weight_decay": 0.0},
    "muon": {"lr": 0.001, "weight_decay": 0.05},
}
SCHEDULES = ("cosine", "step", "poly", "onecycle", "wsd")


# fmt: off
def add_arguments(group: _ArgumentGroup) -> None:
    def by_optimizer(name: str) -> str:
        return "(default: " + ", ".join(f"{r[name]:g} for {o}" for o, r in DEFAULTS.items()) + ")"
    count, positive, rate = at_least(0), at_least(1), at_least(0, float)
    add = group.add_argument
    add("--epochs", type=positive, default=30, help="passes over the training set")
    add("--patience", metavar="EPOCHS", type=count, default=0, help="end after so many epochs without a new best; 0: never")
    add("--batch-size", type=positive, help="images per rank and forward pass (default: 32, or fewer if the set is small)")
    add("--accumulate", type=positive, default=1, help="forward passes per optimizer step")
    add("--sampler", choices=("shuffle", "balanced"), default="shuffle", help="balanced: each class equally often, rare images several times per epoch")
    add("--optimizer", choices=list(DEFAULTS), default="adamw", help="muon: for the matrices of hidden layers, AdamW for the other weights")
    add("--lr", type=rate, help=f"peak learning rate {by_optimizer('lr')}")
    add("--scale-lr", action="store_true", help="multiply --lr by global batch / 256")
    add("--backbone-lr", metavar="FACTOR", type=rate, default=1.0, help="learning rate of the backbone, as a factor of --lr")
    add("--freeze-backbone", metavar="EPOCHS", type=count, default=0, help="train only the other layers for so many epochs")
    add("--momentum", type=below_one, default=0.9, help="of SGD")
    add("--nesterov", action="store_true", help="Nesterov's momentum for SGD")
    add("--weight-decay", type=rate, help=f"not on biases and norms {by_optimizer('weight_decay')}")
    add("--schedule", choices=SCHEDULES, default="cosine", help="cosine decay to 0, division by 10 every 30 epochs, polynomial decay, one cycle, or constant with a linear decay at the end (wsd)")
    add("--warmup-epochs", type=rate, default=0.5, help="epochs of linear warm-up (onecycle has its own)")
    add("--clip-grad-norm", metavar="NORM", type=rate, default=0.0, help="maximum norm of the gradient; 0 disables clipping")
    add("--clip-grad-value", metavar="VALUE", type=rate, default=0.0, help="maximum of each of its values; 0 disables clipping")
    add("--ema", metavar="DECAY", type=below_one, default=0.0, help="evaluate and save an exponential moving average of the weights, for example 0.999; 0: none")
    add("--sync-bn", action="store_true", help="BatchNorm over the images of all ranks; on GPUs only")
    add("--strategy", choices=("ddp", "fsdp", "dp"), default="ddp", help="DistributedDataParallel; weights and optimizer shared out among the ranks (fully_shard); or DataParallel, one process for all GPUs")
    add("--amp", choices=("auto", "off", "bf16", "fp16"), default="auto", help="mixed precision; auto: bf16 or fp16 on GPUs, off on CPUs")
    add("--compile", action="store_true", help="use torch.compile: minutes at the start, faster steps afterwards")
    add("--seed", type=count, default=0, help="of initial weights, sample order, augmentation and dropout")
    add("--deterministic", action="store_true", help="bit-identical runs on GPUs; slower")
# fmt: on


def set_defaults(args: Namespace) -> None:
    """Set --lr and --weight-decay, unless they are given, to the defaults of --optimizer."""
    if args.strategy == "fsdp" and (args.ema or args.optimizer not in ("adamw", "sgd")):
        raise UserError("--strategy fsdp: only with --optimizer adamw or sgd, and without --ema")
    if args.nesterov and (args.optimizer != "sgd" or not args.momentum):
        raise UserError("--nesterov: only with --optimizer sgd, and --momentum above 0")
    if args.strategy == "dp":
        if args.sync_bn or args.compile or args.amp == "bf16":  # its threads do not take over bf16
            raise UserError("--strategy dp: not with --sync-bn, --compile and --amp bf16")
        args.amp = "off" if args.amp == "auto" else args.amp
    for name, value in DEFAULTS[args.optimizer].items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def build_optimizer(model: nn.Module, args: Namespace) -> torch.optim.Optimizer:
    lr = args.lr
    if args.scale_lr:  # Goyal et al. 2017, arXiv:1706.02677
        lr *= args.batch_size * args.accumulate * distributed.world_size() / 256
        distributed.say(f"--scale-lr: learning rate {args.lr:g} becomes {lr:g}")
    slow = set(backbone(model)) if args.backbone_lr != 1 else set()
    groups = []
    for factor in (args.backbone_lr, 1.0) if slow else (1.0,):
        weights = [w for w in model.parameters() if (w in slow) == (factor != 1)]
        matrices = [weight for weight in weights if weight.ndim > 1]
        others = [weight for weight in weights if weight.ndim <= 1]  # biases and norms
        groups.append({"params": matrices, "lr": lr * factor, "weight_decay": args.weight_decay})
        groups.append({"params": others, "lr": lr * factor, "weight_decay": 0.0})
    if args.optimizer == "sgd":
        # With any but its fused form GradScaler reads the device at each step. On CPUs that form
        # takes twice the time; fully_shard has none.
        is_on_cpu = next(model.parameters()).device.type == "cpu"
        fused = None if is_on_cpu or args.strategy == "fsdp" else True
        return fill_momenta(
            torch.optim.SGD(groups, lr, args.momentum, nesterov=args.nesterov, fused=fused)
        )
    if args.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr)
    if args.optimizer == "muon":
        return build_muon(model, groups, lr)
    return torch.optim.AdamW(groups, lr, fused=True)


def build_scheduler(optimizer: torch.optim.Optimizer, args: Namespace, steps: int) -> LRScheduler:
    """Return a schedule to step after each optimizer step; an epoch has `steps` of them."""
    total = args.epochs * steps
    warmup = args.warmup_epochs * steps

    def factor(step: int) -> float:
        if args.schedule == "onecycle":  # Smith and Topin 2017, arXiv:1708.07120
            return one_cycle(step, total)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        share = min((step - warmup) / max(total - warmup, 1), 1)
        if args.schedule == "step":
            return 0.1 ** (step // (30 * steps))
        if args.schedule == "poly":  # Chen et al. 2016, arXiv:1606.00915
            return (1 - share) ** 0.9
        if args.schedule == "wsd":  # Hu et al. 2024, arXiv:2404.06395
            return min(1, (1 - share) / 0.2)
        return 0.5 * (1 + math.cos(math.pi * share))

    return LambdaLR(optimizer, factor)


def one_cycle(step: int, total: int) -> float:
    """Return torch's OneCycleLR at `step` of `total`: cosines from 1/25 to 1 in 30 %, then to 4e-6.

    Momentum stays as it is.
    """
    top = 0.3 * total - 1
    begin, share = (1 / 25, step / top) if step <= top else (4e-6, (step - top) / (total - 1 - top))
    rise = share if step <= top else 1 - min(share, 1)
    return begin + (1 - begin) * 0.5 * (1 - math.cos(math.pi * rise))


def build_muon(model: nn.Module, groups: list[dict], lr: float) -> torch.optim.Optimizer:
    """Return Muon for the matrices of hidden layers, and AdamW for all other weights.

    Jordan et al. 2024, kellerjordan.github.io/posts/muon; its updates are scaled so that AdamW's
    rate and decay fit both (Liu et al. 2025, arXiv:2502.16982).
    """
    of_backbone = set(backbone(model))
    hidden = {  # not tables, such as those of relative positions
        weight
        for name, weight in model.named_parameters()
        if weight in of_backbone and weight.ndim == 2 and name.endswith("weight")
    }
    parts: dict[type[torch.optim.Optimizer], list[dict]] = {
        torch.optim.Muon: [],
        torch.optim.AdamW: [],
    }
    for group in groups:
        for kind, is_hidden in (torch.optim.Muon, True), (torch.optim.AdamW, False):
            weights = [weight for weight in group["params"] if (weight in hidden) == is_hidden]
            if weights:
                parts[kind].append({**group, "params": weights})
    if not parts[torch.optim.Muon]:
        raise UserError(
            "--optimizer muon: this network has no matrices in hidden layers, which transformers "
            "and ConvNeXt have; use adamw"
        )
    return Combined(
        torch.optim.Muon(parts[torch.optim.Muon], lr, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(parts[torch.optim.AdamW], lr, fused=True),
    )


def clip_gradients(
    weights: Iterable[Tensor],
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    args: Namespace,
) -> None:
    if args.clip_grad_norm or args.clip_grad_value:
        scaler.unscale_(optimizer)
        weights = list(weights)
    if args.clip_grad_value:
        nn.utils.clip_grad_value_(weights, args.clip_grad_value)
    if args.clip_grad_norm:
        nn.utils.clip_grad_norm_(weights, args.clip_grad_norm)


class Average:
    """An exponential moving average of a network's weights and of BatchNorm's statistics.

    At step n the decay is at most (1 + n) / (10 + n), so that the random weights of the start are
    soon forgotten, as in TensorFlow's ExponentialMovingAverage. torch's AveragedModel would copy a
    number to the device at each step, and wait for it.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.module = copy.deepcopy(model)
        self.decay = decay
        self.step = 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        share = min(self.decay, (1 + self.step) / (10 + self.step))
        ours, theirs = ([*net.parameters(), *net.buffers()] for net in (self.module, model))
        pairs = [*zip(ours, theirs, strict=True)]
        floats = [(average, new) for average, new in pairs if average.is_floating_point()]
        averages, values = map(list, zip(*floats, strict=True))
        get_ema_multi_avg_fn(share)(averages, values, self.step)
        for average, new in pairs:
            if not average.is_floating_point():  # BatchNorm's counts of batches
                average.copy_(new)
        self.step += 1


def freeze(weights: Iterable[Tensor], is_frozen: bool) -> None:
    """Freeze or unfreeze `weights`; call replicas.wrap afterwards."""
    for weight in weights:
        weight.requires_grad_(not is_frozen)


def set_training(model: nn.Module) -> None:
    """Set `model` to training mode, except BatchNorm whose weights are frozen.

    Its running statistics stay as they are, too.
    """
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            module.train(module.weight.requires_grad)


def is_over(
    history: Sequence[Mapping[str, float | str]], score: str, best: float, patience: int
) -> bool:
    """Return, and say, whether the last `patience` epochs brought no new `best`; never with 0.

    The same on all ranks, because their metrics are.
    """
    scores = [float(row[score]) for row in history if score in row]
    # Greater ones are of another metric or validation set, by which earlier epochs were judged.
    start = max((i + 1 for i, value in enumerate(scores) if value > best), default=0)
    first = next((i + 1 for i in range(start, len(scores)) if scores[i] == best), start)
    since = len(scores) - first
    if not 0 < patience <= since:
        return False
    distributed.say(f"--patience {patience}: no new best {score} since {since} epoch(s); the end")
    return True
