"""Virtual ranks: the same bits on 1, 2 and 4 processes, also if their number changes on the way."""

import json
import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import virtual_networks
from generated import (
    Done,
    Project,
    after_step,
    both_but_one_in_soak,
    both_tasks,
    die,
    refusal,
    rows,
)
from ranks import on_ranks
from torch import nn

import ddpkit
from ddpkit.data import samples
from ddpkit.ranks import distributed, virtual
from ddpkit.vision import reporting

FLAGS = "--virtual-ranks 4 --epochs 2 --batch-size 2 --save-every 1 --ema 0.9"
OF_TASK = {
    "classification": "--augment mixup,cutmix,color --freeze-backbone 1",
    "segmentation": "--clip-grad-norm 1 --class-weights auto --augment color",
}
# What differs with the number of processes, with what is done anew, or by chance
OF_PROCESSES = {"ranks", "totals", "of_ranks", "args", "variables"}
OF_SPEED = {"img_per_s", "train_seconds", "data_wait"}


def patched(stop: int) -> Callable[[], None]:
    """Write the worst images of best.pt in place of drawing them; die after step `stop`, if any."""

    def note(report: Any, _: object, worst: Any, *__: object) -> None:
        if distributed.is_rank_zero():
            (report.folder / "worst").write_text(repr(worst))

    def patch() -> None:
        reporting.Reporter.write_images = note
        if stop:
            after_step(stop, die)()

    return patch


def ends(out: Path) -> tuple:
    """Checksums of all that a run has come to, and the rows of metrics.csv in each digit."""
    state = torch.load(out / "last.pt", weights_only=True)
    del state["history"]
    found = {
        name: samples.checksum(each)
        for name, each in state.items()
        if name not in OF_PROCESSES
    }
    table = []
    for row in rows(out):
        table.append({name: row[name] for name in row.keys() - OF_SPEED})
    best = torch.load(out / "best.pt", weights_only=True)
    of_best = samples.checksum([best[name] for name in ("model", "epoch", "best")])
    return found, table, of_best, (out / "worst").read_text()


@pytest.mark.parametrize("project", both_but_one_in_soak, indirect=True)
def test_any_number_of_processes(project: Project, few: Path, tmp_path: Path) -> None:
    """With BatchNorm, averages, mixup and loader workers; killed, and resumed on others."""

    def train(name: str, on: int, *more: object, stop: int = 0) -> Done:
        flags = f"{FLAGS} {OF_TASK[project.task]}".split()
        out = tmp_path / name
        return project.train(few, out, flags, *more, on=on, patch=patched(stop))

    train("four", 4).ok()
    expected = ends(tmp_path / "four")
    train("one", 1, "--workers", 2).ok()
    assert ends(tmp_path / "one") == expected
    # in the first epoch, and in the second
    for step, on in (2, 2), (3, 4):
        killed = train("changing", on, stop=step)
        assert killed.statuses == [-9] * on
    said = train("changing", 1).ok().out
    assert ends(tmp_path / "changing") == expected
    assert "rounding differ" not in said  # as other ranks do otherwise


@pytest.mark.soak
@both_tasks
def test_random_interruptions(
    project: Project, few: Path, tmp_path: Path, chance: random.Random
) -> None:
    """Killed at any step, and started again on any number of processes: twenty times."""

    def train(name: str, on: int, stop: int = 0) -> Done:
        flags = f"{FLAGS} {OF_TASK[project.task]} --epochs 14".split()
        out = tmp_path / name
        return project.train(few, out, flags, on=on, patch=patched(stop))

    train("whole", 4).ok()
    for step in range(2, 42, 2):
        on = chance.choice((1, 2, 4))
        stop = step + chance.randrange(2)
        killed = train("stopped", on, stop=stop)
        assert killed.statuses == [-9] * on
    train("stopped", chance.choice((1, 2, 4))).ok()
    assert ends(tmp_path / "stopped") == ends(tmp_path / "whole")


SCRIPT = '''
import os, random, signal, sys
import numpy, torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, dropout
from torch.utils.data import TensorDataset
import ddpkit

class Net(nn.Module):
    """With BatchNorm, a running state of its own in the outputs, and weights of some steps."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.last = nn.Linear(16, 3)
        self.now_and_then = nn.Linear(16, 3)
        self.never = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        found = self.first(x)
        logits = self.last(dropout(found, 0.2, self.training))
        if x.mean() > 0.5:
            logits = logits + self.now_and_then(found)
        self.mean.mul_(0.9).add_(logits.detach().mean(0), alpha=0.1)
        return {"x": x, "logits": logits - self.mean}

if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
data = TensorDataset(
    torch.rand(100, 8, generator=generator), torch.randint(3, (100,), generator=generator)
)
loader = ddpkit.train_loader(data, 2, virtual_ranks=4, workers=0)
net = Net()
model = ddpkit.VirtualRanks(net, 4)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
checkpoints = ddpkit.Checkpoints("run", model=model, optimizer=optimizer)
for epoch in checkpoints.epochs(3):
    for batches in checkpoints.steps(loader, model):
        scale = random.random()  # on all processes alike
        for inputs, labels in batches:
            inputs = inputs + 0.1 * numpy.random.rand() + checkpoints.own.random()
            loss = cross_entropy(model(inputs)["logits"], labels) * scale
            if checkpoints.step == int(sys.argv[1]) and checkpoints.rank == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.01 * (0.5 + random.random())
'''


