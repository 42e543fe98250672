"""Loaders and datasets of people's own: what wraps ours, what shards by itself, what is deep."""

import itertools
import random
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from generated import ROOT, refusal
from PIL import Image
from ranks import on_ranks
from timm.data.distributed_sampler import OrderedDistributedSampler, RepeatAugSampler
from torch import Tensor
from torch.utils import data as sets
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from ddpkit.data import loading, normalizing, other_loaders, samples, sources
from ddpkit.data.format import Format
from ddpkit.ranks import distributed
from ddpkit.run import agreement
from ddpkit.vision import class_counts

OTHER = Format(mean=(0.1, 0.2, 0.3), std=(0.5, 0.5, 0.5))
IMAGE = torch.zeros(3, 4, 4, dtype=torch.uint8)
CPU = torch.device("cpu")


class Ours(sets.Dataset):
    """As ddpkit.ImageFiles: with files, a format, counts and an epoch."""

    def __init__(self, name: str, count: int, format: Format = OTHER) -> None:
        self.samples = [(f"{name}/{n}.jpg", n % 2) for n in range(count)]
        self.format = format
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple:
        return IMAGE, self.samples[index][1]

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def count_labels(self, index: int) -> dict[int, int]:
        return {self.samples[index][1]: 10 + index}


class Own(sets.Dataset):
    """A person's wrapper, such as one that transforms; or a set of theirs."""

    def __init__(self, dataset: Any, image: Tensor = IMAGE) -> None:
        self.dataset = dataset
        self.image = image

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple:
        return self.image, index % 2


