"""The recipe: mixed precision, optimizer, learning rate, averaged weights and frozen layers."""

import contextlib
import copy
import difflib
import math
from argparse import Namespace

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import get_ema_multi_avg_fn

import ddpkit
from model import layers


def choose_amp(args: Namespace, device: torch.device) -> str:
    """Return "bf16", "fp16" or "off", as --amp says; auto: bf16 if `device` has it in hardware."""
    if args.amp != "auto":
        return args.amp
    if device.type == "cpu":
        return "off"
    module = torch.get_device_module(device)
    if device.type == "cuda":
        return "bf16" if module.is_bf16_supported(including_emulation=False) else "fp16"
    return "bf16" if getattr(module, "is_bf16_supported", bool)() else "off"


def autocast(
    amp: str, device: torch.device
) -> contextlib.AbstractContextManager[object]:
    """Return a context in which networks compute in bf16 or fp16; with "off", in float32."""
    if amp == "off":
        return contextlib.nullcontext()
    dtype = torch.float16 if amp == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype)


def build_optimizer(model: nn.Module, args: Namespace) -> Optimizer:
    """Return the optimizer that --optimizer names; biases and norms do not decay.

    With --layer-decay D the rate of the n-th layer before the last is --lr x D ** n.

    adamw and sgd are torch's. Others are timm's, as timm sets them up: muon is for all matrices
    and convolutions, also of the last layer, at AdamW's rates, and AdamW for the rest; lamb clips
    the gradient's norm to 1; adafactor keeps to --lr; lion wants a third of AdamW's. Of timm's only
    adamp, sgdp and novograd read the device at each step; in fp16 GradScaler does for all of them.
    """
    lr = args.lr
    parts = [list(model.parameters())]
    if args.layer_decay != 1:
        parts = layers(model)
    # of timm's, such as a ViT's embeddings
    names: set[str] = getattr(model, "no_weight_decay", set)()
    undecayed = {param for name, param in model.named_parameters() if name in names}
    groups: list[dict] = []
    for n, params in enumerate(parts, 1):
        rate = lr * args.layer_decay ** (len(parts) - n)
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for param in params:
            if param.ndim > 1 and param not in undecayed:
                matrices.append(param)
            else:
                others.append(param)
        for chosen, decay in ((matrices, args.weight_decay), (others, 0.0)):
            if chosen:
                groups.append({"params": chosen, "lr": rate, "weight_decay": decay})

    if args.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr, fused=True)
    if args.optimizer == "sgd":
        # With any but its fused form GradScaler reads the device at each step. On CPUs
        # that form takes twice the time.
        fused = None if next(model.parameters()).device.type == "cpu" else True
        return torch.optim.SGD(groups, lr, momentum=0.9, fused=fused)
    import timm.optim  # takes half a second

    # timm's documented names, which its __init__ does not list in the way that pyright asks for.
    create = timm.optim.create_optimizer_v2  # pyright: ignore[reportPrivateImportUsage]
    return create(groups, args.optimizer, lr)


def check_optimizer(name: str) -> None:
    """Reject unknown --optimizer names."""
    if name in ("adamw", "sgd"):  # and of your own, if build_optimizer knows some
        return
    import timm.optim

    # Without those that need other packages, second derivatives, or all memory.
    known = timm.optim.list_optimizers(  # pyright: ignore[reportPrivateImportUsage]
        exclude_filters=["bnb*", "fused*", "adahessian", "kron*"]
    )
    if name not in known:
        near = difflib.get_close_matches(
            name.lower(), {"adamw", "sgd", *map(str, known)}
        )
        raise ddpkit.UserError(
            f"--optimizer {name}: unknown, or not supported here; did you mean "
            f"{' or '.join(sorted(near)) or 'adamw, sgd or muon'}?"
        )


def build_scheduler(optimizer: Optimizer, args: Namespace, steps: int) -> LambdaLR:
    """Return a schedule to step after each optimizer step; an epoch has `steps` of them.

    Not one of timm's: their step() takes a number, and they resume only as they were saved.
    """
    total = args.epochs * steps
    warmup = args.warmup_epochs * steps

    def factor(step: int) -> float:
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


class Ema:
    """An exponential moving average of a network's weights and of BatchNorm's statistics.

    model: becomes the average, in place. trained: a copy of it, which the optimizer trains.
    At step n the decay is at most (1 + n) / (10 + n), so that the random weights of the start are
    soon forgotten, as in TensorFlow's ExponentialMovingAverage; timm's ModelEmaV3 has another
    warm-up.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = model
        self.trained = copy.deepcopy(model)
        self.decay = decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average after optimizer step `step`, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        averages = [*self.model.parameters(), *self.model.buffers()]
        values = [*self.trained.parameters(), *self.trained.buffers()]
        float_averages = []
        float_values = []
        for average, value in zip(averages, values, strict=True):
            if average.is_floating_point():
                float_averages.append(average)
                float_values.append(value)
            else:  # BatchNorm's counts of batches
                average.copy_(value)
        get_ema_multi_avg_fn(decay)(float_averages, float_values, step)


def freeze_backbone(model: nn.Module) -> list[nn.Parameter]:
    """Freeze all layers but the last; return what was frozen, without what never trains."""
    *backbone, _ = layers(model)
    params = [param for layer in backbone for param in layer if param.requires_grad]
    for param in params:
        param.requires_grad_(False)
    return params


def set_training(model: nn.Module) -> None:
    """Set `model` to training mode, but not BatchNorm with frozen weights: its statistics stay."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            module.train(module.weight.requires_grad)