def test_a_script_of_ones_own(tmp_path: Path) -> None:
    """It is stopped within an epoch on four processes, goes on on two, and ends on one."""
    (tmp_path / "script.py").write_text(SCRIPT)

    def start(name: str, on: int, stop: int = -1) -> list[int]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        words = [str(stop)]
        output = folder / "printed"
        pids = ranks.start(on, str(tmp_path / "script.py"), words, output, folder, int)
        statuses = ranks.wait(pids)
        assert not ranks.said(output)[1]
        return statuses

    found = []
    for on in 1, 2, 4:
        assert start(f"{on}", on) == [0] * on
        found.append(ends_of_script(tmp_path / f"{on}"))
    assert start("changing", 4, 7) == [75] * 4
    assert start("changing", 2, 20) == [75] * 2
    assert start("changing", 1) == [0]
    found.append(ends_of_script(tmp_path / "changing"))
    assert found == found[:1] * 4
    state = torch.load(tmp_path / "1" / "run" / "last.pt", weights_only=True)
    # of which the weights that no rank has used know nothing
    names = state["parts"]["optimizer"]["state"].keys()
    assert any("now_and_then" in name for name in names)
    assert not any("never" in name for name in names)


def ends_of_script(folder: Path) -> dict[str, int]:
    state = torch.load(folder / "run" / "last.pt", weights_only=True)
    return {
        name: samples.checksum(state[name]) for name in ("parts", "step", "of_ranks")
    }


def test_any_network(tmp_path: Path) -> None:
    """Of eight virtual ranks: what a case has come to is the same on any number of processes."""

    def train(only: str = "") -> None:
        count = distributed.world_size()
        found = virtual_networks.run_cases(tmp_path / str(count), only)
        if distributed.is_rank_zero():
            (tmp_path / f"{count}.json").write_text(json.dumps(found))

    on_ranks(1, 2, 4)(train)()
    on_ranks(8)(train)(only="BatchNorm")
    expected, *others = [
        json.loads((tmp_path / f"{count}.json").read_text()) for count in (1, 2, 4, 8)
    ]
    assert len(set(expected.values())) == len(expected) > len(others[-1]) > 1
    for found in others:
        assert found == {name: expected[name] for name in found}


@on_ranks(2)
def test_what_cannot_be(tmp_path: Path) -> None:
    """Numbers that have no tree, networks that join batches, loaders of other ranks."""
    for ranks_, allowed in (3, "1, 3"), (6, "1, 3, 6"), (12, "1, 3, 6, 12"):
        with refusal(
            "virtual.share_of", f"{ranks_} virtual ranks", f"processes: {allowed}"
        ):
            virtual.share_of(ranks_)
    assert list(virtual.share_of(8)) == [
        *range(4 * torch.distributed.get_rank(), 4 * torch.distributed.get_rank() + 4)
    ]
    with refusal("virtual.init", "SyncBatchNorm"):
        ddpkit.VirtualRanks(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), 2)
    net = nn.Linear(2, 2)
    data = [(torch.ones(2), 0)] * 16
    loader = ddpkit.train_loader(data, 2, virtual_ranks=4, workers=0)
    checkpoints = ddpkit.Checkpoints(tmp_path / "run", net=net)
    for network in (
        nn.parallel.DistributedDataParallel(net),
        ddpkit.VirtualRanks(net, 2),
    ):
        with refusal("resuming.find_virtual", "virtual_ranks=4"):
            next(iter(checkpoints.steps(loader, network)))


@on_ranks(2)
def test_the_loop_over_batches(tmp_path: Path) -> None:
    """Gradients are the mean over all virtual ranks; where they are not, it is refused."""
    data = [(torch.full((1,), number % 4.0), 0) for number in range(16)]
    loader = ddpkit.train_loader(data, 1, virtual_ranks=4, workers=0)
    net = nn.Linear(1, 1, bias=False)
    model = ddpkit.VirtualRanks(net, 4)
    other = ddpkit.VirtualRanks(nn.Linear(1, 1), 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    checkpoints = ddpkit.Checkpoints(tmp_path / "run", net=net, optimizer=optimizer)
    steps = iter(checkpoints.steps(loader, model))
    batches = next(steps)
    for time in 1, 2:  # the second adds to the first, as without zero_grad()
        seen = []
        for images, _ in batches:
            seen.append(images.item())
            model(images).sum().backward()
        mean = sum(map(sum, distributed.gather_objects(seen))) / 4
        assert net.weight.grad.item() == time * mean
    with refusal("virtual.forward", "outside the loop"):
        model(torch.ones(1, 1))
    for images, _ in batches:
        with refusal("virtual.forward", "pass steps() all models"):
            other(images)
        model(images).sum().backward()
        with refusal("virtual_steps.check_ended", "after the whole loop"):
            optimizer.step()
        break
    with refusal("virtual_steps.check_ended", "after a break"):
        next(steps)


@on_ranks(1)
def test_sparse_gradients(tmp_path: Path) -> None:
    """They are added as dense ones."""
    net = nn.Embedding(4, 2, sparse=True)
    loader = ddpkit.train_loader([torch.tensor(1)] * 4, 1, virtual_ranks=2, workers=0)
    model = ddpkit.VirtualRanks(net, 2)
    checkpoints = ddpkit.Checkpoints(tmp_path / "run", net=net)
    for numbers in next(iter(checkpoints.steps(loader, model))):
        model(numbers).sum().backward()
    assert net.weight.grad.tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]


@on_ranks(1)
def test_sums_are_rounded_once() -> None:
    from ddpkit.run.progress import Exact

    for numbers in [1e16, 1.0, -1e16, 1e-300], [1e16, -1e16, 1e-300, 1.0]:
        total = Exact()
        for number in numbers:
            total.include(torch.tensor(number, dtype=torch.float64))
        assert total.finite_sum() == 1 + Fraction(1e-300)
    total.include(torch.tensor(float("nan")))
    total.finite_sum()
    assert total.lost != total.lost
