"""Losses: what they come to, on any number of ranks, passes and images per batch."""

import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import segmentation_models_pytorch as smp
import torch
from generated import Project, both_tasks, refusal
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional

import ddpkit
from ddpkit.data.format import DEFAULT_FORMAT
from ddpkit.ranks import distributed
from ddpkit.run import loop

SEGMENTATION = pytest.mark.parametrize("project", ["segmentation"], indirect=True)
WEIGHTED = "--class-weights 0.2,1,5"
SMOOTHED = f"{WEIGHTED} --label-smoothing 0.1"
LOSSES = {  # flags, by task; those of segmentation are given --loss as well
    "classification": ["", "--label-smoothing 0.1", WEIGHTED],
    "segmentation": [
        "--loss ce",
        "--loss focal",
        "--loss dice",
        "--loss lovasz",
        f"--loss ce+0.5*dice {WEIGHTED}",
        f"--loss focal+ce {SMOOTHED}",
    ],
}
IMAGES = 16
SCALED = "scaled", "clipped"  # kinds of cases with a GradScaler


def test_losses_of_other_kinds() -> None:
    """What returns no scalar is refused in a line."""
    one = torch.ones(1)
    outputs = torch.randn(4, 2)
    for found, text in (
        (one, "a tensor (1,)"),
        ((one[0], one), "tuple"),
        (2.5, "float"),
    ):
        criterion = ddpkit.Criterion(lambda *_, found=found: found, (), "mean")
        with refusal("criterion.call", text, "count(targets)"):
            criterion(outputs, torch.ones(4))
    with refusal("criterion.init", 'reduction="none"', '"mean"'):
        ddpkit.Criterion(nn.MSELoss(reduction="none"))

    with refusal("criterion.init", 'reduction=""', 'reduction="mean"'):
        ddpkit.Criterion(functional.mse_loss)
    with refusal("criterion.init", 'reduction="total"', '"mean"'):
        ddpkit.Criterion(functional.mse_loss, reduction="total")
    with refusal("criterion.count", "dict", "count(targets)"):
        ddpkit.Criterion(nn.MSELoss()).count({"boxes": one})


class Own(nn.Module):
    """Says itself what it is divided by."""

    def count(self, targets: dict) -> int:
        return len(targets["labels"])

    def forward(self, outputs: Tensor, targets: dict) -> Tensor:
        return functional.cross_entropy(outputs, targets["labels"], reduction="sum")


def test_sums_and_counts_of_any_loss() -> None:
    """Sum / count is the mean that torch works out, in whatever batches."""
    torch.manual_seed(0)
    weight = torch.tensor([0.1, 1, 3])
    logits = torch.randn(6, 3, 4, 4).bfloat16()
    masks = torch.randint(3, (6, 4, 4))
    masks[0] = masks[1, :3] = 255
    pixels = float((masks < 3).sum())
    labels = torch.randint(3, (6,))
    shares = torch.rand(6, 3).softmax(1)
    dense = functools.partial(nn.CrossEntropyLoss, weight, ignore_index=255)
    flat = functools.partial(nn.CrossEntropyLoss, weight, label_smoothing=0.1)
    mean_in_function = functools.partial(functional.cross_entropy, ignore_index=255)

    def mean_by_hand(outputs: Tensor, targets: Tensor) -> Tensor:
        return mean_in_function(outputs, targets)

    def sum_by_hand(outputs: Tensor, targets: Tensor) -> Tensor:
        return mean_in_function(outputs, targets, reduction="sum")

    def sum_of_shares(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets, reduction="sum")

    line = torch.randn(6, 3)
    cases: list[tuple[Any, Tensor, Any, float | None]] = [
        (dense(), logits, masks, None),
        (dense(reduction="sum"), logits, masks, float(weight[masks[masks < 3]].sum())),
        (mean_in_function, logits, masks, pixels),
        (mean_by_hand, logits, masks, pixels),
        (sum_by_hand, logits, masks, pixels),
        (flat(), line, labels, float(weight[labels].sum())),
        (flat(reduction="sum"), line, shares, float((shares @ weight).sum())),
        (flat(), line, shares, 6.0),
        (sum_of_shares, line, shares, 6.0),
        (nn.MSELoss(), line, shares, 18.0),
        (nn.MSELoss(reduction="sum"), line, shares, 18.0),
        (nn.L1Loss(), line, torch.arange(18).view(6, 3), 18.0),
        (nn.BCEWithLogitsLoss(weight), line, shares, 18.0),
        (nn.NLLLoss(), line.log_softmax(1), labels, 6.0),
        (smp.losses.FocalLoss("multiclass", ignore_index=255), logits, masks, None),
    ]
    for loss, outputs, targets, expected in cases:
        is_sum = loss in (sum_by_hand, sum_of_shares)
        criterion = ddpkit.Criterion(loss, "abc", "sum" if is_sum else "mean")
        total = float(criterion(outputs, targets))
        count = float(criterion.count(targets))
        assert expected is None or count == pytest.approx(expected)
        parts = [slice(0, 2), slice(2, 6)]
        sums = sum(float(criterion(outputs[part], targets[part])) for part in parts)
        counts = sum(float(criterion.count(targets[part])) for part in parts)
        assert (sums, counts) == pytest.approx((total, count), rel=1e-4)
        is_mean = getattr(loss, "reduction", "mean") == "mean"
        if is_mean and loss is not sum_by_hand and expected != 6.0:
            mean = float(loss(outputs.float(), targets))
            assert total / count == pytest.approx(mean, rel=1e-4)
    own = ddpkit.Criterion(Own(), "abc")
    assert own.count({"labels": labels}).item() == 6
    assert own(line, {"labels": labels}) > 0


