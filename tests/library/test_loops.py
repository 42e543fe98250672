"""Loops as people write them, with Checkpoints: stopped and killed, they end with the same bits."""

import collections
import contextlib
import copy
import itertools
import math
import os
import queue
import random
import re
import signal
import sys
import textwrap
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from generated import ROOT, Command, refusal, wait_for

import ddpkit
from ddpkit.data import samples
from ddpkit.ranks import distributed, process, protocol, stopping, watch
from ddpkit.run import checkpoint, first_steps, unsaved

SCRIPT = """
import os, random, signal, sys, time
import numpy, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
import ddpkit

way = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
random.seed(0)
numpy.random.seed(0)
torch.manual_seed(0)
points = torch.randn(72, 4)
data = TensorDataset(points, points.sum(1))
loader = ddpkit.train_loader(data, 4, workers=0)
plain = DataLoader(data, 4, shuffle=True)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)

def step(batch):
    inputs, targets = batch
    loss = (model(inputs)[:, 0] - targets).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
"""
ENDS = """
numbers = vars(numbers) if "numbers" in dir() else {}
torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), **numbers}, f"end{rank}")
"""
WAYS = {
    # What all ranks draw alike decides a rate, also in a step; own numbers of each rank do not.
    "common numbers": """
checkpoints = ddpkit.Checkpoints("run", model=model, optimizer=optimizer)
numbers = checkpoints.numbers(drawn=[], common=[], own=[])
others, more = checkpoints.forever(loader), checkpoints.forever(plain)
for epoch in checkpoints.epochs(4):
    scale = random.choice([0.5, 1.0, 1.5])
    for inputs, targets in checkpoints.steps(loader, model):
        inputs = inputs + 0.1 * next(others)[0] + 0.1 * next(more)[0]
        size = random.choice([1.0, 1.25]) * float(torch.rand(())) * numpy.random.rand()
        numbers.common.append(checkpoints.common.random())
        numbers.own.append(checkpoints.own.random())
        step((inputs * scale * size, targets))
        numbers.drawn.append(size)
    if random.random() < 0.5:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    numbers.drawn += [torch.rand(()).item(), numpy.random.rand(), random.random()]
assert len(set(numbers.drawn)) == len(numbers.drawn)
""",
    # An evaluation that a signal cannot wait for, in the first epoch and later.
    "a long evaluation": """
checkpoints = ddpkit.Checkpoints("run", model=model, optimizer=optimizer)
for epoch in checkpoints.epochs(3):
    for batch in checkpoints.steps(loader, model):
        loss = step(batch)
    print("the last loss", loss)
    open(f"evaluates{epoch}", "w").close()
    if os.environ["AT"] == str(epoch):
        time.sleep(999)
""",
}


WAYS["unequal shares"] = """
share = torch.utils.data.Subset(data, range(rank, 72 - 8 * rank, 2))
checkpoints = ddpkit.Checkpoints("run", model=model, optimizer=optimizer)
for epoch in checkpoints.epochs(3):
    batches = checkpoints.steps(DataLoader(share, 4, shuffle=True), model)
    for batch in batches:
        step(batch)
    assert checkpoints.done == len(batches) == 8
"""
# The state of a communication hook, with the class of the page, or torch's own.
HOOKED = """
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
{}
wide = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 1))
net, model = wide, DDP(wide)
hook = {}(None, 2, start_powerSGD_iter=3, min_compression_rate=0.5)
model.register_comm_hook(hook, powerSGD_hook.powerSGD_hook)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
checkpoints = ddpkit.Checkpoints("run", model=model, optimizer=optimizer, {})
for epoch in checkpoints.epochs(2):
    for batch in checkpoints.steps(loader, model):
        step(batch)
"""
PAGE = (ROOT / "docs" / "own-script.md").read_text()
OF_PAGE = re.search(r"```python\n(class PowerSGD.*?)```", PAGE, re.DOTALL)
assert OF_PAGE
WAYS["saved hook"] = HOOKED.format(OF_PAGE[1], "PowerSGD", "hook=hook")
WAYS["torch's hook"] = HOOKED.format("", "powerSGD_hook.PowerSGDState", "")


def start(way: str, folder: Path, patch: ranks.Patch = int, at: int = -1) -> list[int]:
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(SCRIPT + WAYS[way] + ENDS)

    def begin() -> None:
        os.environ["AT"] = str(at)
        patch()

    return ranks.start(2, str(script), [way], folder / "printed", folder, begin)


