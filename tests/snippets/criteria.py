"""What the losses come to: image by image, in other portions, and against plain loops."""

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from forked import fork, wait
from ports import free_port
from torch import Tensor, nn
from torch.nn import functional

import ddpkit
import main
import model
from ddpkit.ranks import distributed, replicas
from ddpkit.run import metrics
from flags import parse_args

WEIGHTED = ("--class-weights", "0.2,1,5")
LOSSES = {  # flags, by task; those of segmentation are given --loss as well
    "classification": [(), ("--label-smoothing", "0.1"), WEIGHTED],
    "segmentation": [
        *[("--loss", name) for name in ("ce", "focal", "dice", "lovasz")],
        ("--loss", "ce+0.5*dice", *WEIGHTED),
        ("--loss", "focal+ce", "--label-smoothing", "0.1", *WEIGHTED),
    ],
}
IMAGES = 16
DEVICE = torch.device("cpu")


def task() -> str:
    return "segmentation" if model.STRIDE else "classification"


def build(*words: object) -> nn.Module:
    """The loss that flags ask for, of three classes."""
    return model.build_criterion(parse_args([*map(str, words)]), None, "abc")


def samples(is_soft: bool = False) -> tuple[Tensor, Tensor]:
    """Images and targets; of masks the first 5 are void, others in part, some lack a class."""
    torch.manual_seed(1)
    images = torch.randint(256, (IMAGES, 3, 16, 16), dtype=torch.uint8)
    if task() == "classification":
        targets = torch.randint(3, (IMAGES,))
        targets[:6] = 2  # the ranks' and passes' sums of weights differ
        shares = 0.7 * functional.one_hot(targets, 3) + 0.3 * functional.one_hot(2 - targets, 3)
        return images, shares if is_soft else targets
    masks = torch.randint(3, (IMAGES, 16, 16), dtype=torch.uint8)
    masks[5:8][masks[5:8] == 1] = 2
    for number in range(8, IMAGES):
        masks[number, : 2 * (number - 8)] = 255
    masks[:5] = 255
    return images, masks


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


class Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def network() -> nn.Module:
    """Without BatchNorm and much rounding; one bias is frozen; the guesses are confident."""
    torch.manual_seed(2)
    head = nn.Conv2d(8, 3, 1)
    head.weight.data *= 4
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), head
    pool = [Pool()] if task() == "classification" else []
    net = nn.Sequential(Double(), *layers, *pool).double()
    net[1].bias.requires_grad_(False)
    return net


class Keep(torch.optim.SGD):
    """Instead of a step it keeps the gradients."""

    def step(self, closure: object = None) -> None:
        self.kept = [weight.grad.clone() for weight in self.param_groups[0]["params"]]


class Run:
    """What a Run does to the gradients, for one step."""

    def __init__(self, portions: list[tuple[Tensor, Tensor]]) -> None:
        self.portions, self.classes, self.step = portions, "abc", 0
        self.mean = replicas.Mean(DEVICE)
        self.mean.start(metrics.size(portions[0][1]))

    def batches(self) -> Iterator[tuple[int, tuple]]:
        for i, (images, targets) in enumerate(self.portions):
            self.is_last = i == len(self.portions) - 1
            yield i, (images, targets if targets.is_floating_point() else targets.long())

    def loss(self, loss_sum: Tensor, count: Tensor | int) -> Tensor:
        return self.mean.loss(loss_sum, count, self.is_last)

    def divide_gradients(self, ddp_model: nn.Module) -> None:
        self.mean.finish(ddp_model, len(self.portions))

    end_step = mean_loss = staticmethod(lambda: None)


