"""What a run decides and keeps: the best, the end, what is stepped after an epoch, its losses."""

import contextlib
import dataclasses
import functools
import io
import json
import shutil
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchmetrics
from generated import refusal, rows
from ranks import draw_nothing, on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import classification

import ddpkit
from ddpkit.ranks import distributed, failures, replicas, stopping
from ddpkit.run import checkpoint
from ddpkit.run import outputs as of_networks
from ddpkit.run.best import higher_is_better, parse_best
from ddpkit.vision import metrics

CPU = torch.device("cpu")
CLASSES = ["a", "b"]
Results = Callable[[int], dict[str, float]]  # of an epoch


class Killed(Exception):
    pass


class Points(torch.utils.data.Dataset):
    """Float images, the label in their first value."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((3, 2, 2), index % 2 + index / 12), index % 2


def loaders(accumulate: int) -> tuple[DataLoader, DataLoader]:
    """Of the points, two in a batch for training and four for validation."""
    how = {"classes": CLASSES, "workers": 0}
    train = ddpkit.train_loader(Points(), 2, accumulate=accumulate, **how)
    return train, ddpkit.val_loader(Points(), 4, **how)


def train(
    out: Path,
    results: Results,
    best: Any = "top1",
    epochs: int = 3,
    patience: int = 0,
    after: Callable[..., None] = lambda *_: None,
    before: Callable[..., None] = lambda *_: None,
    resume: str = "auto",
    compiled: bool = False,
    tracker: Any = None,
    accumulate: int = 1,
    every: int = 1,
    weight: float = 1,
) -> ddpkit.Run:
    """A run whose evaluation returns `results`; `before` and `after` are called in each epoch.

    every: passes through run.steps between optimizer steps. weight: of the loss.
    """
    draw_nothing()
    torch.manual_seed(0)
    folder = ddpkit.RunFolder(out, resume)
    folder.find_checkpoint()
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    if compiled:
        net = torch.compile(net, backend="eager")
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader, val = loaders(accumulate)
    criterion = ddpkit.Criterion(nn.functional.cross_entropy, CLASSES, "mean")
    run = ddpkit.Run(
        folder,
        loader,
        val,
        CLASSES,
        model=net,
        criterion=criterion,
        optimizer=optimizer,
        scheduler=scheduler,
        report=ddpkit.Reporter(out, epochs, CLASSES, tracker=tracker),
        accumulate=accumulate,
        best=best,
    )

    def evaluate(model: nn.Module, _: Any) -> tuple[dict[str, float], None, list]:
        model.eval()
        return results(run.epoch), None, []

    with run:
        run.sanity_check(evaluate)
        for _ in range(run.epoch, epochs):
            before(run, scheduler)
            ddp_model = nn.parallel.DistributedDataParallel(net)
            ddp_model.train()
            for number, (_, batches) in enumerate(run.steps(loader, ddp_model), 1):
                counts = [criterion.count(targets) for targets in batches.targets]
                count = distributed.reduce_tensor(sum(counts))
                losses: list[Tensor] = []
                for images, targets in batches:
                    loss = criterion(ddp_model(images), targets)
                    loss = loss * distributed.world_size() / count * weight
                    loss.backward()
                    losses.append(loss.detach())
                if number % every:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                run.end_step(sum(losses), count)
            means = run.means()
            run.save()
            found = evaluate(net, val)[0]
            rate = optimizer.param_groups[0]["lr"]
            run.end_epoch(means | {"lr": rate} | found)
            after(run, scheduler)
            if run.is_out_of_patience(patience):
                break
    return run


def each(*values: float, name: str, is_higher: bool | None = None) -> Results:
    def results(epoch: int) -> dict[str, float]:
        score = metrics.Score(values[epoch])
        score.higher_is_better = is_higher
        return {name: score}

    return results


def test_what_best_says() -> None:
    """Names, each with a direction if one follows."""
    assert parse_best("max") == {"max": None}
    assert parse_best(("top1", "map")) == {"top1": None, "map": None}
    assert parse_best(("mae", "min")) == {"mae": False}
    assert parse_best(["a", "max", "b", "c", "min"]) == {
        "a": True,
        "b": None,
        "c": False,
    }


@on_ranks(1)
def test_what_metrics_say() -> None:
    """Through prefixes, wrappers and collections in collections; not what is made of metrics."""
    count = 3
    accuracy = classification.MulticlassAccuracy
    wrapped = torchmetrics.ClasswiseWrapper(
        accuracy(count, average="none"), ["x", "y", "z"], "of_"
    )
    inner = torchmetrics.MetricCollection(
        {"f1": classification.MulticlassF1Score(count)}
    )
    collection = {"top1": accuracy(count), "each": wrapped, "more": inner}
    collection |= {"error": classification.MulticlassHammingDistance(count)}
    collection |= {"cost": 1 - accuracy(count)}
    whole = torchmetrics.MetricCollection(collection, prefix="val_")
    whole.update(torch.eye(3), torch.arange(3))
    found, _ = metrics.compute_metrics(whole)
    said = {name: higher_is_better(name, value) for name, value in found.items()}
    higher = {"val_top1", "val_more_f1", "val_of_x", "val_of_y", "val_of_z"}
    others = {"val_error": False, "val_cost": None}
    assert said == dict.fromkeys(higher, True) | others
    assert json.dumps(found["val_top1"]) == "1.0"
    assert higher_is_better("val_loss") is False
    assert higher_is_better("val_loss", 1 - found["val_top1"]) is False
    assert higher_is_better("top1", 0.5) is None


LOWER = {  # BEST, the name of the column, what its metric says
    "loss": ("val_loss", "val_loss", None),
    "metric": ("mae", "mae", False),
    "said": (("cost", "min"), "cost", None),
    "of several": (("none", "max", "cost", "min"), "cost", True),
}


@pytest.mark.parametrize("name", LOWER)
def test_lower_is_better(tmp_path: Path, name: str) -> None:
    """best.pt, --patience, a resumed run and a search follow the direction."""
    best, column, is_higher = LOWER[name]
    results = each(3.0, 1.0, 2.0, 1.5, 0.5, name=column, is_higher=is_higher)

    def check(epochs: int, last: int, at: int, score: float) -> None:
        run = train(tmp_path, results, best, epochs, patience=2)
        assert run.epoch == last
        assert run.best_epoch == at
        assert run.best == score
        state = torch.load(tmp_path / "best.pt", weights_only=True)
        assert state["epoch"] == at
        assert state["best"] == score
        assert json.loads((tmp_path / "args.json").read_text())["best"] == [
            column,
            "min",
        ]

    on_ranks(1)(functools.partial(check, 2, 2, 2, 1.0))()
    on_ranks(1)(functools.partial(check, 5, 4, 2, 1.0))()  # no better one for 2 epochs


@on_ranks(1)
def test_what_remains_of_a_checkpoint(tmp_path: Path) -> None:
    """Its weights go, and the rest stays; a metrics.csv that a crash has cut costs nothing."""
    results = each(0.3, 0.5, 0.4, name="top1", is_higher=True)
    train(tmp_path, results, "top1", 2)
    path = tmp_path / "metrics.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-1], lines[-1][:5]]) + "\n")
    run = train(tmp_path, results, "top1", 3)
    state = run.folder.state
    assert state
    assert state["epoch"] == 2
    assert not state.keys() & run.parts.keys()
    assert len(path.read_text().splitlines()) == 4


@on_ranks(1)
def test_what_a_run_says_of_itself(tmp_path: Path) -> None:
    """The attributes that its docstring names, within an epoch and after the last."""
    seen: list[int] = []

    def note(run: ddpkit.Run, scheduler: Any) -> None:
        seen.append(run.seen)

    results = each(0.3, 0.5, 0.4, name="top1", is_higher=True)
    run = train(tmp_path, results, "top1", 3, before=note)
    assert seen == [0, 0, 0]
    assert run.seen == 0
    assert run.epoch == 3
    assert run.step == 3 * run.source.steps
    assert len(run.history) == 3
    assert run.best == 0.5
    assert run.best_epoch == 2


@pytest.mark.parametrize("epochs", [1, 2])
def test_killed_after_best(tmp_path: Path, epochs: int) -> None:
    """Between best.pt and last.pt of an epoch: it is the best once more, by which score ever."""
    results = each(0.3, 0.5, name="map", is_higher=True)
    add = ddpkit.RunFolder.add

    def killed(
        folder: ddpkit.RunFolder, state: dict, is_best: bool, **how: Any
    ) -> None:
        if is_best and state["epoch"] == epochs:
            checkpoint.write_file(folder.path / "best.pt", state)
            raise Killed
        add(folder, state, is_best, **how)

    def begin() -> None:
        ddpkit.RunFolder.add = killed
        with contextlib.suppress(Killed):
            train(tmp_path, results, ("top1", "map"), epochs)

    def resume() -> None:
        found: list[bool] = []
        end_epoch = ddpkit.Run.end_epoch

        def ended(run: ddpkit.Run, row: dict) -> None:
            found.append(end_epoch(run, row))

        ddpkit.Run.end_epoch = ended
        run = train(tmp_path, results, ("top1", "map"), epochs)
        assert found == [True]
        assert run.best_epoch == epochs
        assert not (tmp_path / "best-1.pt").exists()

    on_ranks(1)(begin)()
    assert torch.load(tmp_path / "last.pt", weights_only=True)["epoch"] == epochs - 1
    on_ranks(1)(resume)()


@on_ranks(1)
def test_back_to_an_earlier_checkpoint(tmp_path: Path) -> None:
    """A best.pt of later epochs does not count, and is kept as best-1.pt."""
    first = tmp_path / "first.pt"
    scores = each(0.3, 0.9, 0.4, name="top1", is_higher=True)
    train(tmp_path, scores, epochs=1)
    shutil.copy(tmp_path / "last.pt", first)
    train(tmp_path, scores, epochs=3)
    scores = each(0.3, 0.5, 0.4, name="top1", is_higher=True)
    run = train(tmp_path, scores, epochs=3, resume=str(first))
    assert run.best == 0.5
    assert run.best_epoch == 2
    kept = torch.load(tmp_path / "best-1.pt", weights_only=True)
    assert kept["best"] == 0.9


@on_ranks(1)
def test_a_direction_that_nobody_says(tmp_path: Path) -> None:
    """Refused before anything is trained, until it is said."""
    with refusal("best.chosen", "cost", '"cost", "min"'):
        train(tmp_path, each(1.0, name="cost"), "cost")
    assert not (tmp_path / "last.pt").exists()


def test_a_run_of_before(tmp_path: Path) -> None:
    """It kept the highest of any metric: one of which lower is better is chosen anew."""
    results = each(3.0, 1.0, 2.0, name="mae", is_higher=False)
    on_ranks(1)(lambda: train(tmp_path, results, ("mae", "max"), 2) and None)()
    for path in tmp_path.glob("*.pt"):
        state = torch.load(path, weights_only=True)
        assert state["best"] == 3.0
        del state["best_by"]
        torch.save(state, path)
    on_ranks(1)(lambda: train(tmp_path, results, "mae", 3) and None)()
    assert torch.load(tmp_path / "best-1.pt", weights_only=True)["best"] == 3.0
    assert torch.load(tmp_path / "best.pt", weights_only=True)["best"] == 2.0


@on_ranks(2)
def test_rank_zero_decides(tmp_path: Path) -> None:
    """By its own floats, if those of the ranks differ in their last bits."""

    def results(epoch: int) -> dict[str, float]:
        score = 0.5 + 1e-7 * epoch * distributed.rank()
        return {"top1": score} if epoch < 2 or distributed.is_rank_zero() else {}

    run = train(tmp_path, results, ("top1", "max"), 5, patience=2)
    assert run.epoch == 3
    assert run.best_epoch == 1
    metric = torchmetrics.MetricCollection({"mean": torchmetrics.MeanMetric()})
    metric.compute = lambda: {"mean": torch.tensor(float(distributed.rank()))}
    assert metrics.compute_metrics(metric)[0] == {"mean": 0.0}


@on_ranks(2)
def test_leaving_an_evaluation_early() -> None:
    """After another batch on each rank; after a signal on one all stop where all pass."""
    _, loader = loaders(accumulate=1)  # 2 batches on rank 0, 1 on rank 1
    metric = torchmetrics.MetricCollection({"mean": torchmetrics.MeanMetric()})
    with stopping.on_signals(str):
        for number, batch in enumerate(ddpkit.eval_batches(loader, CPU)):
            metric.update(batch[0].mean())
            if number == 0:
                break
        metrics.compute_metrics(metric)
        found = ddpkit.TopLosses(CPU).compute()
        assert found == []
        stopping._stopper.answered = distributed.rank() == 1
        with pytest.raises(stopping.Stopped):
            metrics.compute_metrics(metric)


RATES = "0.1", "0.05", "0.025", "0.0125"


@pytest.mark.parametrize("place", ["never", "in the next epoch", "at the end"])
def test_a_step_after_the_end_of_an_epoch(tmp_path: Path, place: str) -> None:
    """It is in the checkpoints, whether the run is killed in the next epoch or is at its end."""
    scores = each(0.1, 0.2, 0.1, 0.2, name="top1", is_higher=True)

    def step(run: ddpkit.Run, scheduler: Any) -> None:
        scheduler.step()
        Path(tmp_path, "examples.png").touch()  # of best.pt

    def begin() -> None:
        end_step = ddpkit.Run.end_step

        def killed(run: ddpkit.Run, *numbers: Any) -> None:
            end_step(run, *numbers)
            if run.epoch == 2:
                raise Killed

        if place == "in the next epoch":
            ddpkit.Run.end_step = killed
        with contextlib.suppress(Killed):
            train(
                tmp_path, scores, epochs=2 if place == "at the end" else 4, after=step
            )

    on_ranks(1)(begin)()
    for name in "last", "best":
        state = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        assert state["scheduler"]["last_epoch"] == state["epoch"]
    assert (tmp_path / "examples.png").exists()
    on_ranks(1)(lambda: train(tmp_path, scores, epochs=4, after=step) and None)()
    assert tuple(row["lr"] for row in rows(tmp_path)) == RATES


@pytest.mark.parametrize("is_top", [True, False])
@on_ranks(1)
def test_a_step_before_an_epoch_that_is_resumed(tmp_path: Path, is_top: bool) -> None:
    """It is in the checkpoint already: a line says so."""
    end_turn = ddpkit.Run._end_turn

    def killed(run: ddpkit.Run, **words: bool) -> None:
        run.save()
        end_turn(run, **words)
        raise Killed

    def step(run: ddpkit.Run, scheduler: Any) -> None:
        if is_top:
            scheduler.step()

    scores = each(0.1, name="top1", is_higher=True)
    lines: list[str] = []
    distributed.print0 = lines.append
    ddpkit.Run._end_turn = killed
    with contextlib.suppress(Killed):
        train(tmp_path, scores, epochs=1, before=step)
    ddpkit.Run._end_turn = end_turn
    train(tmp_path, scores, epochs=1, before=step)
    assert any("1 step of the next" in line for line in lines)
    assert any("changed before run.steps()" in line for line in lines) == is_top


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_loss_of_other_ranks(tmp_path: Path, before: int, after: int) -> None:
    """An epoch that is resumed on another number of ranks has the mean loss of all its steps."""
    scores = each(0.1, name="top1", is_higher=True)

    def run(name: str, ranks: int, last: int) -> None:
        end_step = ddpkit.Run.end_step

        def ended(run: ddpkit.Run, *numbers: Any) -> None:
            end_step(run, *numbers)
            if run.step == last:
                run.save()
                raise Killed

        ddpkit.Run.end_step = ended
        with contextlib.suppress(Killed):
            train(tmp_path / name, scores, epochs=1, accumulate=2 // ranks)

    for name, ranks, last in (
        ("whole", after, 0),
        ("resumed", before, 2),
        ("resumed", after, 0),
    ):
        on_ranks(ranks)(functools.partial(run, name, ranks, last))()
    (whole,) = rows(tmp_path / "whole")
    (resumed,) = rows(tmp_path / "resumed")
    expected = pytest.approx(float(whole["train_loss"]), rel=1e-6)
    assert float(resumed["train_loss"]) == expected


@on_ranks(2)
def test_dropout(tmp_path: Path) -> None:
    """It leaves out something else on each rank and in each step."""
    found: list[list[float]] = []
    end_step = ddpkit.Run.end_step

    def ended(run: ddpkit.Run, *numbers: Any) -> None:
        found.append(nn.functional.dropout(torch.ones(64)).tolist())
        end_step(run, *numbers)

    ddpkit.Run.end_step = ended
    train(tmp_path, each(0.1, 0.2, name="top1", is_higher=True), epochs=2)
    masks = {tuple(m) for part in distributed.gather_objects(found) for m in part}
    assert len(masks) == 2 * 2 * 3  # ranks, epochs, steps


@on_ranks(1)
def test_losses_that_are_means() -> None:
    """They count what is labelled; without any the loss is 0 and has finite gradients."""

    def by_hand(outputs: Tensor, targets: Tensor) -> Tensor:
        is_labelled = targets != 255
        labels = targets.where(is_labelled, 0)
        losses = nn.functional.cross_entropy(outputs, labels, reduction="none")
        return (losses * is_labelled).sum() / is_labelled.sum()

    labels = {
        255: [0, 1, 255, 255],
        -100: [0, 1, -100, -100],
        0: [1, 2, 0, 0],
    }
    for void, numbers in labels.items():
        criterion = ddpkit.Criterion(nn.CrossEntropyLoss(ignore_index=void), "abc")
        assert int(criterion.count(torch.tensor(numbers))) == 2
    for loss in by_hand, nn.CrossEntropyLoss(ignore_index=255):
        outputs = torch.randn(2, 3, 4, 4, requires_grad=True)
        masks = torch.full((2, 4, 4), 255)
        criterion = ddpkit.Criterion(loss, "abc", "mean")
        total = criterion(outputs, masks)
        (total + outputs.sum()).backward()  # another loss of the same outputs
        assert float(total.detach()) == 0
        assert int(criterion.count(masks)) == 0
        assert outputs.grad.eq(1).all()
    ages = ddpkit.Criterion(
        lambda outputs, targets: (outputs[:, 0] - targets).square().mean(), "a", "mean"
    )
    assert int(ages.count(torch.tensor([30, 40, 50]))) == 3


@dataclasses.dataclass
class Both:
    aux: Tensor
    logits: Tensor


class Named(OrderedDict[str, Any]):
    """A class of a network's own, which torch's trees do not know."""


def test_outputs_of_other_kinds() -> None:
    """Logits are found in what networks return, and all of it is in float32 for the loss."""
    one = torch.ones(1)
    two = torch.zeros(1)
    for outputs in (
        one,
        (one, two),
        [[one], two],
        {"out": one, "aux": two},
        Both(two, one),
    ):
        assert torch.equal(ddpkit.to_logits(outputs), one)
    assert torch.equal(ddpkit.to_logits({"aux": two, "out": one, "loss": None}), one)
    half = of_networks.to_float32(Both(two.half(), {"x": one.half()}))
    assert half.aux.dtype == half.logits["x"].dtype == torch.float32
    named = of_networks.to_float32(
        Named(out=one.half(), more={"x": Both(two.half(), one)})
    )
    assert type(named) is Named
    assert named["out"].dtype == named["more"]["x"].aux.dtype == torch.float32
    for outputs in (None, (), {"a": "b"}, "text"):
        with refusal("outputs.to_logits", type(outputs).__name__):
            ddpkit.to_logits(outputs)


def test_a_loss_that_takes_logits_alone() -> None:
    """As of a network that returns more, in the evaluation that was not edited."""
    logits = torch.zeros(2, 3)
    for loss in ddpkit.BinaryCrossEntropy(None, 0.0), torch.nn.CrossEntropyLoss():
        for outputs in (logits, logits), {"out": logits}:
            with refusal(
                "criterion.call", type(outputs).__name__, "ddpkit.to_logits(outputs)"
            ):
                ddpkit.Criterion(loss, (), "mean")(outputs, torch.zeros(2, 3))


@on_ranks(1)
def test_labels_that_validation_has_not() -> None:
    """They are left out, as of miou, but f1 is 0 of one that is predicted all the same."""
    for extra, f1 in (-10.0, 1.0), (10.0, 2 / 3):
        found = ddpkit.label_metrics(3)
        targets = torch.tensor([[1.0, 0, 0], [0, 1, 0], [1, 1, 0]])
        logits = (targets - 0.5) * 20
        logits[:, 2] = extra
        found.update(logits, targets)
        results, _ = metrics.compute_metrics(found)
        assert results == pytest.approx({"map": 1.0, "f1": f1})


def test_worst_of_what_is_no_label() -> None:
    """Regression has targets of the same shape as labels."""
    for targets, is_label in (
        ([[0.0], [1.0]], True),
        ([[0.0], [0.7]], False),
        ([[3.0], [1]], False),
    ):
        worst = ddpkit.TopLosses(CPU)
        worst.update(torch.zeros(2, 1), torch.tensor(targets), torch.arange(2))
        assert bool(worst.are_labels) == is_label
    worst = ddpkit.TopLosses(CPU)
    worst.update(torch.zeros(2, 3), torch.full((2, 3), 0.02), torch.arange(2))
    assert worst.are_labels


class Heads(nn.Module):
    """A head for training alone, one for neither, BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.5)
        )
        self.head = nn.Conv2d(4, 2, 1)
        self.aux = nn.Conv2d(4, 2, 1)
        self.unused = nn.Conv2d(4, 2, 1)

    def forward(self, images: Tensor) -> Any:
        found = self.stem(images)
        outputs = Named(out=self.head(found))
        if self.training:
            outputs["aux"] = {"first": self.aux(found)}
        return outputs