def ends(folder: Path) -> list[int]:
    """Of each rank, a checksum of what it has in the end."""
    found = [torch.load(folder / f"end{rank}", weights_only=True) for rank in (0, 1)]
    assert samples.checksum(found[0]["net"]) == samples.checksum(found[1]["net"])
    return [samples.checksum(each) for each in found]


def test_random_numbers(tmp_path: Path) -> None:
    """Stopped by a signal to one rank, killed, stopped by one to all: as undisturbed."""
    way = "common numbers"
    whole = tmp_path / "whole"
    assert ranks.wait(start(way, whole)) == [0, 0], ranks.said(whole / "printed")
    out, _ = ranks.said(whole / "printed")
    assert "warning" not in out
    stopped = tmp_path / "stopped"
    stops = ranks.at_turn(4, signal.SIGTERM, 1)
    assert ranks.wait(start(way, stopped, stops)) == [75, 75]
    dies = ranks.at_turn(5, signal.SIGKILL, 0, 1)
    assert ranks.wait(start(way, stopped, dies)) == [-9, -9]
    stops = ranks.at_turn(17, signal.SIGTERM, 0, 1)
    assert ranks.wait(start(way, stopped, stops)) == [75, 75]
    pids = start(way, stopped)
    assert ranks.wait(pids) == [0, 0], ranks.said(stopped / "printed")
    out, _ = ranks.said(stopped / "printed")
    assert re.search(
        r"resuming at step \d+; loop variables, enumerate and zip start over",
        out,
    )
    assert ends(whole) == ends(stopped)


def test_a_communication_hook(tmp_path: Path) -> None:
    """PowerSGD's errors and factors differ by rank; a hook that is no part is named."""
    line = "PowerSGDState is not passed to Checkpoints(...) by name"
    whole = tmp_path / "whole"
    assert ranks.wait(start("saved hook", whole)) == [0, 0]
    out, _ = ranks.said(whole / "printed")
    assert line not in out
    stopped = tmp_path / "stopped"
    stops = ranks.at_turn(12, signal.SIGTERM, 1)
    assert ranks.wait(start("saved hook", stopped, stops)) == [75, 75]
    assert ranks.wait(start("saved hook", stopped)) == [0, 0]
    assert ends(whole) == ends(stopped)
    assert ranks.wait(start("torch's hook", tmp_path / "other")) == [0, 0]
    out, _ = ranks.said(tmp_path / "other" / "printed")
    assert out.count(line) == 1


def test_unequal_shares(tmp_path: Path) -> None:
    """Of 9 and 8 batches all ranks take 8, and none waits for the others; also resumed."""
    whole = tmp_path / "whole"
    assert ranks.wait(start("unequal shares", whole)) == [0, 0]
    stopped = tmp_path / "stopped"
    stops = ranks.at_turn(11, signal.SIGTERM, 1)
    assert ranks.wait(start("unequal shares", stopped, stops)) == [75, 75]
    assert ranks.wait(start("unequal shares", stopped)) == [0, 0]
    assert ends(whole) == ends(stopped)


def test_a_signal_in_a_long_evaluation(tmp_path: Path) -> None:
    """It is not waited for: status 75, and the last step is done once more."""
    way = "a long evaluation"

    def soon() -> None:
        protocol.GRACE_SECONDS = 2

    pids = start(way, tmp_path, soon, at=0)
    wait_for((tmp_path / "evaluates0").exists)
    os.kill(pids[1], signal.SIGTERM)
    assert ranks.wait(pids) == [75, 75]
    out, err = ranks.said(tmp_path / "printed")
    assert not err
    assert "saved at epoch 1, step 8; run the same command again to resume" in out
    state = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    assert (state["epoch"], state["done"]) == (0, 8)


def leave_late() -> None:
    """Have rank 1 leave the loop once rank 0, which holds the store, has ended."""
    remove_duty = watch.Watch.remove_duty
    stopping.ANSWER_SECONDS = 1

    def remove_late(self: watch.Watch, duty: watch.Duty) -> None:
        if os.environ["RANK"] == "1":
            with contextlib.suppress(dist.DistError):
                while True:
                    distributed.store().check([protocol.STOP])
                    time.sleep(0.05)
            time.sleep(2 * protocol.POLL_SECONDS)  # the thread sees it, too
        remove_duty(self, duty)

    watch.Watch.remove_duty = remove_late


