"""--augment, --mixup and --cutmix: the same on any machine, and labels that follow their images."""

import pickle
import random
import zlib
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from generated import Project, both_tasks
from ranks import on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import RandomResizedCrop

import ddpkit
from ddpkit.data import samples
from ddpkit.data.images import LazyImage
from ddpkit.errors import UserError
from ddpkit.ranks import distributed
from ddpkit.run import checkpoint

MIXES = {"classification": ["--mixup", 0.2, "--cutmix", 1], "segmentation": ["--cutmix", 1]}


class Noisy(Dataset):
    """What an owner may write: random numbers from three sources with each sample."""

    def __init__(self, data: Dataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple:
        noise = [random.random(), np.random.rand(), torch.rand(1).item()]
        return (*self.data[index], torch.tensor(noise, dtype=torch.float64))


@both_tasks
@pytest.mark.parametrize("augmented", [False, True])
@on_ranks(1)
def test_same_images_whatever_the_machine(
    project: Project, few: Path, augmented: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 1, 2 and 4 ranks, with 0 to 3 workers; not without the seeds for each sample."""
    import dataset

    augment = ",".join(dataset.AUGMENTATIONS if augmented else ())
    args = Namespace(data=few, image_size=32, augment=augment)
    train_set, _, classes = dataset.build_datasets(args)

    def sums(ranks: int, batch_size: int, accumulate: int, workers: int) -> list:
        """For each epoch and each global batch of 8 a checksum for each sample."""
        distributed.world_size = lambda: ranks
        found: list[dict] = [{}, {}]
        for rank in range(ranks):
            distributed.rank = lambda rank=rank: rank
            sampler = ddpkit.TrainSampler(train_set, batch_size, accumulate, seed=3)
            loader = DataLoader(
                ddpkit.Seeded(Noisy(train_set), classes, seed=3),
                batch_size,
                sampler=sampler,
                collate_fn=ddpkit.Collate(),
                **ddpkit.workers(workers, torch.device("cpu")),
            )
            for epoch in range(2):
                sampler.set_epoch(epoch)
                for i, batch in enumerate(loader):
                    step = found[epoch].setdefault(i // accumulate, [])
                    for sample in zip(*batch, strict=True):
                        parts = [part.numpy().tobytes() for part in sample]
                        step.append(zlib.crc32(b"".join(parts)))
        return [[sorted(step) for step in epoch.values()] for epoch in found]

    first = sums(1, 8, 1, 0)
    assert [len(step) for step in first[0]] == [8] * 3  # of 26 images
    assert first[0] != first[1]
    for shape in (2, 4, 1, 1), (4, 1, 2, 0), (1, 2, 4, 3):
        assert sums(*shape) == first
    samples.seed = lambda *key: None
    assert sums(1, 8, 1, 0) != first
    distributed.world_size, distributed.rank = lambda: 1, lambda: 0
    copy = pickle.loads(pickle.dumps(train_set))  # as workers that are not forked get it
    assert len(copy) == len(train_set)


@both_tasks
def test_the_gradient_of_mixed_batches(project: Project, tmp_path: Path) -> None:
    """That of torch's mean over all soft targets, or labelled pixels, of both ranks.

    BatchNorm, which all U-Nets have, multiplies the rounding errors of small batches.
    """
    data = project.draw(tmp_path / "set", 12, 6)
    is_plain = project.task == "classification"
    net = ["--arch", "squeezenet1_1"] if is_plain else []
    words = [*net, "--batch-size", 6, *MIXES[project.task], "--optimizer", "sgd"]
    words += ["--weight-decay", 0, "--warmup-epochs", 0]

    def keep_batches() -> None:
        import dataset

        nn.Dropout.forward = lambda _, features: features
        transform = dataset.transform_batch

        def kept(*args: object) -> tuple[Tensor, Tensor]:
            batch = transform(*args)
            torch.save(batch, tmp_path / f"rank{ddpkit.rank()}.pt")
            return batch

        dataset.transform_batch = kept

    for rate in 0, 1:
        project.train(data, tmp_path / str(rate), *words, "--lr", rate, patch=keep_batches).ok()

    @on_ranks(1)
    def compare(project: Project) -> None:
        from flags import parse_args
        from model import build_model

        states = [checkpoint.read_file(tmp_path / f"{rate}/last.pt") for rate in (0, 1)]
        weights = [state["model"] for state in states]
        flags = [*map(str, project.flags(data, tmp_path, *words))]
        model = build_model(parse_args(flags), states[1]["classes"]).train()
        model.load_state_dict(weights[0])
        nn.Dropout.forward = lambda _, features: features
        loss_sum, count = torch.zeros(()), 0
        for rank in (0, 1):
            images, targets = torch.load(tmp_path / f"rank{rank}.pt")
            is_soft = targets.is_floating_point()
            loss = partial(nn.functional.cross_entropy, ignore_index=-100 if is_soft else 255)
            loss_sum = loss_sum + loss(model(images), targets, reduction="sum")
            count += len(targets) if is_soft else int((targets != 255).sum())
        (loss_sum / count).backward()
        trained = [name for name, weight in model.named_parameters() if weight.grad is not None]
        expected = torch.cat([model.get_parameter(name).grad.flatten() for name in trained])
        steps = torch.cat([(weights[0][name] - weights[1][name]).flatten() for name in trained])
        assert (steps - expected).norm() / expected.norm() < (1e-5 if is_plain else 1e-2)

    compare(project=project)


@on_ranks(1)
def test_shares_of_mixed_images(project: Project) -> None:
    """Images of one shade per class, mixed in 40 passes: their shares are what the pixels say."""
    import dataset

    count = {"mixup": 0, "cutmix": 0}
    labels = torch.arange(6)
    images = nn.functional.one_hot(labels, 6).float()[:, :, None, None].expand(-1, -1, 32, 32)
    images = images.contiguous(memory_format=torch.channels_last)
    args = Namespace(mixup=0.4, cutmix=1.0)
    for number in range(40):
        samples.seed(number)
        mixed, targets = dataset.transform_batch(images, labels, args, 6)
        assert mixed.is_contiguous(memory_format=torch.channels_last)
        assert targets.dtype == torch.float32
        torch.testing.assert_close(mixed.mean((2, 3)), targets)
        count["cutmix" if bool(((mixed == 0) | (mixed == 1)).all()) else "mixup"] += 1
        samples.seed(number)
        again = dataset.transform_batch(images, labels, args, 6)
        assert torch.equal(again[0], mixed) and torch.equal(again[1], targets)
    assert min(count.values()) > 8


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
@on_ranks(1)
def test_masks_follow_images(project: Project) -> None:
    """Images that show their masks: pixels show the mask's class, unless next to another."""
    import dataset

    mask = np.random.default_rng(0).integers(0, 6, (6, 7)).astype(np.uint8)
    mask = mask.repeat(20, axis=0).repeat(20, axis=1)
    pair = LazyImage.of((40 + 40 * mask)[..., None].repeat(3, axis=2)), LazyImage.of(mask)
    augment, corners, classes = dataset.build_augment("vflip,rotation", None), 0, set()
    for seed in range(12):
        samples.seed(seed)
        pixels, labels = dataset.train_transform(*pair, size=96, augment=augment)
        assert type(pixels) is type(labels) is Tensor
        assert pixels.dtype == labels.dtype == torch.uint8
        padded = nn.functional.pad(labels[None, None].float(), [2] * 4, value=dataset.VOID)
        around = nn.functional.unfold(padded, 5).view(25, 96, 96)
        inside, void = (around == around[12]).all(0), labels == dataset.VOID
        shown = torch.where(void, 0, 40 + 40 * labels.int())
        assert not (((pixels.int() - shown).abs() > 1).any(0) & inside).any()
        assert (inside & ~void).sum() > 1500
        corners += bool(void[0, 0] and void[-1, -1] and not pixels[:, 0, 0].any())
        classes |= {*labels.unique().tolist()}
    assert corners > 6
    assert classes == {*range(6), 255}
    changed = []
    for number in range(20):
        samples.seed(number)
        masks = torch.arange(5)[:, None, None].expand(5, 32, 32).clone()
        images, before = masks[:, None].float().repeat(1, 3, 1, 1), masks.clone()
        mixed, targets = dataset.transform_batch(images, masks, Namespace(cutmix=1.0), 5)
        assert (mixed == targets[:, None]).all()
        changed.append(float((targets != before).float().mean()))
    assert max(changed) > 0.3
    assert len({*changed}) > 10


@both_tasks
@on_ranks(1)
def test_images_of_full_depth(project: Project) -> None:
    """What comes of float32 images with each augmentation, or that it is refused."""
    import dataset

    for channels in 1, 3, 5:
        pixels = np.random.default_rng(0).random((40, 50, channels), np.float32)
        images = [LazyImage.of(pixels)]
        if project.task == "segmentation":
            images.append(LazyImage.of(np.zeros((40, 50), np.uint8)))
        refused = set()
        for name in dataset.AUGMENTATIONS:
            try:
                augment = dataset.build_augment(name, channels)
            except UserError as error:
                assert f"--augment {name}: " in str(error)
                refused.add(name)
                continue
            for seed in range(30):  # policies draw one of 14 transforms
                samples.seed(seed)
                made = dataset.train_transform(*images, size=32, augment=augment)
                image = made if isinstance(made, Tensor) else made[0]
                assert 0 <= image.min() <= image.max() <= 1
                assert (type(image), image.dtype) == (Tensor, torch.float32)
                assert image.shape == (channels, 32, 32)
        expected = {"trivial", "rand", "color", "grey"} & {*dataset.AUGMENTATIONS}
        assert refused == (expected if channels == 5 else set())
    with pytest.raises(UserError, match="--augment nothing: "):
        dataset.build_augment("vflip,nothing", None)


def test_crops() -> None:
    """As those of torchvision's RandomResizedCrop, also where it gives up and takes the middle."""
    limits = (0.25, 1), (3 / 4, 4 / 3)
    for height, width in (375, 500), (300, 90), (2000, 9), (9, 2000):
        shape = torch.empty(3, height, width, device="meta")
        image = LazyImage(height, width, lambda *_: np.empty(0))
        samples.seed(0)
        ours = np.array([image.random_box(*limits) for _ in range(2000)])
        theirs = np.array([RandomResizedCrop.get_params(shape, *limits) for _ in range(2000)])
        for statistic in np.mean, np.std:
            apart = statistic(ours, axis=0) - statistic(theirs, axis=0)
            assert (abs(apart) <= 1 + 0.15 * theirs.std(0)).all(), statistic
    assert (ours == theirs).all()
