"""What --augment makes of samples, and --mixup and --cutmix of batches."""

import pickle
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from forked import run
from torch import Tensor, nn
from torchvision.transforms import RandomResizedCrop

import dataset
import ddpkit
import main
from ddpkit.data import samples
from ddpkit.data.images import LazyImage
from ddpkit.errors import UserError
from ddpkit.run import checkpoint
from model import build_model


def names() -> list[str]:
    return [*dataset.AUGMENTATIONS]


def of_channels(channels: int) -> dict[str, str]:
    """Of each name the types and ranges of what comes of float32 images, or why it is refused."""
    pixels = np.random.default_rng(0).random((40, 50, channels), np.float32)
    images = [LazyImage.of(pixels)]
    if hasattr(dataset, "VOID"):
        images.append(LazyImage.of(np.zeros((40, 50), np.uint8)))
    found = {}
    for name in dataset.AUGMENTATIONS:
        try:
            augment = dataset.build_augment(name, channels)
        except UserError as error:
            found[name] = str(error)
            continue
        kinds = set()
        for seed in range(60):  # policies draw one of 14 transforms
            samples.seed(seed)
            made = dataset.train_transform(*images, size=32, augment=augment)
            image = made if isinstance(made, Tensor) else made[0]
            assert 0 <= image.min() <= image.max() <= 1
            kinds.add(f"{type(image).__name__} {image.dtype} {tuple(image.shape)}")
        found[name] = " ".join(kinds)
    return found


def masks_that_follow() -> list[dict]:
    """Of images that show their masks: how many pixels show another class than the mask has.

    Pixels next to another class, which are interpolated, do not count.
    """
    mask = np.random.default_rng(0).integers(0, 6, (6, 7)).astype(np.uint8)
    mask = mask.repeat(20, axis=0).repeat(20, axis=1)
    shades = (40 + 40 * mask)[..., None].repeat(3, axis=2)
    pair = LazyImage.of(shades), LazyImage.of(mask)
    augment = dataset.build_augment("vflip,rotation", None)
    found = []
    for seed in range(12):
        samples.seed(seed)
        pixels, labels = dataset.train_transform(*pair, size=96, augment=augment)
        assert type(pixels) is type(labels) is Tensor
        assert pixels.dtype == labels.dtype == torch.uint8
        padded = nn.functional.pad(labels[None, None].float(), [2] * 4, value=dataset.VOID)
        around = nn.functional.unfold(padded, 5).view(25, 96, 96)
        inside = (around == around[12]).all(0)
        shown = torch.where(labels == dataset.VOID, 0, 40 + 40 * labels.int())
        wrong = ((pixels.int() - shown).abs() > 1).any(0) & inside
        void = labels == dataset.VOID
        found.append(
            {
                "wrong": int(wrong.sum()),
                "inside": int((inside & ~void).sum()),
                "corners": bool(void[0, 0] and void[-1, -1] and not pixels[:, 0, 0].any()),
                "classes": sorted(set(labels.unique().tolist())),
            }
        )
    return found


def pickled(data: str) -> None:
    """As workers that are not forked get the data set."""
    main.distributed.setup(seed=0)
    args = Namespace(data=Path(data), image_size=32, augment=",".join(names()))
    train_set, _, _ = dataset.build_datasets(args)
    copy = pickle.loads(pickle.dumps(train_set))
    for index in range(5):
        found = []
        for each in train_set, copy:
            samples.seed(index)
            found.append(each[index])
        for parts in zip(*found, strict=True):
            assert torch.equal(*map(torch.as_tensor, parts))


def mixed_batches() -> dict[str, int]:
    """Images of one shade per class, mixed in 40 passes: their shares are what the pixels say."""
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
        is_cut = bool(((mixed == 0) | (mixed == 1)).all())
        count["cutmix" if is_cut else "mixup"] += 1
        samples.seed(number)
        again = dataset.transform_batch(images, labels, args, 6)
        assert torch.equal(again[0], mixed)
        assert torch.equal(again[1], targets)
    return count


def mixed_masks() -> list[float]:
    """The share of pixels that 20 passes have changed in images that show their masks."""
    found = []
    for number in range(20):
        samples.seed(number)
        masks = torch.arange(5)[:, None, None].expand(5, 32, 32).clone()
        images = masks[:, None].float().repeat(1, 3, 1, 1)
        before = masks.clone()
        mixed, targets = dataset.transform_batch(images, masks, Namespace(cutmix=1.0), 5)
        assert (mixed == targets[:, None]).all()
        found.append(float((targets != before).float().mean()))
    return found


def gradient(data: str, folder: str, *words: object) -> float:
    """How far a step of two ranks is from the gradient of torch's mean, as a share of it."""

    def keep_batches() -> None:
        nn.Dropout.forward = lambda _, features: features
        transform = dataset.transform_batch

        def kept(*args: object) -> tuple[Tensor, Tensor]:
            batch = transform(*args)
            torch.save(batch, f"{folder}/rank{ddpkit.rank()}.pt")
            return batch

        dataset.transform_batch = kept

    weights = []
    for rate in 0, 1:
        out = f"{folder}/{rate}"
        flags = ["--data", data, "--output-dir", out, *words, "--epochs", 1, "--lr", rate]
        flags += ["--optimizer", "sgd", "--weight-decay", 0, "--warmup-epochs", 0]
        assert run(2, *flags, patch=keep_batches, draws=False) == [0, 0]
        weights.append(checkpoint.read_file(Path(out, "last.pt"))["model"])
    args = main.parse_args([*map(str, flags)])
    model = build_model(args, checkpoint.read_file(Path(out, "last.pt"))["classes"]).train()
    model.load_state_dict(weights[0])
    nn.Dropout.forward = lambda _, features: features
    batches = [torch.load(f"{folder}/rank{rank}.pt") for rank in (0, 1)]
    loss_sum, count = torch.zeros(()), 0
    for images, targets in batches:
        is_soft = targets.is_floating_point()
        loss = partial(nn.functional.cross_entropy, ignore_index=-100 if is_soft else 255)
        loss_sum = loss_sum + loss(model(images), targets, reduction="sum")
        count += len(targets) if is_soft else int((targets != 255).sum())
    (loss_sum / count).backward()
    trained = [name for name, weight in model.named_parameters() if weight.grad is not None]
    expected = torch.cat([model.get_parameter(name).grad.flatten() for name in trained])
    steps = torch.cat([(weights[0][name] - weights[1][name]).flatten() for name in trained])
    return float((steps - expected).norm() / expected.norm())


def boxes(count: int) -> list:
    """Of each of some sizes so many boxes of random_box, and of what it replaces."""
    limits = (0.25, 1), (3 / 4, 4 / 3)
    found = []
    for height, width in (375, 500), (300, 90), (2000, 9), (9, 2000):
        shape = torch.empty(3, height, width, device="meta")
        image = LazyImage(height, width, lambda *_: np.empty(0))
        samples.seed(0)
        mine = [image.random_box(*limits) for _ in range(count)]
        theirs = [RandomResizedCrop.get_params(shape, *limits) for _ in range(count)]
        found.append([mine, theirs])
    return found
