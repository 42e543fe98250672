"""Input pipelines: CPU time for an image, from its file to a batch in the training process.

A whole DataLoader with one worker and batches of 32. What counts is the time on a CPU of both
processes, after a first pass that does not: starting, listing and importing are not in it. All
pipelines crop, resize and flip in the same ranges, those of the project's train_transform, and are
compared with those that hand over the same: first normalised float32, which the project and timm
make of a batch in the training process (here with one thread; beside a GPU there), then uint8.
Linux only.

Classification: torchvision's reference recipe is that of references/classification in its
repository: PIL, RandomResizedCrop, RandomHorizontalFlip, ToTensor, Normalize. "v2 on tensors" is
the same with transforms.v2 on what torchcodec decodes, or torchvision.io where that is missing.
"timm" is its create_loader without color jitter. A third table has what images take once they were
shrunk to a short side of 256 pixels: as JPEGs, or decoded. That is not in the time.
Segmentation: torchvision's reference recipe is that of references/segmentation: the whole image and
mask resized, flipped, padded and cropped, then converted and normalised. The reference draws the
size uniformly from 0.5 to 2 times a base size; here it is from 2**-0.5 to 2**0.5 times the image's
own, the range of the project, so that images are enlarged as much on either side.

The project's JPEGs are decoded by simplejpeg, or by Pillow where it is missing.
"""

import contextlib
import importlib.util
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision import transforms
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

BATCH = 32
NORMALIZE = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
SHORT_SIDE = 256  # pixels
READS = {"classification": 2400, "segmentation": 480}
SIDES = {"classification": (500, 375), "segmentation": (960, 720)}
LARGE = (1600, 1200)
DECODERS = common.image_decoders()
AS_UINT8 = v2.PILToTensor()  # leaves tensors as they are
AS_FLOAT = v2.Compose(
    [AS_UINT8, v2.ToDtype(torch.float, scale=True), v2.Normalize(**NORMALIZE)]
)


class Files(Dataset):
    """Samples, (path, class number) or (path, path of the mask), each read by `read`."""

    def __init__(self, samples: Sequence[tuple], read: Callable[..., tuple]) -> None:
        self.samples = samples
        self.read = read

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple:
        return self.read(*self.samples[index])


def open_image(path: str, mode: str = "RGB") -> Image.Image:
    with Image.open(path) as image:
        return image.convert(mode)


def decode(path: str, mode: str = "RGB") -> Tensor:
    data = torch.from_numpy(np.fromfile(path, np.uint8))
    return DECODERS.decode_image(data, mode="UNCHANGED" if mode == "L" else mode)


def load_raw(path: str) -> Tensor:
    return torch.from_numpy(np.load(path + ".npy"))


def classify(open_image: Callable, transform: Callable, path: str, label: int) -> tuple:
    return transform(open_image(path)), label


def v1_transforms(side: int) -> Callable:
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(side, scale=(0.25, 1)),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(**NORMALIZE),
        ]
    )


def v2_transforms(side: int, finish: Callable) -> Callable:
    crop = v2.RandomResizedCrop(side, scale=(0.25, 1))
    return v2.Compose([crop, v2.RandomHorizontalFlip(), finish])


def segment(
    open_image: Callable, finish: Callable, side: int, path: str, mask_path: str
) -> tuple[Tensor, Tensor]:
    """Torchvision's reference recipe for an image and its mask, on PIL or on tensors."""
    image = open_image(path)
    mask = open_image(mask_path, "L")
    short = min(F.get_size(image))
    low = round(short * 2**-0.5)
    high = round(short * 2**0.5)
    length = [int(torch.randint(low, high + 1, ()))]
    image = F.resize(image, length, antialias=True)
    mask = F.resize(mask, length, InterpolationMode.NEAREST)
    if torch.rand(()) < 0.5:
        image = F.horizontal_flip(image)
        mask = F.horizontal_flip(mask)
    height, width = F.get_size(image)
    if min(height, width) < side:
        edges = [0, 0, max(0, side - width), max(0, side - height)]
        image = F.pad(image, edges, fill=0)
        mask = F.pad(mask, edges, fill=common.VOID)
        height, width = F.get_size(image)
    top = int(torch.randint(height - side + 1, ()))
    left = int(torch.randint(width - side + 1, ()))
    image = F.crop(image, top, left, side, side)
    mask = AS_UINT8(F.crop(mask, top, left, side, side))[0]
    return finish(image), mask.long() if finish is AS_FLOAT else mask


