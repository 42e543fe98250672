"""What it learns from: pictures and masks of class numbers, DIR/{train,val}/{images,masks}/*."""

import functools
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from engine import distributed, loading
from engine.distributed import UserError

IMAGE_SIZE = 512  # pixels; side of the training crops, unless --image-size says otherwise
VOID = 255  # the mask value that counts for nothing, neither in the loss nor in the metrics
STRIDE = 32  # the networks halve a picture five times
FILL = {tv_tensors.Image: 0, tv_tensors.Mask: VOID}  # what lies beyond a picture's edge
COLORS = np.array(  # of the classes in pictures; class 0 is left as it is
    [[0, 0, 0], [230, 60, 40], [60, 140, 240], [250, 200, 40], [70, 190, 90], [180, 80, 200]]
)


def train_transform(image: Tensor, mask: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Augment: picture and mask of any size -> both of `size` x `size` pixels. Edit it here."""
    zoom = 2 ** float(torch.empty(1).uniform_(-0.5, 0.5))
    # Cropped before it is resized, so that only the pixels that stay are worked on.
    crop = v2.RandomCrop(round(size / zoom), pad_if_needed=True, fill=FILL)
    image, mask = v2.RandomHorizontalFlip()(*crop(image, mask))
    return F.resize(image, [size, size]), F.resize(mask, [size, size])


def eval_transform(image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Keep picture and mask at their own size, but for padding."""
    return pad(image, 0), pad(mask, VOID)


def pad(pixels: Tensor, fill: int) -> Tensor:
    """Return `pixels` (..., H, W), padded at the right and below to multiples of STRIDE."""
    height, width = pixels.shape[-2:]
    edges = (0, -width % STRIDE, 0, -height % STRIDE)
    return torch.nn.functional.pad(pixels, edges, value=fill)


class SegmentationDataset(Dataset):
    """Pictures with their masks. A sample is (uint8 (3, H, W), uint8 (H, W))."""

    def __init__(
        self, pairs: Sequence[tuple[str, str]], num_classes: int, transform: Callable
    ) -> None:
        self.samples = pairs
        self.num_classes = num_classes
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image_path, mask_path = self.samples[index]
        image = loading.read_image(image_path)
        mask = read_mask(mask_path, self.num_classes)
        if image.size != mask.shape[::-1]:
            raise UserError(
                f"{mask_path}: the mask has {mask.shape[1]} x {mask.shape[0]} pixels, "
                f"{image_path} has {image.width} x {image.height}: they have to be equal"
            )
        picture = tv_tensors.Image(F.pil_to_tensor(image))
        return self.transform(picture, tv_tensors.Mask(torch.from_numpy(mask)))


def build_dataset(args: Namespace) -> tuple[SegmentationDataset, SegmentationDataset, list[str]]:
    """Return the training set, the validation set and the class names.

    The names are the lines of DIR/classes.txt; without that file the training masks are read
    once and the classes numbered up to the highest value found. Without DIR/val, 15 % of
    DIR/train are set aside, always the same ones.
    """
    root = Path(args.data)
    train = find_pairs(root / "train")
    if (root / "val").is_dir():
        val = find_pairs(root / "val")
    else:
        mask_of = dict(train)
        parts = loading.split(list(mask_of), root)
        train, val = ([(path, mask_of[path]) for path in part] for part in parts)
        distributed.say(f"no {root / 'val'}: {len(val)} of {len(mask_of)} pictures set aside")
    classes = distributed.from_rank_zero(read_classes, root, [mask for _, mask in train])
    augment = functools.partial(train_transform, size=args.image_size)
    return (
        SegmentationDataset(train, len(classes), augment),
        SegmentationDataset(val, len(classes), eval_transform),
        classes,
    )


def find_pairs(folder: Path) -> list[tuple[str, str]]:
    """Return (picture, mask) for each picture in `folder`/images and mask in `folder`/masks."""
    images, masks = (
        loading.by_name(loading.collect([folder / kind])) for kind in ("images", "masks")
    )
    if odd := sorted(images.keys() ^ masks.keys()):
        path = images.get(odd[0]) or masks[odd[0]]
        lack = "masks" if odd[0] in images else "images"
        raise UserError(f"{path}: nothing of that name in {folder / lack}; add it or remove this")
    return [(images[name], masks[name]) for name in sorted(images)]


def read_classes(root: Path, masks: Sequence[str]) -> list[str]:
    """Return the class names of `root`, as told at `build_dataset`."""
    names = root / "classes.txt"
    if names.is_file():
        try:
            lines = names.read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError:
            raise UserError(f"{names}: not UTF-8; save it as such") from None
        classes = [line.strip() for line in lines if line.strip()]
        if not 2 <= len(set(classes)) == len(classes) <= VOID:
            raise UserError(f"{names}: it has to hold 2 to {VOID} names, each another")
        return classes
    print(f"no {names}: reading {len(masks)} masks for the class numbers", flush=True)
    with ThreadPoolExecutor() as pool:
        highest = max(pool.map(lambda path: highest_class(read_mask(path, VOID)), masks))
    if highest < 1:
        raise UserError(
            f"{root / 'train' / 'masks'}: no value but 0 and {VOID} in any mask; {VOID} is void, "
            "not a class: number the classes from 0 up"
        )
    return [str(number) for number in range(highest + 1)]


def highest_class(mask: np.ndarray) -> int:
    return int(mask[mask != VOID].max(initial=0))


def read_mask(path: str, num_classes: int) -> np.ndarray:
    """Return the mask at `path`, uint8 (H, W): class numbers below `num_classes`, or VOID."""
    mask = np.array(loading.read_image(path, mode=None))
    if mask.ndim != 2:
        raise UserError(
            f"{path}: a mask with {mask.shape[2]} channels; it has to hold class numbers"
        )
    labels = np.unique(mask)
    if (odd := labels[(labels >= num_classes) & (labels != VOID)]).size:
        raise UserError(
            f"{path}: label {odd[0]}, but the classes are 0 to {num_classes - 1} ({VOID} is void); "
            "mend the mask or name the class in classes.txt"
        )
    return mask.astype(np.uint8)


def overlay(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return uint8 (H, W, 3): `image` (same) tinted by `mask` (H, W); void is white."""
    colors = np.where((mask == VOID)[..., None], 255, COLORS[(mask - 1) % (len(COLORS) - 1) + 1])
    tinted = (0.4 * image + 0.6 * colors).astype(np.uint8)
    return np.where((mask == 0)[..., None], image, tinted)


def draw_example(
    axes: Any, image: Tensor, target: Tensor, output: Tensor, classes: Sequence[str]
) -> None:
    """Draw one picture, its prediction and its truth side by side on matplotlib `axes`.

    image: uint8 (3, H, W). target: uint8 (H, W). output: float (classes, H, W), logits.
    """
    picture = image.permute(1, 2, 0).numpy()
    prediction = output.argmax(0).numpy().astype(np.uint8)
    parts = [picture, overlay(picture, prediction), overlay(picture, target.numpy())]
    axes.imshow(np.concatenate(parts, axis=1))
    axes.set_title("picture | prediction | truth", fontsize=9)
