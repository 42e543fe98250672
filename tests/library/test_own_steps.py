"""A training step as people write it: exact, or refused in a line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from generated import refusal
from ranks import draw_nothing, on_ranks
from test_decisions import CLASSES, Points, loaders
from test_loaders import Shard, said
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, default_collate

import ddpkit
from ddpkit.ranks import distributed
from ddpkit.run import first_steps
from ddpkit.vision import mistakes

VOID = 255


STEP = """
import contextlib
counts = [criterion.count(targets) for _, targets in batches]
count = distributed.reduce_tensor(sum(counts))
losses = []
for i, (images, targets) in enumerate(batches, 1):
    with contextlib.nullcontext() if i == len(batches) else ddp_model.no_sync():
        loss = criterion(ddp_model(images), targets) * world_size / count
        loss.backward()
    losses.append(loss.detach())
optimizer.step()
optimizer.zero_grad()
run.end_step(sum(losses), count)
"""


def train(
    out: Path,
    *changes: tuple[str, str],
    accumulate: int = 2,
    is_bare: bool = False,
) -> tuple[list[Tensor], float]:
    """Take the steps of an epoch as STEP has it, changed; return the weights and the mean loss.

    Of the 12 images, two on each rank in a pass, a third is void.
    """
    draw_nothing()
    step = STEP
    for old, new in changes:
        assert step.count(old) == 1, old
        step = step.replace(old, new)
    torch.manual_seed(0)
    folder = ddpkit.RunFolder(out, "never")
    folder.find_checkpoint()
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).double()
    net.insert(0, Double())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loader, val = loaders(accumulate)
    loss = nn.CrossEntropyLoss(ignore_index=VOID, reduction="sum")
    criterion = ddpkit.Criterion(loss, CLASSES)
    run = ddpkit.Run(
        folder,
        loader,
        val,
        CLASSES,
        model=net,
        criterion=criterion,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 1.0),
        report=ddpkit.Reporter(folder.path, 1, CLASSES),
        accumulate=accumulate,
        best="val_loss",
    )
    names = {
        **globals(),
        "run": run,
        "net": net,
        "criterion": criterion,
        "optimizer": optimizer,
    }
    names |= {"world_size": distributed.world_size()}
    code = compile(step, "step", "exec")
    with run:
        ddp_model = DistributedDataParallel(net)
        for _, batches in run.steps(run.train_loader, net if is_bare else ddp_model):
            marked = [(x, t.where(x[:, 0, 0, 0] > 0.3, VOID)) for x, t in batches]
            exec(code, {**names, "ddp_model": ddp_model, "batches": marked})
        mean = run.means()["train_loss"]
        return [weight.detach().clone() for weight in net.parameters()], mean


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


LOSS = "criterion(ddp_model(images), targets) * world_size / count"
SLOPES = "replicas.check_slopes"
CALLED = "replicas.check_called"
MISUSES = {  # what stands in STEP, what instead, who refuses it
    "a sum": (" * world_size / count", "", SLOPES),
    "a local mean": ("world_size / count", "1 / criterion.count(targets)", SLOPES),
    "no end": ("run.end_step(sum(losses), count)", "", "loop.count"),
    "two ends": (
        "run.end_step(",
        "run.end_step(loss, count); run.end_step(",
        CALLED,
    ),
    "beside DDP": ("ddp_model(images)", "net(images)", CALLED),
    "never cleared": ("optimizer.zero_grad()", "", "first_steps.check_cleared"),
    "added up by hand": (
        "optimizer.step()\noptimizer.zero_grad()",
        "if run.step % 2 == 0:\n    optimizer.step()\n    optimizer.zero_grad()",
        "first_steps.check_cleared",
    ),
    "cleared before": (
        "optimizer.step()",
        "optimizer.zero_grad(); optimizer.step()",
        "first_steps.check_step",
    ),
}


OF_ONE_PASS = ("never cleared", "added up by hand")
OF_TWO_PASSES = ("divided", "of one rank", "a mean added")
PART = "the loss is 1/2 of the mean over labels"
SAID = {  # what may be meant: a line says so
    "divided": (LOSS, f"{LOSS} / len(batches)", PART),
    "of one rank": (" * world_size / count", " / count", PART),
    "a mean added": (
        f"{LOSS}\n",
        f"{LOSS} + 0.1 * net[2].weight.square().sum()\n",
        "a plain mean per batch counts 2 times",
    ),
    "by hand": (
        LOSS,
        "nn.functional.cross_entropy(ddp_model(images), targets % 2)",
        "the loss did not come from criterion(...)",
    ),
    "cleared, not stepped": (
        "optimizer.step()",
        "run.step % 2 and optimizer.step()",
        "run.end_step without an optimizer step",
    ),
    "a loss with weights": (
        "import contextlib",
        "import contextlib\n"
        "if not run.step: optimizer.add_param_group({'params': [nn.Parameter(torch.ones(()))]})",
        "1 of the optimizer's weights are in no module",
    ),
    "an average": (
        "import contextlib",
        "import contextlib; run.kept = torch.optim.swa_utils.AveragedModel(net)",
        "AveragedModel is not passed to Run(...)",
    ),
}


@on_ranks(2)
def test_misuses_of_a_step(tmp_path: Path) -> None:
    """Refused in a line, on all ranks, before anything is saved."""
    for name, (old, new, code) in MISUSES.items():
        with refusal(code):
            # Seen in the second or third step: an epoch has 3 of one pass, 1 of two.
            passes = 1 if name in OF_ONE_PASS else 2
            train(tmp_path / name, (old, new), accumulate=passes)
        assert not (tmp_path / name / "last.pt").exists()
    for name, (old, new, text) in SAID.items():
        lines: list[str] = []
        distributed.print0 = lines.append
        passes = 2 if name in OF_TWO_PASSES else 1
        train(tmp_path / name, (old, new), accumulate=passes)
        assert len([line for line in lines if text in line]) == 1, name
    with refusal("replicas.prepare_network", "DistributedDataParallel(model)"):
        train(tmp_path / "bare", is_bare=True)


TERM = (f"{LOSS}\n", f"{LOSS} + 0.1 * net[2].weight.square().sum() / len(batches)\n")
AUXILIARY = (
    f"{LOSS}\n",
    f"{LOSS} + criterion(ddp_model.module(images), targets) * 0.4 * world_size / count\n",
)
CLEARED_FIRST = (
    ("optimizer.zero_grad()\n", ""),
    ("losses = []", "losses = []; optimizer.zero_grad()"),
)
ATTACHED = (("losses.append(loss.detach())", "losses.append(loss)"),)
EXACT = {
    "plain": ATTACHED,
    "term": (TERM,),
    "auxiliary": (AUXILIARY,),
    "cleared first": CLEARED_FIRST,
}


def test_steps_are_exact(tmp_path: Path) -> None:
    """One rank or two, four passes or two, terms of weight 1: the same weights and loss."""
    for ranks in 1, 2:

        def act(ranks: int = ranks) -> None:
            found = {}
            for name, changes in EXACT.items():
                found[name] = train(tmp_path / "out", *changes, accumulate=4 // ranks)
            if distributed.is_rank_zero():
                torch.save(found, tmp_path / f"{ranks}.pt")

        on_ranks(ranks)(act)()
    one = torch.load(tmp_path / "1.pt")
    two = torch.load(tmp_path / "2.pt")
    for name in EXACT:
        weights, mean = one[name]
        others, other = two[name]
        assert all(
            torch.allclose(a, b, rtol=1e-6)
            for a, b in zip(weights, others, strict=True)
        )
        assert mean == pytest.approx(other, rel=1e-6)
    assert not torch.allclose(one["plain"][0][0], one["term"][0][0])
    assert torch.equal(one["plain"][0][0], one["cleared first"][0][0])


@on_ranks(2)
def test_the_mean_loss_of_an_epoch(tmp_path: Path) -> None:
    """Each label counts once, though steps have unequal numbers of them."""
    rate = "optimizer.param_groups[0]['lr']"
    still = ("optimizer.step()", f"{rate} = 0.0; optimizer.step()")
    (weight, bias), mean = train(tmp_path, still, accumulate=1)
    images, targets = default_collate([Points()[number] for number in range(12)])
    is_labelled = images[:, 0, 0, 0] > 0.3
    outputs = images.flatten(1).double() @ weight.T + bias
    loss = nn.functional.cross_entropy(outputs[is_labelled], targets[is_labelled])
    assert mean == pytest.approx(float(loss), rel=1e-6)


def test_the_mode_of_a_network(tmp_path: Path) -> None:
    """Evaluating and drawing give it back as it was, with BatchNorm's statistics."""
    net = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(), nn.Flatten(), nn.Linear(12, 2))
    net[1].eval()
    _, val = loaders(1)
    for images, *_ in ddpkit.eval_batches(val, net):
        assert not net.training
        assert not net[0].training
        net(images)
    drawn = []

    def draw(axes: Any, image: Tensor, target: Tensor, *more: object) -> None:
        axes.imshow(image[0])
        drawn.append(target)

    shown = mistakes.Mistakes(
        model=net,
        loader=val,
        classes=CLASSES,
        predict=lambda network, x: network(x),
        draw=draw,
    )
    shown.draw_examples(tmp_path / "examples.png", {0: ""})
    assert drawn
    assert [module.training for module in net] == [True, False, True, True]
    assert net.training
    assert not net[0].num_batches_tracked


