"""Losses: what they come to, on any number of ranks, passes and images per batch."""

import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import segmentation_models_pytorch as smp
import torch
from generated import Project, both_tasks, refusal
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional

import ddpkit
from ddpkit.ranks import distributed, replicas
from ddpkit.run import metrics

SEGMENTATION = pytest.mark.parametrize("project", ["segmentation"], indirect=True)
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


def test_losses_of_other_kinds() -> None:
    one = torch.ones(1)
    for found, text in (one, "a tensor (1,)"), ((one[0], one), "tuple"), ((2.5, 4), "tuple"):
        with refusal("metrics.call", text):
            metrics.criterion(lambda *_, found=found: found)(torch.ones(4, 2), torch.ones(4))


def test_a_mean_counts_as_much_as_its_batch_has_labels() -> None:
    """Those of void are none, such as 255, -1 or -100."""
    outputs = torch.randn(2, 3, 4, 4).bfloat16()
    for void in (255, -1, -100):
        targets = torch.randint(3, (2, 4, 4))
        targets[0, :3] = void
        total, count = metrics.criterion(nn.CrossEntropyLoss(ignore_index=void))(outputs, targets)
        whole = nn.CrossEntropyLoss(ignore_index=void, reduction="sum")
        assert int(count) == 2 * 16 - 12
        assert torch.allclose(total, whole(outputs.float(), targets))


def test_counts_that_are_known() -> None:
    """They are the same on all ranks, and need no collective; they cannot be mixed with others."""
    loss = torch.zeros((), requires_grad=True)
    first, second = replicas.Mean(DEVICE), replicas.Mean(DEVICE)
    first.start(6)
    with refusal("replicas.loss", "5"):
        first.loss(loss, np.int64(5), True)  # which is no int
    second.start(6)
    for count in 6, torch.tensor(6):
        second.loss(loss, count, False)
    with refusal("replicas.finish", "int"):
        second.finish(nn.Linear(1, 1), 2)


def samples(is_dense: bool, is_soft: bool = False) -> tuple[Tensor, Tensor]:
    """Images and targets; of masks the first 5 are void, others in part, some lack a class."""
    torch.manual_seed(1)
    images = torch.randint(256, (IMAGES, 3, 16, 16), dtype=torch.uint8)
    if not is_dense:
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


def of_flags(is_dense: bool, *words: object) -> tuple:
    """The loss for a batch, as flags have it; and outputs, targets and weights to work it out."""
    import model
    from flags import parse_args

    torch.manual_seed(3)
    args = parse_args([*map(str, words)])
    _, targets = samples(is_dense)
    outputs = (3 * torch.randn((IMAGES, 3, *targets.shape[1:]))).requires_grad_()
    weights = torch.tensor(args.class_weights or (1.0, 1.0, 1.0))
    return model.build_criterion(args, None, "abc"), outputs, targets.long(), weights


@on_ranks(1)
def test_means_of_classification(project: Project) -> None:
    """Of labels and of shares of classes, in any batches, by torch and by a plain loop."""
    criterion, outputs, targets, weights = of_flags(False, *WEIGHTED, "--label-smoothing", 0.1)

    def mean(targets: Tensor) -> float:
        total, count = criterion(outputs, targets)
        return (total / count).item()

    labels = functional.cross_entropy(outputs, targets, weights, label_smoothing=0.1).item()
    assert mean(targets) == pytest.approx(labels, rel=1e-5)
    parts = [criterion(outputs[i : i + 3], targets[i : i + 3]) for i in range(0, IMAGES, 3)]
    sums = [sum(part).item() for part in zip(*parts, strict=True)]
    assert sums[0] / sums[1] == pytest.approx(labels, rel=1e-5)
    shares = samples(False, is_soft=True)[1]
    smooth = 0.9 * shares + 0.1 / 3
    loop = sum(
        (-weights * s * o.log_softmax(0)).sum() for s, o in zip(smooth, outputs, strict=True)
    )
    counts = sum((weights * s).sum() for s in shares)
    assert mean(shares) == pytest.approx((loop / counts).item(), rel=1e-5)


def of_image(
    name: str, outputs: Tensor, targets: Tensor, weights: Tensor, smoothing: float
) -> float:
    """A term for one image (classes, H, W), worked out from its labelled pixels alone."""
    keep = targets != 255
    labels, logits = targets[keep], outputs.flatten(1)[:, keep.flatten()].T  # (pixels, classes)
    if not len(labels):
        return 0.0
    n = weights[labels]
    how = {"reduction": "none", "label_smoothing": smoothing}
    ce = functional.cross_entropy(logits, labels, weights, **how)
    if name == "ce":
        return (ce.sum() / n.sum()).item()
    p = logits.softmax(1)[range(len(labels)), labels]
    if name == "focal":
        return (((1 - p) ** 2 * ce).sum() / n.sum()).item()
    kind = {"lovasz": smp.losses.LovaszLoss, "dice": smp.losses.DiceLoss}[name]
    loss = kind("multiclass", ignore_index=255)(outputs[None], targets[None]).item()
    return loss * 3 / len(labels.unique()) if name == "dice" else loss


