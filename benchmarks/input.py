"""Input pipelines: CPU time for an image, from its file to a batch in the training process.

A whole DataLoader with one worker and batches of 32. What counts is the time on a CPU of both
processes, after a first pass that does not: starting, listing and importing are not in it. All
pipelines crop, resize and flip in the same ranges, those of the project's train_transform.
Linux only.

Classification. The baseline is torchvision's reference recipe (references/classification in its
repository): PIL, RandomResizedCrop, RandomHorizontalFlip, ToTensor, Normalize; float32 comes out.
Segmentation. The baseline is torchvision's reference recipe (references/segmentation): the whole
image and mask resized by PIL, flipped, padded and cropped, then converted and normalised; float32
and int64 come out. The reference draws the size uniformly from 0.5 to 2 times a base size; here it
is from 2**-0.5 to 2**0.5 times the image's own, the range of the project, so that images are
enlarged as much on either side.

The project's JPEGs are decoded by simplejpeg, or by Pillow where it is missing; "prepared" is after
`ddpkit prepare`, which is not in the time. The project normalises on the training device: that is
not in its rows, but in the one that says so, with one thread. "decoding alone" hands nothing over:
a limit for what decodes whole images, by torchvision's decoder and by simplejpeg.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import common
import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision import io, transforms
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import functional as F

BATCH = 32
NORMALIZE = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
READS = {"classification": 2400, "segmentation": 480}
SIDES = {"classification": (500, 375), "segmentation": (960, 720)}
LARGE = (1600, 1200)
RGB = io.ImageReadMode.RGB


class Files(Dataset):
    """Samples, (path, class number) or (path, path of the mask), each read by `read`."""

    def __init__(self, samples: Sequence[tuple], read: Callable[..., tuple]) -> None:
        self.samples = samples
        self.read = read

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple:
        return self.read(*self.samples[index])


def classify_by(transform: Callable) -> Callable:
    def read(path: str, label: int) -> tuple[Tensor, int]:
        with Image.open(path) as image:
            return transform(image.convert("RGB")), label

    return read


def v1_transforms(side: int) -> Callable:
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(side, scale=(0.25, 1)),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(**NORMALIZE),
        ]
    )


def v2_transforms(side: int) -> Callable:
    return v2.Compose(
        [
            v2.RandomResizedCrop(side, scale=(0.25, 1)),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float, scale=True),
            v2.Normalize(**NORMALIZE),
        ]
    )


def segment(side: int, path: str, mask_path: str) -> tuple[Tensor, Tensor]:
    """Torchvision's reference recipe for an image and its mask."""
    with Image.open(path) as file, Image.open(mask_path) as mask_file:
        image, mask = file.convert("RGB"), mask_file.copy()
    low, high = (round(min(image.size) * 2**power) for power in (-0.5, 0.5))
    length = int(torch.randint(low, high + 1, ()))
    image = F.resize(image, length, antialias=True)
    mask = F.resize(mask, length, InterpolationMode.NEAREST)
    if torch.rand(()) < 0.5:
        image, mask = F.hflip(image), F.hflip(mask)
    if min(image.size) < side:
        edges = [0, 0, max(0, side - image.width), max(0, side - image.height)]
        image, mask = F.pad(image, edges, fill=0), F.pad(mask, edges, fill=common.VOID)
    box = transforms.RandomCrop.get_params(image, (side, side))
    image, mask = F.crop(image, *box), F.crop(mask, *box)
    tensor = F.convert_image_dtype(F.pil_to_tensor(image), torch.float)
    return F.normalize(tensor, **NORMALIZE), torch.as_tensor(np.array(mask), dtype=torch.int64)


def decode(path: str, target: Any, simple: bool = False) -> tuple[int, int]:
    """Decode an image, and its mask if it has one, and throw both away."""
    if simple:
        simplejpeg.decode_jpeg(Path(path).read_bytes())
    else:
        io.decode_jpeg(io.read_file(path), RGB)
    if isinstance(target, str):
        io.decode_png(io.read_file(target))
    return 0, 0


def training_set(data: Path, *words: object) -> tuple[Any, Sequence[str], Any]:
    """Return the project's data set of `data`, its classes, and the device."""
    import distributed
    from dataset import build_datasets
    from flags import parse_args

    device = distributed.setup(0)
    torch.set_num_threads(1)
    dataset, _, classes = build_datasets(parse_args(["--data", str(data), *map(str, words)]))
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