class TestWrappers:
    def test_samples(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Files, format and counts of labels are those of the datasets within."""
        monkeypatch.setattr(distributed, "gather_objects", lambda value: [value])
        a = Ours("a", 3)
        b = Ours("b", 2)
        joined = sets.ConcatDataset([b, sets.Subset(a, [2, 0])])
        half, _ = sets.random_split(a, [2, 1], torch.Generator().manual_seed(0))
        for dataset, files in (
            (sets.Subset(a, [2, 0]), ["a/2", "a/0"]),
            (sets.Subset(a, torch.tensor([1])), ["a/1"]),  # type: ignore[arg-type]
            (joined, ["b/0", "b/1", "a/2", "a/0"]),
            (Own(sets.Subset(joined, [3, 1])), ["a/0", "b/1"]),
            (half, [f"a/{n}" for n in half.indices]),
            (sets.StackDataset(image=Own([0, 0]), label=b), ["b/0", "b/1"]),
        ):
            names = [samples.name(dataset, n) for n in range(len(dataset))]
            assert names == [f"sample {n}, {file}.jpg" for n, file in enumerate(files)]
            assert normalizing.format_of(DataLoader(dataset)) == OTHER
            counts = class_counts.count_classes(dataset, ["even", "odd"])
            assert counts[:, 2].tolist() == [10 + int(file[-1]) for file in files]
        stream = sets.ChainDataset([Stream("all"), Stream("all")])
        assert samples.fingerprint(stream).startswith("80 images")

    def test_what_is_not_known(self) -> None:
        """A wrapper that may order its samples in any way has no files and no counts."""
        some = Own(Ours("a", 3))
        some.__class__ = type("Fewer", (Own,), {"__len__": lambda self: 2})
        assert samples.name(some, 0) == "sample 0"
        with refusal("class_counts.labels_of_sample", "Fewer has no count_labels"):
            class_counts.count_classes(some, ["even", "odd"])

    @pytest.mark.parametrize("kind", [[(0, 1), (1, 2)], {"a": 0, "b": 1}, "ab", 2])
    def test_indices_of_another_kind(self, kind: object) -> None:
        """Such as (video, frame) of clips: a name that torch's Subset uses, too."""
        clips = Own(Ours("a", 3))
        clips.indices = kind
        clips.__class__ = type("Clips", (Own,), {"__len__": lambda self: 2})
        assert samples.name(clips, 0) == "sample 0"
        assert samples.fingerprint(clips).startswith("2 images")
        assert len(list(loading.train_loader(clips, 1, classes=2, workers=0))) == 2

    def test_the_epoch(self) -> None:
        a = Ours("a", 3)
        b = Ours("b", 2)
        joined = Own(sets.ConcatDataset([sets.Subset(a, [0]), b]))
        loading.train_loader(joined, 2, workers=0).raw(7)
        assert a.epochs == b.epochs == [7]

    def test_fingerprints(self) -> None:
        """A Subset of other samples is another set; so is one of other files."""
        a = Ours("a", 3)
        b = Ours("b", 3)
        b.samples[0] = ("b/other.jpg", 0)
        sets_of_two = [
            sets.Subset(each, indices)
            for each in (a, b)
            for indices in ([0, 1], [1, 0], [0, 2])
        ]
        sets_of_two += [Own(sets_of_two[0]), sets.Subset(Own([0] * 3), [0, 1])]
        sets_of_two += [
            sets.ConcatDataset([sets.Subset(a, [n]) for n in pair]) for pair in ("01",)
        ]
        found = {samples.fingerprint(each) for each in sets_of_two}
        assert len(found) == len(sets_of_two)
        assert all(each.startswith("2 images") for each in found)

    def test_formats(self) -> None:
        """Loaders whose images would be normalised by different numbers are refused."""
        ours = Ours("a", 4)
        plain = Ours("a", 4, Format())
        uint8 = Own(range(4))
        floats = Own(range(4), torch.rand(3, 4, 4))
        same = Ours("b", 4, Format(mean=OTHER.mean, std=OTHER.std, max_megapixels=1))
        check = sources.check_formats

        before = samples.checksum(samples.random_state())
        ours_of = partial(loading.train_loader, classes=2, workers=0)
        for make in ours_of, DataLoader:
            make = partial(make, batch_size=4)
            loader = make(ours)
            joined = sets.ConcatDataset([ours, uint8])
            for other in sets.Subset(same, [0, 1, 2, 3]), joined:
                check(make(other), loader)
                check(loader, make(other))
            check(make(plain), make(uint8))
            for other in plain, uint8, sets.Subset(uint8, [0, 1, 2, 3]), floats:
                for one, two in (make(other), loader), (loader, make(other)):
                    with refusal(
                        "sources.check_formats", OTHER.mean, "{}", "data.json"
                    ):
                        check(one, two)
        assert before == samples.checksum(samples.random_state())
        with refusal("normalizing.find_format", "ConcatDataset", OTHER.mean):
            normalizing.format_of(DataLoader(sets.ConcatDataset([ours, plain])))


class Stream(sets.IterableDataset):
    """Samples, numbered in the corner of their image, as a stream of people's own gives them."""

    def __init__(
        self,
        share: str,
        count: int = 40,
        noise: bool = False,
    ) -> None:
        self.share = share
        self.count = count
        self.noise = noise
        self.augment = {"noise": np.random.default_rng()}  # as a library's

    def mine(self) -> Sequence[int]:
        """As webdataset's split_by_node, or Hugging Face's split_dataset_by_node; or all."""
        ranks = distributed.world_size()
        rank = distributed.rank()
        if self.share == "all":
            return range(self.count)
        if self.share == "uneven":
            return range(0, 9) if rank == 0 else range(9 * rank, self.count, ranks)
        return range(rank, self.count, ranks)

    def __len__(self) -> int:
        return len(self.mine())

    def __iter__(self) -> Iterator:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for number in self.mine()[first::step]:
            # equal on all ranks
            image = torch.randint(100, (3, 2, 2), dtype=torch.uint8)
            if self.noise:
                image = torch.from_numpy(
                    self.augment["noise"].integers(0, 99, (3, 2, 2), np.uint8)
                )
            image[0, 0, 0] = number
            yield image, number % 10


class Shard(sets.Dataset):
    """As a shard of a dataset of Hugging Face, whose samples are numbered anew."""

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple:
        image = IMAGE.clone()
        image[0, 0, 0] = self.numbers[index]
        return image, 0


def said(dataset: Any) -> Any:
    """The dataset, of this rank's samples, as its owner says."""
    dataset.num_replicas = distributed.world_size()
    dataset.rank = distributed.rank()
    return dataset


class Share(sets.Sampler):
    """As people write it."""

    def __init__(self) -> None:
        said(self)

    def __iter__(self) -> Iterator[int]:
        return iter(range(distributed.rank(), 40, distributed.world_size()))

    def __len__(self) -> int:
        return len(range(distributed.rank(), 40, distributed.world_size()))


class Sorted(DistributedSampler):
    """Shares of an order of its own, which is the same on all ranks: of a generator, or torch's."""

    def __init__(self, data: sets.Dataset, generator: torch.Generator | None) -> None:
        super().__init__(data)
        self.own = generator

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self.dataset), generator=self.own).tolist()
        return iter(order[self.rank :: self.num_replicas])