def test_a_long_evaluation(tmp_path: Path) -> None:
    """Killed in it, in the first epoch and in the second: the last step is done once more."""
    way = "a long evaluation"
    whole = tmp_path / "whole"
    assert ranks.wait(start(way, whole, leave_late)) == [0, 0]
    killed = tmp_path / "killed"
    for at in 0, 1:
        pids = start(way, killed, at=at)
        wait_for((killed / f"evaluates{at}").exists)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert ranks.wait(pids) == [-9, -9]
        state = torch.load(killed / "run" / "last.pt", weights_only=True)
        assert (state["epoch"], state["done"]) == (at, 8)
    assert ranks.wait(start(way, killed)) == [0, 0], ranks.said(killed / "printed")
    assert "and 8 steps of the next" in ranks.said(killed / "printed")[0]
    assert ends(whole) == ends(killed)


@ranks.on_ranks(2)
def test_parts_of_each_rank(tmp_path: Path) -> None:
    """What has to be the same on all ranks is compared in each save; others are kept of each."""
    rank = distributed.rank()
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    checkpoints = ddpkit.Checkpoints(tmp_path / "run", net=net, optimizer=optimizer)
    numbers = checkpoints.numbers(place=rank, name="same")
    checkpoints.save()
    optimizer.param_groups[0]["lr"] = 0.1 + rank
    with refusal("states.compare_ranks", "optimizer"):
        checkpoints.save()
    optimizer.param_groups[0]["lr"] = 0.1
    with torch.no_grad():
        net.bias += rank
    with refusal("replicas.check_same", "bias"):
        checkpoints.save()
    again = ddpkit.Checkpoints(tmp_path / "run", net=net, optimizer=optimizer)
    numbers = again.numbers(place=5, name="", new=3)
    assert vars(numbers) == {"place": rank, "name": "same", "new": 3}
    with refusal("resuming.add", "numbers"):
        again.numbers(other=1)


class Sharded(torch.optim.SGD):
    """With the name that torch's has."""


class Split(torch.nn.Sequential):
    """Also."""


Sharded.__name__ = "ZeroRedundancyOptimizer"
Split.__name__ = "FullyShardedDataParallel"


def test_states_that_no_rank_has_whole(tmp_path: Path) -> None:
    """Refused when Checkpoints is made, not in the first save."""
    net = torch.nn.Linear(2, 2)
    with refusal("resuming.check_parts", "optimizer", "torch.distributed.checkpoint"):
        optimizer = Sharded(net.parameters(), 0.1)
        ddpkit.Checkpoints(tmp_path / "run", net=net, optimizer=optimizer)
    wrapper = torch.nn.Module()  # as Fabric's
    wrapper._original_module = net
    wrapper._forward_module = Split(net)
    wrapper.__class__ = type("_FabricModule", (torch.nn.Module,), {})
    with refusal("resuming.check_parts", "net", "FullyShardedDataParallel"):
        ddpkit.Checkpoints(tmp_path / "run", net=wrapper)
    assert not (tmp_path / "run").exists()


