"""People's own datasets, loaders, networks and losses, which use names and kinds in other ways."""

import collections
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
from generated import refusal
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import ddpkit
from ddpkit.data import samples
from ddpkit.data.other_loaders import OtherSource, Reading
from ddpkit.ranks import distributed
from ddpkit.run import agreement, checkpoint


def gaps() -> DataLoader:
    """Of a `collate_fn` that drops unreadable samples, and returns None for a batch of them."""
    skips = {2, 3}

    def collate(batch: list[int]) -> Tensor | None:
        kept = [each for each in batch if each not in skips]
        return torch.tensor(kept) if kept else None

    return DataLoader(list(range(8)), 2, collate_fn=collate)  # type: ignore[arg-type]


def test_batches_that_are_none(tmp_path: Path) -> None:
    """They end no epoch."""

    def seen(batches: Iterator) -> list:
        return [None if each is None else each.tolist() for each in batches]

    whole = [[0, 1], None, [4, 5], [6, 7]]
    checkpoints = ddpkit.Checkpoints(tmp_path / "run", net=nn.Linear(2, 2))
    endless = checkpoints.forever(gaps())
    for _ in checkpoints.epochs(2):
        assert seen(checkpoints.steps(gaps())) == whole
    assert seen(next(endless) for _ in range(8)) == whole * 2
    source = OtherSource(gaps(), 1)
    assert seen(source.read_epoch(Reading(0), gaps(), 0, 0)) == whole


class Unsliced(collections.abc.Sequence):
    """As of keras: batches by number alone."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: Any) -> int:
        if index >= 5:
            raise IndexError
        return index + 0  # of a slice a TypeError


class Unsized:
    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


@pytest.mark.parametrize(
    "make", [Unsliced, Unsized, lambda: collections.deque(range(5))]
)
def test_loaders(make: Callable, tmp_path: Path) -> None:
    """Interrupted in mid-epoch they go on there."""
    checkpoints = ddpkit.Checkpoints(tmp_path / "run", net=nn.Linear(2, 2))
    with contextlib.suppress(RuntimeError):
        for number in checkpoints.steps(make()):
            if number == 1:
                checkpoints.save()
            if number == 2:
                raise RuntimeError
    del checkpoints
    resumed = ddpkit.Checkpoints(tmp_path / "run", net=nn.Linear(2, 2))
    assert list(resumed.steps(make())) == [2, 3, 4]


class Rows(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index])


def test_the_words_of_a_dataloader() -> None:
    """Those on workers say nothing where there are none, as under a debugger."""
    for make in ddpkit.train_loader, ddpkit.val_loader:
        loader = make(Rows(), 2, num_workers=1, persistent_workers=True)
        assert (loader.num_workers, loader.persistent_workers) == (1, True)
        loader = make(Rows(), 2, workers=0, persistent_workers=True, prefetch_factor=4)
        assert len(list(loader)) == 4


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)


def test_weights_of_one_name(tmp_path: Path) -> None:
    """The head of the model, and another one beside it: each has its state."""
    saved: list = []
    for _ in range(2):
        model, head = Vit(), nn.Linear(4, 3)
        optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
        checkpoints = ddpkit.Checkpoints(
            tmp_path / "run", model=model, head=head, optimizer=optimizer
        )
        heads = [model.head.weight, head.weight]
        if not saved:
            for x in checkpoints.steps([torch.randn(6, 4)] * 3):
                (model.head(model.body(x)).mean() + head(x).mean() * 3).backward()
                optimizer.step()
        for each in heads:
            saved.append(optimizer.state[each]["exp_avg"].clone())
        del checkpoints
    assert all(map(torch.equal, saved[:2], saved[2:]))
    assert not torch.equal(*saved[:2])


class Strange(nn.Module):
    """A sparse buffer, a layer whose weights come later, and its own way to load."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(4).to_sparse())
        self.register_buffer("rows", torch.eye(4).to_sparse_csr())
        self.late = nn.LazyLinear(2)

    def load_state_dict(self, saved: dict) -> Any:  # type: ignore[override]
        return super().load_state_dict(saved)


def test_networks(tmp_path: Path) -> None:
    net = Strange()
    checkpoints = ddpkit.Checkpoints(tmp_path / "run", net=net)
    for _ in checkpoints.steps(range(3)):
        net.late(torch.ones(1, 4))
    del checkpoints
    again = Strange()
    again.late(torch.ones(1, 4))
    ddpkit.Checkpoints(tmp_path / "run", net=again)
    assert torch.equal(again.late.weight, net.late.weight)
    batches = [(torch.ones(1, 3, 2, 2), torch.zeros(1))]
    assert len(list(ddpkit.eval_batches(batches, Strange()))) == 1


def test_what_numbers_hold(tmp_path: Path) -> None:
    """Losses with their graphs; keys that no checkpoint takes are refused, soon."""
    weight = torch.ones(2, requires_grad=True)
    checkpoints = ddpkit.Checkpoints(tmp_path / "run", net=nn.Linear(2, 2))
    numbers = checkpoints.numbers(total=0.0, losses=[], seen=collections.Counter())
    for _ in checkpoints.steps(range(3)):
        numbers.total += weight.sum()
        numbers.losses.append(weight.sum())
        numbers.seen["a"] += 1
    saved = checkpoint.read_file(tmp_path / "run" / "last.pt")["parts"]["numbers"]
    assert (saved["total"], saved["losses"], saved["seen"]) == (6, [2] * 3, {"a": 3})
    numbers.total.backward()  # they are still what they were
    for odd in collections.Counter(np.arange(3)), {"a": {Path("b"): 1}}:
        numbers.seen = odd
        with refusal("states.take_states", "numbers: its state_dict has a "):
            checkpoints.save()