def samples(is_dense: bool, is_soft: bool = False) -> tuple[Tensor, Tensor]:
    """Images and targets; of masks the first 5 are void, others in part, some lack a class."""
    torch.manual_seed(1)
    images = torch.randint(256, (IMAGES, 3, 16, 16), dtype=torch.uint8)
    if not is_dense:
        targets = torch.randint(3, (IMAGES,))
        targets[:6] = 2  # the ranks' and passes' sums of weights differ
        if is_soft:
            one, other = functional.one_hot(torch.stack((targets, 2 - targets)), 3)
            targets = 0.7 * one + 0.3 * other
        return images, targets
    masks = torch.randint(3, (IMAGES, 16, 16), dtype=torch.uint8)
    masks[5:8][masks[5:8] == 1] = 2
    for number in range(8, IMAGES):
        masks[number, : 2 * (number - 8)] = 255
    masks[:5] = 255
    return images, masks


def of_flags(is_dense: bool, words: str) -> tuple:
    """The loss for a batch, as flags have it; and outputs, targets and weights to work it out."""
    import model
    from flags import parse_args

    torch.manual_seed(3)
    args = parse_args(words.split())
    _, targets = samples(is_dense)
    outputs = 3 * torch.randn((IMAGES, 3, *targets.shape[1:]))
    outputs.requires_grad_()
    weights = torch.tensor(args.class_weights or (1.0, 1.0, 1.0))
    criterion = ddpkit.Criterion(model.build_criterion(args, None, "abc"), "abc")
    return criterion, outputs, targets.long(), weights


@on_ranks(1)
def test_means_of_classification(project: Project) -> None:
    """Of labels and of shares of classes, in any batches, by torch and by a plain loop."""
    criterion, outputs, targets, weights = of_flags(False, SMOOTHED)

    def mean(targets: Tensor) -> float:
        return (criterion(outputs, targets) / criterion.count(targets)).item()

    ce = functional.cross_entropy(outputs, targets, weights, label_smoothing=0.1)
    assert mean(targets) == pytest.approx(ce.item(), rel=1e-5)
    parts = list(zip(outputs.split(3), targets.split(3), strict=True))
    total = sum(criterion(part, labels).item() for part, labels in parts)
    count = sum(criterion.count(labels).item() for _, labels in parts)
    assert total / count == pytest.approx(ce.item(), rel=1e-5)
    shares = samples(False, is_soft=True)[1]
    smooth = 0.9 * shares + 0.1 / 3
    loop = sum(
        (-weights * s * o.log_softmax(0)).sum()
        for s, o in zip(smooth, outputs, strict=True)
    )
    counts = sum((weights * s).sum() for s in shares)
    assert mean(shares) == pytest.approx((loop / counts).item(), rel=1e-5)


