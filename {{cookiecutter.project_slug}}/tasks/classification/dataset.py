"""The data set: one folder of images per class, DIR/{train,val}/<class>/*."""

import functools
import math
import os
import random
from argparse import Namespace, _ArgumentGroup
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2
from torchvision.transforms.v2 import InterpolationMode as Mode

from engine.data import images, listing, lists, prepared, shares
from engine.data.images import DEFAULT_FORMAT, Box, Format, LazyImage, open_image
from engine.data.samples import Packed
from engine.errors import UserError, shorten
from engine.ranks import distributed
from engine.run.flags import at_least, some_of

IMAGE_SIZE = 224  # pixels; what the network sees, unless --image-size says otherwise
SHORT_SIDE = 256  # pixels; of what prepare_data.py stores, unless --short-side says otherwise
AUGMENTATIONS = {  # the names that --augment takes; add yours
    "trivial": v2.TrivialAugmentWide(interpolation=Mode.BILINEAR),  # arXiv:2103.10158
    "rand": v2.RandAugment(interpolation=Mode.BILINEAR),  # arXiv:1909.13719
    "color": v2.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4),
    "grey": v2.RandomGrayscale(p=0.1),
    "rotation": v2.RandomRotation(30, Mode.BILINEAR),  # degrees
    "vflip": v2.RandomVerticalFlip(),
    "erasing": v2.RandomErasing(p=0.25),  # arXiv:1708.04896; in black
}
OF_COLORS = {"trivial", "rand", "color", "grey"}  # those that take 1 or 3 channels only


def train_transform(image: LazyImage, size: int, augment: v2.Transform | None = None) -> Tensor:
    """Augment: an image of any size -> uint8 (3, size, size). Edit it here.

    The image is decoded no larger than the result needs. `augment` is what --augment names, on
    uint8 (with --channels: float32, 0 to 1); images are normalised on the device.
    """
    box = random_box(image.height, image.width, scale=(0.25, 1), ratio=(3 / 4, 4 / 3))
    pixels = image.read(box, (size, size))
    pixels = pixels.flip(-1) if random.random() < 0.5 else pixels
    return augment(pixels) if augment else pixels