def shrink(data: Path, folder: Path, side: int) -> Path:
    """Write the images of `data` with a short side of `side`, as JPEGs and as NAME.jpg.npy."""
    for path in data.rglob("*.jpg"):
        image = F.resize(open_image(str(path)), [side], antialias=True)
        place = folder / path.relative_to(data)
        place.parent.mkdir(parents=True, exist_ok=True)
        image.save(place, quality=90)
        np.save(f"{place}.npy", F.pil_to_tensor(image).numpy())
    return folder


def training_set(data: Path, *words: object) -> tuple[Any, Sequence[str], Any]:
    """Return the project's data set of `data`, its classes, and the device."""
    import ddp
    from dataset import build_datasets
    from flags import parse_args

    args = parse_args(list(map(str, ("--data", data, *words))))
    device = ddp.setup(0, args)
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):  # what it says of each folder
        dataset, _, classes = build_datasets(args)
    return dataset, classes, device


def reference(read: Callable[..., tuple], data: Path, reads: int) -> DataLoader:
    """A peer's loader: of the same samples, each read by `read`."""
    found = training_set(data)[0].samples
    return DataLoader(
        Files([found[pick] for pick in picks(found, reads)], read),
        BATCH,
        shuffle=True,
        num_workers=1,
        drop_last=True,
        persistent_workers=True,
        multiprocessing_context="fork",
    )


def timms(side: int, is_float: bool, data: Path, reads: int) -> Any:
    """timm's loader: with what normalises batches in the training process, or without it."""
    from timm.data import create_loader

    plain: Any = reference(None, data, reads).dataset
    loader = create_loader(
        plain,
        side,
        BATCH,
        is_training=True,
        scale=(0.25, 1),
        color_jitter=None,
        device=torch.device("cpu"),
    )
    plain.read = partial(classify, open_image, plain.transform)
    loader.loader.multiprocessing_context = "fork"
    return loader if is_float else loader.loader


def ours(
    side: int, data: Path, reads: int, has_simplejpeg: bool = True, workers: int = 1
) -> DataLoader:
    """The project's own loader, of `data`; pinned where there is a GPU."""
    import ddpkit
    from ddpkit.vision import images

    if not has_simplejpeg:
        images.simplejpeg = None
    dataset, classes, _ = training_set(data, "--image-size", side)
    part = Subset(dataset, picks(dataset, reads))
    return ddpkit.train_loader(part, BATCH, classes=classes, workers=workers)


