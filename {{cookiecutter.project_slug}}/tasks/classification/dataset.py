"""What it learns from: one folder of pictures per class, DIR/{train,val}/<class>/*."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2

from engine import distributed, loading
from engine.distributed import UserError

IMAGE_SIZE = 224  # pixels; what the network sees, unless --image-size says otherwise


def train_transform(size: int) -> v2.Compose:
    """Return the augmentation: PIL picture -> uint8 (3, size, size). Edit it here."""
    return v2.Compose(
        [
            v2.RandomResizedCrop(size, scale=(0.25, 1.0)),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
        ]
    )


def eval_transform(size: int) -> v2.Compose:
    """Return what validation and predict.py do instead: the middle of the picture."""
    return v2.Compose([v2.Resize(round(size / 0.875)), v2.CenterCrop(size), v2.PILToTensor()])


class ImageDataset(Dataset):
    """Pictures with their class numbers. A sample is (uint8 (3, size, size), int)."""

    def __init__(self, samples: Sequence[tuple[str, int]], transform: v2.Transform) -> None:
        self.samples = samples
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        return self.transform(loading.read_image(path)), label


def build_dataset(args: Namespace) -> tuple[ImageDataset, ImageDataset, list[str]]:
    """Return the training set, the validation set and the class names, which the folders give.

    Without DIR/val, 15 % of each class of DIR/train are set aside, always the same ones.
    """
    root = Path(args.data)
    classes = class_folders(root / "train")
    if len(classes) < 2:
        raise UserError(f"{root / 'train'}: {len(classes)} class folder(s) in it; two are needed")
    train: list[tuple[str, int]] = []
    val: list[tuple[str, int]] = []
    has_val = (root / "val").is_dir()
    if has_val and (odd := sorted(set(class_folders(root / "val")) ^ set(classes))):
        where = "val" if odd[0] in classes else "train"
        raise UserError(
            f"{root / where}: class folder {odd[0]} is missing; train and val need the same"
        )
    for label, name in enumerate(classes):
        train_paths = loading.list_images(root / "train" / name)
        if has_val:
            val_paths = loading.list_images(root / "val" / name)
        else:
            train_paths, val_paths = loading.split(train_paths, root)
        train += [(path, label) for path in train_paths]
        val += [(path, label) for path in val_paths]
    if not has_val:
        distributed.say(
            f"no {root / 'val'}: {len(val)} of {len(train) + len(val)} pictures set aside"
        )
    return (
        ImageDataset(train, train_transform(args.image_size)),
        ImageDataset(val, eval_transform(args.image_size)),
        classes,
    )


def class_folders(folder: Path) -> list[str]:
    """Return the names of the folders in `folder`, sorted: the position is the class number."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; README.md says how data has to lie")
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def draw_example(
    axes: Any, image: Tensor, target: Tensor, output: Tensor, classes: Sequence[str]
) -> None:
    """Draw one picture with its prediction and its truth on matplotlib `axes`.

    image: uint8 (3, H, W). target: int64 scalar. output: float (classes,), the network's logits.
    """
    probability, predicted = torch.softmax(output, 0).max(0)
    right = int(predicted) == int(target)
    axes.imshow(image.permute(1, 2, 0).numpy())
    axes.set_title(
        f"{classes[int(predicted)]} {probability:.0%}"
        + ("" if right else f"\nis {classes[int(target)]}"),
        color="green" if right else "red",
        fontsize=9,
    )