@on_ranks(1)
def test_what_is_frozen() -> None:
    """Weights on which nothing depends, in a line; nothing else of the network changes."""
    lines: list[str] = []
    distributed.print0 = lines.append
    torch.manual_seed(1)
    expected = Heads()
    drawn = torch.rand(1)
    torch.manual_seed(1)
    net = Heads()
    ddpkit.adapt_input(net, 32, step=8)
    assert torch.equal(torch.rand(1), drawn)
    assert net.training
    assert [
        name for name, each in net.named_parameters() if not each.requires_grad
    ] == [
        "unused.weight",
        "unused.bias",
    ]
    state = net.state_dict()
    assert all(
        torch.equal(each, state[name]) for name, each in expected.state_dict().items()
    )
    assert lines == [
        "2 weights are frozen because no output depends on them: unused.weight, unused.bias"
    ]


@on_ranks(1)
def test_a_compiled_network(tmp_path: Path) -> None:
    """torch.compile(model) in main.py: the names of weights are those without it."""
    results = each(0.1, 0.2, 0.3, name="top1", is_higher=True)
    for epochs, compiled in (
        (1, True),
        (2, True),
        (3, False),
    ):
        train(tmp_path, results, epochs=epochs, compiled=compiled)
        state = torch.load(tmp_path / "last.pt", weights_only=True)
        assert (
            list(state["model"])
            == ["1.weight", "1.bias"]
            == list(state["optimizer"]["state"])
        )
        assert state["epoch"] == epochs

    def build(*_: object) -> nn.Module:
        return torch.compile(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)))

    flags = SimpleNamespace()
    opened = ddpkit.open_model(tmp_path / "last.pt", build, lambda *_: flags, CPU)
    assert torch.equal(opened[0][1].weight, state["model"]["1.weight"])


