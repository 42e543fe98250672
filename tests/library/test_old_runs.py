"""A run that 2.0 has stopped in the middle of an epoch goes on, to the bit.

old_runs/ has what 2.0 left: the same loops on two ranks, killed in the second epoch, and what they
end with if they are not. All numbers are sums of powers of two, so that no processor rounds them.
"""

import random
import shutil
from pathlib import Path

import pytest
import torch
from ranks import draw_nothing, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import ddpkit
from ddpkit.data import samples
from ddpkit.ranks import distributed

OLD = Path(__file__).with_name("old_runs")
EPOCHS = 3
CLASSES = ["a", "b"]


class Points(Dataset):
    """Float images, (3, 2, 2), of a number each."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((3, 2, 2), index / 64), index % 2


def network() -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    for weight in net.parameters():
        nn.init.zeros_(weight)
    return net


def linear(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - 0.5 * outputs[:, 1]).mean()


def noise() -> float:
    """Of all generators, such as a step draws it."""
    drawn = random.getrandbits(3) + torch.randint(8, ()).item()
    return drawn / 8


def with_checkpoints(folder: Path) -> list:
    torch.manual_seed(0)
    net = network()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.125)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = ddpkit.train_loader(Points(), 4, workers=0)
    checkpoints = ddpkit.Checkpoints(
        folder, save_every=3, model=net, optimizer=optimizer, scheduler=scheduler
    )
    for _ in checkpoints.epochs(EPOCHS):
        for images, targets in checkpoints.steps(loader, model):
            linear(model(images) * noise(), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    return [net.state_dict(), optimizer.state_dict(), scheduler.state_dict()]


def with_run(folder_path: Path) -> list:
    draw_nothing()
    torch.manual_seed(0)
    folder = ddpkit.RunFolder(folder_path)
    folder.find_checkpoint()
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.125)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    how = {"classes": CLASSES, "workers": 0}
    criterion = ddpkit.Criterion(linear, CLASSES, "mean")
    run = ddpkit.Run(
        folder,
        ddpkit.train_loader(Points(), 4, **how),
        ddpkit.val_loader(Points(), 4, **how),
        CLASSES,
        model=net,
        criterion=criterion,
        optimizer=optimizer,
        scheduler=scheduler,
        report=ddpkit.Reporter(folder_path, EPOCHS, CLASSES),
        save_every=3,
        best="val_loss",
    )
    world_size = distributed.world_size()
    with run:
        model = DistributedDataParallel(net)
        for epoch in range(run.epoch, EPOCHS):
            for _, batches in run.steps(run.train_loader, model):
                count = sum(criterion.count(targets) for targets in batches.targets)
                count = distributed.reduce_tensor(count)
                for images, targets in batches:
                    loss = criterion(model(images) * noise(), targets)
                    loss = loss * world_size / count
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.end_step(loss, count)
            means = run.means()
            net.eval()
            run.end_epoch({**means, "val_loss": 1 / (epoch + 1)})
            net.train()
            scheduler.step()
    losses = [row["train_loss"] for row in run.history]
    return [net.state_dict(), optimizer.state_dict(), scheduler.state_dict(), losses]


LOOPS = {"checkpoints": with_checkpoints, "run": with_run}


@pytest.mark.parametrize("name", LOOPS)
@on_ranks(2)
def test_a_run_of_version_2(tmp_path: Path, name: str) -> None:
    resumed = tmp_path / "resumed"
    with ddpkit.rank_zero_first():
        resumed.mkdir(exist_ok=True)
        shutil.copy(OLD / f"{name}.pt", resumed / "last.pt")
    then = torch.load(OLD / f"{name}_end.pt", weights_only=True)
    found = LOOPS[name](resumed)
    if name == "run":  # the losses, which processors add up in orders of their own
        assert found.pop() == pytest.approx(then.pop(), rel=1e-6)
    assert samples.checksum(found) == samples.checksum(then)
    assert found[0]["1.weight"].any()