@ranks.on_ranks(2)
def test_a_sharded_network(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    with refusal("resuming.check_parts", "net", "DTensor"):
        ddpkit.Checkpoints(tmp_path / "run", net=net)


class Placed:
    """A loader that knows how far it is."""

    def __init__(self) -> None:
        self.at = 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[int]:
        while self.at < 5:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        self.at = saved["at"]


def test_a_loader_that_is_a_part(tmp_path: Path) -> None:
    """What is saved before the last step has that step's batch yet to come."""
    loader = Placed()
    checkpoints = ddpkit.Checkpoints(tmp_path / "run", loader=loader)
    for _ in checkpoints.epochs(1):
        for number in checkpoints.steps(loader):
            if number == 5:
                state = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    assert (state["done"], state["parts"]["loader"]) == (4, {"at": 4})


best_accuracy = 0


def test_a_global_number(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Of a function that declares it so, as torch's example of ImageNet does."""
    global best_accuracy
    checkpoints = ddpkit.Checkpoints(tmp_path / "run", net=torch.nn.Linear(2, 2))
    for epoch in checkpoints.epochs(2):
        for _ in checkpoints.steps(range(2)):
            pass
        best_accuracy = max(best_accuracy, epoch + 50)
    assert "warning: best_accuracy changed" in capsys.readouterr().out


def test_a_loop_has_a_length(tmp_path: Path) -> None:
    """That of a whole epoch, also when a part of it is done."""
    checkpoints = ddpkit.Checkpoints(tmp_path / "run", net=torch.nn.Linear(2, 2))
    for _ in checkpoints.epochs(1):
        steps = checkpoints.steps([1, 2, 3])
        assert len(steps) == 3
        assert list(steps) == [1, 2, 3]
        with pytest.raises(TypeError):
            len(checkpoints.steps(iter([1])))


class Killed(Exception):
    pass


# Another module of the project
augment = types.ModuleType("augment")
# whichever is there, in a folder
augment.__file__ = str(next(Path(__file__).parent.glob("old_runs/*")))


class Mean:
    """A running mean, as people write it."""

    __slots__ = ("value",)
    steps = 0  # of all

    def __init__(self) -> None:
        self.value = torch.zeros(2)


class Lazy:
    """As a library's object of settings that are not configured."""

    @property
    def __class__(self) -> type:
        raise RuntimeError("not configured")


LAZY = Lazy()


def delegating() -> Iterator[int]:
    yield from range(100)


def epoch_of_variables(checkpoints: ddpkit.Checkpoints, mean: Mean, dies: int) -> float:
    right = 0
    for _ in checkpoints.steps(range(6)):
        right += 1
        mean.value = 0.9 * mean.value + 0.1
        Mean.steps += 1
        if checkpoints.step == dies - 1:
            checkpoints.save()
        if checkpoints.step == dies:
            raise Killed
    return right / 6


def train_with_variables(folder: Path, dies: int = 0) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    optimizer.slow = torch.zeros(
        2
    )  # as Lookahead's, of which its state_dict has nothing
    checkpoints = ddpkit.Checkpoints(folder, net=net, optimizer=optimizer)
    numbers = checkpoints.numbers(best=0.0, mean=torch.zeros(2))
    same = Mean()
    same.value = numbers.mean
    generator = torch.Generator().manual_seed(1)
    draws = np.random.default_rng(0)
    mean = Mean()
    stage = 0
    scores: list[float] = []
    names = iter(torch.utils.data.DataLoader(range(100)))
    turns = itertools.count()
    again = itertools.cycle(range(3))
    chained = delegating()
    log = (folder / "log.txt").open("a")  # an iterator, too
    for epoch in checkpoints.epochs(4):
        size = 32 if epoch < 2 else 64
        assert size
        if epoch == 1:
            net[1].p = 0.5
        next(names)
        next(turns)
        next(again)
        next(chained)
        torch.rand(1, generator=generator)
        draws.random()
        augment.RNG.random()
        optimizer.slow += 1
        same.value += 1
        scores.append(epoch_of_variables(checkpoints, mean, dies))
        stage += 2
        log.write("an epoch")
        numbers.best += scores[-1]


@pytest.mark.parametrize(
    ("dies", "anew"),
    [
        (3, "Mean.steps again chained mean.value right turns"),  # in the first epoch
        # between epochs
        (
            12,
            "Mean.steps augment.RNG draws generator mean.value names net.1.p optimizer.slow "
            "scores stage",
        ),
        (
            15,
            "Mean.steps augment.RNG draws generator mean.value names net.1.p optimizer.slow "
            "again chained right scores stage turns",
        ),
    ],
)
def test_variables_start_anew(
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    dies: int,
    anew: str,
) -> None:
    """Those that a resume does not bring back are named: numbers, tensors, generators, attributes.

    What each epoch sets, or `numbers` has, is none.
    """
    monkeypatch.setattr(process, "project", lambda: Path(__file__).parent)
    monkeypatch.setitem(sys.modules, "augment", augment)
    augment.RNG = np.random.default_rng(0)
    Mean.steps = 0
    with pytest.raises(Killed):
        train_with_variables(tmp_path, dies)
    capsys.readouterr()
    augment.RNG = np.random.default_rng(0)
    Mean.steps = 0
    train_with_variables(tmp_path)
    said = re.findall("warning: (.*) not restored:", capsys.readouterr().out)
    assert set(", ".join(said).split(", ")) == set(anew.split())


class Place(NamedTuple):
    number: int = 0


class Own(dict):
    """As people write it, for attributes."""


class Meter(collections.deque):
    """The same, for a mean."""


class Normed(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("mean", torch.zeros(2), persistent=False)
        self.alpha = 0


def counting() -> Callable[..., None]:
    count = 0

    def call(*_: object) -> None:
        nonlocal count
        count += 1

    return call


def listing(values: list[int] = []) -> None:  # noqa: B006
    values.append(0)


class Drawing(torch.utils.data.DistributedSampler):
    """Its generator is seeded anew in each epoch; what it counts is nobody's."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__(range(8), 1, 0)
        self.generator = generator
        self.calls = 0

    def __iter__(self) -> Iterator[int]:
        self.calls += 1
        return iter(torch.randperm(8, generator=self.generator).tolist())


class Trainer:
    """No function has its Checkpoints as a variable."""

    def __init__(self, folder: Path) -> None:
        self.net = Normed()
        self.sgd = torch.optim.SGD(self.net.parameters(), 0.1)
        self.checkpoints = ddpkit.Checkpoints(folder, net=self.net, optimizer=self.sgd)
        self.n = 0

    def fit(self, dies: int = 0) -> None:
        net = self.net
        net.register_forward_hook(counting())
        self.sgd.register_step_pre_hook(counting())
        counted = counting()
        seeded = Drawing(torch.Generator())
        loader = torch.utils.data.DataLoader(
            range(8), sampler=Drawing(seeded.generator)
        )
        own = Own(n=0)
        place = Place()
        meter = Meter()
        waiting: queue.Queue[int] = queue.Queue()
        inner = 0
        large = 0.0  # beyond all times

        def regularize() -> None:
            nonlocal inner
            inner += 1

        for _ in self.checkpoints.epochs(3):
            anchor = net.weight.detach().clone()
            teacher = copy.deepcopy(net)
            began = time.perf_counter()
            total = began
            for _ in self.checkpoints.steps(range(4)):
                net(torch.ones(2)).sum().backward()
                self.sgd.step()
                self.sgd.zero_grad()
                assert list(loader)
                seeded.set_epoch(
                    len(list(torch.randperm(3, generator=seeded.generator)))
                )
                net.weight.data += 0.1 * anchor + 0.1 * teacher.weight.data
                net.mean += 1
                self.n += 1
                alpha = self.checkpoints.step
                net.alpha = alpha
                total += 1e12
                large += 1e12
                counted()
                listing()
                regularize()
                own["n"] += 1
                place = place._replace(number=place.number + 1)
                meter.append(1)
                waiting.put(1)
                if self.checkpoints.step == dies - 1:
                    self.checkpoints.save()
                if self.checkpoints.step == dies:
                    raise Killed
            assert time.perf_counter() > began
            assert total > began


def test_where_else_people_keep_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an object with the run, closures, hooks, defaults, containers; and of the weights."""
    monkeypatch.setattr(process, "project", lambda: Path(__file__).parent)
    trainer = Trainer(tmp_path)
    with pytest.raises(Killed):
        trainer.fit(6)
    capsys.readouterr()
    listing.__defaults__[0].clear()  # type: ignore[index]
    trainer = Trainer(tmp_path)
    trainer.fit()
    (said,) = re.findall("warning: (.*) not restored:", capsys.readouterr().out)
    named = (
        "anchor counted.count inner listing.defaults meter net.hooks net.mean own place"
    )
    own = "large loader.Drawing net.alpha total trainer.n trainer.net.alpha trainer.net.mean"
    own += " trainer.net.hooks"
    named += " teacher.weights teacher.alpha teacher.hooks teacher.mean waiting"
    hooks = "hooks of gradients and optimizers"
    assert set(said.split(", ")) == {*named.split(), *own.split(), hooks}


OF_A_REPOSITORY = {
    "pyproject.toml": "",
    "src/mine/trainer.py": """
        import random
        import torch
        from torch.nn.parallel import DistributedDataParallel
        import ddpkit

        SEEN = 0

        class Numbers(torch.utils.data.Dataset):
            def __init__(self):
                self.draws = random.Random(3)

            def __len__(self):
                return 8

            def __getitem__(self, index):
                return index + self.draws.random()

        class Trainer:
            def __init__(self, folder):
                network = torch.nn.Linear(1, 1)
                self.model = DistributedDataParallel(network)
                self.checkpoints = ddpkit.Checkpoints(folder, model=self.model)
                self.smooth = 0.0

            def fit(self, loader, dies):
                global SEEN
                for epoch in self.checkpoints.epochs(3):
                    for batch in self.checkpoints.steps(loader):
                        self.model(batch[:, None].float()).sum().backward()
                        SEEN += len(batch)
                        self.smooth += 1
                        if dies and self.checkpoints.step == 5:
                            self.checkpoints.save()
                        if dies and self.checkpoints.step == 6:
                            raise SystemExit
    """,
    "scripts/train.py": """
        import sys
        from pathlib import Path
        import torch

        sys.path.append(str(Path(__file__).parents[1] / "src"))
        from mine.trainer import Numbers, Trainer

        torch.distributed.init_process_group(
            "gloo", f"file://{sys.argv[1]}", rank=0, world_size=1
        )
        loader = torch.utils.data.DataLoader(Numbers(), 2)
        trainer = Trainer("run")
        trainer.fit(loader, dies=len(sys.argv) > 2)
    """,
}


def test_code_of_several_folders(tmp_path: Path) -> None:
    """Whatever of a repository a script imports is its own; what is seeded, or torch's, is not."""
    for name, text in OF_A_REPOSITORY.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    script = [sys.executable, "scripts/train.py"]
    own = {"trainer.smooth", "mine.trainer.SEEN"}
    for how in ["1", "dies"], ["2"]:  # in the second epoch
        done = Command(
            [*script, tmp_path / how[0], *how[1:]], tmp_path, PYTHONPATH=ROOT
        )
        out = done.end().ok().out
        (said,) = re.findall("warning: (.*) (?:not restored:|changed with the)", out)
        assert set(said.split(", ")) == own


def test_variables_that_change_with_the_epoch(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Named, with what keeps them, once; not what counts the epochs."""
    checkpoints = ddpkit.Checkpoints(tmp_path / "run", net=torch.nn.Linear(2, 2))
    net = checkpoints.parts["net"]
    weights = [*net.parameters()]
    best = _ = 0.0
    lengths: list[int] = []
    for epoch in checkpoints.epochs(4):
        rate = 0.1 * 0.5 ** (epoch // 2)
        for _ in checkpoints.steps(range(2)):
            best += random.random()
            weights[0].data += rate
            seen = best  # noqa: F841  set anew in each step
        _ = random.random()  # which nobody reads
        lengths.append(epoch)
    out = capsys.readouterr().out
    assert len(re.findall("warning: best, lengths changed with the epoch", out)) == 1
    assert out.count("warning") == 1
    assert "checkpoints.numbers(NAME=...)" in out


def test_parts_that_were_forgotten(capsys: pytest.CaptureFixture) -> None:
    """Schedulers, optimizers and averages of the networks; not those within other parts.

    An optimizer that has never stepped is no loss, unless its scheduler is a part.
    """
    net = torch.nn.Linear(2, 2)
    other = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    of_other = torch.optim.AdamW(other.parameters())
    halves = [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(2)]
    chain = torch.optim.lr_scheduler.SequentialLR(optimizer, halves, [3])
    average = torch.optim.swa_utils.AveragedModel(net)
    with pytest.raises(ValueError, match="learning rate") as kept:
        torch.optim.SGD(net.parameters(), -1)
    assert kept and of_other.param_groups

    def forgotten(stepped: list, **parts: object) -> list[str]:
        watch = unsaved.Unsaved("Run", parts, stepped)
        watch.note_networks()
        watch.say_networks()
        watch.say_optimizers()
        out = capsys.readouterr().out
        return sorted(re.findall(r"(\w+) is not passed to Run", out))

    given = {"net": net, "optimizer": optimizer, "scheduler": chain}
    stepped = [optimizer]
    assert forgotten(stepped, **given, average=average) == []
    assert forgotten(stepped, **given) == ["AveragedModel"]
    assert forgotten([of_other], **given) == ["AdamW", "AveragedModel"]
    left = ["AveragedModel", "ConstantLR", "SequentialLR"]
    assert forgotten(stepped, net=net, optimizer=optimizer) == left
    assert forgotten(stepped, net=net, optimizer=optimizer, half=halves[0]) == left
    left = ["AveragedModel", "ConstantLR", "SGD", "SequentialLR"]
    assert forgotten(stepped, net=net, half=halves[0]) == left
    assert forgotten([], net=net, scheduler=chain) == ["AveragedModel"]
    scalers = [torch.amp.GradScaler("cpu", enabled=each) for each in (False, True)]
    given["average"] = average
    assert forgotten(stepped, **given) == ["GradScaler"]
    assert forgotten(stepped, **given, scaler=scalers[1]) == []


class Sharp(torch.optim.Optimizer):
    """As SAM's best-known implementation: another optimizer steps, of which it saves nothing."""

    def __init__(self, params: Iterator, kind: type, **how: float) -> None:
        super().__init__(params, {"rho": 0.05, **how})
        self.base_optimizer = kind(self.param_groups, **how)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["moved"] = self.param_groups[0]["rho"] * weight.grad
            weight.add_(self.state[weight]["moved"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for weight in self.param_groups[0]["params"]:
            weight.sub_(self.state[weight]["moved"])
        self.base_optimizer.step()
        self.zero_grad()


def sharpen(folder: Path, epochs: int) -> dict:
    """Return the weights after so many epochs, resumed, with a rate that a scheduler lowers."""
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 1)
    optimizer = Sharp(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    checkpoints = ddpkit.Checkpoints(
        folder, net=net, optimizer=optimizer, scheduler=scheduler
    )
    for _ in checkpoints.epochs(epochs):
        for _ in checkpoints.steps(range(3), net):
            inputs = torch.randn(4, 2)
            for step in optimizer.first_step, optimizer.second_step:
                net(inputs).square().mean().backward()
                step()
        scheduler.step()
    return {"net": net.state_dict(), "rate": optimizer.param_groups[0]["lr"]}


@ranks.on_ranks(1)
def test_an_optimizer_within_another(tmp_path: Path) -> None:
    """Its moments are saved, and its settings remain those of the other."""
    whole = sharpen(tmp_path / "whole", 4)
    sharpen(tmp_path / "resumed", 2)
    resumed = sharpen(tmp_path / "resumed", 4)
    assert samples.checksum(resumed) == samples.checksum(whole)


def test_a_step_of_an_optimizer_within_another(
    capsys: pytest.CaptureFixture,
) -> None:
    """It is one of the other: no line says that there was none."""
    net = torch.nn.Linear(2, 1)
    optimizer = Sharp(net.parameters(), torch.optim.SGD, lr=0.1)
    for stepped in [], [optimizer.base_optimizer]:
        parts = {"model": net, "optimizer": optimizer}
        watch = first_steps.FirstSteps(parts, optimizer, None, 1, 1, stepped)
        watch.judge_step([0.0], 1)
        line = "run.end_step without an optimizer step"
        assert (line in capsys.readouterr().out) != bool(stepped)


class Frozen(torch.nn.Sequential):
    """A pretrained network that training asks and does not change."""


class Teacher(torch.nn.Sequential):
    """Follows the network."""


@pytest.mark.parametrize("is_given", [False, True])
def test_a_teacher_made_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture, is_given: bool
) -> None:
    """A network that has no optimizer, and changes in the steps, is named, and no other one."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    wrapper = torch.nn.Sequential(net)  # with the same weights
    teacher = copy.deepcopy(net)
    teacher.__class__ = Teacher
    frozen = copy.deepcopy(net).eval()
    frozen.__class__ = Frozen
    evaluated = copy.deepcopy(net)
    weighted = torch.nn.CrossEntropyLoss(weight=torch.ones(2))
    old = torch.optim.swa_utils.AveragedModel(
        net
    )  # of another fold, and nobody uses it
    old.itself = [old]
    del old
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    parts = {"teacher": teacher} if is_given else {}
    checkpoints = ddpkit.Checkpoints(
        tmp_path / "run", net=net, optimizer=optimizer, **parts
    )
    for _ in checkpoints.epochs(2):
        for _ in checkpoints.steps(range(3)):
            inputs = torch.randn(4, 2)
            targets = (frozen(inputs) + teacher(inputs)).softmax(1).detach()
            weighted(wrapper(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for weight, other in zip(
                    teacher.parameters(), net.parameters(), strict=True
                ):
                    weight.lerp_(other, 0.1)
        evaluated.load_state_dict(net.state_dict())
    out = capsys.readouterr().out
    line = "warning: another model of class Teacher is not passed to Checkpoints(...)"
    assert out.count(line) == (not is_given)
    assert out.count("warning") == (not is_given)


class Unsavable:
    def state_dict(self) -> dict[str, object]:
        return {"at": self}

    def load_state_dict(self, saved: dict) -> None:
        pass


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    """Refused in the second step, not at the end of the first epoch."""
    checkpoints = ddpkit.Checkpoints(tmp_path / "run", reader=Unsavable())
    with refusal("states.take_states", "weights_only=True"):
        for step in checkpoints.steps(range(9)):
            assert step < 2


def test_an_epoch_without_steps(tmp_path: Path) -> None:
    """What the next one changes before its steps is not saved: a run that resumes does it again."""

    def train(folder: str, stop: bool = False) -> list[float]:
        net = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        optimizer.step()
        checkpoints = ddpkit.Checkpoints(
            tmp_path / folder, net=net, optimizer=optimizer, scheduler=scheduler
        )
        rates = []
        for epoch in checkpoints.epochs(3):
            scheduler.step()
            if not epoch:
                continue
            for _ in checkpoints.steps(range(3)):
                rates += scheduler.get_last_lr()
                if stop:
                    raise Killed
        return rates

    with pytest.raises(Killed):
        train("stopped", stop=True)
    assert train("stopped") == train("whole")


def test_a_change_before_the_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A run that is resumed in that epoch would do it once more: a line says so, at once."""
    line = "warning: a scheduler or other object changed before checkpoints.steps()"
    for is_top in True, False:
        net = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        optimizer.step()
        checkpoints = ddpkit.Checkpoints(
            tmp_path / str(is_top), net=net, optimizer=optimizer, scheduler=scheduler
        )
        for epoch in checkpoints.epochs(3):
            if is_top:
                scheduler.step()
            for step in checkpoints.steps(range(2)):
                assert (line in capsys.readouterr().out) == (
                    is_top and epoch + step == 0
                )
            scheduler.step()


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    """They are in no checkpoint, of a script of one's own, too."""
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    checkpoints = ddpkit.Checkpoints(tmp_path, save_every=2, net=net, opt=optimizer)
    with refusal("finite.not_finite", "weight", "epoch 1, step 6"):
        for _ in checkpoints.epochs(1):
            for step in checkpoints.steps(range(8)):
                net(torch.ones(2) * (math.nan if step == 5 else 1)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    state = torch.load(tmp_path / "last.pt", weights_only=True)
    assert state["step"] == 4
    assert state["parts"]["net"]["weight"].isfinite().all()


def test_folds_of_a_script(tmp_path: Path) -> None:
    """What it draws after a fold is the same, whether that was trained now or before."""

    def train(folder: str, stop: bool = False, alone: bool = False) -> list[list[int]]:
        torch.manual_seed(0)
        splits = []
        for fold in range(3):
            splits.append(torch.randperm(8).tolist())
            net = torch.nn.Linear(2, 2)
            checkpoints = ddpkit.Checkpoints(tmp_path / folder / str(fold), net=net)
            for _ in (0,) if alone else checkpoints.epochs(2):
                for step in checkpoints.steps(range(3)):
                    torch.rand(2)
                    if stop and fold == 1 and step:
                        raise Killed
                torch.rand(2 * (not alone))  # as a validation with noise
        return splits

    for alone in False, True:
        folder = f"stopped {alone}"
        with pytest.raises(Killed):
            train(folder, True, alone)
        splits = train(f"whole {alone}", False, alone)
        assert train(folder, False, alone) == splits
        assert len({str(split) for split in splits}) == 3


class Ordered(torch.utils.data.RandomSampler):
    """It has names of ours."""

    order = (1, 2)
    global_batch = 3


@ranks.on_ranks(2)
def test_another_training_set(tmp_path: Path) -> None:
    """On another rank it is refused; in another start, or if shorter, the epoch starts over."""

    def train(made: Callable[[], Any], stop: bool = False) -> list[str]:
        lines: list[str] = []
        distributed.print0 = lines.append
        net = torch.nn.Linear(2, 2)
        checkpoints = ddpkit.Checkpoints(tmp_path / made.__name__.strip("<>"), net=net)
        for _ in checkpoints.epochs(1):
            for step, _ in enumerate(checkpoints.steps(made())):
                if stop and step == 1:
                    checkpoints.save()
                if stop and step == 2:
                    raise Killed
        return lines

    data = [(torch.ones(2), 0)] * 64
    indices = list(range(32))
    size = 4

    def subsets() -> Any:
        own = torch.utils.data.Subset(data, indices)
        return ddpkit.train_loader(own, 2, workers=0)

    def loaders() -> Any:
        return torch.utils.data.DataLoader(data, size, sampler=Ordered(data))

    for made, text in (
        (subsets, "the training set has changed"),
        (loaders, "had 8 steps, now 4"),
    ):
        with pytest.raises(Killed):
            train(made, stop=True)
        indices = [index + 8 for index in indices]
        size *= 2
        assert len([line for line in train(made) if text in line]) == 1
    indices = list(range(distributed.rank(), 32 + distributed.rank()))
    with refusal("agreement.check_alike", "all ranks need the same data"):
        train(lambda: subsets())
    made = ddpkit.Checkpoints(tmp_path / "numbers")
    assert len(list(made.steps(ddpkit.train_loader(range(32), 2, workers=0)))) == 8


def test_saved_again_before_its_steps(tmp_path: Path) -> None:
    """Of an epoch that goes on it is kept on how many ranks its steps were done."""
    checkpoints = ddpkit.Checkpoints(tmp_path / "run", net=torch.nn.Linear(2, 2))
    with contextlib.suppress(Killed):
        for step in checkpoints.steps(torch.utils.data.DataLoader(range(8))):
            if step == 3:
                checkpoints.save()
            if step == 4:
                raise Killed
    last = tmp_path / "run" / "last.pt"
    state = checkpoint.read_file(last)
    assert (state["ranks"], state["done"]) == (1, 4)
    state["ranks"] = 2
    checkpoint.write_file(last, state)
    del checkpoints
    for _ in range(2):
        resumed = ddpkit.Checkpoints(tmp_path / "run", net=torch.nn.Linear(2, 2))
        resumed.save()
        assert checkpoint.read_file(last)["ranks"] == 2
        del resumed