def ours(
    side: int, data: Path, reads: int, has_simplejpeg: bool = True, workers: int = 1
) -> DataLoader:
    """The project's own loader, of `data` as it is or prepared; pinned where there is a GPU."""
    import ddpkit
    from ddpkit.data import images

    if not has_simplejpeg:
        images.simplejpeg = None
    dataset, classes, device = training_set(data, "--image-size", side)
    part = Subset(dataset, picks(dataset, reads))
    return DataLoader(
        ddpkit.Seeded(part, classes, seed=0),
        BATCH,
        sampler=ddpkit.TrainSampler(part, BATCH, accumulate=1, seed=0),
        collate_fn=ddpkit.Collate(),
        **ddpkit.workers(workers, device),
    )


def picks(samples: Any, reads: int) -> range:
    """Return the numbers of the samples that are read: not more than `reads` of them."""
    return range(len(samples))[:: -(-len(samples) // reads)]


def measure(build: Callable[[], DataLoader], reads: int, normalize: bool = False) -> float:
    """Return CPU seconds per image of the loader that `build` returns."""
    loader = build()
    count, before = 0, 0.0
    for epoch in range(1 + max(1, round(reads / len(loader) / BATCH))):
        if epoch == 1:
            count, before = 0, cpu_seconds()
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for images, _ in common.on_device(loader, torch.device("cpu")) if normalize else loader:
            count += len(images)
    return (cpu_seconds() - before) / count


def cpu_seconds() -> float:
    """Return the CPU time so far of this process and its worker, which has none to do just now."""
    (worker,) = multiprocessing.active_children()
    # Linux' number for the CPU clock of another process, as clock_getcpuclockid(3) makes it.
    return time.process_time() + time.clock_gettime(~worker.pid << 3 | 2)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="JPEGs; default: drawn ones")
    parser.add_argument("--images", type=int, default=300, help="to draw; default: 300")
    parser.add_argument("--large", action="store_true", help="draw them of 1600 x 1200 pixels")
    parser.add_argument("--side", type=int, help="of the crops; default: the project's own")
    parser.add_argument("--reads", type=int, help=f"images for a figure; default: {READS}")
    flags = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing here runs on a GPU; the processes are forked
    with common.generated(flags.task) as folder:
        import dataset
        from flags import parse_args

        side = flags.side = flags.side or parse_args(["--data", "x"]).image_size
        reads = flags.reads = flags.reads or READS[flags.task]
        common.say_machine(flags)
        size = LARGE if flags.large else SIDES[flags.task]
        data = flags.data or common.draw_photos(folder / "data", flags.task, flags.images, size)
        own_size = common.prepare(folder / "project", data, folder / "own", "--short-side", "0")

        def case(build: Callable, place: Path = data, **options: Any) -> Callable[[], float]:
            return partial(common.in_child, measure, partial(build, place, reads), reads, **options)

        us, with_pillow = partial(ours, side), partial(ours, side, has_simplejpeg=False)
        if flags.task == "classification":
            baseline = "torchvision reference, v1"
            cases = {
                baseline: case(partial(reference, classify_by(v1_transforms(side)))),
                "torchvision reference, v2": case(
                    partial(reference, classify_by(v2_transforms(side)))
                ),
            }
            small = common.prepare(folder / "project", data, folder / "small")
            stored = {f"ours, prepared, short side {dataset.SHORT_SIDE}": small}
        else:
            baseline, stored = "torchvision reference", {}
            cases = {baseline: case(partial(reference, partial(segment, side)))}
        cases |= {
            "decoding alone, torchvision": case(partial(reference, decode)),
            "decoding alone, simplejpeg": case(partial(reference, partial(decode, simple=True))),
            "ours, JPEG files": case(us),
            "the same, normalised on the CPU": case(us, normalize=True),
            "ours, without simplejpeg": case(with_pillow),
        }
        stored["ours, prepared, own size"] = own_size
        cases |= {name: case(us, place) for name, place in stored.items()}
        figures = common.interleave(cases, flags.repeats)
        common.table(figures, "ms of CPU per image", baseline, scale=1000)


if __name__ == "__main__":
    main()
