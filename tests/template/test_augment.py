"""--augment and --cutmix: the same on any machine, and labels that follow their images."""

import zlib
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from generated import Project, both_tasks
from PIL import Image
from ranks import on_ranks
from torch import Tensor, nn
from torchvision.io import read_image
from torchvision.transforms.v2.functional import resize

import ddpkit
from ddpkit.data import samples
from ddpkit.errors import UserError
from ddpkit.ranks import distributed
from ddpkit.vision.images import LazyImage


@both_tasks
@on_ranks(1)
def test_same_images_whatever_the_machine(project: Project, few: Path) -> None:
    """On 1, 2 and 4 ranks, with 0 to 3 workers; not without the seeds for each sample."""
    import dataset
    from flags import parse_args

    every = ",".join(dataset.AUGMENTATIONS)
    args = parse_args(["--data", str(few), "--image-size", "32", "--augment", every])
    train_set, _, classes = dataset.build_datasets(args)

    def sums(ranks: int, batch_size: int, accumulate: int, workers: int) -> list:
        """For each epoch and each global batch of 8 a checksum for each sample."""
        distributed.world_size = lambda: ranks
        found: list[dict] = [{}, {}]
        for rank in range(ranks):
            distributed.rank = lambda rank=rank: rank
            loader = ddpkit.train_loader(
                train_set,
                batch_size,
                classes=classes,
                accumulate=accumulate,
                seed=3,
                workers=workers,
            )
            for epoch in range(2):
                loader.sampler.set_epoch(epoch)
                for i, batch in enumerate(loader):
                    step = found[epoch].setdefault(i // accumulate, [])
                    for sample in zip(*batch, strict=True):
                        parts = [part.numpy().tobytes() for part in sample]
                        step.append(zlib.crc32(b"".join(parts)))
        return [[sorted(step) for step in epoch.values()] for epoch in found]

    first = sums(1, 8, 1, 0)
    assert [len(step) for step in first[0]] == [8] * 3  # of 26 images
    seeded = samples.Seeded(train_set, classes, 3)
    images = [seeded[samples.Key(epoch, 0)][0] for epoch in range(2)]
    assert not torch.equal(*images)  # of one sample
    assert sums(2, 4, 1, 1) == first
    assert sums(4, 1, 2, 0) == first
    assert sums(1, 2, 4, 3) == first
    samples.seed = lambda *key: None
    assert sums(1, 8, 1, 0) != first


@on_ranks(1)
def test_the_part_of_an_image_that_is_seen(project: Project, tmp_path: Path) -> None:
    """All of a wide and of a tall one with --crop-scale 1, squeezed; and as the flags say."""
    import dataset
    from flags import parse_args

    for part in "train", "val":
        for name, shape in ("tall", (120, 40, 3)), ("wide", (40, 120, 3)):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            noise = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
            Image.fromarray(noise).save(folder / "one.png")

    def seen(*words: str) -> tuple[list[Tensor], list[Tensor], object]:
        flags = ["--data", str(tmp_path), "--image-size", "24", *words]
        args = parse_args(flags)
        train, val, _ = dataset.build_datasets(args)
        samples.seed(0)
        return [train[0][0], train[1][0]], [val[0][0], val[1][0]], args.crop

    def is_box(found: Tensor, number: int, rows: slice, columns: slice) -> bool:
        """Whether it is that part of the image, or its mirror image, resized by torchvision."""
        name = ("tall", "wide")[number]
        pixels = read_image(str(tmp_path / "val" / name / "one.png"))
        part = resize(pixels[:, rows, columns], [24, 24], antialias=True)
        both = part, part.flip(-1)
        return min((each.int() - found.int()).abs().max() for each in both) <= 1

    whole = slice(None)
    mirrored = {share: set() for share in ("0", "0.5")}
    for share, found in mirrored.items():
        args = parse_args(["--hflip", share, "--crop-scale", "1", "--image-size", "24"])
        transform = dataset.train_transform(24, [], args.crop_scale, args.hflip)
        pixels = torch.arange(24).expand(3, 24, 24).byte()
        for number in range(20):
            samples.seed(number)
            found.add(bool(transform(pixels)[0, 0, 0] > 12))
    assert mirrored == {"0": {False}, "0.5": {False, True}}
    train, val, crop = seen("--crop-scale", "1")
    assert crop is None
    for number in range(2):
        assert is_box(train[number], number, whole, whole)
        assert is_box(val[number], number, whole, whole)
    train, val, crop = seen("--crop-scale", "1", "--crop-pct", "1")
    assert crop == 1
    assert is_box(train[1], 1, whole, whole)
    assert is_box(val[0], 0, slice(40, 80), whole)
    assert is_box(val[1], 1, whole, slice(40, 80))
    train, val, crop = seen()
    assert crop == 0.875  # 35 of 40 pixels
    assert not is_box(train[1], 1, whole, whole)
    assert is_box(val[1], 1, slice(2, 37), slice(42, 77))


@on_ranks(1)
def test_shares_of_mixed_images(project: Project) -> None:
    """Images of one shade per class, mixed in 40 passes: their shares are what the pixels say."""
    import dataset

    count = {"mixup": 0, "cutmix": 0}
    labels = torch.arange(6)
    shades = nn.functional.one_hot(labels, 6).float()
    images = shades[:, :, None, None].expand(-1, -1, 32, 32)
    args = Namespace(augment="mixup,vflip,cutmix")
    for number in range(40):
        samples.seed(number)
        mixed, targets = dataset.transform_batch(images, labels, args, 6)
        torch.testing.assert_close(mixed.mean((2, 3)), targets)
        count["cutmix" if bool(((mixed == 0) | (mixed == 1)).all()) else "mixup"] += 1
        samples.seed(number)
        again = dataset.transform_batch(images, labels, args, 6)
        assert torch.equal(again[0], mixed)
        assert torch.equal(again[1], targets)
    assert min(count.values()) > 8


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
@on_ranks(1)
def test_masks_follow_images(project: Project) -> None:
    """Images that show their masks: pixels show the mask's class, unless next to another."""
    import dataset

    mask = np.random.default_rng(0).integers(0, 6, (6, 7)).astype(np.uint8)
    mask = mask.repeat(20, axis=0).repeat(20, axis=1)
    image = (40 + 40 * mask)[..., None].repeat(3, axis=2)
    augment = ddpkit.parse_augment(dataset.AUGMENTATIONS, "vflip,rotation", None)
    transform = dataset.train_transform(96, augment, 0.5)
    classes = set()
    for seed in range(12):
        samples.seed(seed)
        pixels, labels = transform(LazyImage.of(image), LazyImage.of(mask))
        float_labels = labels[None, None].float()
        padded = nn.functional.pad(float_labels, [2] * 4, value=dataset.VOID)
        around = nn.functional.unfold(padded, 5).view(25, 96, 96)
        inside = (around == around[12]).all(0)
        void = labels == dataset.VOID
        shown = torch.where(void, 0, 40 + 40 * labels.int())
        assert not (((pixels.int() - shown).abs() > 1).any(0) & inside).any()
        assert (inside & ~void).sum() > 1500
        classes |= set(labels.unique().tolist())
    assert classes == {0, 1, 2, 3, 4, 5, 255}
    pixels, labels = dataset.val_transform(
        LazyImage.of(image[:90, :70]), LazyImage.of(mask[:90, :70])
    )
    assert pixels.shape == (3, 96, 96)  # as the network takes
    assert torch.equal(labels[:90, :70], torch.from_numpy(mask[:90, :70]))
    labels[:90, :70] = dataset.VOID
    assert (labels == dataset.VOID).all()
    changed = []
    for number in range(20):
        samples.seed(number)
        masks = torch.arange(5)[:, None, None].expand(5, 32, 32).clone()
        images = masks[:, None].float().repeat(1, 3, 1, 1)
        before = masks.clone()
        args = Namespace(cutmix=1.0)
        mixed, targets = dataset.transform_batch(images, masks, args, 5)
        assert (mixed == targets[:, None]).all()
        changed.append(float((targets != before).float().mean()))
    assert max(changed) > 0.3


@both_tasks
@on_ranks(1)
def test_images_of_full_depth(project: Project) -> None:
    """What comes of float32 images with each augmentation, or that it is refused."""
    import dataset

    for channels in 1, 5:
        pixels = np.random.default_rng(0).random((40, 50, channels), np.float32)
        images = [LazyImage.of(pixels)]
        rest = [0.25, 0.5]  # --crop-scale and --hflip
        if project.task == "segmentation":
            rest = [0.5]
            images.append(LazyImage.of(np.zeros((40, 50), np.uint8)))
        refused = set()
        for name in dataset.AUGMENTATIONS:
            try:
                augment = ddpkit.parse_augment(dataset.AUGMENTATIONS, name, channels)
            except UserError as error:
                assert f"--augment {name}: " in str(error)
                refused.add(name)
                continue
            for seed in range(30):  # policies draw one of 14 transforms
                samples.seed(seed)
                made = dataset.train_transform(32, augment, *rest)(*images)
                image = made if isinstance(made, Tensor) else made[0]
                assert 0 <= image.min() <= image.max() <= 1
                assert type(image) is Tensor
                assert image.dtype == torch.float32
                assert image.shape == (channels, 32, 32)
        expected = {"trivial", "rand", "color", "grey"} & set(dataset.AUGMENTATIONS)
        assert refused == (expected if channels == 5 else set())