@on_ranks(1)
def test_a_tracker_that_fails(tmp_path: Path) -> None:
    """At its start or later: a line, and the run goes on."""

    def start(known: object) -> Any:
        raise ConnectionError("no\nserver")

    def leave(known: object) -> Any:
        sys.exit("no key")

    (tmp_path / "mlflow.py").write_text("raise RuntimeError('another protobuf')")
    sys.path.insert(0, str(tmp_path))
    lines: list[str] = []
    distributed.print0 = lines.append
    for number, tracker in enumerate((start, lambda known: None, leave, "mlflow")):
        scores = each(0.1, name="top1", is_higher=True)
        run = train(tmp_path / str(number), scores, epochs=1, tracker=tracker)
        assert run.epoch == 1
    assert (
        len([line for line in lines if line.startswith("the tracker did not start")])
        == 4
    )
    for reason in (
        "ConnectionError: no server",
        "SystemExit: no key",
        "another protobuf",
    ):
        assert any(reason in line for line in lines)


@on_ranks(1)
def test_streams_that_the_owner_closes(tmp_path: Path) -> None:
    """The next epoch begins all the same."""
    closed = io.StringIO()
    scores = each(0.1, 0.2, name="top1", is_higher=True)
    with contextlib.redirect_stdout(closed), contextlib.redirect_stderr(closed):
        run = train(tmp_path, scores, epochs=2, after=lambda *_: closed.close())
    assert run.epoch == 2