def train(words: tuple, passes: int, is_soft: bool, kind: str) -> list[Tensor]:
    """The gradients of one step of main.train_one_epoch, on this rank's share of the samples."""
    args = parse_args([*words, "--accumulate", str(passes), "--amp", "off"])
    net, criterion = network(), build(*words)

    def means(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        total, count = criterion(outputs, targets)
        return total / torch.as_tensor(count).clamp(min=1e-6), torch.ones(())

    images, targets = samples(is_soft)
    if kind == "void":
        targets = torch.full_like(targets, 255)
    portions = [part.chunk(distributed.world_size() * passes) for part in (images, targets)]
    mine = list(zip(*portions, strict=True))[distributed.rank() * passes :][:passes]
    optimizer = Keep([weight for weight in net.parameters() if weight.requires_grad])
    # As in fp16: it is applied to the loss and taken off again before the step.
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=kind == "scaled")
    chosen = ddpkit.criterion(means if kind == "means" else criterion)
    scheduler, ddp_model = SimpleNamespace(step=lambda: None), replicas.wrap(net, DEVICE)
    parts = ddp_model, chosen, optimizer, scheduler, scaler
    main.train_one_epoch(Run(mine), *parts, None, args)
    return optimizer.kept


def gradients_of(folder: str, ranks: int, passes: int) -> None:
    """Save the gradients of each loss, by rank 0 of `ranks`, in `passes`."""
    distributed.setup()
    torch.set_num_threads(1)
    found: dict = {}
    for words in LOSSES[task()]:
        for kind in ("usual", "means"):
            found[f"{' '.join(words)} {kind}"] = train(words, passes, False, kind)
    found["scaled"] = train(WEIGHTED, passes, False, "scaled")
    if task() == "classification":
        found["soft"] = train((*WEIGHTED, "--label-smoothing", "0.1"), passes, True, "usual")
    else:
        found["void"] = train(("--loss", "ce+dice+lovasz"), passes, False, "void")
    if distributed.rank() == 0:
        torch.save(found, Path(folder, f"{ranks} {passes}.pt"))
    distributed.teardown()