def picks(samples: Any, reads: int) -> range:
    """Return the numbers of the samples that are read: not more than `reads` of them."""
    return range(len(samples))[:: -(-len(samples) // reads)]


def measure(
    build: Callable[[], DataLoader], reads: int, normalize: bool = False
) -> float:
    """Return CPU seconds per image of the loader that `build` returns."""
    loader = build()
    count = 0
    before = 0.0
    for epoch in range(1 + max(1, round(reads / len(loader) / BATCH))):
        if epoch == 1:
            count = 0
            before = cpu_seconds()
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        # ours as Run reads it, not as a loop by hand does, which gets normalised images
        batches = loader.raw(epoch) if hasattr(loader, "raw") else loader
        if normalize:
            batches = common.on_device(batches, torch.device("cpu"))
        for images, _ in batches:
            count += len(images)
    return (cpu_seconds() - before) / count


def cpu_seconds() -> float:
    """Return the CPU time so far of this process and its workers, which are idle just now."""
    # Linux' number for the CPU clock of another process, as clock_getcpuclockid(3)
    # makes it.
    workers = multiprocessing.active_children()
    running = sum(time.clock_gettime(~worker.pid << 3 | 2) for worker in workers)
    ended = os.times()
    return sum((time.process_time(), running, *ended[2:4]))  # theirs, user and system


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="JPEGs; default: drawn ones"
    )
    parser.add_argument("--images", type=int, default=300, help="to draw; default: 300")
    parser.add_argument(
        "--large", action="store_true", help="draw them of 1600 x 1200 pixels"
    )
    parser.add_argument(
        "--side", type=int, help="of the crops; default: the project's own"
    )
    parser.add_argument(
        "--reads", type=int, help=f"images for a figure; default: {READS}"
    )
    flags = parser.parse_args()
    # nothing here runs on a GPU; the processes are forked
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with common.generated(flags.task) as folder:
        from flags import parse_args

        has_timm = importlib.util.find_spec("timm")
        side = flags.side = flags.side or parse_args(["--data", "x"]).image_size
        reads = flags.reads = flags.reads or READS[flags.task]
        common.say_machine(flags)
        size = LARGE if flags.large else SIDES[flags.task]
        data = flags.data
        if not data:
            data = common.draw_photos(folder / "data", flags.task, flags.images, size)

        def case(
            build: Callable, place: Path = data, **options: Any
        ) -> Callable[[], float]:
            build = partial(build, place, reads)
            return partial(common.in_child, measure, build, reads, **options)

        def peer(
            read: Callable, *first: Any, place: Path = data
        ) -> Callable[[], float]:
            return case(partial(reference, partial(read, *first)), place)

        us = partial(ours, side)
        with_pillow = partial(ours, side, has_simplejpeg=False)
        of_float: common.Cases = {"ours": case(us, normalize=True)}
        of_float["ours, without simplejpeg"] = case(with_pillow, normalize=True)
        of_uint8: common.Cases = {
            "ours": case(us),
            "ours, without simplejpeg": case(with_pillow),
        }
        once: common.Cases = {}
        if flags.task == "classification":
            floats = v2_transforms(side, AS_FLOAT)
            bytes_ = v2_transforms(side, AS_UINT8)
            of_float = {
                "torchvision reference": peer(
                    classify, open_image, v1_transforms(side)
                ),
                "v2 on tensors": peer(classify, decode, floats),
                "timm": case(partial(timms, side, True)) if has_timm else None,
                **of_float,
            }
            of_uint8 = {
                "v2 on tensors": peer(classify, decode, bytes_),
                "timm": case(partial(timms, side, False)) if has_timm else None,
                **of_uint8,
            }
            small = shrink(data, folder / "small", SHORT_SIDE)
            once = {
                "v2 on tensors, JPEG files": peer(
                    classify, decode, bytes_, place=small
                ),
                "ours, JPEG files": case(us, small),
                "v2 on tensors, .npy files": peer(
                    classify, load_raw, bytes_, place=small
                ),
            }
        else:
            of_float = {
                "torchvision reference": peer(segment, open_image, AS_FLOAT, side),
                "v2 on tensors": peer(segment, decode, AS_FLOAT, side),
                **of_float,
            }
            of_uint8 = {
                "v2 on tensors": peer(segment, decode, AS_UINT8, side),
                **of_uint8,
            }
        tables = {
            "float32, normalised": of_float,
            "uint8": of_uint8,
            "uint8, made smaller or decoded before": once,
        }
        cases = {
            f"{kind}: {name}": own[name] for kind, own in tables.items() for name in own
        }
        figures = common.interleave(cases, flags.repeats, flags.seconds)
    for kind, own in tables.items():
        if own:
            print(f"\n{kind}:", end="")
            found = {name: figures[f"{kind}: {name}"] for name in own}
            common.table(found, "ms of CPU per image", next(iter(own)), scale=1000)


if __name__ == "__main__":
    main()