def scalars(folder: Path) -> dict[str, list[int]]:
    """What TensorBoard reads in a folder: the steps of each name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder)).Reload()
    return {
        name: [each.step for each in found.Scalars(name)]
        for name in found.Tags()["scalars"]
    }


def test_scalars_of_the_owner(tmp_path: Path) -> None:
    """In runs/NAME, by optimizer steps: those of this run are dropped neither on resume nor by
    `--resume never`."""
    from torch.utils.tensorboard import SummaryWriter

    results = each(0.1, 0.2, 0.3, name="top1", is_higher=True)

    def begin(epochs: int, resume: str) -> None:
        writer = SummaryWriter(str(tmp_path))
        writer.add_scalar("mine", 1.0, 100 * epochs)
        train(tmp_path, results, epochs=epochs, resume=resume)
        writer.close()

    for epochs in 1, 3:
        on_ranks(1)(functools.partial(begin, epochs, "auto"))()
    assert scalars(tmp_path) == {"mine": [100, 300]}
    found = scalars(tmp_path / "epochs")
    assert found["top1"] == found["train_loss"] == [1, 2, 3]
    on_ranks(1)(functools.partial(begin, 2, "never"))()
    assert scalars(tmp_path) == {"mine": [200]}
    assert scalars(tmp_path / "epochs")["top1"] == [1, 2]


@on_ranks(1)
def test_accumulation_by_hand(tmp_path: Path) -> None:
    """It is refused at the first step; of a division that may be left from it, a line."""
    results = each(0.1, name="top1", is_higher=True)
    with refusal("loop.count", "run.end_step", "--accumulate 4"):
        train(tmp_path / "hand", results, epochs=1, every=2)
    for weight, divides in (
        (1, False),
        (0.5, True),
        (0.3, False),
    ):
        lines: list[str] = []
        distributed.print0 = lines.append
        train(tmp_path / str(weight), results, epochs=1, accumulate=2, weight=weight)
        found = [
            line for line in lines if "1/2 of the mean" in line and "2 passes" in line
        ]
        assert bool(found) == divides


@on_ranks(2)
def test_a_loss_that_is_a_sum() -> None:
    """It is refused; what may be a weight of the owner's is said; an auxiliary one is neither."""
    count = torch.tensor(12.0)
    six = torch.tensor(6.0)
    lines: list[str] = []
    distributed.print0 = lines.append
    for scale in 1.0, 1024.0:
        right = torch.tensor(scale * 2 / 12)
        replicas.check_slopes([(right, six), (right / 2, six)], count, 1, 2, scale)
        assert lines == []
        with refusal(
            "replicas.check_slopes", "criterion(outputs, targets) * world_size / count"
        ):
            replicas.check_slopes([(torch.tensor(scale), six)], count, 1, 2, scale)
        replicas.check_slopes([(right / 2, six)], count, 1, 2, scale)
        (line,) = lines
        assert "2 ranks" in line
        lines.clear()


def test_one_value_to_normalize() -> None:
    """The mistake is one of the flags: a line says so."""
    one = torch.ones(1, 2, 1, 1)
    for layer in (
        nn.BatchNorm2d(2),
        nn.InstanceNorm2d(2),
        nn.GroupNorm(1, 1),
    ):
        with pytest.raises(ValueError) as caught:
            layer(one[:, :1] if isinstance(layer, nn.GroupNorm) else one)
        line = str(failures._of_torch(caught.value))
        assert "use larger batches or images" in line
        assert "drop_last=True" in line


def test_what_torch_says_of_other_mistakes() -> None:
    """The line names what the owner can change."""
    net = nn.Conv2d(5, 2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2)

    def step_too_often() -> None:
        optimizer.step()
        for _ in range(3):
            scheduler.step()

    def ignore_a_share() -> None:
        shares = torch.full((2, 3), 1 / 3)
        nn.CrossEntropyLoss(ignore_index=255)(torch.zeros(2, 3), shares)

    for act, words in (
        (lambda: net(torch.zeros(1, 3, 4, 4)), "channels"),
        (step_too_often, "keep the number of epochs"),
        (ignore_a_share, "drop ignore_index"),
    ):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            act()
        assert words in str(failures._of_torch(caught.value))