def random_box(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> Box:
    """Return the part of an image that RandomResizedCrop would take, in a tenth of its time.

    scale: the range of its area, 1 being the whole image; ratio: that of its width / height.
    """
    for _ in range(10):
        area = height * width * random.uniform(*scale)
        aspect = math.exp(random.uniform(*map(math.log, ratio)))
        rows, columns = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < rows <= height and 0 < columns <= width:
            top, left = random.randint(0, height - rows), random.randint(0, width - columns)
            return top, left, rows, columns
    rows, columns = min(height, round(width / ratio[0])), min(width, round(height * ratio[1]))
    return (height - rows) // 2, (width - columns) // 2, rows, columns


def add_arguments(group: _ArgumentGroup) -> None:
    names, alpha = ", ".join(AUGMENTATIONS), at_least(0, float)
    add = group.add_argument
    add(
        "--augment",
        metavar="NAME,...",
        type=some_of(AUGMENTATIONS),
        default=[],
        help=f"of training images, in the order given: {names}",
    )
    add(
        "--mixup",
        metavar="ALPHA",
        type=alpha,
        default=0.0,
        help="mix pairs of images, and their labels, by a share from Beta(ALPHA, ALPHA); 0: off",
    )
    add(
        "--cutmix",
        metavar="ALPHA",
        type=alpha,
        default=0.0,
        help="paste a box of one image, of such a share, into another; 0: off; with --mixup each "
        "batch gets one of both",
    )


def build_augment(names: Sequence[str], format: Format) -> v2.Transform | None:
    """Return what applies the AUGMENTATIONS `names`, in that order; None if there are none."""
    if format.channels not in (None, 1, 3) and (refused := OF_COLORS.intersection(names)):
        raise UserError(
            f"--augment {min(refused)}: takes 1 or 3 channels, not --channels {format.channels}"
        )
    return v2.Compose([AUGMENTATIONS[name] for name in names]) if names else None


def transform_batch(
    images: Tensor, targets: Tensor, args: Namespace, num_classes: int
) -> tuple[Tensor, Tensor]:
    """Augment a training batch on its device, where images are float32 and normalised.

    With --mixup or --cutmix targets become float32 (N, classes): the share of each class.
    """
    kinds = (v2.MixUp, args.mixup), (v2.CutMix, args.cutmix)
    mixes = [mix(alpha=alpha, num_classes=num_classes) for mix, alpha in kinds if alpha]
    if mixes:
        images, targets = v2.RandomChoice(mixes)(images, targets)
        images = images.contiguous(memory_format=torch.channels_last)  # which MixUp loses on GPUs
    return images, targets


def eval_transform(image: LazyImage, size: int) -> Tensor:
    """Return the middle of the image, uint8 (3, size, size), for validation and predict.py."""
    side = round(0.875 * min(image.height, image.width))
    box = ((image.height - side) // 2, (image.width - side) // 2, side, side)
    return image.read(box, (size, size))


class ImageDataset(Dataset):
    """Images with their class numbers. A sample is (uint8 (3, size, size), int).

    With --channels the image is float32 (channels, size, size).

    prepared: the images as prepare_data.py stored them, in the order of `samples`.
    """

    def __init__(
        self,
        samples: Sequence[tuple[str, int]],
        transform: Callable[[LazyImage], Tensor],
        prepared: Sequence[tuple[LazyImage]] | None = None,
        format: Format = DEFAULT_FORMAT,
    ) -> None:
        self.samples = Packed(samples)
        self.transform = transform
        self.prepared = prepared
        self.format = format

    def __len__(self) -> int:
        return len(self.samples)

    def open(self, index: int) -> tuple[LazyImage]:
        """Return what prepare_data.py stores of a sample."""
        return (open_image(self.samples[index][0], self.format),)

    def count_labels(self, index: int) -> dict[int, int]:
        """Return how often each class occurs in a sample, for --class-weights auto and others."""
        return {self.samples[index][1]: 1}

    def label_sources(self) -> list[str]:
        """Return the files that `count_labels` reads."""
        return []

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        (image,) = self.prepared[index] if self.prepared else self.open(index)
        return self.transform(image), self.samples[index][1]


def build_dataset(
    data: Path,
    image_size: int,
    format: Format = DEFAULT_FORMAT,
    augment: Sequence[str] = (),
    output: Path | None = None,
) -> tuple[ImageDataset, ImageDataset, list[str]]:
    """Return the training set, the validation set and the class names of the folder `data`.

    image_size: the side, in pixels, of the images that both return.
    augment: names of AUGMENTATIONS, for the training set.
    output: not needed here; for segmentation it keeps what the masks hold.
    """
    chosen = build_augment(augment, format)
    crop = functools.partial(train_transform, size=image_size, augment=chosen)
    middle = functools.partial(eval_transform, size=image_size)
    store = prepared.open_store(data, find_samples, 1, format)
    train, val, classes = (store.train, store.val, store.classes) if store else find_samples(data)
    shares.say_images(classes, [label for _, label in train], [label for _, label in val])
    if not store:
        images.say_depth(train[0][0], format)
    stored = (store.train_images, store.val_images) if store else (None, None)
    return (
        ImageDataset(train, crop, stored[0], format),
        ImageDataset(val, middle, stored[1], format),
        classes,
    )


def find_samples(root: Path) -> tuple[list[tuple[str, int]], list[tuple[str, int]], list[str]]:
    """Return the samples, (path, class number), for training and for validation, and the classes.

    They are those of DIR/train.csv, if there is such a list, or else of the class folders. Without
    a validation set, 15 % of each class is held out, always the same images.
    """
    has_lists = (root / "train.csv").is_file()
    train_of, val_of = read_lists(root) if has_lists else read_folders(root)
    train: list[tuple[str, int]] = []
    val: list[tuple[str, int]] = []
    for label, (name, train_paths) in enumerate(train_of.items()):
        if val_of is None:
            train_paths, val_paths = listing.split(train_paths, root)
        else:
            val_paths = val_of.get(name, [])
        train += [(path, label) for path in train_paths]
        val += [(path, label) for path in val_paths]
    if val_of is None:
        name = "val.csv" if has_lists else "val"
        whole = [each for each, paths in train_of.items() if len({*paths}) == 1]
        listing.say_split(root, len(val), len(train) + len(val), name, whole)
    return train, val, list(train_of)


def read_folders(root: Path) -> tuple[dict[str, list[str]], dict[str, list[str]] | None]:
    """Return the images of each class for training, and for validation; None without DIR/val.

    Without DIR/train, the folders in DIR are the classes.
    """
    train_folder, val_folder = find_train(root), listing.val_folder(root)
    classes, skipped = class_folders(train_folder), Counter[str]()
    if len(classes) < 2:
        raise UserError(
            f"{train_folder}: {len(classes)} class folder(s) found; at least two are needed"
        )
    val_classes = class_folders(val_folder) if val_folder else {}
    if val_folder and (unmatched := sorted(val_classes.keys() ^ classes.keys())):
        where = val_folder if unmatched[0] in classes else train_folder
        raise UserError(
            f"{where}: class folder {unmatched[0]} is missing; train and val need the same"
        )
    train_of, val_of = (
        {name: listing.list_images(folder, skipped) for name, folder in folders.items()}
        for folders in (classes, val_classes)
    )
    listing.say_skipped(skipped)
    return train_of, val_of if val_folder else None


def read_lists(root: Path) -> tuple[dict[str, list[str]], dict[str, list[str]] | None]:
    """Return what `read_folders` does, from DIR/train.csv and, if it exists, DIR/val.csv.

    Their columns are `file`, a path below DIR or absolute, and `label`, the name of a class.
    """
    found = []
    for path in root / "train.csv", root / "val.csv":
        paths_of: dict[str, list[str]] = {}
        for file, name in lists.read_list(path, ("file", "label"), 1) if path.is_file() else ():
            paths_of.setdefault(name, []).append(file)
        found.append({name: paths_of[name] for name in sort_names(paths_of)})
    train_of, val_of = found
    if len(train_of) < 2:
        raise UserError(f"{root / 'train.csv'}: one class only; at least two are needed")
    if unknown := sorted(val_of.keys() - train_of.keys()):
        raise UserError(f"{root / 'val.csv'}: label {unknown[0]} is not in train.csv")
    return train_of, val_of or None


def find_train(root: Path) -> Path:
    """Return DIR/train, or DIR if it has none and all its folders look like those of classes."""
    train = root / "train"
    if train.is_dir() or not root.is_dir():
        return train
    names = next(listing.walk(root))[1]
    others = {"train", "training", "test", "testing", "images", "masks", *listing.VAL_NAMES}
    no_class = [
        str(root / name)
        for name in names
        if name.lower() in others or not any(map(listing.is_image, os.listdir(root / name)))
    ]
    if no_class or len(names) < 2:
        found = f"{shorten(no_class)} cannot be classes" if no_class else "no class folders"
        raise UserError(
            f"{train}: no such folder; expected {train}/<class>/* or {root}/<class>/*, but {found}"
        )
    distributed.say(f"no {train}: the class folders in {root} are used")
    return root


def class_folders(folder: Path) -> dict[str, Path]:
    """Return the folder of each class in `folder`: the position is the class number.

    They are sorted by name, by number if all names are numbers.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; README.md describes the expected folders")
    _, names, files = next(listing.walk(folder))
    if unreadable := [name for name in names if name.encode("utf-8", "ignore").decode() != name]:
        raise UserError(f"{folder / unreadable[0]}: the class name is not UTF-8; rename the folder")
    if loose := sum(map(listing.is_image, files)):
        distributed.say(f"{folder}: {loose} image(s) beside the class folders are not used")
    folders = listing.by_name([(str(folder / name), listing.composed(name)) for name in names])
    return {name: Path(folders[name]) for name in sort_names(folders)}


def sort_names(names: Collection[str]) -> list[str]:
    """Return `names` sorted, by number if all of them are numbers."""
    are_numbers = all(name.isdecimal() for name in names)
    return sorted(names, key=lambda name: (int(name) if are_numbers else 0, name))


def draw_example(
    axes: Any, image: Tensor, target: Tensor, output: Tensor, classes: Sequence[str]
) -> None:
    """Draw one image with its prediction and its true class on matplotlib `axes`.

    image: uint8 (3, H, W). target: int64 scalar. output: float (classes,), the network's logits.
    """
    probability, predicted = torch.softmax(output, 0).max(0)
    is_right = int(predicted) == int(target)
    axes.imshow(image.permute(1, 2, 0).numpy())
    axes.set_title(
        f"{classes[int(predicted)]} {probability:.0%}"
        + ("" if is_right else f"\nis {classes[int(target)]}"),
        color="green" if is_right else "red",
        fontsize=9,
    )
