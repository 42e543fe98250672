"""The data set: images and their masks, DIR/{train,val}/{images,masks}/*."""

import functools
from argparse import Namespace, _ArgumentGroup
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import InterpolationMode as Mode

from engine.data import images, listing, lists, prepared, shares
from engine.data.images import DEFAULT_FORMAT, Format, LazyImage, open_image
from engine.data.mapped import Images
from engine.data.samples import Packed
from engine.errors import UserError
from engine.ranks import distributed
from engine.run.flags import at_least, some_of
from engine.run.palette import colors_of
from masks import VOID, Labels, parse, read_classes, read_mask, survey

IMAGE_SIZE = 512  # pixels; side of the training crops, unless --image-size says otherwise
SHORT_SIDE = 0  # pixels; of what prepare_data.py stores; 0: as large as they are
STRIDE = 32  # the networks halve an image five times
Pairs = list[tuple[str, str]]  # the paths of images and their masks
AUGMENTATIONS = {  # the names that --augment takes; add yours, if it takes masks, too
    "color": v2.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4),
    "grey": v2.RandomGrayscale(p=0.1),
    "rotation": v2.RandomRotation(  # degrees; None: black
        30, Mode.BILINEAR, fill={tv_tensors.Image: None, tv_tensors.Mask: VOID}
    ),
    "vflip": v2.RandomVerticalFlip(),
}
OF_COLORS = {"color", "grey"}  # those that take 1 or 3 channels only


def train_transform(
    image: LazyImage, mask: LazyImage, size: int, augment: v2.Transform | None = None
) -> tuple[Tensor, Tensor]:
    """Augment: image and mask of any size -> both of `size` x `size` pixels. Edit it here.

    The image is decoded no larger than the result needs. `augment` is what --augment names, on
    uint8 (with --channels: float32, 0 to 1).
    """
    zoom = 2 ** float(torch.empty(1).uniform_(-0.5, 0.5))
    side = round(size / zoom)
    top, left = (random_place(length, side) for length in (image.height, image.width))
    box = image.snap((top, left, side, side), (size, size))
    pixels, labels = image.read(box, (size, size)), mask.read(box, (size, size), fill=VOID)
    if torch.rand(()) < 0.5:
        pixels, labels = pixels.flip(-1), labels.flip(-1)
    if augment:
        pixels, labels = augment(tv_tensors.Image(pixels), tv_tensors.Mask(labels))
    return pixels, labels


def random_place(length: int, side: int) -> int:
    """Return a random offset of a box of `side` in `length` pixels, or of those in a larger box."""
    return int(torch.randint(min(0, length - side), max(0, length - side) + 1, ()))


def add_arguments(group: _ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--augment",
        metavar="NAME,...",
        type=some_of(AUGMENTATIONS),
        default=[],
        help=f"of training images, in the order given: {', '.join(AUGMENTATIONS)}",
    )
    add(
        "--cutmix",
        metavar="ALPHA",
        type=at_least(0, float),
        default=0.0,
        help="paste a box of one image and mask into another, of a share from Beta(ALPHA, ALPHA); "
        "0: off",
    )


def build_augment(names: Sequence[str], format: Format) -> v2.Transform | None:
    """Return what applies the AUGMENTATIONS `names`, in that order; None if there are none."""
    if format.channels not in (None, 1, 3) and (refused := OF_COLORS.intersection(names)):
        raise UserError(
            f"--augment {min(refused)}: takes 1 or 3 channels, not --channels {format.channels}"
        )
    chosen = [AUGMENTATIONS[name] for name in names]
    return v2.Compose([*chosen, v2.ToPureTensor()]) if names else None


