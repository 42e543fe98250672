"""The data set: images and masks of class numbers, DIR/{train,val}/{images,masks}/*."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from engine.data import images, prepared
from engine.data.images import DEFAULT_FORMAT, Format, LazyImage, open_image
from engine.data.samples import Packed
from engine.errors import UserError
from engine.ranks import distributed
from engine.run.palette import colors_of

IMAGE_SIZE = 512  # pixels; side of the training crops, unless --image-size says otherwise
SHORT_SIDE = 0  # pixels; of what prepare_data.py stores; 0: as large as they are
VOID = 255  # the mask value that both loss and metrics ignore
STRIDE = 32  # the networks halve an image five times


def train_transform(image: LazyImage, mask: LazyImage, size: int) -> tuple[Tensor, Tensor]:
    """Augment: image and mask of any size -> both of `size` x `size` pixels. Edit it here.

    The image is decoded no larger than the result needs. Put further augmentation here as well, on
    uint8; `torchvision.tv_tensors` tells the transforms of torchvision which is the mask.
    """
    zoom = 2 ** float(torch.empty(1).uniform_(-0.5, 0.5))
    side = round(size / zoom)
    top, left = (random_place(length, side) for length in (image.height, image.width))
    box = image.snap((top, left, side, side), (size, size))
    pixels, labels = image.read(box, (size, size)), mask.read(box, (size, size), fill=VOID)
    if torch.rand(()) < 0.5:
        pixels, labels = pixels.flip(-1), labels.flip(-1)
    return pixels, labels


def random_place(length: int, side: int) -> int:
    """Return a random offset of a box of `side` in `length` pixels, or of those in a larger box."""
    return int(torch.randint(min(0, length - side), max(0, length - side) + 1, ()))


def eval_transform(image: LazyImage, mask: LazyImage) -> tuple[Tensor, Tensor]:
    """Return image and mask at their own size, padded to multiples of STRIDE."""
    return pad(image.read(), 0), pad(mask.read(), VOID)


def pad(pixels: Tensor, fill: int) -> Tensor:
    """Return `pixels` (..., H, W), padded at the right and below to multiples of STRIDE."""
    height, width = pixels.shape[-2:]
    edges = (0, -width % STRIDE, 0, -height % STRIDE)
    return torch.nn.functional.pad(pixels, edges, value=fill)


class SegmentationDataset(Dataset):
    """Images with their masks. A sample is (uint8 (3, H, W), uint8 (H, W)).

    prepared: both as prepare_data.py stored them, in the order of `samples`.
    """

    def __init__(
        self,
        samples: Sequence[tuple[str, str]],
        num_classes: int,
        transform: Callable[[LazyImage, LazyImage], tuple[Tensor, Tensor]],
        prepared: Sequence[tuple[LazyImage, LazyImage]] | None = None,
        format: Format = DEFAULT_FORMAT,
    ) -> None:
        self.samples = Packed(samples)
        self.num_classes = num_classes
        self.transform = transform
        self.prepared = prepared
        self.format = format

    def __len__(self) -> int:
        return len(self.samples)

    def open(self, index: int) -> tuple[LazyImage, LazyImage]:
        """Return what prepare_data.py stores of a sample."""
        image_path, mask_path = self.samples[index]
        image, mask = open_image(image_path, self.format), self.open_mask(index)
        if (image.height, image.width) != (mask.height, mask.width):
            raise UserError(
                f"{mask_path}: the mask has {mask.width} x {mask.height} pixels, "
                f"{image_path} has {image.width} x {image.height}: they must be equal"
            )
        return image, mask

    def open_mask(self, index: int) -> LazyImage:
        if self.prepared:
            return self.prepared[index][1]
        return LazyImage.of(read_mask(self.samples[index][1], self.num_classes))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(*(self.prepared[index] if self.prepared else self.open(index)))


def build_dataset(
    data: Path, image_size: int, format: Format = DEFAULT_FORMAT
) -> tuple[SegmentationDataset, SegmentationDataset, list[str]]:
    """Return the training set, the validation set and the class names of the folder `data`.

    image_size: the side of the training crops in pixels; validation keeps the images' own size.
    """
    augment = functools.partial(train_transform, size=image_size)
    if store := prepared.open_store(data, find_samples, each=2):
        classes = store.classes
        train = SegmentationDataset(store.train, len(classes), augment, store.train_images)
        val = SegmentationDataset(store.val, len(classes), eval_transform, store.val_images)
    else:
        train_pairs, val_pairs, names = find_samples(data)
        classes = names or distributed.from_rank_zero(number_classes, data, train_pairs)
        train = SegmentationDataset(train_pairs, len(classes), augment, format=format)
        val = SegmentationDataset(val_pairs, len(classes), eval_transform, format=format)
    distributed.from_rank_zero(check_masks, train, data)
    return train, val, classes


def find_samples(root: Path) -> tuple[list[tuple[str, str]], list[tuple[str, str]], list[str]]:
    """Return the (image path, mask path) pairs for training, those for validation, and the classes.

    The names are the lines of DIR/classes.txt; none without that file. Without DIR/val, 15 % of
    DIR/train is held out, always the same images.
    """
    train = find_pairs(root / "train")
    if (root / "val").is_dir():
        val = find_pairs(root / "val")
    else:
        mask_of = dict(train)
        parts = images.split(list(mask_of), root)
        train, val = ([(path, mask_of[path]) for path in part] for part in parts)
        distributed.say(
            f"no {root / 'val'}: {len(val)} of {len(mask_of)} images used for validation"
        )
    return train, val, read_classes(root / "classes.txt")


def find_pairs(folder: Path) -> list[tuple[str, str]]:
    """Return (image path, mask path) for each name in `folder`/images and `folder`/masks."""
    image_of, mask_of = (
        images.by_name(images.collect([folder / kind])) for kind in ("images", "masks")
    )
    if unmatched := sorted(image_of.keys() ^ mask_of.keys()):
        path = image_of.get(unmatched[0]) or mask_of[unmatched[0]]
        lack = "masks" if unmatched[0] in image_of else "images"
        raise UserError(f"{path}: nothing of that name in {folder / lack}; add it or remove this")
    return [(image_of[name], mask_of[name]) for name in sorted(image_of)]


def read_classes(path: Path) -> list[str]:
    """Return the class names, the lines of the file at `path`; none without it."""
    if not path.is_file():
        return []
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8; save it as UTF-8") from None
    classes = [line.strip() for line in lines if line.strip()]
    if not 2 <= len(set(classes)) == len(classes) <= VOID:
        raise UserError(f"{path}: needs 2 to {VOID} unique names, one per line")
    return classes


def number_classes(root: Path, train: Sequence[tuple[str, str]]) -> list[str]:
    """Return the class numbers as names, up to the highest in the masks of `train` (reads all)."""
    names = root / "classes.txt"
    distributed.say(f"no {names}: reading {len(train)} masks for the class numbers")
    with ThreadPoolExecutor() as pool:
        highest = max(pool.map(lambda pair: highest_class(read_mask(pair[1], VOID)), train))
    return [str(number) for number in range(highest + 1)]


def highest_class(mask: np.ndarray) -> int:
    return int(mask[mask != VOID].max(initial=0))


def check_masks(train: SegmentationDataset, root: Path) -> None:
    """Raise a UserError unless the training masks hold at least two classes.

    Reads masks in random order until it has seen two: usually a few, all before it raises.
    """
    found: set[int] = set()
    order = np.random.default_rng(0).permutation(len(train))
    with ThreadPoolExecutor() as pool:
        for start in range(0, len(order), 16):
            for mask in pool.map(train.open_mask, order[start : start + 16]):
                labels = mask.read()
                labels = labels[labels != VOID]
                found |= {int(labels.min()), int(labels.max())} if len(labels) else set()
            if len(found) > 1:
                return
            if start == 1024:
                distributed.say(f"{root}: one class in {start} training masks, reading the rest")
    only = f"class {found.pop()} and nothing else" if found else "no class"
    raise UserError(
        f"{root}: all {len(train)} training masks hold {only} ({VOID} is void, not a class): "
        f"if {VOID} is meant as a class, write its number, such as 1, instead"
    )


def read_mask(path: str, num_classes: int) -> np.ndarray:
    """Return the mask at `path`, uint8 (H, W): class numbers below `num_classes`, or VOID."""
    mask = np.array(images.read_image(path, mode=None))  # a palette's numbers, not its colours
    if mask.ndim != 2:
        raise UserError(f"{path}: a mask with {mask.shape[2]} channels; it must hold class numbers")
    with np.errstate(invalid="ignore"):  # NaN
        labels = mask.astype(np.uint8)
    if (unknown := (mask != labels) | ((labels >= num_classes) & (labels != VOID))).any():
        raise UserError(
            f"{path}: label {mask[unknown].min()}, but the classes are 0 to {num_classes - 1} "
            f"({VOID} is void); correct the mask or name the class in classes.txt"
        )
    return labels


def overlay(image: np.ndarray, mask: np.ndarray, classes: Sequence[str]) -> np.ndarray:
    """Return uint8 (H, W, 3): `image` (same) tinted by `mask` (H, W), whose void is white.

    Classes whose colour is black, such as class 0 unless classes.txt has another, are not tinted.
    """
    table = np.full((256, 3), 255)
    table[: len(classes)] = colors_of(classes)
    colors = table[mask]
    tinted = (0.4 * image + 0.6 * colors).astype(np.uint8)
    return np.where(colors.any(-1, keepdims=True), tinted, image)


def draw_example(
    axes: Any, image: Tensor, target: Tensor, output: Tensor, classes: Sequence[str]
) -> None:
    """Draw one image, its prediction and its true mask side by side on matplotlib `axes`.

    image: uint8 (3, H, W). target: uint8 (H, W). output: float (classes, H, W), logits.
    """
    pixels = image.permute(1, 2, 0).numpy()
    prediction = output.argmax(0).numpy().astype(np.uint8)
    parts = [pixels, overlay(pixels, prediction, classes)]
    parts.append(overlay(pixels, target.numpy(), classes))
    axes.imshow(np.concatenate(parts, axis=1))
    axes.set_title("image | prediction | truth", fontsize=9)