def of_image(
    name: str,
    outputs: Tensor,
    targets: Tensor,
    weights: Tensor,
    smoothing: float,
) -> float:
    """A term for one image (classes, H, W), worked out from its labelled pixels alone."""
    keep = targets != 255
    labels = targets[keep]
    logits = outputs.flatten(1)[:, keep.flatten()].T  # (pixels, classes)
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
        for more in "", SMOOTHED:
            words = f"--loss {name} {more}"
            criterion, outputs, targets, weights = of_flags(True, words)
            total = criterion(outputs, targets)
            count = criterion.count(targets)
            slopes = torch.autograd.grad(total, outputs)[0]
            is_void = (targets == 255)[:, None].expand_as(slopes)
            assert slopes[is_void].abs().max() == 0 < slopes[~is_void].abs().max()
            counts = [weights[t[t != 255]].sum().item() for t in targets]
            assert count.item() == pytest.approx(sum(counts), rel=1e-6)
            pairs = list(zip(outputs.detach(), targets, counts, strict=True))
            loop = sum(
                n * of_image(name, o, t, weights, 0.1 * bool(more)) for o, t, n in pairs
            )
            sums = [criterion(o[None], t[None]).item() for o, t, _ in pairs]
            near = pytest.approx(total.item(), rel=1e-5)
            assert loop == near, words
            assert sum(sums) == near, words
    criterion, outputs, targets, _ = of_flags(True, "--loss ce+0.5*dice+2*lovasz")
    ce = of_flags(True, "--loss ce")[0](outputs, targets)
    dice = of_flags(True, "--loss dice")[0](outputs, targets)
    lovasz = of_flags(True, "--loss lovasz")[0](outputs, targets)
    combined = (ce + 0.5 * dice + 2 * lovasz).item()
    assert criterion(outputs, targets).item() == pytest.approx(combined, rel=1e-5)
    for text in ("mse", "ce+", "0*ce", "nan*ce", ""):
        with refusal("losses.init", "--loss", "ce, focal, dice, lovasz"):
            of_flags(True, f"--loss={text}")
    guesses = functional.one_hot(targets.clamp(max=2), 3).movedim(-1, 1).float()
    for name in ("ce", "focal", "dice", "lovasz"):  # finite whatever a network says
        for factor in (0, 1000, -1000):
            outputs = (factor * guesses).requires_grad_()
            total = of_flags(True, f"--loss {name}")[0](outputs, targets)
            total.backward()
            assert total.isfinite()
            assert outputs.grad.isfinite().all()


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
    """What a Run does for one step."""

    is_logged = False

    def __init__(self, portions: list[tuple[Tensor, Tensor]]) -> None:
        self.portions = portions
        self.classes = "abc"
        self.step = 7
        self.rank = distributed.rank()
        self.ranks = distributed.world_size()

    def steps(
        self, _: object, ddp_model: nn.Module
    ) -> Iterator[tuple[int, loop.Passes]]:
        floats = [(x.float(), targets) for x, targets in self.portions]
        cpu = torch.device("cpu")
        count = len(floats)
        yield 0, loop.Passes(floats, cpu, DEFAULT_FORMAT, count, lambda x, _: iter(x))

    def end_step(self, losses: list[Tensor], count: Tensor, norm: object) -> None:
        loss = torch.stack(losses).sum()
        mean = float(distributed.reduce_tensor(loss)) / distributed.world_size()
        self.ended = mean, float(count)

    means = staticmethod(lambda: None)


def with_a_term(train: Callable[..., float]) -> Callable[..., float]:
    """As owners add one to the loss; its gradient is that of 3 x the sum of a layer's weights."""
    source = inspect.getsource(train)
    line = "scaler.scale(loss).backward()"
    term = "3 * ddp_model.module[1].weight.sum() / len(batches)"
    assert source.count(line) == 1
    names = dict(train.__globals__)
    exec(source.replace(line, f"loss = loss + {term}; {line}"), names)
    return names["train_one_epoch"]