def test_a_step_with_a_closure(tmp_path: Path) -> None:
    """As of LBFGS, which works out the gradients itself: no line says that there are none."""
    net = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(net.parameters())
    parts = {"model": net, "optimizer": optimizer}
    watch = first_steps.FirstSteps(parts, optimizer, None, 1, 1, [optimizer])

    def closure() -> float:
        optimizer.zero_grad()
        loss = net(torch.ones(3, 2)).square().mean()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) > 0
    optimizer.zero_grad()
    with refusal("first_steps.check_step"):
        watch._check_step(optimizer, (), {})
    for hook in watch.hooks:
        hook.remove()


@on_ranks(2)
def test_a_loader_made_in_each_epoch(tmp_path: Path) -> None:
    """Of ranks that have seeded torch each by its own number: resumed, its order is the same."""
    mine = range(distributed.rank(), 40, 2)

    def make() -> DataLoader:
        return DataLoader(said(Shard(mine)), 2, shuffle=True)

    def train(epochs: int, resume: str) -> list[float]:
        """Return the order of the last epoch."""
        torch.manual_seed(distributed.rank())
        folder = ddpkit.RunFolder(tmp_path, resume)
        folder.find_checkpoint()
        net = nn.Sequential(nn.Flatten(), nn.Linear(Shard(mine)[0][0].numel(), 2))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        run = ddpkit.Run(
            folder,
            make(),
            loaders(1)[1],
            CLASSES,
            model=net,
            optimizer=optimizer,
            report=ddpkit.Reporter(folder.path, epochs, CLASSES),
            best="val_loss",
        )
        ddp_model = DistributedDataParallel(net)
        order: list[float] = []
        with run:
            for _ in range(run.epoch, epochs):
                order.clear()
                for _, batches in run.steps(make(), ddp_model):
                    ((images, targets),) = batches
                    order += images[:, 0, 0, 0].tolist()
                    nn.functional.cross_entropy(ddp_model(images), targets).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    run.end_step(0.0, 4)
                run.means()
                run.end_epoch({"val_loss": 0.0}, is_evaluated=False)
        return order

    whole = train(3, "never")
    assert len(set(whole)) == 20
    train(2, "never")
    assert train(3, "auto") == whole
