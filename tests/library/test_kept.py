"""What `Run` keeps beside its parts, and says of a loop: of a run that dies in mid-epoch."""

import contextlib
import copy
import io
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generated import refusal
from ranks import draw_nothing, on_ranks
from test_decisions import CLASSES, Killed, Points
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import SWALR
from torch.utils.data import DataLoader
from tqdm import tqdm

import ddpkit
from ddpkit.data import samples
from ddpkit.ranks import distributed, process
from ddpkit.run import states
from ddpkit.run.loop import LossState

EPOCHS = 2
SIZES = 2, 3  # of batches, by epoch


class More(Points):
    def __len__(self) -> int:
        return 27


class Counting(nn.Module):
    """A loss that training changes."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.requires_grad:
            self.calls += 1
        losses = nn.functional.cross_entropy(outputs, targets, reduction="sum")
        return losses * self.calls

    def count(self, targets: Tensor) -> int:
        return len(targets)


def train(out: Path, dies_after: int = 0) -> tuple[Any, list, ddpkit.Run]:
    """Return the numbers that are kept, all else that a run has come to, and the run."""
    draw_nothing()
    torch.manual_seed(0)
    folder = ddpkit.RunFolder(out)
    folder.find_checkpoint()
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2), nn.Dropout(0.2))
    with torch.no_grad():
        net[1].bias.fill_(3)  # by hand, in each start
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    how = {"classes": CLASSES, "workers": 0}
    val = ddpkit.val_loader(More(), 4, **how)
    # larger batches in the second epoch
    loaders = [ddpkit.train_loader(More(), size, accumulate=2, **how) for size in SIZES]
    criterion = ddpkit.Criterion(Counting(), CLASSES, "mean")
    run = ddpkit.Run(
        folder,
        loaders[0],
        val,
        CLASSES,
        model=net,
        criterion=criterion,
        optimizer=optimizer,
        scheduler=scheduler,
        report=ddpkit.Reporter(out, EPOCHS, CLASSES),
        accumulate=2,
        save_every=1,
        best="val_loss",
    )
    numbers = run.numbers(steps=[], common=[], own=[], read=[], modes=[])
    second = run.forever(DataLoader(range(5), 1, shuffle=True))
    world_size = distributed.world_size()
    with run:
        model = DistributedDataParallel(net)
        for epoch in range(run.epoch, EPOCHS):
            model.train()
            net[2].eval()  # which evaluation leaves so
            for step, batches in run.steps(loaders[epoch], model):
                count = sum(criterion.count(targets) for targets in batches.targets)
                count = distributed.reduce_tensor(count)
                step_loss: Tensor | float = 0.0
                right: Tensor | int = 0
                for i, (images, targets) in enumerate(batches, 1):
                    model.require_backward_grad_sync = i == len(batches)
                    outputs = model(images)
                    loss = criterion(outputs, targets) * world_size / count
                    loss.backward()
                    step_loss += loss.detach()
                    right += (outputs.argmax(1) == targets).sum()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                optimizer.param_groups[0]["weight_decay"] += 0.01
                numbers.steps.append(step)
                numbers.common.append(run.common.random())
                numbers.own.append(run.own.random())
                numbers.read.append(next(second).item())
                sums = {"right": (right, 2 * SIZES[epoch]), "calls": 1}
                if run.step == 1:  # on one rank
                    sums["lost"] = math.nan if distributed.rank() else 1.0
                run.end_step(step_loss, count, **sums)
                if run.step == dies_after:
                    raise Killed
            means = run.means()
            for _ in ddpkit.eval_batches(val, net):
                assert not net.training
            numbers.modes.append([net.training, net[2].training])
            rank = distributed.rank()
            own = {"mine": rank, "name": f"rank {rank}"}
            run.end_epoch({**means, "val_loss": 1.0 - 0.1 * epoch, **own})
    return numbers, [net.state_dict(), criterion.state_dict(), run.history], run


@on_ranks(2)
def test_what_a_run_keeps(tmp_path: Path) -> None:
    """As undisturbed: numbers, a second loader, both streams, sums, a loss's buffers, weights."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        numbers, whole, _ = train(tmp_path / "whole")
    steps = [27 // (4 * size) for size in SIZES]  # 2 ranks x 2 passes
    assert numbers.steps == [*range(steps[0]), *range(steps[1])]
    assert numbers.modes == [[True, False]] * EPOCHS
    assert numbers.read != numbers.read[:5] * (len(numbers.read) // 5 + 1)
    assert len(set(numbers.common + numbers.own)) == 2 * sum(steps)
    everyones = distributed.gather_objects(vars(numbers))
    assert everyones[0]["common"] == everyones[1]["common"]
    assert set(everyones[0]["own"]).isdisjoint(everyones[1]["own"])
    for row, size, count in zip(whole[2], SIZES, steps, strict=True):
        assert row["calls"] == 2 * count
        images = row["right"] * 4 * size * count
        assert 0 < images == round(images) < 4 * size * count
        assert row["mine"] == 0
    assert math.isnan(whole[2][0]["lost"])
    if not distributed.rank():
        for differs in "mine differs between ranks (0, 1)", "gets rank 0\n":
            assert said.getvalue().count(differs) == EPOCHS
        line = f"this loader has {steps[1]} steps per epoch, the one before {steps[0]}"
        assert line in said.getvalue()
    for dies_after in 2, steps[0] + 1:
        with contextlib.redirect_stdout(said), contextlib.suppress(Killed):
            train(tmp_path / "resumed", dies_after)
    if not distributed.rank():
        assert "resuming at step 2; loop variables, enumerate and zip start over" in (
            said.getvalue()
        )
    again, resumed, _ = train(tmp_path / "resumed")
    assert vars(again) == vars(numbers)
    for history in whole[2], resumed[2]:
        for row in history:
            for name in "img_per_s", "train_seconds", "data_wait":
                row.pop(name, None)
    assert samples.checksum(resumed) == samples.checksum(whole)


def take_step(run: ddpkit.Run, model: nn.Module, images: Tensor) -> Tensor:
    """Return the loss of an optimizer step, which is not counted yet."""
    loss = model(images).square().mean()
    loss.backward()
    run.optimizer.step()
    return loss


def in_evaluation(run: ddpkit.Run, model: nn.Module) -> None:
    model.eval()
    for _, batches in run.steps(run.train_loader, model):
        for images, _ in batches:  # one in a step
            loss = take_step(run, model, images)
        run.end_step(loss, torch.tensor(2.0))


def a_loop_over_the_loader(run: ddpkit.Run, model: nn.Module) -> None:
    for images, _ in run.train_loader:
        run.end_step(take_step(run, model, images), torch.tensor(2.0))


def no_steps(run: ddpkit.Run, model: nn.Module) -> None:
    for images, _ in run.train_loader:
        take_step(run, model, images)
    run.end_epoch({"val_loss": 1.0})


def evaluation_of_other_weights(run: ddpkit.Run, model: nn.Module) -> None:
    """As of an average that is swapped in for it."""
    for _, batches in run.steps(run.train_loader, model):
        for images, _ in batches:
            loss = take_step(run, model, images)
        run.end_step(loss, torch.tensor(2.0))
    run.means()
    with torch.no_grad():
        run.model[1].weight.mul_(2)
        for _ in ddpkit.eval_batches(run.val_loader, run.model):
            pass
        run.model[1].weight.div_(2)
    run.end_epoch({"val_loss": 1.0})


def a_model_in_place_of_the_loader(run: ddpkit.Run, model: nn.Module) -> None:
    run.steps(model)


def evaluation_of_training_batches(run: ddpkit.Run, model: nn.Module) -> None:
    next(ddpkit.eval_batches(run.train_loader, model))


MISUSES = [
    (in_evaluation, "loop.end_step", "eval mode"),
    (a_loop_over_the_loader, "loop.end_step", "outside the loop over run.steps"),
    (no_steps, "loop.end_epoch", "without a loop over run.steps"),
    (evaluation_of_other_weights, "loop.end_epoch", "with the weights that are saved"),
    (
        a_model_in_place_of_the_loader,
        "other_loaders.init",
        "run.steps(train_loader, ddp_model)",
    ),
    (
        evaluation_of_training_batches,
        "sources.eval_batches",
        "ddpkit.val_loader(train_set",
    ),
]


def tiny(
    folder_path: Path,
    epochs: int = 1,
    best: Any = "val_loss",
    parts: Callable[[torch.optim.Optimizer], dict] = lambda sgd: {"optimizer": sgd},
    lr: float = 0.01,
    data: Any = None,
) -> tuple[ddpkit.Run, nn.Module]:
    draw_nothing()
    torch.manual_seed(0)
    folder = ddpkit.RunFolder(folder_path)
    folder.find_checkpoint()
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    how = {"classes": CLASSES, "workers": 0}
    run = ddpkit.Run(
        folder,
        data or ddpkit.train_loader(Points(), 2, **how),
        ddpkit.val_loader(Points(), 2, **how),
        CLASSES,
        model=net,
        report=ddpkit.Reporter(folder_path, epochs, CLASSES),
        best=best,
        **parts(torch.optim.SGD(net.parameters(), lr)),
    )
    return run, DistributedDataParallel(net)


class ByHand(torch.optim.Optimizer):
    """Around another one, as on many web pages: it does not call Optimizer.__init__."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups
        self.state = inner.state
        self.defaults = inner.defaults

    def step(self, _: Any = None) -> None:
        self.inner.step()

    def state_dict(self) -> dict:
        return self.inner.state_dict()


@on_ranks(2)
def test_misuses_of_the_loops(tmp_path: Path) -> None:
    for number, (misuse, code, words) in enumerate(MISUSES):
        run, model = tiny(
            tmp_path / str(number), parts=lambda sgd: {"optimizer": ByHand(sgd)}
        )
        with refusal(code, words), run:
            misuse(run, model)


@on_ranks(1)
def test_a_loss_behind_the_criterion() -> None:
    """What is set on the criterion is set on the loss that has it."""
    outputs = torch.randn(4, 3)
    targets = torch.tensor([0, 1, 2, 1])
    criterion = ddpkit.Criterion(nn.CrossEntropyLoss(), "abc")
    criterion.label_smoothing = 0.5
    criterion.ignore_index = 1
    smooth = nn.CrossEntropyLoss(label_smoothing=0.5, ignore_index=1, reduction="sum")
    assert torch.allclose(criterion(outputs, targets), smooth(outputs, targets))
    assert criterion.count(targets) == 2
    criterion.reduction = "sum"
    assert torch.allclose(criterion(outputs, targets), smooth(outputs, targets))
    criterion.compile(backend="eager")  # which sets what each module has
    assert torch.allclose(criterion(outputs, targets), smooth(outputs, targets))
    criterion.mine = 1
    assert criterion.eval().mine == 1
    assert not criterion.training and not criterion.loss.training


def unfreeze(folder: Path, epochs: int) -> tuple[dict, dict]:
    """Unfreezes a layer in the second epoch: its weights are a group of their own then."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD(net[1].parameters(), 0.1, 0.9)
    checkpoints = ddpkit.Checkpoints(folder, net=net, optimizer=optimizer)
    for epoch in checkpoints.epochs(epochs):
        net[0].requires_grad_(epoch >= 1)
        if epoch == 1:
            optimizer.add_param_group({"params": net[0].parameters(), "lr": 0.01})
        for _ in checkpoints.steps(range(3), net):
            net(torch.randn(4, 2)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return net.state_dict(), optimizer.state_dict()


@on_ranks(1)
def test_a_group_that_was_added(tmp_path: Path) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        whole = unfreeze(tmp_path / "whole", 4)
        for epochs in 1, 2, 4:
            again = unfreeze(tmp_path / "stopped", epochs)
    assert samples.checksum(again) == samples.checksum(whole)
    assert said.getvalue().count("1 parameter group(s), added") == 1


def every_second(folder: Path, dies_at: int = -1) -> tuple[list, list[bool]]:
    """Evaluates in epochs 2 and 4; the bar is one of tqdm."""
    run, model = tiny(folder, 4, ("top1", "max"))
    best = []
    with run:
        for epoch in range(run.epoch, 4):
            model.train()
            for step, batches in run.steps(tqdm(run.train_loader), model):
                for images, _ in batches:
                    loss = take_step(run, model, images)
                run.optimizer.zero_grad()
                run.end_step(loss.detach(), torch.tensor(2.0))
                if (epoch, step) == (dies_at, 1):
                    run.save()
                    raise Killed
            row = run.means()
            if epoch % 2:
                for _ in ddpkit.eval_batches(run.val_loader, run.model):
                    pass
                row["top1"] = 0.5 - 0.1 * epoch
            best.append(run.end_epoch(row, is_evaluated=epoch % 2 == 1))
    rows = [
        {k: row[k] for k in ("train_loss", "top1") if k in row} for row in run.history
    ]
    return rows, best


@on_ranks(2)
def test_epochs_that_are_not_evaluated(tmp_path: Path) -> None:
    """They are never the best, in a run that goes on, too; and tqdm's loader is that within."""
    rows, best = every_second(tmp_path / "whole")
    assert [len(row) for row in rows] == [1, 2, 1, 2]
    assert best == [False, True, False, False]
    for dies_at in 0, 2:
        with contextlib.suppress(Killed):
            every_second(tmp_path / "stopped", dies_at)
    assert every_second(tmp_path / "stopped") == (rows, best[2:])
    assert torch.load(tmp_path / "whole/best.pt", weights_only=True)["epoch"] == 2


def scheduled(optimizer: torch.optim.Optimizer) -> dict:
    """A schedule by steps, and one of SWA."""
    return {
        "optimizer": optimizer,
        "scheduler": LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        "swa": SWALR(optimizer, 0.02, anneal_epochs=2),
    }


def rates(folder: Path, epochs: int, lr: float = 0.1) -> list[float]:
    """Those of each step: of a schedule, from epoch 1 on of half its rates, then of SWA."""
    run, model = tiny(folder, epochs, parts=scheduled, lr=lr)
    optimizer = run.optimizer
    scheduler = run.parts["scheduler"]
    found = []
    with run:
        for epoch in range(run.epoch, epochs):
            for _, batches in run.steps(run.train_loader, model):
                for images, _ in batches:
                    loss = take_step(run, model, images)
                if epoch == 1:
                    scheduler.base_lrs = [0.08]
                optimizer.zero_grad()
                if epoch < 2:
                    scheduler.step()
                run.end_step(loss.detach(), torch.tensor(2.0))
                found.append(optimizer.param_groups[0]["lr"])
            if epoch >= 2:
                run.parts["swa"].step()
            model.eval()
            run.end_epoch({**run.means(), "val_loss": 1.0})
            model.train()
    return found


@on_ranks(1)
def test_rates_that_the_loop_sets(tmp_path: Path) -> None:
    """By another scheduler, and by other base rates, hold in a run that goes on."""
    whole = rates(tmp_path / "whole", 5)
    again = []
    for epochs in range(1, 6):
        again += rates(tmp_path / "stopped", epochs)
    assert again == whole
    rates(tmp_path / "faster", 2)
    # a flag of now wins
    assert rates(tmp_path / "faster", 3, lr=0.2)[0] == 0.2 / (1 + 2 * 6)


def orders(folder: Path, epochs: int) -> list[list]:
    """Of two loaders that are read side by side."""
    how = {"workers": 0}
    loaders = [ddpkit.train_loader(range(12), 2, seed=seed, **how) for seed in (1, 2)]
    found = []
    checkpoints = ddpkit.Checkpoints(folder)
    for _ in checkpoints.epochs(epochs):
        pairs = zip(*loaders, strict=True)
        found.append(
            [[each.tolist() for each in pair] for pair in checkpoints.steps(pairs)]
        )
    return found


@on_ranks(2)
def test_loaders_side_by_side(tmp_path: Path) -> None:
    """Each epoch has another order, which a run that goes on has, too."""
    whole = orders(tmp_path / "whole", 3)
    assert whole[0] != whole[1] != whole[2]
    again = [*orders(tmp_path / "stopped", 1), *orders(tmp_path / "stopped", 3)]
    assert again == whole


class ByDot(torch.optim.SGD):
    """Its rate depends on a sum by BLAS, as Prodigy's does."""

    @torch.no_grad()
    def step(self, _: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                drawn = torch.dot(weight.grad.flatten(), weight.flatten()).item()
                group["lr"] += 1e-3 * abs(drawn)
        super().step()


def of_sums(folder: Path, dies_after: int = -1) -> dict:
    torch.manual_seed(0)
    sizes = 7, 333, 129, 1021, 5
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    net = nn.Sequential(*layers)
    optimizer = ByDot(net.parameters(), 1e-3)
    checkpoints = ddpkit.Checkpoints(folder, save_every=1, net=net, optimizer=optimizer)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    for _ in checkpoints.epochs(1):
        for _ in checkpoints.steps(range(8), model):
            model(torch.randn(16, 7)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if checkpoints.step == dies_after:
                raise Killed
    return net.state_dict()


@pytest.mark.parametrize("ranks", [1, 2])
def test_sums_that_follow_addresses(tmp_path: Path, ranks: int) -> None:
    """The gradients of a run that goes on lie where they lay: a sum by BLAS has the same bits."""

    @on_ranks(ranks)
    def act() -> None:
        whole = of_sums(tmp_path / "whole")
        for dies_after in 2, 5:
            with contextlib.suppress(Killed):
                of_sums(tmp_path / "stopped", dies_after)
        assert samples.checksum(of_sums(tmp_path / "stopped")) == samples.checksum(
            whole
        )

    act()


@on_ranks(1)
def test_what_is_changed_in_an_epoch(tmp_path: Path) -> None:
    """A run that goes on in a later epoch says which weights, and which transform, it lacks."""

    process.project = lambda: Path(__file__).parent

    class Data(Points):
        def __init__(self) -> None:
            self.transform: Any = None

    def run(epochs: int) -> None:
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        data = Data()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        checkpoints = ddpkit.Checkpoints(tmp_path, net=net, optimizer=optimizer)
        for epoch in checkpoints.epochs(epochs):
            if epoch == 1:
                net[0].requires_grad_(False)
                data.transform = nn.Threshold(0.1, 0.2)
            for _ in checkpoints.steps(range(3), net):
                net(torch.randn(4, 2)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        run(3)
        assert "requires_grad" not in said.getvalue()
        run(4)
    assert "data.transform, net.requires_grad not restored" in said.getvalue()


class Views(Points):
    """Two views of an image, uint8, with the label between them."""

    def __getitem__(self, index: int) -> tuple:
        image = np.full((2, 2, 3), index, np.uint8)
        return image, index % 2, torch.from_numpy(image).permute(2, 0, 1)


@on_ranks(1)
def test_a_second_view() -> None:
    """It is normalised as the first is."""
    for loader in (
        ddpkit.train_loader(Views(), 4, classes=CLASSES, workers=0),
        ddpkit.val_loader(Views(), 4, classes=CLASSES, workers=0),
    ):
        for first, _, second, *_ in loader:
            assert first.dtype == second.dtype == torch.float32
            assert torch.equal(first, second)


@on_ranks(1)
def test_a_scheduler_before_the_optimizer(tmp_path: Path) -> None:
    """torch says so, as without ddpkit."""
    ddpkit.configure(torch.device("cpu"), 0)
    run, model = tiny(tmp_path, parts=scheduled)
    with run, pytest.warns(UserWarning, match="Detected call of `lr_scheduler.step"):
        for _, batches in run.steps(run.train_loader, model):
            for images, _ in batches:
                run.parts["scheduler"].step()
                loss = take_step(run, model, images)
                run.optimizer.zero_grad()
            run.end_step(loss.detach(), torch.tensor(2.0))
            break


class Share(Points):
    """This rank's points, of which the second rank has two less."""

    def __init__(self) -> None:
        self.num_replicas = distributed.world_size()
        self.rank = distributed.rank()

    def __len__(self) -> int:
        return 10 - 2 * self.rank

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return super().__getitem__(2 * index + self.rank)


def of_shares(folder: Path, dies_at: int = -1) -> tuple[dict, float]:
    loader = DataLoader(Share(), 2, shuffle=True)
    run, model = tiny(folder, 2, data=loader)
    with run:
        for _ in range(run.epoch, 2):
            for _, batches in run.steps(loader, model):
                for images, _ in batches:
                    loss = take_step(run, model, images)
                run.optimizer.zero_grad()
                run.end_step(loss.detach(), torch.tensor(2.0))
                if run.step == dies_at:
                    run.save()
                    raise Killed
            means = run.means()
            run.model.eval()
            run.end_epoch({**means, "val_loss": 1.0})
            run.model.train()
    return run.model.state_dict(), means["train_loss"]


@on_ranks(2)
def test_shares_of_unequal_ranks(tmp_path: Path) -> None:
    """All ranks go on in the same step, though their data differ from those of a checkpoint."""
    whole = of_shares(tmp_path / "whole")
    for dies_at in 2, 6:
        with contextlib.suppress(Killed):
            of_shares(tmp_path / "stopped", dies_at)
    assert samples.checksum(of_shares(tmp_path / "stopped")) == samples.checksum(whole)


class Halved:
    """A schedule that is an object: the loop changes it."""

    scale = 1.0

    def __call__(self, step: int) -> float:
        return self.scale / (step + 1)


def test_a_schedule_that_is_an_object() -> None:
    """It resumes as it was, as torch's own load_state_dict() has it."""
    rates = []
    saved: dict = {}
    for is_resumed in False, True:
        optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)
        scheduler = LambdaLR(optimizer, Halved())
        made = [0.1]
        if is_resumed:
            states.follow(scheduler, 3, saved, made)
        for step in range(3 * is_resumed, 6):
            if step == 3 and not is_resumed:
                saved = copy.deepcopy(scheduler.state_dict())
            optimizer.step()
            scheduler.step()
            if step == 1:
                scheduler.lr_lambdas[0].scale = 0.5
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.1 * (0.5 / 7)] * 2


class Remembering(nn.Module):
    """A loss with a state that is no tensor, by torch's own way."""

    seen = 0

    def get_extra_state(self) -> dict:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict) -> None:
        self.seen = state["seen"]


def test_a_loss_with_extra_state() -> None:
    loss = Remembering()
    state = LossState(loss)
    assert state.state_dict() == {}
    loss.seen = 3
    saved = state.state_dict()
    loss.seen = 0
    state.load_state_dict(saved)
    assert loss.seen == 3
    loss.register_buffer("later", torch.ones(2))  # as of a loss that is lazy
    assert list(state.state_dict()) == ["later", "_extra_state"]
