"""Data sets of files: images with class numbers, and images with masks.

dataset.py has a class that says what becomes of a sample that `open` returns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

from engine.data import folders, images, masks, prepared, shares
from engine.data.format import Format, read_format
from engine.data.images import LazyImage, open_image
from engine.data.samples import Packed
from engine.errors import UserError, shorten
from engine.ranks import distributed

MOST_READ = {"training": 256, "validation": 64}  # masks, for the line about the classes' shares


@dataclass
class Part:
    """The samples for training, or those for validation.

    stored: the images as prepare_data.py stored them, in the order of `samples`.
    labels: what the masks mean.
    """

    samples: Sequence[tuple]  # begin with the path of an image
    format: Format
    stored: Sequence[tuple[LazyImage, ...]] | None = None
    labels: masks.Labels = field(default_factory=lambda: masks.UNNAMED)


class Files(Dataset):
    """Samples that are files: see ImageFiles and MaskFiles.

    transform: what `__getitem__` in dataset.py applies. format: what data.json says.
    """

    def __init__(self, part: Part, transform: Callable) -> None:
        self.samples = Packed(part.samples)
        self.format = part.format
        self.stored = part.stored
        self.labels = part.labels
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def open(self, index: int) -> tuple[LazyImage, ...]:
        """Return what a sample has, decoded once it is read."""
        return self.stored[index] if self.stored else self.open_files(index)

    def open_files(self, index: int) -> tuple[LazyImage, ...]:
        raise NotImplementedError


class ImageFiles(Files):
    """Images with class numbers: `samples[index]` is (path, number), `open` returns (image,).

    The image is a LazyImage, decoded once it is read.

        class ImageDataset(engine.ImageFiles):
            def __getitem__(self, index: int) -> tuple[Tensor, int]:
                (image,) = self.open(index)
                return self.transform(image), self.samples[index][1]
    """

    def open_files(self, index: int) -> tuple[LazyImage]:
        return (open_image(self.samples[index][0], self.format),)

    def count_labels(self, index: int) -> dict[int, int]:
        """Return how often each class occurs in a sample, for --class-weights auto and others."""
        return {self.samples[index][1]: 1}


class MaskFiles(Files):
    """Images with masks: `samples[index]` is a pair of paths, `open` returns (image, mask).

    The mask has class numbers, whatever values or colours the file has, and 255 where it is void.

    Raises a UserError if image and mask differ in size.

        class SegmentationDataset(engine.MaskFiles):
            def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
                return self.transform(*self.open(index))
    """

    def open_files(self, index: int) -> tuple[LazyImage, LazyImage]:
        image_path, mask_path = self.samples[index]
        image, mask = open_image(image_path, self.format), self.open_mask(index)
        if (image.height, image.width) != (mask.height, mask.width):
            raise UserError(
                f"{mask_path}: the mask has {mask.width} x {mask.height} pixels, "
                f"{image_path} has {image.width} x {image.height}: they must be equal"
            )
        return image, mask

    def open_mask(self, index: int) -> LazyImage:
        if self.stored:
            return self.stored[index][1]
        return LazyImage.of(masks.read_mask(self.samples[index][1], self.labels, self.format))

    def count_labels(self, index: int) -> dict[int, int]:
        """Return the pixels of each class in a mask, for --class-weights auto and others."""
        pixels = shares.histogram(self.open_mask(index).read().numpy())
        return {n: int(pixels[n]) for n in np.flatnonzero(pixels).tolist() if n != masks.VOID}


def find_classes(data: Path) -> tuple[Part, Part, Sequence[str]]:
    """Return the parts for training and for validation, for ImageFiles, and the class names.

    data: a folder as README.md describes it, or one that prepare_data.py has made. Every rank has
    to call it. Says how many images each class has. Raises a UserError for any other folder.

        train, val, classes = engine.find_classes(Path("data/demo"))
        train_set = ImageDataset(train, train_transform)
    """
    train, val, classes = _find(data, folders.find_classes, 1)
    labels = ([label for _, label in part.samples] for part in (train, val))
    shares.say_images(classes, *labels)
    if not train.stored:
        images.say_depth(train.samples[0][0], train.format)
    return train, val, classes


def find_masks(data: Path) -> tuple[Part, Part, Sequence[str]]:
    """Return the parts for training and for validation, for MaskFiles, and the class names.

    As `find_classes`; says which share of the pixels each class has. Without DIR/classes.txt it
    reads all training masks for the class numbers. Raises a UserError if they cannot be such.

        train, val, classes = engine.find_masks(Path("data/demo"))
        train_set = SegmentationDataset(train, train_transform)
    """

    def find_pairs(root: Path) -> tuple[folders.Pairs, folders.Pairs, masks.Labels]:
        return *folders.find_pairs(root), masks.read_classes(root / "classes.txt")

    train, val, names = _find(data, find_pairs, 2)
    labels = names if isinstance(names, masks.Labels) else masks.parse(names, data)
    if not train.stored:
        images.say_depth(train.samples[0][0], train.format)
    train.labels = val.labels = labels
    train.labels = val.labels = distributed.await_rank_zero(survey, data, train, val)
    return train, val, train.labels


def _find(
    data: Path, find: Callable[[Path], tuple[list, list, list[str]]], each: int
) -> tuple[Part, Part, list[str]]:
    """Return the parts and the classes that `find` lists in `data`, or that are prepared there.

    A sample begins with `each` paths.
    """
    format = read_format(data)
    if store := prepared.open_store(data, find, each, format):
        train = Part(store.train, format, store.train_images)
        return train, Part(store.val, format, store.val_images), store.classes
    train_samples, val_samples, classes = find(data)
    return Part(train_samples, format), Part(val_samples, format), classes


def survey(data: Path, train: Part, val: Part) -> masks.Labels:
    """Print the classes' shares of the pixels; return the classes.

    Reads some masks, or all for training if there is no classes.txt. Raises a UserError if the
    masks cannot be meant so: fewer than two classes, or class numbers with a gap.
    """
    labels, path, total = train.labels, data / "classes.txt", len(train.samples)
    if not labels:
        distributed.say(f"no {path}, which saves time: reading {total} masks for the class numbers")
    seen = count(train, MOST_READ["training"], classes=2) if labels else count(train, 0)
    values = np.flatnonzero(seen.counts).tolist()
    found = [value for value in values if value != masks.VOID]
    if not labels and len(values) > 1 and (len(found) < 2 or found[-1] >= len(found)):
        names = ["background", "object"] if len(values) == 2 else ["NAME"] * len(values)
        lines = [f"{name} = {value}" for name, value in zip(names, values, strict=True)]
        raise UserError(
            f"{data}: the values of the training masks ({shorten(list(map(str, values)))}) are not "
            f"class numbers from 0 without a gap; write what they mean into {path}, one class per "
            f"line: {shorten(lines)}"
        )
    if len(found) < 2:
        reason = masks.explain_lack(labels, found, total, masks.VOID in values)
        raise UserError(f"{data}: {reason}")
    train.labels = val.labels = labels = labels or masks.parse([*map(str, found)], path)
    shares.say_pixels(labels, seen, count(val, MOST_READ["validation"]), masks.VOID)
    return labels


def count(part: Part, most: int, classes: int = 0) -> shares.Pixels:
    dataset = MaskFiles(part, transform=tuple)

    def read(index: int) -> np.ndarray:
        return dataset.open_mask(index).read().numpy()

    return shares.count_pixels(read, len(dataset), masks.VOID, most, classes)