def in_portions(folder: str) -> dict:
    """How far the gradients of other portions are from those of 1 rank and pass, by loss."""

    def begin(ranks: int, passes: int, rank: int, port: int) -> None:
        if ranks > 1:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
            os.environ.update(LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1")
            os.environ["MASTER_PORT"] = str(port)
        gradients_of(folder, ranks, passes)

    shapes = (1, 1), (1, 4), (2, 1), (2, 2)
    for ranks, passes in shapes:
        port, each = free_port(), range(ranks)
        acts = [functools.partial(begin, ranks, passes, rank, port) for rank in each]
        assert wait([fork(act, None) for act in acts]) == [0] * ranks
    whole, *others = (torch.load(Path(folder, f"{r} {p}.pt")) for r, p in shapes)
    far: dict = {"size": {}}
    for name, first in whole.items():
        size = max(part.abs().max().item() for part in first)
        far["size"][name] = size
        far[name] = [
            max((a - b).abs().max().item() for a, b in zip(first, other[name], strict=True)) / size
            if size
            else max(part.abs().max().item() for part in other[name])
            for other in others
        ]
    return far


def refusals() -> list[str]:
    """What is said of losses that are wrong."""
    said = []
    for text in ("mse", "ce+", "0*ce", "nan*ce", "ce+2dice", "", ".*ce"):
        try:
            said.append(f"built: {build('--loss', text)}")
        except ddpkit.UserError as error:
            said.append(str(error))
    return said


def of_flags(*words: object) -> tuple:
    """The loss for a batch, as flags have it; and outputs, targets and weights to work it out."""
    torch.manual_seed(3)
    args = parse_args([*map(str, words)])
    _, targets = samples()
    shape = (IMAGES, 3, *targets.shape[1:])
    outputs = (3 * torch.randn(shape)).requires_grad_()
    weights = torch.tensor(args.class_weights or (1.0, 1.0, 1.0))
    return build(*words), outputs, targets.long(), weights


def plain_cross_entropy() -> list:
    """Without flags: sum, count and gradient, and those of torch; of equal bits."""
    criterion, outputs, targets, _ = of_flags()
    total, count = criterion(outputs, targets)
    how = "none" if task() == "segmentation" else "sum"
    torchs = functional.cross_entropy(outputs, targets, ignore_index=255, reduction=how).sum()
    slopes = [torch.autograd.grad(x, outputs)[0] for x in (total, torchs)]
    return [total.item(), torchs.item(), int(count), torch.equal(*slopes)]


def of_classification() -> dict:
    """Means by the criterion, and by torch and a plain loop."""
    criterion, outputs, targets, weights = of_flags(*WEIGHTED, "--label-smoothing", 0.1)

    def mean(targets: Tensor) -> float:
        total, count = criterion(outputs, targets)
        return (total / count).item()

    labels = functional.cross_entropy(outputs, targets, weights, label_smoothing=0.1).item()
    shares = samples(is_soft=True)[1]
    smooth = 0.9 * shares + 0.1 / 3
    loop = sum(
        (-weights * s * o.log_softmax(0)).sum() for s, o in zip(smooth, outputs, strict=True)
    )
    counts = sum((weights * s).sum() for s in shares)
    return {
        "labels": [mean(targets), labels],
        "one hot": [mean(functional.one_hot(targets, 3).float()), labels],
        "shares": [mean(shares), (loop / counts).item()],
    }


def of_image(
    name: str, outputs: Tensor, targets: Tensor, weights: Tensor, smoothing: float
) -> float:
    """A term for one image (classes, H, W), worked out from its labelled pixels alone."""
    import segmentation_models_pytorch as smp
    from segmentation_models_pytorch.losses import _functional

    keep = targets != 255
    labels, logits = targets[keep], outputs.flatten(1)[:, keep.flatten()].T  # (pixels, classes)
    if not len(labels):
        return 0.0
    n = weights[labels]
    ce = functional.cross_entropy(
        logits, labels, weights, reduction="none", label_smoothing=smoothing
    )
    if name == "ce":
        return (ce.sum() / n.sum()).item()
    if name == "focal" and not smoothing and weights.eq(1).all():
        return _functional.softmax_focal_loss_with_logits(logits, labels).item()
    p = logits.softmax(1)[range(len(labels)), labels]
    if name == "focal":
        return (((1 - p) ** 2 * ce).sum() / n.sum()).item()
    if name == "lovasz":
        return smp.losses.LovaszLoss("multiclass", ignore_index=255)(
            outputs[None].float(), targets[None]
        ).item()
    assert name == "dice"
    kind = smp.losses.DiceLoss("multiclass", ignore_index=255)
    return kind(outputs[None], targets[None]).item() * 3 / len(labels.unique())


def of_segmentation() -> dict:
    """Sums by the criterion, image by image from plain loops, and of other portions."""
    found = {}
    for name in ("ce", "focal", "dice", "lovasz"):
        for more in ((), (*WEIGHTED, "--label-smoothing", 0.1)):
            criterion, outputs, targets, weights = of_flags("--loss", name, *more)
            total, count = criterion(outputs, targets)
            slopes = torch.autograd.grad(total, outputs)[0]
            is_void = (targets == 255)[:, None].expand_as(slopes)
            counts = [weights[t[t != 255]].sum().item() for t in targets]
            pairs = list(zip(outputs.detach(), targets, counts, strict=True))
            loop = sum(n * of_image(name, o, t, weights, 0.1 * bool(more)) for o, t, n in pairs)
            sums = [criterion(o[None], t[None])[0].item() for o, t, _ in pairs]
            found[f"{name} {more}"] = {
                "sums": [total.item(), loop, sum(sums)],
                "counts": [count.item(), sum(counts)],
                "void": slopes[is_void].abs().max().item(),
                "slopes": slopes[~is_void].abs().max().item(),
            }
    criterion, outputs, targets, _ = of_flags("--loss", "ce+0.5*dice+2*lovasz")
    parts = [of_flags("--loss", name)[0](outputs, targets)[0] for name in ("ce", "dice", "lovasz")]
    combined = (parts[0] + 0.5 * parts[1] + 2 * parts[2]).item()
    found["sum"] = [criterion(outputs, targets)[0].item(), combined]
    return found


def extreme_outputs() -> list[bool]:
    """Whether loss and gradient are finite for outputs of 0 and of 1000, right and wrong."""
    found = []
    _, _, targets, _ = of_flags()
    guesses = functional.one_hot(targets.clamp(max=2), 3).movedim(-1, 1).float()
    for name in ("ce", "focal", "dice", "lovasz"):
        for factor in (0, 1000, -1000):
            outputs = (factor * guesses).requires_grad_()
            total, _ = of_flags("--loss", name)[0](outputs, targets)
            total.backward()
            found.append(bool(total.isfinite() and outputs.grad.isfinite().all()))
    return found