@SEGMENTATION
@on_ranks(1)
def test_sums_of_segmentation(project: Project) -> None:
    """Of images that are void, in part, or lack a class; against plain loops and smp."""
    for name in ("ce", "focal", "dice", "lovasz"):
        for more in ((), (*WEIGHTED, "--label-smoothing", 0.1)):
            criterion, outputs, targets, weights = of_flags(True, "--loss", name, *more)
            total, count = criterion(outputs, targets)
            slopes = torch.autograd.grad(total, outputs)[0]
            is_void = (targets == 255)[:, None].expand_as(slopes)
            assert slopes[is_void].abs().max() == 0 < slopes[~is_void].abs().max()
            counts = [weights[t[t != 255]].sum().item() for t in targets]
            assert count.item() == pytest.approx(sum(counts), rel=1e-6)
            pairs = list(zip(outputs.detach(), targets, counts, strict=True))
            loop = sum(n * of_image(name, o, t, weights, 0.1 * bool(more)) for o, t, n in pairs)
            sums = [criterion(o[None], t[None])[0].item() for o, t, _ in pairs]
            assert (loop, sum(sums)) == pytest.approx((total.item(),) * 2, rel=1e-5), name
    criterion, outputs, targets, _ = of_flags(True, "--loss", "ce+0.5*dice+2*lovasz")
    names = "ce", "dice", "lovasz"
    parts = [of_flags(True, "--loss", name)[0](outputs, targets)[0] for name in names]
    combined = (parts[0] + 0.5 * parts[1] + 2 * parts[2]).item()
    assert criterion(outputs, targets)[0].item() == pytest.approx(combined, rel=1e-5)
    for text in ("mse", "ce+", "0*ce", "nan*ce", ""):
        with refusal("losses.init", "--loss", "ce, focal, dice, lovasz"):
            of_flags(True, "--loss", text)
    guesses = functional.one_hot(targets.clamp(max=2), 3).movedim(-1, 1).float()
    for name in ("ce", "focal", "dice", "lovasz"):  # finite whatever a network says
        for factor in (0, 1000, -1000):
            outputs = (factor * guesses).requires_grad_()
            total, _ = of_flags(True, "--loss", name)[0](outputs, targets)
            total.backward()
            assert total.isfinite() and outputs.grad.isfinite().all()


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


class Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class Keep(torch.optim.SGD):
    """Instead of a step it keeps the gradients."""

    def step(self, closure: object = None) -> None:
        self.kept = [weight.grad.clone() for weight in self.param_groups[0]["params"]]


class Step:
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


def gradients(words: tuple, passes: int, task: str, kind: str) -> list[Tensor]:
    """The gradients of one step of main.train_one_epoch, on this rank's share of the samples."""
    import main
    import model
    from flags import parse_args

    args = parse_args([*words, "--accumulate", str(passes), "--amp", "off"])
    is_dense = task == "segmentation"
    torch.manual_seed(2)
    head = nn.Conv2d(8, 3, 1)
    head.weight.data *= 4  # the guesses are confident
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), head, *([] if is_dense else [Pool()])]
    net = nn.Sequential(Double(), *layers).double()  # without much rounding
    net[1].bias.requires_grad_(False)
    images, targets = samples(is_dense, kind == "soft")
    if kind == "void":
        targets = torch.full_like(targets, 255)
    portions = [part.chunk(distributed.world_size() * passes) for part in (images, targets)]
    mine = list(zip(*portions, strict=True))[distributed.rank() * passes :][:passes]
    optimizer = Keep([weight for weight in net.parameters() if weight.requires_grad])
    # As in fp16: it is applied to the loss and taken off again before the step.
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=kind == "scaled")
    chosen = ddpkit.criterion(model.build_criterion(args, None, "abc"))
    scheduler, ddp_model = SimpleNamespace(step=lambda: None), replicas.wrap(net, DEVICE)
    main.train_one_epoch(Step(mine), ddp_model, chosen, optimizer, scheduler, scaler, None, args)
    return optimizer.kept


@both_tasks
def test_gradients_of_other_portions(project: Project, tmp_path: Path) -> None:
    """1 x 16 images, 4 passes of 4, 2 ranks of 8, 2 ranks of 2 passes of 4: one gradient.

    With weights of classes, and void in some images more than in others; clipped when it is whole.
    """
    cases = [(words, "usual") for words in LOSSES[project.task]]
    cases += [(WEIGHTED, "scaled"), (("--clip-grad-norm", "0.1"), "clipped")]
    if project.task == "classification":
        cases.append(((*WEIGHTED, "--label-smoothing", "0.1"), "soft"))
    else:
        cases.append((("--loss", "ce+dice+lovasz"), "void"))

    def work_out(passes: int, project: Project) -> None:
        found = [gradients(words, passes, project.task, kind) for words, kind in cases]
        if distributed.rank() == 0:
            torch.save(found, tmp_path / f"{distributed.world_size()} {passes}.pt")

    shapes = (1, 1), (1, 4), (2, 1), (2, 2)
    for ranks, passes in shapes:
        on_ranks(ranks)(functools.partial(work_out, passes))(project=project)
    whole, *others = (torch.load(tmp_path / f"{r} {p}.pt") for r, p in shapes)
    for number, (words, kind) in enumerate(cases):
        first = whole[number]
        size = max(part.abs().max().item() for part in first)
        if kind == "void":
            assert all(not part.any() for found in [whole, *others] for part in found[number])
            continue
        assert size > 1e-3
        if kind == "clipped":
            assert sum(part.square().sum() for part in first) ** 0.5 == pytest.approx(0.1)
        far = [
            max(float((a - b).abs().max()) for a, b in zip(first, found[number], strict=True))
            / size
            for found in others
        ]
        assert max(far) < 1e-5, (words, kind)