def transform_batch(
    images: Tensor, targets: Tensor, args: Namespace, num_classes: int
) -> tuple[Tensor, Tensor]:
    """Augment a training batch on its device, where images are float32 and normalised."""
    if args.cutmix:
        x1, y1, x2, y2 = v2.CutMix(alpha=args.cutmix).make_params([images])["box"]
        for part in images, targets:
            part[..., y1:y2, x1:x2] = part[..., y1:y2, x1:x2].roll(1, 0)
    return images, targets


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

    With --channels the image is float32 (channels, H, W).

    prepared: both as prepare_data.py stored them, in the order of `samples`.
    """

    def __init__(
        self,
        samples: Sequence[tuple[str, str]],
        labels: Labels,
        transform: Callable[[LazyImage, LazyImage], tuple[Tensor, Tensor]],
        prepared: Sequence[tuple[LazyImage, LazyImage]] | None = None,
        format: Format = DEFAULT_FORMAT,
    ) -> None:
        self.samples = Packed(samples)
        self.labels = labels
        self.transform = transform
        self.prepared = prepared
        self.format = format

    def __len__(self) -> int:
        return len(self.samples)

    def open(self, index: int) -> tuple[LazyImage, LazyImage]:
        """Return image and mask of a sample, which prepare_data.py stores."""
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
        return LazyImage.of(read_mask(self.samples[index][1], self.labels, self.format))

    def count_labels(self, index: int) -> dict[int, int]:
        """Return the pixels of each class in a mask, for --class-weights auto and others."""
        pixels = shares.histogram(self.open_mask(index).read().numpy())
        return {n: int(pixels[n]) for n in np.flatnonzero(pixels).tolist() if n != VOID}

    def label_sources(self) -> list[str]:
        """Return the files that `count_labels` reads."""
        if isinstance(self.prepared, Images):
            return [str(self.prepared.path), str(self.prepared.path.with_name("index.json"))]
        return [mask_path for _, mask_path in self.samples]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(*(self.prepared[index] if self.prepared else self.open(index)))


def build_dataset(
    data: Path,
    image_size: int,
    format: Format = DEFAULT_FORMAT,
    augment: Sequence[str] = (),
    output: Path | None = None,
) -> tuple[SegmentationDataset, SegmentationDataset, Labels]:
    """Return the training set, the validation set and the classes of the folder `data`.

    image_size: the side of the training crops in pixels; validation keeps the images' own size.
    augment: names of AUGMENTATIONS, for the training set.
    output: a folder that keeps which values the masks hold, if there is no classes.txt.
    """
    chosen = build_augment(augment, format)
    crop = functools.partial(train_transform, size=image_size, augment=chosen)
    if store := prepared.open_store(data, find_samples, 2, format):
        labels = parse(store.classes, data)
        train = SegmentationDataset(store.train, labels, crop, store.train_images)
        val = SegmentationDataset(store.val, labels, eval_transform, store.val_images)
    else:
        train_pairs, val_pairs, labels = find_samples(data)
        images.say_depth(train_pairs[0][0], format)
        train = SegmentationDataset(train_pairs, labels, crop, format=format)
        val = SegmentationDataset(val_pairs, labels, eval_transform, format=format)
    train.labels = val.labels = distributed.await_rank_zero(survey, data, train, val, output)
    return train, val, train.labels


def find_samples(root: Path) -> tuple[Pairs, Pairs, Labels]:
    """Return the (image path, mask path) pairs for training, those for validation, and the classes.

    The pairs are those of DIR/train.csv, if there is such a list, or else of the folders; the
    classes those of DIR/classes.txt, none without it. Without a validation set, 15 % of the pairs
    are held out, always the same.
    """
    has_lists = (root / "train.csv").is_file()
    train, val = read_lists(root) if has_lists else read_folders(root)
    if val is None:
        train, val = split_pairs(train, root)
        total = len(train) + len(val)
        listing.say_split(root, len(val), total, "val.csv" if has_lists else "val")
    return train, val, read_classes(root / "classes.txt")


def split_pairs(pairs: Pairs, root: Path) -> tuple[Pairs, Pairs]:
    """Return the pairs for training and those that are held out for validation."""
    mask_of = dict(pairs)
    train, val = listing.split(list(mask_of), root)
    return [(path, mask_of[path]) for path in train], [(path, mask_of[path]) for path in val]


def read_folders(root: Path) -> tuple[Pairs, Pairs | None]:
    """Return the pairs for training and for validation; None without DIR/val.

    Without DIR/train, DIR/images and DIR/masks are taken.
    """
    train_folder, val_folder = root / "train", listing.val_folder(root)
    if not train_folder.is_dir() and (root / "images").is_dir() and (root / "masks").is_dir():
        distributed.say(f"no {train_folder}: {root / 'images'} and {root / 'masks'} are used")
        train_folder = root
    skipped = Counter[str]()
    train = find_pairs(train_folder, skipped)
    val = find_pairs(val_folder, skipped) if val_folder else None
    listing.say_skipped(skipped)
    return train, val


def read_lists(root: Path) -> tuple[Pairs, Pairs | None]:
    """Return what `read_folders` does, from DIR/train.csv and, if it exists, DIR/val.csv.

    Their columns are `image` and `mask`, paths below DIR or absolute.
    """
    train, val = (
        [(image, mask) for image, mask in lists.read_list(path, ("image", "mask"), 2)]
        if path.is_file()
        else None
        for path in (root / "train.csv", root / "val.csv")
    )
    return train or [], val


def find_pairs(folder: Path, skipped: Counter[str] | None = None) -> list[tuple[str, str]]:
    """Return (image path, mask path) for each name in `folder`/images and `folder`/masks.

    skipped: files whose type is not read are added to it, by their endings.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; README.md describes the expected folders")

    def paths(kind: str) -> dict[str, str]:
        found = listing.collect([folder / kind], skipped)
        return listing.by_name([(path, listing.composed(name)) for path, name in found])

    image_of, mask_of = paths("images"), paths("masks")
    if unmatched := sorted(image_of.keys() ^ mask_of.keys()):
        path = image_of.get(unmatched[0]) or mask_of[unmatched[0]]
        lack = "masks" if unmatched[0] in image_of else "images"
        other = next(iter((mask_of if lack == "masks" else image_of).values()))
        raise UserError(
            f"{path}: nothing of that name in {folder / lack}, which has {Path(other).name}; names "
            "must be equal but for their endings"
        )
    return [(image_of[name], mask_of[name]) for name in sorted(image_of)]


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
    What `pad` has added is left out.
    """
    own = (image != 0).any(0) | (target != VOID)
    places = own.nonzero() if own.any() else torch.tensor([[n - 1 for n in own.shape]])
    bottom, right = (places.amax(0) + 1).tolist()
    pixels = image[:, :bottom, :right].permute(1, 2, 0).numpy()
    gap = np.full((bottom, max(2, right // 128), 3), 255, np.uint8)
    masks = (output.argmax(0).byte(), target)
    parts = [overlay(pixels, mask[:bottom, :right].numpy(), classes) for mask in masks]
    axes.imshow(np.concatenate([pixels, gap, parts[0], gap, parts[1]], axis=1))
    axes.set_title("image | prediction | truth", fontsize=9)