class Within(DistributedSampler):
    """Shares of another sampler's order, as Catalyst's wrapper gives them."""

    def __init__(self, sampler: sets.Sampler) -> None:
        super().__init__(sampler, shuffle=False)
        self.sampler = sampler

    def __iter__(self) -> Iterator[int]:
        order = list(self.sampler)
        return iter([order[place] for place in super().__iter__()])


def numbers(batches: Iterator) -> list[int]:
    return [n for batch in batches for n in batch[0][:, 0, 0, 0].tolist()]


def trained_on(loader: Any, epoch: int = 0) -> list[list[int]]:
    """Which samples each rank takes in an epoch."""
    source = other_loaders.OtherSource(loader, accumulate=1, seed=3)
    reading = other_loaders.Reading(3)
    found = numbers(source.read_epoch(reading, loader, epoch, 0))
    assert len(found) * distributed.world_size() <= source.total
    return distributed.gather_objects(found)


@on_ranks(2, 3)
def test_each_sample_is_trained_on_once() -> None:
    """With workers or without, in any epoch."""
    ranks = distributed.world_size()
    rank = distributed.rank()
    everything = Shard(range(40))
    make = partial(DataLoader, batch_size=2)
    mine = range(rank, 40, ranks)
    for loader in (
        make(said(Stream("rank"))),
        make(said(Stream("rank", noise=True))),
        make(said(Stream("rank")), num_workers=2, persistent_workers=True),
        make(said(Shard(mine)), shuffle=True),
        make(everything, sampler=Share()),
        make(everything, sampler=DistributedSampler(everything)),
        make(everything, sampler=Sorted(everything, None)),
        make(everything, sampler=Sorted(everything, torch.Generator().manual_seed(1))),
        make(everything, sampler=Within(sets.RandomSampler(everything))),
        DataLoader(
            everything,
            batch_sampler=sets.BatchSampler(DistributedSampler(everything), 2, False),
        ),
    ):
        for epoch in 0, 2:
            found = [n for part in trained_on(loader, epoch) for n in part]
            # what does not fill a step is left out
            assert len(set(found)) > 40 - 2 * ranks
            # which DistributedSampler repeats
            assert len(found) - len(set(found)) < ranks
    shuffled = make(said(Shard(mine)), shuffle=True)
    orders = [trained_on(shuffled, epoch) for epoch in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


@on_ranks(2)
def test_the_stream_of_the_page() -> None:
    """That of docs/edits.md deals whole batches to workers, in another order in each epoch."""
    section = (ROOT / "docs/edits.md").read_text().partition("### Custom stream")[2]
    block = section.split("```python\n")[1].partition("```")[0]
    names = {"torch": torch, "Iterator": Iterator, "Namespace": Namespace}
    names["ImageDataset"] = Ours
    exec(block, names)
    images = Shard(range(43))
    images.format = OTHER
    for workers, count in (0, 20), (1, 20), (2, 16):
        args = Namespace(batch_size=4, workers=workers, seed=1)
        loader = DataLoader(
            names["Stream"](images, args), 4, drop_last=True, num_workers=workers
        )
        assert normalizing.format_of(loader) == OTHER
        orders = [trained_on(loader, epoch) for epoch in (0, 0, 1)]
        assert orders[0] == orders[1] != orders[2]
        for first, second in orders:
            assert len(first) == len(second) == count
            assert len({*first, *second}) == 2 * count


@on_ranks(3)
def test_shares_that_are_meant_to_be_equal() -> None:
    """RepeatAugSampler gives 3 ranks the same samples, to be augmented otherwise."""
    data = Shard(range(60))
    loader = DataLoader(
        data, 2, sampler=RepeatAugSampler(data, num_repeats=3, selected_round=0)
    )
    found = trained_on(loader)
    assert len(set(found[0])) == 20
    assert all(part == found[0] for part in found)
    found = trained_on(DataLoader(said(Stream("uneven")), 1))
    assert [len(part) for part in found] == [8, 8, 8]  # as many as the least share has
    wrong = DistributedSampler(data, 2, 0)
    with refusal("other_loaders.check_share", "(2, 0)"):
        trained_on(DataLoader(data, 2, sampler=wrong))
    for nobody_knows in data, Stream("all"), Stream("rank"):
        with refusal("other_loaders.check_share", "ddpkit.train_loader(...) or a Dist"):
            trained_on(DataLoader(nobody_knows, 2))


@on_ranks(1, 2, 3)
def test_each_sample_is_evaluated_once() -> None:
    data = Shard(range(41))
    ranks = distributed.world_size()
    rank = distributed.rank()
    make = partial(DataLoader, batch_size=2)
    for loader in (
        make(said(Stream("rank", 41))),
        make(said(Stream("rank", 2)), num_workers=1),
        make(said(Shard(range(rank, 41, ranks)))),
        make(said(Shard(range(rank, 41, ranks))), shuffle=True),
    ):
        samples.seed(rank)  # as training leaves it
        pairs = []
        for batch in sources.eval_batches(loader, CPU):
            corners = (batch[0][:, 0, 0, 0] * 0.229 + 0.485) * 255  # as they were
            pairs += zip(corners.round().tolist(), batch[-1].tolist(), strict=True)
        pairs = distributed.gather_objects(pairs)
        seen = sorted(pair for part in pairs for pair in part)
        total = 2 if loader.num_workers else 41
        assert [value for value, _ in seen] == list(range(total))
        assert len({index for _, index in seen}) == total
        assert all(index < 0 for _, index in seen)
    for sampler in (
        None,
        DistributedSampler(data),
        OrderedDistributedSampler(data, ranks, rank),
    ):
        loader = make(data, sampler=sampler)
        if ranks == 1:
            assert len(numbers(sources.eval_batches(loader, CPU))) == 41
            continue
        with refusal("other_loaders.check_share", "use ddpkit.val_loader(...); if"):
            next(sources.eval_batches(loader, CPU))


@on_ranks(2)
def test_a_share_of_the_data_for_our_samplers() -> None:
    """They deal the samples themselves: with a share of them as the dataset most would be lost."""
    rank = distributed.rank()

    def check(dataset: sets.Dataset, workers: int = 0) -> None:
        loader = loading.val_loader(dataset, 4, classes=2, workers=workers)
        before = samples.checksum(samples.random_state())
        agreement.check_alike(["a", "b"], validation=loader)
        assert before == samples.checksum(samples.random_state())

    for workers in 0, 1:
        with refusal("agreement.check_alike", "a first sample[0] for validation"):
            check(Shard(range(rank, 40, 2)), workers)
        check(Shard(range(40)), workers)
    rng = np.random.default_rng(rank)
    check(Drawn(rng.random))
    for _ in range(16):  # of flips by chance two reads are often equal
        check(Drawn(partial(rng.integers, 2)))
    with refusal("agreement.check_alike", "20 images"):
        check(sets.Subset(Ours("a", 40), range(rank, 40, 2)))
    # Another loader may have a share.
    agreement.check_alike(["a", "b"], training=DataLoader(Shard(range(20 + rank))))
    agreement.check_alike(["a", "b"], training=DataLoader(Stream("uneven")))


class Drawn(Shard):
    """Of people's own, without a list of samples; a generator of its own augments it."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__(range(24))
        self.draw = draw

    def __getitem__(self, index: int) -> tuple:
        return torch.full((3, 2, 2), float(self.draw())), 0


class Augmented(Ours):
    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__("a", 24, Format())
        self.draw = draw

    def __getitem__(self, index: int) -> tuple:
        return torch.full((3, 2, 2), float(self.draw())), 0


@pytest.mark.parametrize("workers", [0, 2])
def test_generators_of_their_own(workers: int, capsys: pytest.CaptureFixture) -> None:
    """A line says so, once; what ddpkit seeds gives the same numbers as if it were read once."""
    rng = np.random.default_rng()
    python = random.Random()
    own = torch.Generator()

    def said(dataset: sets.Dataset) -> tuple[str, list]:
        loader = loading.train_loader(dataset, 4, classes=2, workers=workers)
        found = [batch[0] for epoch in (0, 1) for batch in loader.raw(epoch)]
        return capsys.readouterr().out, [
            images[:, 0, 0, 0].tolist() for images in found
        ]

    for draw in (
        rng.random,
        lambda: python.random() < 0.5,
        lambda: torch.rand(1, generator=own),
    ):
        line, _ = said(sets.Subset(Augmented(draw), range(24)))
        assert line.count("reading it twice") == line.count("\n") == 1
        assert "a/" in line
    for draw in (
        random.random,
        np.random.rand,
        lambda: torch.rand(()),
        lambda: float("nan"),
    ):
        line, found = said(Augmented(draw))
        assert not line
        if draw is random.random:
            key = samples.Key(1, 23)
            alone = samples.Seeded(Augmented(draw), 2, 0)[key][0][0, 0, 0].item()
            assert alone in [value for batch in found for value in batch]


def test_what_a_collate_function_draws() -> None:
    """The first samples are read twice; a run that is resumed draws as if it had not stopped."""

    def drawn(seen: int) -> list[float]:
        data = Shard(range(72))
        own = {"collate_fn": lambda _: torch.rand(()).item()}
        loader = loading.train_loader(data, 24, classes=2, workers=0, **own)
        return list(loader.raw(0, seen))

    assert drawn(0)[1:] == drawn(24)


def test_arrays_of_indices() -> None:
    loader = DataLoader(Shard(range(4)), 2, sampler=np.array([2, 0, 1]))  # type: ignore[arg-type]
    assert numbers(sources.eval_batches(loader, CPU))
    assert numbers(sources.eval_batches(loader, "cpu"))  # type: ignore[arg-type]


def test_deep_images() -> None:
    """Values of more than 8 bits are refused unless they are scaled; others are as they were."""
    values = np.arange(164, 59832, 4973, np.uint16).reshape(3, 4)

    def parts(image: Any) -> Tensor:
        return samples.Seeded([(image, 0)], 2, 0)[samples.Key(0, 0)][0]

    deep = [
        Image.frombytes(mode, (4, 3), values.tobytes()) for mode in ("I;16", "I;16B")
    ]
    deep += [Image.fromarray(values.astype(kind)) for kind in (np.int32, np.float32)]
    arrays = [
        values,
        values.astype(np.int32),
        values.astype(">u2"),
        values.astype(np.uint32),
    ]
    tensors = [
        torch.from_numpy(values.astype(kind))[None] for kind in (np.int16, np.uint16)
    ]
    floats = [Image.fromarray(np.float32([[0, np.nan]]))]
    for image in deep + arrays + tensors + floats:
        with refusal("samples.parts", "sample 0", "65535.0"):
            parts(image)
    for kind in torch.int16, torch.uint16, torch.int32:  # of another loader
        with refusal("normalizing.unpack", kind, "65535.0"):
            normalizing.unpack([torch.zeros(2, 1, 3, 4, dtype=kind), torch.zeros(2)])
    scaled = (values / 65535).astype(np.float32)
    for image in Image.fromarray(scaled), scaled, torch.from_numpy(scaled)[None]:
        assert torch.equal(parts(image), torch.from_numpy(scaled)[None])
    for mode in "1", "L", "LA", "P", "PA", "CMYK", "RGBA":
        assert parts(Image.new(mode, (4, 3))).shape == (3, 3, 4)


def test_batches_of_both_kinds() -> None:
    """In training uint8 and float are refused in a batch; in evaluation each is right."""
    both = sets.ConcatDataset([Own([0], IMAGE + 9), Own([0], torch.ones(3, 4, 4))])
    seeded = samples.Seeded(both, 2, 0)
    with refusal("samples.getitems", "torch.uint8; sample 1", "torch.float32"):
        seeded.__getitems__([samples.Key(0, 0), samples.Key(0, 1)])
    loader = loading.val_loader(both, 2, classes=2, workers=0)
    found = [batch[0].dtype for batch in sources._dealt(loader)]
    assert found == [torch.uint8, torch.float32]


def test_loaders_in_the_wrong_place() -> None:
    data = Ours("a", 8)
    train = loading.train_loader(data, 4, classes=2, workers=0)
    val = loading.val_loader(data, 4, classes=2, workers=0)
    sources.find_source(train, val, 1, 0)
    with refusal("sources.find_source", "swapped"):
        sources.find_source(val, train, 1, 0)


class Sized(sets.Dataset):
    """A person's set: what it returns depends on an attribute, as if it were a transform."""

    side = 4

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple:
        return torch.full(
            (3, self.side, self.side), index, dtype=torch.uint8
        ), index % 2


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_changed_between_epochs(workers: int) -> None:
    """It takes effect in the next one, in both loaders, with workers or without."""
    data = Sized()
    train = loading.train_loader(data, 4, classes=2, workers=workers)
    val = loading.val_loader(data, 4, classes=2, workers=workers)
    assert train.dataset is val.dataset is data
    for epoch, data.side in enumerate([4, 6, 8]):
        for loader in train, val:
            assert {batch[0].shape[-1] for batch in loader.raw(epoch)} == {data.side}
    assert {len(x) for x, *_ in train.raw(2, 4)} == {4}
    assert len(list(train.raw(2, 4))) == 1
    # what is read by hand is a whole epoch, that which is on
    assert [x.shape[-1] for x, _ in train] == [8, 8]


@on_ranks(2)
def test_loaders_by_hand() -> None:
    """What a network takes, normalised as in a run: for update_bn, an LR finder, by hand."""
    net = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Conv2d(3, 2, 1))
    train = loading.train_loader(Sized(), 2, classes=2, workers=1)
    torch.optim.swa_utils.update_bn(train, net, CPU)
    assert net[0].num_batches_tracked == 2
    val = loading.val_loader(Sized(), 3, classes=2, workers=0)
    for loader in train, val:
        found = list(loader)
        moved = [normalizing.move(batch, CPU, Format()) for batch in loader.raw()]
        assert len(found) == len(moved) == len(loader)
        for one, other in zip(found, moved, strict=True):
            assert one[0].dtype == torch.float32
            assert all(map(torch.equal, one, other))
    both = sets.ConcatDataset([Own([0], IMAGE), Own([0], torch.ones(3, 8, 8))])
    sizes = [x.shape for x, *_ in loading.val_loader(both, 2, classes=2, workers=0)]
    assert sizes == ([(1, 3, 4, 4), (1, 3, 8, 8)] if distributed.is_rank_zero() else [])
    # without classes samples may be anything
    raw = loading.train_loader(Sized(), 2, workers=0)
    assert next(iter(raw))[0].dtype == torch.uint8