def gradients(
    words: str, passes: int, task: str, kind: str
) -> tuple[list[Tensor], tuple[float, float]]:
    """The gradients of one step of main.train_one_epoch, on this rank's share of the samples.

    And the loss and the count that it ends with.
    """
    import main
    import model
    from flags import parse_args

    args = parse_args(f"{words} --accumulate {passes} --amp off".split())
    is_dense = task == "segmentation"
    torch.manual_seed(2)
    head = nn.Conv2d(8, 3, 1)
    head.weight.data *= 4  # the guesses are confident
    net = nn.Sequential(
        Double(),
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Tanh(),
        head,
    )
    if not is_dense:
        net.append(Pool())
    net.double()  # without much rounding
    net[1].bias.requires_grad_(False)
    images, targets = samples(is_dense, kind == "soft")
    if kind == "all void":
        targets = torch.full_like(targets, 255)
    count = distributed.world_size() * passes
    portions = list(zip(images.chunk(count), targets.chunk(count), strict=True))
    mine = portions[distributed.rank() * passes :][:passes]
    optimizer = Keep([weight for weight in net.parameters() if weight.requires_grad])
    # As in fp16: it is applied to the loss and taken off again before the step.
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=kind in SCALED)
    criterion = ddpkit.Criterion(model.build_criterion(args, None, "abc"), "abc")
    scheduler = Mock()
    ema = Mock()
    step = Step(mine)
    train = main.train_one_epoch
    if kind == "term":
        train = with_a_term(train)
    train(
        step, None, main.wrap(net), criterion, optimizer, scheduler, scaler, ema, args
    )
    scheduler.step.assert_called_once_with()
    ema.update.assert_called_once_with(step.step)
    return optimizer.kept, step.ended


@both_tasks
def test_gradients_of_other_portions(project: Project, tmp_path: Path) -> None:
    """16 images at once, in 4 passes, on 2 ranks, on 2 in 2 passes, on 3: one gradient.

    With weights of classes, and void in some images more than in others; clipped when it is whole.
    """
    cases = [(words, "usual") for words in LOSSES[project.task]]
    cases += [
        (WEIGHTED, "scaled"),
        ("--clip-grad-norm 0.1", "clipped"),
        ("", "term"),
        ("--class-weights 1e-5,2e-5,1e-5", "usual"),  # their sum is far below 1
    ]
    if project.task == "classification":
        cases.append((SMOOTHED, "soft"))
    else:
        cases.append(("--loss ce+dice+lovasz", "all void"))

    def work_out(passes: int, project: Project) -> None:
        found = [gradients(words, passes, project.task, kind) for words, kind in cases]
        if distributed.rank() == 0:
            torch.save(found, tmp_path / f"{distributed.world_size()} {passes}.pt")

    shapes = (
        (1, 1),
        (1, 4),
        (2, 1),
        (2, 2),
        (3, 1),
    )
    for ranks, passes in shapes:
        on_ranks(ranks)(functools.partial(work_out, passes))(project=project)
    runs = [torch.load(tmp_path / f"{ranks} {passes}.pt") for ranks, passes in shapes]
    for number, (words, kind) in enumerate(cases):
        first, ended = runs[0][number]
        size = max(part.abs().max().item() for part in first)
        if kind == "all void":
            for found in runs:
                slopes, ended = found[number]
                assert all(not part.any() for part in slopes)
                assert ended == pytest.approx((0, 0), abs=1e-5)
            continue
        assert size > 1e-3
        if kind == "clipped":
            norm = sum(part.square().sum() for part in first) ** 0.5
            assert norm == pytest.approx(0.1)
        if kind == "term":
            for found in runs:
                plain, _ = found[0]  # of the same loss without the term
                more = [a - b for a, b in zip(found[number][0], plain, strict=True)]
                assert more[0].numpy() == pytest.approx(3, rel=1e-5)
                assert all(float(part.abs().max()) < 1e-5 for part in more[1:])
        for found in runs[1:]:
            slopes, other = found[number]
            assert other == pytest.approx(ended, rel=1e-5)
            pairs = zip(first, slopes, strict=True)
            far = max(float((a - b).abs().max()) for a, b in pairs)
            assert far < 1e-5 * size, (words, kind)