@ranks.on_ranks(2)
def test_numbers_of_each_rank(tmp_path: Path) -> None:
    weight = torch.ones(1, requires_grad=True)
    for _ in range(2):
        checkpoints = ddpkit.Checkpoints(tmp_path / "run", net=nn.Linear(2, 2))
        numbers = checkpoints.numbers(total=0.0)
        for _ in checkpoints.steps(range(3)):
            numbers.total += weight.sum() * distributed.rank()
        del checkpoints
    assert numbers.total == 3 * distributed.rank()
    assert not numbers.total.requires_grad


def test_optimizers_in_a_list(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Those that are saved are no variables, though their rates change."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    both = {"first": [optimizer]}
    checkpoints = ddpkit.Checkpoints(tmp_path / "run", net=net, optimizer=optimizer)
    for _ in checkpoints.epochs(3):
        for _ in checkpoints.steps(range(2)):
            net(torch.ones(1, 2)).sum().backward()
            both["first"][0].step()
        optimizer.param_groups[0]["lr"] /= 2
    assert "warning" not in capsys.readouterr().out


@ranks.on_ranks(2)
def test_hooks_of_weights(tmp_path: Path) -> None:
    """An optimizer that steps in backward(), as in torch's tutorial, steps there alone."""
    net = nn.Linear(2, 2)
    ddp_model = DistributedDataParallel(net)
    optimizers = {p: torch.optim.AdamW([p], weight_decay=0.5) for p in net.parameters()}

    def step(weight: Tensor) -> None:
        optimizers[weight].step()
        optimizers[weight].zero_grad()

    for weight in net.parameters():
        weight.register_post_accumulate_grad_hook(step)
    before = net.weight.detach().clone()
    parts = {f"of{n}": each for n, each in enumerate(optimizers.values())}
    checkpoints = ddpkit.Checkpoints(tmp_path / "run", net=net, **parts)
    for number in checkpoints.steps(range(2), ddp_model):
        assert torch.equal(before, net.weight) == (not number)
        ddp_model(torch.ones(1, 2)).sum().backward()


@ranks.on_ranks(2)
def test_sparse_gradients(tmp_path: Path) -> None:
    net = nn.EmbeddingBag(5, 2, sparse=True, mode="sum")
    ddp_model = DistributedDataParallel(net)
    optimizer = torch.optim.SparseAdam(net.parameters())
    before = net.weight.detach().clone()
    checkpoints = ddpkit.Checkpoints(tmp_path / "run", net=net, optimizer=optimizer)
    for number in checkpoints.steps(range(2), ddp_model):
        ddp_model(torch.tensor([[number, distributed.rank()]])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (before == net.weight).all(1).tolist() == [False, False, True, True, True]


def test_numbers_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """As of loss.item(), or of numpy."""
    report = ddpkit.Reporter(tmp_path, 1, log_every=1)
    for step, loss in enumerate((0.5, np.float32(0.5), torch.tensor(0.5)), 1):
        report.log_step(step, loss, 0.1)
    report.close()
    assert capsys.readouterr().out.count("loss 0.5 ") == 3


@pytest.mark.parametrize("odd", [None, False])
def test_no_path_to_resume(tmp_path: Path, odd: Any) -> None:
    """As of a flag whose default is None."""
    with refusal("folder.check_file", f"{odd}: no such file; use auto, never"):
        ddpkit.Checkpoints(tmp_path / "run", resume=odd, net=nn.Linear(2, 2))


@ranks.on_ranks(3)
def test_a_network_that_is_not_passed_to_steps(tmp_path: Path) -> None:
    """The first step of a resumed run adds in the order of all others."""
    ends = []
    for resumes in False, True:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(9, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 2)
        )
        ddp_model = DistributedDataParallel(net, bucket_cap_mb=0.01)
        optimizer = torch.optim.Adam(net.parameters(), 0.01)
        for stop in (3, 6) if resumes else (6,):
            folder = tmp_path / str(resumes)
            checkpoints = ddpkit.Checkpoints(folder, net=net, optimizer=optimizer)
            for number in checkpoints.steps(range(stop)):
                x = torch.randn(8, 9) * (number + 1 + distributed.rank())
                ddp_model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            del checkpoints
            if stop == 3:  # as in a new process
                ddp_model = DistributedDataParallel(net, bucket_cap_mb=0.01)
        ends.append(samples.checksum(list(net.parameters())))
    assert ends[0] == ends[1]


def test_a_run_that_is_over(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Started again it trains nothing: what the script then tells of is named."""

    def train() -> None:
        checkpoints = ddpkit.Checkpoints(tmp_path / "run", net=nn.Linear(2, 2))
        best = None
        for epoch in checkpoints.epochs(3):
            for _ in checkpoints.steps(range(2)):
                pass
            best = max(best or 0, epoch + 10)
        print("best", best)

    train()
    capsys.readouterr()
    train()
    said = capsys.readouterr().out
    assert "warning: best not restored" in said
    assert "best None" in said


class Sounds(Dataset):
    """Vectors with noise of the dataset's own, which each rank draws anew."""

    def __init__(self, label: int = 0) -> None:
        self.label = label
        self.rng = np.random.default_rng()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self.rng.random(16)), self.label


@ranks.on_ranks(2)
def test_samples_that_are_vectors() -> None:
    """They are no labels, which no draw changes."""
    loader = ddpkit.train_loader(Sounds(), 2, workers=0)
    agreement.check_alike((), training=loader)
    loader = ddpkit.train_loader(Sounds(distributed.rank()), 2, workers=0)
    with refusal("agreement.check_alike", "a first sample[1] for training"):
        agreement.check_alike((), training=loader)