class Placed:
    """As a StatefulDataLoader: it says where it is, and goes on there; each rank elsewhere."""

    def __init__(self) -> None:
        self.at = 100 * distributed.rank()

    def state_dict(self) -> dict:
        return {"at": self.at}

    def load_state_dict(self, state: dict) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator:
        while self.at % 100 < 8:
            self.at += 1
            yield self.at


class Late:
    """A loader that takes its state when it is iterated, as torchdata's does."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.pending: dict[str, torch.Tensor] = {}

    def load_state_dict(self, saved: dict[str, torch.Tensor]) -> None:
        self.pending = saved

    def __iter__(self) -> Iterator[int]:
        if self.pending:
            self.generator.set_state(self.pending.pop("generator"))
        return iter(torch.randperm(9, generator=self.generator).tolist())


@on_ranks(2)
def test_the_rest_of_an_epoch() -> None:
    """Of any loader: after some batches it goes on with those that would have followed."""
    reading = other_loaders.Reading(seed=3)
    data = torch.arange(40)
    stream = DataLoader(data, 2, shuffle=True, drop_last=True)
    shares = DataLoader(data, 2, sampler=DistributedSampler(data))
    ours = loading.train_loader(data, 2, accumulate=2, workers=0)
    pictures = loading.train_loader(Sized(), 2, classes=2, workers=0)
    for loader in stream, shares, ours, pictures, range(9), [1, 2, 3, 4]:
        orders = []
        for epoch in 0, 1:
            whole = [str(batch) for batch in reading.rest(loader, epoch, 0)]
            for done in 1, 2, len(whole):
                torch.rand(done)  # whatever is drawn elsewhere
                rest = [str(batch) for batch in reading.rest(loader, epoch, done)]
                assert rest == whole[done:]
            orders.append(whole)
        assert (orders[0] == orders[1]) == isinstance(loader, range | list)
    assert next(reading.rest(pictures, 0, 0))[0].dtype == torch.float32
    alike = [str(batch) for batch in reading.rest(stream, 0, 0)]
    assert len(set(map(str, distributed.gather_objects(alike)))) == 1
    # One with a state of its own is given that back, and reads nothing again.
    placed = Placed()
    before = list(itertools.islice(reading.rest(placed, 0, 0), 3))
    resumed = Placed()
    resumed.load_state_dict(placed.state_dict())
    after = list(reading.rest(resumed, 0, 3, is_resumed=True))
    assert before + after == [100 * distributed.rank() + n for n in range(1, 9)]
    # At the end of an epoch that state is used up, before the next epoch is given its numbers.
    late, other = Late(), Late()
    late.load_state_dict({"generator": torch.Generator().get_state()})
    found = list(reading.rest(late, 1, 0, is_resumed=True))
    assert found == list(reading.rest(other, 1, 0))


def test_a_sample_of_two_images() -> None:
    """The second part is the target: who returns two views is told so."""
    views = [(torch.full((3, 4, 4), 9, dtype=torch.uint8),) * 2 + (1,)]
    with refusal(
        "samples.check_mask", "the second element of a sample must be its target"
    ):
        samples.Seeded(views, 2, 0)[samples.Key(0, 0)]
